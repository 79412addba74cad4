"""Rasters: the cells of all tiles side by side, cut to the picture's content, interpolated where a family does so."""

from __future__ import annotations

from dataclasses import replace
from math import isqrt, sqrt

from visionpos.errors import PositionError
from visionpos.geometry import Grid
from visionpos.vlm.box import Box
from visionpos.vlm.canvas import Stretch
from visionpos.vlm.cutting import ContentSpec, ShrinkSpec, TileSpec
from visionpos.vlm.grammar import GridSpec, ViewsSpec
from visionpos.vlm.resize import boxed, resized
from visionpos.vlm.views import Raster, Ruler, covered, ruler, seen


def canvas_box(size_hw: tuple[int, int], tiles_rc: tuple[int, int], views: ViewsSpec) -> Box:
    """Return the picture on the canvas of all tiles.

    Args:
        size_hw: (height, width) of the original picture.
        tiles_rc: rows and columns of tiles.
        views: says how the picture fills the canvas.
    """
    tile = views.tile
    assert tile is not None  # noqa: S101 (there is a grid of tiles)
    rows, cols = (count * (tile.px - tile.margin_px) + tile.margin_px for count in tiles_rc)
    source_hw = resized(views.size, size_hw) if views.size else size_hw
    return boxed(views.fill or (Stretch(),), source_hw, default_hw=(rows, cols))


def joined(
    size_hw: tuple[int, int], box: Box, grid_rc: tuple[int, int], views: ViewsSpec, grid: GridSpec
) -> Raster | None:
    """Return the raster of the tiles of an image, or None if a family drops one that has no cell left.

    Args:
        size_hw: (height, width) of the original picture.
        box: the picture on the canvas of all tiles.
        grid_rc: rows and columns of tiles.
        views: says what is kept of the raster.
        grid: from pixels to tokens.

    Raises:
        PositionError: if no cell is left, naming the size and the raster.
    """
    tile = views.tile
    assert tile is not None  # noqa: S101 (only tiled views are joined)
    rulers = [_side_by_side(count, tile, grid) for count in grid_rc]
    a_tile = ruler(tile.px, grid).cells ** 2
    if views.content is not None:
        rulers = _kept(rulers, size_hw, box, views.content, grid)
        if min(one.cells for one in rulers) < 1:
            if views.content.empty == "drop":
                return None
            rows, cols = (one.cells for one in rulers)
            raise PositionError(
                f"size_hw is {size_hw}; of its {grid_rc[0]} x {grid_rc[1]} tiles {rows} x {cols} cells are left after "
                "cutting to the picture's ratio, so no token would show them. Crop or pad the picture first, or "
                "overlay views.content.empty: drop, as published code silently does."
            )
    if views.shrink is not None:
        rulers = _shrunk(rulers, a_tile, views.shrink)
    source, content = seen(size_hw, box, (0, 0, *box.size_hw))
    return Raster(
        tokens=Grid(rulers[0].cells, rulers[1].cells),
        rulers=(rulers[0], rulers[1]),
        source_yxyx=source,
        content_yxyx=content,
    )


def _side_by_side(tiles: int, tile: TileSpec, grid: GridSpec) -> Ruler:
    """Return the ruler of tiles in a row; with a margin the raster is the grid of their canvas."""
    if tile.margin_px:
        return ruler(tiles * (tile.px - tile.margin_px) + tile.margin_px, grid)
    one = ruler(tile.px, grid)
    return replace(
        one, cells=tiles * one.cells, tiles=tiles, stride_px=tile.px, tile_cells=one.cells
    )


def _kept(
    rulers: list[Ruler], size_hw: tuple[int, int], box: Box, content: ContentSpec, grid: GridSpec
) -> list[Ruler]:
    """Return the rulers of what is kept."""
    if content.kind == "ratio_centre":
        return _ratio_centre(rulers, size_hw, content)
    kept = []
    for side, canvas, one in zip((box.height, box.width), box.size_hw, rulers, strict=True):
        patches = canvas // grid.patch - (canvas - side) // grid.patch
        kept.append(replace(one, cells=covered(patches, grid.merge, "ceil")))
    return kept


def _ratio_centre(
    rulers: list[Ruler], size_hw: tuple[int, int], content: ContentSpec
) -> list[Ruler]:
    """Return the rulers after cutting both ends of the axis that is too long for the picture.

    The same number is cut at both ends, so one cell more than the ratio asks for may stay, or none at all.
    """
    (height, width), (rows, cols) = size_hw, (one.cells for one in rulers)
    exact = content.arithmetic == "exact"
    wider = width * rows > cols * height if exact else width / height > cols / rows
    axis = 0 if wider else 1
    if exact:
        new = height * cols // width if wider else width * rows // height
    else:
        new = int(height * (cols / width)) if wider else int(width * (rows / height))
    cut = (rulers[axis].cells - new) // 2
    out = list(rulers)
    out[axis] = replace(rulers[axis], cells=rulers[axis].cells - 2 * cut, skip=cut)
    return out


def _shrunk(rulers: list[Ruler], a_tile: int, shrink: ShrinkSpec) -> list[Ruler]:
    """Return the rulers after interpolation, where there are too many cells."""
    rows, cols = (one.cells for one in rulers)
    most = shrink.tiles * a_tile
    if shrink.arithmetic == "float64":
        root = sqrt(rows * cols / most)
        if root <= float(shrink.over):
            return rulers
        sides = int(rows // root), int(cols // root)
    else:
        if rows * cols <= shrink.over**2 * most:
            return rulers
        sides = isqrt(rows * most // cols), isqrt(cols * most // rows)
    return [
        replace(one, cells=side, kept=one.cells) for one, side in zip(rulers, sides, strict=True)
    ]
