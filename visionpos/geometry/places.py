"""Places: points and the sides of the lattice they lie in, held against what a table can serve.

Tensors enter; nothing leaves, or a refusal. Values are looked at only where that waits for no device.
"""

from __future__ import annotations

import math
import numbers
from typing import Any

import torch
from torch import Tensor

from visionpos.errors import PositionError
from visionpos.geometry.points import check_finite, readable

Extent = tuple[float, float] | Tensor


def check_points(
    points: Tensor,
    axes: int | None,
    name: str,
    *,
    extent: Extent | None = None,
    rank: int = 1,
) -> None:
    """Refuse points of another rank, and, where that costs no wait for a device, points that are nowhere.

    Args:
        points: `[..., axes]`.
        axes: numbers a point must have; any number of at least 1 when None.
        name: of the argument.
        rank: the least number of dimensions: 2 where a lone point has to be a list of one.
        extent: sides of the lattice in cells; points must lie between its outer edges, half a cell around its centres.

    Raises:
        PositionError: naming the argument, if the rank differs or the extent is none; on the CPU also for NaN, infinity
            and points outside.
    """
    if not isinstance(points, Tensor):
        raise PositionError(
            f"{name} is {points!r}; a tensor [..., n, axes] of coordinates is required. Make it with torch.tensor."
        )
    if points.is_complex() or points.dtype == torch.bool:
        raise PositionError(
            f"{name} are {points.dtype}; real numbers are required. Pass coordinates, not a mask of tokens."
        )
    found = points.shape[-1] if points.ndim else 0
    if found < 1 or (axes is not None and found != axes):
        raise PositionError(
            f"{name} has {found} axes, shape {tuple(points.shape)}; [..., n, {axes or 'axes'}], one number an axis, is "
            "required."
        )
    if points.ndim < rank:
        raise PositionError(
            f"{name} has shape {tuple(points.shape)}; [..., n, {found}] is required. Use unsqueeze(0) for a single "
            "point."
        )
    if extent is not None:
        check_extent(extent, points)
    check_finite(points, name)
    if extent is not None:
        _check_inside(points, torch.as_tensor(extent), name)


def check_extent(extent: Any, points: Tensor, *, name: str = "extent_hw") -> None:
    """Refuse sides of a lattice that are not two finite numbers above 0, or such a pair for every sample.

    Args:
        extent: two numbers, or a tensor `[..., 2]` without the axis of the points, read on the CPU alone.
        points: `[..., n, 2]`, which lie in the lattice.
        name: of the argument.

    Raises:
        PositionError: naming the argument and its value.
    """
    if not isinstance(extent, Tensor):
        return check_sides(extent, name=name)
    lead = points.shape[:-2]
    own = extent.shape[:-1]
    fits = extent.ndim >= 1 and extent.shape[-1] == 2 and len(own) <= len(lead)
    pairs = zip(reversed(own), reversed(lead), strict=False)
    if not fits or not all(mine in (side, 1) for mine, side in pairs):
        raise PositionError(
            f"{name} has shape {tuple(extent.shape)} for points {tuple(points.shape)}; [..., 2], one pair a "
            "sample, is required. Leave out the axis of the points."
        )
    if readable(extent) and not bool(
        ((extent > 0) & extent.isfinite()).all()
    ):  # NaN compares false
        raise PositionError(
            f"{name} is {extent.tolist()}; two sides above 0, in cells, are required for every sample. Give samples "
            "without tokens any side, and mask them out."
        )
    return None


def check_sides(sides: Any, *, name: str = "extent_hw") -> None:
    """Refuse what is not two finite numbers above 0."""
    if not torch.compiler.is_compiling():
        good = isinstance(sides, (tuple, list)) and len(sides) == 2 and all(map(_is_number, sides))
    else:
        good = len(sides) == 2
    if not good or not all(side > 0 for side in sides):
        raise PositionError(
            f"{name} is {sides!r}; two sides above 0, in cells, are required. Give (height, width)."
        )


def check_whole(points: Tensor, name: str) -> None:
    """Refuse points between the cells, where that costs no wait for a device.

    Raises:
        PositionError: naming the argument and a fraction.
    """
    if not readable(points) or not points.is_floating_point():
        return
    between = points != points.round()
    if bool(between.any()):
        raise PositionError(
            f"{name} hold {points[between].tolist()[0]:g}, between two cells; whole numbers are required, a table has "
            "one entry a cell. Round them, or use an encoding of any points."
        )


def _is_number(side: Any) -> bool:
    """Return whether a side is a finite number; exporting passes symbolic ones."""
    if isinstance(side, Tensor):
        return side.ndim == 0
    symbolic = isinstance(side, (torch.SymInt, torch.SymFloat))
    plain = isinstance(side, numbers.Real) and not isinstance(side, bool)
    return symbolic or (plain and math.isfinite(side))


def _check_inside(points: Tensor, sides: Tensor, name: str) -> None:
    """Refuse points beyond the outer edges of a lattice."""
    if not readable(points) or not readable(sides) or not points.numel():
        return
    last = (sides.unsqueeze(-2) if sides.ndim > 1 else sides) - 0.5
    slack = 1e-4  # coordinates computed in float32
    outside = (points < -0.5 - slack) | (points > last + slack)
    if bool(outside.any()):
        worst = points[outside].tolist()[0]
        raise PositionError(
            f"{name} reach {worst:g}, outside a lattice of {sides.tolist()} cells, which ends half a cell around its "
            "centres; points inside are required. Clamp them, pass the sides of the whole lattice, or mask padding "
            "out with valid=."
        )
