"""norm_rotate in blocks: values and gradients against float64 expressions that autograd differentiates."""

import pytest
import torch
from torch import Tensor

import visionpos as vp
from tests.kernels.oracle import normalised
from tests.tolerances import assert_close_to
from visionpos.geometry import Rotation
from visionpos.geometry import rotate as plain
from visionpos.kernels import norm as norms

NORMS = ["rms", "layer", "l2"]
PAIRINGS = ["half", "adjacent"]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of 96 elements: every tensor below is cut, on two dimensions or three."""
    monkeypatch.setattr(norms, "_BLOCK", 96)
    monkeypatch.setattr(norms, "_SMALL", 0)


def wanted(x: Tensor, turn: Tensor, parts: list[Tensor], norm: str, pairing: str) -> Tensor:
    """The textbook in float64; one prefix token, two suffix tokens, angles as a leaf."""
    weight, bias = [*parts, None, None][:2]
    one = normalised(x, norm, weight, bias)
    return plain(one, one, Rotation.of(turn, pairing), prefix=1, suffix=2)[0]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("lead", [(), (3, 1), (5,), (3, 5)], ids=str)
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
def test_gradient_of_everything(
    norm: str, pairing: str, lead: tuple[int, ...], layout: str
) -> None:
    """q, k, weight, bias and learned angles, shared, per sample, per head and both; partial rotary, grouped heads."""
    heads = (5, 1) if lead in ((), (3, 1)) else (5, 5)
    q, k = (torch.randn(3, one, 11, 20, requires_grad=True) for one in heads)
    turn = torch.randn(*lead, 8, 7, requires_grad=True)
    parts = [torch.randn(20, requires_grad=True) for _ in range(2 if norm == "layer" else 1)]
    grads = torch.randn(3, 5, 11, 20), torch.randn(3, heads[1], 11, 20)
    names = ("weight_q", "bias_q")
    given = (q, k) if layout == "bhnd" else (q.transpose(1, 2), k.transpose(1, 2))
    out = vp.norm_rotate(
        *given,
        Rotation.of(turn, pairing),
        norm=norm,
        prefix=1,
        suffix=2,
        layout=layout,
        **dict(zip(names, parts, strict=False)),
    )
    out = out if layout == "bhnd" else tuple(one.transpose(1, 2) for one in out)
    leaves = [q, k, turn, *parts]
    got = torch.autograd.grad(out, leaves, grads)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    x, y, angle, *rest = exact
    expected = (
        wanted(x, angle, rest, norm, pairing),
        wanted(y, angle, [], norm, pairing),
    )
    for one, other in zip(out, expected, strict=True):
        assert_close_to(one.detach(), other.detach())
    truth = torch.autograd.grad(expected, exact, [grad.double() for grad in grads])
    for one, other in zip(got, truth, strict=True):
        assert one.dtype == torch.float32
        assert_close_to(one, other)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_gradient_gradcheck_twice(norm: str, pairing: str) -> None:
    """Numeric derivatives, and those of the gradient: a graph of the backward pass is the plain form's."""
    q, k = (torch.randn(1, 2, 5, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight, bias, other = torch.randn(3, 6, dtype=torch.float64).unbind()
    leaves = [part.clone().requires_grad_() for part in (weight, bias, other)]
    turn = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)

    def run(q: Tensor, k: Tensor, a: Tensor, b: Tensor, c: Tensor, turn: Tensor) -> tuple:
        return vp.norm_rotate(
            q, k, Rotation.of(turn, pairing), norm=norm, weight_q=a, bias_q=b, weight_k=c, prefix=1
        )

    assert torch.autograd.gradcheck(run, (q, k, *leaves, turn))
    assert torch.autograd.gradgradcheck(run, (q, k, *leaves, turn))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("rounding", ["once", "twice", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
def test_reference_blocks(norm: str, rounding: str, dtype: torch.dtype, layout: str) -> None:
    """Without gradients, where blocks run forward for every norm, against float64."""
    x = torch.randn(2, 3, 11, 20).add(0.5).to(dtype)
    turn, (weight, bias) = torch.randn(8, 7), torch.randn(2, 20).to(dtype)
    parts = [weight, bias] if norm == "layer" else [weight]
    given = x if layout == "bhnd" else x.transpose(1, 2)
    out, _ = vp.norm_rotate(
        given, given, Rotation.of(turn), norm=norm, rounding=rounding, prefix=1, suffix=2, layout=layout,
        **dict(zip(("weight_q", "bias_q"), parts, strict=False)),
    )  # fmt: skip
    assert out.dtype == dtype
    out = out if layout == "bhnd" else out.transpose(1, 2)
    assert_close_to(out, wanted(x, turn.double(), parts, norm, "half"))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("rounding", ["once", "twice", "none"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradient_in_half_precision(norm: str, rounding: str, dtype: torch.dtype) -> None:
    """Gradients of float64 arithmetic on the same half-precision inputs, rounded about once; dtypes are kept."""
    x = torch.randn(2, 3, 7, 16).to(dtype).requires_grad_()
    weight = torch.randn(16).to(dtype).requires_grad_()
    turn, grad = torch.randn(4, 8), torch.randn(2, 3, 7, 16).to(dtype)
    out, _ = vp.norm_rotate(
        x, x.detach(), Rotation.of(turn), norm=norm, weight_q=weight, rounding=rounding, prefix=1, suffix=2
    )  # fmt: skip
    got = torch.autograd.grad(out, (x, weight), grad)
    exact = [part.detach().double().requires_grad_() for part in (x, weight)]
    expected = wanted(exact[0], turn.double(), exact[1:], norm, "half")
    truth = torch.autograd.grad(expected, exact, grad.double())
    for one, other in zip(got, truth, strict=True):
        assert one.dtype == dtype
        assert_close_to(one, other)


def test_gradient_of_vectors_shorter_than_eps() -> None:
    """There l2 divides by a constant, as torch.nn.functional.normalize does; a zero vector has a gradient too."""
    x = torch.tensor([[[[0.0, 0, 0, 0], [3e-4, 0, 0, -4e-4], [3.0, 0, 0, 4]]]], requires_grad=True)
    grad = torch.randn(1, 1, 3, 4)
    still = Rotation.of(torch.zeros(3, 2))
    out, _ = vp.norm_rotate(x, x.detach(), still, norm="l2", eps=1e-2)
    (got,) = torch.autograd.grad(out, x, grad)
    y = x.detach().requires_grad_()
    (expected,) = torch.autograd.grad(torch.nn.functional.normalize(y, dim=-1, eps=1e-2), y, grad)
    torch.testing.assert_close(got, expected)


def test_gradient_only_where_it_is_asked_for() -> None:
    """A frozen q leaves its weight trainable, and the other way round; nothing else comes back."""
    q, weight = torch.randn(1, 2, 5, 8), torch.ones(8, requires_grad=True)
    rotation = Rotation.of(torch.randn(5, 4))
    out, other = vp.norm_rotate(q, q, rotation, weight_q=weight)
    assert out.requires_grad
    assert not other.requires_grad
    out.sum().backward()
    assert weight.grad is not None
    x = q.clone().requires_grad_()
    vp.norm_rotate(x, q, rotation, weight_q=weight.detach())[0].sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("norm", NORMS)
def test_invariant_inputs_and_gradients_stay(norm: str) -> None:
    """Neither x nor a gradient that several branches share is written to, forward or backward."""
    x = torch.randn(2, 3, 5, 8).requires_grad_()
    shared, before = torch.randn(2, 3, 5, 8), x.detach().clone()
    kept = shared.clone()
    weight = torch.randn(8)
    rotation = Rotation.of(torch.randn(5, 4))
    out, _ = vp.norm_rotate(x, x.detach(), rotation, norm=norm, weight_q=weight)
    out.backward(shared)
    assert torch.equal(x.detach(), before)
    assert torch.equal(shared, kept)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_memory_is_written_in_full(norm: str, pairing: str, monkeypatch) -> None:
    """Fresh memory that holds NaN shows nowhere, in results or gradients."""

    def poisoned(x: Tensor, *, kept: bool) -> Tensor:
        return torch.full_like(x, torch.nan)

    monkeypatch.setattr(norms, "_fresh", poisoned)
    x = torch.randn(2, 3, 7, 12).requires_grad_()
    out, _ = vp.norm_rotate(x, x.detach(), Rotation.of(torch.randn(6, 5), pairing), prefix=1)
    assert out.isfinite().all()
    out.backward(torch.randn(2, 3, 7, 12))
    assert x.grad.isfinite().all()


@pytest.mark.parametrize(
    "shape", [(0, 2, 5, 8), (2, 0, 5, 8), (2, 2, 0, 8), (1, 1, 1, 8), (13, 1, 2, 8)], ids=str
)
def test_shape_empty_and_one(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape).requires_grad_()
    out, _ = vp.norm_rotate(x, x.detach(), Rotation.of(torch.randn(shape[2], 4)))
    out.sum().backward()
    assert out.shape == x.grad.shape == shape


@pytest.mark.parametrize("norm", NORMS)
def test_invariant_strides(norm: str) -> None:
    """A view of a packed projection, an expanded gradient and a broadcast x give what their copies give."""
    qkv = torch.randn(2, 7, 3, 4, 16)
    x = qkv[:, :, 0].transpose(1, 2)
    rotation = Rotation.of(torch.randn(7, 8))
    for one in (x, x[:1, :1].expand(2, 4, 7, 16), torch.randn(2, 4, 16, 7).mT):
        results = []
        for leaf in (one.detach().requires_grad_(), one.contiguous().requires_grad_()):
            out, _ = vp.norm_rotate(leaf, leaf.detach(), rotation, norm=norm)
            (grad,) = torch.autograd.grad(out, leaf, torch.ones(1, 1, 1, 16).expand(out.shape))
            results.append((out.detach(), grad))
        for got, expected in zip(*results, strict=True):
            torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("norm", ["rms", "l2"])
def test_memory_keeps_the_input_and_tables_alone(norm: str) -> None:
    """Between forward and backward nothing of the size of x is kept but x."""
    x = torch.randn(2, 3, 50, 16).requires_grad_()
    seen: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        rotation = Rotation.of(torch.randn(50, 8))
        vp.norm_rotate(x, x.detach(), rotation, norm=norm, weight_q=torch.ones(16))
    assert seen
    assert all(one.data_ptr() == x.data_ptr() for one in seen if one.numel() >= x.numel())


def test_invariant_autocast_rounds_nothing() -> None:
    """bfloat16 autocast around both passes leaves the bits of float32."""
    x, weight = torch.randn(2, 3, 9, 16).requires_grad_(), torch.randn(16).requires_grad_()
    rotation = Rotation.of(torch.randn(9, 8))

    def run() -> list[Tensor]:
        out, _ = vp.norm_rotate(x, x.detach(), rotation, norm="layer", weight_q=weight)
        return [out, *torch.autograd.grad(out.square().sum(), (x, weight))]

    expected = run()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for one, other in zip(run(), expected, strict=True):
            assert torch.equal(one, other)
