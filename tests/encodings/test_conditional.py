"""PEG: a depthwise convolution makes position out of its border."""

import copy
import pickle
from dataclasses import replace

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
from visionpos.encodings import Conditional, Peg, PegSpec, build

DIMS = Dims(embed_dim=4, num_heads=1, depth=6, prefix=1)
FILLINGS = {
    "plain": PegSpec(),
    "gelu": PegSpec(activation="gelu"),
    "folded": PegSpec(residual=False, kernel=7),
    "circular": PegSpec(padding="circular"),
    "point": PegSpec(kernel=1),
    "wide": PegSpec(kernel=27),
}


def peg(spec: PegSpec = FILLINGS["plain"], dims: Dims = DIMS, seed: int = 0) -> Peg:
    """A PEG in float64 with random kernels and biases."""
    module = Peg(spec, dims).double()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in module.parameters():
            weight.normal_(generator=draw)
    return module


def tokens_of(hw, dims: Dims = DIMS, batch: int = 2) -> torch.Tensor:
    n = dims.prefix + hw[0] * hw[1] + dims.suffix
    return torch.randn(batch, n, dims.embed_dim, dtype=torch.float64)


def expected(module: Peg, tokens, hw, masked=None) -> torch.Tensor:
    """The oracle's tokens, image by image."""
    conv, spec = module.convs[0], module.spec
    rows = [
        oracle.peg(
            image.numpy(),
            hw,
            conv.weight.detach()[:, 0].numpy(),
            conv.bias.detach().numpy(),
            prefix=module.dims.prefix,
            masked=None if masked is None else masked[i].numpy(),
            residual=spec.residual,
            activation=spec.activation,
            circular=spec.padding == "circular",
        )
        for i, image in enumerate(tokens)
    ]
    return torch.from_numpy(np.stack(rows))


@pytest.mark.parametrize("hw", [(3, 5), (1, 7), (7, 1), (13, 11), (1, 1)])
@pytest.mark.parametrize("prefix", [0, 1, 5])
def test_shape_of_tokens(hw, prefix):
    dims = replace(DIMS, prefix=prefix)
    tokens = tokens_of(hw, dims)
    assert isinstance(peg(), Conditional)
    assert peg(dims=dims)(tokens, Grid(*hw)).shape == tokens.shape


@pytest.mark.parametrize(
    ("name", "places", "kernel"),
    [
        ("cpvt_peg", 1, 3),
        ("cpvt_peg_0_4", 5, 3),
        ("cpvt_peg_27", 1, 27),
        ("twins_peg", 1, 3),
        ("coat_cpe", 1, 3),
        ("davit_cpe", 24, 3),
        ("fastvit_cpe", 1, 7),
        ("csatv2_peg", 12, 3),
    ],
)
def test_shape_of_shipped(name, places, kernel):
    """Facts 2: after block 0, after 0-4, one a stage; timm.md 1.6: DaViT two a block, CoaT one shared."""
    spec = load_encoding(name)
    module = build(spec, replace(DIMS, depth=12))
    assert (len(module.convs), spec.slots(12)) == (places, places)
    assert module.convs[0].weight.shape == (4, 1, kernel, kernel)


@given(st.sampled_from(sorted(FILLINGS)), grids(max_side=6), seeds(), st.integers(0, 2))
def test_reference_every_filling(name, hw, seed, prefix):
    spec = FILLINGS[name]
    if spec.padding == "circular" and min(hw) < spec.kernel // 2:
        return
    module = peg(spec, replace(DIMS, prefix=prefix), seed)
    tokens = tokens_of(hw, module.dims)
    out = module(tokens, Grid(*hw)).detach()
    assert_close_to(out, expected(module, tokens, hw), kind="applied")


@given(grids(max_side=6), seeds())
def test_reference_masked(hw, seed):
    """Hidden tokens are zeros to the convolution and keep their own content."""
    module = peg(seed=seed)
    tokens = tokens_of(hw)
    masked = torch.rand(2, hw[0] * hw[1]) < 0.4
    out = module(tokens, Grid(*hw), masked=masked).detach()
    assert_close_to(out, expected(module, tokens, hw, masked), kind="applied")


