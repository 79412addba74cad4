"""Padding: rows of a batch in one line without it, and back into rows.

Padding mostly stands at the ends of rows; then whole stretches are copied, which is faster than asking every token.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from visionpos.vlm.clocks import Array


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
    return np.concatenate([values[0, :0], *parts])


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
    count = np.count_nonzero(keep, axis=1)
    first = keep.argmax(1)
    last = first + count
    ends = keep.shape[1] - keep[:, ::-1].argmax(1)
    whole = (ends == last) | (count == 0)
    return np.stack([first, last], axis=1) if whole.all() else None
