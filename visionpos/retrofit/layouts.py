"""Layouts: the axes of a position table, and the table moved to other sides whatever its axes are.

Every layout is brought to rows of cells `[..., prefix + n + extra, d]`, resampled, and brought back. Relative tables
have a cell a difference: a window of h x w has (2h - 1) x (2w - 1) of them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from visionpos.errors import PositionError
from visionpos.geometry import Grid, resample

if TYPE_CHECKING:
    from torch import Tensor

    from visionpos.retrofit.paths import Sides
    from visionpos.retrofit.seam_rows import TableLayout

_DIFFERENCES = ("offsets_heads", "heads_map", "heads_offsets", "hwc", "axis_h", "axis_w")
_DIRECT = "direct:"


def moved_table(
    table: Tensor,
    *,
    layout: TableLayout,
    source: Sides,
    target: Sides,
    recipe: str,
    prefix: int = 0,
    extra: int = 0,
) -> Tensor:
    """Return a table evaluated for other sides, in its own layout.

    Args:
        table: parameter in `layout`.
        layout: order of its axes.
        source: (rows, columns) of the grid or window it belongs to.
        target: those wanted.
        recipe: how; "direct:<recipe>" resamples a table of absolute differences as if it were an image, as TinyViT and
            timm do, where the plain name resamples the two-sided table that it stands for.
        prefix: leading rows without a cell.
        extra: trailing rows without a cell.

    Raises:
        PositionError: if the table does not have the rows of its sides, or there is no such recipe.
    """
    direct = recipe.startswith(_DIRECT) and layout == "heads_offsets"
    order: TableLayout = "heads_map" if direct else layout
    old, new = (lattice(layout, sides, direct=direct) for sides in (source, target))
    if direct:
        table = table.unflatten(-1, source)
    rows = _rows(table, order, source)
    name = recipe.removeprefix(_DIRECT)
    moved = resample(rows, source=old, target=new, recipe=name, prefix=prefix, suffix=extra)
    back = _back(moved, order, new, target, table)
    return back.flatten(-2) if direct else back


def check_rows(table: Tensor, layout: TableLayout, sides: Sides, prefix: int, extra: int) -> None:
    """Refuse a table that does not have the rows of its sides."""
    if layout in ("none", "axis_line"):
        return
    grid = lattice(layout, sides)
    rows = _rows(table, layout, sides).shape[-2]
    if rows != prefix + grid.size + extra:
        raise PositionError(
            f"table has {rows} rows; prefix {prefix} + grid {grid.height}x{grid.width} + {extra} extra rows needs "
            f"{prefix + grid.size + extra}. Give the model a table of its own grid."
        )


def lattice(layout: TableLayout, sides: Sides, *, direct: bool = False) -> Grid:
    """Return the grid of a table's cells: the grid it serves, or one cell a difference."""
    if layout in _DIFFERENCES and not direct:
        return Grid(2 * sides[0] - 1, 2 * sides[1] - 1)
    return Grid(*sides)


def sides_of_shape(layout: TableLayout, shape: tuple[int, ...]) -> Sides | None:
    """Return the sides that a table's own shape tells, None where it does not."""
    found: Sides | None = None
    match layout:
        case "nhwc":
            found = shape[-3], shape[-2]
        case "nchw":
            found = shape[-2], shape[-1]
        case "heads_map":
            found = (shape[-2] + 1) // 2, (shape[-1] + 1) // 2
        case "hwc":
            found = (shape[0] + 1) // 2, (shape[1] + 1) // 2
        case "axis_h":
            found = (shape[0] + 1) // 2, 1
        case "axis_w":
            found = 1, (shape[0] + 1) // 2
        case "blocks":
            side = math.isqrt(shape[1]) * math.isqrt(shape[2])
            found = side, side
        case _:
            pass
    return found


def _rows(table: Tensor, layout: TableLayout, sides: Sides) -> Tensor:
    """Return a table as rows of cells `[..., rows, d]`."""
    rows = table
    match layout:
        case "nhwc":
            rows = table.flatten(-3, -2)
        case "hwc":
            rows = table.flatten(0, 1)
        case "nchw" | "heads_map":
            rows = table.flatten(-2).mT
        case "heads_offsets":
            rows = _both_sides(table, sides) if table.shape[-1] == sides[0] * sides[1] else table.mT
        case "blocks":
            count, inside = math.isqrt(table.shape[1]), math.isqrt(table.shape[2])
            joined = table.unflatten(2, (inside, inside)).unflatten(1, (count, count))
            rows = joined.transpose(2, 3).flatten(1, 4)  # [1, y of the map * x of the map, d]
        case _:
            pass
    return rows


def _both_sides(quarter: Tensor, sides: Sides) -> Tensor:
    """Return `[(2h - 1)(2w - 1), heads]`, the two-sided table of `[heads, h * w]` absolute differences."""
    cells: Tensor = quarter.unflatten(-1, sides)
    for axis, side in ((-2, sides[0]), (-1, sides[1])):
        cells = cells.index_select(axis, torch.arange(1 - side, side, device=cells.device).abs())
    return cells.flatten(-2).mT


def _back(rows: Tensor, layout: TableLayout, lattice: Grid, sides: Sides, like: Tensor) -> Tensor:
    """Return rows of cells in a table's own layout."""
    inner = (lattice.height, lattice.width)
    table: Tensor = rows
    match layout:
        case "nhwc":
            table = rows.unflatten(-2, inner)
        case "hwc":
            table = rows.unflatten(0, inner)
        case "nchw" | "heads_map":
            table = rows.mT.unflatten(-1, inner)
        case "heads_offsets":
            table = rows.mT.unflatten(-1, inner)[..., sides[0] - 1 :, sides[1] - 1 :].flatten(-2)
        case "blocks":
            count = math.isqrt(like.shape[1])
            cells = (count, lattice.height // count, count, lattice.width // count)
            joined = rows.unflatten(1, cells).transpose(2, 3)
            table = joined.flatten(3, 4).flatten(1, 2)
        case _:
            pass
    return table.contiguous()
