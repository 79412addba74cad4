"""The golden tables of facts/tiling.md: values produced by running the public codes, on eight sizes and on edge cases.

Sizes are (width, height) here, as in the tables. "slots" counts what the published count counts: cells, learned markers
and marker tokens of the serialiser; "cells" counts the encoder's features alone.
"""

from typing import Any

import pytest

from visionpos.errors import PositionError
from visionpos.vlm import Image, Marker, family

SIZES = [(336, 336), (1000, 400), (400, 1000), (1, 1), (3000, 20), (4032, 3024), (1024, 1024), (641, 479)]  # fmt: skip


def stream_of(name: str, size_wh: tuple[int, int], **options: Any) -> Any:
    return family(name, **options).stream([Image(size_hw=size_wh[::-1])])


def plan_of(name: str, size_wh: tuple[int, int], **options: Any) -> Any:
    return family(name, **options).plan(Image(size_hw=size_wh[::-1]))


DROP = {
    "views": {"content": {"empty": "drop"}}
}  # what published code does with a raster of no rows
HF = {"dialect": "transformers"}
LENGTHS: list[tuple[str, dict[str, Any], list[int | None]]] = [  # None: refused
    ("llava_1_5", {}, [576] * 8),
    ("llava_1_5", HF, [576] * 8),
    ("llava_next", {**HF, "overlay": DROP}, [1176, 2040, 2076, 1176, 576, 2340, 2928, 2340]),
    ("llava_next", HF, [1176, 2040, 2076, 1176, None, 2340, 2928, 2340]),
    ("llava_onevision", HF, [1485, 3353, 3402, 1485, 892, 7309, 7371, 2929]),
    ("llava_onevision", {}, [1485, 3353, 3402, 1485, 892, 7309, 7371, 2929]),
    ("granite4_vision", {"overlay": DROP}, [300, 516, 534, 300, 144, 594, 744, 594]),
    ("internvl", {}, [258, 2818, 2818, 258, 3330, 3330, 2562, 3330]),
    ("internvl", {"variant": "max_6"}, [258, 1026, 1026, 258, 1794, 1794, 1282, 1794]),
    ("pixtral", {}, [462, 1600, 1638, 2, 65, 3120, 4160, 1260]),
    ("mistral3", {}, [156, 555, 576, 2, 56, 2352, 1406, 432]),
    ("idefics2", {}, [66] * 8),
    ("idefics2", {"variant": "split"}, [326, 326, 326, None, 326, 326, 326, 326]),
    ("idefics3", {}, [2912, 1542, 1544, 2912, 857, 2227, 2912, 2227]),
    ("smolvlm", {}, [1127, 597, 599, 1127, 332, 862, 1127, 862]),
    ("smolvlm2", {}, [1416, 750, 752, 1416, 417, 1083, 1416, 1083]),
    ("fuyu", {}, [157, 491, 511, 3, 66, 1765, 1261, 369]),  # the table leaves <s> out
    ("molmo", {}, [316, 900, 916, 316, 316, 1196, 972, 740]),
    ("molmo2", {}, [424, 1203, 1222, 424, 424, 996, 766, 766]),
    ("llama4", {}, [147, 1017, 1017, 147, 1452, 1887, 2467, 727]),
    ("phi3_5_vision", {"variant": "crops_4"}, [757, 457, 469, 757, 745, 757, 757, 757]),
    ("phi3_5_vision", {}, [2509, 1621, 1657, 2509, 2473, 1921, 2509, 1921]),
    ("phi4_multimodal", {}, [545, 929, 953, 545, 386, 3393, 2625, 1065]),
    ("deepseek_vl2", {}, [421, 1415, 1429, 421, 1793, 2017, 2017, 1023]),
    ("deepseek_ocr", {}, [273, 483, 603, 273, 883, 893, 693, 893]),
    ("deepseek_ocr2", {}, [257, 545, 689, 257, 1121, 1121, 833, 257]),
    ("aria", {}, [256] * 8),
    ("ovis2", {}, [259, 1029, 1029, 259, 2057, 2571, 2571, 1286]),
    ("ovis2", HF, [259, 1029, 1029, 259, 2057, 2571, 2571, 1286]),
    ("perception_lm", {}, [9472, 9472, 9472, 9472, 9472, 3328, 9472, 9216]),
    ("cohere2_vision", {}, [259, 773, 773, 259, 1801, 3343, 1287, 773]),
    ("chameleon", {}, [1026] * 8),
]  # fmt: skip
CELLS: list[tuple[str, dict[str, Any], list[int | None]]] = [
    ("gemma3", {"variant": "pan_and_scan"}, [256, 1024, 1024, 256, 256, 768, 256, 768]),
    ("gemma3", {}, [256] * 8),
    ("gemma4", {"variant": "70"}, [64, 65, 65, 64, 70, 63, 64, 63]),
    ("gemma4", {}, [256, 260, 260, 256, 204, 266, 256, 266]),
    ("gemma4", {"variant": "1120"}, [1089, 1092, 1092, 1089, 818, 1064, 1089, 1064]),
    ("minicpm_v4_6", {}, [64, 254, 254, 64, 96, 630, 424, 203]),
    ("minicpm_v4_6", {"variant": "4x"}, [256, 1060, 1060, 256, 193, 2520, 1816, 772]),
    ("kimi_k25", {}, [144, 540, 540, 1, 108, 4144, 1369, 414]),
    ("lfm2_vl", {}, [100, 250, 250, 64, 94, 1770, 1280, 234]),
    ("naflex", {}, [256, 250, 250, 49, 150, 252, 256, 252]),
    ("naflex", {"variant": "576"}, [576, 570, 570, 49, 576, 567, 576, 567]),
    ("naflex", {"variant": "1024"}, [1024, 1000, 1000, 49, 1023, 972, 1024, 999]),
    ("paligemma", {}, [256] * 8),
]  # fmt: skip