def test_reference_start_values():
    """Facts 2: normal of std sqrt(2 / fan_out), fan_out 9 for depthwise 3x3: .4714; bias 0; from the generator."""
    dims = Dims(embed_dim=4096, num_heads=1, depth=1)
    one, two = (Peg(PegSpec(), dims, generator=torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(one.convs[0].weight, two.convs[0].weight)
    assert one.convs[0].weight.std().item() == pytest.approx(0.4714, rel=0.01)
    assert (one.convs[0].bias == 0).all()
    wide = Peg(PegSpec(kernel=7), dims).convs[0].weight
    assert wide.std().item() == pytest.approx(2**0.5 / 7, rel=0.01)


@given(grids(max_side=7), seeds())
def test_invariant_transpose(hw, seed):
    """Rows and columns have no order of their own: the transposed image with transposed kernels."""
    module = peg(seed=seed, dims=replace(DIMS, prefix=0))
    tokens = tokens_of(hw, module.dims)
    turned = copy.deepcopy(module)
    with torch.no_grad():
        turned.convs[0].weight.copy_(module.convs[0].weight.mT)
    flip = tokens.unflatten(1, hw).transpose(1, 2).flatten(1, 2)
    back = (
        turned(flip, Grid(hw[1], hw[0])).unflatten(1, (hw[1], hw[0])).transpose(1, 2).flatten(1, 2)
    )
    torch.testing.assert_close(back, module(tokens, Grid(*hw)), rtol=1e-10, atol=1e-10)


def test_invariant_position_comes_from_zeros():
    """Equal tokens everywhere: zero padding tells cells apart, circular padding tells nothing."""
    tokens = torch.ones(1, 35, 4, dtype=torch.float64)
    dims = replace(DIMS, prefix=0)
    zeros, circle = (
        peg(PegSpec(padding=p), dims)(tokens, Grid(5, 7))[0] for p in ("zeros", "circular")
    )
    assert (circle - circle[0]).abs().max() < 1e-12
    assert len(zeros.detach().round(decimals=9).unique(dim=0)) == 9  # 4 corners, 4 edges, inside


def test_invariant_masked_content_cannot_leak():
    """Whatever stands under the mask, NaN included, every other token comes out the same to the bit."""
    module = peg()
    tokens, masked = tokens_of((4, 5)), torch.zeros(2, 20, dtype=torch.bool)
    masked[:, [0, 7, 13]] = True
    before = module(tokens, Grid(4, 5), masked=masked)
    other = tokens.clone()
    other[:, 1:][masked] = float("nan")
    after = module(other, Grid(4, 5), masked=masked)
    seen = torch.cat([torch.ones(2, 1, dtype=torch.bool), ~masked], dim=1)
    assert torch.equal(before[seen], after[seen])
    leaky = module(other, Grid(4, 5))
    assert leaky[seen].isnan().any()


def test_invariant_exempt_tokens_and_inputs_are_untouched():
    dims = replace(DIMS, prefix=2, suffix=1)
    module, tokens = peg(dims=dims), tokens_of((3, 5), dims)
    kept = tokens.clone()
    out = module(tokens, Grid(3, 5))
    assert torch.equal(tokens, kept)
    assert torch.equal(out[:, :2], tokens[:, :2])
    assert torch.equal(out[:, -1:], tokens[:, -1:])
    assert (out[:, 2:-1] != tokens[:, 2:-1]).all()
    other = tokens.clone()
    other[:, [0, 1, -1]] += 5
    assert torch.equal(module(other, Grid(3, 5))[:, 2:-1], out[:, 2:-1])


def test_invariant_no_square_guess():
    """4x9, 6x6 and 9x4 have 36 tokens: each is its own lattice."""
    module, tokens = peg(), tokens_of((4, 9))
    outs = [module(tokens, Grid(*hw)) for hw in ((4, 9), (6, 6), (9, 4), (4, 9))]
    assert torch.equal(outs[0], outs[3])
    assert min((outs[0] - outs[1]).abs().max(), (outs[0] - outs[2]).abs().max()) > 0.1


def test_invariant_frames_are_convolved_one_by_one():
    module = peg(dims=replace(DIMS, prefix=0))
    clip = torch.randn(2, 30, 4, dtype=torch.float64)
    out = module(clip, Grid(3, 5, frames=2))
    each = [module(clip[:, i : i + 15], Grid(3, 5)) for i in (0, 15)]
    torch.testing.assert_close(out, torch.cat(each, dim=1), rtol=1e-12, atol=1e-12)


def test_invariant_slots_have_their_own_kernels():
    spec = load_encoding("cpvt_peg_0_4")
    module, tokens = peg(spec), tokens_of((3, 5))
    outs = [module(tokens, Grid(3, 5), slot=slot) for slot in range(5)]
    assert all((outs[0] - out).abs().max() > 0.1 for out in outs[1:])
    assert torch.equal(outs[0], module(tokens, Grid(3, 5)))


def test_invariant_folded_is_the_same_function():
    """FastViT's reparameterisation: the identity inside the kernel, its own module, the old one unchanged."""
    module = peg(PegSpec(kernel=7, after=None, before="stage"))
    tokens, before = tokens_of((4, 5)), module.convs[0].weight.clone()
    fused = module.folded().double()
    assert not fused.spec.residual
    out = fused(tokens, Grid(4, 5))
    torch.testing.assert_close(out, module(tokens, Grid(4, 5)), rtol=1e-5, atol=1e-5)
    assert torch.equal(module.convs[0].weight, before)


def test_invariant_copies_and_pickles():
    module, tokens = peg(), tokens_of((3, 5))
    out = module(tokens, Grid(3, 5))
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(tokens, Grid(3, 5)), out)
        with torch.no_grad():
            other.convs[0].weight.mul_(2)
        assert torch.equal(module(tokens, Grid(3, 5)), out)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"kernel": 4}, r"kernel is 4; an odd side"),
        ({"kernel": -1}, r"kernel is -1"),
        ({"after": None}, r"after is None and before None; exactly one"),
        ({"before": "stage"}, r"after is \(0,\) and before 'stage'; exactly one"),
        ({"after": ()}, r"after is \(\); block indices from 0, rising"),
        ({"after": (2, 1)}, r"after is \(2, 1\)"),
        ({"after": (1, 1)}, r"after is \(1, 1\)"),
        ({"after": (-1,)}, r"after is \(-1,\)"),
        (
            {"after": "first"},
            r"after is 'first'; it must be a tuple \(a whole number each\) or 'stage' or None",
        ),
        (
            {"after": None, "before": "head"},
            r"before is 'head'; it must be one of 'stage', 'block'",
        ),
        ({"activation": "relu"}, r"activation is 'relu'; it must be one of 'none', 'gelu'"),
        ({"padding": "reflect"}, r"padding is 'reflect'; it must be one of 'zeros', 'circular'"),
    ],
)
def test_error_spec(fields, match):
    with pytest.raises(PositionError, match=match):
        PegSpec(**fields)


