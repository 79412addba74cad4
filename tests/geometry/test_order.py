"""Token orders of towers: merge blocks, windows, and back."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import visionpos as vp
from tests.compiled import graphs_of
from tests.reference import order as oracle
from tests.strategies import volumes
from visionpos import CoordSpec, Grid, PositionError
from visionpos.geometry import inverse_order, merge_order, token_order, window_order


@pytest.mark.parametrize("hw", [(2, 6), (6, 2), (2, 2), (14, 10), (4, 22)])
def test_shape_of_orders(hw):
    """Indices over all tokens of the clip, and over its merged cells."""
    grid = Grid(*hw, frames=3)
    assert merge_order(grid).shape == (grid.size,)
    order, ends = window_order(grid, 4, merge=2)
    assert order.shape == (grid.size // 4,)
    assert ends[0] == 0
    assert ends[-1] == grid.size


def test_reference_golden_merge_blocks():
    """facts/mrope.md 5 and users.md D11: a 4x4 grid, blocks of 2."""
    coords = vp.coordinates(Grid(4, 4))[merge_order(Grid(4, 4), 2)].long()
    assert coords[:, 0].tolist() == [int(c) for c in "0011001122332233"]
    assert coords[:, 1].tolist() == [int(c) for c in "0101232301012323"]


# facts/mrope.md 5: patch grid (t, h, w), merge 2, window 112 px = 4 merged cells.
GOLDEN_WINDOWS = [
    ((1, 8, 8), list(range(16)), [0, 64]),
    (
        (1, 12, 10),
        [
            *(0, 1, 2, 3, 5, 6, 7, 8, 10, 11, 12, 13, 15, 16, 17, 18),
            *(4, 9, 14, 19, 20, 21, 22, 23, 25, 26, 27, 28, 24, 29),
        ],
        [0, 64, 80, 112, 120],
    ),
    (
        (2, 4, 10),
        [0, 1, 2, 3, 5, 6, 7, 8, 4, 9, 10, 11, 12, 13, 15, 16, 17, 18, 14, 19],
        [0, 32, 40, 72, 80],
    ),
    ((1, 16, 16), None, [0, 64, 128, 192, 256]),
]


@pytest.mark.parametrize(("thw", "cells", "ends"), GOLDEN_WINDOWS)
def test_reference_golden_windows(thw, cells, ends):
    order, found = window_order(Grid(*thw[1:], frames=thw[0]), 4, merge=2)
    assert found.tolist() == ends
    assert cells is None or order.tolist() == cells


@given(volumes(max_side=6, max_frames=3), st.integers(1, 4))
def test_reference_merge_blocks(thw, merge):
    t, h, w = thw[0], thw[1] * merge, thw[2] * merge
    expected = oracle.merge_blocks(t, h, w, merge)
    assert merge_order(Grid(h, w, frames=t), merge).tolist() == expected


@given(volumes(max_side=11, max_frames=3), st.integers(1, 5), st.integers(1, 3))
def test_reference_windows(thw, window, merge):
    t, h, w = thw
    cells, sizes = oracle.windows(t, h, w, window)
    order, ends = window_order(Grid(h * merge, w * merge, frames=t), window, merge=merge)
    assert order.tolist() == cells
    assert ends.diff().tolist() == [size * merge * merge for size in sizes]


@given(volumes(max_side=6, max_frames=2), st.integers(1, 3), st.integers(1, 4))
def test_invariant_there_and_back(thw, merge, window):
    """Permutations: every token once, and the inverse restores row-major order (users.md D11)."""
    grid = Grid(thw[1] * merge, thw[2] * merge, frames=thw[0])
    order = merge_order(grid, merge)
    x = torch.randn(grid.size, 2)
    assert torch.equal(x[order][inverse_order(order)], x)
    cells, _ = window_order(grid, window, merge=merge)
    tokens = token_order(cells, merge * merge)
    y = x[order]
    assert torch.equal(y[tokens][inverse_order(tokens)], y)
    assert sorted(tokens.tolist()) == list(range(grid.size))


@given(volumes(max_side=4, max_frames=2), st.integers(1, 3))
def test_invariant_windows_hold_whole_cells(thw, window):
    """Inside every window all tokens are one frame's, at most window cells high and wide."""
    merge = 2
    grid = Grid(thw[1] * merge, thw[2] * merge, frames=thw[0])
    cells, ends = window_order(grid, window, merge=merge)
    order = merge_order(grid, merge)[token_order(cells, merge * merge)]
    coords = vp.coordinates(grid, CoordSpec(axes=3))[order]
    for start, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        extent = coords[start:end].amax(0) - coords[start:end].amin(0)
        assert extent[0] == 0
        assert extent[1:].max() < window * merge


