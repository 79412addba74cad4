"""Lattice: angles and waves of a whole grid from those of its sides; coordinates of all its tokens enter."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from visionpos.geometry.freqs import angles
from visionpos.geometry.waves import waves

if TYPE_CHECKING:
    from torch import Tensor

    from visionpos.geometry.grid import Grid


def ticks(cells: Tensor, grid: Grid) -> list[Tensor]:
    """Return the coordinates along each axis, `[side]`, of a grid whose rows, columns and frames share them.

    Args:
        cells: `[n, axes]` from `coordinates`, row-major, axes (t,) y, x; with 2 axes the frames of a clip repeat.
        grid: their grid.
    """
    axes = cells.shape[-1]
    sides = (grid.size,) if axes == 1 else grid.shape[3 - axes :]
    one = cells if axes != 2 else cells.narrow(0, 0, grid.height * grid.width)
    lattice = one.unflatten(0, sides)
    lines = []
    for axis in range(axes):
        first = tuple(slice(None) if other == axis else 0 for other in range(axes))
        lines.append(lattice[(*first, axis)])
    return lines


def lattice_angles(cells: Tensor, grid: Grid, freqs: Tensor) -> Tensor:
    """Return `angles(cells, freqs)` of all tokens of a grid, bit for bit, multiplied once a side and not once a cell.

    Args:
        cells: `[n, axes]`, as in `ticks`.
        grid: their grid.
        freqs: `[axes, pairs]` radians per coordinate unit.

    Returns:
        `[n, pairs]` radians, float32 or better.

    Example:
        >>> from visionpos.geometry.coords import coordinates
        >>> from visionpos.geometry.grid import Grid
        >>> grid, freqs = Grid(2, 3), torch.tensor([[1.0, 0.5], [0.1, 2.0]])
        >>> cells = coordinates(grid)
        >>> torch.equal(lattice_angles(cells, grid, freqs), angles(cells, freqs))
        True
    """
    lines = ticks(cells, grid)
    total = None
    for axis, line in enumerate(lines):
        turns = angles(line.unsqueeze(-1), freqs[axis : axis + 1])  # [side, pairs]
        spread = turns.view(
            [-1 if other == axis else 1 for other in range(len(lines))] + [turns.shape[-1]]
        )
        total = spread if total is None else total + spread
    assert total is not None  # noqa: S101 (coordinates have at least one axis)
    flat = total.flatten(0, -2)
    clip = len(lines) == 2 and grid.frames > 1
    return flat.repeat(grid.frames, 1) if clip else flat


def crossed_waves(high: Tensor, wide: Tensor) -> Tensor:
    """Return `waves(high + wide)`, all sines then all cosines, from the waves of the two.

    By products that round alike for one point and for a grid: a cell's code is that of a point on its centre, bit for
    bit. Closer to float64 than the sine of a rounded sum, and a grid of h x w cells needs the waves of h + w lines.

    Args:
        high: `[..., pairs]` radians.
        wide: `[..., pairs]` radians; the two broadcast.

    Returns:
        `[..., 2 * pairs]` in their dtype.

    Example:
        >>> crossed_waves(torch.tensor([0.25]), torch.tensor([0.75])).round(decimals=4)
        tensor([0.8415, 0.5403])
    """
    (sin_y, cos_y), (sin_x, cos_x) = waves(high).chunk(2, -1), waves(wide).chunk(2, -1)
    turned = torch.cat([cos_x, -sin_x], -1) * torch.cat([sin_y, sin_y], -1)
    # In place, into a tensor of our own: on large grids fresh memory costs more than the products.
    return turned.add_(torch.cat([sin_x, cos_x], -1) * torch.cat([cos_y, cos_y], -1))


def owned_waves(cells: Tensor, grid: Grid, freqs: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of `angles(cells, freqs)`, bit for bit, where every pair is driven by one axis.

    Args:
        cells: `[n, axes]`, as in `ticks`.
        grid: their grid.
        freqs: `[axes, pairs]`, at most one number of a column not 0.

    Returns:
        Two of `[n, pairs]`: copies of the waves of h + w lines.

    Example:
        >>> from visionpos.geometry.coords import coordinates
        >>> from visionpos.geometry.grid import Grid
        >>> cos, _ = owned_waves(coordinates(Grid(2, 3)), Grid(2, 3), torch.eye(2))
        >>> torch.equal(cos, angles(coordinates(Grid(2, 3)), torch.eye(2)).cos())
        True
    """
    lines = ticks(cells, grid)
    owner = freqs.abs().argmax(0)  # [pairs]; a pair that stands still is anyone's
    parts = []
    for axis, line in enumerate(lines):
        turns = angles(line.unsqueeze(-1), freqs[axis : axis + 1])  # [side, pairs]
        both = torch.stack([turns.cos(), turns.sin()]) * (owner == axis)
        shape = [-1 if other == axis else 1 for other in range(len(lines))]
        parts.append(both.unflatten(1, shape))  # [2, (t,) y, x, pairs]
    joined = parts[0]
    for part in parts[1:]:
        joined = joined + part
    cos, sin = joined.flatten(1, -2)
    clip = len(lines) == 2 and grid.frames > 1
    return (cos.repeat(grid.frames, 1), sin.repeat(grid.frames, 1)) if clip else (cos, sin)
