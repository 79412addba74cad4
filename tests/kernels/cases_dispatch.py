"""Cases of the public functions on the Triton tier, which the interpreter stands in for: values and gradients."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import visionpos as vp
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
