"""ConViT's gated positional attention: a distribution of position alone, mixed in after the softmax."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.compiled import SIZES, graphs_of
from tests.reference import gated as oracle
from tests.strategies import grids, seeds
from tests.tolerances import assert_close_to
from visionpos import Dims, Grid, PositionError
from visionpos.config import load_encoding
from visionpos.encodings import Gpsa, GpsaSpec, build

DIMS = Dims(embed_dim=8, num_heads=4, depth=1)


def gpsa(dims: Dims = DIMS, seed: int = 0) -> Gpsa:
    """Random weights of moderate size, float64."""
    module = Gpsa(GpsaSpec(), dims).double()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in module.parameters():
            weight.normal_(generator=draw).mul_(0.5)
    return module


def content(hw, dims: Dims = DIMS, batch: int = 2) -> torch.Tensor:
    m = dims.prefix + hw[0] * hw[1] + dims.suffix
    return torch.randn(batch, dims.num_heads, m, m, dtype=torch.float64).softmax(-1)


def arrays(module: Gpsa) -> list[np.ndarray]:
    return [p.detach().numpy() for p in (module.weight, module.bias, module.gating)]


@pytest.mark.parametrize("hw", [(3, 5), (1, 7), (7, 1), (13, 11), (1, 1)])
@pytest.mark.parametrize("prefix", [0, 1])
def test_shape_of_attention(hw, prefix):
    dims = Dims(embed_dim=8, num_heads=4, depth=1, prefix=prefix)
    n = hw[0] * hw[1]
    assert gpsa(dims).positions(Grid(*hw)).shape == (4, n, n)
    assert gpsa(dims)(content(hw, dims), Grid(*hw)).shape == (2, 4, n + prefix, n + prefix)


def test_shape_of_values():
    """One logit a head at any differences, of any rank."""
    for shape in ((2,), (7, 2), (3, 5, 2)):
        assert gpsa().values(torch.zeros(shape)).shape == (4, *shape[:-1])


@given(grids(max_side=5), seeds())
def test_reference_positions(hw, seed):
    module = gpsa(seed=seed)
    weight, bias, _ = arrays(module)
    out = module.positions(Grid(*hw)).detach()
    assert_close_to(out, torch.from_numpy(oracle.positions(hw, weight, bias)), kind="applied")


@given(grids(max_side=4), seeds(), st.integers(0, 2))
def test_reference_mixed(hw, seed, prefix):
    dims = Dims(embed_dim=8, num_heads=4, depth=1, prefix=prefix)
    module, attention = gpsa(dims, seed), content(hw, dims)
    rows = [oracle.gpsa(one.numpy(), hw, *arrays(module), prefix=prefix) for one in attention]
    out = module(attention, Grid(*hw)).detach()
    assert_close_to(out, torch.from_numpy(np.stack(rows)), kind="applied")


@pytest.mark.parametrize("heads", [4, 9, 16])
def test_reference_start_values(heads):
    """Head i of a k x k set looks at the i-th neighbour: 4, 9 and 16 heads of the published models."""
    module = Gpsa(GpsaSpec(locality=2.0), Dims(embed_dim=16 * heads, num_heads=heads, depth=1))
    expected = torch.from_numpy(oracle.local_start(heads, 2.0)).float()
    assert torch.equal(module.weight.detach(), expected)
    torch.testing.assert_close(module.shares(), torch.full((heads,), 0.731059))


def test_reference_start_looks_at_neighbours():
    """Nine heads: on the middle cell of a 3x3 window of a 5x7 map each head's peak is its own neighbour."""
    module = build(load_encoding("convit"), Dims(embed_dim=18, num_heads=9, depth=1))
    peaks = module.positions(Grid(5, 7))[:, 2 * 7 + 3].argmax(-1)
    cells = sorted((p // 7 - 2, p % 7 - 3) for p in peaks.tolist())
    assert cells == [(dy, dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)]
    away = [(p // 7 - 2, p % 7 - 3) for p in peaks.tolist()]
    assert away[1] == (0, -1)  # head h1 + 3 h2: h1 moves along y, h2 along x


def test_reference_heads_beyond_a_square_start_small():
    module = Gpsa(GpsaSpec(), Dims(embed_dim=12, num_heads=6, depth=1))
    assert (module.weight[:4, 2] == -1).all()
    assert 0 < module.weight[4:].abs().max() < 0.1


@given(grids(max_side=6), seeds())
def test_invariant_rows_sum_to_one(hw, seed):
    """Position attention and its mix with content are distributions."""
    module = gpsa(seed=seed)
    ones = torch.ones((), dtype=torch.float64)
    for rows in (module.positions(Grid(*hw)), module(content(hw), Grid(*hw))):
        torch.testing.assert_close(rows.sum(-1), ones.expand(rows.shape[:-1]))
        assert (rows >= 0).all()


def test_invariant_logits_see_differences_only():
    """values is the law: two pairs of one difference have one logit, and the sign of a difference counts."""
    module = gpsa()
    far = module.values(torch.tensor([[1.0, 2.0], [-1.0, -2.0]]))
    assert (far[:, 0] - far[:, 1]).abs().min() > 1e-3
    weight = module.weight
    key_minus_query = torch.tensor(
        [-2.0, -1.0, 5.0]
    ).double()  # dx, dy, d^2 of query - key = (1, 2)
    torch.testing.assert_close(far[:, 0], weight @ key_minus_query + module.bias)


@given(grids(max_side=6), seeds())
def test_invariant_transpose(hw, seed):
    """The transposed grid with dx and dy exchanged."""
    module = gpsa(seed=seed)
    turned = copy.deepcopy(module)
    with torch.no_grad():
        turned.weight.copy_(module.weight[:, [1, 0, 2]])
    order = torch.arange(hw[0] * hw[1]).reshape(hw).T.flatten()
    out = module.positions(Grid(*hw))[:, order][:, :, order]
    torch.testing.assert_close(turned.positions(Grid(hw[1], hw[0])), out, rtol=1e-10, atol=1e-10)


def test_invariant_gates_shut_and_open():
    """gating -> -inf leaves the content, +inf the position; a bias cancels in the softmax."""
    module, attention = gpsa(), content((3, 5))
    with torch.no_grad():
        module.bias.add_(7.0)
        before = module.positions(Grid(3, 5))
        module.gating.fill_(-60.0)
        torch.testing.assert_close(module(attention, Grid(3, 5)), attention)
        module.gating.fill_(60.0)
        torch.testing.assert_close(module(attention, Grid(3, 5))[0], before)
        module.bias.sub_(7.0)
    torch.testing.assert_close(module.positions(Grid(3, 5)), before)


def test_invariant_exempt_tokens_keep_content():
    dims = Dims(embed_dim=8, num_heads=4, depth=1, prefix=2, suffix=1)
    module, attention = gpsa(dims), content((3, 5), dims)
    out = module(attention, Grid(3, 5))
    assert torch.equal(out[:, :, [0, 1, -1]], attention[:, :, [0, 1, -1]])
    share = module.shares()[:, None]
    for column in (0, 1, -1):
        kept = (1 - share) * attention[:, :, 2:-1, column]
        torch.testing.assert_close(out[:, :, 2:-1, column], kept)


def test_invariant_no_square_guess():
    module = gpsa()
    outs = [module.positions(Grid(*hw)) for hw in ((4, 9), (6, 6), (9, 4), (4, 9))]
    assert torch.equal(outs[0], outs[3])
    assert min((outs[0] - outs[1]).abs().max(), (outs[0] - outs[2]).abs().max()) > 0.01


def test_invariant_half_precision_attention():
    """bf16 attention comes back in bf16; logits are formed in float32 (d^2 = 257 is no bf16 number)."""
    module = Gpsa(GpsaSpec(locality=0.01), DIMS).bfloat16()
    assert module(content((3, 5)).bfloat16(), Grid(3, 5)).dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = module.values(torch.tensor([[1.0, 16.0], [0.0, 16.0]]))
    assert logits.dtype == torch.float32
    wide = copy.deepcopy(module).float().values(torch.tensor([[1.0, 16.0], [0.0, 16.0]]))
    assert torch.equal(logits, wide)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"locality": 0.0}, r"locality is 0\.0; a number above 0"),
        ({"locality": float("nan")}, r"locality is nan"),
        ({"gate": float("inf")}, r"gate is inf; it must be a finite number"),
        ({"gate": float("nan")}, r"gate is nan; it must be a finite number"),
    ],
)
def test_error_spec(fields, match):
    with pytest.raises(PositionError, match=match):
        GpsaSpec(**fields)


