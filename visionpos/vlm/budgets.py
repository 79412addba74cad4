"""Size steps that keep to a budget of pixels by one factor: pixels, area, edges.

`floor(sqrt(q))` of a fraction q is isqrt(floor(q)), so no float is needed. A step that says `arithmetic: float64`
repeats the float operations of its published code, because those decide where a quotient is exact: 1152x1440 becomes
868x1120 in Qwen2-VL, and 896x1120 by exact numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor, isqrt, sqrt
from typing import Any, ClassVar, Literal

from visionpos.errors import ConfigError, PositionError
from visionpos.vlm.box import Arithmetic, Box, Number, check_spec

Clamp = Literal["round", "floor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pixels:
    """Bring a picture to multiples of a unit and into a pixel budget, its ratio nearly kept.

    Sides go to the nearest multiple (ties to even). Over the budget both shrink by one factor and floor, under it
    both grow and ceil; that factor comes from the sides before rounding.

    Args:
        multiple: unit of both sides in pixels.
        min_px: smallest number of pixels.
        max_px: largest number of pixels.
        clamp: where a side that became 0 is lifted to one multiple: "round", "floor", both or neither.
        frames: count so many frames whatever the clip holds.
        frame_multiple: the budget is tested on the number of frames rounded to this multiple (ties to even).
        over: whether the budget is for one frame or for the whole clip.
        arithmetic: "float64" repeats the order of operations of transformers and qwen-vl-utils.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    kind: Literal["pixels"] = "pixels"
    multiple: int
    min_px: int
    max_px: int
    clamp: tuple[Clamp, ...] = ("floor",)
    frames: int | None = None
    frame_multiple: int = 1
    over: Literal["frame", "clip"] = "frame"
    arithmetic: Arithmetic = "exact"

    def __post_init__(self) -> None:
        check_spec(self, "pixels step", frames=1)
        if min(self.multiple, self.frame_multiple, self.min_px) < 1 or self.max_px < self.min_px:
            raise ConfigError(
                f"pixels step has multiple {self.multiple}, min_px {self.min_px}, max_px {self.max_px}, "
                f"frame_multiple {self.frame_multiple}; positive numbers with min_px <= max_px are required. "
                "Correct them."
            )

    def apply(self, box: Box) -> Box:
        """Return the box whose sides are multiples and whose area is in budget."""
        frames = counted_frames(box, self.frames, self.frame_multiple, self.over)
        nearest = [round(Fraction(side, self.multiple)) for side in (box.height, box.width)]
        if "round" in self.clamp:
            nearest = [max(side, 1) for side in nearest]
        counted = round(Fraction(frames, self.frame_multiple)) * self.frame_multiple
        area_px = counted * nearest[0] * nearest[1] * self.multiple**2
        if area_px > self.max_px:
            nearest = self._shrunk(box, frames)
        elif area_px < self.min_px:
            nearest = self._grown(box, frames)
        height, width = (side * self.multiple for side in nearest)
        return box.sized(height, width)

    def _shrunk(self, box: Box, frames: int) -> list[int]:
        """Return the sides, in multiples, after shrinking to the largest budget."""
        if self.arithmetic == "float64":
            beta = sqrt((frames * box.height * box.width) / self.max_px)
            sides = [floor(side / beta / self.multiple) for side in (box.height, box.width)]
        else:
            sides = [isqrt(floor(square)) for square in self._squares(box, frames, self.max_px)]
        return [max(side, 1) for side in sides] if "floor" in self.clamp else sides

    def _grown(self, box: Box, frames: int) -> list[int]:
        """Return the sides, in multiples, after growing to the smallest budget."""
        if self.arithmetic == "float64":
            beta = sqrt(self.min_px / (frames * box.height * box.width))
            return [ceil(side * beta / self.multiple) for side in (box.height, box.width)]
        squares = self._squares(box, frames, self.min_px)
        return [isqrt(ceil(square) - 1) + 1 for square in squares]

    def _squares(self, box: Box, frames: int, budget_px: int) -> list[Fraction]:
        """Return the square of each side, in multiples, after scaling the box to the budget."""
        unit = frames * self.multiple**2
        sides = ((box.height, box.width), (box.width, box.height))
        return [Fraction(side * budget_px, other * unit) for side, other in sides]


