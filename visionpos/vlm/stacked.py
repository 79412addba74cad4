"""Stacked rows: packed rows of unequal length as one batch `[rows, n]`, and taken apart again.

`PackedIds` enter, of one prompt or of many; `StackedIds` leaves. A row keeps its ids, its places and its documents
whatever its neighbours are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from visionpos.errors import PositionError
from visionpos.geometry.arguments import checked
from visionpos.geometry.grid import is_whole
from visionpos.vlm.documents import (
    cumulative_lengths,
    document_blocks,
    document_mask,
    pieces_of,
)
from visionpos.vlm.packed_ids import PackedIds
from visionpos.vlm.padding import IGNORED, Side, stacked
from visionpos.vlm.runs import run

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


@dataclass(frozen=True, slots=True, eq=False)
class StackedIds:
    """Packed rows one below the other, padded to one length.

    Args:
        ids: `[axes, rows, n]`.
        text: `[rows, n]` int64: place of each token in its own prompt, which restarts where a document, or a stretch of
            padding, begins.
        documents: `[rows, n]` int64 which prompt of its row each token belongs to, -1 for padding.
        lengths: `[rows]` int64 places of each row before it was padded here.
        side: where padding went.
        cu_seqlens: `[prompts + 1]` int32 where each prompt begins among the tokens of all rows without padding.
        starts: `[prompts]` int64 where each prompt begins in its own row, the padding of this batch left out.
        row_of: `[prompts]` int64 the row of each.
        types: `[rows, n]` int64, 0 text and padding, 1 image, 2 video; None if none were given.
        tokens: `[rows, n]` int64 vocabulary ids; None if none were given.
        labels: `[rows, n]` int64, -100 for padding; None if none were given.
    """

    ids: Tensor
    text: Tensor
    documents: Tensor
    lengths: Tensor
    side: Side
    cu_seqlens: Tensor
    starts: Tensor
    row_of: Tensor
    types: Tensor | None = None
    tokens: Tensor | None = None
    labels: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Return the number of rows, and n."""
        return (self.documents.shape[0], self.documents.shape[1])

    @property
    def valid(self) -> Tensor:
        """Return `[rows, n]` bool, False for padding: the attention mask of a model that takes one prompt a row."""
        return self.documents >= 0

    @property
    def max_seqlen(self) -> int:
        """Return the tokens of the longest prompt."""
        return int(self.cu_seqlens.diff().max())

    @property
    def four_rows(self) -> Tensor:
        """Return `[1 + axes, rows, n]`: the text row over the ids, which is how transformers knows packed rows."""
        return torch.cat([self.text[None].to(self.ids), self.ids])

    def padded_seqlens(self) -> tuple[Tensor, int]:
        """Return cumulative lengths int32 over rows x n places, every stretch of padding a piece; and the longest."""
        return cumulative_lengths(pieces_of(self.documents))

    @checked
    def mask(self, *, causal: bool = True) -> Tensor:
        """Return `[rows, 1, n, n]` bool for SDPA, True within a document; padding sees padding."""
        return document_mask(pieces_of(self.documents), causal=causal)

    def block_mask(self, block: int = 128, *, causal: bool = True) -> BlockMask:
        """Return the same mask for `flex_attention`: see `documents.document_blocks`."""
        if not isinstance(causal, bool):
            raise PositionError(f"causal is {causal!r}; it must be True or False. Pass one.")
        return document_blocks(pieces_of(self.documents), block, causal=causal)

    @checked
    def fill(self, parts: Sequence[Tensor], value: float = 0) -> Tensor:
        """Return one tensor a row stacked as the ids are: labels, loss weights, what `PackedIds.fill` gave.

        Args:
            parts: `[..., places]`, one entry a place of the row.
            value: of padding, such as -100 for labels.

        Returns:
            `[..., rows, n]`.

        Raises:
            PositionError: if parts do not match the rows, or each other.
        """
        wanted = self.lengths.tolist()
        shapes = [tuple(part.shape) for part in parts]
        if [shape[-1:] for shape in shapes] != [(length,) for length in wanted]:
            raise PositionError(
                f"parts have shapes {shapes} and the rows {wanted} places; one tensor a row, one entry a place along "
                "the last axis, is required. Lay prompts into a row with PackedIds.fill first."
            )
        return stacked(parts, self.shape[1], self.side, value)

    @checked
    def unstack(self, x: Tensor, dim: int = -1) -> tuple[Tensor, ...]:
        """Return what every row holds of a tensor of the batch, without the padding of it: the inverse of `fill`.

        Args:
            x: `[..., rows, n, ...]`: ids, tokens, or what a model made of them, such as logits with dim 1.
            dim: the sequence axis; that of rows is the one before it.

        Raises:
            PositionError: if x has other rows, or dim has not n entries.
        """
        if not -x.ndim <= dim < x.ndim or tuple(x.shape[dim % x.ndim - 1 :][:2]) != self.shape:
            raise PositionError(
                f"x has shape {tuple(x.shape)} and dim is {dim}; {self.shape} entries are required along the axis "
                "before dim and along dim. Pass a tensor of the whole batch."
            )
        at = dim % x.ndim
        rows = x.unbind(at - 1)
        return tuple(
            row.narrow(at - 1, self.shape[1] - length if self.side == "left" else 0, length)
            for row, length in zip(rows, self.lengths.tolist(), strict=True)
        )

    def rows(self) -> list[PackedIds]:
        """Return the rows as they were given to `stack_rows`."""
        held = {
            name: self.unstack(whole)
            for name in ("ids", "documents", "types", "tokens")
            if (whole := getattr(self, name)) is not None
        }
        counts = self.cu_seqlens.diff()
        out = []
        for number, length in enumerate(self.lengths.tolist()):
            mine = self.row_of == number
            own = {name: parts[number] for name, parts in held.items()}
            ends = self.starts.new_tensor([length])
            out.append(
                PackedIds(
                    **own,
                    text=_places_in_pieces(own["documents"].unsqueeze(0))[0],
                    cu_seqlens=F.pad(counts[mine].cumsum(0), (1, 0)).int(),
                    cu_seqlens_padded=torch.cat([self.starts[mine], ends]).int(),
                    max_seqlen=int(counts[mine].max()),
                )
            )
        return out

    def to(self, device: torch.device | str) -> StackedIds:
        """Return the same batch with every tensor on a device."""
        held = {name: getattr(self, name) for name in self.__slots__}
        moved: dict[str, Any] = {
            name: one.to(device) for name, one in held.items() if isinstance(one, Tensor)
        }
        return replace(self, **moved)


