"""Size rules: the table of facts/mrope.md 6, the steps one by one, and what is refused."""

from fractions import Fraction
from math import ceil, floor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from visionpos.errors import PositionError
from visionpos.vlm import Image, Video, family, smart_resize
from visionpos.vlm.resize import Box, Enlarge, Pixels, Refuse, resized

# (h, w) -> qwen2_vl default, factor 32, qwen-vl-utils 28, paddle; with token counts
TABLE = {
    (224, 224): ((224, 224, 64), (256, 256, 64), (224, 224, 64), (392, 392, 196)),
    (480, 640): ((476, 644, 391), (480, 640, 300), (476, 644, 391), (476, 644, 391)),
    (1080, 1920): ((728, 1316, 1222), (1088, 1920, 2040), (1092, 1932, 2691), (1092, 1932, 2691)),
    (70, 70): ((56, 56, 4), (256, 256, 64), (56, 56, 4), (392, 392, 196)),
    (10, 1000): ((28, 560, 20), (32, 2560, 80), (28, 1008, 36), (56, 3864, 276)),
    (1, 200): ((28, 812, 29), (32, 3648, 114), (28, 196, 7), (28, 5600, 200)),
    (97, 131): ((84, 140, 15), (224, 320, 70), (84, 140, 15), (336, 448, 192)),
}
COLUMNS = [("qwen2_vl", "vendor"), ("qwen3_vl", "vendor"), ("qwen2_vl", "qwen_vl_utils")]


@pytest.mark.parametrize("size_hw", TABLE)
@pytest.mark.parametrize("column", range(3))
def test_golden_image_sizes(size_hw: tuple[int, int], column: int) -> None:
    name, dialect = COLUMNS[column]
    plan = family(name, dialect=dialect).plan(Image(size_hw))
    assert (*plan.views[0].size_hw, plan.cells) == TABLE[size_hw][column]


@pytest.mark.parametrize("size_hw", TABLE)
def test_golden_enlarge_half_even(size_hw: tuple[int, int]) -> None:
    """The PaddleOCR column: a side under 28 is lifted first."""
    steps = [
        Enlarge(side_at_least=28, keep_ratio="half_even"),
        Refuse(ratio_over=200),
        Pixels(multiple=28, min_px=147456, max_px=2359296, arithmetic="float64"),
    ]
    height, width = resized(steps, size_hw)
    assert (height, width, height * width // 784) == TABLE[size_hw][3]


@pytest.mark.parametrize(("frames", "size_hw"), [
    (2, (480, 640)), (3, (416, 576)), (4, (384, 512)), (5, (320, 448)), (7, (288, 384)), (16, (192, 256)),
])  # fmt: skip
def test_golden_clip_budget(frames: int, size_hw: tuple[int, int]) -> None:
    """Qwen3-VL, 480x640: the budget is for all frames."""
    assert family("qwen3_vl").plan(Video((480, 640), frames=frames)).views[0].size_hw == size_hw


def test_golden_clip_budget_is_tested_on_an_even_number_of_frames() -> None:
    """Three frames count as four in the test and as three in the factor: 448x512 is over, and one side grows."""
    assert family("qwen3_vl").plan(Video((448, 512), frames=3)).views[0].size_hw == (448, 544)
    assert family("qwen3_vl").plan(Video((448, 512), frames=2)).views[0].size_hw == (448, 512)


def test_golden_smart_resize_where_floats_and_fractions_part() -> None:
    """1152x1440 at 1003520 pixels is an exact quotient; the published float code floors one unit lower."""
    assert smart_resize((1152, 1440), 28, 3136, 1003520) == (868, 1120)
    assert smart_resize((1152, 1440), 28, 3136, 1003520, arithmetic="exact") == (896, 1120)
    assert 896 * 1120 <= 1003520


sides = st.integers(1, 4000)


@given(sides, sides, st.integers(1, 64), st.integers(1, 5000), st.integers(1, 40))
def test_invariant_pixels_in_exact_numbers(
    height: int, width: int, multiple: int, least: int, times: int
) -> None:
    """Over the budget the sides are the largest multiples below the ratio's ray, under it the smallest above."""
    step = Pixels(multiple=multiple, min_px=least, max_px=least * times)
    box = step.apply(Box(height, width))
    got = box.height, box.width
    nearest = [round(Fraction(side, multiple)) for side in (height, width)]
    area = nearest[0] * nearest[1] * multiple**2
    for side, other, new in zip((height, width), (width, height), got, strict=True):
        assert new % multiple == 0
        units = new // multiple
        if area > step.max_px:
            square = Fraction(side * step.max_px, other * multiple**2)
            assert units == 1 or units**2 <= square < (units + 1) ** 2
        elif area < step.min_px:
            square = Fraction(side * step.min_px, other * multiple**2)
            assert (units - 1) ** 2 < square <= units**2
    transposed = step.apply(Box(width, height))
    assert (transposed.width, transposed.height) == got


@given(st.integers(1, 100), st.integers(1, 100), st.integers(1, 64))
def test_invariant_enlarge_keeps_ratio(height: int, width: int, least: int) -> None:
    box = Enlarge(side_at_least=least, keep_ratio="floor").apply(Box(height, width))
    scale = max(Fraction(1), Fraction(least, min(height, width)))
    assert (box.height, box.width) == (floor(height * scale), floor(width * scale))
    assert min(box.height, box.width) >= least or min(height, width) >= least
    alone = Enlarge(side_at_least=least).apply(Box(height, width))
    assert (alone.height, alone.width) == (max(height, least), max(width, least))
    assert ceil(scale) >= 1


def test_shape_transposed_picture_gives_transposed_size() -> None:
    for height, width in [(97, 131), (1080, 1920), (10, 1000), (4000, 37)]:
        size = smart_resize((height, width), 28, 3136, 1003520)
        assert smart_resize((width, height), 28, 3136, 1003520) == size[::-1]


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl"])
def test_error_ratio_names_size_limit_and_family(name: str) -> None:
    assert family(name).plan(Image((1, 200))).cells
    with pytest.raises(
        PositionError, match=rf"{name}: size_hw is \(1, 201\).*at most 200 to 1.*Crop or pad"
    ):
        family(name).plan(Image((1, 201)))


def test_error_small_side() -> None:
    with pytest.raises(PositionError, match=r"size_hw is \(7, 9\); sides of at least 8.*Enlarge"):
        resized([Refuse(side_under=8)], (7, 9))


def test_error_a_side_of_zero_pixels() -> None:
    """qwen-vl-utils does not lift the floor of a shrunk side."""
    with pytest.raises(
        PositionError, match=r"size_hw \(20, 3000\) becomes \(0, 672\).*'pixels'.*Pad the picture"
    ):
        smart_resize((20, 3000), 28, 28, 3136, clamp=("round",))
    assert smart_resize((20, 3000), 28, 28, 3136) == (28, 672)  # lifted to one unit


@pytest.mark.parametrize("frames", [1])
def test_error_too_few_frames(frames: int) -> None:
    with pytest.raises(PositionError, match=r"qwen3_vl: the clip has 1 frame; at least 2.*Image"):
        family("qwen3_vl").plan(Video((64, 64), frames=frames))
