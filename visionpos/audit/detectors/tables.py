"""Detectors of position tables: rows that belong to no cell, sides that are swapped, resizing that aliases."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from visionpos.audit.detectors.finding import Check, UnfitError, judged
from visionpos.audit.result import Found
from visionpos.errors import PositionError
from visionpos.geometry.grid import Grid

Resize = Callable[[Tensor, tuple[int, int], tuple[int, int]], Tensor]
"""From a table `[n, d]`, its sides and the wanted sides to the table on them."""

MARGIN = 0.05
CONSTANT = 1e-12
ALIASED = 0.05
_CHECKERS, _WANTED = (24, 24), (14, 14)  # not a whole factor: one of those hides the fault


def class_token_offset(table: Tensor, grid: Grid, *, prefix: int = 0) -> Found:
    """Return whether rows of a table are shifted against the cells, as by a forgotten class token.

    Neighbouring rows of a trained table are alike but where a line of the grid ends: of the similarities of consecutive
    rows, averaged over the lines, the least must be at the last column. Tables without structure prove nothing.

    Args:
        table: `[rows, d]`.
        grid: cells that the rows should belong to, one frame.
        prefix: leading rows without cell.

    Raises:
        UnfitError: if the grid has fewer than three rows or columns: no phase can be seen.
    """
    rows = table.detach().double()
    cells = rows[prefix : prefix + grid.size]
    if len(rows) != prefix + grid.size:
        short = Check(
            value=float(abs(len(rows) - prefix - grid.size)),
            threshold=0.0,
            wrong=f"{len(rows)} rows for a prefix of {prefix} and {grid.height}x{grid.width} cells",
            remedy="Pass the grid that the table was trained on, and the number of its leading rows without cell.",
        )
        return judged("class_token_offset", [short], "")
    if min(grid.height, grid.width) < 3:
        raise UnfitError(
            f"a grid of {grid.height}x{grid.width} shows no phase; three rows and columns are needed"
        )
    alike = torch.nn.functional.cosine_similarity(cells[:-1], cells[1:], dim=-1)
    phase = torch.arange(len(alike)) % grid.width
    mean = torch.stack([alike[phase == column].mean() for column in range(grid.width)])
    least, next_least = mean.sort().values[:2].tolist()
    column = int(mean.argmin())
    noise = 4 / math.sqrt(cells.shape[-1] * (grid.height - 1))  # of rows without structure
    wrong = column != grid.width - 1 and next_least - least >= max(MARGIN, noise)
    check = Check(
        value=next_least - least if wrong else 0.0,
        threshold=MARGIN,
        wrong=f"lines seem to end at column {column} of {grid.width}, by a margin of {next_least - least:.2g}",
        remedy="Cut the rows of prefix tokens off, as many as the checkpoint has, before rows are given to cells.",
    )
    clear = next_least - least >= MARGIN and column == grid.width - 1
    healthy = (
        f"lines end at the last column, by a margin of {next_least - least:.2g}"
        if clear
        else "rows have no structure that would show an offset"
    )
    return judged("class_token_offset", [check], healthy)


def axis_order(code: Tensor, grid: Grid, *, row_channels: Tensor | None = None) -> Found:
    """Return whether a separable code, one axis a channel, has its axes or sides swapped.

    Args:
        code: `[n, channels]` of a grid with unequal sides, row-major; angles of a rotation will do.
        grid: its cells, one frame.
        row_channels: which channels should say y, indices or flags; when None either axis will do for any channel.

    Raises:
        UnfitError: if the sides are equal, or the code is not separable on this grid nor on the swapped one.
    """
    if grid.height == grid.width or min(grid.height, grid.width) < 2:
        raise UnfitError(
            f"sides {grid.height}x{grid.width} hide swapped axes; unequal ones are needed"
        )
    along_x, along_y = _spread(code, grid.height, grid.width)
    if row_channels is not None:
        is_row = torch.zeros(code.shape[-1], dtype=torch.bool)
        is_row[row_channels] = True
        wrong = torch.where(is_row, along_x, along_y)
    else:
        wrong = torch.minimum(along_x, along_y)
        turned = torch.minimum(*_spread(code, grid.width, grid.height))
        if float(wrong.max()) > CONSTANT and float(turned.max()) > CONSTANT:
            raise UnfitError("no channel belongs to one axis alone, so an order cannot be seen")
    value = float(wrong.max())
    check = Check(
        value=value,
        threshold=CONSTANT,
        wrong=f"channels that should belong to one axis vary along the other, by {value:.2g} of their variance",
        remedy="Number tokens row by row, x fastest, and give the grid as (height, width).",
    )
    return judged("axis_order", [check], "every channel follows its own axis")


def _spread(code: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Return the shares of each channel's variance within rows and within columns, `[channels]`."""
    if len(code) != height * width:
        raise PositionError(
            f"code has {len(code)} rows for {height}x{width} cells; one a cell is required. Cut prefix rows off."
        )
    lattice = code.detach().double().unflatten(0, (height, width))
    whole = lattice.var(dim=(0, 1), correction=0).clamp(min=torch.finfo(torch.float64).tiny)
    still = lattice.var(dim=(0, 1), correction=0) <= 1e-24
    shares = [
        torch.where(still, 0.0, lattice.var(dim=dim, correction=0).mean(0) / whole)
        for dim in (1, 0)
    ]
    return shares[0], shares[1]


def missing_antialias(resize: Resize, *, declared: bool = True) -> Found:
    """Return whether a table is made smaller without antialias: a checkerboard must become grey.

    Args:
        resize: what resizes a table.
        declared: whether its recipe has antialias; a source that has none is no fault, and then one that has is.
    """
    y, x = torch.meshgrid(*[torch.arange(float(side)) for side in _CHECKERS], indexing="ij")
    board = (1.0 - 2.0 * ((y + x) % 2)).flatten().unsqueeze(-1)
    small = resize(board, _CHECKERS, _WANTED)
    left = float(small.double().square().mean().sqrt())
    says = f"a checkerboard of 24x24 keeps {left:.2g} of its size on 14x14"
    if declared:
        check = Check(
            value=left,
            threshold=ALIASED,
            wrong=f"{says}: it aliases",
            remedy="Resize by the recipe of the source that wrote the weights; pass antialias=True if that has it.",
        )
    else:
        check = Check(
            value=left,
            threshold=ALIASED,
            wrong=f"{says}: it is antialiased, and the recipe is not",
            remedy="Resize by the recipe of the source that wrote the weights.",
            least=True,
        )
    healthy = says if declared else f"{says}, as its recipe without antialias does"
    return judged("missing_antialias", [check], healthy)
