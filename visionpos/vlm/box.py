"""Box: the size of a picture and of the canvas around it, which size steps see and change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor
from typing import Any, Literal

from visionpos.errors import ConfigError, PositionError
from visionpos.geometry.fields import check_fields

Number = Fraction | float | int
BoxSize = int | tuple[int, int]  # a side, or (width, height)
Arithmetic = Literal["exact", "float64"]
Rounding = Literal["floor", "ceil", "half_even"]

ROUNDING: dict[str, Callable[[Number], int]] = {"floor": floor, "ceil": ceil, "half_even": round}


def check_spec(spec: Any, what: str, **least: int) -> None:
    """Refuse a spec with a field that is not what its class declares, or a number below its least.

    Args:
        spec: a dataclass instance, while it is being made.
        what: its name in messages.
        **least: field -> smallest number; None passes, and every number of a tuple is held against it.

    Raises:
        ConfigError: naming the field and its value.
    """
    try:
        check_fields(spec)
    except PositionError as refusal:
        raise ConfigError(f"{what} has {refusal}") from None
    check_least(spec, what, **least)


def check_least(spec: Any, what: str, **least: int) -> None:
    """Refuse a spec with a number below its least, as `check_spec` does, whatever the types.

    Raises:
        ConfigError: naming the field and its value.
    """
    for name, lowest in least.items():
        value = getattr(spec, name)
        if any(one is not None and one < lowest for one in _numbers(value)):
            raise ConfigError(
                f"{what} has {name} {value}; at least {lowest} is required. Correct it."
            )


def _numbers(value: Any) -> tuple[Any, ...]:
    """Return the numbers of a field that holds one, or tuples of them."""
    if not isinstance(value, tuple):
        return (value,)
    return tuple(number for item in value for number in _numbers(item))


@dataclass(frozen=True, slots=True)
class Box:
    """What a size step sees and changes.

    Args:
        height: rows of pixels of the picture.
        width: columns of pixels of the picture.
        frames: sampled frames of the clip, 1 for an image.
        canvas_hw: (height, width) of the canvas, once a step has laid one around the picture; it is larger where the
            picture is padded and smaller where it is cropped. None: the picture itself.
        corner_yx: where the upper left corner of the picture lies on the canvas; negative where it is cropped.
        default_hw: the box that steps take which name none: the canvas of all tiles.
    """

    height: int
    width: int
    frames: int = 1
    canvas_hw: tuple[int, int] | None = None
    corner_yx: tuple[int, int] = (0, 0)
    default_hw: tuple[int, int] | None = None

    @property
    def size_hw(self) -> tuple[int, int]:
        """Return (height, width) of what leaves: the canvas, or the picture where there is none."""
        return self.canvas_hw or (self.height, self.width)

    def sized(self, height: int, width: int) -> Box:
        """Return the picture at another size.

        Raises:
            ConfigError: if a canvas lies around it already.
        """
        if self.canvas_hw is not None:
            raise ConfigError(
                f"a size step follows `canvas` at canvas {self.canvas_hw}; after it only `stretch` is allowed. "
                "Put `canvas` last."
            )
        return Box(height, width, self.frames, default_hw=self.default_hw)

    def target(self, box: BoxSize | None) -> tuple[int, int]:
        """Return (height, width) of a step's box.

        Args:
            box: a side, (width, height), or None for the canvas of all tiles.

        Raises:
            ConfigError: if there are no tiles to take a canvas from.
        """
        if box is None:
            if self.default_hw is None:
                raise ConfigError(
                    "a size step has no box outside `fill`; a number or [width, height] is required. Add box:."
                )
            return self.default_hw
        return (box, box) if isinstance(box, int) else (box[1], box[0])
