"""Size rules: from the size of a picture to the size a model sees, as a list of small steps.

Sizes enter and sizes leave, no pixels. Arithmetic is integer or rational, where floor(sqrt(q)) of a fraction q is
isqrt(floor(q)); a step that says `arithmetic: float64` repeats the float operations of its published code, because
those decide where a quotient is exact: 1152x1440 becomes 868x1120 in Qwen2-VL, and 896x1120 by exact numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil, floor, isqrt, sqrt
from typing import Any, ClassVar, Literal

from visionpos.errors import ConfigError, PositionError

Clamp = Literal["round", "floor"]
Arithmetic = Literal["exact", "float64"]


@dataclass(frozen=True, slots=True)
class Box:
    """What a size step sees and changes.

    Args:
        height: rows of pixels.
        width: columns of pixels.
        frames: sampled frames of the clip, 1 for an image.
    """

    height: int
    width: int
    frames: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """Refuse a picture that is too long for its width or too small.

    Args:
        ratio_over: refuse if the longer side is more than so many times the shorter.
        side_under: refuse if a side is shorter than so many pixels.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    kind: Literal["refuse"] = "refuse"
    ratio_over: int | None = None
    side_under: int | None = None

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
        return box


@dataclass(frozen=True, slots=True, kw_only=True)
class Enlarge:
    """Leave no side shorter than a limit.

    Args:
        side_at_least: the limit in pixels.
        keep_ratio: "none" moves each short side alone; "floor" scales both by one factor and floors (Qwen3 and
            GLM clips); "half_even" moves the height, then the width, and rounds the other side (PaddleOCR).
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    kind: Literal["enlarge"] = "enlarge"
    side_at_least: int
    keep_ratio: Literal["none", "floor", "half_even"] = "none"

    def apply(self, box: Box) -> Box:
        """Return the enlarged box."""
        height, width, least = box.height, box.width, self.side_at_least
        if self.keep_ratio == "none":
            return replace(box, height=max(height, least), width=max(width, least))
        if self.keep_ratio == "floor":
            scale = max(Fraction(1), Fraction(least, height), Fraction(least, width))
            return replace(box, height=floor(height * scale), width=floor(width * scale))
        if height < least:
            height, width = least, round(Fraction(width * least, height))
        if width < least:
            height, width = round(Fraction(height * least, width)), least
        return replace(box, height=height, width=width)


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
        if min(self.multiple, self.frame_multiple, self.min_px) < 1 or self.max_px < self.min_px:
            raise ConfigError(
                f"pixels step has multiple {self.multiple}, min_px {self.min_px}, max_px {self.max_px}, "
                f"frame_multiple {self.frame_multiple}; positive numbers with min_px <= max_px are required. "
                "Correct them."
            )

    def apply(self, box: Box) -> Box:
        """Return the box whose sides are multiples and whose area is in budget."""
        frames = self._frames(box)
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
        return replace(box, height=height, width=width)

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

    def _frames(self, box: Box) -> int:
        """Return how many frames the budget counts."""
        frames = self.frames or (box.frames if self.over == "clip" else 1)
        if frames < self.frame_multiple:
            raise PositionError(
                f"the clip has {frames} frame; at least {self.frame_multiple} are required. "
                "Repeat the frame, or pass it as an Image."
            )
        return frames

    def _squares(self, box: Box, frames: int, budget_px: int) -> list[Fraction]:
        """Return the square of each side, in multiples, after scaling the box to the budget."""
        unit = frames * self.multiple**2
        sides = ((box.height, box.width), (box.width, box.height))
        return [Fraction(side * budget_px, other * unit) for side, other in sides]


Step = Refuse | Enlarge | Pixels

STEPS: dict[str, type[Refuse] | type[Enlarge] | type[Pixels]] = {
    "refuse": Refuse,
    "enlarge": Enlarge,
    "pixels": Pixels,
}


def resized(steps: Sequence[Step], size_hw: tuple[int, int], *, frames: int = 1) -> tuple[int, int]:
    """Return the size after all steps, in order.

    Args:
        steps: the size rule of a family.
        size_hw: (height, width) in pixels, each at least 1.
        frames: sampled frames of the clip, 1 for an image.

    Returns:
        (height, width) in pixels.

    Raises:
        PositionError: if a step refuses the picture, or leaves a side of 0 pixels.

    Example:
        >>> resized([Pixels(multiple=28, min_px=3136, max_px=1003520)], (480, 640))
        (476, 644)
    """
    box = Box(*size_hw, frames=frames)
    for step in steps:
        box = step.apply(box)
    if min(box.height, box.width) < 1:
        raise PositionError(
            f"size_hw {tuple(size_hw)} becomes {(box.height, box.width)} by step {steps[-1].kind!r}; a side of 0 "
            "pixels has no tokens. Pad the picture to a smaller ratio, or raise max_px."
        )
    return box.height, box.width


def smart_resize(
    size_hw: tuple[int, int],
    factor: int,
    min_px: int,
    max_px: int,
    *,
    ratio_over: int = 200,
    clamp: tuple[Clamp, ...] = ("floor",),
    arithmetic: Arithmetic = "float64",
) -> tuple[int, int]:
    """Return the size that the Qwen-VL line gives an image.

    Args:
        size_hw: (height, width) in pixels.
        factor: unit of both sides in pixels, patch * merge (28 for Qwen2-VL, 32 for Qwen3-VL).
        min_px: smallest number of pixels.
        max_px: largest number of pixels.
        ratio_over: largest ratio of the sides that is accepted.
        clamp: `("floor",)` as transformers does, `("round",)` as qwen-vl-utils does.
        arithmetic: "float64" as both do, or "exact".

    Returns:
        (height, width) in pixels, multiples of `factor`.

    Raises:
        PositionError: if the ratio is too large, or a side becomes 0.

    Example:
        >>> smart_resize((1080, 1920), 28, 3136, 1003520)
        (728, 1316)

    Reference:
        QwenLM/Qwen2-VL qwen-vl-utils vision_process.py; transformers image_processing_qwen2_vl.py.
    """
    budget = Pixels(
        multiple=factor, min_px=min_px, max_px=max_px, clamp=clamp, arithmetic=arithmetic
    )
    return resized([Refuse(ratio_over=ratio_over), budget], size_hw)
