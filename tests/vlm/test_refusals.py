"""What a user may write wrong: overlays, arguments, tokenizers. Each is refused by name, never by a bare traceback."""

import contextlib
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.vlm.test_tiling_cases import HF, refused
from visionpos import config
from visionpos.errors import ConfigError, PositionError
from visionpos.vlm import Image, Special, Text, Video, family, family_names, loading

PHOTO = Image((400, 1000))


def planned(name: str, overlay: Any, variant: str | None = None) -> Any:
    """Load, plan and write, whichever comes to refuse."""
    fam = family(name, variant=variant, overlay=overlay)
    return fam.plan(PHOTO), fam.stream([PHOTO])


def step(kind: str, **fields: Any) -> dict[str, Any]:
    return {"views": {"global": {"size": [{"kind": kind, **fields}]}}}


# A number that no rule can have, in every part of the grammar


@pytest.mark.parametrize("overlay", [
    step("canvas", multiple=0), step("canvas", multiple=-4), step("canvas", box=0), step("stretch", box=-5),
    step("stretch", box=[14, 0]), step("fit", box=0), step("fit", box=14, at_least=-4),
    step("enlarge", side_at_least=0), step("multiple", of=14, thin_at_most=-1),
    step("refuse", ratio_over=0), step("refuse", side_under=-1),
    step("pixels", multiple=14, min_px=1, max_px=9999, frames=0), step("pixels", multiple=14, min_px=9, max_px=8),
    step("area", px=0), step("area", px=-1, arithmetic="float64"), step("area", px=9, unit=0),
    step("edges", short_at_least=5, long_at_most=9, multiple=16, divide=0),
    step("edges", short_at_least=5, long_at_most=9, multiple=0), step("patches", patch=0, at_most=4),
    step("patches", patch=16, at_most=0), step("patches", patch=16, at_most=4, scale_at_most=0),
    step("patch_budget", patch=0, at_most=4, side_at_most=3),
    step("patch_budget", patch=14, at_most=-4, side_at_most=3),
    step("aligned_pixels", multiple=0, min_px=1, max_px=2), step("aligned_pixels", multiple=14, min_px=3, max_px=2),
    step("aligned_pixels", multiple=14, min_px=1, max_px=2000, frame_multiple=0),
    step("row_budget", multiple=0, max_px=4, frame_px=3), step("row_budget", multiple=16, max_px=-4, frame_px=3),
])  # fmt: skip
def test_error_steps_without_sense(overlay: Any) -> None:
    kind = overlay["views"]["global"]["size"][0]["kind"]
    with pytest.raises(ConfigError, match=rf"pixtral.yaml.*{kind}.*required"):
        planned("pixtral", overlay)