def check(
    got: Any, name: str, options: dict[str, Any], size: tuple[int, int], expected: Any
) -> None:
    if expected is None:
        with pytest.raises(PositionError, match=rf"{name}.*(size_hw|side)"):
            got()
    else:
        assert got() == expected, (name, options, size)


@pytest.mark.parametrize(("name", "options", "lengths"), LENGTHS)
def test_golden_lengths(name: str, options: dict[str, Any], lengths: list[int | None]) -> None:
    for size, expected in zip(SIZES, lengths, strict=True):
        check(
            lambda size=size: len(stream_of(name, size, **options)), name, options, size, expected
        )


@pytest.mark.parametrize(("name", "options", "cells"), CELLS)
def test_golden_cells(name: str, options: dict[str, Any], cells: list[int | None]) -> None:
    for size, expected in zip(SIZES, cells, strict=True):
        check(lambda size=size: plan_of(name, size, **options).cells, name, options, size, expected)


# (columns, rows) of tiles; None where the image is not cut
GRIDS: list[tuple[str, dict[str, Any], list[tuple[int, int] | None]]] = [
    ("llava_next", {**HF, "overlay": DROP}, [(2, 1), (3, 1), (1, 3), (2, 1), (3, 1), (2, 2), (2, 2), (2, 2)]),
    ("llava_next", {"overlay": DROP}, [(1, 2), (3, 1), (1, 3), (1, 2), (3, 1), (2, 2), (2, 2), (2, 2)]),
    ("llava_onevision", {}, [(1, 1), (3, 2), (2, 3), (1, 1), (6, 1), (6, 5), (3, 3), (2, 2)]),
    ("internvl", {}, [None, (5, 2), (2, 5), None, (12, 1), (4, 3), (3, 3), (4, 3)]),
    ("internvl", {"variant": "max_6"}, [None, (3, 1), (1, 3), None, (6, 1), (3, 2), (2, 2), (3, 2)]),
    ("idefics3", {}, [(4, 4), (4, 2), (2, 4), (4, 4), (4, 1), (4, 3), (4, 4), (4, 3)]),
    ("llama4", {}, [None, (3, 2), (2, 3), None, (9, 1), (4, 3), (4, 4), (2, 2)]),
    ("llama4", {"variant": "max_canvas"}, [(4, 4), (5, 2), (2, 5), (4, 4), (16, 1), (4, 3), (4, 4), (5, 3)]),
    ("minicpm_v4_6", {}, [None, (3, 1), (1, 3), None, None, (3, 3), (3, 2), (2, 1)]),
    ("deepseek_vl2", {}, [(1, 1), (3, 2), (2, 3), (1, 1), (8, 1), (3, 3), (3, 3), (2, 2)]),
    ("ovis2", {}, [None, (3, 1), (1, 3), None, (7, 1), (3, 3), (3, 3), (2, 2)]),
    ("ovis2", HF, [None, (1, 3), (3, 1), None, (1, 7), (3, 3), (3, 3), (2, 2)]),
    ("lfm2_vl", {}, [None, None, None, None, None, (3, 2), (2, 2), None]),
    ("perception_lm", {}, [(6, 6), (9, 4), (4, 9), (6, 6), (36, 1), (4, 3), (6, 6), (7, 5)]),
    ("cohere2_vision", {}, [None, (2, 1), (1, 2), None, (6, 1), (4, 3), (2, 2), (2, 1)]),
    ("gemma3", {"variant": "pan_and_scan"}, [None, (3, 1), (1, 3), None, None, (2, 1), None, (2, 1)]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "grids"), GRIDS)