def test_error_grid():
    module = gpsa()
    with pytest.raises(PositionError, match=r"grid \(2, 3, 5\) has 2 frames; one"):
        module.positions(Grid(3, 5, frames=2))
    with pytest.raises(
        PositionError, match=r"attention has shape \(2, 4, 15, 15\); \[b, 4, 18, 18\]"
    ):
        module(content((3, 5)), Grid(3, 6))
    with pytest.raises(PositionError, match=r"\[b, 4, 15, 15\]"):
        module(content((3, 5))[0], Grid(3, 5))


def test_error_source():
    state = {"pos_proj.weight": torch.zeros(4, 3), "pos_proj.bias": torch.zeros(4)}
    with pytest.raises(PositionError, match=r"lacks \['gating'\]"):
        Gpsa.from_timm(state, GpsaSpec(), DIMS)
    with pytest.raises(PositionError, match=r"gating of timm has shape \(9,\); \(4,\)"):
        Gpsa.from_timm({**state, "gating_param": torch.zeros(9)}, GpsaSpec(), DIMS)
    with pytest.raises(PositionError, match=r"has \['qk.weight'\] too many"):
        Gpsa.from_timm(
            {**state, "gating_param": torch.zeros(4), "qk.weight": torch.zeros(1)}, GpsaSpec(), DIMS
        )


