"""STRING: a learned basis (Cayley) and circulant generators, both strictly relative."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import visionpos as vp
from tests.compiled import SIZES, graphs_of
from tests.reference import turning as oracle
from tests.strategies import grids, seeds, shifts
from tests.tolerances import assert_close_to
from visionpos import AxialRopeSpec, CoordSpec, Dims, Grid, PositionError
from visionpos.config import load_encoding
from visionpos.encodings import StringRope, StringRopeSpec

DIMS = Dims(embed_dim=24, num_heads=3, depth=2, prefix=1)  # heads of 8 channels
VARIANTS = ["cayley", "circulant"]


def rope(seed: int = 0, dims: Dims = DIMS, **fields: object) -> StringRope:
    """A module with random parameters: the zero start values of Cayley would hide errors."""
    module = StringRope(StringRopeSpec(**{"block": 4, **fields}), dims).eval()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(torch.randn(weight.shape, generator=draw) * 0.5)
    return module


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("hw", [(3, 5), (1, 7), (7, 1), (13, 11)])
def test_shape(hw, variant):
    module, q = rope(variant=variant), torch.randn(2, 3, 1 + hw[0] * hw[1], 8)
    out = module(Grid(*hw), layer=1).apply(q, prefix=1)
    assert out.shape == q.shape
    assert torch.equal(out[..., :1, :], q[..., :1, :])


def test_shape_of_parameters():
    assert rope().skew.shape == (2, 3, 28)
    assert rope().frequencies is None
    assert rope(learn_frequencies=True).frequencies.shape == (2, 3, 2, 4)
    assert rope(variant="circulant").rows.shape == (2, 3, 2, 2, 1)
    assert rope(variant="circulant", block=8).rows.shape == (2, 3, 2, 1, 3)


@pytest.mark.parametrize("learned", [False, True])
@given(hw=grids(max_side=4), seed=seeds())
def test_reference_cayley(hw, seed, learned):
    """P RoPE(p) P^T with P = (1 - S)(1 + S)^-1, dense, float64."""
    module = rope(seed, learn_frequencies=learned).double()
    coords = module.points(Grid(*hw)).double()
    q = torch.randn(1, 3, len(coords), 8, dtype=torch.float64)
    out = module.turn(q, coords, 1).detach()
    freqs = vp.axial_freqs(8, theta=100.0).double().expand(3, -1, -1)
    freqs = module.frequencies[1].detach() if learned else freqs
    for head in range(3):
        basis = torch.from_numpy(oracle.cayley_basis(module.skew[1, head].detach().numpy(), 8))
        for n in range(len(coords)):
            blocks = [
                oracle.expm(torch.tensor([[0.0, -a], [a, 0.0]]).double().numpy())
                for a in (coords[n] @ freqs[head]).tolist()
            ]
            dense = basis @ torch.from_numpy(oracle.block_diagonal(blocks)) @ basis.T
            # The frequencies are float32 numbers of a ladder.
            torch.testing.assert_close(out[0, head, n], dense @ q[0, head, n], rtol=0, atol=1e-6)


@given(grids(max_side=4), seeds(), st.sampled_from([4, 8]))
def test_reference_circulant(hw, seed, block):
    """expm of the dense circulant generators: the rotation of waves is the same map."""
    module = rope(seed, variant="circulant", block=block).double()
    coords = module.points(Grid(*hw)).double()
    q = torch.randn(1, 3, len(coords), 8, dtype=torch.float64)
    out = module.turn(q, coords, 1).detach()
    rows = module.rows[1].detach().numpy()
    for head in range(3):
        for n in range(len(coords)):
            matrix = torch.from_numpy(oracle.circulant_string(coords[n].numpy(), rows[head], block))
            torch.testing.assert_close(out[0, head, n], matrix @ q[0, head, n], rtol=0, atol=1e-8)


def test_reference_odd_circulant_block():
    """Blocks of an odd size have a constant wave and no alternating one."""
    dims = Dims(embed_dim=10, num_heads=1, depth=1)
    module = rope(variant="circulant", block=5, dims=dims).double()
    point = torch.tensor([[0.7, -1.3]]).double()
    q = torch.randn(1, 1, 1, 10, dtype=torch.float64)
    matrix = oracle.circulant_string(point[0].numpy(), module.rows[0, 0].detach().numpy(), 5)
    expected = torch.from_numpy(matrix) @ q[0, 0, 0]
    torch.testing.assert_close(module.turn(q, point)[0, 0, 0], expected, rtol=0, atol=1e-10)


@given(grids(max_side=5))
def test_invariant_start_is_axial_rope(hw):
    """Before training the basis is the identity: axial RoPE of the same theta, y then x, adjacent."""
    module = StringRope(load_encoding("string_cayley"), DIMS)
    axial = vp.build(AxialRopeSpec(theta=100.0), DIMS)
    q = torch.randn(1, 3, hw[0] * hw[1], 8)
    torch.testing.assert_close(
        module(Grid(*hw)).apply(q), axial(Grid(*hw)).apply(q), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("variant", VARIANTS)
@given(seed=seeds(), shift=shifts(max_shift=5))
def test_invariant_strictly_relative(seed, shift, variant):
    """Facts 4: residual 3e-5; norms are kept."""
    module = rope(seed, variant=variant)
    coords = module.points(Grid(3, 5))
    q, k = torch.randn(2, 1, 3, 15, 8)

    def scores(points):
        return module.turn(q, points) @ module.turn(k, points).mT

    moved = coords + torch.tensor(shift, dtype=torch.float32)
    torch.testing.assert_close(scores(moved), scores(coords), rtol=0, atol=3e-4)
    out = module.turn(q, coords)
    torch.testing.assert_close(out.norm(dim=-1), q.norm(dim=-1), rtol=1e-4, atol=1e-4)


def test_invariant_circulant_start_is_near_the_identity():
    module = StringRope(
        load_encoding("string_circulant"),
        Dims(embed_dim=384, num_heads=6, depth=2),
        generator=torch.Generator().manual_seed(1),
    )
    assert module.rows.shape == (2, 6, 2, 4, 7)
    assert module.rows.std().item() == pytest.approx(0.1, rel=0.05)


def test_invariant_three_axes():
    dims = Dims(embed_dim=36, num_heads=3, depth=1)
    module = rope(dims=dims, coords=CoordSpec(axes=3))
    q = torch.randn(1, 3, 30, 12)
    out = module(Grid(3, 5, frames=2)).apply(q)
    assert not torch.equal(out[:, :, :15], module(Grid(3, 5)).apply(q[:, :, :15]) * 2)
    torch.testing.assert_close(out[:, :, :15], module(Grid(3, 5)).apply(q[:, :, :15]))


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"variant": "fourier"}, r"variant is 'fourier'; it must be one of 'cayley', 'circulant'"),
        ({"block": 2}, r"block is 2 and std 0\.1; a block of at least 3"),
        ({"std": float("nan")}, r"std is nan; it must be a finite number"),
        ({"variant": "circulant", "block": 3}, r"a head has 8 channels; a multiple of block 3"),
        ({"theta": 0.0}, r"theta is 0\.0"),
        ({"coords": CoordSpec(axes=3)}, r"head_dim is 8 for 3 axes"),
    ],
)
def test_error(fields, match):
    with pytest.raises(PositionError, match=match):
        rope(**fields)


@pytest.mark.parametrize("layer", [2, -3])
def test_error_layer(layer):
    with pytest.raises(PositionError, match=rf"layer is {layer}; the encoding has 2 layers"):
        rope()(Grid(3, 5), layer=layer)


@pytest.mark.parametrize("fields", [{"learn_frequencies": True}, {"variant": "circulant"}])
def test_gradient_of_parameters(fields):
    dims = Dims(embed_dim=4, num_heads=1, depth=1)
    module = rope(dims=dims, **fields).double()
    names = [name for name, _ in module.named_parameters()]
    q = torch.randn(1, 1, 3, 4, dtype=torch.float64, requires_grad=True)

    def run(q, *weights):
        learned = dict(zip(names, weights, strict=True))
        return torch.func.functional_call(module, learned, (Grid(1, 2),)).apply(q, prefix=1)

    assert torch.autograd.gradcheck(run, (q, *module.parameters()))


@pytest.mark.parametrize("variant", VARIANTS)
def test_compile_one_graph_over_six_sizes(variant):
    module = rope(variant=variant, dims=Dims(embed_dim=24, num_heads=3, depth=1))
    calls = [(torch.randn(2, 3, h * w, 8), h, w) for h, w in SIZES]
    assert graphs_of(lambda q, h, w: module(Grid(h, w)).apply(q), calls) == 1


@pytest.mark.parametrize("variant", VARIANTS)
def test_device(device, variant):
    module, q = rope(variant=variant), torch.randn(1, 3, 15, 8)
    expected = module(Grid(3, 5)).apply(q)
    there = module.to(device)(Grid(3, 5)).apply(q.to(device))
    assert there.device.type == device.type
    torch.testing.assert_close(there.cpu(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_device_default_is_the_parameter_s(variant):
    module, cuda = rope(variant=variant), torch.device("cuda", 0)
    with FakeTensorMode():
        for name, weight in list(module.named_parameters()):
            setattr(module, name, nn.Parameter(torch.empty(weight.shape, device=cuda)))
        turn = module(Grid(3, 5))
        assert turn.basis.device == turn.rotation.cos.device == cuda
        assert turn.apply(torch.empty(1, 3, 15, 8, device=cuda)).device == cuda


@pytest.mark.parametrize("variant", VARIANTS)
def test_invariant_angles_of_a_half_precision_module(variant):
    """Weights of a bfloat16 model are rounded; what follows is float32: as from the same weights in float64."""
    half = rope(variant=variant, learn_frequencies=variant == "cayley", block=8).bfloat16()
    exact = copy.deepcopy(half).double()
    coords = half.points(Grid(13, 11))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        turn = half.turns(coords, 1)
    expected = exact.turns(coords.double(), 1)
    assert turn.rotation.cos.dtype == turn.basis.dtype == torch.float32
    for name in ("cos", "sin"):
        ours, theirs = getattr(turn.rotation, name), getattr(expected.rotation, name)
        assert_close_to(ours, theirs)
    assert_close_to(turn.basis, expected.basis)
