"""Normalisation of queries and keys joined with their rotation: blocks that stay in the cache, forward and backward.

With n the normalised channels, r the factor that made them (1 / rms, 1 / length), w the weight and g the gradient
turned back, the gradient of x is `r (w g - n mean(w g n))`, a sum in place of the mean for l2; that of the weight is
the sum of `g n`, that of the bias the sum of g. Only x and the tables are kept for the backward pass. A layer norm that
trains goes by torch's own backward, which no sum of parts was faster than.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd import Function
from torch.nn import functional

from visionpos.kernels.rotate import (
    How,
    blocks,
    laid_tables,
    memory_order,
    table_grads,
    turn_laid,
    turned,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from visionpos.kernels.choices import Norm, Rounding

# Elements of a block, and of a tensor that the third-level cache holds whole. Measured, see docs/kernels.md.
_BLOCK, _SMALL = 512 * 1024, 2048 * 1024


class Norming(NamedTuple):
    """How channels are normalised; see `attention.norm_rotate`."""

    norm: Norm
    eps: float
    rounding: Rounding


def normed(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, how: Norming, *, block: bool = False
) -> Tensor:
    """Return x normalised over its channels in float32 or better, rounded as asked.

    `block`: x is in the cache, where torch's own layer norm is three times as slow as its parts on rows of 64 channels.
    """
    wide = x.to(torch.promote_types(torch.float32, x.dtype))
    if how.norm == "l2":
        out = functional.normalize(wide, dim=-1, eps=how.eps)
    elif how.norm == "rms":
        out = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + how.eps)
    elif block:
        out = wide - wide.mean(-1, keepdim=True)
        out.mul_(_factor(out, how)[0])
    else:
        out = functional.layer_norm(wide, wide.shape[-1:], eps=how.eps)
    if how.rounding == "twice":
        out = out.to(x.dtype)
    for part, join in ((weight, torch.mul), (bias, torch.add)):
        if part is not None:
            out = join(out, part if how.rounding == "twice" else part.to(wide.dtype))
    return out if how.rounding == "none" else out.to(x.dtype)


def normed_and_turned(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    pairing: str,
    how: Norming,
    *,
    kept: bool,
) -> Tensor:
    """Return x normalised and turned, in the dtype of x.

    Args:
        x: `[..., n, channels]`; channels beyond 2 * pairs are normalised alone.
        cos: `[..., n, pairs]`, which broadcasts against x, float32 or float64; a row for every token.
        sin: like cos.
        weight: `[channels]`, or None.
        bias: like weight.
        pairing: "half" or "adjacent".
        how: the norm.
        kept: lay the result out as x is, in place of row-major.
    """
    given = (x, cos, sin, weight, bias)
    learns = trains(given)
    if not learns and x.numel() > _SMALL:
        return _forward(*given, pairing, how, kept=kept)
    if not learns or how.norm == "layer":
        return _by_parts(*given, pairing, how, kept=kept)
    out: Tensor = NormTurned.apply(*given, pairing, how, kept)
    return out


def trains(parts: Iterable[Tensor | None]) -> bool:
    """Return whether one of these needs a gradient."""
    return torch.is_grad_enabled() and any(
        part is not None and part.requires_grad for part in parts
    )


def _by_parts(
    x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, bias: Tensor | None, pairing: str,
    how: Norming, *, kept: bool,
) -> Tensor:  # fmt: skip
    """Return the same, each part with its own gradient."""
    one = normed(x, weight, bias, how)
    return turned((one,), cos, sin, How(pairing), kept=kept)[0].to(x.dtype)


def _forward(
    x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, bias: Tensor | None, pairing: str,
    how: Norming, *, kept: bool,
) -> Tensor:  # fmt: skip
    """Return x normalised and turned, block by block."""
    out = _fresh(x, kept=kept)
    if not x.numel():
        return out
    lead, channels = memory_order(out), 2 * cos.shape[-1]
    tables = laid_tables(cos, sin, pairing, x.shape, lead)
    target, source, block = out.permute(lead), x.permute(lead), x.numel() > _BLOCK
    for at in blocks(source, _BLOCK):
        place, one = target[at], normed(source[at], weight, bias, how, block=block)
        whole = place if one.dtype == place.dtype else torch.empty_like(one)
        turn_laid(whole[..., :channels], one[..., :channels], tuple(t[at] for t in tables))
        if channels < x.shape[-1]:
            whole[..., channels:].copy_(one[..., channels:])
        if whole is not place:
            place.copy_(whole)
    return out


class NormTurned(Function):
    """A tensor normalised by rms or l2 and turned; gradients to it, to weight and bias, and to tables that learn."""

    @staticmethod
    def forward(  # noqa: D102, PLR0917
        ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, bias: Tensor | None, pairing: str,
        how: Norming, kept: bool,  # noqa: FBT001
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, cos, sin, weight, bias)
        ctx.pairing, ctx.how, ctx.kept = pairing, how, kept
        return _forward(x, cos, sin, weight, bias, pairing, how, kept=kept)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients; asked for a graph, by differentiating the plain form, so that they have gradients."""
        needs, none = ctx.needs_input_grad[:5], (None, None, None)
        if torch.is_grad_enabled():
            return *_by_autograd(ctx, grad, needs), *none
        x, cos, _, weight, bias = ctx.saved_tensors
        of_tables: tuple[Tensor | None, Tensor | None] = None, None
        if any(needs[1:3]):
            one = normed(x, weight, bias, ctx.how)
            of_tables = table_grads([(one, grad)], cos, How(ctx.pairing))
        of_x, of_weight, of_bias = _back(ctx, grad, needs)
        return of_x, *of_tables, of_weight, of_bias, *none


