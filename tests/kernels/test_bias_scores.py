"""score_mod and attend: attention of a float64 loop, whichever path forms it."""

import inspect

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

import visionpos as vp
from tests.encodings.test_biasing import DIMS, SPECS, VIEWS, WINDOW, biasing, expected
from tests.reference import bias as oracle
from tests.strategies import grids, seeds
from tests.tolerances import assert_close_to
from visionpos import Dims, Grid, PositionError
from visionpos.attention import attend, score_mod
from visionpos.encodings import AlibiSpec, AxialRopeSpec, FireSpec, KerpleSpec, LookHereSpec
from visionpos.kernels import bias as kernel

RECTANGLES = [(3, 5), (1, 7), (7, 1), (1, 1), (5, 7), WINDOW]
FEW = settings(max_examples=8)
HIDDEN = float(torch.finfo(torch.bfloat16).min)

# torch says so at every eager call of FlexAttention; the tests want its numbers, not its speed.
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def inputs(
    m: int, b: int = 2, heads: int = 4, kv: int = 4, d: int = 8, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.randn(b, n, m, d).to(dtype) for n in (heads, kv, kv))


def attention(
    q: Tensor, k: Tensor, v: Tensor, bias: np.ndarray, scale: float | None = None
) -> Tensor:
    """Return attention in float64, one query after the other, as the formula reads."""
    q, k, v = (x.detach().double().cpu().numpy() for x in (q, k, v))
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    for b, head, i in np.ndindex(*q.shape[:3]):
        group = head // (q.shape[1] // k.shape[1])
        logits = k[b, group] @ q[b, head, i] * (scale or q.shape[-1] ** -0.5) + bias[head, i]
        weights = np.exp(logits - logits.max())
        out[b, head, i] = weights / weights.sum() @ v[b, group]
    return torch.from_numpy(out)


def framed(name: str, module: vp.encodings.Biasing, hw: tuple[int, int], prefix: int) -> np.ndarray:
    own = module.prefix_values()
    own = np.zeros((4, 3)) if own is None else own.detach().numpy()
    return oracle.framed(expected(name, module, hw), own, prefix)


def assert_attention(name: str, out: Tensor, target: Tensor) -> None:
    """Fail unless equal; a bias that is made in float32 or bfloat16 by its definition shows that rounding."""
    slack = {"alibi": 1e-5, "looks": 1e-2}.get(name[:5])
    if slack is None:
        assert_close_to(out, target)
    else:
        torch.testing.assert_close(out, target, rtol=slack, atol=slack)


@pytest.mark.parametrize("hw", RECTANGLES)
@pytest.mark.parametrize("name", SPECS)
def test_reference_score(name, hw):
    """Eager FlexAttention with the score function of every scheme, with 0, 1 and 5 prefix tokens."""
    module = biasing(name)
    for prefix in (0, 1, 5):
        q, k, v = inputs(prefix + hw[0] * hw[1])
        with torch.no_grad():
            out = flex_attention(
                q, k, v, score_mod=score_mod(module, Grid(*hw), prefix=prefix), enable_gqa=False
            )
        assert_attention(
            name.replace("lookhere", "looks"),
            out,
            attention(q, k, v, framed(name, module, hw, prefix)),
        )


@FEW
@given(grids(max_side=6), seeds())
@pytest.mark.parametrize("name", SPECS)
def test_reference_attend(name, hw, seed):
    module, prefix = biasing(name, seed), seed % 3
    q, k, v = inputs(prefix + hw[0] * hw[1])
    target = attention(q, k, v, framed(name, module, hw, prefix), scale=0.3)
    out = attend(q, k, v, module, Grid(*hw), prefix=prefix, scale=0.3)
    assert_attention(name.replace("lookhere", "looks"), out, target)


