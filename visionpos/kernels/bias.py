"""A table of differences spread over all pairs of tokens, and its gradient summed back, without an index of pairs.

Seen from its end, the table holds the bias rows of neighbouring queries as overlapping stretches of memory: one axis
after the other, stretches are copied side by side. The gradient adds them where they lay: sums over diagonals in a
fixed order, on any device the same at every call.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Function
from torch.nn.functional import pad

from visionpos.geometry.points import known
from visionpos.geometry.relative import relative_index

if TYPE_CHECKING:
    from torch import Tensor

    from visionpos.geometry.grid import Grid

# From so many numbers on, stretches are faster on the CPU than an index: for a bias that learns, and for one that does
# not. On CUDA they are always taken, since the gradient of an index is added up in another order at every call.
_LEARNS, _STANDS = 160 * 1024, 64 * 1024
# Up to so many numbers one padded copy and one sum cost less than a call a row. Measured on the CPU.
_FEW = {"cpu": 128 * 1024, "cuda": 16 * 1024 * 1024}


def expand(table: Tensor, own: Tensor | None, grid: Grid, prefix: int = 0) -> Tensor:
    """Return the bias of every pair of tokens, query by key, from one number a difference.

    Large ones are built in eager mode without an index, and their gradient is summed over diagonals, in float32 or
    better and in one fixed order. Small ones and graphs get one `index_select`, whose numbers are the same.

    Args:
        table: `[heads, distinct]` in `distinct_offsets` order, any strides; not checked.
        own: `[heads, 3]` of the table's dtype: prefix to patch, patch to prefix, prefix to prefix; None for zeros.
        grid: the lattice of the patches.
        prefix: leading tokens without position.

    Returns:
        `[heads, prefix + n, prefix + n]`, contiguous, the table's dtype: `heads` n x n numbers, beside a table that is
        smaller by a side of the grid.

    Example:
        >>> from visionpos.geometry.grid import Grid
        >>> expand(torch.tensor([[-1.0, 0.0, 1.0]]), None, Grid(1, 2))
        tensor([[[ 0., -1.],
                 [ 1.,  0.]]])
    """
    if prefix and own is None:
        own = table.new_zeros(table.shape[0], 3)
    if not (_is_eager(table) and (own is None or _is_eager(own))):
        return _indexed(table, own, grid, prefix)
    learns = torch.is_grad_enabled() and (
        table.requires_grad or (own is not None and own.requires_grad)
    )
    least = _LEARNS if learns else _STANDS
    # torch adds the gradient of an index up in the table's dtype, too coarse in half precision.
    exact = table.is_cuda or (learns and table.dtype.itemsize < 4)
    if not exact and table.shape[0] * (prefix + grid.size) ** 2 < least:
        index = _kept_index(grid, prefix)
        return _picked(table, own, index if known(index) else _index(grid, prefix), grid, prefix)
    if own is None:
        own = table.new_empty(table.shape[0], 3)  # no prefix: nothing reads it
    sides = grid.shape if grid.frames > 1 else grid.shape[1:]
    pairs: Tensor = _Expanded.apply(table, own, sides, prefix)
    return pairs


def _is_eager(x: Tensor) -> bool:
    """Return whether x is a plain tensor of now, on a device whose strides may be chosen freely."""
    traced = torch.jit.is_tracing()  # type: ignore[attr-defined]
    plain = type(x) in (torch.Tensor, torch.nn.Parameter) and known(x) and not traced
    return plain and x.device.type in _FEW


def _indexed(table: Tensor, own: Tensor | None, grid: Grid, prefix: int) -> Tensor:
    """Return the pairs by an index of all of them: constants, so that no graph depends on a size."""
    return _picked(table, own, _index(grid, prefix, table.device), grid, prefix)


def _picked(table: Tensor, own: Tensor | None, index: Tensor, grid: Grid, prefix: int) -> Tensor:
    """Return the pairs that an index names; its first three numbers are `own` where there is a prefix."""
    source = table if own is None or not prefix else torch.cat([own, table], dim=-1)
    side = prefix + grid.size
    return source.index_select(-1, index).view(-1, side, side)


def _index(grid: Grid, prefix: int, device: torch.device | None = None) -> Tensor:
    """Return `[pairs]`, row-major: where the number of a pair lies in the table, behind three of a prefix."""
    index = relative_index(grid, device=device)
    if not prefix:
        return index.flatten()
    # Three numbers in front: prefix rows read number 0, prefix columns 1, where they meet 2.
    columns = pad(index + 3, (prefix, 0), value=1)
    inside = columns.new_full((prefix, prefix), 2)
    return torch.cat([pad(inside, (0, index.shape[-1]), value=0), columns]).flatten()


@lru_cache(maxsize=16)  # a pure function of its arguments; at most 1.3 MB each, by `_LEARNS`
def _kept_index(grid: Grid, prefix: int) -> Tensor:
    """Return an index on the CPU that was made once: a plain tensor, whatever mode the first call was in."""
    with torch.inference_mode(mode=False):
        return _index(grid, prefix, torch.device("cpu"))


def _spread(table: Tensor, own: Tensor, sides: tuple[int, ...], prefix: int) -> Tensor:
    """Return `[heads, prefix + n, prefix + n]` by copies of stretches."""
    heads, n = table.shape[0], prod(sides)
    out = table.new_empty(heads, prefix + n, prefix + n)
    laid, cells = table.flip(-1), 1  # flat order reversed: every axis is
    for side in reversed(sides[1:]):
        wide = (2 * side - 1) * cells
        rows = laid.reshape(
            heads, prod(laid.shape[1:]) // wide, wide
        )  # -1 is no size where there are no heads
        laid = torch.stack(_stretches(rows, side * cells, cells), dim=1)
        cells *= side
    parts = _stretches(laid.reshape(heads, cells, (2 * sides[0] - 1) * cells), n, cells)
    inside = out[:, prefix:, prefix:]
    if (
        len(parts) == 1
    ):  # cat of one tensor writes nothing into some views (torch 2.14: one head, one cell)
        inside.copy_(parts[0])
    else:
        torch.cat(parts, dim=1, out=inside)
    if prefix:
        for place, number in zip(_frame(out, prefix), own.unbind(-1), strict=True):
            place.copy_(number[:, None, None])
    return out


def _stretches(rows: Tensor, length: int, cells: int) -> tuple[Tensor, ...]:
    """Return views of `[heads, rows, ...]`, one a query along an axis: each begins `cells` left of the one before."""
    return rows.unfold(-1, length, cells).unbind(2)[::-1]


def _frame(pairs: Tensor, prefix: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return where prefix meets patch, patch meets prefix, prefix meets prefix."""
    return (
        pairs[:, :prefix, prefix:],
        pairs[:, prefix:, :prefix],
        pairs[:, :prefix, :prefix],
    )


