"""Eager rotation in few passes over memory: blocks that stay in the cache, float32 scratch for half precision.

A tensor of queries or keys and half-width tables enter; `out` leaves, which may be the tensor itself. `Turned` and
`TurnedInPlace` are the same with gradients: the turn back, and closed forms for tables that are learned.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    How = tuple[str, int | None]
    Places = tuple[Callable[[Tensor], Tensor], ...]

# Elements a block: of the second-level cache in float32; larger where casts add calls. Measured, see docs/kernels.md.
_HALF, _HALF_CAST, _ADJACENT_CAST = 320 * 1024, 512 * 1024, 1024 * 1024


def turn_into(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, how: How) -> Tensor:
    """Write x with its channel pairs turned into `out`, rounded once, and return `out`.

    Args:
        out: like x; x itself for the turn in place, else no memory of x.
        x: `[..., n, channels]` of any strides; channels beyond 2 * pairs are copied.
        cos: `[..., n, pairs]`, which broadcasts against x, of the dtype of the arithmetic: float32 or float64.
        sin: like cos.
        how: pairing, "half", "adjacent" or "half_per_axis", and the number of axes, which the last needs.

    Halves turn with a fused multiply-add, which rounds once where the plain form rounds twice; adjacent pairs as one
    complex product.
    """
    channels = 2 * cos.shape[-1]
    if channels < x.shape[-1] and out.data_ptr() != x.data_ptr():
        out[..., channels:].copy_(x[..., channels:])
    target, source = out[..., :channels], x[..., :channels]
    if how[0] == "half_per_axis":
        target, source, cos, sin = (
            part.unflatten(-1, (how[1], -1)) for part in (target, source, cos, sin)
        )
    if source.numel():
        _turn_whole(target, source, cos, sin, how[0])
    return out


def _turn_whole(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, pairing: str) -> None:
    """Turn all channels of x `[..., n, 2 pairs]`."""
    order = sorted(range(x.ndim - 1), key=out.stride, reverse=True)
    lead = [*order, x.ndim - 1]  # as the memory of out lies, so that blocks are stretches of it

    def laid(table: Tensor) -> Tensor:
        return table.expand(*x.shape[:-1], table.shape[-1]).permute(lead)

    target, source = out.permute(lead), x.permute(lead)
    if pairing == "adjacent":
        _adjacent(target, source, laid(torch.complex(cos, sin)))
    else:
        _halves(target, source, laid(torch.cat([cos, cos], dim=-1)), laid(sin))


def _halves(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Turn channels i and i + pairs: one product with cosines of full width, and two corrections, block by block."""
    pairs, cast = sin.shape[-1], x.dtype != cos.dtype
    direct = not cast and out.data_ptr() != x.data_ptr()
    scratch: tuple[Tensor, Tensor] | None = None
    for at in _blocks(x.shape, _HALF_CAST if cast else _HALF):
        source, target, c, s = x[at], out[at], cos[at], sin[at]
        turned = target
        if not direct:
            if scratch is None or scratch[0].shape != source.shape:
                scratch = (cos.new_empty(source.shape), cos.new_empty(source.shape))
            turned = scratch[1]
            if cast:
                source = scratch[0].copy_(_gathered(source, target))
        first, second = source[..., :pairs], source[..., pairs:]
        low, high = turned[..., :pairs], turned[..., pairs:]
        torch.mul(source, c, out=turned)
        low.addcmul_(second, s, value=-1)
        high.addcmul_(first, s)
        if not direct:
            target.copy_(turned)


def _adjacent(out: Tensor, x: Tensor, turns: Tensor) -> None:
    """Turn channels 2i and 2i + 1 as complex numbers, in place of their own where they can be read as such."""
    real, scratch = turns.real.dtype, None
    paired = out.dtype == real and is_pairwise(out)
    rows = x.stride(-2) == x.shape[-1]  # tokens lie end to end: loops run over many at once
    if paired and x.dtype == real and is_pairwise(x) and (rows or out.data_ptr() == x.data_ptr()):
        torch.mul(_complex(x), turns, out=_complex(out))
        return
    for at in _blocks(x.shape, _ADJACENT_CAST):
        source, target = x[at], out[at]
        if paired:
            _complex(target.copy_(source)).mul_(turns[at])
            continue
        if scratch is None or scratch.shape != source.shape:
            scratch = x.new_empty(source.shape, dtype=real)
        _complex(scratch.copy_(_gathered(source, target))).mul_(turns[at])
        target.copy_(scratch)


def _gathered(source: Tensor, target: Tensor) -> Tensor:
    """Return the source, copied to the target first where its rows lie apart: casts are slow on short stretches."""
    apart = source.stride(-2) != source.shape[-1] and target.data_ptr() != source.data_ptr()
    return target.copy_(source) if apart else source


def is_pairwise(x: Tensor) -> bool:
    """Return whether channel pairs can be read as complex numbers without a copy."""
    even = all(
        step % 2 == 0 for step, size in zip(x.stride()[:-1], x.shape[:-1], strict=True) if size > 1
    )
    return bool(x.stride(-1) == 1 and x.storage_offset() % 2 == 0 and even)