def test_error_depth():
    with pytest.raises(PositionError, match=r"after is \(0, 6\) and the model has 6 blocks"):
        Peg(PegSpec(after=(0, 6)), DIMS)


def test_error_tokens_and_grid():
    """A grid of another size, transposed widths, a missing class token: never reshaped by accident."""
    module = peg()
    with pytest.raises(PositionError, match=r"tokens have shape \(2, 16, 4\); \[b, 1 \+ 18, 4\]"):
        module(tokens_of((3, 5)), Grid(3, 6))
    with pytest.raises(PositionError, match=r"tokens have shape \(2, 15, 4\)"):
        module(tokens_of((3, 5))[:, 1:], Grid(3, 5))
    with pytest.raises(PositionError, match=r"tokens have shape \(16, 4\)"):
        module(tokens_of((3, 5))[0], Grid(3, 5))
    with pytest.raises(PositionError, match=r"tokens have shape \(2, 16, 3\)"):
        module(tokens_of((3, 5))[..., :3], Grid(3, 5))


def test_error_slot_and_mask():
    module, tokens = peg(), tokens_of((3, 5))
    with pytest.raises(PositionError, match=r"slot is 1; the encoding has 1"):
        module(tokens, Grid(3, 5), slot=1)
    with pytest.raises(
        PositionError, match=r"masked is torch.bool of shape \(2, 16\); bool \[2, 15\]"
    ):
        module(tokens, Grid(3, 5), masked=torch.zeros(2, 16, dtype=torch.bool))
    with pytest.raises(PositionError, match=r"masked is torch.int64.*True where a token is hidden"):
        module(tokens, Grid(3, 5), masked=torch.zeros(2, 15, dtype=torch.int64))


