"""PaPE: channels of q and k whose product is the parabolas of the difference, in two forms."""

import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import visionpos as vp
from tests.compiled import SIZES, graphs_of
from tests.reference import bias as oracle
from tests.strategies import grids, seeds
from tests.tolerances import assert_close_to
from visionpos import Dims, Grid, PositionError
from visionpos.config import load_encoding
from visionpos.encodings import Extending, Pape, PapeSpec, build

DIMS = Dims(embed_dim=12, num_heads=3, depth=1, prefix=1)  # heads of 4 channels
FULL = PapeSpec(parabolas=5)
ROUND = PapeSpec(variant="rotation_invariant")


def pape(spec: PapeSpec = FULL, seed: int = 0, **fields) -> Pape:
    spec = PapeSpec(
        **{**{k: getattr(spec, k) for k in ("parabolas", "variant", "channels", "axes")}, **fields}
    )
    module = Pape(spec, DIMS).double().eval()
    draws = torch.Generator().manual_seed(seed)
    for weight in module.parameters():
        weight.data.normal_(generator=draws)
    return module


def inputs(n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, 2, 3, n, 4, dtype=torch.float64, generator=draws)
    return q, k, torch.randn(2, n, 12, dtype=torch.float64, generator=draws)


def places(hw: tuple[int, int], prefix: int) -> torch.Tensor:
    """Cells from 1 on, prefix tokens at 0: facts 4."""
    cells = torch.tensor(oracle.cells(*hw), dtype=torch.float64) + 1
    return torch.cat([torch.zeros(prefix, 2, dtype=torch.float64), cells])


@pytest.mark.parametrize(
    ("fields", "more"),
    [
        ({"parabolas": 5}, 17),
        ({"parabolas": 50}, 152),
        ({"parabolas": 50, "channels": "folded"}, 7),
        ({"variant": "rotation_invariant"}, 5),
        ({"variant": "rotation_invariant", "channels": "folded"}, 7),
        ({"axes": 3, "channels": "folded"}, 13),
    ],
)
def test_shape_of_channels(fields, more):
    """Facts 4: 3 M + 2 channels, the head padded to a multiple of 8 with zeros."""
    module, grid = pape(**fields), Grid(3, 5, frames=2 if fields.get("axes") == 3 else 1)
    assert isinstance(module, Extending)
    q, k, tokens = inputs(grid.size + 1)
    for out in module(q, k, tokens, grid, prefix=1):
        width = 4 + more + -(4 + more) % 8
        assert out.shape == (2, 3, grid.size + 1, width)
        assert (out[..., 4 + more :] == 0).all()
    longer, wider = module(q, k, tokens, grid, prefix=1)
    assert torch.equal(longer[..., :4], q)
    assert torch.equal(wider[..., :4], k)


@pytest.mark.parametrize(("name", "variant"), [("pape", "full"), ("pape_ri", "rotation_invariant")])
def test_shape_of_shipped(name, variant):
    spec = load_encoding(name)
    assert (spec.variant, spec.channels, spec.axes) == (variant, "parabolas", 2)
    module = build(spec, DIMS)
    assert module.height.shape == (3, 50 if variant == "full" else 1, 12)
    assert module.projection.requires_grad == (variant == "full")


