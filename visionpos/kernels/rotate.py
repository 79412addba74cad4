"""Eager rotation in few passes over memory: blocks that stay in the cache, float32 scratch for half precision.

A tensor of queries or keys and half-width tables enter; `out` leaves, which may be the tensor itself. `Turned` and
`TurnedInPlace` are the same with gradients: the turn back, and closed forms for tables that are learned.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd import Function

from visionpos.geometry.points import known
from visionpos.geometry.separable import joined
from visionpos.kernels import device

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    Places = tuple[Callable[[Tensor], Tensor], ...]


class How(NamedTuple):
    """How channels turn.

    Args:
        pairing: "half", "adjacent" or "half_per_axis".
        axes: number of axes, which "half_per_axis" needs.
        prefix: leading tokens that do not turn.
        suffix: trailing tokens that do not turn.
    """

    pairing: str
    axes: int | None = None
    prefix: int = 0
    suffix: int = 0


# Elements a block: of the second-level cache in float32; larger where casts add calls. Measured, see docs/kernels.md.
_HALF, _HALF_CAST, _ADJACENT_CAST = 320 * 1024, 512 * 1024, 1024 * 1024
_PRODUCT = 128 * 1024  # complex numbers


def turn_into(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, how: How) -> Tensor:
    """Write x with its channel pairs turned into `out`, rounded once, and return `out`.

    Args:
        out: like x; x itself for the turn in place, else no memory of x.
        x: `[..., n, channels]` of any strides; channels beyond 2 * pairs are copied.
        cos: `[..., turning tokens, pairs]`, which broadcasts against x, of the dtype of the arithmetic: float32 or
            float64.
        sin: like cos.
        how: which channels turn together, and which tokens stand still: those are copied.

    Halves turn with a fused multiply-add, which rounds once where the plain form rounds twice; adjacent pairs as one
    complex product.
    """
    target, source = (_turning(part, cos, how) for part in (out, x))
    if out.data_ptr() != x.data_ptr():
        channels, behind = 2 * cos.shape[-1], x.shape[-2] - how.suffix
        if channels < x.shape[-1]:
            out[..., channels:].copy_(x[..., channels:])
        if how.prefix:
            out[..., : how.prefix, :channels].copy_(x[..., : how.prefix, :channels])
        if how.suffix:
            out[..., behind:, :channels].copy_(x[..., behind:, :channels])
    if how.pairing == "half_per_axis":
        target, source, cos, sin = (
            part.unflatten(-1, (how.axes, -1)) for part in (target, source, cos, sin)
        )
    if source.numel():
        _turn_whole(target, source, cos, sin, how.pairing)
    return out


def _turning(x: Tensor, cos: Tensor, how: How) -> Tensor:
    """Return the tokens and channels of x that turn."""
    part: Tensor = x[..., how.prefix : x.shape[-2] - how.suffix, : 2 * cos.shape[-1]]
    return part


def _turn_whole(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, pairing: str) -> None:
    """Turn all channels of x `[..., n, 2 pairs]`."""
    lead = memory_order(out)
    tables = laid_tables(cos, sin, pairing, x.shape, lead)
    turn_laid(out.permute(lead), x.permute(lead), tables)


def memory_order(x: Tensor) -> list[int]:
    """Return the order of the dimensions of x in memory, channels last, so that blocks are stretches of it."""
    return [*sorted(range(x.ndim - 1), key=x.stride, reverse=True), x.ndim - 1]


def laid_tables(
    cos: Tensor, sin: Tensor, pairing: str, shape: torch.Size, lead: list[int]
) -> tuple[Tensor, ...]:
    """Return tables that cover x of a shape, its dimensions ordered: turns, or full-width cosines and sines."""
    if pairing == "adjacent":
        parts: tuple[Tensor, ...] = (joined(cos, sin),)
    else:
        parts = torch.cat([cos, cos], dim=-1), sin
    return tuple(part.expand(*shape[:-1], part.shape[-1]).permute(lead) for part in parts)


def turn_laid(out: Tensor, x: Tensor, tables: tuple[Tensor, ...]) -> None:
    """Turn x into out by `laid_tables`."""
    (_adjacent if len(tables) == 1 else _halves)(out, x, *tables)


def _halves(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Turn channels i and i + pairs: one product with cosines of full width, and two corrections, block by block."""
    pairs, cast = sin.shape[-1], x.dtype != cos.dtype
    direct = not cast and out.data_ptr() != x.data_ptr()
    scratch: tuple[Tensor, Tensor] | None = None
    for at in blocks(x, _HALF_CAST if cast else _HALF):
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
    for at in blocks(x, _ADJACENT_CAST):
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


