"""PackedIds: prompts end to end in one row, and every view of the row that a language model and its kernels need.

Made by `pack` and `pack_rows`. Places count through the row, padding included; positions restart with every prompt, so
no order may be read off them: masks go by place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from visionpos.errors import PositionError
from visionpos.geometry.arguments import checked
from visionpos.vlm.documents import (
    cumulative_lengths,
    document_blocks,
    document_mask,
    pieces_of,
)
from visionpos.vlm.padding import check_padding
from visionpos.vlm.shards import Order, Shards, check_alike, context_shards

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


@dataclass(frozen=True, slots=True, eq=False)
class PackedIds:
    """Prompts end to end in one row, positions restarting with each.

    Args:
        ids: `[axes, n]`.
        text: `[n]` int64: place of each token in its own prompt, which restarts where a document, or a stretch of
            padding, begins; not an id.
        documents: `[n]` int64 which prompt each token belongs to, -1 for padding.
        cu_seqlens: `[prompts + 1]` int32 where each prompt begins among the tokens without padding, as varlen kernels
            take it.
        cu_seqlens_padded: `[prompts + 1]` int32 where each prompt begins in the row, padding counted; closed by n.
        max_seqlen: tokens of the longest prompt.
        types: `[n]` int64, 0 text and padding, 1 image, 2 video; None if none were given.
        tokens: `[n]` int64 vocabulary ids; None if none were given.
    """

    ids: Tensor
    text: Tensor
    documents: Tensor
    cu_seqlens: Tensor
    cu_seqlens_padded: Tensor
    max_seqlen: int
    types: Tensor | None = None
    tokens: Tensor | None = None

    @property
    def length(self) -> int:
        """Return n, the places of the row, padding included."""
        return self.documents.shape[0]

    @property
    def valid(self) -> Tensor:
        """Return `[n]` bool, False for padding."""
        return self.documents >= 0

    @property
    def three_rows(self) -> Tensor:
        """Return `[axes, 1, n]`: the ids alone, for kernels that take boundaries from `cu_seqlens`."""
        return self.ids.unsqueeze(1)

    @property
    def four_rows(self) -> Tensor:
        """Return `[1 + axes, 1, n]`: the text row over the ids, which is how transformers knows a packed row."""
        return torch.cat([self.text[None].to(self.ids), self.ids]).unsqueeze(1)

    def padded_seqlens(self) -> tuple[Tensor, int]:
        """Return cumulative lengths int32 over all n places, every stretch of padding a piece; and the longest."""
        return cumulative_lengths(self._pieces)

    @checked
    def mask(self, *, causal: bool = True) -> Tensor:
        """Return `[1, 1, n, n]` bool for SDPA, True within a document; padding sees padding.

        Args:
            causal: hide later places. The order is that of places: ids repeat inside an image, and may fall.
        """
        return document_mask(self._pieces, causal=causal)

    def block_mask(self, block: int = 128, *, causal: bool = True) -> BlockMask:
        """Return the same mask for `flex_attention`: see `documents.document_blocks`."""
        if not isinstance(causal, bool):
            raise PositionError(f"causal is {causal!r}; it must be True or False. Pass one.")
        return document_blocks(self._pieces, block, causal=causal)

    @checked
    def fill(self, parts: Sequence[Tensor], value: float = 0, dim: int = -1) -> Tensor:
        """Return one tensor a prompt laid into the row as ids and tokens are: labels, loss weights, embeddings.

        Args:
            parts: one entry a token along dim, padding left out.
            value: of padding, such as -100 for labels.
            dim: the sequence axis.

        Raises:
            PositionError: if parts do not match the prompts or each other, or their dtype does not hold value.
        """
        lengths = self.cu_seqlens.diff().tolist()
        if len(parts) != len(lengths):
            raise PositionError(
                f"parts holds {len(parts)} tensors for {len(lengths)} prompts; one a prompt is required."
            )
        for number, (part, length) in enumerate(zip(parts, lengths, strict=True)):
            if not -part.ndim <= dim < part.ndim or part.shape[dim] != length:
                raise PositionError(
                    f"parts[{number}] has shape {tuple(part.shape)} and its prompt {length} tokens; one entry a token "
                    f"along dim {dim} is required. Leave padding out."
                )
        check_alike(parts, dim)
        line = torch.cat(list(parts), dim)
        check_padding(line.dtype, value)
        shape = list(line.shape)
        shape[dim] = self.length
        return line.new_full(shape, value).index_copy(dim, self._places.to(line.device), line)

    @checked
    def unpack(self, x: Tensor, dim: int = -1) -> tuple[Tensor, ...]:
        """Return what every prompt holds of a tensor of the row, padding left out: the inverse of `fill`.

        Args:
            x: n entries along dim: ids, tokens, or what a model made of them, such as logits `[1, n, words]`.
            dim: the sequence axis.

        Raises:
            PositionError: if dim has not n entries.
        """
        if not -x.ndim <= dim < x.ndim or x.shape[dim] != self.length:
            raise PositionError(
                f"x has shape {tuple(x.shape)} and dim is {dim}; {self.length} entries along dim are required. Pass a "
                "tensor of the whole row; join shards first."
            )
        line = x.index_select(dim, self._places.to(x.device))
        parts: tuple[Tensor, ...] = line.split(self.cu_seqlens.diff().tolist(), dim)
        return parts

    def unpacked(self) -> list[Tensor]:
        """Return the ids `[axes, n]` of every prompt."""
        return list(self.unpack(self.ids))

    @checked
    def shards(self, ranks: int, *, order: Order = "zigzag", per_document: bool = False) -> Shards:
        """Return how the row is dealt out to context-parallel ranks; see `context_shards`.

        Args:
            ranks: size of the group.
            order: "zigzag" or "contiguous".
            per_document: deal out every document by itself, by `cu_seqlens_padded`.

        Raises:
            PositionError: if the row, or a document, does not divide evenly.
        """
        ends = self.cu_seqlens_padded if per_document else None
        return context_shards(self.length, ranks, order=order, cu_seqlens=ends)

    def to(self, device: torch.device | str) -> PackedIds:
        """Return the same row with every tensor on a device."""
        names = ("ids", "text", "documents", "cu_seqlens", "cu_seqlens_padded", "types", "tokens")
        held = {name: getattr(self, name) for name in names}
        return replace(
            self, **{name: one.to(device) for name, one in held.items() if one is not None}
        )

    @property
    def _pieces(self) -> Tensor:
        """Return `[1, n]` int64, a number a stretch: paddings of two documents do not see each other."""
        return pieces_of(self.documents.unsqueeze(0))

    @property
    def _places(self) -> Tensor:
        return self.valid.nonzero().flatten()
