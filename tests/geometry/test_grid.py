"""Grid: token counts of images, clips and merged cells, on rectangles."""

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import visionpos as vp
from tests.compiled import SIZES, graphs_of
from tests.strategies import grids, volumes
from visionpos import Grid, PositionError


@pytest.mark.parametrize(
    ("height", "width", "frames"),
    [(3, 5, 1), (1, 7, 1), (7, 1, 1), (13, 11, 1), (3, 5, 2), (1, 1, 4)],
)
def test_shape_of_a_grid(height, width, frames):
    """Sides are ordered (t, y, x) and their product is the number of tokens."""
    grid = Grid(height=height, width=width, frames=frames)
    assert grid.shape == (frames, height, width)
    assert grid.size == frames * height * width


# size_hw, patch, fit -> cells (y, x), counted by hand.
@pytest.mark.parametrize(
    ("size_hw", "patch", "fit", "cells"),
    [
        ((448, 672), 16, "exact", (28, 42)),
        ((546, 518), 14, "exact", (39, 37)),
        ((32, 96), (16, 32), "exact", (2, 3)),
        ((225, 239), 14, "floor", (16, 17)),
        ((225, 239), 14, "pad", (17, 18)),
        ((150, 230), 16, "pad", (10, 15)),  # timm issue 1863
        ((5, 33), 16, "pad", (1, 3)),
    ],
)
def test_reference_of_image(size_hw, patch, fit, cells):
    """An image holds as many cells as patches begin (pad) or end (floor) inside it."""
    grid = Grid.of_image(size_hw, patch, fit=fit)
    assert (grid.height, grid.width) == cells


@pytest.mark.parametrize("side_px", [546, 602, 1092, 1204, 1610, 1722, 2184])
def test_reference_sizes_that_lose_a_patch_by_scale_factor(side_px):
    """Facts 5.1 and 2 (dinov2 PR 378): 546 px is 39 patches of 14; a float scale factor rounds it to 38."""
    assert Grid.of_image((side_px, 518), 14).shape == (1, side_px // 14, 37)
    assert int(37 * ((side_px // 14) / 37)) == side_px // 14 - 1  # the trap is real


@given(grids(max_side=40), st.integers(1, 32), st.integers(1, 32))
def test_invariant_grid_survives_its_own_image(hw, patch_h, patch_w):
    """Grid -> pixels -> Grid is the identity, whatever the fit."""
    size_hw = (hw[0] * patch_h, hw[1] * patch_w)
    for fit in ("exact", "floor", "pad"):
        assert Grid.of_image(size_hw, (patch_h, patch_w), fit=fit) == Grid(*hw)


@given(st.tuples(st.integers(40, 500), st.integers(40, 500)), st.integers(1, 40))
def test_invariant_pad_has_at_most_one_cell_more(size_hw, patch):
    """ "pad" covers the image, "floor" is covered by it, and they differ by the partly filled patch alone."""
    low, high = (Grid.of_image(size_hw, patch, fit=fit) for fit in ("floor", "pad"))
    for side, below, above in zip(size_hw, low.shape[1:], high.shape[1:], strict=True):
        assert below * patch <= side <= above * patch
        assert above - below == (side % patch > 0)


@given(volumes(max_side=12, max_frames=4), st.integers(1, 4), st.integers(1, 3))
def test_invariant_merge_undoes_a_split(thw, merge, frames):
    """Splitting every cell and merging again gives the grid back."""
    t, h, w = thw
    fine = Grid(h * merge, w * merge, t * frames)
    assert fine.merged(merge, frames=frames) == Grid(h, w, t)


@given(grids(max_side=30))
def test_invariant_equal_counts_are_not_equal_grids(hw):
    """A grid is a value: equal sides are equal, hash alike and pickle; a turned rectangle is another grid."""
    grid = Grid(*hw)
    assert grid == Grid(*hw) == pickle.loads(pickle.dumps(grid))
    assert len({grid, Grid(*hw)}) == 1
    assert (grid == Grid(hw[1], hw[0])) == (hw[0] == hw[1])


@given(st.integers(1, 200))
def test_invariant_square_is_asked_for(side):
    """A square count gives its square; its neighbours are refused."""
    assert Grid.square(side * side).shape == (1, side, side)
    with pytest.raises(PositionError, match=str(side * side + 1)):
        Grid.square(side * side + 1)


@pytest.mark.parametrize("bad", [0, -3, 2.0, "4", True, None])
@pytest.mark.parametrize("name", ["height", "width", "frames"])
def test_error_side(name, bad):
    sides = {"height": 3, "width": 5, "frames": 2, name: bad}
    with pytest.raises(
        PositionError, match=rf"Grid {name} is {bad!r};.*at least 1.*Grid\.of_image"
    ):
        Grid(**sides)


@pytest.mark.parametrize(
    ("size_hw", "patch", "match"),
    [
        (
            (225, 224),
            14,
            r"size_hw \(225, 224\) is not divisible by patch \(14, 14\).*fit=\"floor\".*\"pad\"",
        ),
        ((224, 230), (14, 16), r"\(224, 230\) is not divisible by patch \(14, 16\)"),
        (
            (0, 224),
            14,
            r"size_hw is \(0, 224\); two whole numbers \(height, width\) of at least 1 pixel",
        ),
        ((224, -14), 14, r"size_hw is \(224, -14\)"),
        ((224.0, 224), 14, r"size_hw is \(224\.0, 224\)"),
        ((3, 224, 224), 14, r"size_hw is \(3, 224, 224\)"),
        ((224, 224), 0, r"patch is \(0, 0\)"),
        ((224, 224), (16,), r"patch is \(16,\)"),
    ],
)
def test_error_of_image(size_hw, patch, match):
    with pytest.raises(PositionError, match=match):
        Grid.of_image(size_hw, patch)


def test_error_fit():
    with pytest.raises(
        PositionError, match=r"fit is 'round'; it must be 'exact', 'floor' or 'pad'"
    ):
        Grid.of_image((224, 224), 16, fit="round")


def test_error_floor_leaves_nothing():
    """An image smaller than a patch has no whole patch."""
    with pytest.raises(PositionError, match=r"Grid height is 0;"):
        Grid.of_image((9, 224), 14, fit="floor")


@pytest.mark.parametrize("count", [0, -4, 36 + 1, 8 * 12])
def test_error_square(count):
    """Prefix tokens left in the count, or a rectangle, are refused; 4x9 is the caller's to name."""
    with pytest.raises(
        PositionError, match=rf"tokens is {count}, which is no square.*Grid\(height="
    ):
        Grid.square(count)


@pytest.mark.parametrize(("merge", "frames"), [(2, 1), (0, 1), (3, 2), (3, 0)])
def test_error_merged(merge, frames):
    with pytest.raises(
        PositionError,
        match=rf"grid \(3, 9, 6\).*by \({frames}, {merge}, {merge}\).*multiple of patch",
    ):
        Grid(9, 6, frames=3).merged(merge, frames=frames)


def test_compile_one_graph_from_image_to_coordinates():
    """The grid is read from the tensor inside the graph; sizes are not baked in (timm compiles one graph a size)."""

    def run(image):
        return vp.coordinates(Grid.of_image((image.shape[-2], image.shape[-1]), 4))

    calls = [(torch.zeros(2, 3, 4 * h, 4 * w),) for h, w in SIZES]
    assert graphs_of(run, calls) == 1
