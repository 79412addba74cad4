"""Reported bugs as cases, grouped by kind (facts/tiling.md 23 and facts/users.md e; numbers of reports in the names).

Sizes are (height, width) unless a name says otherwise. Expected values are those of the reports or of facts/tiling.md.
"""

from typing import Any

import pytest
import torch

from visionpos.errors import PositionError
from visionpos.vlm import (
    Audio,
    Cells,
    Family,
    Image,
    Marker,
    Plan,
    Special,
    Text,
    Video,
    family,
    family_names,
)


def length(name: str, size_hw: tuple[int, int], **options: Any) -> int:
    return len(family(name, **options).stream([Image(size_hw)]))


HF = {"dialect": "transformers"}


# Swapped order


@pytest.mark.parametrize(("size_hw", "tokens"), [
    ((1000, 400), 2076), ((400, 1000), 2040), ((900, 400), 1926), ((400, 900), 1896),
])  # fmt: skip
def test_swapped_order_llava_next_33261_31327(size_hw: tuple[int, int], tokens: int) -> None:
    assert length("llava_next", size_hw, **HF) == tokens


def test_swapped_order_fuyu_43137() -> None:
    assert length("fuyu", (400, 1000)) == 490 + 1  # <s>


@pytest.mark.parametrize(("dialect", "shape"), [("vendor", (1, 3)), ("transformers", (3, 1))])
def test_swapped_order_ovis2(dialect: str, shape: tuple[int, int]) -> None:
    """transformers cuts a wide picture into strips; the number of tokens hides it."""
    fam = family("ovis2", dialect=dialect)
    assert fam.plan(Image((400, 1000))).tiles_rc == shape
    assert len(fam.stream([Image((400, 1000))])) == 1029


SYMMETRIC = ["internvl", "llama4", "pixtral", "mistral3", "phi4_multimodal", "idefics3", "lfm2_vl",
             "gemma4", "kimi_k25", "fuyu", "emu3", "naflex", "smolvlm", "qwen3_vl"]  # fmt: skip


@pytest.mark.parametrize("name", SYMMETRIC)
@pytest.mark.parametrize("size_hw", [(97, 131), (1080, 1920), (400, 1000), (479, 641), (701, 700)])
def test_swapped_order_a_turned_picture_has_a_turned_plan(name: str, size_hw: tuple[int, int]) -> None:  # fmt: skip
    if name == "fuyu" and max(size_hw) > 1080:
        pytest.skip("its box is no square")
    fam = family(name)
    here, turned = (fam.plan(Image(size)) for size in (size_hw, size_hw[::-1]))
    assert (here.tiles_rc and here.tiles_rc[::-1]) == turned.tiles_rc
    sizes = [{view.size_hw for view in plan.views} for plan in (here, turned)]
    assert sizes[0] == {size[::-1] for size in sizes[1]}


# Float truncation


@pytest.mark.parametrize(("name", "size_hw", "vendor", "transformers"), [
    ("llava_next", (328, 861), 2088, 2136), ("llava_onevision", (832, 1872), 7248, 7263),
])  # fmt: skip
def test_float_truncation_unpad(name: str, size_hw: Any, vendor: int, transformers: int) -> None:
    assert length(name, size_hw) == vendor
    assert length(name, size_hw, **HF) == transformers


@pytest.mark.parametrize("make", [int, torch.tensor, lambda side: __import__("numpy").int64(side)])
def test_float_truncation_34625_whole_numbers_of_any_type(make: Any) -> None:
    assert length("llava_next", (make(400), make(1000)), **HF) == 2040  # type: ignore[arg-type]


# Ties


@pytest.mark.parametrize(("size_wh", "views"), [
    ((448, 448), 1), ((633, 633), 1), ((635, 635), 5), ((896, 896), 5), ((1344, 448), 4), ((300, 900), 4),
    ((800, 600), 13),
])  # fmt: skip
def test_tie_internvl_sglang_11181(size_wh: tuple[int, int], views: int) -> None:
    fam = family("internvl")
    assert len(fam.plan(Image(size_wh[::-1])).views) == views
    assert len(fam.stream([Image(size_wh[::-1])])) == 256 * views + 2


@pytest.mark.parametrize(("size_wh", "vendor", "transformers"), [
    ((80, 165), 1776, 888), ((165, 80), 876, 1752), ((152, 55), 776, 1458),
])  # fmt: skip
def test_tie_llava_next_reads_its_list_either_way(size_wh: Any, vendor: int, transformers: int) -> None:  # fmt: skip
    assert length("llava_next", size_wh[::-1]) == vendor
    assert length("llava_next", size_wh[::-1], **HF) == transformers