def test_golden_tile_grids(name: str, options: dict[str, Any], grids: list[Any]) -> None:
    for size, expected in zip(SIZES, grids, strict=True):
        tiles = plan_of(name, size, **options).tiles_rc
        assert (tiles and tiles[::-1]) == expected, (name, options, size)


@pytest.mark.parametrize(("name", "dialect", "views"), [
    ("aria", "transformers", [2, 3, 3, 2, 7, 6, 4, 2]), ("aria", "vendor", [5, 4, 4, 5, 9, 7, 5, 7]),
])  # fmt: skip
def test_golden_aria_crops_at_490(name: str, dialect: str, views: list[int]) -> None:
    """The vendor shows the whole image too, transformers does not (facts/tiling.md 18)."""
    overlay = {"views": {"tile": {"px": 490}}}
    for size, expected in zip(SIZES, views, strict=True):
        plan = plan_of(name, size, dialect=dialect, variant="split", overlay=overlay)
        assert len(plan.views) == expected, size


EDGES: list[tuple[str, dict[str, Any], tuple[int, int], int]] = [
    ("llava_next", HF, (80, 165), 888), ("llava_next", {}, (80, 165), 1776),
    ("llava_next", HF, (165, 80), 1752), ("llava_next", {}, (165, 80), 876),
    ("llava_next", HF, (152, 55), 1458), ("llava_next", {}, (152, 55), 776),
    ("llava_next", HF, (861, 328), 2136), ("llava_next", {}, (861, 328), 2088),
    ("llava_next", HF, (400, 900), 1926), ("llava_next", HF, (900, 400), 1896),
    ("llava_onevision", HF, (1872, 832), 7263), ("llava_onevision", {}, (1872, 832), 7248),
    ("llava_onevision", HF, (956, 1164), 8765),
    ("pixtral", {}, (600, 400), 975), ("pixtral", {}, (1024, 1024), 4160),
    ("emu3", HF, (3000, 20), 4717), ("emu3", HF, (4032, 3024), 16287), ("emu3", HF, (641, 479), 4867),
    ("internvl", {}, (448, 448), 258), ("cohere2_vision", {}, (512, 512), 259),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "size", "length"), EDGES)