@pytest.mark.parametrize(("name", "overlay", "message"), [
    ("internvl", {"views": {"tile": {"unit_px": 0}}}, r"unit_px is 0"),
    ("molmo", {"views": {"tile": {"unit_px": 112}}}, r"unit_px is 112 and margin_px 112"),
    ("internvl", {"views": {"pick": {"from": {"tiles": [0, 4]}}}}, r"tiles \(0, 4\); at least 1"),
    ("internvl", {"views": {"pick": {"from": {"tiles": None, "list": [[0, 1]]}}}}, r"list .*at least 1"),
    ("internvl", {"views": {"pick": {"from": {"side_at_most": 0}}}}, r"side_at_most 0; at least 1"),
    ("minicpm_v2", {"views": {"pick": {"from": {"near_area": 0}}}}, r"near_area 0; at least 2"),
    ("llava_onevision", {"views": {"shrink": {"tiles": 0}}}, r"shrink has tiles 0; at least 1"),
    ("llava_onevision", {"views": {"shrink": {"over": -1}}}, r"shrink has over -1"),
    ("lfm2_vl", {"views": {"when": {"rounded_cells_over": {"multiple": 0}}}}, r"multiple 0; at least 1"),
    ("qwen2_vl", {"video": {"group": 0}}, r"video has group 0; at least 1"),
    ("qwen2_vl", {"video": {"sample": {"multiple": 0}}}, r"sample has multiple 0"),
    ("qwen2_vl", {"video": {"sample": {"fps": -2}}}, r"sample has fps -2"),
    ("qwen2_vl", {"video": {"sample": {"fps": float("nan")}}}, r"fps is nan"),
    ("qwen2_vl", {"video": {"sample": {"at_most": 1}}}, r"at_most 1"),
    # Types: no text, no truth and no fraction is a whole number.
    ("internvl", {"grid": {"merge": "2"}}, r"grid.patch and grid.merge is none|merge = '2'"),
    ("internvl", {"grid": {"merge": True}}, r"merge = True"),
    ("internvl", {"grid": {"patch": 14.5}}, r"patch = 14.5"),
    ("internvl", {"views": {"tile": {"px": "448"}}}, r"'tile' stands for a number, and views.tile.px is none"),
    ("internvl", {"views": 3}, r"'tile' stands for a number"),
    ("pixtral", step("fit", box="1024"), r"box"),
    ("pixtral", step("fit", box=1024, upscale="no"), r"upscale = 'no'"),
    ("pixtral", {"views": {"global": {"size": [{"kind": ["fit"]}]}}}, r"kind is \['fit'\]"),
    # The order of the stream writes every view, once.
    ("pixtral", {"stream": {"order": []}}, r"stream.order is \[\]"),
    ("pixtral", {"stream": {"order": ["global", "global"]}}, r"each once"),
    ("internvl", {"stream": {"order": ["global"]}}, r"views has tiles, whose features would have no token"),
    ("internvl", {"stream": {"order": ["tiles"]}}, r"views has global, whose features"),
    # Markers
    ("pixtral", {"stream": {"image": {"after": ""}}}, r"after is ''; the name of a token"),
    ("pixtral", {"cell": ""}, r"cell is ''"),
    ("pixtral", {"stream": {"image": {"after": "{"}}}, r"cannot be read"),
    ("pixtral", {"stream": {"image": {"after": "{rows!r}"}}}, r"writes rows as 'r'"),
    ("pixtral", {"stream": {"image": {"after": "{rows:zz}"}}}, r"writes rows as 'zz'"),
    ("pixtral", {"stream": {"image": {"after": "{rows:{cols}}"}}}, r"writes rows as '{cols}'"),
    ("pixtral", {"stream": {"image": {"after": "{rows:999999999}"}}}, r"its width under 100"),
    # No mapping where one must be
    ("internvl", [1], r"overlay is \[1\]; a mapping"),
    ("internvl", "grid", r"overlay is 'grid'; a mapping"),
    ("internvl", {"untiled": 5}, r"untiled is 5; a mapping"),
    ("internvl", {"variants": 3}, r"variants is 3; a mapping"),
    ("internvl", {"dialects": {"mine": {}}}, r"unknown key dialects"),
])  # fmt: skip
def test_error_overlays_name_the_key(name: str, overlay: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        planned(name, overlay)


@pytest.mark.parametrize("strips", [[0, 4], [4, 2]])
def test_error_strips(strips: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"strips .*(at least 1|Swap)"):
        planned("gemma3", {"views": {"pick": {"from": {"strips": strips}}}}, "pan_and_scan")


def test_an_overlay_that_replaces_keeps_nothing() -> None:
    """`replace: true` means the same at the top of an overlay as inside it: nothing of the family is left."""
    whole = {
        "replace": True,
        "views": {"global": {"size": [{"kind": "stretch", "box": 28}]}},
        "grid": {"patch": 14},
        "cell": "<image>",
        "stream": {"order": ["global"]},
    }
    fam = family("internvl", overlay=whole)
    assert (fam.spec.views.pick, fam.spec.rule, fam.spec.pixels) == (None, None, None)
    assert fam.stream([PHOTO]).length == fam.plan(PHOTO).cells == 4
    with pytest.raises(ConfigError, match=r"grid"):
        family("internvl", overlay={"replace": True, "views": whole["views"]})
    merged = family("internvl", overlay={"replace": False, "grid": {"merge": 1}})
    assert merged.spec.views.pick is not None


@pytest.mark.parametrize("overlay", [{"replace": "yes"}, {"grid": {"replace": 1, "patch": 14}}])
def test_error_replace_of_another_kind(overlay: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"replace ('yes'|1); true"):
        family("internvl", overlay=overlay)


def test_error_an_overlay_that_holds_itself() -> None:
    overlay: dict[str, Any] = {}
    overlay["views"] = overlay
    with pytest.raises(ConfigError, match=r"nests too deeply"):
        family("pixtral", overlay=overlay)


@pytest.mark.parametrize(("name", "dialect", "variant"), [
    ([], None, None), (5, None, None), ("pixtral", [1], None), ("pixtral", 5, None), ("gemma4", None, 70),
    ("gemma4", None, []),
])  # fmt: skip
def test_error_names_of_any_type(name: Any, dialect: Any, variant: Any) -> None:
    with pytest.raises(ConfigError, match=r"unknown"):
        family(name, dialect, variant)


# Arguments


@pytest.mark.parametrize(("make", "message"), [
    (lambda: Image((True, 5)), r"size_hw is \(True, 5\)"),
    (lambda: Image((10**400, 5)), r"at most 2147483647"),
    (lambda: Image((2**31, 5)), r"at most 2147483647"),
    (lambda: Video((5, 5), frames=2.5), r"frames is 2.5"),
    (lambda: Video((5, 5), frames="2"), r"frames is '2'"),
    (lambda: Video((5, 5), frames=True), r"frames is True"),
    (lambda: Video((5, 5), seconds=3), r"seconds is 3; the time of every"),
    (lambda: Video((5, 5), seconds="ab"), r"seconds is 'ab'"),
    (lambda: Video((5, 5), frames=3, sampled_fps="a"), r"sampled_fps is 'a'"),
    (lambda: Video((5, 5), frames=3, sampled_fps=10**400), r"sampled_fps is 1000"),
    (lambda: Text(5), r"text is 5; characters"),
    (lambda: Text(token_ids=["a"]), r"token_ids is \['a'\]"),
    (lambda: Text(token_ids=[-1]), r"token_ids is \[-1\]"),
    (lambda: Text(tokens=2.5), r"tokens is 2.5"),
    (lambda: Text(tokens="2"), r"tokens is '2'"),
    (lambda: Special(5), r"name is 5"),
    (lambda: Special(""), r"name is ''"),
    (lambda: family("qwen2_vl").plan("a"), r"qwen2_vl: media is 'a'.*an Image or a Video"),
    (lambda: family("qwen2_vl").plan((4, 5)), r"media is \(4, 5\)"),
    (lambda: family("llava_onevision").plan(PHOTO, images=0), r"images 0"),
    (lambda: family("llava_onevision").plan(PHOTO, images="a"), r"images 'a'"),
    (lambda: family("qwen2_vl").stream(PHOTO), r"segments is Image"),
    (lambda: family("qwen2_vl").stream(None), r"segments is None"),
    (lambda: family("qwen2_vl").frame_count("30", 30), r"total_frames is '30'"),
    (lambda: family("qwen2_vl").frame_count(30.5, 30), r"total_frames is 30.5"),
    (lambda: family("qwen2_vl").frame_count(30, "30"), r"source_fps '30'"),
    (lambda: family("pixtral").frame_count(30, 30), r"^pixtral takes no video"),
    (lambda: family("llava_onevision").frame_count(30, 30), r"no rule for sampling"),
])  # fmt: skip
def test_error_arguments(make: Any, message: str) -> None:
    with pytest.raises(PositionError, match=message):
        make()


@pytest.mark.parametrize(("name", "size_hw"), [("glm5_next", (1, 1000000)), ("idefics2", (1, 1))])
def test_error_of_a_late_step_names_the_size_given(name: str, size_hw: tuple[int, int]) -> None:
    """A step deep in the rule sees another size than the user gave."""
    variant = "split" if name == "idefics2" else None
    with pytest.raises(PositionError) as refusal:
        family(name, variant=variant).plan(Image(size_hw))
    assert str(size_hw) in str(refusal.value)
    assert name in str(refusal.value)


@pytest.mark.parametrize("name", family_names())
def test_sizes_up_to_the_longest_side_are_planned_or_refused(name: str) -> None:
    longest = 2**31 - 1
    for size_hw in ((longest, longest), (1, longest), (longest, 3), (10**6, 10**6)):
        refusal, plan = refused(family(name), size_hw)
        assert str(size_hw) in refusal if plan is None else plan.cells


# Every family in every variant and dialect, on any size


SPOKEN = [
    (name, dialect, variant)
    for name in family_names()
    for variant in (None, *family(name).variants)
    for dialect in family(name, variant=variant).dialects
]
SIDES = st.one_of(
    st.integers(1, 2000), st.integers(1, 40), st.sampled_from([335, 336, 337, 448, 449, 896, 1024])
)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(SPOKEN), st.lists(st.tuples(SIDES, SIDES), min_size=1, max_size=3))
def test_invariant_masks_spans_and_counts_are_one(
    spoken: tuple[str, str, str | None], sizes: list[tuple[int, int]]
) -> None:
    """What is a feature is an embedding; spans, rows and masks count the cells of the plans, image by image."""
    fam = family(*spoken)
    said = [(size, *refused(fam, size, len(sizes))) for size in sizes]
    plans = [plan for _, _, plan in said if plan is not None]
    sizes = [size for size, _, plan in said if plan is not None]
    assert all(str(size) in refusal for size, refusal, plan in said if plan is None)
    if len(plans) < len(said):  # fewer images are another prompt
        return
    stream = fam.stream([Text("a b"), *map(Image, sizes)])
    feature, embedding = stream.is_feature, stream.is_embedding
    assert not (feature & ~embedding).any()
    assert torch.equal(embedding, stream.modality > 0)
    assert len(stream) == len(feature) == sum(run.count for run in stream.runs)
    spans = [span for span in stream.spans if span.kind == "image"]
    parts = [(number + 1, part) for number, plan in enumerate(plans) for part in plan.parts]
    assert [(s.segment, s.grid, s.node) for s in spans] == [(n, p.tokens, p.node) for n, p in parts]
    assert all(int(feature[s.start : s.stop].sum()) == s.grid.size for s in spans if s.grid)
    assert sum(row.stop - row.start for row in stream.row_spans) == int(feature.sum())
    assert int(feature.sum()) == sum(plan.cells for plan in plans)
    for plan, (height, width) in zip(plans, sizes, strict=True):
        rects = plan.token_rects()
        assert rects.shape == (plan.cells, 4)
        assert float(rects.min()) >= 0
        assert bool((rects[:, 2] <= height).all() and (rects[:, 3] <= width).all())
        assert bool(((rects[:, 2:] - rects[:, :2]).prod(-1) > 0).any())