def counted_frames(
    box: Box, frames: int | None, frame_multiple: int, over: Literal["frame", "clip"]
) -> int:
    """Return how many frames a budget counts.

    Raises:
        PositionError: if the clip has fewer frames than one group.
    """
    counted = frames or (box.frames if over == "clip" else 1)
    if counted < frame_multiple:
        raise PositionError(
            f"the clip has {counted} frame; at least {frame_multiple} are required. "
            "Repeat the frame, or pass it as an Image."
        )
    return counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Area:
    """Scale a picture to an area, its ratio kept; sides are floored.

    Args:
        px: the area in pixels.
        unit: bring each side to the nearest multiple of so many pixels (ties to even), at least one, instead of
            flooring it (NaViT). Floored first, a side could go to the wrong multiple.
        upscale: whether a picture of a smaller area grows.
        chained: the height first, and the width from the floored height (MiniCPM-V).
        arithmetic: "float64" repeats the published order of operations: with `chained` the side is divided by the
            root of the ratio, without it both sides are multiplied by one factor.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    kind: Literal["area"] = "area"
    px: int
    upscale: bool = True
    chained: bool = False
    unit: int | None = None
    arithmetic: Arithmetic = "exact"

    def __post_init__(self) -> None:
        check_spec(self, "area step", px=1, unit=1)
        if self.unit is not None and (self.chained or self.arithmetic != "exact"):
            raise ConfigError(
                "area step has unit with chained or arithmetic float64; exact numbers of either side alone are "
                "required. Leave them out."
            )

    def apply(self, box: Box) -> Box:
        """Return the scaled box."""
        area = box.height * box.width
        if area <= self.px and not self.upscale:
            return box
        if self.unit is not None:
            return box.sized(
                _nearest(Fraction(self.px * box.height, box.width), self.unit),
                _nearest(Fraction(self.px * box.width, box.height), self.unit),
            )
        if self.arithmetic == "float64":
            return box.sized(*self._in_floats(box))
        height = isqrt(self.px * box.height // box.width)
        if self.chained:
            return box.sized(height, height * box.width // box.height)
        return box.sized(height, isqrt(self.px * box.width // box.height))

    def _in_floats(self, box: Box) -> tuple[int, int]:
        """Return (height, width) by the published float operations."""
        if not self.chained:
            factor = sqrt(self.px / (box.height * box.width))
            return floor(factor * box.height), floor(factor * box.width)
        ratio = box.width / box.height
        height = int(sqrt(self.px) / sqrt(ratio))
        return height, int(height * ratio)


def _nearest(square: Fraction, unit: int) -> int:
    """Return the multiple of a unit that is nearest to the root of a number, ties to even, at least one."""
    halves = 4 * square / unit**2  # (2 * side / unit) ** 2
    twice = isqrt(floor(halves))  # 2 k or 2 k + 1 half units
    tie = twice % 2 == 1 and twice * twice == halves
    count = (twice + 1) // 2
    return max(count - (tie and count % 2), 1) * unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Edges:
    """Bring the short side up to a limit, the long side down to one, and both to multiples of a unit.

    Args:
        short_at_least: the shorter side grows to at least so many pixels.
        long_at_most: the longer side shrinks to at most so many pixels; this wins.
        divide: sides are first divided by this (floored), after the factor is known.
        multiple: unit of both sides in pixels; the nearest multiple, ties to even, at least one.
        arithmetic: "float64" takes the factor first, as transformers does.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    kind: Literal["edges"] = "edges"
    short_at_least: int
    long_at_most: int
    divide: int = 1
    multiple: int
    arithmetic: Arithmetic = "exact"

    def __post_init__(self) -> None:
        check_spec(self, "edges step", short_at_least=1, long_at_most=1, divide=1, multiple=1)

    def apply(self, box: Box) -> Box:
        """Return the box with both edges in range."""
        short, long = sorted((box.height, box.width))
        exact = self.arithmetic == "exact"
        scale: Number = 1
        if short < self.short_at_least:
            scale = _quotient(self.short_at_least, short, exact=exact)
        if long * scale > self.long_at_most:
            scale = _quotient(self.long_at_most, long, exact=exact)
        sides = (side // self.divide * scale for side in (box.height, box.width))
        height, width = (
            max(round(side / self.multiple if not exact else Fraction(side) / self.multiple), 1)
            for side in sides
        )
        return box.sized(height * self.multiple, width * self.multiple)


def _quotient(above: int, below: int, *, exact: bool) -> Number:
    """Return above / below, exactly or in float64."""
    return Fraction(above, below) if exact else above / below
