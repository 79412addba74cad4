"""The CUDA tier: which calls the Triton kernels serve, and those calls with gradients.

Triton is imported at the first call that needs it. Elsewhere, and for what the kernels do not serve, torch's own
operations turn q and k: see `rotate`.
"""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Function

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from visionpos.geometry.rotation import Rotation
    from visionpos.kernels.rotate import How

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WIDEST = 256  # channels a head


def serves(xs: Sequence[Tensor], cos: Tensor, pairing: str) -> bool:
    """Return whether the kernels turn these tensors by these tables."""
    return (
        pairing in ("half", "adjacent")
        and cos.dtype == torch.float32
        and all(_fits(x) for x in xs)
        and len(xs) <= 2
        and _launches(xs[0])
    )


def serves_coords(q: Tensor, k: Tensor, coords: Tensor, pairing: str) -> bool:
    """Return whether the kernels form the angles of these coordinates; those that learn have no kernel."""
    return (
        pairing in ("half", "adjacent")
        and not torch.compiler.is_compiling()
        and not coords.requires_grad
        and coords.dtype != torch.float64
        and all(_fits(x) for x in (q, k))
        and _launches(q)
    )


def _fits(x: Tensor) -> bool:
    shaped = x.ndim in (3, 4) and x.shape[-1] <= _WIDEST and x.stride(-1) == 1
    return x.dtype in _DTYPES and shaped and not x.is_neg()  # a negated view holds other numbers


def _launches(x: Tensor) -> bool:
    """Return whether Triton can run here: on CUDA, or in Python on CPU tensors in its interpreter."""
    return (x.is_cuda and _installed()) or (x.device.type == "cpu" and _interpreted())


@cache
def _installed() -> bool:
    from visionpos.kernels import triton_language

    return bool(triton_language.AVAILABLE)


@cache
def _interpreted() -> bool:
    import os

    if os.environ.get("TRITON_INTERPRET", "0") in ("0", ""):
        return False
    from visionpos.kernels import triton_language

    return triton_language.interpreted()


def _batched(x: Tensor) -> Tensor:
    return x if x.ndim == 4 else x.unsqueeze(0)


def _as_given(found: Any, x: Tensor) -> Tensor:
    """Return what a launch gave for x, with x's own number of dimensions."""
    out: Tensor = found if x.ndim == 4 else found.squeeze(0)
    return out


def turn_together(
    outs: Sequence[Tensor], xs: Sequence[Tensor], cos: Tensor, sin: Tensor, how: How
) -> None:
    """Turn one tensor, or q and k, in one launch; arguments as in `rotate.turn_into`."""
    from visionpos.kernels.triton_rotate import launch_rotate

    (q, *k), (out_q, *out_k) = (tuple(map(_batched, parts)) for parts in (xs, outs))
    launch_rotate(
        q, k[0] if k else None, cos, sin, pairing=how.pairing, prefix=how.prefix, suffix=how.suffix,
        out_q=out_q, out_k=out_k[0] if out_k else None,
    )  # fmt: skip


def turn_back_together(
    grads: Sequence[Tensor], xs: Sequence[Tensor], cos: Tensor, sin: Tensor, how: How
) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """Return the gradients of tensors and of their tables, in one launch and a sum in fixed order."""
    from visionpos.kernels.triton_backward import launch_rotate_backward

    (grad_q, *grad_k), (q, *k) = (tuple(map(_batched, parts)) for parts in (grads, xs))
    back_q, back_k, of_cos, of_sin = launch_rotate_backward(
        grad_q, grad_k[0] if grad_k else None, q, k[0] if k else None, cos, sin,
        pairing=how.pairing, prefix=how.prefix, suffix=how.suffix,
    )  # fmt: skip
    found = (back_q,) if back_k is None else (back_q, back_k)
    return tuple(map(_as_given, found, xs)), of_cos, of_sin


def norm_turned(
    q: Tensor, k: Tensor, rotation: Rotation, *, prefix: int, suffix: int, **how: Any
) -> tuple[Tensor, Tensor]:
    """Return q and k normalised and turned in one launch; arguments as in `attention.norm_rotate`."""
    from visionpos.kernels.triton_rotate import launch_norm_rotate
    from visionpos.kernels.triton_sources import Tables

    done = launch_norm_rotate(
        _batched(q), _batched(k), Tables(rotation.cos.resolve_neg(), rotation.sin.resolve_neg()),
        pairing=rotation.pairing, prefix=prefix, suffix=suffix, **how,
    )  # fmt: skip
    return _as_given(done[0], q), _as_given(done[1], k)


