"""Keys and filters of a tile grid: how well a candidate suits a picture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor, inf, log
from typing import Any


@dataclass(frozen=True, slots=True)
class Ask:
    """What a grid is picked for.

    Args:
        width: pixels, less the margin; may be 0 or negative with one.
        height: pixels, less the margin.
        px: side of a tile in pixels, less the margin.
        floats: whether keys are computed in float64.
        turned: whether width and height are those of the picture turned by 90 degrees.
        most: the largest number of tiles.
    """

    width: int
    height: int
    px: int
    floats: bool
    turned: bool = False
    most: int = 0

    def scale(self, cols: int, rows: int) -> int | float | Fraction:
        """Return min(cols px / width, rows px / height), in units of 1 / (width height) where both are above 0.

        A side of 0 gives infinity, a negative side a negative scale.
        """
        if self.width > 0 and self.height > 0:
            return min(cols * self.px * self.height, rows * self.px * self.width)
        sides = (cols, self.width), (rows, self.height)
        return min(Fraction(tiles * self.px, side) if side else inf for tiles, side in sides)

    @property
    def unit(self) -> int:
        """Return what `scale` gives for a grid that keeps the picture's size."""
        return self.width * self.height if self.width > 0 and self.height > 0 else 1

    @property
    def long(self) -> int:
        """Return the longer side in pixels."""
        return max(self.width, self.height)


def _effective(ask: Ask, cols: int, rows: int, _: int) -> int:
    """Return how many pixels of the picture a canvas really shows."""
    area = ask.width * ask.height
    if ask.floats:
        scale = min(cols * ask.px / ask.width, rows * ask.px / ask.height)
        return min(int(ask.width * scale) * int(ask.height * scale), area)
    scale_px = ask.scale(cols, rows)
    return min(floor(scale_px // ask.height) * floor(scale_px // ask.width), area)


def _ratio(ask: Ask, cols: int, rows: int, _: int) -> float | Fraction:
    """Return the distance of the two ratios width / height."""
    if ask.floats:
        return abs(ask.width / ask.height - cols / rows)
    return abs(Fraction(ask.width, ask.height) - Fraction(cols, rows))


def _long_ratio(ask: Ask, cols: int, rows: int, _: int) -> float | Fraction:
    """Return the distance of the two ratios long / short, by the picture's own orientation."""
    if ask.floats and ask.width < ask.height:
        return abs(1 / (cols / rows) - 1 / (ask.width / ask.height))
    if ask.floats:
        return abs(cols / rows - ask.width / ask.height)
    if ask.width >= ask.height:
        return abs(Fraction(ask.width, ask.height) - Fraction(cols, rows))
    return abs(Fraction(ask.height, ask.width) - Fraction(rows, cols))


def _log_ratio(ask: Ask, cols: int, rows: int, _: int) -> float:
    """Return the distance of the two ratios in logarithms; always float64."""
    return abs(log(ask.width / ask.height) - log(cols / rows))


def _half_area(ask: Ask, cols: int, rows: int, place: int) -> tuple[int, int]:
    """Return the tie key of InternVL: the last candidate that the picture fills by half, else the first."""
    fills = 2 * ask.width * ask.height > ask.px**2 * cols * rows
    return (0, -place) if fills else (1, place)


def _short_side(ask: Ask, cols: int, rows: int, _: int) -> float:
    """Return the shorter side after fitting, floored; a square's is not, as in PerceptionLM."""
    if ask.floats:
        factor, ratio = (
            min(cols * ask.px / ask.width, rows * ask.px / ask.height),
            ask.width / ask.height,
        )
        if ratio > 1:
            return floor(factor * ask.width / ratio)
        return factor * ask.height if ratio == 1 else floor(factor * ask.height * ratio)
    scale = ask.scale(cols, rows)
    return floor(scale if ask.width == ask.height else scale // ask.long)


def covering(ask: Ask, cols: int, rows: int, _: int) -> float | Fraction:
    """Return the share of the picture that is left after each cell's longer side is fitted to a tile."""
    widths = [ask.width // cols] * (cols - 1)
    heights = [ask.height // rows] * (rows - 1)
    widths.append(ask.width - sum(widths))
    heights.append(ask.height - sum(heights))
    total: float | Fraction = 0 if ask.floats else Fraction(0)
    # Row by row of the picture: the order of a float sum decides near-ties.
    outer, inner = (widths, heights) if ask.turned else (heights, widths)
    for long, short in ((max(a, b), min(a, b)) for a in outer for b in inner):
        if long <= ask.px:
            total += long * short
        elif ask.floats:
            total += ask.px * (short / long * ask.px)
        else:
            total += Fraction(ask.px * short * ask.px, long)
    return total / (ask.width * ask.height)


Key = Callable[[Ask, int, int, int], Any]

KEYS: dict[str, Key] = {
    "effective": _effective,
    "area": lambda _, cols, rows, __: cols * rows,
    "scale": lambda ask, cols, rows, _: ask.scale(cols, rows),
    "ratio": _ratio,
    "long_ratio": _long_ratio,
    "log_ratio": _log_ratio,
    "half_area": _half_area,
    "short_side": _short_side,
    "covering": covering,
    "long": lambda ask, cols, rows, _: cols if ask.width >= ask.height else rows,
    "listed": lambda _, __, ___, place: place,
}


def _wraps(ask: Ask, cols: int, rows: int) -> bool:
    """Return whether the grid is just thick enough for the picture laid along its long side, in whole pixels.

    That its thickness before pixels are cut off keeps within the number of tiles is looked at too (Phi-3.5).
    """
    along, across = (cols, rows) if ask.width >= ask.height else (rows, cols)
    short = min(ask.width, ask.height)
    if ask.floats:
        ratio = ask.long / short
        thick, px = ceil(along / ratio), int(along * ask.px / ratio)
    else:
        thick, px = -(-along * short // ask.long), along * ask.px * short // ask.long
    return across == max(-(-px // ask.px), 1) and along * thick <= ask.most


def _ratio_inside(ask: Ask, cols: int, rows: int) -> bool:
    """Return whether the grid is no longer, for its thickness, than the picture."""
    if ask.width >= ask.height:
        return cols * ask.height <= ask.width * rows
    return cols * ask.height > ask.width * rows


FILTERS: dict[str, Callable[[Ask, int, int], bool]] = {
    "contains": lambda ask, cols, rows: cols * ask.px >= ask.width and rows * ask.px >= ask.height,
    "enlarges": lambda ask, cols, rows: ask.scale(cols, rows) >= ask.unit,
    "ratio_inside": _ratio_inside,
    "wraps": _wraps,
}
