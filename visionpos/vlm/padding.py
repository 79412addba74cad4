"""Padding: rows of a batch in one line without it, and back into rows; lines of unequal length as rows of one.

Padding mostly stands at the ends of rows; then whole stretches are copied, which is faster than asking every token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from visionpos.errors import PositionError
from visionpos.vlm.clocks import Array
from visionpos.vlm.shards import check_alike

Side = Literal["left", "right"]
IGNORED = -100  # label that losses of torch and transformers skip


def stacked(parts: Sequence[Tensor], length: int, side: Side, value: float) -> Tensor:
    """Return `[..., rows, length]`: tensors `[..., places]` of unequal places, padded on one side.

    Args:
        parts: at least one, alike but for the last axis, none longer than length.
        length: of the padded rows.
        side: where padding goes.
        value: of padding.

    Raises:
        PositionError: if parts are not alike, or their dtype does not hold value.

    Example:
        >>> stacked([torch.tensor([1]), torch.tensor([2, 3])], 2, "left", 0).tolist()
        [[0, 1], [2, 3]]
    """
    check_alike(parts, -1)
    check_padding(parts[0].dtype, value)
    rooms = [length - part.shape[-1] for part in parts]
    pads = [(room, 0) if side == "left" else (0, room) for room in rooms]
    padded = [F.pad(part, pad, value=value) for part, pad in zip(parts, pads, strict=True)]
    return torch.stack(padded, -2)


def check_padding(dtype: torch.dtype, value: float) -> None:
    """Refuse a value of padding that a dtype does not hold, which would be written as another.

    Raises:
        PositionError: naming the range.
    """
    if dtype.is_floating_point or dtype.is_complex:
        return
    limits = None if dtype == torch.bool else torch.iinfo(dtype)
    low, high = (0, 1) if limits is None else (limits.min, limits.max)
    if not low <= value <= high or value != int(value):
        raise PositionError(
            f"value is {value} and parts are {dtype}; a whole number from {low} to {high} is required. Pass parts of "
            "another dtype, or another value."
        )


def unpadded(values: Array, keep: Array | None) -> Array:
    """Return `[tokens]`: rows one after another, without padding.

    Args:
        values: `[b, n]`.
        keep: `[b, n]` bool, False for padding; None if nothing is padded.

    Example:
        >>> keep = np.array([[True, True, False], [False, True, True]])
        >>> unpadded(np.arange(6).reshape(2, 3), keep).tolist()
        [0, 1, 4, 5]
    """
    if keep is None:
        return values.ravel()
    stretches = _stretches(keep)
    if stretches is None:
        return np.asarray(values[keep])
    parts = [row[first:last] for row, (first, last) in zip(values, stretches.tolist(), strict=True)]
    return np.concatenate([values[:0].ravel(), *parts])


def repadded(values: Array, keep: Array, fill: int) -> Array:
    """Return `[axes, b, n]`: a line `[axes, tokens]` in rows again.

    Args:
        values: `[axes, tokens]`.
        keep: `[b, n]` bool, False for padding.
        fill: what padding gets.
    """
    out: Array = np.empty((len(values), *keep.shape), dtype=values.dtype)
    stretches = _stretches(keep)
    if stretches is None:
        out[:] = fill
        out[:, keep] = values
        return out
    for row, first, last, begin in _placed(stretches):
        out[:, row, :first] = fill
        out[:, row, first:last] = values[:, begin : begin + last - first]
        out[:, row, last:] = fill
    return out


def _placed(stretches: Array) -> Iterator[tuple[int, int, int, int]]:
    """Yield row, first and last place of its tokens, and where they begin in the line."""
    begin = 0
    for row, (first, last) in enumerate(stretches.tolist()):
        yield row, first, last, begin
        begin += last - first


def _stretches(keep: Array) -> Array | None:
    """Return `[b, 2]` where the tokens of each row begin and end; None if a row has padding between them."""
    if not keep.size:
        return np.zeros((len(keep), 2), dtype=np.int64)
    count = np.count_nonzero(keep, axis=1)
    first = keep.argmax(1)
    last = first + count
    ends = keep.shape[1] - keep[:, ::-1].argmax(1)
    whole = (ends == last) | (count == 0)
    return np.stack([first, last], axis=1) if whole.all() else None