@given(volumes(max_side=4, max_frames=1))
def test_invariant_rotation_follows_the_tokens(thw):
    """Coordinates in tower order or the rotation in tower order: the same scores, token for token."""
    grid = Grid(2 * thw[1], 2 * thw[2])
    order = merge_order(grid)
    freqs = vp.axial_freqs(16, theta=1e4)
    plain = vp.Rotation.of(vp.angles(vp.coordinates(grid), freqs))
    moved = vp.Rotation.of(vp.angles(vp.coordinates(grid)[order], freqs))
    assert torch.equal(plain.select(order).cos, moved.cos)
    q = torch.randn(1, 2, grid.size, 16)
    raster, tower = plain.apply(q), moved.apply(q[:, :, order])
    assert torch.equal(tower[:, :, inverse_order(order)], raster)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: merge_order(Grid(3, 4)), r"grid \(1, 3, 4\).*cannot be merged by \(1, 2, 2\)"),
        (lambda: merge_order(Grid(4, 4), 0), r"cannot be merged by \(1, 0, 0\)"),
        (lambda: window_order(Grid(4, 4), 0), r"window is 0; a whole side of at least 1"),
        (lambda: window_order(Grid(4, 5), 2, merge=2), r"grid \(1, 4, 5\)"),
        (
            lambda: token_order(torch.arange(3), 0),
            r"unit is 0; a whole number of at least 1 token a cell",
        ),
    ],
)
def test_error_sizes(call, match):
    with pytest.raises(PositionError, match=match):
        call()


def test_compile_one_graph_over_six_sizes():
    sizes = [(6, 8), (8, 6), (4, 12), (10, 14), (16, 22), (12, 26)]
    assert graphs_of(lambda h, w: merge_order(Grid(h, w)), sizes) == 1


def test_compile_windows():
    """Two windows or more along each side: PyTorch specialises a single one, as it does every size of 1."""
    sizes = [(10, 22), (22, 10), (12, 30), (28, 14), (18, 20), (34, 26)]
    assert graphs_of(lambda h, w: window_order(Grid(h, w), 4, merge=2), sizes) == 1


def test_device(device):
    order, ends = window_order(Grid(12, 10), 4, merge=2, device=device)
    assert order.device.type == ends.device.type == device.type
    assert order.tolist() == GOLDEN_WINDOWS[1][1]
    assert merge_order(Grid(2, 4), device=device).tolist() == [0, 1, 4, 5, 2, 3, 6, 7]


@pytest.mark.parametrize("bad", [2.5, 2.0, True, "2", 0, None])
def test_error_no_whole_numbers(bad):
    for call, name in (
        (lambda: vp.geometry.window_order(Grid(4, 4), bad), "window is"),
        (lambda: vp.geometry.window_order(Grid(4, 4), 2, merge=bad), "cannot be merged by"),
        (lambda: vp.geometry.merge_order(Grid(4, 4), bad), "cannot be merged by"),
        (lambda: vp.geometry.token_order(torch.arange(4), bad), "unit is"),
    ):
        with pytest.raises(PositionError, match=name):
            call()
