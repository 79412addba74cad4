"""CoaT's relative term: queries times a convolution of the values."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.compiled import SIZES, graphs_of
from tests.reference import convolution as oracle
from tests.strategies import grids, seeds
from tests.tolerances import assert_close_to
from visionpos import Dims, Grid, PositionError
from visionpos.config import load_encoding
from visionpos.encodings import ConvRelative, ConvRelativeSpec, build

SPEC = ConvRelativeSpec(kernels=(3, 5), heads=(1, 2))
DIMS = Dims(embed_dim=6, num_heads=3, depth=1, prefix=1)  # heads of 2 channels


def term(dims: Dims = DIMS, spec: ConvRelativeSpec = SPEC, seed: int = 0) -> ConvRelative:
    module = ConvRelative(spec, dims).double()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in module.parameters():
            weight.normal_(generator=draw)
    return module


def qv(hw, dims: Dims = DIMS, batch: int = 2) -> torch.Tensor:
    n = dims.prefix + hw[0] * hw[1] + dims.suffix
    return torch.randn(2, batch, dims.num_heads, n, dims.channels, dtype=torch.float64)


@pytest.mark.parametrize("hw", [(3, 5), (1, 7), (7, 1), (13, 11), (1, 1)])
@pytest.mark.parametrize("prefix", [0, 1, 3])
def test_shape_of_the_term(hw, prefix):
    dims = Dims(embed_dim=6, num_heads=3, depth=1, prefix=prefix)
    q, v = qv(hw, dims)
    assert term(dims)(q, v, Grid(*hw)).shape == q.shape


def test_shape_of_shipped():
    """Eight heads in groups of 2, 3, 3 with kernels 3, 5, 7, as in every CoaT of timm."""
    module = build(load_encoding("coat"), Dims(embed_dim=64, num_heads=8, depth=2, prefix=1))
    shapes = [tuple(conv.weight.shape) for conv in module.convs]
    assert shapes == [(16, 1, 3, 3), (24, 1, 5, 5), (24, 1, 7, 7)]


@given(grids(max_side=6), seeds(), st.integers(0, 2))
def test_reference_term(hw, seed, prefix):
    dims = Dims(embed_dim=6, num_heads=3, depth=1, prefix=prefix)
    module = term(dims, seed=seed)
    q, v = qv(hw, dims)
    weights = [c.weight.detach()[:, 0].unflatten(0, (-1, 2)).numpy() for c in module.convs]
    biases = [c.bias.detach().unflatten(0, (-1, 2)).numpy() for c in module.convs]
    rows = [
        oracle.conv_relative(one.numpy(), other.numpy(), hw, weights, biases, prefix=prefix)
        for one, other in zip(q, v, strict=True)
    ]
    out = module(q, v, Grid(*hw)).detach()
    assert_close_to(out, torch.from_numpy(np.stack(rows)), kind="applied")


def test_invariant_far_values_do_not_matter():
    """A group with kernel k sees values up to k // 2 cells away, and no prefix token."""
    module, (q, v) = term(), qv((7, 9))
    before = module(q, v, Grid(7, 9))[:, :, 1:].unflatten(2, (7, 9))
    other = v.clone()
    other[:, :, 0] += 1  # the class token
    other[:, :, 1 + 3 * 9 + 4] += 1  # cell (3, 4)
    moved = (
        (module(q, other, Grid(7, 9))[:, :, 1:].unflatten(2, (7, 9)) - before).abs().amax((0, 4))
    )
    for head, reach in ((0, 1), (1, 2), (2, 2)):
        rows, columns = moved[head].nonzero().unbind(-1)
        assert (rows.min(), rows.max()) == (3 - reach, 3 + reach)
        assert (columns.min(), columns.max()) == (4 - reach, 4 + reach)


def test_invariant_linear_in_q_and_exempt_tokens_get_zeros():
    dims = Dims(embed_dim=6, num_heads=3, depth=1, prefix=2, suffix=1)
    module = term(dims)
    q, v = qv((3, 5), dims)
    out = module(q, v, Grid(3, 5))
    torch.testing.assert_close(module(3 * q, v, Grid(3, 5)), 3 * out)
    assert (out[:, :, :2] == 0).all()
    assert (out[:, :, -1] == 0).all()
    assert (out[:, :, 2:-1] != 0).all()


def test_invariant_no_square_guess():
    module, (q, v) = term(), qv((4, 9))
    outs = [module(q, v, Grid(*hw)) for hw in ((4, 9), (6, 6), (9, 4), (4, 9))]
    assert torch.equal(outs[0], outs[3])
    assert min((outs[0] - outs[1]).abs().max(), (outs[0] - outs[2]).abs().max()) > 0.1


