"""LieRE: generators that do not commute, dense and in blocks."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import visionpos as vp
from tests.compiled import SIZES, graphs_of
from tests.reference import turning as oracle
from tests.strategies import grids, seeds
from tests.tolerances import assert_close_to
from visionpos import CoordSpec, Dims, Grid, PositionError
from visionpos.config import load_encoding
from visionpos.encodings import Liere, LiereSpec

DIMS = Dims(embed_dim=24, num_heads=3, depth=2, prefix=1)  # heads of 8 channels


def rope(seed: int = 0, dims: Dims = DIMS, **fields: object) -> Liere:
    spec = LiereSpec(**{"block": 4, "start": 1.0, **fields})
    return Liere(spec, dims, generator=torch.Generator().manual_seed(seed)).eval()


@pytest.mark.parametrize("hw", [(3, 5), (1, 7), (7, 1), (13, 11)])
def test_shape(hw):
    module, q = rope(), torch.randn(2, 3, 1 + hw[0] * hw[1], 8)
    out = module(Grid(*hw), layer=1).apply(q, prefix=1)
    assert out.shape == q.shape
    assert torch.equal(out[..., :1, :], q[..., :1, :])


@pytest.mark.parametrize(
    ("fields", "shape"),
    [
        ({}, (2, 3, 2, 2, 6)),
        ({"block": None}, (2, 3, 2, 1, 28)),
        ({"per_layer": False}, (1, 3, 2, 2, 6)),
        ({"per_head": False}, (2, 1, 2, 2, 6)),
        ({"coords": CoordSpec(unit="span", axes=3)}, (2, 3, 3, 2, 6)),
        ({"block": 3}, (2, 3, 2, 2, 3)),
    ],
)
def test_shape_of_generators(fields, shape):
    """Only entries above the diagonal are learned; a head that blocks do not fill keeps its last channels."""
    module = rope(**fields)
    assert module.generators.shape == shape
    frames = 2 if module.coords.axes == 3 else 1
    q = torch.randn(1, 3, 15 * frames, 8)
    out = module(Grid(3, 5, frames=frames)).apply(q)
    if module.spec.block == 3:
        assert torch.equal(out[..., 6:], q[..., 6:])


@given(grids(max_side=4), seeds(), st.sampled_from([2, 4, None]))
def test_reference_matrices(hw, seed, block):
    """expm of sum_a p_a A_a, token by token, head by head, float64."""
    module = rope(seed, block=block).double()
    size = module.block
    coords = module.points(Grid(*hw)).double()
    q = torch.randn(1, 3, len(coords), 8, dtype=torch.float64)
    out = module.turn(q, coords, 1)
    entries = module.generators[1].detach().numpy()
    for head in range(3):
        for n in range(len(coords)):
            matrix = oracle.liere(coords[n].numpy(), entries[head], size)
            expected = torch.from_numpy(matrix) @ q[0, head, n]
            torch.testing.assert_close(out[0, head, n], expected, rtol=0, atol=1e-9)


def test_reference_coordinates_of_the_source():
    """First cell on 0, last on 1 at the trained size; on side / trained at another (LieRE's PositionEncoderBase)."""
    coords = vp.coordinates(Grid(4, 4), CoordSpec(unit="span"))
    thirds = [0, 1 / 3, 2 / 3, 1]
    torch.testing.assert_close(coords, torch.tensor([[y, x] for y in thirds for x in thirds]))
    spec = load_encoding("liere_8").coords
    wide = vp.coordinates(Grid(14, 28), spec)
    assert wide.amax(0).tolist() == [1.0, 2.0]


@given(grids(max_side=5), seeds())
def test_invariant_blocks_of_two_are_rope_mixed(hw, seed):
    """A generator of two channels is one frequency an axis: the learned directions of RoPE-Mixed."""
    module = rope(seed, block=2, coords=CoordSpec())
    coords = vp.coordinates(Grid(*hw))
    freqs = -module.generators[0, ..., 0].detach()  # above the diagonal stands minus the sine
    rotation = vp.Rotation.of(vp.angles(coords.unsqueeze(-3), freqs), "adjacent")
    q = torch.randn(1, 3, len(coords), 8)
    torch.testing.assert_close(module.turn(q, coords), rotation.apply(q), rtol=0, atol=2e-5)


@given(seeds(), st.sampled_from([4, None]))
def test_invariant_rotations_keep_norms(seed, block):
    module = rope(seed, block=block)
    q = torch.randn(1, 3, 15, 8)
    out = module(Grid(3, 5)).apply(q)
    torch.testing.assert_close(out.norm(dim=-1), q.norm(dim=-1), rtol=1e-5, atol=1e-5)


def test_invariant_not_strictly_relative():
    """Facts 4: R(p)^T R(q) is not R(q - p) at block 8, by about .127 for a mild pair; with block 2 it is."""
    for block, low, high in ((8, 0.02, 5.0), (2, 0.0, 1e-6)):
        module = rope(3, block=block, dims=Dims(embed_dim=8, num_heads=1, depth=1)).double()
        p, q = torch.tensor([[0.3, -0.2]]).double(), torch.tensor([[0.5, 0.4]]).double()

        def matrix(point, module=module):
            return module.turn(torch.eye(8).double()[None, :, None], point).squeeze()

        gap = (matrix(p) @ matrix(q).T - matrix(p - q)).norm()
        assert low <= gap <= high


def test_invariant_shift_is_felt():
    """What the docs of CoordSpec say of shift does not hold here: patch-to-patch scores change."""
    module = rope(block=8, dims=Dims(embed_dim=8, num_heads=1, depth=1))
    q, k = torch.randn(2, 1, 1, 15, 8)
    coords = module.points(Grid(3, 5))

    def scores(points):
        return module.turn(q, points) @ module.turn(k, points).mT

    assert (scores(coords) - scores(coords + 0.5)).abs().max() > 0.05


def test_invariant_from_liere():
    """generator_raw_params (axes, layers, heads * blocks, size, size): only its upper triangle acts there."""
    raw = torch.rand(2, 2, 3 * 2, 4, 4)
    module = rope()
    with torch.no_grad():
        module.generators.copy_(Liere.from_liere(raw, heads=3))
    for axis, layer, head, j in ((0, 0, 0, 0), (1, 1, 2, 1), (1, 0, 1, 0)):
        upper = torch.triu(raw[axis, layer, head * 2 + j], 1)
        from visionpos.geometry.blocks import skew

        assert torch.equal(skew(module.generators[layer, head, axis, j], 4), upper - upper.T)


def test_invariant_start_values():
    """Uniform in [0, start], from the passed generator alone."""
    before = torch.get_rng_state()
    module = rope(5, dims=Dims(embed_dim=256, num_heads=4, depth=2), block=8, start=2.0)
    assert torch.equal(torch.get_rng_state(), before)
    assert 0 <= module.generators.min() < 0.05
    assert 1.95 < module.generators.max() <= 2.0
    assert torch.equal(module.generators, rope(5, module.dims, block=8, start=2.0).generators)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"block": 1}, r"block is 1 and start 1\.0; a block of at least 2"),
        ({"start": float("inf")}, r"start is inf; it must be a finite number"),
        ({"block": 16}, r"block is 16 and a head has 8 channels"),
    ],
)
def test_error_spec(fields, match):
    with pytest.raises(PositionError, match=match):
        rope(**fields)