def blocks(x: Tensor, limit: int) -> Iterator[tuple[slice, ...]]:
    """Return the places of blocks of at most `limit` elements; one block where no cache is to be kept warm."""
    return _cut(x.shape, limit if x.device.type == "cpu" else x.numel())


def _cut(shape: torch.Size, limit: int) -> Iterator[tuple[slice, ...]]:
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
        for rest in _cut(shape[1:], limit):
            yield (slice(at, at + 1), *rest)


def turned(
    xs: tuple[Tensor, ...], cos: Tensor, sin: Tensor, how: How, *, kept: bool = False
) -> tuple[Tensor, ...]:
    """Return tensors turned by the same tables, `[..., n, channels]` each; other arguments as in `turn_into`.

    `kept` lays results out as their tensors are, in place of row-major.
    """
    if torch.is_grad_enabled() and any(part.requires_grad for part in (*xs, cos, sin)):
        out: tuple[Tensor, ...] = Turned.apply(cos, sin, how, kept, *xs)
        return out
    return _turn_all(xs, cos, sin, how, kept=kept)


def _turn_all(
    xs: tuple[Tensor, ...], cos: Tensor, sin: Tensor, how: How, *, kept: bool
) -> tuple[Tensor, ...]:
    """Return tensors turned: on CUDA in one launch, elsewhere one by one."""
    outs = tuple(_fresh(x, kept=kept) for x in xs)
    if device.serves(xs, cos, how.pairing):
        device.turn_together(outs, xs, cos, sin, how)
        return outs
    return tuple(turn_into(out, x, cos, sin, how) for out, x in zip(outs, xs, strict=True))


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
    """Tensors turned into fresh memory; gradients to them, and to cosines and sines where those are learned.

    Kept for the backward pass are the tables, and the tensors only if the tables learn.
    """

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,
        cos: Tensor,
        sin: Tensor,
        how: How,
        kept: bool,  # noqa: FBT001
        *xs: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.how, ctx.kept = how, kept
        ctx.set_materialize_grads(False)
        learns = any(ctx.needs_input_grad[:2])
        ctx.save_for_backward(cos, sin, *(xs if learns else ()))
        return _turn_all(xs, cos, sin, how, kept=kept)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients; they can be differentiated again."""
        cos, sin, *xs = ctx.saved_tensors
        given = [grad for grad in grads if grad is not None]
        whole = bool(xs) and len(given) == len(xs) and not torch.is_grad_enabled()
        if whole and all(device.serves(part, cos, ctx.how.pairing) for part in (given, xs)):
            found, of_cos, of_sin = device.turn_back_together(given, xs, cos, sin, ctx.how)
            return of_cos, of_sin, None, None, *found
        back = _turned_back(cos, sin, ctx.how)
        out = [
            turned((grad,), *back, ctx.how, kept=ctx.kept)[0]
            if needed and grad is not None
            else None
            for grad, needed in zip(grads, ctx.needs_input_grad[4:], strict=True)
        ]
        seen = [(x, grad) for x, grad in zip(xs, grads, strict=False) if grad is not None]
        tables = table_grads(seen, cos, ctx.how) if seen else (None, None)
        return *tables, None, None, *out


def _turned_back(cos: Tensor, sin: Tensor, how: How) -> tuple[Tensor, Tensor]:
    """Return the tables of the turn back, for adjacent pairs as the parts of complex numbers."""
    if how.pairing != "adjacent":
        return cos, -sin
    # Read as the parts of one tensor, they could not be differentiated apart.
    plain = not torch.is_grad_enabled() and known(cos)
    turns = joined(cos, sin).conj_physical() if plain else torch.complex(cos, -sin)
    return turns.real, turns.imag


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
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient turned back, in fresh memory: others may hold the one that came in.

        It can be differentiated again: `once_differentiable` lets `torch.autograd.grad` leave out what it forbids.
        """
        cos, sin = ctx.saved_tensors
        back = _turned_back(cos, sin, ctx.how)
        fresh = grad.clone(memory_format=torch.contiguous_format)
        return turned_in_place(fresh, *back, ctx.how, ctx.places), None, None, None, None


