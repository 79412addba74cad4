"""Batches: rows of position ids stacked with padding, taken apart again, and packed end to end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from visionpos.errors import PositionError
from visionpos.vlm.ids import PositionIds
from visionpos.vlm.rules import Rule

Side = Literal["left", "right"]


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
    if not rows or any(row.ids.ndim != 2 for row in rows):
        raise PositionError(
            f"rows holds {len(rows)} items of shapes {[tuple(row.ids.shape) for row in rows]}; at least one, [axes, n] "
            "each, is required. Take them apart with split_rows."
        )
    if any(row.mask is not None and not bool(row.mask.all()) for row in rows):
        raise PositionError(
            "a row is padded already; rows without padding are required. Use split_rows."
        )
    longest = max(row.ids.shape[-1] for row in rows)
    length = longest if length is None else length
    if length < longest:
        raise PositionError(
            f"length is {length} and the longest row has {longest} tokens; at least that is required."
        )
    ids, masks, deltas = [], [], []
    for row in rows:
        room = length - row.ids.shape[-1]
        pad = (room, 0) if side == "left" else (0, room)
        ids.append(F.pad(row.ids, pad, value=rule.pad_id))
        masks.append(
            F.pad(torch.ones(row.ids.shape[-1], dtype=torch.bool, device=row.ids.device), pad)
        )
        takes_off = rule.delta.minus == "padded" and rule.delta.from_ != "none"
        deltas.append(row.delta - (room if takes_off else 0))
    following = torch.stack([row.next_position for row in rows])
    return PositionIds(torch.stack(ids, 1), following, torch.stack(deltas), torch.stack(masks))


def split_rows(batch: PositionIds, rule: Rule) -> list[PositionIds]:
    """Return the rows of a batch without their padding: what `merge_rows` was given."""
    out = []
    for number in range(batch.ids.shape[1]):
        row = batch.row(number)
        if row.mask is not None:
            room = int((~row.mask).sum())
            takes_off = rule.delta.minus == "padded" and rule.delta.from_ != "none"
            delta = row.delta + (room if takes_off else 0)
            row = PositionIds(row.ids[:, row.mask], row.next_position, delta)
        out.append(row)
    return out


@dataclass(frozen=True, slots=True, eq=False)
class PackedIds:
    """Prompts end to end in one row, positions restarting with each.

    Args:
        ids: `[axes, n]`.
        text: `[n]` int64: place of each token in its own prompt, which restarts where a document begins; not an id.
        documents: `[n]` int64 which prompt each token belongs to.
        cu_seqlens: `[prompts + 1]` int32 where each prompt begins, as varlen kernels take it.
        max_seqlen: tokens of the longest prompt.
    """

    ids: Tensor
    text: Tensor
    documents: Tensor
    cu_seqlens: Tensor
    max_seqlen: int

    @property
    def four_rows(self) -> Tensor:
        """Return `[1 + axes, 1, n]`: the text row over the ids, which is how transformers knows a packed row."""
        return torch.cat([self.text[None].to(self.ids), self.ids]).unsqueeze(1)

    def unpacked(self) -> list[Tensor]:
        """Return the ids `[axes, n]` of every prompt."""
        return list(self.ids.split(self.cu_seqlens.diff().tolist(), dim=-1))


def pack_rows(rows: Sequence[PositionIds]) -> PackedIds:
    """Return prompts packed into one row.

    Args:
        rows: `[axes, n]` each, without padding.

    Raises:
        PositionError: if there are none, or one is a batch.

    Example:
        >>> one, two = (
        ...     PositionIds(torch.arange(n).expand(3, -1), torch.tensor(n), torch.tensor(0))
        ...     for n in (2, 3)
        ... )
        >>> row = pack_rows([one, two])
        >>> row.ids[0].tolist(), row.cu_seqlens.tolist(), row.max_seqlen
        ([0, 1, 0, 1, 2], [0, 2, 5], 3)
    """
    if not rows or any(row.ids.ndim != 2 for row in rows):
        raise PositionError(
            f"rows holds {len(rows)} items of shapes {[tuple(row.ids.shape) for row in rows]}; at least one, [axes, n] "
            "each, is required. Take them apart with split_rows."
        )
    lengths = torch.tensor([row.ids.shape[-1] for row in rows])
    ends = F.pad(lengths.cumsum(0), (1, 0))
    documents = torch.repeat_interleave(torch.arange(len(rows)), lengths)
    text = torch.arange(int(ends[-1])) - ends[documents]
    ids = torch.cat([row.ids for row in rows], -1)
    device = ids.device
    return PackedIds(
        ids, text.to(device), documents.to(device), ends.int().to(device), int(lengths.max())
    )
