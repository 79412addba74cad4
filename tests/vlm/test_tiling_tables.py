"""The rest of the golden tables of facts/tiling.md: grids, sizes and crops behind the counts of test_tiling_golden.py.

Sizes are (width, height) here, as in the tables.
"""

from fractions import Fraction
from typing import Any

import pytest

from tests.vlm.test_tiling_golden import HF, SIZES, plan_of, stream_of
from visionpos.errors import ConfigError, PositionError
from visionpos.vlm import Image, Rule, Text, family, stream_ids

Shape = tuple[int, int]


def of_all(name: str, shapes: list[Any], what: Any, **options: Any) -> None:
    """Hold what a plan says on the eight sizes of the tables against a list; None is refused."""
    for size, expected in zip(SIZES, shapes, strict=True):
        if expected is None:
            with pytest.raises(PositionError, match=name):
                plan_of(name, size, **options)
        else:
            assert what(plan_of(name, size, **options)) == expected, size


def whole(plan: Any) -> Shape:
    """Rows and columns of the whole-image view."""
    return next(v for v in plan.views if v.node == "global").tokens.shape[1:]


def raster(plan: Any) -> Shape:
    """Rows and columns of the joined tiles."""
    return plan.raster.tokens.shape[1:]


@pytest.mark.parametrize(("name", "kept"), [
    ("llava_next", [(24, 24), (24, 60), (60, 24), (24, 24), None, (36, 48), (48, 48), (36, 48)]),
    ("llava_onevision", [(27, 27), (32, 81), (81, 32), (27, 27), (1, 162), (70, 93), (81, 81), (40, 54)]),
])  # fmt: skip
def test_golden_kept_rows_and_columns(name: str, kept: list[Any]) -> None:
    of_all(name, kept, raster, **HF)


def test_golden_llava_onevision_at_36_tiles() -> None:
    """4032x3024 is 6x5 tiles: 31 views."""
    plan = plan_of("llava_onevision", (4032, 3024))
    assert (plan.tiles_rc, len(plan.views)) == ((5, 6), 31)
    assert raster(plan_of("llava_onevision", (956, 1164), **HF)) == (98, 81)


PIXTRAL = [(21, 21), (25, 63), (63, 25), (1, 1), (1, 64), (48, 64), (64, 64), (30, 41)]
MISTRAL = [(12, 12), (15, 36), (36, 15), (1, 1), (1, 55), (42, 55), (37, 37), (18, 23)]
NAFLEX = {
    None: [(16, 16), (10, 25), (25, 10), (7, 7), (1, 150), (14, 18), (16, 16), (14, 18)],
    "576": [(24, 24), (15, 38), (38, 15), (7, 7), (2, 288), (21, 27), (24, 24), (21, 27)],
    "1024": [(32, 32), (20, 50), (50, 20), (7, 7), (3, 341), (27, 36), (32, 32), (27, 37)],
}
EMU3 = [(64, 64), (50, 125), (125, 50), (64, 64), (6, 784), (110, 147), (128, 128), (60, 80)]
FUYU = [(12, 12), (14, 34), (34, 14), (1, 1), (1, 64), (36, 48), (35, 35), (16, 22)]


@pytest.mark.parametrize(("name", "options", "grids"), [
    ("pixtral", {}, PIXTRAL), ("mistral3", {}, MISTRAL), ("emu3", HF, EMU3), ("fuyu", {}, FUYU),
    *(("naflex", {"variant": variant}, grids) for variant, grids in NAFLEX.items()),
])  # fmt: skip
def test_golden_grids_of_one_view(name: str, options: dict[str, Any], grids: list[Shape]) -> None:
    of_all(name, grids, whole, **options)


def test_golden_emu3_placeholders() -> None:
    counts = [4160, 6300, 6375, 4160, 4710, 16280, 16512, 4860]
    of_all("emu3", counts, lambda plan: plan.cells + plan.views[0].tokens.height, **HF)


def test_golden_naflex_scales_by_a_hundred_at_most() -> None:
    assert whole(plan_of("naflex", (2, 2))) == (13, 13)


