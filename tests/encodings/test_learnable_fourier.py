"""Learnable Fourier features: trained frequencies, a network, groups of axes, and what gamma means."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.compiled import SIZES, graphs_of
from tests.reference import fourier as oracle
from tests.strategies import grids, seeds
from visionpos import CoordSpec, Dims, Grid, PositionError
from visionpos.config import load_encoding
from visionpos.encodings.learnable_fourier import LearnableFourier, LearnableFourierSpec

DIMS = Dims(embed_dim=6, num_heads=1, depth=1)


def lff(seed: int = 0, **fields) -> LearnableFourier:
    spec = LearnableFourierSpec(**{"features": 8, "hidden": 5, **fields})
    module = LearnableFourier(spec, DIMS, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for layer in (module.enter, module.leave):
            layer.bias.normal_()
    return module


def loops(module: LearnableFourier, point: list[float]) -> torch.Tensor:
    layers = [
        (layer.weight.tolist(), layer.bias.tolist()) for layer in (module.enter, module.leave)
    ]
    W = module.frequencies.tolist()
    return torch.tensor(oracle.learnable(point, module.spec.groups, W, layers)).double()


@pytest.mark.parametrize("hw", [(3, 5), (1, 7), (7, 1), (13, 11)])
@pytest.mark.parametrize("groups", [1, 2])
def test_shape_of_a_code(hw, groups):
    module = lff(groups=groups)
    assert module.frequencies.shape == (2 // groups, 4)
    assert module(Grid(*hw)).shape == (hw[0] * hw[1], 6)
    assert module.at(torch.rand(2, 9, 2)).shape == (2, 9, 6)


@given(st.sampled_from([1, 2]), st.floats(-2, 2), st.floats(-2, 2), seeds())
def test_reference_points(groups, y, x, seed):
    module = lff(seed, groups=groups, gamma=0.5)
    point = torch.tensor([y, x])
    out = module.at(point).detach().double()
    torch.testing.assert_close(out, loops(module, point.tolist()), rtol=1e-5, atol=1e-5)


@given(grids(max_side=6))
def test_reference_grids(hw):
    """Cell centres on [0, 1] unless the spec says otherwise, row-major."""
    module = lff()
    out = module(Grid(*hw)).detach().double()
    expected = [
        loops(module, [(y + 0.5) / hw[0], (x + 0.5) / hw[1]])
        for y in range(hw[0])
        for x in range(hw[1])
    ]
    torch.testing.assert_close(out, torch.stack(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("gamma_is", "deviation"),
    [("precision_root", 0.5), ("std", 2.0), ("std_root", 4.0), ("inverse_std_root", 0.25)],
)
def test_reference_gamma(gamma_is, deviation):
    """Facts 1H: gamma 2 is a deviation of 1/2 in the paper, 2, 4 or 1/4 in public ports."""
    module = lff(features=20000, gamma=2.0, gamma_is=gamma_is)
    assert module.frequencies.std().item() == pytest.approx(deviation, rel=0.03)
    same = lff(gamma=1.0, gamma_is=gamma_is)
    assert torch.equal(same.frequencies, lff().frequencies)


def test_reference_shipped():
    spec = load_encoding("learnable_fourier")
    assert (spec.features, spec.hidden, spec.gamma_is) == (384, 32, "precision_root")


@pytest.mark.parametrize("x_first", [False, True])
def test_reference_state(x_first):
    """Two public ports store Wr as (F/2, M), bare or as a linear layer, and the network as mlp.0 and mlp.2."""
    own = lff(3)
    weight = own.frequencies.detach().T
    weight = weight.flip(1) if x_first else weight
    for key in ("Wr", "Wr.weight"):
        state = {
            f"pos.{key}": weight,
            "pos.mlp.0.weight": own.enter.weight,
            "pos.mlp.0.bias": own.enter.bias,
            "pos.mlp.2.weight": own.leave.weight,
            "pos.mlp.2.bias": own.leave.bias,
        }
        loaded = LearnableFourier.from_source(state, own.spec, DIMS, x_first=x_first)
        assert torch.equal(loaded(Grid(3, 5)), own(Grid(3, 5)))


def test_invariant_groups_read_axes_apart():
    """Two groups: channels 0-2 see y alone, 3-5 x alone. One group: every channel sees both."""
    lattice = lff(groups=2)(Grid(3, 5)).detach().unflatten(0, (3, 5))
    assert (lattice[..., :3] - lattice[:, :1, :3]).abs().max() == 0
    assert (lattice[..., 3:] - lattice[:1, :, 3:]).abs().max() == 0
    joint = lff()(Grid(3, 5)).detach().unflatten(0, (3, 5))
    assert (joint - joint[:, :1]).abs().amax((0, 1)).min() > 1e-4


def test_invariant_features_see_differences():
    """Equation 3: before the network, dot products of two codes depend on the difference of the points."""
    module, (a, b, shift) = lff(), torch.rand(3, 5, 2)

    def features(points):
        turns = points @ module.frequencies
        return torch.cat([turns.cos(), turns.sin()], dim=-1) / math.sqrt(8)

    one = (features(a) * features(b)).sum(-1)
    torch.testing.assert_close(one, (features(a + shift) * features(b + shift)).sum(-1))
    assert (one <= 0.5 + 1e-6).all()  # cos of a difference, over two


def test_invariant_training_moves_and_eval_does_not():
    module = lff(coords=CoordSpec(unit="fractional", jitter=1.5)).eval()
    still = module(Grid(3, 5))
    module.train()
    one, two, three = (
        module(Grid(3, 5), generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(one, two)
    assert (one - three).abs().max() > 1e-5
    assert (one - still).abs().max() > 1e-5
    assert torch.equal(module.eval()(Grid(3, 5)), still)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"features": 7}, r"features is 7 and hidden 5; an even width"),
        ({"hidden": 0}, r"hidden 0"),
        ({"groups": 3}, r"groups is 3 for 2 axes"),
        ({"groups": 0}, r"groups is 0 for 2 axes"),
        ({"gamma": 0.0}, r"gamma is 0\.0, read as 'precision_root'"),
        (
            {"gamma_is": "variance"},
            r"gamma_is is 'variance'; it must be one of 'precision_root', 'std', 'std_root', 'inverse_std_root'",
        ),
    ],
)
def test_error_spec(fields, match):
    with pytest.raises(PositionError, match=match):
        LearnableFourierSpec(**{"features": 8, "hidden": 5, **fields})


def test_error_build():
    spec = LearnableFourierSpec(groups=2)
    with pytest.raises(PositionError, match=r"embed_dim is 7 for 2 groups"):
        LearnableFourier(spec, Dims(embed_dim=7, num_heads=1, depth=1))
    with pytest.raises(PositionError, match=r"points has 3 axes"):
        lff().at(torch.zeros(3))
    with pytest.raises(PositionError, match=r"no entry Wr or Wr\.weight"):
        LearnableFourier.from_source({"mlp.0.weight": torch.zeros(1)}, spec, DIMS)


def test_gradient_of_everything():
    module = lff(features=4, hidden=3).double()

    def run(*weights):
        learned = dict(zip(dict(module.named_parameters()), weights, strict=True))
        return torch.func.functional_call(module, learned, (Grid(2, 3),))

    assert torch.autograd.gradcheck(run, tuple(module.parameters()))


def test_compile_points():
    module = lff(coords=CoordSpec(unit="centred"))
    assert graphs_of(module.at, [(torch.rand(2, h * w, 2),) for h, w in SIZES]) == 1


def test_device_fake_cuda():
    module, cuda = lff(), torch.device("cuda", 0)
    with FakeTensorMode():
        for part in (module, module.enter, module.leave):
            for key, weight in list(part.named_parameters(recurse=False)):
                setattr(part, key, nn.Parameter(torch.empty(weight.shape, device=cuda)))
        assert module(Grid(3, 5)).device == cuda
        assert module.at(torch.empty(7, 2, device=cuda)).device == cuda


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_invariant_default_dtype(dtype):
    """Frequencies are drawn and kept in float32, whatever torch's default is."""
    sizes, draws = Dims(embed_dim=16, num_heads=1, depth=1), torch.Generator()
    before = LearnableFourier(LearnableFourierSpec(), sizes, generator=draws.manual_seed(3))
    torch.set_default_dtype(dtype)
    try:
        after = LearnableFourier(LearnableFourierSpec(), sizes, generator=draws.manual_seed(3))
    finally:
        torch.set_default_dtype(torch.float32)
    assert after.frequencies.dtype == torch.float32
    assert torch.equal(after.frequencies, before.frequencies)
