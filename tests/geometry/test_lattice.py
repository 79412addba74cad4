"""A whole grid from its sides: the same bits as cell by cell, and the waves of a sum."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import visionpos as vp
from tests.compiled import SIZES, graphs_of
from tests.strategies import grids, seeds, volumes
from tests.tolerances import assert_close_to
from visionpos import CoordSpec, Dims, Grid
from visionpos.config import load_encoding
from visionpos.geometry.lattice import crossed_waves, lattice_angles, owned_waves, ticks
from visionpos.geometry.waves import waves

UNITS = ("index", "centred", "endpoint", "fractional", "span")


@pytest.mark.parametrize(
    ("grid", "axes", "expected"),
    [
        (Grid(2, 3), 2, [[0, 1], [0, 1, 2]]),
        (Grid(2, 3, frames=4), 2, [[0, 1], [0, 1, 2]]),
        (Grid(2, 3, frames=4), 3, [[0, 1, 2, 3], [0, 1], [0, 1, 2]]),
        (Grid(2, 3), 1, [[0, 1, 2, 3, 4, 5]]),
        (Grid(1, 1), 2, [[0], [0]]),
    ],
)
def test_shape_of_ticks(grid, axes, expected):
    found = ticks(vp.coordinates(grid, CoordSpec(axes=axes)), grid)
    assert [line.tolist() for line in found] == expected


@given(
    volumes(max_side=9, max_frames=3), st.sampled_from(UNITS), st.sampled_from([1, 2, 3]), seeds()
)
def test_invariant_angles_are_those_of_the_cells(thw, unit, axes, seed):
    """Bit for bit, for any frequencies: the order of operations is the same."""
    grid = Grid(thw[1], thw[2], thw[0])
    cells = vp.coordinates(grid, CoordSpec(unit=unit, axes=axes))
    freqs = torch.randn(axes, 5, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(lattice_angles(cells, grid, freqs), vp.angles(cells, freqs))


@given(
    volumes(max_side=9, max_frames=3), st.sampled_from(UNITS), st.sampled_from([1, 2, 3]), seeds()
)
def test_invariant_waves_of_owned_pairs(thw, unit, axes, seed):
    """Bit for bit, where a pair has one axis; a pair that stands still has cosine 1."""
    grid = Grid(thw[1], thw[2], thw[0])
    cells = vp.coordinates(grid, CoordSpec(unit=unit, axes=axes))
    draws = torch.Generator().manual_seed(seed)
    owner = torch.randint(0, axes, (7,), generator=draws)
    freqs = torch.zeros(axes, 7).scatter(0, owner[None], torch.randn(1, 7, generator=draws))
    freqs[:, 3] = 0.0
    cos, sin = owned_waves(cells, grid, freqs)
    turns = vp.angles(cells, freqs)
    assert torch.equal(cos, turns.cos())
    assert torch.equal(sin, turns.sin())
    assert (cos[:, 3] == 1).all()


@given(grids(max_side=9), seeds())
def test_reference_crossed_waves(hw, seed):
    """sin and cos of y + x in float64; a float32 sum of angles is no closer to it."""
    draws = torch.Generator().manual_seed(seed)
    high, wide = (
        6.3 * torch.randn(hw[0], 1, 5, generator=draws),
        6.3 * torch.randn(hw[1], 5, generator=draws),
    )
    expected = waves(high.double() + wide.double())
    assert_close_to(crossed_waves(high, wide), expected, kind="table")
    assert_close_to(crossed_waves(high.double(), wide.double()), expected, kind="table")


def test_invariant_crossed_waves_of_one_point():
    """A point alone and the same point in a grid: the same bits, whatever the vector width."""
    high, wide = torch.randn(7, 1, 13), torch.randn(5, 13)
    whole = crossed_waves(high, wide)
    for y in range(7):
        for x in range(5):
            assert torch.equal(crossed_waves(high[y, 0], wide[x]), whole[y, x])


def test_gradient_of_crossed_waves():
    high = torch.randn(3, 1, 2, dtype=torch.float64, requires_grad=True)
    wide = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(crossed_waves, (high, wide))


@pytest.mark.parametrize("of", [lattice_angles, owned_waves])
def test_compile_one_graph_over_six_sizes(of):
    freqs = vp.axial_freqs(8)

    def built(h, w):
        grid = Grid(h, w)
        return of(vp.coordinates(grid), grid, freqs)

    assert graphs_of(built, SIZES) == 1


AXIAL = ("dinov3", "eva02", "rope_vit_axial", "pixtral_vision", "pixtral_mistral", "vjepa2")


@pytest.mark.parametrize("name", AXIAL)
@pytest.mark.parametrize("grid", [Grid(3, 5), Grid(1, 7), Grid(2, 3, frames=2)])
def test_invariant_axial_rope_is_that_of_its_points(name, grid):
    """The short way of an axial encoding: the same bits as the rotation by the angles of every cell."""
    rope = vp.build(load_encoding(name), Dims(embed_dim=768, num_heads=12, depth=1)).eval()
    short, long = rope(grid), rope.rotation(rope.angles(rope.points(grid)))
    assert torch.equal(short.cos, long.cos)
    assert torch.equal(short.sin, long.sin)
    assert (short.pairing, short.axes) == (long.pairing, long.axes)
