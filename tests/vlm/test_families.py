"""Families: what the data says, how it is overlaid and refused, and the rotation at the end of the line."""

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tolerances import assert_close_to
from tests.vlm.family_table import README, in_readme, rows
from tests.vlm.prompts import draw
from visionpos.errors import ConfigError, PositionError
from visionpos.geometry import ladder, rotate, section_axes
from visionpos.vlm import Image, Special, Text, Video, family, family_names

FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]
ROOT = Path(__file__).resolve().parents[2]


def test_every_shipped_family_loads_in_every_dialect() -> None:
    assert set(FAMILIES) <= set(family_names())
    for name in family_names():
        for dialect in family(name).dialects:
            assert family(name, dialect=dialect).plan(Image((97, 131))).cells


def test_readme_lists_every_family() -> None:
    """`python -m tests.vlm.family_table --write` rewrites the table from the families' files."""
    written = in_readme(README.read_text(encoding="utf-8")).strip().splitlines()[2:]
    assert [row.split("`")[1] for row in written] == list(family_names())
    assert written == rows()


def test_the_default_dialect_wrote_the_weights() -> None:
    fam = family("qwen2_5_vl")
    assert (fam.dialect, fam.variant) == ("vendor", None)
    assert fam == family("qwen2_5_vl", dialect="vendor")
    assert fam.dialects == ("vendor", "qwen_vl_utils", "transformers")
    assert fam.spec.rule.next == "max"
    assert family("qwen2_5_vl", dialect="transformers").spec.rule.next == "extent"


def test_overlay_is_laid_on_last() -> None:
    fam = family(
        "qwen2_5_vl", overlay={"rule": {"frame_step": {"per_second": 4}}, "grid": {"patch": 16}}
    )
    assert fam.spec.rule.frame_step.per_second == 4  # type: ignore[union-attr]
    assert fam.spec.rule.axes == ("time", "row", "col")
    assert fam.plan(Image((224, 224))).views[0].size_hw == (224, 224)  # factor follows the patch
    assert fam.plan(Image((64, 96))).views[0].size_hw == (64, 96)
    bare = family("qwen2_vl", overlay={"video": None, "language": None})
    with pytest.raises(PositionError, match=r"qwen2_vl takes no video.*Images"):
        bare.plan(Video((64, 64), frames=2))
    with pytest.raises(PositionError, match=r"no rotary layout"):
        bare.rotation(torch.zeros(3, 2))


