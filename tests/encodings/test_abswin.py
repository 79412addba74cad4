"""Absolute-window tables: a global table stretched, a window table tiled and never stretched. Hiera, SAM 2."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import visionpos as vp
from tests.compiled import SIZES, graphs_of
from tests.reference import tables as oracle
from tests.strategies import grids, seeds
from visionpos import Dims, Grid, PositionError
from visionpos.config import load_encoding
from visionpos.encodings.abswin import AbsWin, AbsWinSpec

DIMS = Dims(embed_dim=4, num_heads=1, depth=1)


def abswin(seed: int = 0, dtype=torch.float64, **fields) -> AbsWin:
    """A 5x6 global table and a 2x3 window."""
    spec = AbsWinSpec(**{"global_hw": (5, 6), "window_hw": (2, 3), "std": 1.0, **fields})
    return AbsWin(spec, DIMS, generator=torch.Generator().manual_seed(seed)).to(dtype)


def loops(module: AbsWin, hw: tuple[int, int]) -> torch.Tensor:
    spec = module.spec
    whole, window = (
        table.detach().unflatten(0, side).numpy()
        for table, side in (
            (module.whole, spec.global_hw),
            (module.window, spec.window_hw),
        )
    )
    if hw == spec.global_hw:  # the table itself, also where a recipe would not be the identity
        tiled = oracle.window(np.zeros_like(whole), window, hw, spec.recipe)
        return torch.from_numpy(tiled + whole.reshape(-1, whole.shape[-1]))
    return torch.from_numpy(oracle.window(whole, window, hw, spec.recipe))


@pytest.mark.parametrize("hw", [(2, 3), (4, 9), (14, 3), (2, 33), (22, 39)])
def test_shape_of_a_code(hw):
    module = abswin()
    assert (module.whole.shape, module.window.shape) == ((30, 4), (6, 4))
    assert module(Grid(*hw)).shape == (hw[0] * hw[1], 4)
    assert module.at(torch.zeros(2, 7, 2), hw).shape == (2, 7, 4)


@given(st.integers(1, 4), st.integers(1, 4), st.sampled_from(["hiera", "sam2"]), seeds())
def test_reference_whole_windows(rows, columns, recipe, seed):
    """Both dialects cell by cell, on any number of windows a side."""
    module, hw = abswin(seed, recipe=recipe), (2 * rows, 3 * columns)
    torch.testing.assert_close(
        module(Grid(*hw)).detach(), loops(module, hw), rtol=1e-10, atol=1e-10
    )


@given(grids(max_side=9), st.sampled_from(["hiera", "sam2"]), seeds())
def test_reference_crop(hw, recipe, seed):
    """fit "crop": the tile goes on to the edge of any grid."""
    module = abswin(seed, recipe=recipe, fit="crop")
    torch.testing.assert_close(
        module(Grid(*hw)).detach(), loops(module, hw), rtol=1e-10, atol=1e-10
    )


@pytest.mark.parametrize(
    ("name", "recipe", "global_hw"),
    [
        ("hiera_abswin", "hiera", (16, 16)),
        ("sam2_hiera", "sam2", (7, 7)),
        ("sam2_hiera_base", "sam2", (14, 14)),
    ],
)
def test_reference_shipped(name, recipe, global_hw):
    spec = load_encoding(name)
    assert (spec.recipe, spec.global_hw, spec.window_hw) == (recipe, global_hw, (8, 8))


@given(grids(max_side=4), seeds())
def test_invariant_every_window_is_alike(hw, seed):
    """With a zero global table all windows have one code, at every grid: it is tiled, never interpolated."""
    module = abswin(seed)
    with torch.no_grad():
        module.whole.zero_()
    grid = Grid(2 * hw[0], 3 * hw[1])
    lattice = module(grid).unflatten(0, (hw[0], 2, hw[1], 3)).transpose(1, 2).flatten(2, 3)
    assert (lattice == module.window).all()


def test_invariant_window_table_interpolated_would_differ():
    """facts/users.md C09: stretching the sum of both tables, as a plain resize does, is another code."""
    module = abswin()
    own, target = Grid(10, 6), Grid(20, 12)
    stretched = vp.resample(module(own), source=own, target=target, recipe="hiera")
    assert (stretched - module(target)).norm() / module(target).norm() > 0.3


@given(grids(max_side=5), st.sampled_from(["hiera", "sam2"]), seeds())
def test_invariant_at_equals_forward(hw, recipe, seed):
    """Masked mask units and unrolled tokens: any cells in any order, the same code."""
    module, grid = abswin(recipe=recipe), Grid(2 * hw[0], 3 * hw[1])
    order = torch.randperm(grid.size, generator=torch.Generator().manual_seed(seed))
    order = order[: 1 + grid.size // 2]
    coords = vp.coordinates(grid).double()[order]
    out = module.at(coords, (grid.height, grid.width))
    torch.testing.assert_close(out, module(grid)[order], rtol=1e-9, atol=1e-9)


def test_invariant_batch_is_one_by_one():
    module = abswin()
    shapes, coords = [(4, 3), (2, 6)], torch.zeros(2, 12, 2, dtype=torch.float64)
    for i, hw in enumerate(shapes):
        coords[i] = vp.coordinates(Grid(*hw))
    valid = torch.ones(2, 12, dtype=torch.bool)
    valid[1, 5:] = False
    out = module.at(coords, torch.tensor(shapes), valid=valid)
    torch.testing.assert_close(out[0], module(Grid(4, 3)))
    torch.testing.assert_close(out[1, :5], module(Grid(2, 6))[:5])
    assert (out[1, 5:] == 0).all()


def test_invariant_dialects_part():
    """Facts 1C: with and without antialias differ even when the global table is enlarged."""
    one, two = abswin(recipe="hiera"), abswin(recipe="sam2")
    for hw in ((8, 9), (2, 3)):
        assert (one(Grid(*hw)) - two(Grid(*hw))).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"window_hw": (0, 8)}, r"window_hw is \(0, 8\); 2 whole numbers of at least 1"),
        ({"global_hw": (7,)}, r"global_hw is \(7,\)"),
        ({"recipe": "abswin"}, r"recipe is 'abswin'"),
        ({"fit": "pad"}, r"fit is 'pad'; it must be one of 'exact', 'crop'"),
        ({"std": -1.0}, r"std is -1\.0"),
    ],
)
def test_error_spec(fields, match):
    with pytest.raises(PositionError, match=match):
        AbsWinSpec(**fields)


def test_error_grid():
    """facts/users.md C09: 472 px at stride 4 are 118 cells, 118 // 8 * 8 = 112: refused, or cropped on request."""
    grid = Grid.of_image((472, 472), patch=4)
    with pytest.raises(
        PositionError, match=r"grid 118x118 is no multiple of window 8x8; .*fit='crop'"
    ):
        AbsWin(AbsWinSpec(), DIMS)(grid)
    out = AbsWin(AbsWinSpec(fit="crop"), DIMS)(grid)
    assert out.shape == (118 * 118, 4)