def _differentiable(
    plain: Callable[..., tuple[Tensor, Tensor]],
    parts: Sequence[Tensor | None],
    grads: tuple[Tensor, Tensor],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of a plain form, with a graph of their own: a backward pass is itself differentiated.

    `once_differentiable` would not do: `torch.autograd.grad` leaves out, without a word, what it forbids.
    """
    learns = [part for part in parts if part is not None and part.requires_grad]
    found = iter(
        torch.autograd.grad(plain(*parts), learns, grads, create_graph=True, allow_unused=True)
    )
    return tuple(next(found) if part is not None and part.requires_grad else None for part in parts)


def _normed_apart(
    rotation: Rotation, how: dict[str, Any], rounding: Any, q: Tensor, k: Tensor, *vectors: Tensor | None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return q and k normalised and turned by torch's own operations; vectors are the weights, then the biases."""
    from visionpos.kernels.norm import Norming, normed

    whole = rotation.padded(how["prefix"], how["suffix"])
    weight_q, weight_k, bias_q, bias_k = vectors

    def one(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        wide = normed(x, weight, bias, Norming(how["norm"], how["eps"], rounding))
        return whole.apply(wide).to(x.dtype)

    return one(q, weight_q, bias_q), one(k, weight_k, bias_k)


class NormTurnedTogether(Function):
    """q and k normalised and turned, one launch either way; gradients to q, k, weights and biases, not to tables."""

    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any, q: Tensor, k: Tensor, weight_q: Tensor | None, weight_k: Tensor | None, bias_q: Tensor | None,
        bias_k: Tensor | None, rotation: Rotation, how: dict[str, Any], rounding: str,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return q and k, normalised and turned; `how` has norm, eps, prefix and suffix."""
        ctx.rotation, ctx.how, ctx.rounding = rotation, how, rounding
        ctx.save_for_backward(q, k, weight_q, weight_k, bias_q, bias_k)
        return norm_turned(
            q, k, rotation, rounding=rounding, weight_q=weight_q, weight_k=weight_k, bias_q=bias_q, bias_k=bias_k,
            **how,
        )  # fmt: skip

    @staticmethod
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients, those of weights and biases in their own dtypes."""
        from visionpos.kernels.triton_backward import launch_norm_rotate_backward
        from visionpos.kernels.triton_sources import Tables

        if torch.is_grad_enabled():
            plain = partial(_normed_apart, ctx.rotation, ctx.how, ctx.rounding)
            return *_differentiable(plain, ctx.saved_tensors, (grad_q, grad_k)), None, None, None
        q, k, *vectors = ctx.saved_tensors
        rotation = ctx.rotation
        tables = Tables(rotation.cos.resolve_neg(), rotation.sin.resolve_neg())
        found_q, found_k, *sums = launch_norm_rotate_backward(
            _batched(grad_q), _batched(grad_k), _batched(q), _batched(k), tables,
            weight_q=vectors[0], weight_k=vectors[1], pairing=rotation.pairing, **ctx.how,
        )  # fmt: skip
        of_vectors = (
            None if one is None else total.to(one.dtype) for one, total in zip(vectors, sums, strict=True)
        )  # fmt: skip
        return _as_given(found_q, q), _as_given(found_k, k), *of_vectors, None, None, None


class CoordsTurned(Function):
    """q and k turned by angles that the kernel forms; gradients to q, k and the frequencies."""

    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any, q: Tensor, k: Tensor, coords: Tensor, freqs: Tensor, pairing: str, accuracy: str,
        scale: float, prefix: int, suffix: int, plain: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return q and k, turned; `plain` is the same of q, k and freqs in torch's own operations."""
        from visionpos.kernels.triton_rotate import launch_rotate_coords

        ctx.plain = plain
        ctx.how = {
            "pairing": pairing, "accuracy": accuracy, "scale": scale, "prefix": prefix, "suffix": suffix,
        }  # fmt: skip
        ctx.save_for_backward(q, k, coords, freqs)
        out_q, out_k = launch_rotate_coords(
            _batched(q), _batched(k), coords.transpose(-1, -2), freqs, **ctx.how
        )
        return _as_given(out_q, q), _as_given(out_k, k)

    @staticmethod
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k and freqs."""
        from visionpos.kernels.triton_backward import launch_rotate_coords_backward
        from visionpos.kernels.triton_rotate import launch_rotate_coords

        q, k, coords, freqs = ctx.saved_tensors
        if torch.is_grad_enabled():
            found = _differentiable(ctx.plain, (q, k, freqs), (grad_q, grad_k))
            return *found[:2], None, found[2], *(None,) * 6
        grads, places = (_batched(grad_q), _batched(grad_k)), coords.transpose(-1, -2)
        of_freqs = None
        if ctx.needs_input_grad[3]:
            back_q, back_k, of_freqs = launch_rotate_coords_backward(
                *grads, _batched(q), _batched(k), places, freqs, **ctx.how
            )
            of_freqs = of_freqs.to(freqs.dtype)
        else:
            back_q, back_k = launch_rotate_coords(*grads, places, freqs, conj=True, **ctx.how)
        return (_as_given(back_q, q), _as_given(back_k, k), None, of_freqs, *(None,) * 6)
