"""Size steps that look at sides and keep a ratio: refuse, enlarge, fit, multiple.

Arithmetic is integer or rational; `arithmetic: float64` repeats the float operations of published code where those
decide.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import floor
from typing import Any, ClassVar, Literal

import numpy as np

from visionpos.errors import PositionError
from visionpos.vlm.box import ROUNDING, Arithmetic, Box, BoxSize, Number, Rounding, check_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """Refuse a picture that is too long for its width or too small.

    Args:
        ratio_over: refuse if the longer side is more than so many times the shorter.
        side_under: refuse if a side is shorter than so many pixels.
        side_over: refuse if a side is longer than so many pixels.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    kind: Literal["refuse"] = "refuse"
    ratio_over: int | None = None
    side_under: int | None = None
    side_over: int | None = None

    def __post_init__(self) -> None:
        check_spec(self, "refuse step", ratio_over=1, side_under=1, side_over=1)

    def apply(self, box: Box) -> Box:
        """Return the box unchanged, or raise PositionError."""
        short, long = sorted((box.height, box.width))
        if self.ratio_over is not None and long > self.ratio_over * short:
            raise PositionError(
                f"size_hw is {(box.height, box.width)}, a ratio over {self.ratio_over}; this family takes at most "
                f"{self.ratio_over} to 1. Crop or pad the picture first."
            )
        if self.side_under is not None and short < self.side_under:
            raise PositionError(
                f"size_hw is {(box.height, box.width)}; sides of at least {self.side_under} pixels are required. "
                "Enlarge the picture first."
            )
        if self.side_over is not None and long > self.side_over:
            raise PositionError(
                f"size_hw is {(box.height, box.width)}; sides of at most {self.side_over} pixels are required. "
                "Shrink the picture first."
            )
        return box