def test_error_state():
    spec = AbsWinSpec(global_hw=(5, 6), window_hw=(2, 3))
    state = {"pos_embed": torch.zeros(1, 4, 6, 5), "pos_embed_win": torch.zeros(1, 4, 2, 3)}
    match = r"the whole table of the state dict is \(1, 4, 6, 5\); \(1, d, 5, 6\) is required"
    with pytest.raises(PositionError, match=match):
        AbsWin.from_source(state, spec, DIMS)
    with pytest.raises(PositionError, match=r"no entry pos_embed_win or pos_embed_window"):
        AbsWin.from_source({"pos_embed": torch.zeros(1, 4, 5, 6)}, spec, DIMS)


def test_gradient_of_the_tables():
    module = abswin()

    def run(whole, window):
        return torch.func.functional_call(module, {"whole": whole, "window": window}, (Grid(4, 3),))

    assert torch.autograd.gradcheck(run, (module.whole, module.window))


@pytest.mark.parametrize("recipe", ["hiera", "sam2"])
def test_compile_points(recipe):
    module = abswin(dtype=torch.float32, recipe=recipe, fit="crop")
    calls = [
        (torch.randint(2, (2, h * w, 2)).float(), torch.tensor([[h, w], [w, h]])) for h, w in SIZES
    ]
    assert graphs_of(module.at, calls) == 1


def test_device_fake_cuda():
    module, cuda = abswin(fit="crop"), torch.device("cuda", 0)
    with FakeTensorMode():
        module.whole = nn.Parameter(torch.empty(30, 4, device=cuda))
        module.window = nn.Parameter(torch.empty(6, 4, device=cuda))
        assert module(Grid(3, 5)).device == cuda
        assert module.at(torch.empty(7, 2, device=cuda), (3, 5)).device == cuda
