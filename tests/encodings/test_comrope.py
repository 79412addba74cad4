"""ComRoPE: block generators that commute, by axial partition or linear dependence."""

import copy

import pytest
import torch
from hypothesis import given
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import visionpos as vp
from tests.compiled import SIZES, graphs_of
from tests.reference import turning as oracle
from tests.strategies import grids, seeds, shifts
from tests.tolerances import assert_close_to
from visionpos import CoordSpec, Dims, Grid, PositionError
from visionpos.config import load_encoding
from visionpos.encodings import Comrope, ComropeSpec
from visionpos.geometry.blocks import skew

DIMS = Dims(embed_dim=24, num_heads=3, depth=2, prefix=1)  # heads of 8 channels
VARIANTS = ["axial", "linear"]


def rope(seed: int = 0, dims: Dims = DIMS, **fields: object) -> Comrope:
    spec = ComropeSpec(**{"block": 4, **fields})
    return Comrope(spec, dims, generator=torch.Generator().manual_seed(seed)).eval()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("hw", [(3, 5), (1, 7), (7, 1), (13, 11)])
def test_shape(hw, variant):
    module, q = rope(variant=variant), torch.randn(2, 3, 1 + hw[0] * hw[1], 8)
    out = module(Grid(*hw), layer=1).apply(q, prefix=1)
    assert out.shape == q.shape
    assert torch.equal(out[..., :1, :], q[..., :1, :])


def test_shape_of_parameters():
    assert rope(variant="axial").generators.shape == (2, 3, 2, 6)
    assert rope(variant="axial").multiplier is None
    assert rope(variant="linear").multiplier.shape == (2, 2, 2)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("block", [2, 4])
