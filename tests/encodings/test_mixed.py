"""RoPE-Mixed: learned directions a head and layer."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import visionpos as vp
from tests.reference import coords as where
from tests.reference import rotary as oracle
from tests.strategies import grids, seeds, shifts
from tests.tolerances import assert_close_to
from visionpos import CoordSpec, Dims, Grid, MixedRope, MixedRopeSpec, PositionError
from visionpos.config import load_encoding

DIMS = Dims(embed_dim=24, num_heads=3, depth=4, prefix=1)  # heads of 8 channels


def rope(seed: int = 0, dims: Dims = DIMS) -> MixedRope:
    return MixedRope(MixedRopeSpec(), dims, generator=torch.Generator().manual_seed(seed)).eval()


@pytest.mark.parametrize("hw", [(3, 5), (1, 7), (7, 1), (13, 11)])
def test_shape_of_a_layer(hw):
    """One layer at a time: [heads, n, pairs], never all layers at once."""
    out = rope()(Grid(*hw), layer=3)
    assert out.cos.shape == (3, hw[0] * hw[1], 4)
    assert rope().frequencies.shape == (4, 3, 2, 4)


def test_shape_of_draws():
    """Coordinates of several samples put the samples before the heads."""
    assert rope().angles(torch.zeros(5, 15, 2), 1).shape == (5, 3, 15, 4)


@given(grids(max_side=6), seeds(), st.integers(0, 3))
def test_reference_angles(hw, seed, layer):
    """x fx + y fy of every head, by loops."""
    module = rope(seed)
    freqs = module.frequencies[layer].detach().double()
    xy = torch.stack([freqs[:, 1], freqs[:, 0]]).numpy()
    expected = oracle.mixed_angles(where.index(*hw), xy)
    turns = module.angles(vp.coordinates(Grid(*hw)), layer).detach()
    assert_close_to(turns, torch.from_numpy(expected), kind="table")


def test_reference_golden_start():
    """Facts 2, RoPE-ViT, manual_seed(0), d=8, 2 heads; head 0 at (x=2, y=1)."""
    dims = Dims(embed_dim=16, num_heads=2, depth=1)
    module = vp.build(load_encoding("rope_mixed"), dims)  # conftest seeds torch with 0
    x = [[-0.999723, -0.316140, -0.023518, -0.007437], [0.114241, 0.036126, 0.993453, 0.314157]]
    torch.testing.assert_close(module.frequencies[0, :, 1], torch.tensor(x), rtol=0, atol=6e-7)
    phase = module.angles(torch.tensor([[1.0, 2.0]]))[0, 0]
    expected = torch.tensor([-1.975929, -0.624843, -1.046760, -0.331015])
    torch.testing.assert_close(phase, expected, rtol=0, atol=1e-6)


def test_invariant_from_timm():
    """timm's (2, depth, heads, pairs) with x first becomes [depth, heads, (y, x), pairs], a copy."""
    theirs = torch.arange(2 * 4 * 3 * 5.0).reshape(2, 4, 3, 5)
    ours = MixedRope.from_timm(theirs)
    assert ours.shape == (4, 3, 2, 5)
    assert ours.is_contiguous()
    for layer, head, pair in ((0, 0, 0), (3, 1, 4), (2, 2, 1)):
        assert ours[layer, head, 1, pair] == theirs[0, layer, head, pair]
        assert ours[layer, head, 0, pair] == theirs[1, layer, head, pair]


@given(grids(max_side=5), shifts(max_shift=9), seeds())
def test_invariant_shift(hw, shift, seed):
    """Learned directions too: scores depend on differences alone."""
    module = rope(seed).double()
    coords = vp.coordinates(Grid(*hw)).double()
    q, k = torch.randn(2, 1, 3, len(coords), 8, dtype=torch.float64)

    def scores(points):
        turned = vp.rotate(q, k, vp.Rotation.of(module.angles(points, 2), module.pairing))
        return turned[0] @ turned[1].mT

    torch.testing.assert_close(
        scores(coords), scores(coords + torch.tensor(shift)), rtol=1e-9, atol=1e-9
    )


def test_invariant_layers_and_heads_differ():
    module = rope()
    assert module.layerwise
    first = module(Grid(3, 5), layer=0).sin
    assert (first - module(Grid(3, 5), layer=1).sin).abs().max() > 0.1
    assert (first[0] - first[1]).abs().max() > 0.1
    assert torch.equal(module(Grid(3, 5), layer=-1).sin, module(Grid(3, 5), layer=3).sin)


