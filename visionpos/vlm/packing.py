"""Packing: ragged images laid into rows of one token budget (NaViT, patch n' pack).

Grids enter, not pixels; a `Packed` leaves, which brings tokens into the rows and back.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from visionpos.errors import PositionError
from visionpos.geometry.fields import check_choice
from visionpos.geometry.grid import Grid, is_whole
from visionpos.geometry.ranges import is_integer
from visionpos.vlm.bins import Method, placed
from visionpos.vlm.packed import Packed
from visionpos.vlm.runs import checked_grids, kept_cells, run, spread


def pack_images(
    grids: Sequence[Grid],
    budget: int,
    *,
    method: Method = "first_fit",
    largest_first: bool = False,
    max_images: int | None = None,
    rows: int | None = None,
    prefix: int = 0,
    keep: Tensor | None = None,
) -> Packed:
    """Return images laid into rows of `budget` tokens, one document an image.

    Args:
        grids: the grid of every image (or clip), in arrival order; may be empty.
        budget: tokens of a row, at least 1.
        method: "first_fit" puts each image in the first row with room, in arrival order, as NaViT does; "best_fit" in
            the fullest row with room.
        largest_first: place large images first. Less padding; documents keep their arrival numbers.
        max_images: images a row may hold, for heads with a fixed number of slots.
        rows: make this many rows, for batches of a fixed shape; as many as needed when None.
        prefix: tokens before the patches of every image that have no position.
        keep: `[sum of grid sizes]` bool from `keep_tokens`; dropped tokens take no place, kept ones keep their cells.

    Returns:
        `Packed`, on the CPU; linear in tokens and about linear in images.

    Raises:
        PositionError: if an image is longer than the budget, images need more than `rows`, or a number is out of range.

    Example:
        >>> packed = pack_images([Grid(2, 2), Grid(1, 3), Grid(1, 2)], budget=6)
        >>> packed.documents.tolist()
        [[0, 0, 0, 0, 2, 2], [1, 1, 1, -1, -1, -1]]
        >>> packed.cu_seqlens.tolist(), packed.max_seqlen
        ([0, 4, 6, 9], 4)

    Reference:
        NaViT (arXiv 2307.06304), whose greedy packing this is in arrival order. vit-pytorch's
        group_images_by_max_seq_len opens a new row at the first image that does not fit and never looks back.
    """
    check_choice("largest_first", largest_first, (True, False))
    _check_numbers(budget=budget, max_images=max_images, rows=rows)
    if not is_integer(prefix) or prefix < 0:
        raise PositionError(
            f"prefix is {prefix!r}; a whole number of tokens, at least 0, is required."
        )
    grids = checked_grids(grids)
    cells, counts = kept_cells(grids, keep)
    lengths = counts + prefix
    _check_lengths(lengths, grids, budget, prefix)
    chosen, starts, needed = placed(
        lengths.tolist(), budget, method=method, largest_first=largest_first, most=max_images
    )
    if rows is not None and needed > rows:
        raise PositionError(
            f"rows is {rows} and the images need {needed} rows of {budget} tokens; at least that many are required. "
            "Take fewer images, drop tokens with keep=, or raise budget."
        )
    where = torch.tensor([chosen, starts], dtype=torch.int64)
    return _laid_out(grids, prefix, where, (cells, counts), (rows or needed, budget))


def _laid_out(
    grids: tuple[Grid, ...],
    prefix: int,
    where: Tensor,
    kept: tuple[Tensor | None, Tensor],
    shape: tuple[int, int],
) -> Packed:
    """Return the rows with the document and the cell of every place written in."""
    (chosen, starts), (cells, counts) = where, kept
    first = chosen * shape[1] + starts
    # Rows in a line are documents and gaps by turns: before each document, and after the last, a gap of 0 or more.
    order = first.argsort()
    begins, lengths = first[order], (counts + prefix)[order]
    gaps = torch.cat([begins, begins.new_tensor([shape[0] * shape[1]])])
    gaps[1:] -= begins + lengths
    pieces = _between(gaps, lengths)
    documents = spread(_between(torch.full_like(gaps, -1), order), pieces)
    zero = spread(_between(torch.full_like(gaps, 2**62), begins + prefix), pieces)
    own = torch.arange(len(zero)).sub_(zero).clamp_(min=-1)
    if cells is not None:
        own[run(first + prefix, counts)] = cells
    return Packed(grids, prefix, chosen, starts, counts, documents.view(shape), own.view(shape))


def _between(outer: Tensor, inner: Tensor) -> Tensor:
    """Return `[2 n + 1]`: outer, inner, outer, ... of `[n + 1]` and `[n]`."""
    return torch.cat([torch.stack([outer[:-1], inner], dim=-1).flatten(), outer[-1:]])


def _check_numbers(**numbers: int | None) -> None:
    for name, value in numbers.items():
        if not is_whole(value) and (value is not None or name == "budget"):
            raise PositionError(
                f"{name} is {value!r}; a whole number of at least 1 is required."
                + ("" if name == "budget" else " Leave it out for as many as needed.")
            )


def _check_lengths(lengths: Tensor, grids: tuple[Grid, ...], budget: int, prefix: int) -> None:
    over = (lengths > budget).nonzero()
    if len(over):
        image = int(over[0])
        raise PositionError(
            f"image {image} has {int(lengths[image])} tokens, grid {grids[image].shape} with prefix {prefix}, and "
            f"budget is {budget}; every image must fit into one row. Resize it, drop tokens of it with keep=, or raise "
            "budget."
        )
