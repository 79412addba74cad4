"""Shards: which places of a row each rank of a context-parallel group holds, and the way back.

Every tensor of a row is cut along its sequence axis by one map: tokens, types, labels, and ids `[axes, b, n]`, whose
first axis is no sequence. Masks are cut along queries, and along keys where keys come shard by shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from visionpos.errors import PositionError
from visionpos.geometry.arguments import checked
from visionpos.geometry.fields import check_choice
from visionpos.geometry.grid import is_whole
from visionpos.vlm.documents import MaskRule, Tokens, seen_blocks, seen_mask, seen_rule

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Order = Literal["zigzag", "contiguous"]


@dataclass(frozen=True, slots=True, eq=False)
class Shards:
    """A row dealt out to ranks.

    Args:
        places: `[ranks, n / ranks]` int64: the places of the row that each rank holds, in the order it holds them.
    """

    places: Tensor

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return self.places.shape[0]

    @property
    def length(self) -> int:
        """Return n, the number of places of the whole row."""
        return self.places.numel()

    @property
    def inverse(self) -> Tensor:
        """Return `[n]` int64: where each place of the row lies among the shards of rank 0, 1, ... end to end."""
        return self.places.flatten().argsort()

    @checked
    def take(self, x: Tensor, rank: int, dim: int = -1) -> Tensor:
        """Return what one rank holds of a tensor.

        Args:
            x: n entries along dim; the last axis of ids `[axes, n]` and `[axes, b, n]`, of tokens and types; 1 of
                hidden states `[b, n, d]`.
            rank: 0 to ranks - 1.
            dim: the sequence axis.

        Raises:
            PositionError: if there is no such rank, or dim has not n entries.
        """
        self._check_rank(rank, "rank")
        self._check(x, dim, self.length, "x")
        return x.index_select(dim, self.places[rank].to(x.device))

    @checked
    def split(self, x: Tensor, dim: int = -1) -> tuple[Tensor, ...]:
        """Return what every rank holds, as `take` gives it."""
        return tuple(self.take(x, rank, dim) for rank in range(self.ranks))

    @checked
    def join(self, parts: Sequence[Tensor], dim: int = -1) -> Tensor:
        """Return the whole tensor in the order of the row: the inverse of `split`.

        Args:
            parts: one tensor a rank, in the order of ranks, as all_gather gives them.
            dim: the sequence axis.

        Raises:
            PositionError: if there is not one part a rank, or a part has not n / ranks entries.
        """
        if len(parts) != self.ranks:
            raise PositionError(
                f"parts holds {len(parts)} tensors for {self.ranks} ranks; one a rank is required. Gather them first."
            )
        for number, part in enumerate(parts):
            self._check(part, dim, self.places.shape[1], f"parts[{number}]")
        check_alike(parts, dim)
        return torch.cat(list(parts), dim).index_select(dim, self.inverse.to(parts[0].device))

    def mask(
        self,
        rank: int,
        documents: Tensor | None = None,
        *,
        keys: Sequence[int] | None = None,
        causal: bool = True,
    ) -> Tensor:
        """Return `[rows, 1, n / ranks, m]` bool for SDPA: what the queries of one rank see of the keys at hand.

        It is the mask of the whole row with the queries of the rank taken, and the keys in the order said. A query that
        sees none of the keys, as in most steps of a ring, has a row of nothing but False: leave the step out for it,
        or merge steps by their log-sum-exp.

        Args:
            rank: whose queries.
            documents: `[n]` of the whole row, as `PackedIds.documents`, or `[rows, n]` of several dealt out alike, as
                `StackedIds.documents`; None for one document without padding.
            keys: ranks whose keys are at hand, end to end: `range(ranks)` after all_gather, `[other]` in one step of a
                ring. None: the keys of the whole row in its own order, as `join` gives them.
            causal: hide later places; the order is that of the row, wherever a key is held.

        Raises:
            PositionError: if there is no such rank, keys name one twice, or documents are not those of the row.

        Example:
            >>> context_shards(4, 2).mask(1, keys=[0])[0, 0].int().tolist()  # places 1, 2 of 0, 3
            [[1, 0], [1, 0]]
        """
        queries, held = self._sides(rank, documents, keys, causal=causal)
        return seen_mask(queries, held, causal=causal)

    def mask_mod(
        self,
        rank: int,
        documents: Tensor | None = None,
        *,
        keys: Sequence[int] | None = None,
        causal: bool = True,
    ) -> MaskRule:
        """Return `mask` as a mask_mod of `flex_attention`, for `create_block_mask`, or to be joined with another.

        Queries and keys count from 0 in the shard and in the keys at hand. Tensors that it reads lie where documents
        do, else where the shards do (`to`).
        """
        queries, held = self._sides(rank, documents, keys, causal=causal)
        return seen_rule(queries, held, causal=causal)

    def block_mask(
        self,
        rank: int,
        documents: Tensor | None = None,
        *,
        keys: Sequence[int] | None = None,
        causal: bool = True,
        block: int = 128,
    ) -> BlockMask:
        """Return `mask` for `flex_attention` without evaluating n x m pairs: see `documents.seen_blocks`."""
        queries, held = self._sides(rank, documents, keys, causal=causal)
        return seen_blocks(queries, held, block, causal=causal)

    def to(self, device: torch.device | str) -> Shards:
        """Return the same shards with their places on a device."""
        return Shards(self.places.to(device))

    @checked
    def _sides(
        self, rank: int, documents: Tensor | None, keys: Sequence[int] | None, *, causal: bool
    ) -> tuple[Tokens, Tokens]:
        """Return the queries of a rank, and the keys at hand; arguments of the masks are checked here."""
        del causal
        self._check_rank(rank, "rank")
        if documents is not None:
            counts = not documents.is_floating_point() and documents.dtype != torch.bool
            if documents.ndim not in (1, 2) or not counts:
                raise PositionError(
                    f"documents are {documents.dtype} of shape {tuple(documents.shape)}; whole numbers, [n] or "
                    "[rows, n], are required. Pass PackedIds.documents."
                )
            self._check(documents, -1, self.length, "documents")
        if keys is None:
            held = torch.arange(self.length, device=self.places.device)
        else:
            for one in keys:
                self._check_rank(one, "a rank of keys")
            if not len(keys) or len({int(one) for one in keys}) != len(keys):
                raise PositionError(
                    f"keys are of ranks {list(keys)}; at least one rank, and none twice, is required. Pass [rank] for "
                    "one shard, range(ranks) for all of them end to end."
                )
            held = self.places[[int(one) for one in keys]].flatten()
        return Tokens.at(self.places[rank], documents), Tokens.at(held, documents)

    def _check_rank(self, rank: int, name: str) -> None:
        if not 0 <= rank < self.ranks:
            raise PositionError(
                f"{name} is {rank} of {self.ranks}; 0 to {self.ranks - 1} is required. Pass the rank in the "
                "context-parallel group, not in the world."
            )

    def _check(self, x: Tensor, dim: int, entries: int, name: str) -> None:
        if not -x.ndim <= dim < x.ndim or x.shape[dim] != entries:
            raise PositionError(
                f"{name} has shape {tuple(x.shape)} and dim is {dim}; {entries} entries along dim are required. The "
                "sequence axis of ids [axes, b, n] is the last, of hidden states [b, n, d] it is 1."
            )


@checked
def context_shards(
    length: int, ranks: int, *, order: Order = "zigzag", cu_seqlens: Tensor | None = None
) -> Shards:
    """Return how a row is dealt out to the ranks of a context-parallel group.

    Args:
        length: n, places of the row.
        ranks: size of the group.
        order: "contiguous" gives each rank one stretch; "zigzag" cuts 2 x ranks stretches and gives rank r the r-th
            from either end, so that causal attention costs every rank the same.
        cu_seqlens: `[documents + 1]`, padding counted (`PackedIds.cu_seqlens_padded`): every document is dealt out by
            itself, as Megatron does for packed rows; the row as one when None.

    Returns:
        `Shards`, on the CPU.

    Raises:
        PositionError: if the row, or a document, does not divide evenly; the message says what must divide it.

    Example:
        >>> context_shards(16, 2).places.tolist()
        [[0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 8, 9, 10, 11]]
        >>> context_shards(4, 2, order="contiguous").places.tolist()
        [[0, 1], [2, 3]]

    Reference:
        NVIDIA Megatron-LM get_batch_on_this_cp_rank (zigzag); Transformer Engine's thd layout (by document).
    """
    check_choice("order", order, ("zigzag", "contiguous"))
    for name, value in (("length", length), ("ranks", ranks)):
        if not is_whole(value):
            raise PositionError(f"{name} is {value!r}; a whole number of at least 1 is required.")
    ends = [0, length] if cu_seqlens is None else _ends(cu_seqlens, length)
    pieces = 2 * ranks if order == "zigzag" else ranks
    held: list[list[Tensor]] = [[] for _ in range(ranks)]
    for number, (first, last) in enumerate(pairwise(ends)):
        if (last - first) % pieces:
            what, remedy = (
                ("length is", f"pad_to_multiple={pieces}")
                if cu_seqlens is None
                else (f"document {number} has", f"pad_each_to={pieces}")
            )
            raise PositionError(
                f"{what} {last - first} places for {ranks} ranks in order {order!r}; a multiple of {pieces} is "
                f"required. Pack with {remedy}."
            )
        stretches = torch.arange(first, last).view(pieces, -1)
        for rank, mine in enumerate(held):
            mine.append(stretches[rank])
            if order == "zigzag":
                mine.append(stretches[pieces - 1 - rank])
    return Shards(torch.stack([torch.cat(mine) for mine in held]))


def check_alike(parts: Sequence[Tensor], dim: int) -> None:
    """Refuse tensors that cannot be laid end to end along dim.

    Raises:
        PositionError: if two differ in another axis, or in the number of axes.
    """
    shapes = [(part.ndim, part.shape[:dim], part.shape[dim:][1:]) for part in parts]
    odd = next((number for number, shape in enumerate(shapes) if shape != shapes[0]), None)
    if odd is not None:
        raise PositionError(
            f"parts[{odd}] has shape {tuple(parts[odd].shape)} and parts[0] {tuple(parts[0].shape)}; equal sides but "
            f"along dim {dim} are required. Look for parts of different tensors."
        )


def _ends(cu_seqlens: Tensor, length: int) -> list[int]:
    """Return the boundaries of documents, after checking that they cover the row."""
    ends: list[int] = cu_seqlens.tolist() if cu_seqlens.ndim == 1 else []
    if (
        cu_seqlens.is_floating_point()
        or len(ends) < 2
        or ends[0] != 0
        or ends[-1] != length
        or ends != sorted(ends)
    ):
        raise PositionError(
            f"cu_seqlens is {ends} and length {length}; boundaries that rise from 0 to length are required. Pass "
            "cu_seqlens_padded, which counts padding."
        )
    return ends