def _turn_places(x: Tensor, cos: Tensor, sin: Tensor, how: How, places: Places) -> Tensor:
    """Return x, its stretches turned where they lie."""
    stretches = [place(x) for place in places]
    if device.serves(stretches, cos, how.pairing):
        device.turn_together(stretches, stretches, cos, sin, how)
        return x
    for stretch in stretches:
        turn_into(stretch, stretch, cos, sin, how)
    return x


def table_grads(seen: list[tuple[Tensor, Tensor]], cos: Tensor, how: How) -> tuple[Tensor, Tensor]:
    """Return the gradients of cosines and sines, `[..., n, pairs]`, from tensors and the gradients of their turns.

    With pairs (a, b) and their gradients (g, h) these are the sums of a g + b h and of a h - b g over all that shares
    a table entry.
    """
    wide = [tuple(_turning(part, cos, how).to(cos.dtype) for part in pair) for pair in seen]
    if how.pairing == "adjacent" and not torch.is_grad_enabled() and all(map(known, sum(wide, ()))):
        total = _adjacent_sums(wide, cos.shape)
        return total.real, total.imag
    parts = []
    for x, y in wide:
        if how.pairing == "adjacent":
            both = _complex(x.contiguous()).conj() * _complex(y.contiguous())
            parts.append(_summed(both, cos.shape))
            continue
        (a, b), (g, h) = _pairs(x, how), _pairs(y, how)
        along, around = a * g + b * h, a * h - b * g
        parts.append(torch.complex(_summed(along, cos.shape), _summed(around, cos.shape)))
    total = parts[0] if len(parts) == 1 else parts[0] + parts[1]
    return total.real, total.imag


def _adjacent_sums(seen: list[tuple[Tensor, ...]], shape: torch.Size) -> Tensor:
    """Return the sum of conj(x) y, complex, with as few passes over memory as torch has: nothing is differentiated."""
    total: Tensor | None = None
    for pair in seen:
        first, second = (_complex(part.contiguous()) for part in pair)
        if first.numel() != prod(shape):
            part = _summed(first.conj_physical().mul_(second), shape)
            total = part if total is None else total.add_(part)
            continue
        begun = total is not None
        total = first.new_empty(shape) if total is None else total
        for x, y, out in zip(
            *(z.view(-1).split(_PRODUCT) for z in (first, second, total)), strict=True
        ):
            turned_back = x.conj_physical()
            out.addcmul_(turned_back, y) if begun else torch.mul(turned_back, y, out=out)
    assert total is not None  # noqa: S101 (for the type checker; there is a pair)
    return total


def _summed(x: Tensor, shape: torch.Size) -> Tensor:
    """Return x summed over all that shares an entry of a shape; torch sums over sizes of 1 too, a pass in vain."""
    if x.shape == shape:
        return x
    return x.reshape(shape) if x.numel() == prod(shape) else x.sum_to_size(shape)


def _pairs(x: Tensor, how: How) -> tuple[Tensor, Tensor]:
    """Return the first and the second channel of every pair, `[..., pairs]` each."""
    if how.pairing == "half":
        first, second = x.chunk(2, dim=-1)
    else:
        first, second = (part.flatten(-2) for part in x.unflatten(-1, (how.axes, 2, -1)).unbind(-2))
    return first, second


def _fresh(x: Tensor, *, kept: bool) -> Tensor:
    """Return memory for a result, row-major unless it is to lie as x does."""
    format_ = torch.preserve_format if kept else torch.contiguous_format
    return torch.empty_like(x, memory_format=format_)