@checked
def stack_rows(
    rows: Sequence[PackedIds],
    *,
    labels: Sequence[Tensor] | None = None,
    side: Side = "right",
    pad_id: int = 0,
    pad_token: int = 0,
    pad_to_multiple: int = 1,
    length: int | None = None,
) -> StackedIds:
    """Return packed rows as one batch, padded to one length.

    Args:
        rows: from `pack` or `pack_rows`; a row of one prompt is one too.
        labels: `[places]` each, as `PackedIds.fill` lays them into the row; given as they are, so the first label of a
            prompt is for the caller to hide from a causal loss.
        side: where padding goes.
        pad_id: id of padding on every axis, as in the rule.
        pad_token: token id of padding.
        pad_to_multiple: n is a multiple of this.
        length: n; as many as the longest row needs when None.

    Raises:
        PositionError: if there are none, they differ in axes, dtype or fields, labels do not match, a number is out of
            range, or one is longer than length.

    Example:
        >>> from visionpos.vlm import Image, Text, family, pack
        >>> fam = family("qwen2_vl")
        >>> one = pack([fam.stream([Text(tokens=2)])], family=fam)
        >>> two = pack([fam.stream([Text(tokens=n)]) for n in (1, 3)], family=fam)
        >>> batch = stack_rows([one, two], side="left")
        >>> batch.documents.tolist()
        [[-1, -1, 0, 0], [0, 1, 1, 1]]
        >>> batch.ids.shape, batch.cu_seqlens.tolist(), [row.length for row in batch.rows()]
        (torch.Size([3, 2, 4]), [0, 2, 3, 6], [2, 4])
    """
    _check_rows(rows)
    lengths = [row.length for row in rows]
    n = _length(max(lengths), pad_to_multiple, length)
    documents = stacked([row.documents for row in rows], n, side, -1)
    counts = torch.cat([row.cu_seqlens.diff() for row in rows])
    number = torch.arange(len(rows), device=documents.device)
    prompts = number.new_tensor([len(row.cu_seqlens) - 1 for row in rows])

    def whole(parts: list[Tensor | None], value: int) -> Tensor | None:
        held = [part for part in parts if part is not None]
        return stacked(held, n, side, value) if held else None

    batch = StackedIds(
        ids=stacked([row.ids for row in rows], n, side, pad_id),
        text=_places_in_pieces(documents),
        documents=documents,
        lengths=number.new_tensor(lengths),
        side=side,
        cu_seqlens=F.pad(counts.cumsum(0), (1, 0)).int(),
        starts=torch.cat([row.cu_seqlens_padded[:-1] for row in rows]).long(),
        row_of=number.repeat_interleave(prompts),
        types=whole([row.types for row in rows], 0),
        tokens=whole([row.tokens for row in rows], pad_token),
    )
    if labels is None:
        return batch
    odd = next((number for number, part in enumerate(labels) if part.ndim != 1), None)
    if odd is not None:
        raise PositionError(
            f"labels[{odd}] has shape {tuple(labels[odd].shape)}; [places] is required. Take the row out of its batch."
        )
    return replace(batch, labels=batch.fill(labels, IGNORED))


