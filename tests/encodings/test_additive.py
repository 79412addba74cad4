"""The door "add": what every additive encoding owes to the model it serves, whatever its scheme."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import visionpos as vp
from tests.compiled import SIZES, graphs_of
from visionpos import Dims, Grid, PositionError
from visionpos.encodings import (
    AbsWinSpec,
    Additive,
    FactorizedSpec,
    FourierSpec,
    LearnableFourierSpec,
    LearnedSpec,
    SinCosSpec,
    SineSpec,
    SpatioTemporalSpec,
    spec_types,
)

DIMS = Dims(embed_dim=48, num_heads=2, depth=3, prefix=1)
SPECS = {
    "sincos": SinCosSpec(),
    "big_vision": SinCosSpec(dialect="big_vision"),
    "column_major": SinCosSpec(dialect="timm_reversed"),
    "stretched": SinCosSpec(extent="trained", trained_shape=(4, 9)),
    "interpolated": SinCosSpec(extent="trained", trained_shape=(4, 9), recipe="mae"),
    "detr": SineSpec(),
    "deformable_detr": SineSpec(dialect="deformable_detr", theta=20.0),
    "bare_counts": SineSpec(normalize=False),
    "xcit": SineSpec(hidden_dim=32),
    "learned": LearnedSpec(grid_hw=(4, 9), prefix_rows=1, std=1.0),
    "naflex": LearnedSpec(grid_hw=(3, 8), recipe="siglip2_naflex", aspect="square", std=1.0),
    "idefics": LearnedSpec(grid_hw=(4, 9), recipe="nearest_idefics2", std=1.0),
    "absolute": FactorizedSpec(table_hw=(50, 50), std=1.0),
    "detr_learned": FactorizedSpec(
        table_hw=(50, 50), combine="stack", axis_order=(1, 0), start="uniform"
    ),
    "fractional": FactorizedSpec(
        table_hw=(3, 9), coords="fractional", combine="product", recipe="sam", std=1.0
    ),
    "hiera": AbsWinSpec(global_hw=(5, 6), window_hw=(2, 3), fit="crop", std=1.0),
    "sam2": AbsWinSpec(global_hw=(5, 6), window_hw=(2, 3), recipe="sam2", fit="crop", std=1.0),
    "separable": SpatioTemporalSpec(grid_thw=(1, 4, 9), time_recipe="nearest", std=1.0),
    "joint": SpatioTemporalSpec(
        grid_thw=(1, 4, 9), separable=False, time_recipe="nearest", std=1.0
    ),
    "tancik": FourierSpec(),
    "sam": FourierSpec(dialect="sam", learned=True),
    "nerf": FourierSpec(dialect="nerf", bands=12),
    "perceiver": FourierSpec(
        dialect="perceiver", bands=8, max_resolution=(9, 9), include_coords=True, project=True
    ),
    "learnable_fourier": LearnableFourierSpec(features=8, hidden=6),
}
RECTANGLES = [(3, 5), (1, 7), (7, 1), (13, 11), (4, 9), (6, 6)]
CLIPS = ("separable", "joint")  # whose frames may differ
RANDOM = ("tancik", "sam")


def built(name: str) -> Additive:
    return vp.build(SPECS[name], DIMS).eval()


@pytest.mark.parametrize("hw", RECTANGLES)
@pytest.mark.parametrize("name", SPECS)
def test_shape_of_every_encoding(name, hw):
    """[n, embed_dim] to add, row-major, float32, without prefix rows."""
    module = built(name)
    assert isinstance(module, Additive)
    out = module(Grid(*hw))
    assert (out.shape, out.dtype) == ((hw[0] * hw[1], 48), torch.float32)
    assert out.isfinite().all()


@pytest.mark.parametrize("name", SPECS)
def test_shape_of_a_clip(name):
    """Without time of their own the frames of a clip share their code."""
    module = built(name)
    clip, image = module(Grid(3, 5, frames=2)), module(Grid(3, 5))
    assert torch.equal(clip, torch.cat([image, image]))


@pytest.mark.parametrize("name", SPECS)
def test_invariant_specs_are_values(name):
    """A spec is frozen, hashable and pickles; its kind names its class."""
    spec = SPECS[name]
    assert spec_types()[spec.kind] is type(spec)
    assert hash(spec) == hash(copy.deepcopy(spec))
    assert pickle.loads(pickle.dumps(spec)) == spec
    with pytest.raises(AttributeError):
        spec.kind = "other"


@pytest.mark.parametrize("name", SPECS)
def test_invariant_tokens_differ(name):
    """Facts 5.17 (ControlAR 18): a wrong slice of a table gave all tokens one row. Codes vary along both axes."""
    lattice = built(name)(Grid(3, 5)).unflatten(0, (3, 5))
    assert lattice.std(0).max() > 1e-3
    assert lattice.std(1).max() > 1e-3


@pytest.mark.parametrize("name", SPECS)
def test_invariant_no_cache_between_equal_counts(name):
    """Facts 5.7, facts/users.md A21: A, B, A with 36 cells each: B has its own numbers, A comes back to the bit."""
    module = built(name)
    first, other = module(Grid(4, 9)), module(Grid(6, 6))
    assert torch.equal(other, copy.deepcopy(module)(Grid(6, 6)))
    assert torch.equal(module(Grid(4, 9)), first)
    assert (first - other).abs().max() > 1e-3


@pytest.mark.parametrize("name", SPECS)
def test_invariant_copies_are_independent(name):
    module = built(name)
    before = module(Grid(3, 5))
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(Grid(3, 5)), before)
        with torch.no_grad():
            for weight in other.parameters():
                weight.mul_(3)
        changed = bool(list(other.parameters()))
        assert torch.equal(other(Grid(3, 5)), before) != changed
        assert torch.equal(module(Grid(3, 5)), before)


@pytest.mark.parametrize("name", SPECS)
def test_invariant_state_dict_round_trip(name):
    """Parameters are the whole state: nothing fixed is stored, cast or stale in a checkpoint."""
    one, two = built(name), built(name)
    assert not list(one.buffers())
    two.load_state_dict(one.state_dict())
    assert torch.equal(one(Grid(3, 5)), two(Grid(3, 5)))


@pytest.mark.parametrize("name", [name for name in SPECS if not list(built(name).parameters())])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_invariant_casts_change_no_frequency(name, dtype):
    """Facts 5.37: there is nothing to cast, under autocast or not."""
    module = built(name)
    before = module(Grid(32, 30))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(module.to(dtype)(Grid(32, 30)), before)


@pytest.mark.parametrize("name", SPECS)
def test_invariant_half_models(name):
    """In a bf16 model the code is that of float32 positions, rounded once: below 3 % of its size."""
    module = built(name)
    before = module(Grid(12, 10)).float()
    after = module.bfloat16()(Grid(12, 10)).float()
    # Random frequencies are weights: bf16 rounds them, and their angles with them.
    bound = 0.2 if name in RANDOM else 0.03
    assert (after - before).norm() / before.norm() < bound


@pytest.mark.parametrize("name", SPECS)
def test_invariant_batch(name):
    """A list of grids gives one padded batch: each sample as if alone, zeros after it."""
    module = built(name)
    shapes = [Grid(3, 5), Grid(2, 8), Grid(6, 1)]
    out = module.batch(shapes)
    assert out.shape == (3, 16, 48)
    for code, grid in zip(out, shapes, strict=True):
        assert torch.equal(code[: grid.size], module(grid))
        assert (code[grid.size :] == 0).all()
    assert module.batch(shapes, length=20).shape == (3, 20, 48)


@pytest.mark.parametrize("prefix", [0, 1, 5])
def test_invariant_added(prefix):
    """Added once or to what q and k are projected from: prefix tokens and the input stay as they are."""
    module, tokens = built("detr"), torch.randn(2, prefix + 15, 48)
    kept, code = tokens.clone(), module(Grid(3, 5))
    out = module.added(tokens, code, prefix=prefix)
    assert torch.equal(tokens, kept)
    assert torch.equal(out[:, :prefix], tokens[:, :prefix])
    assert torch.equal(out[:, prefix:], tokens[:, prefix:] + code)
    each = module.added(tokens, torch.stack([code, -code]), prefix=prefix)
    assert torch.equal(each[1, prefix:], tokens[1, prefix:] - code)
    assert module.added(tokens.bfloat16(), code, prefix=prefix).dtype == torch.bfloat16


def test_invariant_every_layer_leaves_values_clean():
    """DETR: position in q and k at every layer, none in v: with one key all outputs are its value, code or not."""
    module, tokens = built("detr"), torch.randn(1, 15, 48)
    attention = nn.MultiheadAttention(48, 2, batch_first=True)
    where = module.added(tokens, module(Grid(3, 5)))
    out, weights = attention(where, where, tokens)
    expected = weights @ (tokens @ attention.in_proj_weight[96:].T + attention.in_proj_bias[96:])
    assert weights.shape == (1, 15, 15)
    _, plain = attention(tokens, tokens, tokens)
    assert (weights - plain).abs().max() > 1e-3
    single, _ = attention(where[:, :1], where[:, :1], tokens[:, :1])
    bare, _ = attention(tokens[:, :1], tokens[:, :1], tokens[:, :1])
    torch.testing.assert_close(single, bare)
    assert expected.shape == out.shape


def test_error_added():
    module = built("detr")
    match = (
        r"code has shape \(15, 48\) for tokens \(2, 15, 48\) with prefix 1; .*Build it for the grid"
    )
    with pytest.raises(PositionError, match=match):
        module.added(torch.zeros(2, 15, 48), torch.zeros(15, 48), prefix=1)
    with pytest.raises(PositionError, match=r"with prefix -1"):
        module.added(torch.zeros(2, 14, 48), torch.zeros(15, 48), prefix=-1)


@pytest.mark.parametrize("name", [name for name in SPECS if list(built(name).parameters())])
def test_error_device(name):
    """A learned part is not moved behind the caller's back."""
    with pytest.raises(
        PositionError, match=r"device is meta and the table is on cpu; .*\.to\(meta\)"
    ):
        built(name)(Grid(3, 5), device=torch.device("meta"))