def test_error_circular_border():
    with pytest.raises(
        PositionError, match=r"kernel 7 reaches 3 cells around a grid of \(1, 2, 9\)"
    ):
        peg(PegSpec(kernel=7, padding="circular"))(tokens_of((2, 9)), Grid(2, 9))


@pytest.mark.parametrize("spec", [PegSpec(residual=False), PegSpec(activation="gelu")])
def test_error_fold(spec):
    with pytest.raises(PositionError, match=r"residual is .*nothing else can be folded"):
        Peg(spec, DIMS).folded()


def test_error_source():
    """Missing, foreign, misshapen and fused entries are named."""
    state = {
        "pos_block.0.proj.0.weight": torch.zeros(4, 1, 3, 3),
        "pos_block.0.proj.0.bias": torch.zeros(4),
    }
    Peg.from_timm(state, PegSpec(), DIMS)
    with pytest.raises(PositionError, match=r"lacks \['convs.0.bias'\]"):
        Peg.from_timm({"proj.0.weight": torch.zeros(4, 1, 3, 3)}, PegSpec(), DIMS)
    with pytest.raises(PositionError, match=r"has \['convs.1.weight'\] too many"):
        Peg.from_timm({**state, "other.weight": torch.zeros(1)}, PegSpec(), DIMS)
    with pytest.raises(
        PositionError, match=r"weight of timm has shape \(4, 1, 3, 3\); \(4, 1, 7, 7\)"
    ):
        Peg.from_timm(state, PegSpec(kernel=7), DIMS)
    fused = {key.replace("proj.0", "reparam_conv"): value for key, value in state.items()}
    with pytest.raises(PositionError, match=r"holds the identity.*Set residual=False"):
        Peg.from_timm(fused, PegSpec(), DIMS)


@pytest.mark.parametrize("name", ["plain", "gelu", "circular"])
def test_gradient(name):
    """Tokens and kernels learn (float64 gradcheck), hidden tokens only through their own row."""
    module = peg(FILLINGS[name], Dims(embed_dim=2, num_heads=1, depth=1))
    masked = torch.tensor([[False, True, False, False, True, False]])
    tokens = torch.randn(1, 6, 2, dtype=torch.float64, requires_grad=True)

    def run(tokens, weight, bias):
        new = {"convs.0.weight": weight, "convs.0.bias": bias}
        return torch.func.functional_call(module, new, (tokens, Grid(2, 3)), {"masked": masked})

    assert torch.autograd.gradcheck(run, (tokens, module.convs[0].weight, module.convs[0].bias))


@pytest.mark.parametrize("name", ["plain", "gelu"])
def test_compile_one_graph_over_six_sizes(name):
    module = peg(FILLINGS[name], Dims(embed_dim=24, num_heads=3, depth=1, prefix=1)).float()
    calls = [(torch.randn(2, 1 + h * w, 24), h, w) for h, w in SIZES]
    assert graphs_of(lambda x, h, w: module(x, Grid(h, w)), calls) == 1


def test_device(device):
    module, tokens = peg(PegSpec()).float(), tokens_of((3, 5)).float()
    here = module(tokens, Grid(3, 5))
    there = copy.deepcopy(module).to(device)(tokens.to(device), Grid(3, 5))
    assert there.device.type == device.type
    torch.testing.assert_close(there.cpu(), here, rtol=1e-4, atol=1e-4)


def test_device_fake_cuda():
    module, cuda = Peg(PegSpec(), DIMS), torch.device("cuda", 0)
    with FakeTensorMode():
        for conv in module.convs:
            for key, weight in list(conv.named_parameters()):
                setattr(conv, key, nn.Parameter(torch.empty(weight.shape, device=cuda)))
        masked = torch.empty(2, 15, dtype=torch.bool, device=cuda)
        out = module(torch.empty(2, 16, 4, device=cuda), Grid(3, 5), masked=masked)
    assert out.device == cuda


def test_device_meta():
    with torch.device("meta"):
        assert Peg(PegSpec(), DIMS).convs[0].weight.is_meta
