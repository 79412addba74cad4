"""Tables with time: a spatial plus a temporal table, or one vector a cell of a clip."""

import pytest
import torch
import torch.nn.functional as F
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
from visionpos.encodings.spatiotemporal import SpatioTemporal, SpatioTemporalSpec

DIMS = Dims(embed_dim=4, num_heads=1, depth=1)


def table(seed: int = 0, dtype=torch.float64, **fields) -> SpatioTemporal:
    """Trained on 3 frames of 4x5."""
    spec = SpatioTemporalSpec(**{"grid_thw": (3, 4, 5), "std": 1.0, **fields})
    return SpatioTemporal(spec, DIMS, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("separable", [True, False])
@pytest.mark.parametrize("prefix_rows", [0, 1])
def test_shape_of_a_clip(separable, prefix_rows):
    module = table(separable=separable, prefix_rows=prefix_rows)
    assert module.spatial.shape == (prefix_rows + (20 if separable else 60), 4)
    assert (module.temporal is None) != separable
    assert module.prefix().shape == (prefix_rows, 4)
    for hw in ((4, 5), (1, 7), (7, 1), (13, 11)):
        assert module(Grid(*hw, frames=3)).shape == (3 * hw[0] * hw[1], 4)


@given(seeds(), st.integers(0, 2))
def test_reference_separable(seed, prefix_rows):
    """Hiera video: every frame has the spatial table plus its own vector; class rows get no time."""
    module = table(seed, prefix_rows=prefix_rows)
    loops = oracle.clip(
        module.spatial.detach()[prefix_rows:].numpy(), module.temporal.detach().numpy()
    )
    torch.testing.assert_close(module(Grid(4, 5, frames=3)).detach(), torch.from_numpy(loops))


@given(grids(max_side=8), seeds(), st.sampled_from(["timm", "hf_dinov2"]))
def test_reference_other_sizes(hw, seed, recipe):
    """Space is resampled by the recipe, frame by frame in a joint table."""
    apart, joint = (table(seed, recipe=recipe, separable=flag) for flag in (True, False))
    space = vp.resample(apart.spatial, source=Grid(4, 5), target=Grid(*hw), recipe=recipe).detach()
    loops = torch.from_numpy(oracle.clip(space.numpy(), apart.temporal.detach().numpy()))
    out = apart(Grid(*hw, frames=3)).detach()
    torch.testing.assert_close(out, loops, rtol=1e-10, atol=1e-10)
    frames = [
        vp.resample(frame, source=Grid(4, 5), target=Grid(*hw), recipe=recipe)
        for frame in joint.spatial.unflatten(0, (3, 20))
    ]
    torch.testing.assert_close(joint(Grid(*hw, frames=3)), torch.cat(frames))


@pytest.mark.parametrize("frames", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("recipe", "mode"), [("nearest", "nearest"), ("sam", "linear")])
@pytest.mark.parametrize("separable", [True, False])
def test_reference_other_frames(frames, recipe, mode, separable):
    """TimeSformer takes the nearest frame, as F.interpolate does; "sam" is linear."""
    module = table(time_recipe=recipe, separable=separable)
    out = module(Grid(4, 5, frames=frames)).detach().unflatten(0, (frames, 20))
    if separable:
        time = F.interpolate(module.temporal.detach().T[None], size=frames, mode=mode)[0].T
        expected = module.spatial.detach() + time.unsqueeze(1)
    else:
        flat = module.spatial.detach().reshape(3, -1)
        expected = F.interpolate(flat.T[None], size=frames, mode=mode)[0].T.reshape(frames, 20, 4)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)


def test_reference_shipped():
    spec = load_encoding("hiera_video")
    assert (spec.grid_thw, spec.separable, spec.prefix_rows) == ((8, 56, 56), True, 0)
    spec = load_encoding("timesformer")
    assert (spec.grid_thw, spec.separable, spec.prefix_rows) == ((8, 14, 14), True, 1)
    assert spec.time_recipe == "nearest"


def test_invariant_frames_differ_by_one_vector():
    lattice = table()(Grid(3, 7, frames=3)).unflatten(0, (3, 21))
    step = lattice[1] - lattice[0]
    torch.testing.assert_close(step, step[:1].expand_as(step))
    assert step.abs().max() > 1e-3


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        (
            {"grid_thw": (3, 4)},
            r"grid_thw is \(3, 4\); it must be \(a whole number, a whole number, a whole number\)",
        ),
        ({"grid_thw": (0, 4, 5)}, r"grid_thw is \(0, 4, 5\)"),
        ({"recipe": "linear"}, r"recipe is 'linear'"),
        ({"time_recipe": "linear"}, r"recipe is 'linear'"),
        ({"prefix_rows": -1}, r"prefix_rows is -1 and std 0\.02"),
        ({"std": -0.5}, r"std -0\.5"),
    ],
)
def test_error_spec(fields, match):
    with pytest.raises(PositionError, match=match):
        SpatioTemporalSpec(**{"grid_thw": (3, 4, 5), **fields})


@pytest.mark.parametrize("separable", [True, False])
def test_error_frames(separable):
    with pytest.raises(PositionError, match=r"grid has 4 frames and the table 3; .*time_recipe="):
        table(separable=separable)(Grid(4, 5, frames=4))


def test_error_state():
    spec = SpatioTemporalSpec(grid_thw=(3, 4, 5))
    with pytest.raises(PositionError, match=r"no entry pos_embed_temporal or time_embed"):
        SpatioTemporal.from_source({"pos_embed_spatial": torch.zeros(1, 20, 4)}, spec, DIMS)
    state = {"pos_embed": torch.zeros(1, 21, 4), "time_embed": torch.zeros(1, 3, 4)}
    with pytest.raises(PositionError, match=r"spatial of the state dict has shape \(21, 4\)"):
        SpatioTemporal.from_source(state, spec, DIMS)


@pytest.mark.parametrize("separable", [True, False])
def test_gradient_of_the_tables(separable):
    module = table(separable=separable, time_recipe="sam", grid_thw=(2, 2, 3))

    def run(*tables):
        learned = dict(zip(("spatial", "temporal"), tables, strict=False))
        return torch.func.functional_call(module, learned, (Grid(3, 2, frames=3),))

    assert torch.autograd.gradcheck(run, tuple(module.parameters()))


@pytest.mark.parametrize("separable", [True, False])
def test_compile_clips(separable):
    module = table(dtype=torch.float32, separable=separable)
    assert graphs_of(lambda h, w: module(Grid(h, w, 3)), SIZES) == 1


def test_device_fake_cuda():
    module, cuda = table(), torch.device("cuda", 0)
    with FakeTensorMode():
        module.spatial = nn.Parameter(torch.empty(20, 4, device=cuda))
        module.temporal = nn.Parameter(torch.empty(3, 4, device=cuda))
        assert module(Grid(3, 5, frames=3), device=cuda).device == cuda