@pytest.mark.parametrize("name", [n for n in SPECS if not n.startswith(("alibi", "lookhere"))])
def test_gradient_reaches_every_weight(name, monkeypatch):
    """Gradients of q, k, v and of every parameter: those of plain float64 arithmetic with a bias by an index."""
    for least in (0, 10**9):
        monkeypatch.setattr(kernel, "_LEARNS", least)
        module, grid = biasing(name), Grid(3, 5)
        leaves = [x.requires_grad_() for x in inputs(grid.size + 1)]
        wanted = [*leaves, *module.parameters()]
        weight = torch.randn(2, 4, 16, 8, dtype=torch.float64)
        q, k, v = leaves
        own = module.prefix_values()
        own = torch.zeros(4, 3, dtype=torch.float64) if own is None else own
        rows = kernel._indexed(module.distinct(grid), own, grid, 1)
        plain = (q @ k.mT * 8**-0.5 + rows).softmax(-1) @ v
        target = torch.autograd.grad((plain * weight).sum(), wanted, allow_unused=True)
        out = attend(q, k, v, module, grid, prefix=1)
        found = torch.autograd.grad((out * weight).sum(), wanted, allow_unused=True)
        for ours, theirs in zip(found, target, strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("spec", [AlibiSpec(metric="l1"), KerpleSpec(), FireSpec(threshold=3.0)])
def test_reference_clip(spec):
    """Frames are one more axis of the linear index."""
    module, grid = vp.build(spec, DIMS).double(), Grid(3, 2, frames=4)
    q, k, v = inputs(grid.size + 2)
    dense = module(grid).detach().double()
    table = module.distinct(grid).detach().double().unflatten(1, (7, 5, 3)).numpy()
    loops = oracle.pairs((4, 3, 2), lambda d: table[:, d[0] + 3, d[1] + 2, d[2] + 1])
    torch.testing.assert_close(dense, torch.from_numpy(loops), rtol=0, atol=0)
    target = attention(q, k, v, oracle.framed(loops, np.zeros((4, 3)), 2))
    with torch.no_grad():
        out = flex_attention(q, k, v, score_mod=score_mod(module, grid, prefix=2))
    for found in (out, attend(q, k, v, module, grid, prefix=2)):
        torch.testing.assert_close(found, target, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("layer", [0, 1, 2, -1])
def test_reference_layer(layer):
    """LookHere's slopes run from 1.5 to 0.5 of the global slope over three layers; the rest knows one bias."""
    spec = LookHereSpec(views=VIEWS, rounding="none")
    module, (q, k, v) = vp.build(spec, DIMS), inputs(15)
    slope = 2.0 * (1.5, 1.0, 0.5)[layer]
    bias = oracle.pairs((3, 5), oracle.lookhere(list(VIEWS), slope, HIDDEN))
    target = attention(q, k, v, bias)
    out = flex_attention(q, k, v, score_mod=score_mod(module, Grid(3, 5), layer=layer))
    for found in (out, attend(q, k, v, module, Grid(3, 5), layer=layer)):
        torch.testing.assert_close(found, target, rtol=1e-5, atol=1e-5)
    table = biasing("t5")
    assert torch.equal(table.of_layer(Grid(3, 5), layer), table.distinct(Grid(3, 5)))


@pytest.mark.parametrize("kv", [1, 2])
def test_reference_grouped_queries(kv):
    """A key head serves neighbouring query heads, each with its own bias; values may have another width."""
    module, (q, k, _) = biasing("beit"), inputs(17, kv=kv)
    v = torch.randn(2, kv, 17, 6, dtype=torch.float64)
    target = attention(q, k, v, framed("beit", module, (3, 5), 2))
    assert_close_to(attend(q, k, v, module, Grid(3, 5), prefix=2), target)
    with torch.no_grad():
        score = score_mod(module, Grid(3, 5), prefix=2)
        assert_close_to(flex_attention(q, k, v, score_mod=score, enable_gqa=True), target)


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_reference_dtypes(dtype, learns):
    """Half precision is as exact as its output: the bias stays float32 beside it, with a gradient or without."""
    module = biasing("swin").float().requires_grad_(learns)
    q, k, v = inputs(36, dtype=dtype)
    out = attend(q, k, v, module, Grid(5, 7), prefix=1)
    assert out.dtype == dtype
    bias = framed("swin", biasing("swin"), (5, 7), 1)
    target = attention(q, k, v, bias)
    if dtype == torch.float32:
        assert_close_to(out, target)
    else:  # one rounding of the probabilities, one of the output
        error = (out.double() - target).norm() / target.norm()
        assert error < 2 * torch.finfo(dtype).eps
    if learns:
        out.float().sum().backward()
        assert module.table.grad.dtype == torch.float32


@pytest.mark.parametrize("name", ["alibi_l2", "swin"])
def test_invariant_strides(name):
    """Views of a packed projection, and channels that are not last."""
    module, grid = biasing(name), Grid(3, 5)
    q, k, v = torch.randn(2, 15, 3, 4, 8, dtype=torch.float64).permute(2, 0, 3, 1, 4).unbind(0)
    turned = torch.randn(2, 4, 8, 15, dtype=torch.float64).mT
    plain = attend(q.contiguous(), k.contiguous(), turned.contiguous(), module, grid)
    torch.testing.assert_close(attend(q, k, turned, module, grid), plain, rtol=1e-12, atol=1e-12)
    assert v.shape == turned.shape


@pytest.mark.parametrize("how", ["auto", "dense", "flex"])
def test_shape_of_no_image(how):
    """An empty batch is an empty answer, with gradients where they can be had."""
    module = biasing("swin")
    with torch.set_grad_enabled(how != "flex"):
        q, k, v = (x.requires_grad_(how != "flex") for x in inputs(16, b=0))
        out = attend(q, k, v, module, Grid(3, 5), prefix=1, how=how)
    assert out.shape == (0, 4, 16, 8)
    if how != "flex":
        out.sum().backward()
        grad = module.table.grad  # torch leaves the bias of an empty batch out
        assert grad is None or not grad.any()


@pytest.mark.parametrize("name", SPECS)
def test_invariant_one_token(name):
    """One token sees itself: its value, whatever the bias."""
    q, k, v = inputs(1)
    torch.testing.assert_close(attend(q, k, v, biasing(name), Grid(1, 1)), v, rtol=1e-12, atol=0)


@pytest.mark.parametrize("prefix", [0, 5])
def test_memory_of_a_score_function(prefix):
    """What a score function holds grows with the tokens, not with their square."""
    module, grid = biasing("t5"), Grid(40, 60)
    held = inspect.getclosurevars(score_mod(module, grid, prefix=prefix)).nonlocals
    numbers = sum(x.numel() for x in held.values() if isinstance(x, Tensor))
    assert numbers == 4 * (79 * 119 + 3 * bool(prefix)) + 2 * (2400 + prefix)


def test_memory_is_written_in_full(monkeypatch):
    """Fresh memory is filled with NaN by torch: none reaches the attention."""
    monkeypatch.setattr(kernel, "_STANDS", 0)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    module, (q, k, v) = biasing("swin"), inputs(16)
    torch.use_deterministic_algorithms(True)
    try:
        with torch.no_grad():
            out = attend(q, k, v, module, Grid(3, 5), prefix=1)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_close_to(out, attention(q, k, v, framed("swin", module, (3, 5), 1)))


def test_error_what_does_not_fit():
    module, (q, k, v) = biasing("swin"), inputs(15)
    grid, rope = Grid(3, 5), vp.build(AxialRopeSpec(), DIMS)
    with pytest.raises(PositionError, match=r"encoding is AxialRope; a bias"):
        attend(q, k, v, rope, grid)
    with pytest.raises(PositionError, match=r"encoding is AxialRope; a bias"):
        score_mod(rope, grid)
    with pytest.raises(PositionError, match=r"grid is \(3, 5\); a Grid of tokens"):
        score_mod(module, (3, 5))
    with pytest.raises(PositionError, match=r"prefix is -1"):
        score_mod(module, grid, prefix=-1)
    with pytest.raises(PositionError, match=r"layer is 3; the encoding has 3 layers"):
        score_mod(module, grid, layer=3)
    with pytest.raises(PositionError, match=r"layer is 3; the encoding has 3 layers"):
        attend(q, k, v, biasing("lookhere"), grid, layer=3)
    with pytest.raises(PositionError, match=r"device is meta and the parameters are on cpu"):
        score_mod(module, grid, device=torch.device("meta"))
    with pytest.raises(PositionError, match=r"how is 'fast'; it must be 'auto', 'flex' or 'dense'"):
        attend(q, k, v, module, grid, how="fast")
    with pytest.raises(PositionError, match=r"q has shape \(2, 4, 15, 8\); \[b, heads, 16, head_d"):
        attend(q, k, v, module, grid, prefix=1)
    with pytest.raises(PositionError, match=r"v has shape \(2, 4, 14, 8\)"):
        attend(q, k, v[:, :, 1:], module, grid)
    with pytest.raises(PositionError, match=r"q has 3 heads and the bias 4"):
        attend(q[:, :3], k, v, module, grid)
    with pytest.raises(PositionError, match=r"kv heads that divide the heads of q"):
        attend(q, k[:, :3], v[:, :3], module, grid)
    with pytest.raises(PositionError, match=r"one batch, one head_dim"):
        attend(q, k[..., :4], v, module, grid)
    with pytest.raises(PositionError, match=r"one batch, one head_dim"):
        attend(q, k, v[:1], module, grid)
    with pytest.raises(PositionError, match=r"k is torch\.float32 on cpu and q torch\.float64"):
        attend(q, k.float(), v, module, grid)
    with pytest.raises(PositionError, match=r"q is torch\.int64; a tensor of floats"):
        attend(q.long(), k, v, module, grid)
    with pytest.raises(PositionError, match=r"frames"):
        attend(*inputs(30), module, Grid(3, 5, frames=2))
    with pytest.raises(PositionError, match=r"device is meta and the parameters are on cpu"):
        attend(*(x.to("meta") for x in (q, k, v)), module, grid)


def test_error_flex_on_the_cpu_has_no_gradients():
    """torch raises NotImplementedError from its depths; what is asked for is named instead."""
    module, (q, k, v) = biasing("swin"), inputs(15)
    with pytest.raises(PositionError, match=r"how is 'flex' on cpu with gradients; .*how='dense'"):
        attend(q, k, v, module, Grid(3, 5), how="flex")
    with pytest.raises(PositionError, match=r"how is 'flex' on cpu with gradients"):
        attend(q.requires_grad_(), k, v, biasing("alibi_l2"), Grid(3, 5), how="flex")


@pytest.mark.slow
@pytest.mark.parametrize("prefix", [0, 1, 5])
def test_compile_flex(prefix):
    """On the CPU over a rectangle, a row, a column and one token; another model of that shape: no new graph."""
    torch._dynamo.reset()
    graphs = torch._dynamo.utils.counters["stats"]
    for hw in ((5, 7), (1, 7), (6, 1), (1, 1)):
        for seed in (0, 1):
            module = biasing("swin", seed).float()
            q, k, v = inputs(prefix + hw[0] * hw[1], d=16, dtype=torch.float32)
            before = graphs["unique_graphs"]
            with torch.no_grad():
                out = attend(q, k, v, module, Grid(*hw), prefix=prefix, how="flex")
            assert graphs["unique_graphs"] - before == int(seed == 0)
            module = biasing("swin", seed)
            assert_close_to(out, attention(q, k, v, framed("swin", module, hw, prefix)))


@pytest.mark.slow
def test_compile_more_sizes_than_torch_keeps():
    """Ten sizes, grouped queries, bfloat16: no silent fall back to eager scores."""
    module = vp.build(AlibiSpec(), DIMS)
    for width in range(2, 12):
        q, k, v = inputs(3 * width, kv=2, d=16, dtype=torch.bfloat16)
        with torch.no_grad():
            out = attend(q, k, v, module, Grid(3, width), how="flex")
        target = attention(q, k, v, expected("alibi_l2", module, (3, width)))
        assert (out.double() - target).norm() < 2 * 2**-8 * target.norm()


@pytest.mark.slow
def test_compile_attend_inside_a_graph(monkeypatch):
    """The dense path becomes part of a user's graph; FlexAttention cannot on the CPU, and says so."""
    module = vp.build(SPECS["swin"], Dims(embed_dim=64, num_heads=4, depth=1)).requires_grad_(False)
    q, k, v = inputs(36, d=16, dtype=torch.float32)
    call = torch.compile(lambda *x: attend(*x, module, Grid(5, 7), prefix=1), fullgraph=True)
    bias = module(Grid(5, 7), prefix=1).double().numpy()
    assert_close_to(call(q, k, v), attention(q, k, v, bias))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(PositionError, match=r"how is 'flex' in a graph for the CPU; .*how='dense'"):
        attend(q, k, v, module, Grid(5, 7), prefix=1, how="flex")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_device_flex_and_dense_agree(dtype):
    """On CUDA: FlexAttention where the bias stands still, SDPA where it learns, both as the float64 loop."""
    module = biasing("swin").float().cuda()
    q, k, v = (x.cuda() for x in inputs(36, d=32, dtype=dtype))
    bias = framed("swin", biasing("swin"), (5, 7), 1)
    target = attention(q, k, v, bias)
    for how, grad in (("auto", True), ("auto", False), ("dense", True)):
        with torch.set_grad_enabled(grad):
            out = attend(q, k, v, module, Grid(5, 7), prefix=1, how=how)
        error = (out.double().cpu() - target).norm() / target.norm()
        assert error < (1e-3 if dtype == torch.float32 else 2e-2)  # TF32 may be on
