"""Resampling: a learned table evaluated on any grid, or at any points, by named recipes.

A recipe is two small weight matrices, one for rows and one for columns: differentiable, free of token order,
exportable.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from visionpos.errors import PositionError
from visionpos.geometry.grid import check_grid
from visionpos.geometry.places import check_extent, check_points, check_sides
from visionpos.geometry.points import check_floats, known
from visionpos.geometry.precision import full_precision
from visionpos.geometry.ranges import is_integer
from visionpos.geometry.recipes import Recipe, recipe_of
from visionpos.geometry.weights import axis_weights, bucket, exact_dtype, grid_weights

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
    extent_hw: tuple[int, int] | None = None,
) -> Tensor:
    """Return a learned table evaluated on another grid.

    Args:
        table: `[..., prefix + n + suffix, d]`, row-major over `source`; any leading sizes.
        source: grid the table was trained on. It is never guessed.
        target: grid wanted.
        recipe: a name (see RECIPES) or a Recipe: the one of the source that wrote the weights.
        prefix: leading rows that belong to no cell (class token, registers); kept as they are.
        suffix: trailing rows that belong to no cell (BEiT's three class rows); kept as they are.
        extent_hw: sides of the lattice that the whole table spans, of which `target` is the top left part; target's
            own sides when None.

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
    check_floats(table, "table")
    check_grid(source, "source")
    check_grid(target, "target")
    rows = table.shape[-2] if table.ndim > 1 else 0
    counts = is_integer(prefix) and is_integer(suffix) and prefix >= 0 and suffix >= 0
    if not counts or rows != prefix + source.size + suffix:
        needed = prefix + source.size + suffix if counts else "counts of at least 0"
        raise PositionError(
            f"table has {rows} rows; prefix {prefix!r} + grid {source.height}x{source.width}x{source.frames} frames + "
            f"suffix {suffix!r} needs {needed}. Pass the grid the table was trained on as source, "
            "and the number of rows that belong to no cell as prefix."
        )
    if source.frames != target.frames:
        raise PositionError(
            f"source has {source.frames} frames and target {target.frames}; tables are resized in space only. "
            "Give both the same frames."
        )
    if extent_hw is not None:
        check_sides(extent_hw)
    if extent_hw is None and same_grid(source, target):
        return table
    span = extent_hw or (target.height, target.width)
    if _writes(table) and chosen.kernel != "nearest":
        shape = (*table.shape[:-2], prefix + target.size + suffix, table.shape[-1])
        whole = table.new_empty(shape)
        whole[..., :prefix, :] = table[..., :prefix, :]
        whole[..., prefix + target.size :, :] = table[..., prefix + source.size :, :]
        cells = whole.narrow(-2, prefix, target.size)
        _on_grid(table.narrow(-2, prefix, source.size), source, target, chosen, span, out=cells)
        return whole
    moved = _on_grid(table.narrow(-2, prefix, source.size), source, target, chosen, span)
    ends = (table.narrow(-2, 0, prefix), table.narrow(-2, rows - suffix, suffix))
    return torch.cat([ends[0], moved, ends[1]], dim=-2) if prefix or suffix else moved


def _writes(table: Tensor) -> bool:
    """Return whether a result may be written where it belongs, without a copy behind the product."""
    plain = not (torch.is_grad_enabled() and table.requires_grad) and not torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    return plain and known(table) and table.dtype in (torch.float32, torch.float64)


def same_grid(source: Grid, target: Grid) -> bool:
    """Return whether two grids are equal; False while an export leaves sides open, whose program must serve both.

    A plain comparison would tie the program to its example, without a word. Weights of equal grids are an identity.
    """
    if not torch.compiler.is_exporting():
        return source == target
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    pairs = zip(source.shape, target.shape, strict=True)
    return all(statically_known_true(one == other) for one, other in pairs)


def _on_grid(
    cells: Tensor,
    source: Grid,
    target: Grid,
    recipe: Recipe,
    extent_hw: tuple[int, int],
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Return `[..., target.size, d]` as rows matrix x table x columns matrix, written to `out` where one is given."""
    high, wide = extent_hw
    if recipe.kernel == "nearest":
        return _gathered(cells, source, target, recipe, extent_hw)
    recipe = _as_trained(recipe, extent_hw, source)
    dtype = torch.promote_types(torch.float32, cells.dtype)
    height = _weights(source.height, target.height, recipe, cells, high)
    width = _weights(source.width, target.width, recipe, cells, wide)
    lattice = cells.to(dtype).unflatten(-2, (source.frames, source.height, source.width))
    with full_precision(cells.device):
        tall = height @ lattice.flatten(-2)  # [..., t, target y, source x * d]
        tall = tall.unflatten(-1, lattice.shape[-2:])
        if out is not None:
            torch.matmul(width, tall, out=out.unflatten(-2, target.shape))
            return out
        moved: Tensor = width @ tall  # [..., t, target y, target x, d]
    return moved.flatten(-4, -2).to(cells.dtype)


def _weights(source: int, target: int, recipe: Recipe, like: Tensor, span: int) -> Tensor:
    """Return the `[target, source]` weights of one axis, in the dtype of the product."""
    dtype = torch.promote_types(torch.float32, like.dtype)
    if not known(like) or type(target) is not int:
        return grid_weights(source, target, recipe, like.device, span=span).to(dtype)
    return _kept_weights(source, target, recipe, like.device, span, dtype)


@lru_cache(maxsize=256)  # a pure function of its arguments; nothing writes to what it returns
def _kept_weights(
    source: int, target: int, recipe: Recipe, device: torch.device, span: int, dtype: torch.dtype
) -> Tensor:
    """Return weights that were made once: plain tensors, whatever mode the first call was in."""
    with torch.inference_mode(mode=False):
        return grid_weights(source, target, recipe, device, span=span).to(dtype)


def _gathered(
    cells: Tensor, source: Grid, target: Grid, recipe: Recipe, extent_hw: tuple[int, int]
) -> Tensor:
    """Return `[..., target.size, d]` where every wanted cell is one cell of the table."""
    exact = exact_dtype(cells.device)
    high, wide = extent_hw
    y = bucket(
        torch.arange(target.height, device=cells.device, dtype=exact), source.height, high, recipe
    )
    x = bucket(
        torch.arange(target.width, device=cells.device, dtype=exact), source.width, wide, recipe
    )
    frames: Tensor = cells.unflatten(-2, (source.frames, -1))
    picked = frames.index_select(-2, (y.unsqueeze(-1) * source.width + x).flatten())
    return picked.flatten(-3, -2)


def sample_table(
    table: Tensor,
    coords_yx: Tensor,
    *,
    source: Grid,
    extent_hw: tuple[float, float] | Tensor,
    recipe: str | Recipe,
) -> Tensor:
    """Return a learned table evaluated at any points: dropped tokens, crops, tiles, packed images.

    Args:
        table: `[source.size, d]`, row-major, without prefix rows.
        coords_yx: `[..., n, 2]` points in cells of the wanted lattice; whole numbers are its cell centres.
        source: grid the table was trained on, with one frame.
        extent_hw: sides of the wanted lattice in cells: how many cells span the whole table. A tensor `[..., 2]`,
            without the axis of n, gives every sample sides of its own.
        recipe: a name or a Recipe.

    Returns:
        `[..., n, d]`; row-major integer coords of a Grid give `resample` exactly, but for the float32 "nearest"
        dialects on the trained grid: their sources misplace cells there too, and `resample` gives the table itself.

    Raises:
        PositionError: if shapes do not match, the extent is not finite and above 0, or (on the CPU) a point is NaN.
    """
    chosen = recipe_of(recipe)
    check_floats(table, "table")
    check_grid(source, "source")
    check_points(coords_yx, 2, "coords_yx")
    check_extent(extent_hw, coords_yx)
    if source.frames != 1 or table.ndim != 2 or table.shape[-2] != source.size:
        raise PositionError(
            f"table {table.shape[0] if table.ndim else 0} rows of shape {tuple(table.shape)}, source {source.shape}; "
            "[n, d], one row a cell of a one-frame grid, is required. Cut prefix rows off first."
        )
    # Places are formed in float64, as on a grid: float32 loses the fifth digit at 60 cells.
    points = coords_yx.to(exact_dtype(coords_yx.device))
    high, wide = _sides(extent_hw, points)
    if not isinstance(extent_hw, torch.Tensor):
        chosen = _as_trained(chosen, extent_hw, source)
    if chosen.kernel == "nearest":
        row = bucket(points[..., 0], source.height, high, chosen)
        return table[row * source.width + bucket(points[..., 1], source.width, wide, chosen)]
    if isinstance(high, torch.Tensor) and chosen.drift:  # as `_as_trained`, sample by sample
        own = (high == source.height) & (wide == source.width)
        high, wide = (torch.where(own, side - chosen.drift, side) for side in (high, wide))
    rows = axis_weights(points[..., 0], source.height, high, chosen)  # [..., n, source y]
    columns = axis_weights(points[..., 1], source.width, wide, chosen)
    dtype = torch.promote_types(torch.float32, table.dtype)
    lattice = table.to(dtype).unflatten(-2, (source.height, source.width))
    with full_precision(table.device):
        out = torch.einsum("...ny,...nx,yxd->...nd", rows.to(dtype), columns.to(dtype), lattice)
    return out.to(table.dtype)


def _as_trained(recipe: Recipe, extent_hw: tuple[float, float], source: Grid) -> Recipe:
    """Return the recipe as it reads a lattice: the trained one is served as it is, without drift or squeeze."""
    moving = recipe.drift != 0.0 or recipe.sampling == "geometric"
    if moving and torch.compiler.is_exporting():
        _check_closed(extent_hw, source)
    if not moving or tuple(extent_hw) != (source.height, source.width):
        return recipe
    return replace(recipe, drift=0.0, sampling="half_pixel")


def _check_closed(extent_hw: tuple[float, float], source: Grid) -> None:
    """Refuse an export that leaves open whether a lattice is the trained one, where that one is read otherwise."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true as known

    sides = list(zip(extent_hw, (source.height, source.width), strict=True))
    if not (all(known(a == b) for a, b in sides) or any(known(a != b) for a, b in sides)):
        raise PositionError(
            f"recipe serves its trained grid {source.height}x{source.width} otherwise than all others; one exported "
            "program cannot do both. Export at a fixed size, keep the trained one out of the range, or use another "
            "recipe."
        )


def _sides(
    extent_hw: tuple[float, float] | Tensor, points: Tensor
) -> tuple[float, float] | tuple[Tensor, Tensor]:
    """Return the height and the width of the wanted lattice: two numbers, or one `[..., 1]` a sample."""
    if isinstance(extent_hw, torch.Tensor):
        sides = extent_hw.to(points.dtype)
        return sides[..., 0].unsqueeze(-1), sides[..., 1].unsqueeze(-1)
    high, wide = extent_hw
    return high, wide
