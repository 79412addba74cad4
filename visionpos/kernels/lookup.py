"""Products of queries, or keys, with a table of differences, read by pairs of tokens: dense, or one pair at a time.

`q . table` has one number a query and row of the table: never a vector a pair.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from visionpos.geometry.relative import linear_index

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from visionpos.geometry.grid import Grid

    ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Lookup:
    """A product, and which of its columns a coordinate difference reads.

    Args:
        products: `[b, heads, tokens, rows]`, of queries (the last tokens of the grid), or of keys.
        places: `[distinct]` int64, the row of the table, in `distinct_offsets` order.
        of_key: whether the tokens are keys.
    """

    products: Tensor
    places: Tensor
    of_key: bool = False


def looked_up(lookups: tuple[Lookup, ...], grid: Grid, queries: int) -> Tensor:
    """Return `[b, heads, queries, m]`, the sum of what every pair reads; queries are the last tokens of the grid."""
    rows, columns = linear_index(grid, device=lookups[0].places.device)
    pairs = rows[grid.size - queries :].unsqueeze(1) - columns  # [n, m], for all heads and samples
    index = first = lookups[0].places
    total: Tensor | None = None
    for lookup in lookups:
        if (
            total is None or lookup.places is not first
        ):  # terms that read the same rows share their index
            index, first = lookup.places[pairs], lookup.places
        part = _dense(lookup, index)
        total = part if total is None else total + part
    assert total is not None  # noqa: S101 (there is at least one)
    return total


def _dense(lookup: Lookup, index: Tensor) -> Tensor:
    lead = lookup.products.shape[:2]
    if lookup.of_key:
        turned = index.mT.contiguous()  # a gather by a strided index takes three times as long
        return lookup.products.gather(-1, turned.expand(*lead, *turned.shape)).mT
    return lookup.products.gather(-1, index.expand(*lead, *index.shape))


def lookup_score(lookups: tuple[Lookup, ...], grid: Grid, queries: int) -> ScoreMod:
    """Return the same as a score function: its memory is the products', a row of the table a token."""
    rows, columns = linear_index(grid, device=lookups[0].places.device)
    rows, columns = rows[grid.size - queries :].clone(), columns.clone()

    def score(score: Tensor, b: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        pair = rows[q] - columns[k]
        for lookup in lookups:
            token = k if lookup.of_key else q
            found = lookup.products[b, head, token, lookup.places[pair]]
            score = score + found.to(score.dtype)
        return score

    return score


def spent(weights: Tensor, places: Tensor, rows: int, grid: Grid) -> Tensor:
    """Return `[b, heads, n, rows]`, how much of every query's attention falls on each row of a table.

    Args:
        weights: attention `[b, heads, n, m]`; queries are the last tokens of the grid.
        places: as in `Lookup`.
        rows: of the table.
        grid: the lattice of the keys.
    """
    starts, columns = linear_index(grid, device=weights.device)
    index = places[starts[grid.size - weights.shape[-2] :].unsqueeze(1) - columns]
    room = torch.zeros(*weights.shape[:-1], rows, dtype=weights.dtype, device=weights.device)
    return room.scatter_add(-1, index.expand_as(weights), weights)
