"""Turns of a lattice by one product a cell: against float64, with gradients, and only where rows and columns are."""

import pytest
import torch

import visionpos as vp
from visionpos import Grid
from visionpos.geometry.separable import is_lattice, lattice_turns

GRIDS = [Grid(1, 1), Grid(1, 7), Grid(5, 1), Grid(3, 5), Grid(13, 11)]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("prefix", [0, 1, 5])
def test_reference_float64(grid: Grid, prefix: int) -> None:
    cells, freqs = vp.coordinates(grid), torch.randn(3, 2, 6)
    exact = vp.angles(cells.double(), freqs.double())
    cos, sin = lattice_turns(cells, grid, freqs, prefix=prefix)
    assert cos.shape == (3, prefix + grid.size, 6)
    assert cos.dtype == torch.float32
    assert bool((cos[:, :prefix] == 1).all())
    assert bool((sin[:, :prefix] == 0).all())
    for got, wanted in ((cos, exact.cos()), (sin, exact.sin())):
        assert (got[:, prefix:] - wanted).abs().max() < 4e-6


def test_reference_half_the_error_of_float32_angles() -> None:
    torch.manual_seed(0)
    grid, freqs = Grid(64, 48), 3 * torch.randn(4, 2, 16)
    cells = vp.coordinates(grid)
    exact = vp.angles(cells.double(), freqs.double()).cos()
    product = (lattice_turns(cells, grid, freqs)[0] - exact).square().mean().sqrt()
    direct = (vp.angles(cells, freqs).cos() - exact).square().mean().sqrt()
    assert product < 0.75 * direct


@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize("frames", [1, 3])
def test_gradient(prefix: int, frames: int) -> None:
    grid = Grid(2, 3, frames=frames)
    cells = (vp.coordinates(Grid(2, 3)).double() * 0.7 + 0.3).repeat(frames, 1)
    freqs = torch.randn(2, 2, 3, dtype=torch.float64, requires_grad=True)

    def run(freqs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return lattice_turns(cells, grid, freqs, prefix=prefix)

    assert torch.autograd.gradcheck(run, (freqs,))
    assert torch.autograd.gradgradcheck(run, (freqs,))
    other = freqs.detach().clone().requires_grad_()
    direct = vp.angles(cells, other)
    weight = torch.randn(2, 2, 6 * frames, 3, dtype=torch.float64)
    cos, sin = run(freqs)
    ((cos[:, prefix:] * weight[0]).sum() + (sin[:, prefix:] * weight[1]).sum()).backward()
    ((direct.cos() * weight[0]).sum() + (direct.sin() * weight[1]).sum()).backward()
    torch.testing.assert_close(freqs.grad, other.grad, rtol=1e-12, atol=1e-12)


def test_what_is_a_lattice() -> None:
    grid = Grid(3, 5)
    cells = vp.coordinates(grid)
    assert is_lattice(cells, grid)
    assert is_lattice(cells * torch.tensor([0.3, 7.0]) + torch.tensor([5.0, -1.0]), grid)
    bent = cells.clone()
    bent[7, 1] += 0.25
    for other in (bent, cells.flip(1), cells[torch.randperm(15)], cells.unsqueeze(0), cells[:10]):
        assert not is_lattice(other, grid)
    assert not is_lattice(cells, Grid(5, 3))
    clip = Grid(3, 5, frames=2)
    assert is_lattice(torch.cat([cells, cells]), clip)
    assert not is_lattice(torch.cat([cells, cells + 1]), clip)
    assert not is_lattice(vp.coordinates(clip), clip) or vp.coordinates(clip).shape[1] == 2
    assert not is_lattice(cells.clone().requires_grad_(), grid)
    assert not is_lattice(cells * torch.nan, grid)  # NaN is equal to nothing


@pytest.mark.parametrize("training", [False, True])
def test_mixed_rope_takes_it_and_jitter_keeps_lattices(*, training: bool) -> None:
    spec = vp.MixedRopeSpec(coords=vp.CoordSpec(shift=0.5) if training else vp.CoordSpec())
    module = vp.build(spec, vp.Dims(embed_dim=24, num_heads=2, depth=2)).train(training)
    grid = Grid(4, 7)
    points = module.points(grid)
    assert is_lattice(points, grid)
    over = module.over(points, grid, 1, prefix=1)
    exact = vp.angles(points.double(), module.frequencies[1].detach().double())
    assert (over.cos[:, 1:] - exact.cos()).abs().max() < 4e-6
    assert over.sin.untyped_storage().data_ptr() == over.cos.untyped_storage().data_ptr()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")
def test_transforms_of_torch_func() -> None:
    """vmap over images alone, vmap over stacked frequencies, forward mode: none knows our Function."""
    module = vp.build(vp.MixedRopeSpec(), vp.Dims(embed_dim=24, num_heads=2, depth=1)).eval()
    grid, own = Grid(3, 5), module.frequencies.detach()
    with torch.no_grad():
        wanted = module(grid).cos
        over_x = torch.vmap(lambda x: x * module(grid).cos)(torch.ones(2, 1))
    assert torch.allclose(over_x[1], wanted, atol=1e-5)

    def cosines(freqs: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(module, {"frequencies": freqs}, (grid,)).cos

    assert torch.allclose(torch.vmap(cosines)(torch.stack([own, own]))[1], wanted, atol=1e-5)
    _, tangent = torch.func.jvp(cosines, (own,), (torch.ones_like(own),))
    turns = vp.angles(vp.coordinates(grid), own[0])
    steps = vp.coordinates(grid).sum(-1, keepdim=True)  # of an angle, if all frequencies grow by 1
    assert torch.allclose(tangent, -turns.sin() * steps, atol=1e-4)