@pytest.mark.parametrize("layer", [2, -3])
def test_error_layer(layer):
    with pytest.raises(PositionError, match=rf"layer is {layer}; the encoding has 2 layers"):
        rope()(Grid(3, 5), layer=layer)


def test_gradient_of_generators():
    module = rope(dims=Dims(embed_dim=4, num_heads=2, depth=1, head_dim=3), block=3).double()
    q = torch.randn(1, 2, 3, 3, dtype=torch.float64, requires_grad=True)

    def run(generators, q):
        turned = torch.func.functional_call(module, {"generators": generators}, (Grid(1, 2),))
        return turned.apply(q, prefix=1)

    assert torch.autograd.gradcheck(run, (module.generators, q))


def test_compile_one_graph_over_six_sizes():
    module = rope(dims=Dims(embed_dim=24, num_heads=3, depth=1))
    calls = [(torch.randn(2, 3, h * w, 8), h, w) for h, w in SIZES]
    assert graphs_of(lambda q, h, w: module(Grid(h, w)).apply(q), calls) == 1


def test_device(device):
    module, q = rope(), torch.randn(1, 3, 15, 8)
    expected = module(Grid(3, 5)).apply(q)
    there = module.to(device)(Grid(3, 5)).apply(q.to(device))
    assert there.device.type == device.type
    torch.testing.assert_close(there.cpu(), expected, rtol=1e-4, atol=1e-4)


def test_device_default_is_the_parameter_s():
    """A module on CUDA, called without device=, stays there (fake tensors raise where devices mix)."""
    module, cuda = rope(), torch.device("cuda", 0)
    with FakeTensorMode():
        module.generators = nn.Parameter(torch.empty(2, 3, 2, 2, 6, device=cuda))
        turn = module(Grid(3, 5))
        assert turn.matrices.device == cuda
        assert turn.apply(torch.empty(1, 3, 15, 8, device=cuda)).device == cuda


def test_device_meta():
    with torch.device("meta"):
        assert vp.build(LiereSpec(block=4), DIMS).generators.device.type == "meta"


def test_reference_oracle_exponential_is_one():
    """The oracle itself: a rotation by pi / 2 in a plane."""
    quarter = oracle.expm(np.array([[0.0, -np.pi / 2], [np.pi / 2, 0.0]]))
    np.testing.assert_allclose(quarter, [[0, -1], [1, 0]], atol=1e-12)


def test_invariant_half_precision_coordinates():
    """Coordinates in bfloat16 are rounded once; the product with bfloat16 generators is formed in float32."""
    module = rope().bfloat16()
    coords = module.points(Grid(3, 5)).bfloat16()
    exact = copy.deepcopy(module).double().turns(coords.double(), 1).matrices
    ours = module.turns(coords, 1).matrices
    assert ours.dtype == torch.float32
    assert_close_to(ours, exact)


def test_error_places():
    module = rope()
    with pytest.raises(PositionError, match=r"coords holds NaN"):
        module.turns(torch.tensor([[0.0, float("nan")]]))
    with pytest.raises(PositionError, match=r"coords has 3 axes"):
        module.turns(torch.zeros(4, 3))


@pytest.mark.parametrize(
    ("shape", "heads", "match"),
    [
        ((2, 2, 6, 4, 4), 4, r"heads is 4 and raw has 6 generators a layer"),
        ((2, 2, 6, 4, 4), 0, r"heads is 0 and raw has 6"),
        ((2, 6, 4, 4), 3, r"raw has shape \(2, 6, 4, 4\); \(axes, layers, heads \* blocks, block"),
        ((2, 2, 6, 4, 5), 3, r"raw has shape \(2, 2, 6, 4, 5\)"),
        ((6,), 3, r"raw has shape \(6,\)"),
    ],
)
def test_error_from_liere(shape, heads, match):
    with pytest.raises(PositionError, match=match):
        Liere.from_liere(torch.zeros(shape), heads=heads)