@pytest.mark.parametrize("channels", ["parabolas", "folded"])
@pytest.mark.parametrize("spec", [FULL, ROUND])
@given(hw=grids(max_side=4), prefix=st.integers(0, 2), seed=seeds())
def test_reference_the_product_holds_the_parabolas(spec, channels, hw, prefix, seed):
    """Longer q . longer k = q . k - sum a (P d)^2 + sum b (P d), by loops; values() is the same function."""
    module, points = pape(spec, seed, channels=channels), places(hw, prefix)
    q, k, tokens = inputs(len(points), seed)
    a, b = module.coefficients(tokens)
    weight = module.projection.detach()
    if spec is ROUND:
        weight = weight.view(3, 1, 1) * torch.eye(2, dtype=torch.float64)
        a = a.expand(-1, -1, -1, 2)
    expected = oracle.parabolas(
        a.detach().numpy(),
        None if b is None else b.detach().numpy(),
        weight.numpy(),
        points.numpy(),
    )
    longer, wider = module(q, k, tokens, Grid(*hw), prefix=prefix)
    extra = (longer @ wider.mT - q @ k.mT).detach()
    torch.testing.assert_close(extra, torch.from_numpy(expected), rtol=1e-9, atol=1e-9)
    dense = module.values(tokens, points.unsqueeze(1) - points).detach()
    torch.testing.assert_close(dense, torch.from_numpy(expected), rtol=1e-9, atol=1e-9)


def test_reference_coefficients():
    """a = softplus(W_a token), above 0; b = W_b token; the rotation-invariant variant has no b."""
    module = pape()
    tokens = inputs(7)[2]
    a, b = module.coefficients(tokens)
    raw = torch.einsum("bnd,hmd->bhnm", tokens, module.height)
    torch.testing.assert_close(a, (1 + raw.exp()).log())
    torch.testing.assert_close(b, torch.einsum("bnd,hmd->bhnm", tokens, module.slope))
    assert (a > 0).all()
    assert pape(ROUND).coefficients(tokens)[1] is None


@pytest.mark.parametrize("channels", ["parabolas", "folded"])
def test_reference_plain_attention(channels):
    """A stock kernel given `scale` holds it; the longer head's own scale would change q . k and the bias."""
    module = pape(channels=channels)
    q, k, tokens = inputs(16)
    v = torch.randn_like(q)
    longer, wider = module(q, k, tokens, Grid(3, 5), prefix=1)
    points = places((3, 5), 1)
    logits = (q @ k.mT + module.values(tokens, points.unsqueeze(1) - points)) * 0.5
    expected = logits.softmax(-1) @ v
    out = nn.functional.scaled_dot_product_attention(longer, wider, v, scale=module.scale)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    wrong = nn.functional.scaled_dot_product_attention(longer, wider, v)
    assert (wrong - expected).abs().max() > 1e-2


@given(st.floats(-3.1, 3.1), seeds())
def test_invariant_rotation(angle, seed):
    """The rotation-invariant variant sees Euclid's distance alone; the full one sees directions."""
    c, s = (
        torch.tensor(angle, dtype=torch.float64).cos(),
        torch.tensor(angle, dtype=torch.float64).sin(),
    )
    turn = torch.stack([torch.stack([c, -s]), torch.stack([s, c])])
    tokens, offsets = inputs(4, seed)[2], torch.randn(4, 6, 2, dtype=torch.float64)
    still, turned = (pape(ROUND, seed).values(tokens, d) for d in (offsets, offsets @ turn.T))
    torch.testing.assert_close(still, turned, rtol=1e-9, atol=1e-9)
    if abs(angle) > 0.1:
        full = pape(FULL, seed)
        assert (
            full.values(tokens, offsets) - full.values(tokens, offsets @ turn.T)
        ).abs().max() > 1e-6


def test_invariant_differences_only():
    """Equal tokens everywhere: the extra logits between patches are a function of the difference."""
    module = pape(channels="folded")
    q, k, tokens = (x[..., :1, :].expand(*x.shape[:-2], 16, -1) for x in inputs(1))
    longer, wider = module(q, k, tokens, Grid(3, 5), prefix=1)
    logits = (longer @ wider.mT)[0, 0, 1:, 1:].unflatten(0, (3, 5)).unflatten(-1, (3, 5))
    torch.testing.assert_close(logits[1:, 1:, 1:, 1:], logits[:-1, :-1, :-1, :-1])


