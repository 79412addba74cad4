"""Drawing: a photo with its views, token rows, breaks and token numbers on it, to see what a family makes of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from visionpos.errors import PositionError
from visionpos.vlm.pieces import Cells, Marker, Run, Words

if TYPE_CHECKING:
    from visionpos.vlm.stream import TokenStream
    from visionpos.vlm.tiling import Plan
    from visionpos.vlm.views import Raster, Rect, View

Bands = list[tuple[float, float]]

SHOWN_PX = 480, 2000  # longer side of a panel, at least and at most
DIGIT_PX = 10  # wanted width of a cell for every digit of its number
LETTER_PX = 8, 14  # height of a number, at least and at most
GAP_PX = 12
LINE, FRAME, BREAK, INK, PAPER = (
    (90, 220, 255), (255, 140, 0), (255, 40, 60), (255, 255, 255), (24, 24, 28),
)  # fmt: skip


@dataclass(slots=True)
class _Row:
    """A row of tokens: the place of its first one in the stream, and the breaks behind its last one."""

    start: int
    breaks: tuple[str, ...] = ()


def draw_tokens(
    picture: Tensor, plan: Plan, stream: TokenStream, segment: int = 0, *, caption: str = ""
) -> Tensor:
    """Return a photo with a plan and its stream drawn on it.

    One panel shows the whole-image view, one all tiles. Orange frames are views; blue lines part the tokens; a red bar
    at the end of a row is a break (a newline or separator); numbers are places in the stream, in every cell that has
    room for one, else in the first of a row. Padding is outside the picture and not drawn.

    Args:
        picture: the upright photo `[3, height, width]` uint8, as `photo` returns it.
        plan: what the family makes of it.
        stream: a stream that holds it.
        segment: which of the stream's segments the photo is.
        caption: words before the caption of the first panel, such as a file name.

    Returns:
        `[3, height, width]` uint8: panels side by side, each of a longer side of 480 to 2000 pixels, under captions.

    Raises:
        PositionError: if the plan is for another size, or the segment is not this photo.
    """
    if tuple(picture.shape[-2:]) != tuple(plan.size_hw):
        raise PositionError(
            f"picture is {tuple(picture.shape[-2:])} (height, width) and the plan is for {tuple(plan.size_hw)}; they "
            "must agree. Plan the upright picture, as photo() returns it."
        )
    rows = _rows(stream, segment)
    wanted = [len(part.bands()[0]) for part in plan.parts]
    if wanted != [len(rows[view]) for view in range(len(plan.parts))]:
        raise PositionError(
            f"segment {segment} of the stream has {[len(rows[view]) for view in sorted(rows)]} rows of tokens and the "
            f"plan {wanted}; the segment of the photo is required. Count segments from 0."
        )
    panels: list[Image.Image] = []
    for node in ("global", "tiles"):
        parts = [(rows[view], part) for view, part in enumerate(plan.parts) if _kind(part) == node]
        if parts:
            frames = [view.source_yxyx for view in plan.views if _kind(view) == node]
            said = "" if panels or not caption else f"{caption}  "
            panels.append(_panel(picture, parts, frames, said + node))
    return _tensor(_joined(panels, axis=0))


def write_png(path: str | PathLike[str], pictures: Sequence[Tensor]) -> None:
    """Write pictures `[3, height, width]` uint8, one below the other, as a PNG file.

    Raises:
        PositionError: if the name ends in another format's suffix, there is no such folder, or it cannot be written.
    """
    file = Path(path)
    if file.suffix.lower() != ".png" or file.is_dir():
        raise PositionError(
            f"path {str(path)!r} is no PNG; the name of a file that ends in .png is required. Rename it."
        )
    if not file.parent.is_dir():
        raise PositionError(
            f"path {str(path)!r} is in no existing folder; create {file.parent} first."
        )
    try:
        _joined([_image(picture) for picture in pictures], axis=1).save(file, format="PNG")
    except OSError as error:
        raise PositionError(
            f"path {str(path)!r} cannot be written ({error.strerror}); a file that may be replaced is required. "
            "Choose another."
        ) from error


def _kind(part: View | Raster) -> str:
    return "global" if part.node == "global" else "tiles"


def _rows(stream: TokenStream, segment: int) -> dict[int, list[_Row]]:
    """Return the rows of every view or raster of a segment; a break belongs to the row before it."""
    rows: dict[int, list[_Row]] = defaultdict(list)
    last: _Row | None = None
    for start, run in stream.placed():
        if run.segment != segment:
            continue
        if isinstance(run, Cells):
            starts = range(start, start + run.count, run.grid.width)
            rows[run.view] += [_Row(at) for at in starts]
            last = rows[run.view][-1]
        elif last is not None and (name := _break(run)):
            last.breaks += (name,)
    return rows


def _break(run: Run) -> str:
    """Return the name of what parts rows or tiles; empty for any other run."""
    name = ""
    if isinstance(run, Marker) and run.edge in ("end", "between"):
        name = run.name
    elif isinstance(run, Words) and not run.text.strip():
        name = run.text
    return name if name.isprintable() else repr(name)


def _panel(
    picture: Tensor,
    parts: Sequence[tuple[list[_Row], View | Raster]],
    frames: Sequence[Rect],
    caption: str,
) -> Image.Image:
    """Return the photo with all views of one kind on it, under a caption."""
    digits = len(str(max(row.start for rows, _ in parts for row in rows)))
    scale = _scale(picture, [part for _, part in parts], digits * DIGIT_PX)
    height, width = (max(round(side * scale), 1) for side in picture.shape[-2:])
    kernel = Image.Resampling.LANCZOS if scale < 1 else Image.Resampling.NEAREST
    image = _image(picture).resize((width, height), kernel)
    draw = ImageDraw.Draw(image)
    shown = [(rows, *_bands(part, scale)) for rows, part in parts]
    for _, bands, cols in shown:
        _draw_lines(draw, bands, cols)
    for top, left, bottom, right in frames:
        corners = [float(edge) * scale for edge in (left, top, right, bottom)]
        box = [min(at, side - 1) for at, side in zip(corners, (width, height) * 2, strict=True)]
        draw.rectangle(box, outline=FRAME, width=3 if min(width, height) > LETTER_PX[1] else 1)
    for rows, bands, cols in shown:
        _draw_breaks(draw, rows, bands, cols)
        _draw_numbers(draw, rows, bands, cols)
    cells = sum(part.tokens.size for _, part in parts)
    breaks = sorted({name for rows, _ in parts for row in rows for name in row.breaks})
    first, last = parts[0][0][0].start, parts[-1][0][-1].start + parts[-1][1].tokens.width - 1
    count = f"{len(frames)} view{'s' if len(frames) > 1 else ''}"
    said = f"{caption}: {count}, {cells} tokens in {first}..{last}"
    return _captioned(image, said + (f"; red: {', '.join(breaks)}" if breaks else ""))


def _bands(part: View | Raster, scale: float = 1.0) -> tuple[Bands, Bands]:
    """Return where rows, and columns, of tokens start and stop; those of nothing but padding have no width."""
    rows, cols = (
        [(float(low) * scale, float(high) * scale) for low, high in axis] for axis in part.bands()
    )
    return rows, cols


def _widest(bands: Bands) -> float:
    return max(high - low for low, high in bands)


def _scale(picture: Tensor, parts: Sequence[View | Raster], cell_px: int) -> float:
    """Return how much to enlarge the photo: cells as wide as wanted, the panel neither tiny nor huge."""
    cell = min(max(_widest(_bands(part)[axis]) for part in parts) for axis in (0, 1))
    least, most = (side / max(picture.shape[-2:]) for side in SHOWN_PX)
    return min(max(cell_px / max(cell, 1e-3), least), most)


def _draw_lines(draw: ImageDraw.ImageDraw, bands: Bands, cols: Bands) -> None:
    """Draw the lines between the cells of a view."""
    for low, high in cols:
        for edge in (low, high):
            draw.line([(edge, bands[0][0]), (edge, bands[-1][1])], fill=LINE)
    for low, high in bands:
        for edge in (low, high):
            draw.line([(cols[0][0], edge), (cols[-1][1], edge)], fill=LINE)


def _draw_breaks(
    draw: ImageDraw.ImageDraw, rows: Sequence[_Row], bands: Bands, cols: Bands
) -> None:
    """Draw a bar at the end of every row that a break follows."""
    left, right = cols[0][0], cols[-1][1]
    for (low, high), row in zip(bands, rows, strict=True):
        if row.breaks and high > low:
            bar = [max(right - 8, left), low + 1, max(right - 3, left), max(high - 1, low + 1)]
            draw.rectangle(bar, fill=BREAK)


def _draw_numbers(
    draw: ImageDraw.ImageDraw, rows: Sequence[_Row], bands: Bands, cols: Bands
) -> None:
    """Draw the place of every token, or of the first of a row, as often as letters do not touch."""
    wanted = _widest(bands) * 0.6
    size = min(max(wanted, LETTER_PX[0]), LETTER_PX[1])
    font = ImageFont.load_default(size=size)
    longest = draw.textlength(str(rows[-1].start + len(cols)), font=font)
    every_cell = wanted >= LETTER_PX[0] and longest + 3 <= _widest(cols)
    below = float("-inf")
    for (low, high), row in zip(bands, rows, strict=True):
        if high <= low or low < below:
            continue  # padding, or too near to the number above
        below = low + (0 if every_cell else size * 1.2)
        for number, (start, stop) in enumerate(cols if every_cell else cols[:1]):
            if stop - start >= (longest if every_cell else 0):
                text = str(row.start + number)
                at = start + 2, low + 1
                draw.text(at, text, fill=INK, font=font, stroke_width=1, stroke_fill=PAPER)


def _captioned(image: Image.Image, caption: str) -> Image.Image:
    """Return the picture under a line of text."""
    font = ImageFont.load_default(size=LETTER_PX[1])
    line = LETTER_PX[1] + GAP_PX
    width = max(image.width, int(ImageDraw.Draw(image).textlength(caption, font=font)) + 8)
    sheet = Image.new("RGB", (width, image.height + line), PAPER)
    sheet.paste(image, (0, line))
    ImageDraw.Draw(sheet).text((4, 4), caption, fill=INK, font=font)
    return sheet


def _joined(images: Sequence[Image.Image], axis: int) -> Image.Image:
    """Return pictures beside (axis 0) or below (axis 1) each other."""
    sizes = np.array([image.size for image in images])
    sheet_size = sizes.max(0)
    sheet_size[axis] = sizes[:, axis].sum() + GAP_PX * (len(images) - 1)
    sheet = Image.new("RGB", (int(sheet_size[0]), int(sheet_size[1])), PAPER)
    at = [0, 0]
    for image in images:
        sheet.paste(image, (at[0], at[1]))
        at[axis] += image.size[axis] + GAP_PX
    return sheet


def _image(picture: Tensor) -> Image.Image:
    return Image.fromarray(picture.cpu().movedim(0, -1).contiguous().numpy())


def _tensor(image: Image.Image) -> Tensor:
    return torch.tensor(np.asarray(image)).movedim(-1, 0)
