"""Tiling: the plan that a family's rules make of a picture or a clip.

A size and a spec enter; rectangles leave, no pixels and no tensors until they are asked for.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from functools import reduce
from itertools import pairwise
from typing import Any

from visionpos.errors import PositionError
from visionpos.geometry import Grid
from visionpos.geometry.grid import is_whole
from visionpos.vlm.box import Box
from visionpos.vlm.canvas import Stretch
from visionpos.vlm.cutting import TileSpec
from visionpos.vlm.grammar import FamilySpec, GridSpec, VideoSpec, ViewSpec, ViewsSpec
from visionpos.vlm.instants import elapsed_steps, exact, named_instants
from visionpos.vlm.picking import picked
from visionpos.vlm.plans import Plan
from visionpos.vlm.rasters import canvas_box, joined
from visionpos.vlm.resize import boxed, resized
from visionpos.vlm.segments import Image, Video
from visionpos.vlm.views import Raster, Rect, Ruler, View, gridded, seen

__all__ = ["Plan", "Raster", "Rect", "View", "image_plan", "media_plan", "video_plan"]


def media_plan(media: Image | Video, spec: FamilySpec, images: int = 1) -> Plan:
    """Return the plan of an image or a clip.

    Args:
        media: its size before any resizing.
        spec: the family's rules; with a rule for clips, if it is one.
        images: number of images of the prompt.

    Raises:
        PositionError: naming the size, if the family refuses it.
    """
    given: Any = media
    if not isinstance(given, (Image, Video)) or not is_whole(images):
        raise PositionError(
            f"media is {given!r} and images {images!r}; an Image or a Video, and a whole number of images, at least 1, "
            "are required. Pass Image(size_hw=(height, width))."
        )
    try:
        if isinstance(media, Image):
            return image_plan(media, spec, images)
        assert spec.video is not None  # noqa: S101 (the caller has looked)
        return video_plan(media, spec.video)
    except PositionError as refusal:
        if str(media.size_hw) in str(refusal):
            raise
        raise type(refusal)(f"{refusal} The size_hw given is {media.size_hw}.") from None


def image_plan(image: Image, spec: FamilySpec, images: int = 1) -> Plan:
    """Return the plan of an image.

    Args:
        image: its size before any resizing.
        spec: the family's rules.
        images: number of images of the prompt; some families cut an image only where it is alone.

    Raises:
        PositionError: if the family refuses the size, or a view would have no token.
    """
    size_hw = image.size_hw
    tiles_rc = _tiles(size_hw, spec, images)
    if tiles_rc is None:
        spec = spec.untiled or spec
    by_node: dict[str, list[View]] = {"global": [], "tiles": []}
    raster = None
    if spec.views.global_ is not None:
        box = _whole(size_hw, tiles_rc, spec.views.global_, spec.views)
        by_node["global"] = [_view(size_hw, box, (0, 0, *box.size_hw), spec.grid)]
    if tiles_rc is not None:
        by_node["tiles"], raster = _tile_views(size_hw, tiles_rc, spec)
    views = tuple(view for node in spec.stream.order for view in by_node[node])
    if not views:
        raise PositionError(
            f"size_hw is {size_hw}; this family shows tiles alone and cuts none from it. "
            "Use another variant or dialect."
        )
    return Plan(
        size_hw=size_hw,
        views=views,
        tiles_rc=tiles_rc,
        joins=spec.views.arrange == "joined",
        raster=raster,
        order=spec.stream.order,
    )


def _whole(
    size_hw: tuple[int, int], tiles_rc: tuple[int, int] | None, whole: ViewSpec, views: ViewsSpec
) -> Box:
    """Return the picture as the whole-image view shows it."""
    if whole.of == "canvas" and tiles_rc is not None:
        return reduce(
            lambda box, step: step.apply(box), whole.size, canvas_box(size_hw, tiles_rc, views)
        )
    if whole.of == "resized" and views.size:
        return boxed(whole.size, resized(views.size, size_hw))
    return boxed(whole.size, size_hw)


def _tiles(size_hw: tuple[int, int], spec: FamilySpec, images: int) -> tuple[int, int] | None:
    """Return rows and columns of tiles, or None if the image is not cut."""
    views, tile = spec.views, spec.views.tile
    if views.pick is None or tile is None:
        return None
    height, width = resized(views.size, size_hw) if views.size else size_hw
    if views.when is not None and not views.when.holds((height, width), images):
        return None
    unit = tile.unit_px or tile.px
    margin = tile.margin_px
    grid = picked(views.pick, (height - margin, width - margin), unit - margin, images)
    if grid is None:
        return None
    cols, rows = (-(-count * unit // tile.px) for count in grid) if tile.unit_px else grid
    fewest = None if views.when is None else views.when.tiles_over
    return None if fewest is not None and cols * rows <= fewest else (rows, cols)


def _tile_views(
    size_hw: tuple[int, int], tiles_rc: tuple[int, int], spec: FamilySpec
) -> tuple[list[View], Raster | None]:
    """Return the views of all tiles, row by row, and the raster they form where the family joins them."""
    tile = spec.views.tile
    assert tile is not None  # noqa: S101 (there is a grid of tiles)
    if tile.size is not None or tile.cut != "even":
        return _pieces(size_hw, tiles_rc, tile, spec.grid), None
    stride = tile.px - tile.margin_px
    box = canvas_box(size_hw, tiles_rc, spec.views)
    windows = [
        (row, col, (row * stride, col * stride, row * stride + tile.px, col * stride + tile.px))
        for row in range(tiles_rc[0])
        for col in range(tiles_rc[1])
    ]
    grids = gridded((tile.px, tile.px), spec.grid)
    views = [
        replace(_view(size_hw, box, window, spec.grid, grids), node="tile", tile_rc=(row, col))
        for row, col, window in windows
    ]
    if spec.views.arrange == "per_view":
        return views, None
    return views, joined(size_hw, box, tiles_rc, spec.views, spec.grid)


def _pieces(
    size_hw: tuple[int, int], tiles_rc: tuple[int, int], tile: TileSpec, grid: GridSpec
) -> list[View]:
    """Return the views of pieces that are resized one by one."""
    steps = tile.size if tile.size is not None else (Stretch(box=tile.px),)
    (rows, heights), (cols, widths) = (
        _cuts(side, count, tile.cut) for side, count in zip(size_hw, tiles_rc, strict=True)
    )
    views = []
    for row, height in enumerate(heights):
        for col, width in enumerate(widths):
            box = boxed(steps, (height, width))
            view = _view((height, width), box, (0, 0, *box.size_hw), grid)
            source = rows[row], cols[col], rows[row + 1], cols[col + 1]
            views.append(replace(view, node="tile", tile_rc=(row, col), source_yxyx=source))
    return views


def _cuts(side: int, count: int, cut: str) -> tuple[list[int | Fraction], list[int]]:
    """Return where pieces of a side begin (and the last one stops), and their sizes in whole pixels."""
    if cut == "even":
        size = max(round(Fraction(side, count)), 1)
        return [Fraction(at * side, count) for at in range(count + 1)], [size] * count
    step = -(-side // count) if cut == "ceil" else side // count
    edges = [min(at * step, side) for at in range(count)] + [side]
    sizes = [high - low for low, high in pairwise(edges)]
    if min(sizes) < 1:
        raise PositionError(
            f"a side of {side} pixels cannot be cut into {count} pieces; at least one pixel each is required. "
            "Enlarge the picture first, or use a variant without splitting."
        )
    return list(edges), sizes


def _view(
    original_hw: tuple[int, int],
    box: Box,
    window_yxyx: tuple[int, int, int, int],
    grid: GridSpec,
    grids: tuple[Grid, Grid, tuple[Ruler, Ruler]] | None = None,
) -> View:
    """Return what a window of a canvas shows the encoder."""
    top, left, bottom, right = window_yxyx
    size_hw = bottom - top, right - left
    patches, tokens, rulers = grids or gridded(size_hw, grid)
    source, content = seen(original_hw, box, window_yxyx)
    return View(
        size_hw=size_hw,
        source_yxyx=source,
        content_yxyx=content,
        patches=patches,
        tokens=tokens,
        rulers=rulers,
        has_places=grid.queries is None,
    )


def video_plan(video: Video, spec: VideoSpec) -> Plan:
    """Return the plan of a clip.

    Args:
        video: frame size, and times or number of the sampled frames.
        spec: the family's rule for clips.

    Raises:
        PositionError: if the family refuses the size or the number of frames.
    """
    box = boxed(spec.size, video.size_hw, frames=video.num_frames)
    view = _view(video.size_hw, box, (0, 0, *box.size_hw), spec.grid)
    steps = -(-video.num_frames // spec.group)
    seconds = None if video.seconds is None else tuple(video.seconds)
    if video.sampled_fps is not None:
        step = Fraction(spec.group) / exact(video.sampled_fps)
        elapsed: tuple[Fraction, ...] | None = tuple(at * step for at in range(steps))
    else:
        elapsed = None if seconds is None else elapsed_steps(seconds, spec.group)
    return Plan(
        size_hw=video.size_hw,
        views=(_timed(view, steps),),
        group=spec.group,
        frames=video.num_frames,
        elapsed=elapsed,
        instants=None if seconds is None else named_instants(seconds, spec.group, spec.instant),
    )


def _timed(view: View, steps: int) -> View:
    """Return the view of a clip of so many time steps."""
    patches, tokens = (replace(grid, frames=steps) for grid in (view.patches, view.tokens))
    return replace(view, patches=patches, tokens=tokens, node="clip")
