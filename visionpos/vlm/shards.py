"""Shards: which places of a row each rank of a context-parallel group holds, and the way back.

Every tensor of a row is cut along its sequence axis by one map: tokens, types, labels, and ids `[axes, b, n]`, whose
first axis is no sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from visionpos.errors import PositionError
from visionpos.geometry.arguments import checked
from visionpos.geometry.fields import check_choice
from visionpos.geometry.grid import is_whole

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
        if not 0 <= rank < self.ranks:
            raise PositionError(
                f"rank is {rank} of {self.ranks}; 0 to {self.ranks - 1} is required. Pass the rank in the "
                "context-parallel group, not in the world."
            )
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