def test_invariant_inputs_and_copies():
    module, (q, k, tokens) = pape(), inputs(15)
    before = [x.clone() for x in (q, k, tokens)]
    out = module(q, k, tokens, Grid(3, 5))
    assert all(torch.equal(a, b) for a, b in zip(before, (q, k, tokens), strict=True))
    assert not list(module.buffers())
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(twin(q, k, tokens, Grid(3, 5))[0], out[0])
    other = module(q, k, tokens, Grid(5, 3))
    assert not torch.equal(other[0], out[0])
    assert torch.equal(module(q, k, tokens, Grid(3, 5))[0], out[0])


def test_invariant_start_values():
    """Linear layers' own start, from the passed generator; the fixed scale is within sqrt(1 / axes)."""
    one, two = (Pape(ROUND, DIMS, generator=torch.Generator().manual_seed(3)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert one.projection.abs().max() <= 0.5**0.5
    assert Pape(FULL, DIMS).height.abs().max() <= 12**-0.5


@pytest.mark.parametrize("channels", ["parabolas", "folded"])
def test_invariant_bfloat16_cost(channels):
    """The docstring's warning: in bfloat16 squares of far cells drown near differences; in float32 they do not."""
    dims = Dims(embed_dim=64, num_heads=2, depth=1)
    module = Pape(PapeSpec(channels=channels), dims, generator=torch.Generator().manual_seed(0))
    tokens = torch.randn(1, 4096, 64)
    zero = torch.zeros(1, 2, 4096, 32)
    offsets = vp.coordinates(Grid(64, 64))[:64].unsqueeze(1) - vp.coordinates(Grid(64, 64))
    exact, near = module.values(tokens[:, :64], offsets), offsets.abs().sum(-1) <= 2
    errors = {}
    for dtype in (torch.float32, torch.bfloat16):
        longer, wider = module(zero.to(dtype), zero.to(dtype), tokens, Grid(64, 64))
        out = longer[:, :, :64].float() @ wider.float().mT
        errors[dtype] = (out - exact)[:, :, near].abs().max().item()
    scale = exact[:, :, near].abs().max().item()
    assert errors[torch.float32] < 1e-3 * scale
    assert errors[torch.bfloat16] > 0.5 * scale


@pytest.mark.parametrize("spec", [FULL, ROUND])
def test_invariant_source_keys(spec):
    """`ab` holds a's rows, then b's; images count (x, y), videos (t, y, x)."""
    module = pape(spec)
    if spec is FULL:
        state = {
            "enc.ab.weight": torch.cat([module.height.flatten(0, 1), module.slope.flatten(0, 1)]),
            "enc.position.weight": module.projection.flatten(0, 1).flip(-1),
        }
    else:
        state = {
            "enc.a.weight": module.height.flatten(0, 1),
            "enc.position_scales": module.projection.view(1, 3, 1, 1),
        }
    ours = Pape.from_source({key: w.detach() for key, w in state.items()}, module.spec, DIMS)
    q, k, tokens = inputs(15)
    assert torch.equal(ours(q, k, tokens, Grid(3, 5))[0], module(q, k, tokens, Grid(3, 5))[0])
    assert ours.projection.requires_grad == (spec is FULL)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"parabolas": 0}, r"parabolas is 0; at least 1"),
        ({"variant": "ri"}, r"variant is 'ri'; it must be one of 'full', 'rotation_invariant'"),
        ({"channels": "3m"}, r"channels is '3m'; it must be one of 'parabolas', 'folded'"),
        ({"axes": 1}, r"axes is 1; it must be one of 2, 3"),
    ],
)
def test_error_spec(fields, match):
    with pytest.raises(PositionError, match=match):
        PapeSpec(**fields)