@dataclass(frozen=True, slots=True, kw_only=True)
class Enlarge:
    """Leave no side shorter than a limit.

    Args:
        side_at_least: the limit in pixels.
        keep_ratio: "none" moves each short side alone; "floor" scales both by one factor and floors (Qwen3 and
            GLM clips); "half_even" moves the height, then the width, and rounds the other side (PaddleOCR).
        arithmetic: "float64" takes the factor first, as transformers does.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    kind: Literal["enlarge"] = "enlarge"
    side_at_least: int
    keep_ratio: Literal["none", "floor", "half_even"] = "none"
    arithmetic: Arithmetic = "exact"

    def __post_init__(self) -> None:
        check_spec(self, "enlarge step", side_at_least=1)

    def apply(self, box: Box) -> Box:
        """Return the enlarged box."""
        height, width, least = box.height, box.width, self.side_at_least
        if min(height, width) >= least:
            return box
        if self.keep_ratio == "none":
            return box.sized(max(height, least), max(width, least))
        if self.keep_ratio == "floor":
            scale: Number = Fraction(least, min(height, width))
            if self.arithmetic == "float64":
                scale = least / min(height, width)
            return box.sized(floor(height * scale), floor(width * scale))
        if height < least:
            height, width = least, round(Fraction(width * least, height))
        if width < least:
            height, width = round(Fraction(height * least, width)), least
        return box.sized(height, width)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Scale a picture to the largest size inside a box, or the smallest that covers it; its ratio is nearly kept.

    Args:
        box: a side or (width, height) in pixels; by default the canvas of all tiles.
        upscale: whether a picture that is smaller than the box grows.
        rounding: of both sides after scaling.
        at_least: smallest side in pixels.
        cover: scale to cover the box instead of fitting into it; then sides may exceed it.
        longest: bring the longer side to the box, whatever the other one becomes before it is cut to the box (Phi-3.5).
        even: lift an odd shorter side by one (the height of a square).
        at_most_upscale_to: the box of each axis is first cut to the side itself, or to this many pixels if that is
            more: a small picture grows to at most so many (Llama 4).
        arithmetic: "exact"; "float64" sets the limiting side and multiplies the other by the factor; "float64_both"
            multiplies both (Fuyu), "float64_divided" divides both (Pixtral); "float64_ratio" sets the limiting side and
            derives the other by width / height (Idefics); "float64_share" divides the other by the limiting one first
            (Pillow's ImageOps.contain, Ovis2); "float32_both" multiplies both in float32 (Molmo).
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    kind: Literal["fit"] = "fit"
    box: BoxSize | None = None
    upscale: bool = True
    rounding: Rounding = "floor"
    at_least: int = 0
    cover: bool = False
    longest: bool = False
    even: bool = False
    at_most_upscale_to: int | None = None
    arithmetic: Literal[
        "exact", "float64", "float64_both", "float64_divided", "float64_ratio", "float64_share", "float32_both",
    ] = "exact"  # fmt: skip

    def __post_init__(self) -> None:
        check_spec(self, "fit step", box=1, at_least=0, at_most_upscale_to=1)

    def apply(self, box: Box) -> Box:
        """Return the scaled box."""
        limit_h, limit_w = box.target(self.box)
        if self.at_most_upscale_to is not None:
            limit_h = min(limit_h, max(box.height, self.at_most_upscale_to))
            limit_w = min(limit_w, max(box.width, self.at_most_upscale_to))
        if not self.upscale and box.height <= limit_h and box.width <= limit_w:
            return box
        height, width = self._scaled(box, limit_h, limit_w)
        if not self.cover:
            height, width = min(height, limit_h), min(width, limit_w)
        if self.even:
            if width >= height:
                height += height % 2
            else:
                width += width % 2
        return box.sized(max(height, self.at_least), max(width, self.at_least))

    def _scaled(self, box: Box, limit_h: int, limit_w: int) -> tuple[int, int]:
        """Return both sides after scaling, in the order of operations that `arithmetic` names."""
        rounded, high, wide = ROUNDING[self.rounding], box.height, box.width
        if self.arithmetic == "float64_both":
            scale = (max if self.cover else min)(limit_h / high, limit_w / wide)
            return rounded(high * scale), rounded(wide * scale)
        if self.arithmetic == "float32_both":
            sides = np.array([high, wide], dtype=np.float32)
            shares = np.array([limit_h, limit_w], dtype=np.float32) / sides
            tall, broad = (sides * (shares.max() if self.cover else shares.min())).tolist()
            return rounded(tall), rounded(broad)
        if self.arithmetic == "float64_divided":
            shrunk = (min if self.cover else max)(high / limit_h, wide / limit_w)
            return rounded(high / shrunk), rounded(wide / shrunk)
        # The picture is wider than its box: then the width is the side that is fitted, or with cover the height.
        if self.longest:
            wider = (wide >= high) != self.cover
        elif self.arithmetic == "float64":
            wider = limit_w / wide < limit_h / high
        else:
            wider = wide * limit_h > high * limit_w
        if wider != self.cover:
            by_ratio = limit_w / (wide / high)
            return rounded(self._other(high, wide, limit_w, by_ratio)), limit_w
        by_ratio = limit_h / (high / wide) if self.longest else limit_h * (wide / high)
        return limit_h, rounded(self._other(wide, high, limit_h, by_ratio))

    def _other(self, side: int, fitted: int, limit: int, by_ratio: float) -> Number:
        """Return the side that follows when the other one goes to its limit."""
        if self.arithmetic == "exact":
            return Fraction(side * limit, fitted)
        if self.arithmetic == "float64_share":
            return side / fitted * limit
        return side * (limit / fitted) if self.arithmetic == "float64" else by_ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class Multiple:
    """Bring each side to a multiple of a unit.

    Args:
        of: the unit in pixels.
        rounding: to which multiple.
        at_least: smallest number of units a side.
        chained: the longer side first; the shorter follows its ratio (floored) and then goes to its own multiple.
        thin_at_most: if exactly one side became 0 it is one unit, and the other the floor of the picture's ratio in
            units, at most so many (Gemma 4).
        arithmetic: "float64" divides by the ratio width / height where chained (Idefics3).
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    kind: Literal["multiple"] = "multiple"
    of: int
    rounding: Rounding = "ceil"
    at_least: int = 0
    chained: bool = False
    thin_at_most: int | None = None
    arithmetic: Arithmetic = "exact"

    def __post_init__(self) -> None:
        check_spec(self, "multiple step", of=1, at_least=0, thin_at_most=1)

    def apply(self, box: Box) -> Box:
        """Return the box whose sides are multiples."""
        if self.chained:
            height, width = self._chained(box)
        else:
            height, width = self._units(box.height), self._units(box.width)
        if self.thin_at_most is not None and (height == 0) != (width == 0):
            ratio = max(box.height, box.width) // min(box.height, box.width)
            most = min(ratio, self.thin_at_most)
            height, width = (1, most) if height == 0 else (most, 1)
        return box.sized(height * self.of, width * self.of)

    def _chained(self, box: Box) -> tuple[int, int]:
        """Return (height, width) in units, the longer side first."""
        if box.width >= box.height:
            width = self._units(box.width)
            long = width * self.of
            if self.arithmetic == "exact":
                return self._units(long * box.height // box.width), width
            return self._units(int(long / (box.width / box.height))), width
        height = self._units(box.height)
        long = height * self.of
        if self.arithmetic == "exact":
            return height, self._units(long * box.width // box.height)
        return height, self._units(int(long * (box.width / box.height)))

    def _units(self, side: int) -> int:
        return max(ROUNDING[self.rounding](Fraction(side, self.of)), self.at_least)
