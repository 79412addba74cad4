"""Cases of the public functions on the Triton tier, which the interpreter stands in for: values and gradients."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import visionpos as vp
from tests.kernels.oracle import normalised
from visionpos.geometry import rotate as plain
from visionpos.kernels import device

Case = tuple[str, Callable[[], None]]
CLOSE = {torch.float32: 2e-6, torch.float16: 4e-3}


def dispatch() -> Iterator[Case]:
    for pairing, layout, dtype in product(("half", "adjacent"), ("bhnd", "bnhd", "thd"), CLOSE):
        yield f"rotate {pairing} {layout} {dtype}", partial(values, pairing, layout, dtype)
    for pairing, form in product(
        ("half", "adjacent"), ("tables", "fixed", "coords", "in place", "packed")
    ):
        yield f"gradient {pairing} {form}", partial(gradient, pairing, form)
    for norm in ("rms", "layer", "l2"):
        yield f"norm {norm}", partial(normed, norm)
        for pairing in ("half", "adjacent"):
            yield f"norm gradient {norm} {pairing}", partial(norm_gradient, norm, pairing)
    for pairing, form in product(("half", "adjacent"), ("tables", "coords", "rms", "layer", "l2")):
        yield f"gradient of gradient {pairing} {form}", partial(curvature, pairing, form)
    for pairing in ("half", "adjacent"):
        yield f"negated views {pairing}", partial(negated, pairing)


def counted(name: str) -> Any:
    """A spy: the kernels must have been asked."""
    return patch.object(device, name, wraps=getattr(device, name))


def values(pairing: str, layout: str, dtype: torch.dtype) -> None:
    shape = {"bhnd": (2, 3, 9, 40), "bnhd": (2, 9, 3, 40), "thd": (9, 3, 40)}[layout]
    q, k = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    rotation = vp.Rotation.of(3 * torch.randn(7, 16), pairing)
    with counted("turn_together") as spy:
        got = vp.rotate(q, k, rotation, prefix=1, suffix=1, layout=layout)
    assert spy.call_count == 1, "q and k are one launch"
    for x, y in zip(got, (q, k), strict=True):
        seen = y if layout == "bhnd" else y.transpose(-3, -2)
        wanted, _ = plain(seen.double(), seen.double(), rotation, prefix=1, suffix=1)
        wanted = wanted if layout == "bhnd" else wanted.transpose(-3, -2)
        assert x.dtype == dtype
        assert x.shape == y.shape
        assert (x.double() - wanted).abs().max() < CLOSE[dtype] * 4


def gradient(pairing: str, form: str) -> None:
    leaf = torch.randn(2, 8, 3, 2, 32)
    freqs = torch.randn(2, 2, 16)
    coords = torch.randn(7, 2)
    weight = torch.randn(3, 2, 2, 8, 32)

    def run(*, fast: bool) -> list[Tensor]:
        x, f = (
            leaf.clone().requires_grad_(),
            freqs.clone().requires_grad_(form in ("tables", "coords")),
        )
        qkv = x * 1.0
        q, k, v = (qkv[:, :, at].transpose(1, 2) for at in range(3))
        turns = vp.angles(coords, f)
        rotation = vp.Rotation.of(turns, pairing)
        if not fast:
            q, k = plain(q, k, rotation, prefix=1)
        elif form == "coords":
            q, k = vp.rotate_at(q, k, coords, f, pairing=pairing, prefix=1)
        elif form == "in place":
            q, k = vp.rotate_(q * 1.0, k * 1.0, rotation, prefix=1)
        elif form == "packed":
            out = vp.rotate_packed_(qkv, rotation, prefix=1)
            q, k, v = (out[:, :, at].transpose(1, 2) for at in range(3))
        else:
            q, k = vp.rotate(q, k, rotation, prefix=1)
        ((q.tanh() * weight[0]).sum() + (k * weight[1]).sum() + (v * weight[2]).sum()).backward()
        return [part.grad for part in (x, f) if part.grad is not None]

    for one, other in zip(run(fast=True), run(fast=False), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5)


def normed(norm: str) -> None:
    q, k = torch.randn(2, 6, 9, 40), torch.randn(2, 2, 9, 40)
    rotation = vp.Rotation.of(3 * torch.randn(8, 20), "half")
    weight, bias = torch.randn(2, 40).unbind()
    how = {"norm": norm, "prefix": 1, "weight_q": weight, "weight_k": weight}
    how |= {"bias_q": bias, "bias_k": bias} if norm == "layer" else {}
    with counted("turn_together") as spy:
        got = vp.norm_rotate(q, k, rotation, **how)
    assert spy.call_count == 0, "one pass, not a norm and a turn"
    with patch.object(device, "_launches", return_value=False):
        wanted = vp.norm_rotate(q, k, rotation, **how)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def norm_gradient(norm: str, pairing: str) -> None:
    """q, k, weights and biases, on packed projections and grouped heads; one launch forward and one back."""
    qkv = torch.randn(2, 9, 10, 40)
    leaves = [qkv, *(torch.randn(40) for _ in range(4 if norm == "layer" else 2))]
    rotation = vp.Rotation.of(3 * torch.randn(7, 20), pairing)
    names = ("weight_q", "weight_k", "bias_q", "bias_k")
    grads = torch.randn(2, 6, 9, 40), torch.randn(2, 9, 2, 40).transpose(1, 2)

    def run() -> list[Tensor]:
        x, *vectors = (leaf.clone().requires_grad_() for leaf in leaves)
        q, k = (x * 1.0).transpose(1, 2).split((6, 4), 1)
        how = dict(zip(names, vectors, strict=False))
        out = vp.norm_rotate(q, k[:, :2], rotation, norm=norm, prefix=1, suffix=1, **how)
        return list(torch.autograd.grad(out, (x, *vectors), grads))

    with counted("norm_turned") as spy:
        got = run()
    assert spy.call_count == 1, "one launch, whose gradient is a kernel too"
    with patch.object(device, "_launches", return_value=False):
        wanted = run()
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5)


def curvature(pairing: str, form: str) -> None:
    """A penalty on gradients, by autograd.grad: nothing between the two passes is left out."""
    q, k = torch.randn(1, 2, 6, 16), torch.randn(1, 1, 6, 16)
    coords, freqs, weight = torch.randn(5, 2), torch.randn(2, 8), torch.randn(16)

    def run(*, fast: bool) -> list[Tensor]:
        leaves = [part.clone().requires_grad_() for part in (q, k, freqs, weight)]
        x, y, f, w = leaves
        learned = vp.Rotation.of(vp.angles(coords, f), pairing)
        fixed = vp.Rotation.of(vp.angles(coords, freqs), pairing)
        if form == "coords" and fast:
            out = vp.rotate_at(x, y, coords, f, pairing=pairing, prefix=1)
        elif form in ("coords", "tables"):
            out = (vp.rotate if fast else plain)(x, y, learned, prefix=1)
        elif fast:
            out = vp.norm_rotate(x, y, fixed, norm=form, weight_k=w, prefix=1)
        else:
            one, other = (normalised(x, form, None, None), normalised(y, form, w, None))
            out = plain(one, other, fixed, prefix=1)
        first = torch.autograd.grad(
            sum((part**3).sum() for part in out), leaves, create_graph=True, allow_unused=True
        )
        total = sum(part.square().sum() for part in first if part is not None)
        return list(torch.autograd.grad(total, leaves, allow_unused=True))

    for one, other in zip(run(fast=True), run(fast=False), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert (one - other).norm() < 1e-4 * other.norm()


def negated(pairing: str) -> None:
    """Views that negate memory, which the kernels would read as it lies: conjugate tables, queries, gradients."""
    q, k, turns = torch.randn(1, 2, 6, 16), torch.randn(1, 1, 6, 16), torch.randn(5, 8)
    turns = torch.polar(torch.ones_like(turns), turns).conj()
    back = vp.Rotation(turns.real, turns.imag, pairing)
    there = vp.Rotation(turns.real, turns.imag.resolve_neg(), pairing)
    leaf = q.clone().requires_grad_()
    for x, wanted in ((torch._neg_view(q), -q), (leaf, q)):
        for turn in (vp.rotate, vp.norm_rotate):
            out, _ = turn(x, k, back, prefix=1)
            torch.testing.assert_close(
                out, turn(wanted.double(), k.double(), there, prefix=1)[0].float()
            )
    out, _ = vp.rotate(leaf, k, there, prefix=1)
    (grad,) = torch.autograd.grad(out, leaf, torch._neg_view(torch.ones_like(q)))
    inverse = vp.Rotation(there.cos, -there.sin, pairing)
    torch.testing.assert_close(grad, inverse.apply(-torch.ones_like(q), prefix=1))
