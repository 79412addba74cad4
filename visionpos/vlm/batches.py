"""Batches: rows of position ids stacked with padding, and taken apart again."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from visionpos.errors import PositionError
from visionpos.geometry.arguments import checked
from visionpos.vlm.ids import PositionIds
from visionpos.vlm.padding import Side, stacked
from visionpos.vlm.rules import Rule


@checked
def merge_rows(
    rows: Sequence[PositionIds], rule: Rule, *, side: Side = "right", length: int | None = None
) -> PositionIds:
    """Return rows as one batch, padded to one length; a row keeps its ids whatever its neighbours are.

    Args:
        rows: `[axes, n]` each, without padding.
        rule: gives the id of padding, and whether delta takes off the padded length.
        side: where padding goes.
        length: of the padded rows; that of the longest where None.

    Returns:
        ids `[axes, b, length]`, next_position and delta `[b]`, mask `[b, length]`.

    Raises:
        PositionError: if there are no rows, they are padded or batches, or one is longer than length.

    Example:
        >>> one, two = (
        ...     PositionIds(torch.arange(n).expand(1, -1), torch.tensor(n), torch.tensor(0))
        ...     for n in (1, 2)
        ... )
        >>> merge_rows([one, two], Rule(axes=("index",)), side="left").mask.tolist()
        [[False, True], [True, True]]
    """
    check_rows(rows)
    longest = max(row.ids.shape[-1] for row in rows)
    length = longest if length is None else length
    if length < longest:
        raise PositionError(
            f"length is {length} and the longest row has {longest} tokens; at least that is required."
        )
    ids = stacked([row.ids for row in rows], length, side, rule.pad_id)
    mask = stacked([torch.ones_like(row.ids[0], dtype=torch.bool) for row in rows], length, side, 0)
    rooms = [length - row.ids.shape[-1] if _counts_padding(rule) else 0 for row in rows]
    deltas = [row.delta - room for row, room in zip(rows, rooms, strict=True)]
    following = torch.stack([row.next_position for row in rows])
    return PositionIds(ids, following, torch.stack(deltas), mask)


@checked
def split_rows(batch: PositionIds, rule: Rule) -> list[PositionIds]:
    """Return the rows of a batch without their padding: what `merge_rows` was given."""
    if batch.ids.ndim != 3:
        raise PositionError(
            f"batch has ids of shape {tuple(batch.ids.shape)}; those of a batch, [axes, b, n], are required. Pass what "
            "merge_rows returned."
        )
    out = []
    for number in range(batch.ids.shape[1]):
        row = batch.row(number)
        if row.mask is not None:
            room = int((~row.mask).sum())
            delta = row.delta + (room if _counts_padding(rule) else 0)
            row = PositionIds(row.ids[:, row.mask], row.next_position, delta)
        out.append(row)
    return out


def check_rows(rows: Sequence[PositionIds]) -> None:
    """Refuse what are no rows of one kind, `[axes, n]` each, without padding.

    Raises:
        PositionError: naming shapes and dtypes.
    """
    if not rows or any(row.ids.ndim != 2 for row in rows):
        raise PositionError(
            f"rows holds {len(rows)} items of shapes {[tuple(row.ids.shape) for row in rows]}; at least one, [axes, n] "
            "each, is required. Take them apart with split_rows."
        )
    if any(row.mask is not None and not bool(row.mask.all()) for row in rows):
        raise PositionError(
            "a row is padded already; rows without padding are required. Use split_rows."
        )
    if len({(row.ids.shape[0], row.ids.dtype) for row in rows}) > 1:
        raise PositionError(
            f"rows have {[row.ids.shape[0] for row in rows]} axes and dtypes {[row.ids.dtype for row in rows]}; one "
            "number and one dtype are required. Place all of them by one family."
        )


def _counts_padding(rule: Rule) -> bool:
    """Return whether delta takes off the padded length of a row."""
    return rule.delta.minus == "padded" and rule.delta.from_ != "none"