def _by_autograd(ctx: Any, grad: Tensor, needs: tuple[bool, ...]) -> list[Tensor | None]:
    """Return the gradients of the plain form, with a graph of their own."""
    x, cos, sin, weight, bias = ctx.saved_tensors
    out = _by_parts(x, cos, sin, weight, bias, ctx.pairing, ctx.how, kept=ctx.kept)
    learns = [part for part, needed in zip(ctx.saved_tensors, needs, strict=True) if needed]
    found = iter(torch.autograd.grad(out, learns, grad, create_graph=True, allow_unused=True))
    return [next(found) if needed else None for needed in needs]


def _back(
    ctx: Any, grad: Tensor, needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of x, weight and bias, block by block."""
    x, cos, sin, weight, bias = ctx.saved_tensors
    wide = torch.promote_types(torch.float32, torch.promote_types(x.dtype, cos.dtype))
    of_x = _fresh(x, kept=ctx.kept) if needs[0] else None
    sums = [
        x.new_zeros(x.shape[-1], dtype=wide) if needed and part is not None else None
        for needed, part in zip(needs[3:], (weight, bias), strict=True)
    ]
    if x.numel():
        lead = memory_order(x)
        tables = laid_tables(cos.to(wide), -sin.to(wide), ctx.pairing, x.shape, lead)
        source, given = x.permute(lead), grad.permute(lead)
        target = None if of_x is None else of_x.permute(lead)
        scale = None if weight is None else weight.to(wide)
        for at in blocks(source, _BLOCK):
            back = _turned_back(given[at], tuple(table[at] for table in tables))
            place = None if target is None else target[at]
            _back_block(source[at].to(wide), back, place, scale, ctx.how, sums)
    like = (weight, bias)
    of_weight, of_bias = (
        None if one is None else one.to(part.dtype) for one, part in zip(sums, like, strict=True)
    )
    return of_x, of_weight, of_bias


def _turned_back(grad: Tensor, tables: tuple[Tensor, ...]) -> Tensor:
    """Return a gradient turned back, in fresh memory and the dtype of the arithmetic."""
    dtype = tables[-1].real.dtype
    channels, wide = tables[0].shape[-1] * (2 if len(tables) == 1 else 1), grad.to(dtype)
    back = torch.empty(grad.shape, dtype=dtype, device=grad.device)
    turn_laid(back[..., :channels], wide[..., :channels], tables)
    if channels < grad.shape[-1]:
        back[..., channels:].copy_(wide[..., channels:])
    return back


def _back_block(
    x: Tensor,
    grad: Tensor,
    out: Tensor | None,
    weight: Tensor | None,
    how: Norming,
    sums: list[Tensor | None],
) -> None:
    """Write the gradient of x into out and add to the sums of weight and bias; grad is that of the norm's result."""
    factor, length = _factor(x, how)
    unit = x * factor
    product = grad * unit
    of_weight, of_bias = sums
    if of_weight is not None:
        of_weight += product.reshape(-1, x.shape[-1]).sum(0)
    if of_bias is not None:
        of_bias += grad.reshape(-1, x.shape[-1]).sum(0)
    if out is None:
        return
    if weight is not None:
        product, grad = product.mul_(weight), grad.mul_(weight)
    if how.norm == "l2":  # shorter than eps, a vector is divided by a constant
        along = product.sum(-1, keepdim=True).mul_(length >= how.eps)
    else:
        along = product.mean(-1, keepdim=True)
    out.copy_(grad.addcmul_(unit, along, value=-1).mul_(factor))


def _factor(x: Tensor, how: Norming) -> tuple[Tensor, Tensor]:
    """Return what normalises x, which a layer norm has centred, and its length, `[..., 1]` each."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    if how.norm == "l2":
        return length.clamp_min(how.eps).reciprocal_(), length
    return (length.square() / x.shape[-1]).add_(how.eps).rsqrt_(), length


def _fresh(x: Tensor, *, kept: bool) -> Tensor:
    return torch.empty_like(
        x, memory_format=torch.preserve_format if kept else torch.contiguous_format
    )