@pytest.mark.parametrize(("arguments", "message"), [
    ({"name": "qwen9"}, r"family 'qwen9' is unknown\. Did you mean qwen.* It must be one of aria, .*more"),
    ({"name": "qwen2_vl", "dialect": "hf"}, r"dialect 'hf' of qwen2_vl is unknown\..* of vendor, qwen_vl_utils, tr"),
    ({"name": "qwen2_vl", "variant": "7b"}, r"variant '7b' of qwen2_vl is unknown\. qwen2_vl has none"),
    ({"name": "qwen2_vl", "overlay": {"rul": {}}}, r"qwen2_vl.yaml: unknown key rul"),
    ({"name": "qwen2_vl", "overlay": {"rule": {"next": "maximum"}}}, r"rule.next = 'maximum'"),
    ({"name": "qwen2_vl", "overlay": {"grid": {"merge_covr": "ceil"}}}, r"unknown key grid.merge_covr"),
    ({"name": "qwen2_vl", "overlay": {"grid": {"patch": 0}}}, r"multiple 0, min_px 3136.*positive numbers"),
    ({"name": "qwen2_vl", "overlay": {"grid": {"patch": 0}, "video": None, "views": {"global": {"size": []}}}},
     r"patch is 0 and merge 2.*at least 1"),
    ({"name": "qwen2_vl", "overlay": {"views": {"tile": {"px": 448}}}},
     r"views has pick None and tile TileSpec.*both or neither.*Add"),
    ({"name": "qwen2_vl", "overlay": {"cell": None}}, r"key cell is missing"),
    ({"name": "qwen2_vl", "overlay": {"views": {"global": {"size": [{"kind": "fitt"}]}}}},
     r"kind is 'fitt'.*refuse, enlarge, pixels, fit"),
    ({"name": "qwen2_vl", "overlay": {"views": {"global": {"size": [{"kind": "refuse", "ratio": 3}]}}}},
     r"step 'refuse': unknown key ratio"),
    ({"name": "qwen2_vl", "overlay": {"views": {"global": {"size": [
        {"kind": "pixels", "multiple": "fctor", "min_px": 1, "max_px": 2}]}}}}, r"multiple = 'fctor'"),
    ({"name": "qwen3_vl", "overlay": {"video": {"stream": {"frame": {"before": {"text": "{second}"}}}}}},
     r"'{second}' names {second}; it may name row, .*seconds"),
])  # fmt: skip
def test_error_names_key_and_what_is_allowed(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        family(**arguments)


def test_a_family_that_is_like_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from visionpos.vlm import loading

    for name, like in (("one", "two"), ("two", "one")):
        (tmp_path / f"{name}.yaml").write_text(f"like: {like}\n")
    files = {name: tmp_path / f"{name}.yaml" for name in ("one", "two")}
    monkeypatch.setattr(loading.config, "shipped", lambda _: files)
    with pytest.raises(ConfigError, match=r"'one' is like itself \(one -> two\)"):
        family("one")


def test_variant_brings_its_dialects(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """like -> variant -> dialect: a dialect inside a variant exists only there."""
    from visionpos.vlm import loading

    text = (ROOT / "configs/vlm/qwen2_vl.yaml").read_text()
    base, child = tmp_path / "base.yaml", tmp_path / "child.yaml"
    base.write_text(text)
    child.write_text(
        "like: base\nvariants:\n  big:\n    grid: {patch: 16}\n    dialects: {odd: {rule: {pad_id: 7}}}\n"
    )
    monkeypatch.setattr(loading.config, "shipped", lambda _: {"base": base, "child": child})
    assert "odd" not in family("child").dialects
    big = family("child", variant="big", dialect="odd")
    assert (big.spec.grid.patch, big.spec.rule.pad_id, big.variants) == (16, 7, ("big",))
    assert big.spec.views.global_.size[1].multiple == 32  # type: ignore[union-attr]


# facts/mrope.md 4: axis that drives each pair
THREES = [axis for _ in range(20) for axis in (0, 1, 2)]
AXES = {
    "qwen2_vl": [0] * 16 + [1] * 24 + [2] * 24,
    "qwen2_5_vl": [0] * 16 + [1] * 24 + [2] * 24,
    "qwen3_vl": THREES + [0] * 4,
}


@pytest.mark.parametrize("name", FAMILIES)
def test_golden_axis_of_every_pair(name: str) -> None:
    language = family(name).spec.language
    assert section_axes(language.sections, order=language.order).tolist() == AXES[name]
    freqs = family(name).frequencies
    assert freqs.shape == (3, 64)
    assert freqs.argmax(0).tolist() == AXES[name]
    assert (freqs > 0).sum(0).unique().tolist() == [1]
    assert_close_to(freqs.sum(0), ladder(64, theta=language.theta), kind="exact")


def test_error_saturated_sections() -> None:
    """[16, 24, 24] interleaved would really give 22, 21, 21 (facts/mrope.md 0.8)."""
    with pytest.raises(PositionError, match=r"\(16, 24, 24\).*\(22, 21, 21\)"):
        family("qwen2_vl", overlay={"language": {"order": "interleaved"}})
    with pytest.raises(PositionError, match=r"sum to 63 and rotary_dim / 2 is 64"):
        family("qwen2_vl", overlay={"language": {"sections": [16, 24, 23]}})


@pytest.mark.parametrize("name", FAMILIES)
def test_reference_rotation_in_float64(name: str) -> None:
    """cos and sin of position * theta ** (-i / 64) of the axis that drives pair i, pair by pair."""
    batch = draw(11, per_frame=name == "qwen3_vl")
    seconds = [float(step) for step in batch.seconds]
    ids = family(name).position_ids_from_tokens(
        batch.input_ids, batch.types, batch.grids("images"), batch.grids("videos"), batch.mask, seconds
    ).ids  # fmt: skip
    theta = family(name).spec.language.theta
    got = family(name).rotation(ids, accuracy="exact")
    assert got.cos.shape == (ids.shape[1], 1, ids.shape[2], 64)
    assert got.cos.dtype == torch.float32
    for pair in (0, 1, 17, 40, 61, 63):
        angle = ids[AXES[name][pair]].double() * theta ** (-pair / 64)
        assert_close_to(got.cos[:, 0, :, pair], angle.cos(), kind="table")
        assert_close_to(got.sin[:, 0, :, pair], angle.sin(), kind="table")


def test_rotation_is_exact_beyond_2_17_by_itself() -> None:
    fam, far = family("qwen2_vl"), torch.full((3, 1), 2**17 + 1)
    near = torch.full((3, 1), 2**17)
    assert torch.equal(fam.rotation(far).cos, fam.rotation(far, accuracy="exact").cos)
    assert not torch.equal(fam.rotation(far).cos, fam.rotation(far, accuracy="reference").cos)
    assert torch.equal(fam.rotation(near).cos, fam.rotation(near, accuracy="reference").cos)
    with pytest.raises(PositionError, match=r"accuracy is 'high'.*'reference', 'exact'"):
        fam.rotation(near, accuracy="high")  # type: ignore[arg-type]
    with pytest.raises(PositionError, match=r"shape \(2, 5\).*\[3, n\] or \[3, b, n\]"):
        fam.rotation(torch.zeros(2, 5))
    assert fam.rotation(torch.zeros(3, 0, dtype=torch.int64)).cos.shape == (0, 64)


@given(st.tuples(*[st.integers(-200, 200)] * 3), st.sampled_from(FAMILIES))
def test_invariant_a_shift_of_any_axis_changes_no_score(
    shift: tuple[int, int, int], name: str
) -> None:
    """q.k after rotation sees differences alone, on each axis by itself (facts/mrope.md 0.2 fails this)."""
    ids = torch.tensor([[0, 1, 4, 9], [0, 3, 3, 9], [2, 0, 5, 9]])
    q, k = torch.randn(2, 1, 2, 4, 128, dtype=torch.float64)
    scores = []
    for moved in (ids, ids + torch.tensor(shift)[:, None]):
        rotation = family(name).rotation(moved, accuracy="exact")
        turned_q, turned_k = rotate(q, k, rotation)
        scores.append(turned_q @ turned_k.mT)
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_invariant_text_turns_as_in_one_dimension(name: str) -> None:
    fam = family(name)
    rotation = fam.rotation(fam.position_ids(fam.stream([Text(tokens=9)])).ids)
    angle = torch.arange(9.0)[:, None] * ladder(64, theta=fam.spec.language.theta)
    assert_close_to(rotation.cos, angle.cos(), kind="exact")


@pytest.mark.parametrize("name", FAMILIES)
def test_rotation_broadcasts_over_heads(name: str) -> None:
    ids = torch.randint(0, 99, (3, 2, 7))
    rotation = family(name).rotation(ids)
    q, k = torch.randn(2, 4, 7, 128), torch.randn(2, 2, 7, 128)
    turned, _ = rotate(q, k, rotation)
    assert turned.shape == q.shape
    alone, _ = rotate(q[1:], k[1:], family(name).rotation(ids[:, 1]))
    assert_close_to(turned[1:], alone, kind="exact")


@pytest.mark.parametrize("dialect", ["vendor", "transformers"])
@pytest.mark.parametrize("name", FAMILIES)
def test_invariant_stream_and_tokens_give_the_same_ids(name: str, dialect: str) -> None:
    """The stream's own modality and grids, read back as token tensors."""
    fam = family(name, dialect=dialect)
    clip = Video((120, 200), seconds=[at / 2 for at in range(7)])
    photo = Image((100, 60))
    stream = fam.stream(
        [Special("<s>"), Text("Two things"), photo, clip, Text(tokens=3), photo, Text("end")]
    )
    images = [fam.plan(photo).grid_thw[0]] * 2
    read = fam.position_ids_from_tokens(
        stream.modality, stream.modality, images, [fam.plan(clip).grid_thw[0]], seconds_per_grid=1.0
    )
    written = fam.position_ids(stream)
    assert torch.equal(written.ids, read.ids)
    assert torch.equal(written.next_position, read.next_position)
    assert torch.equal(written.delta, read.delta)
    assert len(stream) == written.ids.shape[1]


@pytest.mark.parametrize("video", ["block", "frames"])
def test_a_block_of_cells_under_either_rule(video: str) -> None:
    """A clip without markers is one run; the rule alone says whether its frames are units."""
    fam = family("qwen2_vl", overlay={"rule": {"video": video}})
    ids = fam.position_ids(fam.stream([Text(tokens=1), Video((56, 1120), frames=6)])).ids
    grid = fam.plan(Video((56, 1120), frames=6)).views[0].tokens
    cells = ids[:, 2:-1].reshape(3, *grid.shape)  # 3 frames, wider than long
    step = 1 if video == "block" else max(grid.height, grid.width)
    assert cells[0, :, 0, 0].tolist() == [2, 2 + step, 2 + 2 * step]
    assert cells[1, 1, :, 0].tolist() == [
        2 + row + (step if video == "frames" else 0) for row in range(grid.height)
    ]
    assert grid.height != grid.width


def test_frame_count_is_clamped_and_refused() -> None:
    fam = family("qwen2_vl")
    assert [fam.frame_count(total, 30.0) for total in (300, 3, 10**6, 40, 110)] == [
        20,
        2,
        768,
        4,
        6,
    ]
    for total, fps in [(1, 30.0), (0, 30.0), (10, 0.0), (10, float("nan"))]:
        with pytest.raises(
            PositionError, match=rf"qwen2_vl: total_frames is {total} and source_fps {fps}"
        ):
            fam.frame_count(total, fps)


def test_no_line_of_code_compares_a_family_s_name() -> None:
    """Families are data (DESIGN.md 5c): no name of one stands in code outside docstrings."""
    for path in (ROOT / "visionpos").rglob("*.py"):
        tree = ast.parse(path.read_text())
        docs = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and node.body
            if isinstance(node.body[0], ast.Expr)
        }
        texts = [
            n.value
            for n in ast.walk(tree)
            if isinstance(n, ast.Constant) and isinstance(n.value, str) and id(n) not in docs
        ]
        if "vlm" in path.parts:
            assert not set(texts) & set(family_names()), path