def _gathered(pairs: Tensor, sides: tuple[int, ...], prefix: int) -> tuple[Tensor, Tensor]:
    """Return the sums of pairs that share a number: `[heads, distinct]` and `[heads, 3]`, in the pairs' dtype."""
    heads, wide = pairs.shape[0], torch.promote_types(torch.float32, pairs.dtype)
    laid, cells, rows = pairs[:, prefix:, prefix:], prod(sides), 1
    for side in sides:
        cells //= side
        laid = _overlaid(laid.reshape(heads, side, cells * rows, side * cells), cells, wide)
        rows *= 2 * side - 1
    own = [place.sum((1, 2), dtype=wide) for place in _frame(pairs, prefix)]
    return laid.flatten(1).flip(-1).to(pairs.dtype), torch.stack(own, dim=-1).to(pairs.dtype)


def _overlaid(parts: Tensor, cells: int, dtype: torch.dtype) -> Tensor:
    """Return the sum of `[heads, side, rows, length]`, each part `cells` further left than the one before."""
    heads, side, rows, length = parts.shape
    whole = length + (side - 1) * cells
    if parts.numel() <= _FEW[parts.device.type]:
        laid = torch.zeros(heads, side, rows, whole, dtype=dtype, device=parts.device)
        strides = (side * rows * whole, rows * whole - cells, whole, 1)
        laid.as_strided(parts.shape, strides, (side - 1) * cells).copy_(parts)
        return laid.sum(1)
    total = torch.zeros(heads, rows, whole, dtype=dtype, device=parts.device)
    for place, part in zip(_stretches(total, length, cells), parts.unbind(1), strict=True):
        place.add_(part)
    return total


class _Expanded(Function):
    """`_spread` with its gradient; linear, so each of the two is the other's derivative."""

    # No setup_context, which makes torch look at signatures at every call: functorch never gets here.
    @staticmethod
    def forward(
        ctx: Any, table: Tensor, own: Tensor, sides: tuple[int, ...], prefix: int
    ) -> Tensor:
        ctx.how = sides, prefix
        return _spread(table, own, sides, prefix)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        table, own = _Gathered.apply(grad, *ctx.how)
        return table, own, None, None

    @staticmethod
    def jvp(ctx: Any, table: Tensor, own: Tensor, *_: None) -> Tensor:
        moved: Tensor = _Expanded.apply(table, own, *ctx.how)
        return moved


class _Gathered(Function):
    """`_gathered` with its gradient."""

    @staticmethod
    def forward(
        ctx: Any, pairs: Tensor, sides: tuple[int, ...], prefix: int
    ) -> tuple[Tensor, Tensor]:
        ctx.how = sides, prefix
        return _gathered(pairs, sides, prefix)

    @staticmethod
    def backward(ctx: Any, table: Tensor, own: Tensor) -> tuple[Tensor, None, None]:
        return _Expanded.apply(table, own, *ctx.how), None, None

    @staticmethod
    def jvp(ctx: Any, pairs: Tensor, *_: None) -> tuple[Tensor, Tensor]:
        table, own = _Gathered.apply(pairs, *ctx.how)
        return table, own