def test_golden_fuyu_shrinks_a_strip() -> None:
    """3000x20 becomes 1920x12, on a canvas of 1920x30."""
    (view,) = plan_of("fuyu", (3000, 20)).views
    assert view.size_hw == (30, 1920)
    assert view.content_yxyx == (0, 0, 12, 1920)


@pytest.mark.parametrize(("dialect", "grid"), [("vendor", (55, 36)), ("transformers", (55, 35))])
def test_golden_mistral3_parts_too(dialect: str, grid: Shape) -> None:
    assert whole(plan_of("mistral3", (2505, 3934), dialect=dialect)) == grid


def test_golden_stream_of_pixtral() -> None:
    """A grid of 2x3 is III B III E; a single cell has no break."""
    short = {"[IMG]": "I", "[IMG_BREAK]": "B", "[IMG_END]": "E"}
    stream = stream_of("pixtral", (48, 32))
    assert "".join(short[name] for name in stream.names) == "IIIBIIIE"
    assert stream_of("pixtral", (1, 1)).names == ("[IMG]", "[IMG_END]")


MOLMO2 = [(14, 14), (23, 42), (42, 23), (14, 14), (14, 14), (23, 33), (23, 23), (23, 23)]


@pytest.mark.parametrize(("name", "crops"), [
    ("molmo2", [2, 9, 9, 2, 2, 7, 5, 5]), ("molmo", [2, 9, 9, 2, 2, 13, 10, 7]),
])  # fmt: skip
def test_golden_molmo_crops(name: str, crops: list[int]) -> None:
    of_all(name, crops, lambda plan: len(plan.views))


def test_golden_molmo2_rasters() -> None:
    of_all("molmo2", MOLMO2, raster)


@pytest.mark.parametrize(("side", "tiles"), [(337, (2, 2)), (673, (3, 3)), (1345, (4, 4))])
def test_golden_llama4_thresholds(side: int, tiles: Shape) -> None:
    assert plan_of("llama4", (side, side)).tiles_rc == tiles


@pytest.mark.parametrize(("size", "widths"), [
    ((1000, 400), [334, 334, 332]), ((4032, 3024), [2016, 2016]), ((641, 479), [321, 320]),
])  # fmt: skip
def test_golden_gemma3_crop_widths(size: Shape, widths: list[int]) -> None:
    tiles = plan_of("gemma3", size, variant="pan_and_scan").views[1:]
    assert [view.source_yxyx[3] - view.source_yxyx[1] for view in tiles] == widths


def test_golden_kimi_at_4096_patches() -> None:
    steps = [
        {"kind": "patch_budget", "patch": 14, "at_most": 4096, "side_at_most": 512},
        {"kind": "canvas", "multiple": "factor", "align": "end"},
    ]
    overlay = {"views": {"global": {"size": steps}}}
    counts = [144, 540, 540, 1, 108, 1036, 1089, 414]
    of_all("kimi_k25", counts, lambda plan: plan.cells, overlay=overlay)


def test_golden_aria_at_490_has_half_the_queries() -> None:
    of_all("aria", [128] * 8, lambda plan: plan.cells, variant="490")


@pytest.mark.parametrize(("size", "whole_hw"), [
    ((336, 336), (320, 320)), ((3000, 20), (32, 3008)), ((4032, 3024), (416, 576)),
])  # fmt: skip
def test_golden_lfm2_sizes(size: Shape, whole_hw: Shape) -> None:
    view = next(v for v in plan_of("lfm2_vl", size).views if v.node == "global")
    assert view.size_hw == whole_hw


@pytest.mark.parametrize(("stride", "last", "end"), [
    (256, 515, 516), (128, 259, 260), (64, 131, 132), (16, 35, 36), (4, 11, 12), (1, 5, 6),
])  # fmt: skip
def test_golden_v2pe_of_two_tiles(stride: int, last: int, end: int) -> None:
    """Three tokens of text, the start at 3, 512 cells, the end, text: facts/tiling.md 7."""
    overlay = {"views": {"global": None, "pick": {"from": {"tiles": [2, 2]}}, "when": None}}
    stream = family("internvl", overlay=overlay).stream(
        [Text(tokens=3), Image((448, 896)), Text(tokens=4)]
    )
    rule = Rule(axes=("index",), cell_step=Fraction(stride, 256), next="ceil_max")
    ids = stream_ids(stream, rule).ids[0].tolist()
    assert ids[3] == 3
    assert ids[4] == 3 + stride / 256
    assert ids[4 + 511] == last
    assert ids[4 + 512 :] == [end, end + 1, end + 2, end + 3, end + 4]


