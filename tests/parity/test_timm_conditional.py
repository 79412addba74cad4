"""timm's convolutional encodings and ConViT's gate against ours: outputs, keys, and where timm guesses a square."""

from dataclasses import replace

import pytest
import torch
from timm.models import coat, convit, davit, fastvit, twins
from timm.models.csatv2 import PosConv as CsatPosConv
from torch import nn

from visionpos import Dims, Grid, PositionError
from visionpos.config import load_encoding
from visionpos.encodings import ConvRelative, Gpsa, GpsaSpec, Peg, PegSpec

RECTANGLES = [(3, 5), (1, 7), (7, 1), (13, 11), (8, 8)]
DIMS = Dims(embed_dim=8, num_heads=1, depth=12)


def randomised(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for weight in module.parameters():
            weight.normal_()
    return module.eval()


def as_map(tokens: torch.Tensor, hw: tuple[int, int]) -> torch.Tensor:
    return tokens.transpose(1, 2).unflatten(2, hw)


def as_tokens(maps: torch.Tensor) -> torch.Tensor:
    return maps.flatten(2).transpose(1, 2)


@pytest.mark.parametrize("hw", RECTANGLES)
def test_reference_twins(hw):
    """PosConv of the four stages: bit equal. It adds in place; ours leaves its input alone."""
    theirs = randomised(twins.PosConv(8, 8))
    state = {f"pos_block.2.{key}": value for key, value in theirs.state_dict().items()}
    ours = Peg.from_timm(state, load_encoding("twins_peg"), DIMS)
    tokens = torch.randn(2, hw[0] * hw[1], 8)
    assert torch.equal(ours(tokens, Grid(*hw)), theirs(tokens.clone(), hw))


def test_reference_twins_model():
    """The keys of a whole Twins: one entry a stage, widths 64, 128, 320, 512; std of the start .4714."""
    model = twins.twins_pcpvt_small(pretrained=False, embed_dims=(64, 128, 320, 512))
    for stage, width in enumerate((64, 128, 320, 512)):
        stem = f"pos_block.{stage}."
        state = {key: value for key, value in model.state_dict().items() if key.startswith(stem)}
        assert sorted(state) == [f"{stem}proj.0.bias", f"{stem}proj.0.weight"]
        dims = replace(DIMS, embed_dim=width)
        ours = Peg.from_timm(state, load_encoding("twins_peg"), dims)
        assert torch.equal(ours.convs[0].weight, state[f"{stem}proj.0.weight"])
        assert state[f"{stem}proj.0.weight"].std().item() == pytest.approx(0.4714, rel=0.1)


@pytest.mark.parametrize("hw", RECTANGLES)
def test_reference_csatv2(hw):
    theirs = randomised(CsatPosConv(in_chans=8))
    spec = load_encoding("csatv2_peg")
    ours = Peg.from_timm(theirs.state_dict(), spec, replace(DIMS, depth=1))
    tokens = torch.randn(2, hw[0] * hw[1], 8)
    assert torch.equal(ours(tokens, Grid(*hw)), theirs(tokens, hw))


@pytest.mark.parametrize("hw", RECTANGLES)
@pytest.mark.parametrize("act", [False, True])
def test_reference_davit(hw, act):
    """cpe1 and cpe2 of a block are slots 0 and 1, on maps there and tokens here."""
    both = [randomised(davit.ConvPosEnc(dim=8, k=3, act=act)) for _ in range(2)]
    state = {
        f"cpe{i + 1}.{key}": v for i, m in enumerate(both) for key, v in m.state_dict().items()
    }
    spec = replace(load_encoding("davit_cpe"), activation="gelu" if act else "none")
    ours = Peg.from_timm(state, spec, replace(DIMS, depth=1))
    tokens = torch.randn(2, hw[0] * hw[1], 8)
    for slot, theirs in enumerate(both):
        expected = as_tokens(theirs(as_map(tokens, hw)))
        torch.testing.assert_close(ours(tokens, Grid(*hw), slot=slot), expected)


@pytest.mark.parametrize("hw", RECTANGLES)
def test_reference_fastvit(hw):
    """7x7, before and after timm's own reparameterisation: both key sets load, both functions agree."""
    theirs = randomised(fastvit.RepConditionalPosEnc(8))
    tokens = torch.randn(2, hw[0] * hw[1], 8)
    ours = Peg.from_timm(theirs.state_dict(), load_encoding("fastvit_cpe"), DIMS)
    with torch.no_grad():
        before = as_tokens(theirs(as_map(tokens, hw)))
        torch.testing.assert_close(ours(tokens, Grid(*hw)), before, rtol=1e-5, atol=1e-5)
        theirs.reparameterize()
        state = theirs.state_dict()
        assert sorted(state) == ["reparam_conv.bias", "reparam_conv.weight"]
        fused = Peg.from_timm(state, load_encoding("fastvit_cpe_fused"), DIMS)
        torch.testing.assert_close(fused(tokens, Grid(*hw)), before, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours.folded().convs[0].weight, fused.convs[0].weight)
    with pytest.raises(PositionError, match="holds the identity"):
        Peg.from_timm(state, load_encoding("fastvit_cpe"), DIMS)


@pytest.mark.parametrize("hw", RECTANGLES)
def test_reference_coat_cpe(hw):
    """The class token is split off and put back unchanged."""
    theirs = randomised(coat.ConvPosEnc(dim=8, k=3))
    ours = Peg.from_timm(theirs.state_dict(), load_encoding("coat_cpe"), replace(DIMS, prefix=1))
    tokens = torch.randn(2, 1 + hw[0] * hw[1], 8)
    assert torch.equal(ours(tokens, Grid(*hw)), theirs(tokens, hw))


@pytest.mark.parametrize("hw", RECTANGLES)
def test_reference_coat_relative(hw):
    """Kernels 3, 5, 7 for 2, 3, 3 heads: bit equal."""
    theirs = randomised(coat.ConvRelPosEnc(head_chs=4, num_heads=8, window={3: 2, 5: 3, 7: 3}))
    state = {f"crpe1.{key}": value for key, value in theirs.state_dict().items()}
    dims = Dims(embed_dim=32, num_heads=8, depth=1, prefix=1)
    ours = ConvRelative.from_timm(state, load_encoding("coat"), dims)
    q, v = torch.randn(2, 2, 8, 1 + hw[0] * hw[1], 4)
    assert torch.equal(ours(q, v, Grid(*hw)), theirs(q, v, hw))


@pytest.mark.parametrize("hw", [(3, 5), (6, 4)])
def test_reference_coat_attention(hw):
    """The term joins the output of factorised attention: scale * q (softmax(k)^T v) + term, then the projection."""
    dims = Dims(embed_dim=32, num_heads=8, depth=1, prefix=1)
    crpe = coat.ConvRelPosEnc(head_chs=4, num_heads=8, window={3: 2, 5: 3, 7: 3})
    theirs = randomised(coat.FactorAttnConvRelPosEnc(32, num_heads=8, shared_crpe=crpe))
    ours = ConvRelative.from_timm(crpe.state_dict(), load_encoding("coat"), dims)
    x = torch.randn(2, 1 + hw[0] * hw[1], 32)
    q, k, v = theirs.qkv(x).unflatten(2, (3, 8, 4)).permute(2, 0, 3, 1, 4)
    mixed = 4**-0.5 * (q @ (k.softmax(2).mT @ v)) + ours(q, v, Grid(*hw))
    out = theirs.proj(mixed.transpose(1, 2).flatten(2))
    torch.testing.assert_close(out, theirs(x, hw), rtol=1e-4, atol=1e-4)


def gpsa_pair(heads: int, width: int) -> tuple[convit.GPSA, Gpsa]:
    theirs = randomised(convit.GPSA(width, num_heads=heads))
    state = {
        f"blocks.0.attn.{key}": value
        for key, value in theirs.state_dict().items()
        if key.startswith("pos_proj") or key == "gating_param"
    }
    dims = Dims(embed_dim=width, num_heads=heads, depth=1)
    return theirs, Gpsa.from_timm(state, load_encoding("convit"), dims)


def content_of(theirs: convit.GPSA, x: torch.Tensor) -> torch.Tensor:
    heads = theirs.num_heads
    q, k = theirs.qk(x).unflatten(2, (2, heads, -1)).permute(2, 0, 3, 1, 4)
    return (q @ k.mT * theirs.scale).softmax(-1)


@pytest.mark.parametrize("side", [1, 2, 5, 7])
@pytest.mark.parametrize("heads", [4, 9])
def test_reference_convit(side, heads):
    """On squares the whole attention agrees to float noise (timm divides by the row sum once more)."""
    theirs, ours = gpsa_pair(heads, 4 * heads)
    x = torch.randn(2, side * side, 4 * heads)
    theirs(x)  # builds rel_indices
    out = ours(content_of(theirs, x), Grid(side, side))
    torch.testing.assert_close(out, theirs.get_attention(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("strength", [1.0, 0.5])
def test_reference_convit_start(strength):
    theirs = convit.GPSA(64, num_heads=16, locality_strength=strength)
    theirs.local_init()
    ours = Gpsa(GpsaSpec(locality=strength), Dims(embed_dim=64, num_heads=16, depth=1))
    assert torch.equal(ours.weight, theirs.pos_proj.weight)
    assert torch.equal(ours.gating, theirs.gating_param)


def test_reference_convit_guesses_a_square():
    """A 1x4 strip: timm reads it as 2x2, so cells 0 and 2 are one apart instead of two; ours keeps the strip.

    3x5 tokens, whose count is no square, raise there.
    """
    theirs, ours = gpsa_pair(4, 16)
    theirs(torch.randn(1, 4, 16))
    assert theirs.rel_indices[0, 0, 2].tolist() == [
        0,
        1,
        1,
    ]  # dx, dy, d^2 of cell 2 seen from cell 0
    true = ours.values(torch.tensor([[0.0, -2.0]]))  # query - key of the strip
    torch.testing.assert_close(true[:, 0], ours.weight @ torch.tensor([2.0, 0.0, 4.0]) + ours.bias)
    strip = ours.positions(Grid(1, 4))
    square = ours.positions(Grid(2, 2))
    torch.testing.assert_close(
        theirs.pos_proj(theirs.rel_indices).permute(0, 3, 1, 2).softmax(-1)[0], square
    )
    assert (strip - square).abs().max() > 0.05
    with pytest.raises(RuntimeError):
        theirs(torch.randn(1, 15, 16))


def test_reference_none_of_them_takes_registers():
    """timm: a prefix of two breaks the map; here any prefix passes unchanged."""
    tokens = torch.randn(1, 2 + 15, 8)
    with pytest.raises(RuntimeError):
        twins.PosConv(8, 8)(tokens, (3, 5))
    ours = Peg(PegSpec(), replace(DIMS, prefix=2))
    assert torch.equal(ours(tokens, Grid(3, 5))[:, :2], tokens[:, :2])


@pytest.mark.parametrize("hw", [(6, 4), (5, 7), (1, 3)])
def test_reference_twins_with_a_stride(hw):
    """Facts 1H: with a stride the source drops the residual: what is left is every second cell without it."""
    theirs = randomised(twins.PosConv(8, 8, stride=2))
    spec = replace(load_encoding("twins_peg"), residual=False)
    state = {f"pos_block.0.{key}": value for key, value in theirs.state_dict().items()}
    ours = Peg.from_timm(state, spec, DIMS)
    tokens = torch.randn(2, hw[0] * hw[1], 8)
    every_second = as_map(ours(tokens, Grid(*hw)), hw)[:, :, ::2, ::2]
    torch.testing.assert_close(as_tokens(every_second), theirs(tokens.clone(), hw))
