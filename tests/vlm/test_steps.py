"""Size steps one by one: exact laws on drawn rectangles, and brute force where a step searches."""

from fractions import Fraction
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from visionpos.errors import ConfigError, PositionError
from visionpos.vlm import Image, family
from visionpos.vlm.box import Box
from visionpos.vlm.resize import (
    AlignedPixels,
    Area,
    Canvas,
    Edges,
    Fit,
    Multiple,
    PatchBudget,
    Patches,
    Refuse,
    RowBudget,
    Stretch,
    boxed,
    resized,
)

sides = st.integers(1, 3000)
small = st.integers(1, 120)


@given(sides, sides, st.integers(1, 2000), st.integers(1, 2000))
def test_invariant_fit_touches_its_box(height: int, width: int, box_w: int, box_h: int) -> None:
    """One side is the box's, the other is the largest below the ratio; covering is the mirror."""
    got = Fit(box=(box_w, box_h)).apply(Box(height, width))
    scale = min(Fraction(box_h, height), Fraction(box_w, width))
    assert (got.height, got.width) == (int(height * scale), int(width * scale))
    assert got.height == box_h or got.width == box_w
    over = Fit(box=(box_w, box_h), cover=True, rounding="ceil").apply(Box(height, width))
    scale = max(Fraction(box_h, height), Fraction(box_w, width))
    assert (over.height, over.width) == (ceil(height * scale), ceil(width * scale))


@given(sides, sides, st.integers(1, 2000))
def test_invariant_fit_without_upscaling_leaves_what_fits(
    height: int, width: int, box: int
) -> None:
    got = Fit(box=box, upscale=False).apply(Box(height, width))
    if max(height, width) <= box:
        assert (got.height, got.width) == (height, width)
    else:
        assert max(got.height, got.width) == box


@pytest.mark.parametrize(
    ("size", "expected"),
    [((100, 300), (334, 1000)), ((100, 299), (334, 1000)), ((101, 101), (1000, 1000))],
)
def test_fit_even_lifts_the_shorter_side(size: tuple[int, int], expected: tuple[int, int]) -> None:
    """333.3 and 334.4 floor to 333 and 334; an odd shorter side is lifted by one."""
    got = Fit(box=1000, even=True).apply(Box(*size))
    assert (got.height, got.width) == expected


def test_fit_at_most_upscale_to() -> None:
    """Llama 4: a small picture on a large canvas grows to 336, a large one keeps its size."""
    step = Fit(box=(672, 1008), at_most_upscale_to=336)
    assert step.apply(Box(100, 200)).size_hw == (168, 336)
    assert step.apply(Box(400, 500)).size_hw == (400, 500)


@given(small, small, st.integers(1, 60))
def test_invariant_canvas_splits_evenly(height: int, width: int, box: int) -> None:
    """Padding and crops alike have the smaller half above and left; the content keeps its size."""
    got = Canvas(box=box).apply(Box(height, width))
    assert (got.height, got.width, got.size_hw) == (height, width, (box, box))
    for side, corner in zip((height, width), got.corner_yx, strict=True):
        end = box - side - corner
        assert abs(end - corner) <= 1
        assert abs(corner) <= abs(end)
    end = Canvas(multiple=box, align="end").apply(Box(height, width))
    assert end.corner_yx == (0, 0)
    assert end.size_hw == tuple(ceil(side / box) * box for side in (height, width))
    square = Canvas(square=True).apply(Box(height, width))
    assert square.size_hw == (max(height, width),) * 2


def test_stretch_carries_the_picture_on_its_canvas() -> None:
    """LLaVA-1.5: 100 x 300 on 300 x 300 and then 336: the picture is rows 112 to 224."""
    box = boxed([Canvas(square=True), Stretch(box=336)], (100, 300))
    assert (box.size_hw, box.height, box.width, box.corner_yx) == ((336, 336), 112, 336, (112, 0))
    thin = boxed([Canvas(square=True), Stretch(box=336)], (1, 3000))
    assert thin.height == 1  # not refused: the canvas has tokens


def test_error_a_step_after_canvas() -> None:
    with pytest.raises(ConfigError, match=r"follows `canvas`.*only `stretch`.*Put `canvas` last"):
        boxed([Canvas(square=True), Fit(box=9)], (10, 20))
    with pytest.raises(ConfigError, match=r"canvas step has box 3.*square True; at most one"):
        Canvas(box=3, square=True)
    with pytest.raises(ConfigError, match=r"no box outside `fill`.*Add box"):
        resized([Fit()], (10, 20))


@pytest.mark.parametrize(
    ("size", "expected"),
    [((700, 1000), (1092, 1092)), ((1000, 364), (1092, 728)), ((1, 1456), (364, 1456))],
)
def test_multiple_chained_follows_the_long_side(
    size: tuple[int, int], expected: tuple[int, int]
) -> None:
    """1000 becomes 1092; 700 follows to 764 and goes to 1092; 364 follows to 397 and goes to 728."""
    assert Multiple(of=364, chained=True).apply(Box(*size)).size_hw == expected