def test_error_tokens():
    q, k, tokens = inputs(15)
    with pytest.raises(
        PositionError, match=r"have \(15, 15, 15\) tokens; prefix 1 \+ grid \(1, 3, 5\) has 16"
    ):
        pape()(q, k, tokens, Grid(3, 5), prefix=1)
    with pytest.raises(PositionError, match=r"have \(15, 15, 14\) tokens"):
        pape()(q, k, tokens[:, 1:], Grid(3, 5))
    with pytest.raises(PositionError, match=r"grid \(2, 3, 5\) .* has frames .*Set axes to 3"):
        pape()(*inputs(30), Grid(3, 5, frames=2))


def test_error_source():
    state = {"ab.weight": torch.zeros(30, 12), "position.weight": torch.zeros(15, 3)}
    with pytest.raises(
        PositionError, match=r"shape \(30, 12\) and \(15, 3\); 3 heads, 5 parabolas, 2 axes"
    ):
        Pape.from_source(state, FULL, DIMS)
    with pytest.raises(PositionError, match=r"no entry a\.weight"):
        Pape.from_source(state, ROUND, DIMS)


@pytest.mark.parametrize("spec", [FULL, ROUND])
@pytest.mark.parametrize("channels", ["parabolas", "folded"])
def test_gradient_of_weights_and_inputs(spec, channels):
    """Everything learned is reached through the longer q (float64 gradcheck)."""
    module = pape(spec, parabolas=2, channels=channels)
    names = [key for key, w in module.named_parameters() if w.requires_grad]
    q, k, tokens = (x[:1].clone().requires_grad_() for x in inputs(3))

    def run(q, k, tokens, *weights):
        given_ = dict(zip(names, weights, strict=True))
        longer, wider = torch.func.functional_call(
            module, given_, (q, k, tokens, Grid(1, 2)), {"prefix": 1}
        )
        return longer @ wider.mT

    assert torch.autograd.gradcheck(run, (q, k, tokens, *(module.get_parameter(n) for n in names)))


@pytest.mark.parametrize("channels", ["parabolas", "folded"])
def test_compile_one_graph_over_six_sizes(channels):
    module = pape(channels=channels).float()

    def run(q, k, tokens, h, w):
        return module(q, k, tokens, Grid(h, w), prefix=1)[0]

    calls = [(*(x.float() for x in inputs(h * w + 1)), h, w) for h, w in SIZES]
    assert graphs_of(run, calls) == 1


def test_device(device):
    module, (q, k, tokens) = pape().float(), (x.float() for x in inputs(16))
    here = module(q, k, tokens, Grid(3, 5), prefix=1)
    moved = (x.to(device) for x in (q, k, tokens))
    there = module.to(device)(*moved, Grid(3, 5), prefix=1)
    for one, two in zip(here, there, strict=True):
        assert two.device.type == device.type
        torch.testing.assert_close(two.cpu(), one)


@pytest.mark.parametrize("channels", ["parabolas", "folded"])
@pytest.mark.parametrize("spec", [FULL, ROUND])
def test_device_fake_cuda(spec, channels):
    module, cuda = pape(spec, channels=channels).float(), torch.device("cuda", 0)
    with FakeTensorMode():
        for key, weight in list(module.named_parameters()):
            setattr(module, key, nn.Parameter(torch.empty(weight.shape, device=cuda)))
        q, k = (torch.empty(2, 3, 16, 4, device=cuda) for _ in range(2))
        for out in module(q, k, torch.empty(2, 16, 12, device=cuda), Grid(3, 5), prefix=1):
            assert out.device == cuda


def test_reference_tolerance_of_float32():
    """Both forms agree in float32 to the table of tolerances on a rectangle of 4 by 6."""
    q, k, tokens = (x.float() for x in inputs(25))
    outs = []
    for channels in ("parabolas", "folded"):
        longer, wider = pape(channels=channels).float()(q, k, tokens, Grid(4, 6), prefix=1)
        outs.append((longer @ wider.mT)[:, :, 1:, 1:])
    scale = outs[0].abs().max()
    assert_close_to(outs[1] / scale, outs[0].double() / scale)
