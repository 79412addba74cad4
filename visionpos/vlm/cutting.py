"""Cutting: when an image becomes tiles, what they are, and what is kept of them, as frozen specs."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Literal

from visionpos.errors import ConfigError
from visionpos.vlm.box import Arithmetic, check_least
from visionpos.vlm.resize import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class TileSpec:
    """What tiles are.

    Args:
        px: side of a tile in pixels.
        margin_px: pixels that neighbouring tiles share; the canvas is tiles * (px - margin) + margin.
        unit_px: candidates are counted in this unit instead of tiles.
        size: steps that each piece of the picture goes through by itself; None: tiles are cut from one canvas.
        cut: how pieces are cut from the picture: "even" shares, rounded up with a shorter last one ("ceil"), or floored
            with a longer last one ("floor_rest"). Without `size`, ceil and floor_rest pieces are stretched to px.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    px: int
    margin_px: int = 0
    unit_px: int | None = None
    size: tuple[Step, ...] | None = None
    cut: Literal["even", "ceil", "floor_rest"] = "even"

    def __post_init__(self) -> None:
        if not 0 <= self.margin_px < self.px:
            raise ConfigError(
                f"tile px is {self.px} and margin_px {self.margin_px}; 0 <= margin_px < px is required. Correct them."
            )
        if self.unit_px is not None and self.unit_px <= self.margin_px:
            raise ConfigError(
                f"tile unit_px is {self.unit_px} and margin_px {self.margin_px}; margin_px < unit_px is required. "
                "Correct them."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundedCells:
    """A number of cells: both sides divided by a multiple and rounded (ties to even), then multiplied."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    multiple: int
    cells: int

    def __post_init__(self) -> None:
        check_least(self, "rounded_cells_over", multiple=1, cells=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class WhenSpec:
    """When an image is cut into tiles: all that is said must hold.

    Args:
        side_over: the longer side has more pixels.
        area_over_px: the area has more pixels.
        ratio_at_least: long / short is at least this.
        short_side_at_least: the shorter side has at least so many pixels.
        images_at_most: the prompt holds at most so many images.
        rounded_cells_over: the picture has more cells than this.
        tiles_over: the picked grid has more tiles; 1 makes a single tile count as none.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    side_over: int | None = None
    area_over_px: int | None = None
    ratio_at_least: Fraction | None = None
    short_side_at_least: int | None = None
    images_at_most: int | None = None
    rounded_cells_over: RoundedCells | None = None
    tiles_over: int | None = None

    def __post_init__(self) -> None:
        check_least(self, "when", ratio_at_least=1, images_at_most=0)

    def holds(self, size_hw: tuple[int, int], images: int) -> bool:
        """Return whether a picture of this size is to be cut, as far as that can be said before picking."""
        short, long = sorted(size_hw)
        cells = self.rounded_cells_over
        return (
            (self.side_over is None or long > self.side_over)
            and (self.area_over_px is None or long * short > self.area_over_px)
            and (self.ratio_at_least is None or long >= self.ratio_at_least * short)
            and (self.short_side_at_least is None or short >= self.short_side_at_least)
            and (self.images_at_most is None or images <= self.images_at_most)
            and (cells is None or _rounded(short, cells) * _rounded(long, cells) > cells.cells)
        )


def _rounded(side: int, cells: RoundedCells) -> int:
    return round(Fraction(side, cells.multiple))


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentSpec:
    """What is kept of the raster of joined tiles.

    Args:
        kind: "ratio_centre" cuts rows, or columns, at both ends until the raster has the picture's ratio; "content_end"
            leaves out whole patches of padding below and to the right.
        arithmetic: "float64" truncates a float, as LLaVA's own code does.
        empty: what happens when nothing is left: "refuse" raises, "drop" leaves the tiles out of the stream, as
            published code does without a word.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    kind: Literal["ratio_centre", "content_end"]
    arithmetic: Arithmetic = "exact"
    empty: Literal["refuse", "drop"] = "refuse"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShrinkSpec:
    """Interpolation of the raster of joined tiles when it has too many cells.

    With a = tiles * cells of one tile: if cells > over ** 2 * a, both sides are divided by sqrt(cells / a) and floored.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    tiles: int
    over: Fraction
    arithmetic: Arithmetic = "exact"

    def __post_init__(self) -> None:
        check_least(self, "shrink", tiles=1, over=1)