def test_multiple_thin_at_most() -> None:
    step = Multiple(of=48, rounding="floor", thin_at_most=70)
    assert step.apply(Box(30, 900)).size_hw == (48, 30 * 48)
    assert step.apply(Box(9, 900)).size_hw == (48, 70 * 48)
    assert step.apply(Box(900, 30)).size_hw == (30 * 48, 48)
    assert step.apply(Box(20, 20)).height == 0  # both became 0: refused by `boxed`


@given(sides, sides, st.integers(1, 10**6))
def test_invariant_area_is_the_largest_below(height: int, width: int, px: int) -> None:
    got = Area(px=px).apply(Box(height, width))
    for side, other, new in ((height, width, got.height), (width, height, got.width)):
        assert new**2 * other <= px * side < (new + 1) ** 2 * other


@given(st.integers(1, 400), st.integers(1, 400), st.integers(1, 24), st.integers(1, 300))
def test_brute_force_patches(height: int, width: int, patch: int, budget: int) -> None:
    """No scale up to 100 gives a larger grid within the budget."""
    got = Patches(patch=patch, at_most=budget).apply(Box(height, width))
    rows, cols = got.height // patch, got.width // patch
    assert rows * cols <= budget
    steps = [(k, side) for side in (height, width) for k in range(1, budget + 1)]
    scales = {Fraction(100), *(Fraction(k * patch, side) for k, side in steps)}
    best = max(
        (
            scale
            for scale in scales
            if scale <= 100
            and max(ceil(height * scale / patch), 1) * max(ceil(width * scale / patch), 1) <= budget
        ),
        default=Fraction(0),
    )
    assert (rows, cols) == tuple(max(ceil(side * best / patch), 1) for side in (height, width))


@given(sides, sides)
def test_invariant_patch_budget_never_enlarges(height: int, width: int) -> None:
    got = PatchBudget(patch=14, at_most=300, side_at_most=40).apply(Box(height, width))
    assert 1 <= got.height <= min(height, 560)
    assert 1 <= got.width <= min(width, 560)
    if (height // 14 or 1) * (width // 14 or 1) <= 300 and max(height, width) <= 560:
        assert (got.height, got.width) == (height, width)


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 9))
def test_brute_force_aligned_pixels(height: int, width: int, cells: int) -> None:
    """Over the budget: the largest whole content height whose rounded-up grid fits."""
    step = AlignedPixels(multiple=28, min_px=1, max_px=cells * 784)
    got = step.apply(Box(height, width))

    def grid(content: int) -> tuple[int, int]:
        return ceil(content / 28), ceil(max(width * content // height, 1) / 28)

    if ceil(height / 28) * ceil(width / 28) <= cells:
        expected = ceil(height / 28), ceil(width / 28)
    else:
        fitting = [grid(h) for h in range(1, height + 1) if grid(h)[0] * grid(h)[1] <= cells]
        expected = max(fitting, default=None) or got.size_hw  # type: ignore[assignment]
        if not fitting:
            return
    assert (got.size_hw[0] // 28, got.size_hw[1] // 28) == expected


@given(sides, sides)
def test_invariant_edges_in_range(height: int, width: int) -> None:
    step = Edges(short_at_least=512, long_at_most=2048, multiple=16)
    got = step.apply(Box(height, width))
    assert got.height % 16 == got.width % 16 == 0
    assert min(got.height, got.width) >= 16
    assert max(got.height, got.width) <= 2048


@given(st.integers(32, 3000), st.integers(32, 3000), st.integers(1, 300))
def test_invariant_row_budget(height: int, width: int, frames: int) -> None:
    """Rows cost a cell more each; the result is a fixed point and never larger than the picture."""
    step = RowBudget(multiple=32, max_px=33554432, frame_px=1048576, over="clip")
    got = step.apply(Box(height, width, frames=frames))
    rows, cols = got.height // 32, got.width // 32
    assert (rows, cols) == (1, 1) or frames * rows * (cols + 1) * 1024 <= 33554432
    assert rows * cols * 1024 <= 1048576
    assert got.height <= height
    assert got.width <= width
    assert step.apply(got).size_hw == got.size_hw


@pytest.mark.parametrize(("step", "size", "message"), [
    (Refuse(side_over=100), (50, 101), r"size_hw is \(50, 101\); sides of at most 100"),
    (AlignedPixels(multiple=28, min_px=1, max_px=784, frames=4), (9, 9), r"4 frames.*max_px 784"),
    (Fit(box=100), (3000, 20), r"size_hw \(3000, 20\) becomes \(100, 0\) by step 'fit'; a side of 0"),
])  # fmt: skip
def test_error_names_size_and_limit(step: object, size: tuple[int, int], message: str) -> None:
    with pytest.raises(PositionError, match=message):
        resized([step], size)  # type: ignore[list-item]


def test_a_step_without_its_unit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"multiple step has of 0; at least 1 is required"):
        Multiple(of=0)
    with pytest.raises(ConfigError, match=r"key of is missing"):
        family("pixtral", overlay={"views": {"global": {"size": [{"kind": "multiple"}]}}})
    assert family("pixtral").plan(Image((9, 9))).cells == 1