def test_tie_llava_1644_pinpoints_come_from_the_data() -> None:
    overlay = {"views": {"pick": {"from": {"list": [[1, 4], [4, 1], [2, 2]]}}}}
    assert family("llava_next", overlay=overlay).plan(Image((336, 1344))).tiles_rc == (1, 4)


# Off by one of separators


def names(stream: Any) -> str:
    """The stream with runs of cells as their count."""
    return " ".join(
        str(run.count) if isinstance(run, Cells) else " ".join(run.names) for run in stream.runs
    )


def test_separators_pixtral_11333() -> None:
    """600x400: 25 rows of 38, a break between rows, the end instead of the last."""
    stream = family("pixtral").stream([Image((400, 600))])
    assert len(stream) == 950 + 24 + 1
    assert names(stream) == " [IMG_BREAK] ".join(["38"] * 25) + " [IMG_END]"


def test_separators_llama4_494() -> None:
    """x between tiles of a row but not after the last, y after every row; 12 tiles and the whole image, not more."""
    stream = family("llama4").stream([Image((3024, 4032))])
    row = " <|tile_x_separator|> ".join(["144"] * 4) + " <|tile_y_separator|>"
    assert names(stream) == f"<|image_start|> {row} {row} {row} <|image|> 144 <|image_end|>"
    assert (
        names(family("llama4").stream([Image((336, 336))]))
        == "<|image_start|> <|image|> 144 <|image_end|>"
    )


def test_separators_idefics3_31() -> None:
    """Row and column markers from 1, a line end after each tile row, one more before the whole image."""
    stream = family("smolvlm").stream([Image((20, 3000))])
    fake = "<fake_token_around_image>"
    tiles = " ".join(f"{fake} <row_1_col_{col}> 64" for col in range(1, 5))
    assert names(stream) == f"{tiles} \n\n {fake} <global-img> 64 {fake}"


def test_separators_one_view_of_idefics3_has_no_markers_of_tiles() -> None:
    overlay = {
        "views": {
            "size": [
                {"kind": "fit", "box": 364, "rounding": "floor"},
                {"kind": "multiple", "of": 364},
            ]
        }
    }
    stream = family("idefics3", overlay=overlay).stream([Image((300, 300))])
    assert names(stream) == "<fake_token_around_image> <global-img> 169 <fake_token_around_image>"


def test_separators_ovis2() -> None:
    stream = family("ovis2").stream([Image((479, 641))])
    row = "256 <IMG_COL> 256"
    assert names(stream) == f"<IMG_START> 256 <IMG_GRID> {row} <IMG_ROW> {row} <IMG_END>"
    assert names(family("ovis2").stream([Image((9, 9))])) == "<IMG_START> 256 <IMG_GRID> <IMG_END>"


def test_separators_minicpm_line_ends_between_slice_rows_only() -> None:
    stream = family("minicpm_v2", variant="image_id").stream([Image((1000, 400)), Image((9, 9))])
    slice_ = "<slice> 64 </slice>"
    assert names(stream) == (
        f"<image_id>0</image_id> <image> 64 </image> {slice_} \n {slice_} \n {slice_} "
        "<image_id>1</image_id> <image> 64 </image>"
    )
    old = family("minicpm_v2", variant="old_schema").stream([Image((400, 1000))])
    view = "<image> 64 </image>"
    assert names(old) == f"{view} <slice> {view} {view} {view} </slice>"


def test_separators_gemma3_36701() -> None:
    """Two images, one of them cropped: the sentence belongs to that one alone."""
    fam = family("gemma3", variant="pan_and_scan")
    stream = fam.stream([Image((400, 1000)), Image((300, 300))])
    view = "<start_of_image> 256 <end_of_image>"
    crops = " \n\n \n\n ".join([view] * 3)
    assert names(stream) == (
        f"Here is the original image \n\n {view} \n\n and here are some crops to help you see better "
        f"\n\n {crops} \n\n \n\n {view} \n\n"
    )
    assert int(stream.is_feature.sum()) == 5 * 256


def test_separators_lfm2_markers_and_thumbnail() -> None:
    stream = family("lfm2_vl").stream([Image((1024, 1024))])
    tiles = " ".join(f"<|img_row_{r}_col_{c}|> 256" for r in (1, 2) for c in (1, 2))
    assert names(stream) == f"<|image_start|> {tiles} <|img_thumbnail|> 256 <|image_end|>"
    assert (
        names(family("lfm2_vl").stream([Image((336, 336))])) == "<|image_start|> 100 <|image_end|>"
    )