def _complex(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))


def _blocks(shape: torch.Size, limit: int) -> Iterator[tuple[slice, ...]]:
    """Yield the places of blocks of at most `limit` elements, where a row of channels is not more."""
    inner = prod(shape[1:])
    if len(shape) < 2 or inner * shape[0] <= limit:
        yield ()
        return
    step = limit // inner
    if step or len(shape) == 2:
        step = max(step, 1)
        for at in range(0, shape[0], step):
            yield (slice(at, at + step),)
        return
    for at in range(shape[0]):
        for rest in _blocks(shape[1:], limit):
            yield (slice(at, at + 1), *rest)


def turned(x: Tensor, cos: Tensor, sin: Tensor, how: How, *, kept: bool = False) -> Tensor:
    """Return x turned, `[..., n, channels]`; arguments as in `turn_into`.

    `kept` lays the result out as x is, in place of row-major.
    """
    if torch.is_grad_enabled() and (x.requires_grad or cos.requires_grad or sin.requires_grad):
        out: Tensor = Turned.apply(x, cos, sin, how, kept)
        return out
    return turn_into(_fresh(x, kept=kept), x, cos, sin, how)


def turned_in_place(x: Tensor, cos: Tensor, sin: Tensor, how: How, places: Places) -> Tensor:
    """Return x, stretches of it turned where they lie.

    Args:
        x: the whole tensor, written to.
        cos: `[..., n, pairs]`, which broadcasts against every stretch.
        sin: like cos.
        how: as in `turn_into`.
        places: from x to a stretch `[..., n, channels]` of it; stretches do not overlap.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        out: Tensor = TurnedInPlace.apply(x, cos, sin, how, places)
        return out
    return _turn_places(x, cos, sin, how, places)


class Turned(Function):
    """x turned into fresh memory; gradients to x, and to cosines and sines where they are learned.

    Kept for the backward pass are the tables, and x only if the tables learn.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, how: How, kept: bool) -> Tensor:  # noqa: FBT001
        """Return x turned."""
        ctx.how, ctx.kept = how, kept
        learns = any(ctx.needs_input_grad[1:3])
        ctx.save_for_backward(cos, sin, x if learns else None)
        return turn_into(_fresh(x, kept=kept), x, cos, sin, how)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients; they can be differentiated again."""
        cos, sin, x = ctx.saved_tensors
        needs = ctx.needs_input_grad[0]
        back = turned(grad, cos, -sin, ctx.how, kept=ctx.kept) if needs else None
        tables = (None, None) if x is None else table_grads(x, grad, cos, ctx.how)
        return back, *tables, None, None


class TurnedInPlace(Function):
    """Stretches of x turned where they lie; gradients to x alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, how: How, places: Places) -> Tensor:
        """Return x, its stretches turned."""
        ctx.how, ctx.places = how, places
        ctx.save_for_backward(cos, sin)
        ctx.mark_dirty(x)
        return _turn_places(x, cos, sin, how, places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient turned back, in fresh memory: others may hold the one that came in."""
        cos, sin = ctx.saved_tensors
        fresh = grad.clone(memory_format=torch.contiguous_format)
        return _turn_places(fresh, cos, -sin, ctx.how, ctx.places), None, None, None, None


def _turn_places(x: Tensor, cos: Tensor, sin: Tensor, how: How, places: Places) -> Tensor:
    """Return x, its stretches turned where they lie."""
    for place in places:
        stretch = place(x)
        turn_into(stretch, stretch, cos, sin, how)
    return x


def table_grads(x: Tensor, grad: Tensor, cos: Tensor, how: How) -> tuple[Tensor, Tensor]:
    """Return the gradients of cosines and sines, `[..., n, pairs]`, from those of the turned tensor.

    With pairs (a, b) and their gradients (g, h) these are the sums of a g + b h and of a h - b g over all that shares
    a table entry.
    """
    a, b = _pairs(x.to(cos.dtype), cos, how)
    g, h = _pairs(grad.to(cos.dtype), cos, how)
    along, around = a * g + b * h, a * h - b * g
    return along.sum_to_size(cos.shape), around.sum_to_size(cos.shape)


def _pairs(x: Tensor, cos: Tensor, how: How) -> tuple[Tensor, Tensor]:
    """Return the first and the second channel of every pair, `[..., pairs]` each."""
    x = x[..., : 2 * cos.shape[-1]]
    if how[0] == "half":
        first, second = x.chunk(2, dim=-1)
    elif how[0] == "adjacent":
        first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    else:
        first, second = (part.flatten(-2) for part in x.unflatten(-1, (how[1], 2, -1)).unbind(-2))
    return first, second


def _fresh(x: Tensor, *, kept: bool) -> Tensor:
    """Return memory for a result, row-major unless it is to lie as x does."""
    format_ = torch.preserve_format if kept else torch.contiguous_format
    return torch.empty_like(x, memory_format=format_)