def test_whole_view_of_what_was_resized() -> None:
    """`of: resized` starts from what views.size made of the picture, as the pixels do."""
    overlay = {"views": {"global": {"size": [{"kind": "fit", "box": 2000, "upscale": False}]}}}
    view = family("idefics3", overlay=overlay).plan(PHOTO).views[-1]
    assert view.size_hw == (728, 1456)
    assert view.source_yxyx == (0, 0, 400, 1000)
    assert family("ovis2", **HF).plan(PHOTO).views[0].size_hw == (448, 448)


# Tokenizers


LINES = {"<image>": 3, "<fake_token_around_image>": 4, "<global-img>": 5} | {
    f"<row_1_col_{col}>": 10 + col for col in range(1, 5)
}


def test_a_mapping_never_loses_a_line_end() -> None:
    """Text of nothing but blanks was no token at all for a mapping, and one without a tokenizer."""
    strip = Image((20, 3000))
    fam = family("idefics3")
    with pytest.raises(PositionError, match=r"mapping without '\\n'"):
        fam.stream([strip], LINES)
    assert len(fam.stream([strip], LINES | {"\n": 6})) == len(fam.stream([strip])) + 1
    whole = fam.stream([strip], LINES | {"\n": 6, "\n\n": 7})
    assert len(whole) == len(fam.stream([strip]))
    assert whole.token_ids(LINES).tolist().count(7) == 1


