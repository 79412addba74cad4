"""Kept: the tokens that patch dropout keeps, picked out of a table that has one entry a token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from visionpos.errors import PositionError
from visionpos.geometry.points import readable

if TYPE_CHECKING:
    from torch import Tensor


def picked(table: Tensor, indices: Tensor, own: int) -> Tensor:
    """Return the kept tokens of a table.

    Args:
        table: `[(b,) (heads,) n, ...]`, not changed.
        indices: `[kept]` for all samples alike, or `[b, kept]`, one choice a sample; whole numbers in 0 ... n - 1, read
            on the CPU alone.
        own: dimensions of the table from its tokens on.

    Returns:
        `[(b,) (heads,) kept, ...]`, or for one choice a sample `[b, heads or 1, kept, ...]`.

    Raises:
        PositionError: if indices are no whole numbers, have another rank, belong to another batch, or name a token that
            is not there.

    Example:
        >>> picked(torch.arange(6).view(3, 2), torch.tensor([[2], [0]]), own=2).tolist()
        [[[[4, 5]]], [[[0, 1]]]]
    """
    n, lead = table.shape[-own], table.shape[:-own]
    _check_indices(indices, n)
    if indices.ndim == 1:
        return table.index_select(-own, indices)
    batch = lead[0] if len(lead) == 2 else 1
    if len(lead) > 2 or batch not in (1, indices.shape[0]):
        raise PositionError(
            f"indices have shape {tuple(indices.shape)} and the turn leading sizes {tuple(lead)}; one row a sample of "
            "[b, heads, n] is required. Pass the indices of this batch."
        )
    full = table[(None,) * (2 - len(lead))].expand(indices.shape[0], *(-1,) * (own + 1))
    where = indices.to(torch.int64)[(slice(None), None, slice(None), *(None,) * (own - 1))]
    return full.gather(2, where.expand(-1, full.shape[1], -1, *full.shape[3:]))


def _check_indices(indices: Tensor, n: int) -> None:
    """Refuse what does not name tokens by number."""
    given: Any = indices
    is_tensor = isinstance(given, torch.Tensor)
    if not is_tensor or given.ndim not in (1, 2) or given.dtype not in (torch.int32, torch.int64):
        what = f"{given.dtype} of shape {tuple(given.shape)}" if is_tensor else given
        raise PositionError(
            f"indices are {what}; int64 [kept], or [b, kept] with one choice "
            "a sample, is required. Turn a mask into indices with mask.nonzero()."
        )
    outside = readable(indices) and bool(((indices < 0) | (indices >= n)).any())
    if outside:
        raise PositionError(
            f"indices reach from {int(indices.min())} to {int(indices.max())} and the turn has {n} tokens; numbers "
            "from 0 to below that are required. Leave prefix tokens out of the count."
        )
