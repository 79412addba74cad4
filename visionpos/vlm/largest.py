"""Size steps that search the largest grid on a picture's ratio: patches, patch_budget, aligned_pixels, row_budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil, isqrt, sqrt
from typing import Any, ClassVar, Literal

from visionpos.errors import PositionError
from visionpos.vlm.box import Arithmetic, Box, check_spec
from visionpos.vlm.budgets import counted_frames

BISECTION_EPS = 1e-5  # of the factor, in big_vision, timm and transformers


@dataclass(frozen=True, slots=True, kw_only=True)
class Patches:
    """Scale a picture to the largest grid of at most so many patches, each side rounded up to whole patches (NaFlex).

    Args:
        patch: side of a patch in pixels.
        at_most: largest number of patches.
        scale_at_most: largest factor.
        arithmetic: "float64" bisects the factor to 1e-5 and keeps the smaller end, as all published code does; it
            misses a grid that is reached less than that before the budget ends (1 size in 3000).
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    kind: Literal["patches"] = "patches"
    patch: int
    at_most: int
    scale_at_most: int = 100
    arithmetic: Arithmetic = "exact"

    def __post_init__(self) -> None:
        check_spec(self, "patches step", patch=1, at_most=1, scale_at_most=1)

    def apply(self, box: Box) -> Box:
        """Return the box of whole patches.

        The grid changes only where a side reaches a whole number of patches, so rows (then columns) are enough to
        look at: with `rows` rows the scale reaches `rows * patch / height`, and that gives the columns.
        """
        if self.arithmetic == "float64":
            return box.sized(*self._bisected(box))
        rows = _largest(self.at_most, lambda rows: self._fits(rows, box.height, box.width))
        cols = _largest(self.at_most, lambda cols: self._fits(cols, box.width, box.height))
        # The larger of the two scales is the largest that fits, if any side limits it at all.
        by_rows, by_cols = Fraction(rows, box.height), Fraction(cols, box.width)
        scale = min(max(by_rows, by_cols) * self.patch, Fraction(self.scale_at_most))
        height, width = (max(-(-side * scale // self.patch), 1) for side in (box.height, box.width))
        return box.sized(int(height) * self.patch, int(width) * self.patch)

    def _bisected(self, box: Box) -> tuple[int, int]:
        """Return (height, width) by the published bisection."""

        def sides(scale: float) -> tuple[int, int]:
            rows, cols = (
                max(ceil(side * scale / self.patch), 1) for side in (box.height, box.width)
            )
            return rows, cols

        low, high = BISECTION_EPS / 10, float(self.scale_at_most)
        while high - low >= BISECTION_EPS:
            middle = (low + high) / 2
            rows, cols = sides(middle)
            low, high = (middle, high) if rows * cols <= self.at_most else (low, middle)
        rows, cols = sides(low)
        return rows * self.patch, cols * self.patch

    def _fits(self, count: int, side: int, other: int) -> bool:
        """Return whether `count` patches along `side`, at the scale that fills them, keep to the limit."""
        return count * max(-(-other * count // side), 1) <= self.at_most


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchBudget:
    """Shrink a picture until its whole patches fit a budget (MoonViT); never enlarge it.

    Patches are counted before shrinking and floored, so padding afterwards may exceed the budget, as in the source.

    Args:
        patch: side of a patch in pixels.
        at_most: largest number of patches.
        side_at_most: largest number of patches a side.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    kind: Literal["patch_budget"] = "patch_budget"
    patch: int
    at_most: int
    side_at_most: int

    def __post_init__(self) -> None:
        check_spec(self, "patch_budget step", patch=1, at_most=1, side_at_most=1)

    def apply(self, box: Box) -> Box:
        """Return the shrunk box."""
        counted = max(box.height // self.patch, 1) * max(box.width // self.patch, 1)
        longest = self.side_at_most * self.patch
        square = min(
            Fraction(1),
            Fraction(self.at_most, counted),
            Fraction(longest, box.height) ** 2,
            Fraction(longest, box.width) ** 2,
        )
        above, below = square.as_integer_ratio()
        height, width = (
            min(max(isqrt(side * side * above // below), 1), longest)
            for side in (box.height, box.width)
        )
        return box.sized(height, width)


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignedPixels:
    """Bring a picture to multiples of a unit by rounding up, inside a pixel budget.

    Below the budget it grows by rounding up; above it the largest whole height is taken whose rounded-up grid fits. The
    picture keeps its ratio, grows only below the budget, and lies at the upper left of that canvas.

    Args:
        multiple: unit of both sides in pixels.
        min_px: smallest number of pixels of all frames.
        max_px: largest number of pixels of all frames.
        frames: count so many frames whatever the clip holds.
        frame_multiple: frames are counted rounded to this multiple (ties to even), at least one.
        over: whether the budget is for one frame or for the whole clip.
        arithmetic: "float64" takes the factor of growth first, as transformers does.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    kind: Literal["aligned_pixels"] = "aligned_pixels"
    multiple: int
    min_px: int
    max_px: int
    frames: int | None = None
    frame_multiple: int = 1
    over: Literal["frame", "clip"] = "frame"
    arithmetic: Arithmetic = "exact"

    def __post_init__(self) -> None:
        least = {"multiple": 1, "min_px": 1, "frames": 1, "frame_multiple": 1}
        check_spec(self, "aligned_pixels step", **least, max_px=self.min_px)

    def apply(self, box: Box) -> Box:
        """Return the box whose sides are multiples and whose pixels are in budget."""
        frames = counted_frames(box, self.frames, 1, self.over)
        groups = max(round(Fraction(frames, self.frame_multiple)), 1)
        counted = groups * self.frame_multiple
        if counted * self.multiple**2 > self.max_px:
            raise PositionError(
                f"the clip has {frames} frames; one unit of {self.multiple} x {self.multiple} pixels each is more than "
                f"max_px {self.max_px}. Sample fewer frames."
            )
        height, width = self._aligned(box.height), self._aligned(box.width)
        if counted * height * width < self.min_px:
            height, width = (self._aligned(side) for side in self._grown(box, frames))
        if counted * height * width > self.max_px:

            def fits(height: int) -> bool:
                cells = self._aligned(height) * self._aligned(self._width(box, height))
                return counted * cells <= self.max_px

            rows = _largest(box.height, fits)
            height, width = self._aligned(rows), self._aligned(self._width(box, rows))
        return self._padded(box, height, width, grows=frames * box.height * box.width < self.min_px)

    @staticmethod
    def _padded(box: Box, height: int, width: int, *, grows: bool) -> Box:
        """Return the picture in its own ratio at the upper left of a canvas; a published rule, in its floats."""
        scale = min(height / box.height, width / box.width)
        scale = scale if grows else min(scale, 1.0)
        rows, cols = (
            max(1, min(most, int(side * scale)))
            for side, most in ((box.height, height), (box.width, width))
        )
        return replace(box.sized(rows, cols), canvas_hw=(height, width))

    def _grown(self, box: Box, frames: int) -> tuple[int, int]:
        """Return (height, width) at the smallest budget, rounded up."""
        if self.arithmetic == "float64":
            scale = sqrt(self.min_px / (frames * box.height * box.width))
            return max(ceil(box.height * scale), 1), max(ceil(box.width * scale), 1)
        square = Fraction(self.min_px, frames * box.height * box.width)
        height, width = (
            isqrt(ceil(side * side * square) - 1) + 1 for side in (box.height, box.width)
        )
        return height, width

    def _aligned(self, side: int) -> int:
        return -(-side // self.multiple) * self.multiple

    @staticmethod
    def _width(box: Box, height: int) -> int:
        """Return the width of the picture at another height, floored, at least 1."""
        return max(box.width * height // box.height, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBudget:
    """Bring a picture to the largest grid on its ratio that fits, counting one cell more a row for its end.

    Args:
        multiple: side of a cell in pixels.
        max_px: largest number of pixels of all frames, row ends included.
        frame_px: largest number of pixels of a frame.
        over: whether max_px is for one frame or for the whole clip.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    kind: Literal["row_budget"] = "row_budget"
    multiple: int
    max_px: int
    frame_px: int
    over: Literal["frame", "clip"] = "frame"

    def __post_init__(self) -> None:
        check_spec(self, "row_budget step", multiple=1, max_px=1, frame_px=1)

    def apply(self, box: Box) -> Box:
        """Return the box of whole cells; one cell where nothing fits."""
        frames = counted_frames(box, None, 1, self.over)
        cell = self.multiple**2
        most_cols = max(1, box.width // self.multiple)
        # More rows leave no room for one column and its row end, or for one cell of the frame.
        most_rows = min(self.max_px // cell // (2 * frames), self.frame_px // cell)
        for rows in range(min(max(1, box.height // self.multiple), most_rows), 0, -1):
            # On the ray of the ratio, `rows` rows go with these columns; one row admits any narrower width.
            fewest = 1 if rows == 1 else max(1, box.width * rows // box.height)
            ray = max(1, -(-box.width * (rows + 1) // box.height) - 1)
            budget = self.max_px // cell // (frames * rows) - 1
            cols = min(most_cols, ray, budget, self.frame_px // (cell * rows))
            if cols >= fewest:
                return box.sized(rows * self.multiple, cols * self.multiple)
        return box.sized(self.multiple, self.multiple)


def _largest(limit: int, fits: Callable[[int], bool]) -> int:
    """Return the largest whole number up to `limit` that fits, by bisection; 0 if 1 does not."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