def test_separators_emu3_header_and_row_ends() -> None:
    stream = family("emu3").stream([Image((479, 641))])
    rows = " ".join(["80 <|extra_200|>"] * 60)
    assert names(stream) == (
        f"<|image start|> 60*80 <|image token|> {rows} <|extra_201|> <|image end|>"
    )


def test_separators_nvlm_tags_are_text_24() -> None:
    seen: list[str] = []
    fam = family("nvlm_d")
    stream = fam.stream([Image((448, 896))], lambda text: seen.append(text) or [1, 2])  # type: ignore[func-returns-value]
    assert seen == ["<Image><tile_1>", "<tile_2>", "<tile_global_thumbnail>", "</Image>"]
    assert len(stream) == 2 + 3 * (256 + 2)
    assert stream.names.count("<|vision_pad|>") == 3 * 256


def test_separators_view_order_of_deepseek_24881() -> None:
    """VL2 shows the whole image first, OCR last."""
    first = names(family("deepseek_vl2").stream([Image((400, 1000))])).split()
    last = names(family("deepseek_ocr").stream([Image((400, 1000))])).split()
    assert (first[0], first[28]) == ("14", "view_separator")
    assert (last[0], last[-1]) == ("20", "view_separator")


# Stale state between samples


def test_stale_state_a_plan_depends_on_its_image_alone() -> None:
    """Aria of transformers takes the batch's largest number of crops for all: not a rule."""
    fam = family("aria", variant="split", **HF, overlay={"views": {"tile": {"px": 490}}})
    alone = [fam.plan(Image(size)).cells for size in ((400, 1000), (500, 4000))]
    stream = fam.stream([Image((400, 1000)), Image((500, 4000))])
    assert int(stream.is_feature.sum()) == sum(alone)


def test_stale_state_numbers_of_images_restart_with_each_prompt() -> None:
    fam = family("minicpm_v2", variant="image_id")
    first, second = (names(fam.stream([Image((9, 9))])) for _ in range(2))
    assert first == second == "<image_id>0</image_id> <image> 64 </image>"


def test_stale_state_images_at_most_counts_the_prompt() -> None:
    """LLaVA-OneVision cuts an image only where it is alone, DeepSeek-VL2 up to two."""
    for name, most in (("llava_onevision", 1), ("deepseek_vl2", 2)):
        fam, photo = family(name), Image((400, 1000))
        assert fam.plan(photo, images=most).tiles_rc is not None
        assert fam.plan(photo, images=most + 1).tiles_rc is None
        alone = len(fam.stream([photo]))
        assert len(fam.stream([photo] * most)) == most * alone
        assert len(fam.stream([photo] * (most + 1))) < (most + 1) * alone
        assert len(fam.stream([photo])) == alone


# Batch effects


def test_batch_tiles_of_each_image_trl_4061() -> None:
    """Pixel rows are indexed by tile: 5, 1 and 4 views give offsets 0, 5, 6, 10."""
    fam = family("internvl")
    counts = [len(fam.plan(Image(size)).views) for size in ((896, 896), (448, 448), (448, 1344))]
    assert counts == [5, 1, 4]
    spans = fam.stream([Image((896, 896)), Image((448, 448)), Image((448, 1344))]).spans
    assert [span.segment for span in spans if span.kind == "image"] == [0] * 5 + [1] + [2] * 4
    assert [span.view for span in spans if span.kind == "image"] == [*range(5), 0, *range(4)]


def test_batch_fuyu_is_not_padded_to_its_canvas_27766() -> None:
    assert length("fuyu", (1, 1)) == 2 + 1


def test_batch_deepseek_ocr_without_crops_35445() -> None:
    assert length("deepseek_ocr", (640, 640)) == 273


# Count formula versus stream


@pytest.mark.parametrize("name", family_names())
def test_count_is_the_stream(name: str) -> None:
    """Cells of the plan, features of the stream, spans and rows are one number, for every variant and dialect."""
    base = family(name)
    for variant in (None, *base.variants):
        for dialect in family(name, variant=variant).dialects:
            fam = family(name, dialect, variant)
            for size_hw in ((400, 1000), (641, 479)):
                plan, stream = fam.plan(Image(size_hw)), fam.stream([Image(size_hw)])
                assert plan.cells == int(stream.is_feature.sum())
                assert plan.token_rects().shape == (plan.cells, 4)
                rows = stream.row_spans
                assert sum(row.stop - row.start for row in rows) == plan.cells
                kinds = [span for span in stream.spans if span.kind == "image"]
                assert [span.node for span in kinds] == [part.node for part in plan.parts]
                assert len(stream.names) == len(stream)


