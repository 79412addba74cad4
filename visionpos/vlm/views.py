"""Views: the pictures that an encoder sees, the rasters a stream reads, and where on the original every token looks.

Rectangles are top, left, bottom, right. They are exact fractions of original pixels until a tensor is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import torch
from torch import Tensor

from visionpos.errors import PositionError
from visionpos.geometry import Grid
from visionpos.vlm.box import Box
from visionpos.vlm.grammar import GridSpec

Coordinate = int | Fraction
Rect = tuple[Coordinate, Coordinate, Coordinate, Coordinate]
Band = tuple[Coordinate, Coordinate]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruler:
    """Where the cells of one axis lie on a canvas, in pixels.

    Args:
        cells: number of cells.
        patch_px: side of a patch.
        merge: patches a cell.
        patches: patches of a tile; what is left of the tile beyond them belongs to no cell.
        tiles: tiles along the axis.
        stride_px: from tile to tile.
        tile_cells: cells of a tile.
        skip: merged cells that are left out before the first.
        kept: merged cells that the axis shares out; `cells` if they are not interpolated.
    """

    cells: int
    patch_px: int
    merge: int
    patches: int
    tiles: int = 1
    stride_px: int = 0
    tile_cells: int = 0
    skip: int = 0
    kept: int | None = None

    def bands(self) -> list[Band]:
        """Return where each cell starts and stops.

        Example:
            >>> Ruler(cells=2, patch_px=14, merge=2, patches=3).bands()
            [(0, 28), (28, 42)]
        """
        kept = self.cells if self.kept is None else self.kept
        bands: list[Band] = []
        for cell in range(self.skip, self.skip + kept):
            tile, local = divmod(cell, self.tile_cells) if self.tiles > 1 else (0, cell)
            start, stop = local * self.merge, min((local + 1) * self.merge, self.patches)
            origin = tile * self.stride_px
            bands.append((origin + start * self.patch_px, origin + stop * self.patch_px))
        if kept == self.cells:
            return bands
        low, high = bands[0][0], bands[-1][1]
        edges = [low + Fraction(at * (high - low), self.cells) for at in range(self.cells + 1)]
        return list(pairwise(edges))


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One picture that the encoder sees.

    Args:
        size_hw: (height, width) in pixels after resizing and padding: what the encoder is given.
        source_yxyx: the part of the original picture it shows: top, left, bottom, right in pixels.
        content_yxyx: where in `size_hw` that part lies; the rest is padding.
        patches: grid of patches.
        tokens: grid of tokens, after merging.
        node: "global", "tile" or "clip".
        tile_rc: (row, column) among the tiles, from 0; None if it is no tile.
        rulers: where rows and columns of tokens lie; None: they share the sides evenly.
        has_places: whether tokens have rows and columns; False for queries, each of which looks at the whole view.
    """

    size_hw: tuple[int, int]
    source_yxyx: Rect
    content_yxyx: Rect
    patches: Grid
    tokens: Grid
    node: str = "global"
    tile_rc: tuple[int, int] | None = None
    rulers: tuple[Ruler, Ruler] | None = None
    has_places: bool = True

    @property
    def padding_px(self) -> Rect:
        """Return the padding in pixels: top, left, bottom, right."""
        top, left, bottom, right = self.content_yxyx
        return top, left, self.size_hw[0] - bottom, self.size_hw[1] - right

    def token_rects(self) -> Tensor:
        """Return `[n, 4]` float64: top, left, bottom, right of every token on the original picture, in pixels.

        Every time step of a clip repeats the rectangles of its grid. Tokens of nothing but padding have no area.
        """
        return _tensor(self.bands(), self.tokens)

    def bands(self) -> tuple[list[Band], list[Band]]:
        """Return exactly where rows, and columns, of tokens start and stop on the original picture, in pixels."""
        if not self.has_places:
            top, left, bottom, right = self.source_yxyx
            return [(top, bottom)], [(left, right)] * self.tokens.width
        if self.rulers is not None:
            on_canvas = [ruler.bands() for ruler in self.rulers]
        else:
            sides = zip(self.size_hw, self.tokens.shape[1:], strict=True)
            on_canvas = [_even(side, cells) for side, cells in sides]
        return _on_original(on_canvas, self.source_yxyx, self.content_yxyx)


@dataclass(frozen=True, slots=True, kw_only=True)
class Raster:
    """The cells of several tiles as one raster, as a stream reads them.

    Args:
        tokens: grid of cells.
        rulers: where rows and columns lie on the canvas of all tiles.
        source_yxyx: the part of the original that the canvas shows.
        content_yxyx: where on the canvas that part lies.
        node: always "tiles".
    """

    tokens: Grid
    rulers: tuple[Ruler, Ruler]
    source_yxyx: Rect
    content_yxyx: Rect
    node: str = "tiles"

    def token_rects(self) -> Tensor:
        """Return `[n, 4]` float64: top, left, bottom, right of every cell on the original picture, in pixels."""
        return _tensor(self.bands(), self.tokens)

    def bands(self) -> tuple[list[Band], list[Band]]:
        """Return exactly where rows, and columns, of cells start and stop on the original picture, in pixels."""
        on_canvas = [ruler.bands() for ruler in self.rulers]
        return _on_original(on_canvas, self.source_yxyx, self.content_yxyx)


