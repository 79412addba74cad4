"""Coupling: tokens that mean the same place share one id: digits of one weight, cells of one spot of a picture."""

from __future__ import annotations

import torch
from torch import Tensor

from visionpos.errors import PositionError
from visionpos.geometry.arguments import checked
from visionpos.geometry.grid import Grid
from visionpos.geometry.ranges import check_counts
from visionpos.geometry.sequence import LARGEST, drawn

FIRST_COUPLED = 1  # id 0 of a coupled table is the padding's


@checked
def coupled_addition(
    first: int, second: int, answer: int, *, start: int = FIRST_COUPLED, is_reversed: bool = False
) -> Tensor:
    """Return ids for the text a+b=c, in which digits of equal weight have one id.

    Args:
        first: digits of a.
        second: digits of b.
        answer: digits of c.
        start: id of "+"; digits count up from it, from the least significant on. At least 1: id 0 is the padding's.
        is_reversed: whether the answer is written from its least significant digit on; "=" then has the id of "+".

    Returns:
        `[first + second + answer + 2]` int64, for a learned table.

    Raises:
        PositionError: if a count is below 1 or start is.

    Example:
        >>> coupled_addition(3, 2, 3).tolist()  # 123+45=168
        [4, 3, 2, 1, 3, 2, 5, 4, 3, 2]

    Reference:
        Position coupling (arXiv 2405.20671), HanseulJo/position-coupling src/data/addition.py.
    """
    check_counts(first=first, second=second, answer=answer, start=start)
    if start + max(first, second, answer) + 1 > LARGEST:
        raise PositionError(
            f"start is {start}; ids up to 2**63 - 1 can be held. Count from a smaller one."
        )
    parts = [list(range(start + digits, start, -1)) for digits in (first, second, answer)]
    equals = start if is_reversed else start + answer + 1
    written = parts[2][::-1] if is_reversed else parts[2]
    return torch.tensor([*parts[0], start, *parts[1], equals, *written])


@checked
def coupled_start(limit: int, digits: int, *, generator: torch.Generator) -> int:
    """Return a random `start` of `coupled_addition` with which all ids stay in a table.

    Args:
        limit: rows of the table, id 0 with them.
        digits: of the longest number; the largest id is start + digits + 1.
        generator: source of the draw.

    Raises:
        PositionError: if the table has no room.

    Example:
        >>> 1 <= coupled_start(10, 3, generator=torch.Generator().manual_seed(0)) <= 5
        True
    """
    check_counts(limit=limit, digits=digits)
    last = limit - digits - 2
    if last < FIRST_COUPLED:
        raise PositionError(
            f"limit is {limit} for numbers of {digits} digits; at least {digits + 3} rows are required. Enlarge the "
            "table."
        )
    return drawn(FIRST_COUPLED, last, generator)


@checked
def coupled_cells(grid: Grid, onto: Grid) -> Tensor:
    """Return, for every cell of a grid, the cell of another view of the same picture that shows its centre.

    Ids of the other view, looked up there, are shared by cells that correspond: of a thumbnail and its tiles, or of two
    pictures of one size.

    Args:
        grid: the view that takes ids over, one frame.
        onto: the view that has them, one frame.

    Returns:
        `[n]` int64, row-major numbers of cells of `onto`.

    Raises:
        PositionError: if a view has several frames.

    Example:
        >>> coupled_cells(Grid(2, 2), Grid(4, 4)).tolist()
        [5, 7, 13, 15]

    Reference:
        ID-Align (arXiv 2505.21465) shares the ids of a thumbnail with its tiles.
    """
    if grid.frames > 1 or onto.frames > 1:
        raise PositionError(
            f"grids have {grid.frames} and {onto.frames} frames; pictures are required. Couple frame by frame."
        )
    rows = (2 * torch.arange(grid.height) + 1) * onto.height // (2 * grid.height)
    columns = (2 * torch.arange(grid.width) + 1) * onto.width // (2 * grid.width)
    return (rows.unsqueeze(1) * onto.width + columns).flatten()