def test_count_fuyu_newlines_are_no_features_15731() -> None:
    stream = family("fuyu").stream([Image((60, 90))])
    assert stream.is_embedding.int().tolist() == [1, 1, 1, 0, 1, 1, 1, 0, 0]


def test_count_learned_newlines_take_placeholders() -> None:
    """LLaVA's newline is an embedding on an <image> token; a break of Pixtral is a token of the vocabulary."""
    stream = family("llava_next").stream([Image((400, 1000))])
    newline = [run for run in stream.runs if isinstance(run, Marker)]
    assert {run.name for run in newline} == {"image_newline"}
    assert stream.is_embedding.all()
    assert set(stream.token_ids({"<image>": 32000}).tolist()) == {32000}
    assert int(stream.modality.sum()) == len(stream)
    breaks = family("pixtral").stream([Image((40, 40))])
    assert int(breaks.is_embedding.sum()) == 9
    ids = {"[IMG]": 10, "[IMG_BREAK]": 12, "[IMG_END]": 13}
    assert breaks.token_ids(ids).tolist() == [10, 10, 10, 12, 10, 10, 10, 12, 10, 10, 10, 13]


@pytest.mark.parametrize(
    ("name", "cls", "tokens"), [("llava_1_5", 576, 576), ("paligemma", 256, 256)]
)
def test_count_no_class_token_is_guessed_34447(name: str, cls: int, tokens: int) -> None:
    assert length(name, (300, 400)) == cls == tokens


@pytest.mark.parametrize(("name", "frames", "length_"), [
    ("llava_next_video", 8, 8 * 144), ("llava_onevision", 8, 8 * 196 + 1), ("internvl", 3, 3 * (256 + 2) + 6 + 2),
])  # fmt: skip
def test_count_of_clips_271(name: str, frames: int, length_: int) -> None:
    """144 and 196 a frame, one newline a clip; InternVL writes Frame1: and a line end between frames."""
    assert len(family(name).stream([Video((480, 640), frames=frames)])) - length_ in (0, -3)


def test_count_of_odd_grids_is_the_pool_s() -> None:
    """27 x 27 pooled by two is 169; height * width // 4 says 182 (facts/tiling.md 3)."""
    overlay = {"video": {"size": [{"kind": "stretch", "box": 384}]}}
    assert family("llava_next_video", overlay=overlay).plan(Video((9, 9), frames=1)).cells == 169


@pytest.mark.parametrize(("frames", "steps"), [(17, 5), (16, 4), (1, 1), (7, 2)])
def test_count_of_padded_clips_47866(frames: int, steps: int) -> None:
    """Groups of four: 17 frames are 20, not 17 + 17 % 4 = 18."""
    plan = family("kimi_k25").plan(Video((280, 280), frames=frames))
    assert plan.views[0].tokens.frames == steps
    assert plan.repeated_frames == 4 * steps - frames


def test_count_smolvlm_always_enlarges_146() -> None:
    """386x386 becomes 2048x2048: 17 views, 1088 features. Without the step that enlarges it is one view."""
    fam = family("smolvlm")
    plan = fam.plan(Image((386, 386)))
    assert (len(plan.views), plan.cells) == (17, 1088)
    steps = [
        {"kind": "fit", "box": 2048, "upscale": False},
        {"kind": "multiple", "of": 512, "chained": True},
    ]
    plain = family("smolvlm", overlay={"views": {"size": steps}})
    assert plain.plan(Image((386, 386))).cells == 64


def test_count_idefics3_follows_longest_edge_52874() -> None:
    """At a longest edge of 1500 the tile grid is the real split's: 5x3, where the count utility says 5x2."""
    steps = [
        {
            "kind": "fit",
            "box": 1500,
            "rounding": "floor",
            "even": True,
            "at_least": 1,
            "arithmetic": "float64_ratio",
        },
        {"kind": "multiple", "of": 364, "chained": True, "arithmetic": "float64"},
    ]
    fam = family("idefics3", overlay={"views": {"size": steps}})
    assert fam.plan(Image((2428, 975))).tiles_rc == (5, 3)


@pytest.mark.parametrize("crops", [1, 4])
def test_count_phi3_5_with_few_crops_105(crops: int) -> None:
    fam = family("phi3_5_vision", overlay={"views": {"pick": {"from": {"tiles": [1, crops]}}}})
    assert fam.plan(Image((336, 336))).tiles_rc == ((1, 1) if crops == 1 else (2, 2))


def test_count_aria_of_odd_multiples_46728() -> None:
    fam = family("aria", variant="split", **HF)
    assert all(fam.plan(Image((490 * h, 490 * w))).cells >= 256 for h in (1, 3) for w in (1, 2, 5))