@pytest.mark.parametrize("tokenizer", [5, "str", [1], {"a": "x"}, lambda _: "ab", lambda _: None])
def test_error_tokenizers(tokenizer: Any) -> None:
    with pytest.raises(PositionError, match=r"tokenizer (is|gives)"):
        family("pixtral").stream([Text("a")], tokenizer)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_real_tokenizer_of_transformers_and_of_tokenizers(*, wrapped: bool) -> None:
    """A marker that it does not know is refused, not given the id of the unknown token."""
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "a": 1, "cat": 2}
    bare = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    bare.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    bare.add_special_tokens(["[IMG]", "[IMG_BREAK]", "<image>", "</image>"])

    def made() -> Any:
        return (
            PreTrainedTokenizerFast(tokenizer_object=bare, unk_token="<unk>") if wrapped else bare
        )

    stream = family("pixtral").stream([Text("a cat"), Image((20, 20))], made())
    with pytest.raises(PositionError, match=r"token '\[IMG_END\]' is 0 tokens"):
        stream.token_ids(made())
    bare.add_special_tokens(["[IMG_END]"])
    assert stream.token_ids(made()).tolist() == [1, 2, 3, 3, 4, 3, 3, 7]
    # MiniCPM's placeholder is the unknown token itself.
    ids = family("minicpm_v2").stream([Text("a dog"), Image((9, 9))], made()).token_ids(made())
    assert ids.tolist() == [1, 0, 5, *[0] * 64, 6]


def test_stale_state_loading_changes_nothing_that_is_kept() -> None:
    """Files are parsed once; overlays, variants and dialects of one load leave no trace in the next."""
    before = {name: family(name) for name in family_names()}
    for name, dialect, variant in SPOKEN:
        overlay = {"grid": {"patch": 1}, "rule": None, "stream": {"image": {"after": ["x"]}}}
        with contextlib.suppress(PositionError):
            family(name, dialect, variant, overlay)
    for name, text in ((name, file.read_text()) for name, file in config.shipped("vlm").items()):
        kept = loading._parsed(text, f"configs/vlm/{name}.yaml")
        assert kept == config.read_yaml(text)
        assert family(name) == before[name]