def test_gradient():
    """Weights, gates and content learn; the bias, which cancels, gets no gradient."""
    dims = Dims(embed_dim=4, num_heads=2, depth=1, prefix=1)
    module, attention = gpsa(dims), content((2, 3), dims, 1).requires_grad_()

    def run(attention, weight, gating):
        new = {"weight": weight, "gating": gating}
        return torch.func.functional_call(module, new, (attention, Grid(2, 3)))

    assert torch.autograd.gradcheck(run, (attention, module.weight, module.gating))
    (module(attention, Grid(2, 3)) * torch.randn(7, 7).double()).sum().backward()
    assert module.bias.grad.abs().max() < 1e-12
    assert module.weight.grad.abs().min() > 1e-6


def test_compile_one_graph_over_six_sizes():
    module = gpsa(Dims(embed_dim=24, num_heads=3, depth=1, prefix=1)).float()
    calls = [(torch.rand(2, 3, 1 + h * w, 1 + h * w), h, w) for h, w in SIZES]
    assert graphs_of(lambda a, h, w: module(a, Grid(h, w)), calls) == 1


def test_device(device):
    module, attention = gpsa().float(), content((3, 5)).float()
    here = module(attention, Grid(3, 5))
    there = copy.deepcopy(module).to(device)(attention.to(device), Grid(3, 5))
    assert there.device.type == device.type
    torch.testing.assert_close(there.cpu(), here)


def test_device_fake_cuda():
    module, cuda = Gpsa(GpsaSpec(), DIMS), torch.device("cuda", 0)
    with FakeTensorMode():
        for key, weight in list(module.named_parameters()):
            setattr(module, key, nn.Parameter(torch.empty(weight.shape, device=cuda)))
        assert module(torch.empty(2, 4, 15, 15, device=cuda), Grid(3, 5)).device == cuda