# Degenerate sizes: the stated value, or an error that names family, size and limit


DEGENERATE = [
    (1, 1),
    (1, 2),
    (2, 1),
    (1, 3000),
    (3000, 1),
    (20, 3000),
    (3000, 20),
    (1, 50000),
    (50000, 1),
    (7, 7),
]


def refused(fam: Family, size_hw: tuple[int, int], images: int = 1) -> tuple[str, Plan | None]:
    """What a family says to a size, and its plan if it has one."""
    try:
        return "", fam.plan(Image(size_hw), images)
    except PositionError as refusal:
        return str(refusal), None


@pytest.mark.parametrize("name", family_names())
def test_degenerate_sizes_are_planned_or_refused_by_name(name: str) -> None:
    for variant in (None, *family(name).variants):
        for dialect in family(name, variant=variant).dialects:
            fam = family(name, dialect, variant)
            for size_hw in DEGENERATE:
                refusal, plan = refused(fam, size_hw)
                if plan is None:
                    assert name in refusal
                    assert str(size_hw) in refusal, refusal
                    continue
                assert plan.views
                assert all(min(part.tokens.shape) > 0 for part in plan.parts)
                assert plan.tiles_rc is None or any(p.node != "global" for p in plan.parts)


def test_degenerate_llava_next_refuses_vanished_rows() -> None:
    """3000x20 keeps 0 of its rows; published code then gives the whole view alone, without a word."""
    with pytest.raises(
        PositionError, match=r"llava_next: size_hw is \(20, 3000\).*0 x 72 cells.*empty: drop"
    ):
        family("llava_next", **HF).plan(Image((20, 3000)))
    with pytest.raises(PositionError, match=r"segment 1: llava_next: size_hw"):
        family("llava_next").stream([Text("a"), Image((100, 1))])
    drop = {"views": {"content": {"empty": "drop"}}}
    assert length("llava_next", (20, 3000), **HF, overlay=drop) == 576


@pytest.mark.parametrize(("name", "size_hw", "message"), [
    ("emu3", (100, 501), r"emu3: size_hw is \(100, 501\), a ratio over 5"),
    ("emu3", (7, 20), r"emu3: size_hw is \(7, 20\); sides of at least 8"),
    ("glm_image", (100, 401), r"glm_image: size_hw is \(100, 401\), a ratio over 4"),
    ("phi4_multimodal", (1, 500), r"phi4_multimodal: size_hw \(1, 500\).*at least 10 pixels"),
    ("gemma4", (1, 100000000), r"gemma4.*\(1, 100000000\)"),
    ("kimi_vl", (28, 9000), r"kimi_vl: size_hw is \(28, 9000\); sides of at most 7140"),
    ("glm4v", (1, 300), r"glm4v: size_hw \(1, 300\) is resized, and then size_hw is \(28, 8400\), a ratio over 200"),
])  # fmt: skip
def test_degenerate_error_names_family_size_and_limit(
    name: str, size_hw: Any, message: str
) -> None:
    with pytest.raises(PositionError, match=message):
        family(name).plan(Image(size_hw))


@pytest.mark.parametrize(("name", "below", "above"), [
    ("emu3", (8, 40), (7, 35)), ("glm_image", (100, 400), (100, 401)), ("qwen2_vl", (1, 200), (1, 201)),
    ("kimi_vl", (28, 7140), (28, 7141)),
])  # fmt: skip
def test_degenerate_thresholds(name: str, below: Any, above: Any) -> None:
    assert family(name).plan(Image(below)).cells
    with pytest.raises(PositionError, match=name):
        family(name).plan(Image(above))


@pytest.mark.parametrize("size_hw", [(0, 5), (5, 0), (-1, 5), (2.5, 5), ("5", 5), (5,)])
def test_degenerate_no_size_at_all(size_hw: Any) -> None:
    with pytest.raises(PositionError, match=r"size_hw is .*at least 1"):
        Image(size_hw)


def test_error_segments_that_no_image_family_takes() -> None:
    with pytest.raises(PositionError, match=r"segment 1: llama4 takes no video.*Images"):
        family("llama4").stream([Special("<s>"), Video((9, 9), frames=2)])
    with pytest.raises(
        PositionError, match=r"segment 0: Audio is given and pixtral takes no audio"
    ):
        family("pixtral").stream([Audio(1.0)])
    fam = family("naflex")
    stream = fam.stream([Image((9, 9))])
    with pytest.raises(PositionError, match=r"naflex has no position rule.*axes: \[index\]"):
        fam.position_ids(stream)
