"""Resampling: a learned table evaluated on any grid, or at any points, by named recipes.

A recipe is two small weight matrices, one for rows and one for columns: differentiable, free of token order,
exportable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from visionpos.errors import PositionError
from visionpos.geometry.recipes import Recipe, recipe_of

if TYPE_CHECKING:
    from torch import Tensor

    from visionpos.geometry.grid import Grid


def resample(
    table: Tensor,
    *,
    source: Grid,
    target: Grid,
    recipe: str | Recipe,
    prefix: int = 0,
    suffix: int = 0,
) -> Tensor:
    """Return a learned table evaluated on another grid.

    Args:
        table: `[..., prefix + n + suffix, d]`, row-major over `source`; any leading sizes.
        source: grid the table was trained on. It is never guessed.
        target: grid wanted.
        recipe: a name (see RECIPES) or a Recipe: the one of the source that wrote the weights.
        prefix: leading rows that belong to no cell (class token, registers); kept as they are.
        suffix: trailing rows that belong to no cell (BEiT's three class rows); kept as they are.

    Returns:
        `[..., prefix + target.size + suffix, d]` in the table's dtype; the table itself on equal grids. Tables in half
        precision are evaluated in float32.

    Raises:
        PositionError: if the rows do not match, or frames differ (tables are resized in space only).

    Example:
        >>> from visionpos.geometry.grid import Grid
        >>> ramp = torch.arange(4.0).repeat_interleave(4).unsqueeze(-1)
        >>> resample(ramp, source=Grid(4, 4), target=Grid(2, 1), recipe="timm").flatten()
        tensor([0.5868, 2.4132])

    Reference:
        Differs from F.interpolate by 2e-6 at most, where that computes the same recipe.
    """
    chosen = recipe_of(recipe)
    rows = table.shape[-2]
    if prefix < 0 or suffix < 0 or rows != prefix + source.size + suffix:
        raise PositionError(
            f"table has {rows} rows; prefix {prefix} + grid {source.height}x{source.width}x{source.frames} frames + "
            f"suffix {suffix} needs {prefix + source.size + suffix}. Pass the grid the table was trained on as source, "
            "and the number of rows that belong to no cell as prefix."
        )
    if source.frames != target.frames:
        raise PositionError(
            f"source has {source.frames} frames and target {target.frames}; tables are resized in space only. "
            "Give both the same frames."
        )
    if source == target:
        return table
    cells = table.narrow(-2, prefix, source.size)
    moved = _on_grid(cells, source, target, chosen)
    ends = (table.narrow(-2, 0, prefix), table.narrow(-2, rows - suffix, suffix))
    return torch.cat([ends[0], moved, ends[1]], dim=-2) if prefix or suffix else moved


def _on_grid(cells: Tensor, source: Grid, target: Grid, recipe: Recipe) -> Tensor:
    """Return `[..., target.size, d]` as rows matrix x table x columns matrix."""
    height = grid_weights(source.height, target.height, recipe, cells.device)  # [target, source]
    width = grid_weights(source.width, target.width, recipe, cells.device)
    dtype = torch.promote_types(torch.float32, cells.dtype)
    lattice = cells.to(dtype).unflatten(-2, (source.frames, source.height, source.width))
    # Autocast would run these products in bfloat16.
    with torch.autocast(device_type=cells.device.type, enabled=False):
        tall = height.to(dtype) @ lattice.flatten(-2)  # [..., t, target y, source x * d]
        tall = tall.unflatten(-1, lattice.shape[-2:])
        wide: Tensor = width.to(dtype) @ tall  # [..., t, target y, target x, d]
    return wide.flatten(-4, -2).to(cells.dtype)


def sample_table(
    table: Tensor,
    coords_yx: Tensor,
    *,
    source: Grid,
    extent_hw: tuple[float, float],
    recipe: str | Recipe,
) -> Tensor:
    """Return a learned table evaluated at any points: dropped tokens, crops, tiles, packed images.

    Args:
        table: `[source.size, d]`, row-major, without prefix rows.
        coords_yx: `[..., n, 2]` points in cells of the wanted lattice; whole numbers are its cell centres.
        source: grid the table was trained on, with one frame.
        extent_hw: sides of the wanted lattice in cells: how many cells span the whole table.
        recipe: a name or a Recipe.

    Returns:
        `[..., n, d]`; row-major integer coords of a Grid give `resample` exactly.

    Raises:
        PositionError: if shapes do not match, or the extent is not positive.
    """
    chosen = recipe_of(recipe)
    if coords_yx.shape[-1] != 2 or source.frames != 1 or table.shape[-2] != source.size:
        raise PositionError(
            f"coords_yx has {coords_yx.shape[-1]} axes, table {table.shape[-2]} rows and source {source.shape}; "
            "[n, 2] points and one table row a cell of a one-frame grid are required. Cut prefix rows off first."
        )
    if min(extent_hw) <= 0:
        raise PositionError(f"extent_hw is {extent_hw}; two sides above 0, in cells, are required.")
    points = coords_yx.to(torch.promote_types(torch.float32, table.dtype))
    rows = axis_weights(points[..., 0], source.height, extent_hw[0], chosen)  # [..., n, source y]
    columns = axis_weights(points[..., 1], source.width, extent_hw[1], chosen)
    lattice = table.to(points.dtype).unflatten(-2, (source.height, source.width))
    with torch.autocast(device_type=table.device.type, enabled=False):
        return torch.einsum("...ny,...nx,yxd->...nd", rows, columns, lattice).to(table.dtype)


def grid_weights(
    source: int, target: int, recipe: Recipe, device: torch.device | None = None
) -> Tensor:
    """Return the `[target, source]` weights of one axis; every row sums to 1."""
    # MPS has no float64; everywhere else it keeps the weights exact to the last float32 bit.
    dtype = torch.float32 if device is not None and device.type == "mps" else torch.float64
    return axis_weights(torch.arange(target, device=device, dtype=dtype), source, target, recipe)


def axis_weights(cells: Tensor, source: int, target: float, recipe: Recipe) -> Tensor:
    """Return how much every source cell weighs at each wanted cell, along one axis.

    Args:
        cells: `[...]` positions in wanted cells; whole numbers are cell centres.
        source: cells of the table on this axis.
        target: cells of the wanted lattice on this axis.
        recipe: kernel, sampling and antialias.

    Returns:
        `[..., source]` weights that sum to 1.
    """
    if recipe.kernel == "nearest":
        bucket = torch.floor(cells.round() * source / target).clamp(0, source - 1)
        return _at(bucket.long(), source, cells.dtype)
    if recipe.sampling == "geometric":
        return _geometric(cells, source, target)
    place = _source_place(cells, source, target, recipe)
    if recipe.antialias:
        return _widened(place, source, max(source / target, 1.0), recipe)
    return _tapped(place, source, recipe)


def _source_place(cells: Tensor, source: int, target: float, recipe: Recipe) -> Tensor:
    """Return where each wanted cell lies, in source cells."""
    if recipe.sampling == "align_corners":
        return cells * ((source - 1) / (target - 1)) if target > 1 else torch.zeros_like(cells)
    return (cells + 0.5) * (source / (target + recipe.drift)) - 0.5


def _widened(place: Tensor, source: int, width: float, recipe: Recipe) -> Tensor:
    """Return antialiased weights: the kernel stretched by the reduction, normalised over the cells that exist."""
    cells = torch.arange(source, device=place.device, dtype=place.dtype)
    distance = (cells - place.unsqueeze(-1)).abs() / width
    weight = _kernel(distance, recipe)
    return weight / weight.sum(-1, keepdim=True)


def _tapped(place: Tensor, source: int, recipe: Recipe) -> Tensor:
    """Return weights of the 2 or 4 nearest cells, the border cell standing in for those outside."""
    if recipe.kernel == "bilinear":
        place = place.clamp(0, source - 1)
    first = torch.floor(place)
    steps = (0, 1) if recipe.kernel == "bilinear" else (-1, 0, 1, 2)
    total = place.new_zeros(*place.shape, source)
    for step in steps:
        cell = first + step
        weight = _kernel((cell - place).abs(), recipe)
        total = total + weight.unsqueeze(-1) * _at(
            cell.clamp(0, source - 1).long(), source, place.dtype
        )
    return total


def _kernel(distance: Tensor, recipe: Recipe) -> Tensor:
    """Return the triangle, or Keys' cubic with coefficient a, at distances of at least 0."""
    if recipe.kernel == "bilinear":
        return (1.0 - distance).clamp(min=0.0)
    a = recipe.coefficient
    near = ((a + 2.0) * distance - (a + 3.0)) * distance * distance + 1.0
    far = ((a * distance - 5.0 * a) * distance + 8.0 * a) * distance - 4.0 * a
    return torch.where(
        distance <= 1.0, near, torch.where(distance < 2.0, far, torch.zeros_like(far))
    )


def _at(index: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """Return `[..., size]`, one at the index and zero elsewhere."""
    return (index.unsqueeze(-1) == torch.arange(size, device=index.device)).to(dtype)


def _geometric(cells: Tensor, source: int, target: float) -> Tensor:
    """Return BEiT's weights: source samples spaced by a geometric series, read linearly.

    Short offsets keep their place and long ones are squeezed. Reference: microsoft/unilm beit (its run_class_finetuning
    resizes relative tables so); the ratio is searched by bisection in [1.01, 1.5].
    """
    if source % 2 == 0 or target % 2 == 0:
        raise PositionError(
            f"geometric sampling got {source} and {target} offsets; relative tables have an odd number, 2 * "
            "window - 1. "
            "Use another recipe for tables of absolute positions."
        )
    if source == 1:
        return torch.ones_like(cells).unsqueeze(-1)
    half, reach = source // 2, target // 2
    ratio = _series_ratio(half, reach)
    steps = [sum(ratio**power for power in range(count)) for count in range(1, half + 1)]
    knots = torch.tensor([-step for step in reversed(steps)] + [0.0, *steps], dtype=cells.dtype).to(
        cells.device
    )
    place = (cells - reach).clamp(knots[0], knots[-1])
    right = torch.searchsorted(knots, place.contiguous()).clamp(1, source - 1)
    share = ((place - knots[right - 1]) / (knots[right] - knots[right - 1])).unsqueeze(-1)
    return (
        _at(right - 1, source, cells.dtype) * (1 - share) + _at(right, source, cells.dtype) * share
    )


def _series_ratio(count: int, reach: float) -> float:
    """Return the ratio whose series of `count` steps sums to `reach`, within BEiT's search range."""
    low, high, ratio = 1.01, 1.5, 1.5
    while high - low > 1e-6:
        ratio = (low + high) / 2.0
        total = (1.0 - ratio**count) / (1.0 - ratio)
        low, high = (low, ratio) if total > reach else (ratio, high)
    return ratio