@pytest.mark.parametrize("name", SPECS)
def test_gradient_reaches_every_parameter(name):
    """Whatever is learned is learned away from its trained grid as well."""
    module = built(name)
    out = module(Grid(7, 5))
    if not out.requires_grad:
        return
    (out * torch.randn_like(out)).sum().backward()
    for key, weight in module.named_parameters():
        if weight.requires_grad:
            assert weight.grad.abs().max() > 0, key


# One filling a scheme in the quick run; a compile takes a second.
VARIANTS = {"big_vision", "column_major", "stretched", "deformable_detr", "bare_counts", "idefics"}
VARIANTS |= {"detr_learned", "sam2", "joint", "sam", "nerf"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) if n in VARIANTS else n for n in SPECS],
)
def test_compile_one_graph_over_six_sizes(name):
    module = built(name)
    assert graphs_of(lambda h, w: module(Grid(h, w)), SIZES) == 1


@pytest.mark.parametrize("name", SPECS)
def test_device(name, device):
    """On a device everything is built there, and equals the CPU's numbers."""
    module = built(name)
    here = module(Grid(3, 5))
    there = module.to(device)(Grid(3, 5), device=torch.empty(0, device=device).device)
    assert there.device.type == device.type
    torch.testing.assert_close(there.cpu(), here)


@pytest.mark.parametrize("name", SPECS)
def test_device_fake_cuda(name):
    """DESIGN.md 7: fake CUDA tensors raise at any operation that mixes devices, without a GPU."""
    module, cuda = built(name), torch.device("cuda", 0)
    with FakeTensorMode():
        for part in module.modules():
            for key, weight in list(part.named_parameters(recurse=False)):
                setattr(part, key, nn.Parameter(torch.empty(weight.shape, device=cuda)))
        assert module(Grid(3, 5), device=cuda).device == cuda
        assert module.batch([Grid(3, 5), Grid(2, 2)], device=cuda).device == cuda