def gridded(size_hw: tuple[int, int], grid: GridSpec) -> tuple[Grid, Grid, tuple[Ruler, Ruler]]:
    """Return the patches and the tokens of a picture, and the rulers of both axes.

    Args:
        size_hw: (height, width) in pixels.
        grid: from pixels to tokens.

    Raises:
        PositionError: if a side holds no patch, or no token.
    """
    rulers = ruler(size_hw[0], grid), ruler(size_hw[1], grid)
    if min(one.cells for one in rulers) < 1:
        raise PositionError(
            f"a view of {size_hw} (height, width) pixels has {tuple(one.cells for one in rulers)} rows and columns of "
            f"tokens at patch {grid.patch} and merge {grid.merge}; at least one of each is required. "
            f"Pad or enlarge it to {grid.patch * grid.merge} pixels a side."
        )
    patches = Grid(rulers[0].patches, rulers[1].patches)
    if grid.queries is not None:
        return patches, Grid(1, grid.queries), rulers
    return patches, Grid(rulers[0].cells, rulers[1].cells), rulers


def ruler(side_px: int, grid: GridSpec) -> Ruler:
    """Return the ruler of one axis of a picture."""
    patches = covered(side_px, grid.patch, grid.cover)
    cells = covered(patches, grid.merge, grid.merge_cover)
    return Ruler(cells=cells, patch_px=grid.patch, merge=grid.merge, patches=patches)


def covered(side: int, step: int, cover: str) -> int:
    """Return how many steps a side holds, the last one whole ("floor") or begun ("ceil")."""
    return side // step if cover == "floor" else -(-side // step)


def seen(
    original_hw: tuple[int, int], box: Box, window_yxyx: tuple[int, int, int, int]
) -> tuple[Rect, Rect]:
    """Return what part of the original a window on a canvas shows, and where in the window that part lies.

    Args:
        original_hw: (height, width) of the original picture, all of which is on the canvas.
        box: the picture on its canvas.
        window_yxyx: the window on the canvas.
    """
    rows, cols = (
        _seen_along(original_hw[a], (box.height, box.width)[a], box.corner_yx[a], window_yxyx[a::2])
        for a in (0, 1)
    )
    return (rows[0], cols[0], rows[1], cols[1]), (rows[2], cols[2], rows[3], cols[3])


def _seen_along(
    original: int, content: int, corner: int, window: Sequence[int]
) -> tuple[Coordinate, Coordinate, int, int]:
    """Return source start and stop, and content start and stop inside the window, along one axis."""
    low, high = window
    start = min(max(corner, low), high)
    stop = max(min(corner + content, high), start)
    source = [
        original if edge == corner + content else Fraction((edge - corner) * original, content)
        for edge in (start, stop)
    ]
    if start == stop:  # a window of nothing but padding
        source = [min(max(edge, 0), original) for edge in source]
    return source[0], source[1], start - low, stop - low


def _even(side: int, cells: int) -> list[Band]:
    """Return cells that share a side evenly."""
    edges = [Fraction(at * side, cells) for at in range(cells + 1)]
    return list(pairwise(edges))


def _on_original(
    on_canvas: Sequence[Sequence[Band]], source: Rect, content: Rect
) -> tuple[list[Band], list[Band]]:
    """Return bands of a canvas as bands of the original, padding left out."""
    rows, cols = (
        [
            (
                _moved(start, source[a::2], content[a::2]),
                _moved(stop, source[a::2], content[a::2]),
            )
            for start, stop in bands
        ]
        for a, bands in enumerate(on_canvas)
    )
    return rows, cols


def _moved(
    at: Coordinate, source: Sequence[Coordinate], content: Sequence[Coordinate]
) -> Coordinate:
    """Return where a place on the canvas lies on the original; padding is drawn to the picture's edge."""
    low, high = content
    if at <= low or low == high:
        return source[0]
    if at >= high:
        return source[1]
    return source[0] + Fraction(at - low) * (source[1] - source[0]) / (high - low)


def _tensor(bands: tuple[list[Band], list[Band]], grid: Grid) -> Tensor:
    """Return the rectangles of a raster, `[frames * height * width, 4]`."""
    rows, cols = (
        torch.tensor([[float(edge) for edge in band] for band in axis], dtype=torch.float64)
        for axis in bands
    )
    shape = grid.height, grid.width
    corners = [(rows[:, 0], 1), (cols[:, 0], 0), (rows[:, 1], 1), (cols[:, 1], 0)]
    rect = torch.stack([edge.unsqueeze(axis).expand(shape) for edge, axis in corners], dim=-1)
    return rect.reshape(-1, 4).repeat(grid.frames, 1)  # [n, 4]