def test_golden_edges(
    name: str, options: dict[str, Any], size: tuple[int, int], length: int
) -> None:
    if name == "emu3":  # the table counts placeholders: rows * (columns + 1)
        plan = plan_of(name, size, **options)
        assert plan.cells + plan.views[0].tokens.height == length - 7
    else:
        assert len(stream_of(name, size, **options)) == length


@pytest.mark.parametrize("dialect", ["vendor", "transformers"])
@pytest.mark.parametrize(("size", "grid"), [
    ((3670, 748), ((14, 64), (13, 64))), ((825, 1199), ((64, 45), (64, 44))), ((600, 400), ((25, 38), (25, 38))),
])  # fmt: skip
def test_golden_pixtral_floors_where_the_vendor_rounds(
    dialect: str, size: tuple[int, int], grid: Any
) -> None:
    shape = plan_of("pixtral", size, dialect=dialect).views[0].tokens.shape[1:]
    assert shape == grid[dialect == "transformers"]


@pytest.mark.parametrize("size", [(4000, 1), (1, 4000), (20000, 10), (10000, 5)])
def test_golden_pixtral_thin_images(size: tuple[int, int]) -> None:
    """transformers crashes on a height of 0; the vendor keeps one row (facts/tiling.md 8)."""
    assert len(stream_of("pixtral", size)) == (65 if size[0] > size[1] else 128)
    with pytest.raises(PositionError, match=r"pixtral: size_hw.*side of 0"):
        plan_of("pixtral", size, dialect="transformers")


INTERNVL = {  # number of views, thumbnail included; facts/tiling.md 6 and users.md E06
    (448, 448): 1, (633, 633): 1, (634, 634): 5, (635, 635): 5, (896, 896): 5, (950, 950): 5, (951, 951): 10,
    (1344, 1344): 10, (1344, 448): 4, (300, 900): 4, (800, 600): 13,
}  # fmt: skip


@pytest.mark.parametrize("size", INTERNVL)
def test_golden_internvl_ties(size: tuple[int, int]) -> None:
    assert len(plan_of("internvl", size).views) == INTERNVL[size]


@pytest.mark.parametrize(
    ("size", "grid"), [((300, 200), None), ((600, 400), (1, 2)), ((900, 600), (2, 2))]
)
def test_golden_internvl_three_way_tie(size: tuple[int, int], grid: Any) -> None:
    overlay = {"views": {"pick": {"from": {"tiles": [1, 4]}}}}
    assert plan_of("internvl", size, overlay=overlay).tiles_rc == grid


def test_golden_llava_next_with_siglip() -> None:
    """700x840 on tiles of 384 / 14 and five pinpoints (transformers 35775, vllm 8496)."""
    overlay = {"views": {"tile": {"px": 384}}}
    assert len(stream_of("llava_next", (700, 840), dialect="transformers", overlay=overlay)) == 3267
    assert len(stream_of("llava_next", (700, 840), overlay=overlay)) == 3159


@pytest.mark.parametrize(("height", "grid"), [(111, (1, 1)), (112, (1, 8))])
def test_golden_molmo2_margin(height: int, grid: tuple[int, int]) -> None:
    """A side under the margin makes every scale negative (facts/tiling.md 11)."""
    assert plan_of("molmo2", (3000, height)).tiles_rc == grid