def test_invariant_angles_of_a_cast_module_stay_float32():
    """Casting rounds the learned numbers like any weight, once; the angles are still formed in float32."""
    module = rope()
    rounded = module.frequencies.detach().bfloat16().float()
    turns = module.bfloat16().angles(vp.coordinates(Grid(32, 30)), 1)
    assert turns.dtype == torch.float32
    exact = vp.angles(vp.coordinates(Grid(32, 30)).unsqueeze(-3), rounded[1])
    assert torch.equal(turns, exact)


def test_invariant_generator_alone_decides():
    before = torch.get_rng_state()
    assert torch.equal(rope(5).frequencies, rope(5).frequencies)
    assert not torch.equal(rope(5).frequencies, rope(6).frequencies)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("axes", [1, 3])
def test_error_axes(axes):
    with pytest.raises(PositionError, match=rf"coords have {axes} axes; RoPE-Mixed needs axes=2"):
        vp.build(MixedRopeSpec(coords=CoordSpec(axes=axes)), DIMS)


def test_error_head_dim():
    with pytest.raises(PositionError, match=r"head_dim is 6; a multiple of 4.*num_heads"):
        vp.build(MixedRopeSpec(), Dims(embed_dim=12, num_heads=2, depth=1))


def test_error_theta():
    with pytest.raises(PositionError, match=r"theta is -10\.0"):
        vp.build(MixedRopeSpec(theta=-10.0), DIMS)


@pytest.mark.parametrize("layer", [4, -5])
def test_error_layer(layer):
    with pytest.raises(PositionError, match=rf"layer is {layer}; the encoding has 4 layers"):
        rope()(Grid(3, 5), layer=layer)


def test_gradient_of_frequencies():
    """Through angles, cos and sin, and the rotation of q: the frequencies learn (float64 gradcheck)."""
    module = rope(dims=Dims(embed_dim=8, num_heads=2, depth=2)).double()
    q = torch.randn(1, 2, 4, 4, dtype=torch.float64, requires_grad=True)

    def run(frequencies, q):
        learned = {"frequencies": frequencies}
        rotation = torch.func.functional_call(module, learned, (Grid(1, 3),), {"layer": 1})
        return rotation.apply(q, prefix=1)

    assert torch.autograd.gradcheck(run, (module.frequencies, q))


def test_device_meta():
    """Models are built under a meta device and filled later; the other encodings can be."""
    with torch.device("meta"):
        module = vp.build(MixedRopeSpec(), DIMS)
    assert module.frequencies.device.type == "meta"


def test_device_default_is_the_parameter_s():
    """A module on CUDA, called without device=, answers there and copies nothing to the host."""
    module, cuda = rope(), torch.device("cuda", 0)
    with FakeTensorMode():
        module.frequencies = nn.Parameter(torch.empty(4, 3, 2, 4, device=cuda))
        assert module(Grid(3, 5)).cos.device == cuda


def test_invariant_from_rope_vit():
    """The original's (2, depth, heads * pairs) is a view of timm's: head h holds the columns h * pairs and on."""
    theirs = torch.arange(2 * 4 * 15.0).reshape(2, 4, 15)
    ours = MixedRope.from_rope_vit(theirs, num_heads=3)
    assert torch.equal(ours, MixedRope.from_timm(theirs.reshape(2, 4, 3, 5)))
    assert ours[3, 2, 1, 4] == theirs[0, 3, 14]
    with pytest.raises(PositionError, match=r"num_heads is 4 and freqs hold 15 pairs a layer"):
        MixedRope.from_rope_vit(theirs, num_heads=4)


@pytest.mark.parametrize("shape", [(), (8,), (2, 4, 15), (3, 4, 3, 5), (2, 4, 3, 5, 1)])
def test_error_from_timm(shape):
    with pytest.raises(
        PositionError, match=r"freqs has shape \(.*\); \(2, depth, heads, pairs\) is required"
    ):
        MixedRope.from_timm(torch.zeros(shape))
    if len(shape) != 3:
        with pytest.raises(PositionError, match=r"freqs has shape .*\(2, depth, heads \* pairs\)"):
            MixedRope.from_rope_vit(torch.zeros(shape), num_heads=3)