@given(hw=grids(max_side=4), seed=seeds())
def test_reference_matrices(hw, seed, block, variant):
    module = rope(seed, variant=variant, block=block).double()
    coords = module.points(Grid(*hw)).double()
    q = torch.randn(1, 3, len(coords), 8, dtype=torch.float64)
    out = module.turn(q, coords, 1)
    entries = module.generators[1].detach().numpy()
    scale = None if variant == "axial" else module.multiplier[1].detach().numpy()
    for head in range(3):
        for n in range(len(coords)):
            matrix = oracle.comrope(coords[n].numpy(), entries[head], block, scale)
            expected = torch.from_numpy(matrix) @ q[0, head, n]
            torch.testing.assert_close(out[0, head, n], expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("variant", VARIANTS)
@given(seed=seeds(), shift=shifts(max_shift=5))
def test_invariant_strictly_relative(seed, shift, variant):
    """Facts 4: R(p)^T R(q) = R(q - p) to 7e-6 in float32; scores see differences alone."""
    module = rope(seed, variant=variant)
    coords = module.points(Grid(3, 5))
    q, k = torch.randn(2, 1, 3, 15, 8)

    def scores(points):
        return module.turn(q, points) @ module.turn(k, points).mT

    moved = coords + torch.tensor(shift, dtype=torch.float32) / 5
    torch.testing.assert_close(scores(moved), scores(coords), rtol=0, atol=5e-4)
    out = module.turn(q, coords)
    torch.testing.assert_close(out.norm(dim=-1), q.norm(dim=-1), rtol=1e-4, atol=1e-4)


def test_invariant_residual():
    """Facts 4, block 8: the residual that was .127 for LieRE is float noise here."""
    for variant in VARIANTS:
        module = rope(3, Dims(embed_dim=16, num_heads=1, depth=1), variant=variant, block=8)
        p, q = torch.tensor([[0.3, -0.2]]), torch.tensor([[0.5, 0.4]])

        def matrix(point, module=module):
            return module.turn(torch.eye(16)[None, :, None], point).squeeze()

        assert (matrix(p) @ matrix(q).T - matrix(p - q)).norm() < 2e-5


def test_invariant_axial_blocks_belong_to_one_axis():
    """AP: moving along y leaves every other block alone, starting with the second."""
    module = rope(variant="axial")
    q = torch.randn(1, 3, 1, 8)
    along_y = module.turn(q, torch.tensor([[0.7, 0.0]]))
    assert torch.equal(along_y[..., 4:], q[..., 4:])
    assert not torch.equal(along_y[..., :4], q[..., :4])


@pytest.mark.parametrize("variant", VARIANTS)
def test_invariant_from_comrope(variant):
    """freqs (heads, 1, blocks, b, b) and multiplier (1, axes, blocks, 1, 1) of one attention layer."""
    module = rope(variant=variant)
    state = {"freqs": torch.randn(3, 1, 2, 4, 4)}
    if variant == "linear":
        state["multiplier"] = torch.randn(1, 2, 2, 1, 1)
    own = Comrope.from_comrope(state)
    with torch.no_grad():
        for name, value in own.items():
            getattr(module, name)[1].copy_(value)
    expected = state["freqs"] - state["freqs"].mT
    assert torch.equal(skew(module.generators[1], 4), expected[:, 0])
    point = torch.tensor([[0.2, -0.6]])
    a = expected[:, 0]  # [heads, blocks, b, b]
    if variant == "linear":
        reach = (point[0, :, None] * state["multiplier"][0, :, :, 0, 0]).sum(0)
    else:
        reach = point[0]
    matrices = torch.linalg.matrix_exp(a * reach[:, None, None])
    q = torch.randn(1, 3, 1, 8)
    theirs = (matrices @ q[0, :, 0].unflatten(-1, (2, 4)).unsqueeze(-1)).flatten(1)
    torch.testing.assert_close(module.turn(q, point, 1)[0, :, 0], theirs, rtol=0, atol=1e-5)


@given(grids(max_side=5), seeds())
def test_invariant_still_class_token(hw, seed):
    """The source turns its class token at .5 of cells on [0, 1]: the same scores as a still one at the origin."""
    module = rope(seed)
    centred = module.points(Grid(*hw))
    theirs = torch.cat([torch.full((1, 2), 0.5), centred + 0.5])
    fractional = vp.coordinates(Grid(*hw), CoordSpec(unit="fractional"))
    torch.testing.assert_close(theirs[1:], fractional)
    q, k = torch.randn(2, 1, 3, len(theirs), 8)
    ours = [module.turn(x, centred, prefix=1) for x in (q, k)]
    source = [module.turn(x, theirs) for x in (q, k)]
    torch.testing.assert_close(ours[0] @ ours[1].mT, source[0] @ source[1].mT, rtol=0, atol=2e-4)


def test_invariant_start_values():
    """P normal(0, std), so that P - P^T has std * sqrt 2; multiplier normal(0, 1)."""
    module = rope(1, Dims(embed_dim=512, num_heads=8, depth=4), block=8, std=0.5)
    assert module.generators.std().item() == pytest.approx(0.5 * 2**0.5, rel=0.03)
    assert module.multiplier.std().item() == pytest.approx(1.0, rel=0.2)
    assert load_encoding("comrope_ld").std == 1.0


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"variant": "AP"}, r"variant is 'AP'; it must be one of 'axial', 'linear'"),
        ({"block": 1}, r"block is 1 and std 1\.0"),
        ({"std": -1.0}, r"std -1\.0"),
        ({"block": 3}, r"a head has 8 channels; a multiple of 3 is required"),
        (
            {"block": 8, "variant": "axial"},
            r"a multiple of 16 is required for block 8 and 2 shares",
        ),
    ],
)
def test_error(fields, match):
    with pytest.raises(PositionError, match=match):
        rope(**fields)


@pytest.mark.parametrize("layer", [2, -3])
def test_error_layer(layer):
    with pytest.raises(PositionError, match=rf"layer is {layer}; the encoding has 2 layers"):
        rope()(Grid(3, 5), layer=layer)


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradient_of_parameters(variant):
    dims = Dims(embed_dim=8, num_heads=1, depth=1, head_dim=4)
    module = rope(dims=dims, variant=variant, block=2).double()
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
        assert module(Grid(3, 5)).matrices.device == cuda


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
    ("shapes", "match"),
    [
        ({}, r"state has no entry freqs, only nothing"),
        ({"multiplier": (1, 2, 2, 1, 1)}, r"state has no entry freqs, only multiplier"),
        ({"freqs": (3, 2, 4, 4)}, r"freqs has shape \(3, 2, 4, 4\); \(heads, 1, blocks, block"),
        ({"freqs": (3, 1, 2, 4, 5)}, r"freqs has shape \(3, 1, 2, 4, 5\)"),
        (
            {"freqs": (3, 1, 2, 4, 4), "multiplier": (1, 2, 3, 1, 1)},
            r"multiplier has shape \(1, 2, 3, 1, 1\); \(1, axes, 2, 1, 1\)",
        ),
        ({"freqs": (3, 1, 2, 4, 4), "multiplier": (2,)}, r"multiplier has shape \(2,\)"),
    ],
)
def test_error_from_comrope(shapes, match):
    with pytest.raises(PositionError, match=match):
        Comrope.from_comrope({name: torch.zeros(shape) for name, shape in shapes.items()})
