"""Ids of images whose views share positions: the whole image and its tiles over one canvas, or tile by thumbnail.

Here an image, not a view, is what takes room in the prompt; streams alone say which tile stands where.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch

from visionpos.errors import PositionError
from visionpos.geometry import Grid
from visionpos.vlm.clocks import Array
from visionpos.vlm.pieces import Cells, Marker, Run, Words
from visionpos.vlm.rules import Rule
from visionpos.vlm.stream import TokenStream

Placed = tuple[int, Run]
WHOLE = ("global", "frame")  # nodes that show all of an image


@dataclass(slots=True)
class _Image:
    """One image of a stream: the runs of its whole view, and of its tiles row by row."""

    runs: list[Placed]
    whole: list[tuple[int, Cells]] = field(default_factory=list)
    tiles: list[list[tuple[int, Cells]]] = field(default_factory=list)
    columns: int = 0

    @classmethod
    def of(cls, runs: list[Placed]) -> _Image:
        """Return the image with its views told apart; a separator between rows of tiles fixes the columns."""
        image = cls(runs)
        cells = [(at, run) for at, run in runs if isinstance(run, Cells)]
        for _, group in groupby(cells, lambda item: item[1].view):
            part = list(group)
            if part[0][1].node in WHOLE:
                image.whole = part
            else:
                image.tiles.append(part)
        rows = 1 + sum(_is_row_end(run) for _, run in runs)
        image.columns = -(-len(image.tiles) // rows) if image.tiles else 0
        return image


def _is_row_end(run: Run) -> bool:
    return isinstance(run, Marker) and (run.node, run.edge) == ("tiles", "between")


def views_ids(stream: TokenStream, rule: Rule) -> tuple[Array, Array]:
    """Return ids `[axes, n]` int64 and the next position `[1]`.

    Args:
        stream: one row.
        rule: with place "canvas" or "aligned".

    Raises:
        PositionError: if tiles of one image differ in size, or an image has tiles and no whole view.
    """
    ids = np.zeros((len(rule.axes), stream.length), dtype=np.int64)
    position, last = 0, None  # last: start of the image that ends where the next run begins
    place = _canvas if rule.place == "canvas" else _aligned
    for segment, group in groupby(stream.placed(), _unit):
        runs = list(group)
        if segment is not None:
            image = _Image.of(runs)
            last, position = position, place(ids, image, position)
            continue
        for at, run in runs:
            # On a canvas, line ends right behind an image take no room: they stand where it starts.
            if rule.place == "canvas" and last is not None and _is_newline(run):
                ids[:, at : at + run.count] = last
                continue
            ids[:, at : at + run.count] = position + np.arange(run.count)
            position, last = position + run.count, None
    return ids, np.array([position])


def _unit(item: Placed) -> int | None:
    """Return which image a run belongs to; None for text, special tokens and timestamps."""
    run = item[1]
    inside = isinstance(run, Cells) or (isinstance(run, Marker) and run.node != "special")
    return run.segment if inside else None


def _is_newline(run: Run) -> bool:
    return isinstance(run, Words) and run.text == "\n" * run.count


def _canvas(ids: Array, image: _Image, start: int) -> int:
    """Write one image over a canvas as large as its tiles, and return where text goes on.

    Cells of tiles stand at their place in the canvas, those of the whole image are spread over it, markers stand at
    corners; time is the same for all.

    Reference:
        MiniCPM-V 4.7; transformers minicpmv4_7 get_rope_index ("Canvas M-RoPE").
    """
    whole = _whole(image)
    tile = image.tiles[0][0][1].grid if image.tiles else None
    rows = len(image.tiles) // image.columns if image.tiles else 1
    height, width = (
        (whole.height, whole.width)
        if tile is None
        else (rows * tile.height, image.columns * tile.width)
    )
    ids[0, image.runs[0][0] : image.runs[-1][0] + image.runs[-1][1].count] = start
    spread = [_spread(*sides) for sides in ((height, whole.height), (width, whole.width))]
    _write(ids, image.whole, start + spread[0], start + spread[1])
    for number, part in enumerate(image.tiles):
        row, col = divmod(number, image.columns)
        grid = part[0][1].grid
        if tile is not None and grid != tile:
            raise PositionError(
                f"tile {number} of the image in segment {part[0][1].segment} has grid {grid.shape} and the first "
                f"{tile.shape}; one size is required on a canvas. Correct views.tile."
            )
        top, left = start + row * grid.height, start + col * grid.width
        _write(ids, part, top + np.arange(grid.height), left + np.arange(grid.width))
    _write_canvas_markers(ids, image, start, (height, width))
    return start + max(height, width) + 1


def _write_canvas_markers(ids: Array, image: _Image, start: int, canvas: tuple[int, int]) -> None:
    """Write rows and columns of the markers of an image on a canvas."""
    number = -1  # of the tile that a marker opens or closes
    for at, run in image.runs:
        if not isinstance(run, Marker):
            continue
        number += (run.node, run.edge) == ("tile", "before")
        row, col = divmod(max(number, 0), max(image.columns, 1))
        tile = image.tiles[max(number, 0)][0][1].grid if image.tiles else None
        high, wide = (0, 0) if tile is None else (tile.height, tile.width)
        corners = {
            ("global", "before"): (max(start - 1, 0) - start,) * 2,
            ("global", "after"): canvas,
            ("tile", "before"): (row * high, col * wide),
            ("tile", "after"): ((row + 1) * high - 1, (col + 1) * wide - 1),
            ("tiles", "between"): ((row + 1) * high - 1, image.columns * wide),
        }
        if (run.node, run.edge) not in corners:
            raise PositionError(
                f"marker {run.name!r} stands {run.edge} {run.node}; a canvas has no place for it. Use the markers "
                "around the whole view, tiles and rows of tiles."
            )
        ids[1:, at] = start + np.array(corners[run.node, run.edge])


def _aligned(ids: Array, image: _Image, start: int) -> int:
    """Write one image whose tiles stand where its whole view shows the same, and return where text goes on.

    Markers around the image and the cells of its whole view count on as text does. A cell of the tiles takes the
    position of the cell of the whole view that covers its upper left corner; markers inside that of the cell before.

    Reference:
        ID-Align (arXiv 2505.21465), as read in its abstract; its code was not to be had, and where its newlines stand
        is this package's own choice.
    """
    whole = _whole(image)
    edges = [isinstance(run, Marker) and run.node == "image" for _, run in image.runs]
    opening = edges.index(False)
    first = start + opening
    place = first + np.arange(whole.size).reshape(whole.height, whole.width)
    position, following = first, first + whole.size
    for number, ((at, run), edge) in enumerate(zip(image.runs, edges, strict=True)):
        if isinstance(run, Cells):
            down, right = np.divmod(np.arange(run.count) + run.row * run.grid.width, run.grid.width)
            if run.node not in WHOLE:
                down, right = _seen_in_whole(image, run, down, right)
            ids[0, at : at + run.count] = place[down, right]
            position = int(ids[0, at + run.count - 1])
        elif edge and number >= opening and run.edge == "after":  # type: ignore[union-attr]
            ids[0, at] = following
            following += 1
        else:
            ids[0, at] = start + number if number < opening else position
    return following


def _seen_in_whole(image: _Image, run: Cells, down: Array, right: Array) -> tuple[Array, Array]:
    """Return rows and columns of the whole view for cells of a tile."""
    whole, tile = _whole(image), run.grid
    number = next(n for n, part in enumerate(image.tiles) if part[0][1].view == run.view)
    row, col = divmod(number, image.columns)
    height, width = len(image.tiles) // image.columns * tile.height, image.columns * tile.width
    down = (down + row * tile.height) * whole.height // height
    return down, (right + col * tile.width) * whole.width // width


def _whole(image: _Image) -> Grid:
    """Return the grid of the whole view."""
    if not image.whole:
        raise PositionError(
            f"the image in segment {image.runs[0][1].segment} has no whole view; its tiles share positions with one. "
            "Use place: unit, or add views.global."
        )
    return image.whole[0][1].grid


def _spread(length: int, cells: int) -> Array:
    """Return `[cells]` places from 0 to length - 1, rounded as the reference does: float32, half to even."""
    return np.asarray(torch.linspace(0, length - 1, cells).round().long().numpy())


def _write(ids: Array, part: list[tuple[int, Cells]], rows: Array, cols: Array) -> None:
    """Write rows and columns of the runs of one view into `ids [3, n]`."""
    for at, run in part:
        down, right = np.divmod(np.arange(run.count) + run.row * run.grid.width, run.grid.width)
        ids[1, at : at + run.count] = rows[down]
        ids[2, at : at + run.count] = cols[right]