# InternVL in training (facts/tiling.md 6): max(1, 12 div images) tiles an image


@pytest.mark.parametrize(
    ("images", "tiles"), [(1, (3, 4)), (2, (2, 3)), (3, (2, 2)), (12, None), (50, None)]
)
def test_golden_internvl_shares_tiles_in_training(images: int, tiles: Any) -> None:
    fam = family("internvl", variant="training")
    photo = Image((600, 800))
    assert fam.plan(photo, images=images).tiles_rc == tiles
    assert fam.plan(photo).tiles_rc == family("internvl").plan(photo).tiles_rc  # nothing is kept
    views = 1 if tiles is None else tiles[0] * tiles[1] + 1
    assert len(fam.stream([photo] * images)) == images * (256 * views + 2)


def test_error_shares_need_tiles() -> None:
    pick = {"from": {"tiles": None, "list": [[1, 2]], "share": "images"}}
    with pytest.raises(ConfigError, match=r"share 'images' without tiles"):
        family("internvl", overlay={"views": {"pick": pick}})


# Reports of facts/tiling.md 23 that are numbers of this kind


@pytest.mark.parametrize(("tower", "cells"), [(336, 576), (384, 729)])
def test_count_of_towers_with_and_without_a_class_token_2225(tower: int, cells: int) -> None:
    """CLIP's 336 gives 576, SigLIP's 384 gives 729, 1176 and not 1175 with tiles: no class token is counted."""
    steps = [{"kind": "stretch", "box": tower}]
    fam = family("llava_1_5", overlay={"views": {"global": {"size": steps}}})
    assert fam.plan(Image((300, 400))).cells == cells
    assert len(stream_of("llava_next", (336, 336))) == 1176


def test_count_idefics3_at_a_longest_edge_of_512_52874() -> None:
    """The grid follows size.longest_edge, not the tower's image size."""
    steps = [
        {"kind": "fit", "box": 512, "even": True, "arithmetic": "float64_ratio"},
        {"kind": "multiple", "of": "tile", "chained": True, "arithmetic": "float64"},
    ]
    plan = plan_of("smolvlm", (640, 480), overlay={"views": {"size": steps}})
    assert plan.tiles_rc is None
    assert plan.cells == 64


def test_batch_samples_with_other_numbers_of_images_41871() -> None:
    """A prompt knows its own images alone: two, none and one."""
    fam = family("smolvlm")
    photo = Image((400, 1000))
    alone = fam.plan(photo).cells
    prompts = [[photo, photo], [Text("no picture")], [photo]]
    counts = [int(fam.stream(prompt).is_feature.sum()) for prompt in prompts]
    assert counts == [2 * alone, 0, alone]


def test_swapped_order_sizes_and_features_472() -> None:
    """1084x820 and 820x1084 have plans of their own, and each its own count (users.md E09)."""
    for name in ("qwen2_vl", "llava_next", "minicpm_v2", "phi3_5_vision", "ovis2"):
        fam = family(name)
        for size_hw in ((820, 1084), (1084, 820)):
            stream, cells = fam.stream([Image(size_hw)]), fam.plan(Image(size_hw)).cells
            assert int(stream.is_feature.sum()) == cells
            assert sum(span.grid.size for span in stream.spans if span.grid) == cells


@pytest.mark.parametrize(("side", "rounded"), [(42, 56), (70, 56), (98, 112), (126, 112)])
def test_tie_half_even_multiples_of_28_qwen_1145(side: int, rounded: int) -> None:
    """users.md E12: 1.5, 2.5, 3.5 and 4.5 units go to the even one; the other side keeps the pixels in budget."""
    (view,) = plan_of("qwen2_vl", (side, 2800)).views
    assert view.size_hw == (2800, rounded)


def test_count_phi3_5_without_crops_is_refused_105() -> None:
    with pytest.raises(ConfigError, match=r"tiles \(1, 0\); at least 1"):
        family("phi3_5_vision", overlay={"views": {"pick": {"from": {"tiles": [1, 0]}}}})