def test_invariant_frames_are_convolved_one_by_one():
    dims = Dims(embed_dim=6, num_heads=3, depth=1)
    module = term(dims)
    q, v = torch.randn(2, 2, 3, 30, 2, dtype=torch.float64)
    each = [module(q[:, :, i : i + 15], v[:, :, i : i + 15], Grid(3, 5)) for i in (0, 15)]
    out = module(q, v, Grid(3, 5, frames=2))
    torch.testing.assert_close(out, torch.cat(each, dim=2), rtol=1e-12, atol=1e-12)


def test_invariant_generator_alone_decides():
    one, two, three = (
        ConvRelative(SPEC, DIMS, generator=torch.Generator().manual_seed(seed))
        for seed in (1, 1, 2)
    )
    assert torch.equal(one.convs[1].weight, two.convs[1].weight)
    assert not torch.equal(one.convs[1].weight, three.convs[1].weight)
    assert one.convs[1].weight.abs().max() <= 1 / 5


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"kernels": (3, 4, 7)}, r"kernels are \(3, 4, 7\) and heads \(2, 3, 3\); one odd kernel"),
        ({"kernels": (3, 5)}, r"kernels are \(3, 5\) and heads \(2, 3, 3\)"),
        ({"heads": (8, 0, 0)}, r"heads \(8, 0, 0\).*at least one head a group"),
        ({"kernels": (), "heads": ()}, r"kernels are \(\)"),
        ({"kernels": (-3, 5, 7)}, r"kernels are \(-3, 5, 7\)"),
    ],
)
def test_error_spec(fields, match):
    with pytest.raises(PositionError, match=match):
        ConvRelativeSpec(**fields)


def test_error_heads():
    with pytest.raises(PositionError, match=r"heads are \(2, 3, 3\), 8 together; the model's 6"):
        ConvRelative(ConvRelativeSpec(), Dims(embed_dim=48, num_heads=6, depth=1))


def test_error_shapes():
    module, (q, v) = term(), qv((3, 5))
    with pytest.raises(PositionError, match=r"q has shape \(2, 3, 16, 2\).*\[b, 3, 1 \+ 18, 2\]"):
        module(q, v, Grid(3, 6))
    with pytest.raises(PositionError, match=r"v \(2, 3, 15, 2\)"):
        module(q, v[:, :, 1:], Grid(3, 5))


def test_error_source():
    state = term().state_dict()
    theirs = {key.replace("convs", "crpe1.conv_list"): value for key, value in state.items()}
    loaded = ConvRelative.from_timm(theirs, SPEC, DIMS)
    assert torch.equal(loaded.convs[1].weight, state["convs.1.weight"].float())
    with pytest.raises(PositionError, match=r"has shape \(2, 1, 3, 3\); \(4, 1, 3, 3\)"):
        ConvRelative.from_timm(theirs, ConvRelativeSpec(kernels=(3, 5), heads=(2, 1)), DIMS)
    del theirs["crpe1.conv_list.0.bias"]
    with pytest.raises(PositionError, match=r"lacks \['convs.0.bias'\]"):
        ConvRelative.from_timm(theirs, SPEC, DIMS)


def test_gradient():
    module = term(Dims(embed_dim=3, num_heads=3, depth=1, prefix=1))
    q, v = torch.randn(2, 1, 3, 7, 1, dtype=torch.float64)
    names = [key for key, _ in module.named_parameters()]

    def run(q, v, *weights):
        new = dict(zip(names, weights, strict=True))
        return torch.func.functional_call(module, new, (q, v, Grid(2, 3)))

    arguments = (q.requires_grad_(), v.requires_grad_(), *module.parameters())
    assert torch.autograd.gradcheck(run, arguments)


def test_compile_one_graph_over_six_sizes():
    dims = Dims(embed_dim=24, num_heads=3, depth=1, prefix=1)
    module = term(dims).float()
    calls = [(*torch.randn(2, 2, 3, 1 + h * w, 8), h, w) for h, w in SIZES]
    assert graphs_of(lambda q, v, h, w: module(q, v, Grid(h, w)), calls) == 1


def test_device(device):
    module = term().float()
    q, v = qv((3, 5)).float()
    here = module(q, v, Grid(3, 5))
    there = copy.deepcopy(module).to(device)(q.to(device), v.to(device), Grid(3, 5))
    assert there.device.type == device.type
    torch.testing.assert_close(there.cpu(), here, rtol=1e-4, atol=1e-4)


def test_device_fake_cuda():
    module, cuda = ConvRelative(SPEC, DIMS), torch.device("cuda", 0)
    with FakeTensorMode():
        for conv in module.convs:
            for key, weight in list(conv.named_parameters()):
                setattr(conv, key, nn.Parameter(torch.empty(weight.shape, device=cuda)))
        q, v = torch.empty(2, 2, 3, 16, 2, device=cuda)
        assert module(q, v, Grid(3, 5)).device == cuda
