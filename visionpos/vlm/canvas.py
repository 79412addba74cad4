"""Size steps that leave a picture's ratio, or lie around it: stretch, canvas."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from math import floor
from typing import Any, ClassVar, Literal

from visionpos.errors import ConfigError
from visionpos.vlm.box import Box, BoxSize, check_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Bring both sides to a box, whatever that does to the ratio; a canvas is stretched with the picture on it.

    Args:
        box: a side or (width, height) in pixels; by default the canvas of all tiles.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    kind: Literal["stretch"] = "stretch"
    box: BoxSize | None = None

    def __post_init__(self) -> None:
        check_spec(self, "stretch step", box=1)

    def apply(self, box: Box) -> Box:
        """Return the stretched box. A picture thinner than a pixel of the new canvas keeps one."""
        height, width = box.target(self.box)
        if box.canvas_hw is None:
            return box.sized(height, width)
        scale = Fraction(height, box.canvas_hw[0]), Fraction(width, box.canvas_hw[1])
        (top, left), (below, right) = box.corner_yx, (box.height, box.width)
        return replace(
            box,
            height=max(round(below * scale[0]), 1),
            width=max(round(right * scale[1]), 1),
            canvas_hw=(height, width),
            corner_yx=(floor(top * scale[0]), floor(left * scale[1])),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Canvas:
    """Lay a canvas around a picture without scaling it: larger pads, smaller crops.

    Args:
        box: a side or (width, height) in pixels; by default the canvas of all tiles.
        multiple: the canvas is the next multiple of each side.
        square: the canvas is the square of the longer side.
        align: where the extra lies: "centre" (the smaller half above and left), "half_even" (half of it above and left,
            a half pixel to the even number: Pillow's ImageOps.pad) or "end" (below and right).
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    kind: Literal["canvas"] = "canvas"
    box: BoxSize | None = None
    multiple: int | None = None
    square: bool = False
    align: Literal["centre", "half_even", "end"] = "centre"

    def __post_init__(self) -> None:
        check_spec(self, "canvas step", box=1, multiple=1)
        if (self.box is not None) + (self.multiple is not None) + self.square > 1:
            raise ConfigError(
                f"canvas step has box {self.box}, multiple {self.multiple} and square {self.square}; "
                "at most one is allowed. Leave the others out."
            )

    def apply(self, box: Box) -> Box:
        """Return the box with a canvas around it."""
        if self.multiple is not None:
            height, width = (-(-s // self.multiple) * self.multiple for s in box.size_hw)
        elif self.square:
            height = width = max(box.size_hw)
        else:
            height, width = box.target(self.box)
        corner = (0, 0)
        if (
            self.align == "centre"
        ):  # towards zero: padding and crops alike have the smaller half above
            corner = int((height - box.height) / 2), int((width - box.width) / 2)
        elif self.align == "half_even":
            corner = round((height - box.height) / 2), round((width - box.width) / 2)
        return replace(box, canvas_hw=(height, width), corner_yx=corner)