def _places_in_pieces(documents: Tensor) -> Tensor:
    """Return `[rows, n]` int64: the place of each token in its document, or in its stretch of padding."""
    begins = cumulative_lengths(pieces_of(documents))[0].long()
    return run(torch.zeros_like(begins[1:]), begins.diff()).view_as(documents)


def _check_rows(rows: Sequence[PackedIds]) -> None:
    """Refuse rows that do not go into one batch."""
    if not len(rows):
        raise PositionError(
            "rows is empty; at least one PackedIds is required. Make one with pack."
        )
    kinds = [
        (
            row.ids.shape[0],
            row.ids.dtype,
            row.ids.device,
            row.types is not None,
            row.tokens is not None,
        )
        for row in rows
    ]
    odd = next((number for number, kind in enumerate(kinds) if kind != kinds[0]), None)
    if odd is not None:
        names = ("axes", "dtype", "device", "types given", "tokens given")
        apart = [
            f"{name} {mine} and {first}"
            for name, mine, first in zip(names, kinds[odd], kinds[0], strict=True)
            if mine != first
        ]
        raise PositionError(
            f"rows[{odd}] and rows[0] have {', '.join(apart)}; the same is required of all. Pack all of them by one "
            "family, with the same arguments."
        )


def _length(longest: int, multiple: int, length: int | None) -> int:
    """Return n."""
    if not is_whole(multiple):
        raise PositionError(
            f"pad_to_multiple is {multiple!r}; a whole number of at least 1 is required. 1 adds no padding."
        )
    if length is None:
        return -(-longest // multiple) * multiple
    if not is_whole(length) or length < longest or length % multiple:
        raise PositionError(
            f"length is {length!r} and the longest row has {longest} places; at least that many, and a multiple of "
            f"{multiple}, is required. Raise it, or pack fewer prompts into a row."
        )
    return length