@pytest.mark.parametrize(("size", "cells"), [((10114, 237), 5184 // 4), ((10823, 755), 17640 // 4)])  # fmt: skip
def test_golden_kimi_overshoots_its_budget(size: tuple[int, int], cells: int) -> None:
    budget = 4096 if size[1] == 237 else 16384
    steps = [
        {"kind": "patch_budget", "patch": 14, "at_most": budget, "side_at_most": 512},
        {"kind": "canvas", "multiple": 28, "align": "end"},
    ]
    overlay = {"views": {"global": {"size": steps}}}
    assert plan_of("kimi_k25", size, overlay=overlay).cells == cells


@pytest.mark.parametrize(("size", "tiles"), [((724, 724), (2, 2)), ((720, 736), None)])
def test_golden_lfm2_threshold(size: tuple[int, int], tiles: Any) -> None:
    assert plan_of("lfm2_vl", size).tiles_rc == tiles


@pytest.mark.parametrize(("size", "source", "slices", "tile"), [
    ((336, 336), (448, 448), None, None), ((1000, 400), (700, 280), (1, 3), (406, 490)),
    ((400, 1000), (280, 714), (3, 1), None), ((1, 1), (448, 448), None, None), ((3000, 20), (5404, 42), None, None),
    ((4032, 3024), (518, 392), (3, 3), (518, 392)), ((1024, 1024), (448, 448), (2, 3), (364, 546)),
    ((641, 479), (518, 392), (1, 2), (364, 546)),
])  # fmt: skip
def test_golden_minicpm_pixels(size: Any, source: Any, slices: Any, tile: Any) -> None:
    """MiniCPM-V 2.x, width x height of the source view and of the slices."""
    plan = plan_of("minicpm_v2", size)
    assert plan.views[0].size_hw[::-1] == source
    assert plan.tiles_rc == slices
    if tile is not None:
        assert {view.size_hw[::-1] for view in plan.views[1:]} == {tile}


@pytest.mark.parametrize(("size", "resized"), list(zip(SIZES, [
    (378, 378), (392, 980), (980, 392), (378, 378), (378, 980), (735, 980), (980, 980), (479, 641),
], strict=True)))  # fmt: skip
def test_golden_idefics2_sizes(size: tuple[int, int], resized: tuple[int, int]) -> None:
    assert plan_of("idefics2", size).views[0].size_hw == resized


def test_golden_naflex_sizes_of_big_vision() -> None:
    """users.md A19 and the unit test of big_vision: (h, w), patch, budget -> size."""
    cases = {
        ((112, 109), 7, 225): (105, 105), ((63, 241), 16, 16): (32, 128), ((16, 512), 16, 16): (16, 256),
        ((1700, 2200), 16, 256): (224, 288), ((1700, 2200), 16, 1024): (448, 576), ((480, 640), 16, 256): (224, 288),
        ((100, 3000), 16, 256): (48, 1360),
    }  # fmt: skip
    for (size_hw, patch, budget), expected in cases.items():
        if size_hw == (1700, 2200):  # users.md writes width x height: 2200x1700 -> 288x224
            assert expected[1] > expected[0]
        steps = [{"kind": "patches", "patch": patch, "at_most": budget}]
        overlay = {"views": {"global": {"size": steps}}, "grid": {"patch": patch}}
        assert family("naflex", overlay=overlay).plan(Image(size_hw)).views[0].size_hw == expected


def test_golden_padding_of_a_tall_picture() -> None:
    """users.md E04: 1256 high, 950 wide into 768x768 is 768x581, 93 pixels left and 94 right."""
    plan = plan_of("llava_onevision", (950, 1256), overlay={"views": {"pick": {"from": {
        "tiles": None, "list": [[2, 2]], "side_at_most": None}}}})  # fmt: skip
    left, right = plan.views[1], plan.views[2]
    assert left.padding_px[1] == 93
    assert right.padding_px[3] == 94


PHI4 = [(16, 16), (16, 40), (40, 16), (16, 16), (1, 112), (48, 64), (48, 48), (24, 32)]


def test_golden_phi4_useful_cells() -> None:
    for size, shape in zip(SIZES, PHI4, strict=True):
        raster = plan_of("phi4_multimodal", size).parts[0].tokens
        assert raster.shape[1:] == shape, size


@pytest.mark.parametrize(("name", "marks"), [("lfm2_vl", [2, 2, 2, 2, 2, 9, 7, 2])])
def test_golden_marker_counts(name: str, marks: list[int]) -> None:
    for size, expected in zip(SIZES, marks, strict=True):
        stream = stream_of(name, size)
        assert sum(isinstance(run, Marker) for run in stream.runs) == expected, size
