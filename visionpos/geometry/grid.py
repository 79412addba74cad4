"""Grid: how many tokens there are along time, height and width.

An image or clip size enters; a hashable description of its token lattice leaves. It never holds tensors.
"""

from __future__ import annotations

import numbers
import operator
from dataclasses import dataclass
from math import isqrt
from typing import TYPE_CHECKING, Any, Literal

import torch

from visionpos.errors import PositionError

if TYPE_CHECKING:
    from collections.abc import Sequence

Fit = Literal["exact", "floor", "pad"]


@dataclass(frozen=True)
class Grid:
    """A lattice of tokens, row-major: x runs fastest, then y, then t.

    Args:
        height: rows of tokens, at least 1.
        width: columns of tokens, at least 1.
        frames: time steps of tokens, at least 1; 1 for an image.

    Raises:
        PositionError: if a side is smaller than 1 or not a whole number.

    Example:
        >>> Grid(height=3, width=5).size
        15
        >>> Grid(3, 5, frames=2).shape
        (2, 3, 5)
    """

    height: int
    width: int
    frames: int = 1

    def __post_init__(self) -> None:
        for name in ("height", "width", "frames"):
            side: Any = getattr(self, name)
            if not is_whole(side):
                raise PositionError(
                    f"Grid {name} is {side!r}; a whole number of tokens, at least 1, is required. "
                    "Divide the image side by the patch side, or use Grid.of_image."
                )
            if not isinstance(side, (int, torch.SymInt)):
                object.__setattr__(self, name, operator.index(side))  # a whole number of numpy

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return the sides as (t, y, x)."""
        return (self.frames, self.height, self.width)

    @property
    def size(self) -> int:
        """Return the number of tokens."""
        return self.frames * self.height * self.width

    @classmethod
    def of_image(
        cls,
        size_hw: tuple[int, int],
        patch: int | tuple[int, int],
        *,
        frames: int = 1,
        fit: Fit = "exact",
    ) -> Grid:
        """Return the grid of patches of an image.

        Args:
            size_hw: image (height, width) in pixels.
            patch: patch side in pixels, or (height, width) of a patch.
            frames: time steps.
            fit: what to do with a side that is no multiple of the patch: "exact" refuses, "floor" crops the
                remainder, "pad" counts a partly filled patch.

        Raises:
            PositionError: if a size is not positive, or not divisible under "exact".

        Example:
            >>> Grid.of_image((448, 672), patch=16).shape
            (1, 28, 42)
            >>> Grid.of_image((225, 225), patch=14, fit="pad").shape
            (1, 17, 17)
        """
        patch_hw = patch if isinstance(patch, (tuple, list)) else (patch, patch)
        if fit not in ("exact", "floor", "pad"):
            raise PositionError(f"fit is {fit!r}; it must be 'exact', 'floor' or 'pad'.")
        _check_pair("size_hw", size_hw)
        _check_pair("patch", patch_hw)
        sides = [_cells(side, step, fit) for side, step in zip(size_hw, patch_hw, strict=True)]
        if None in sides:
            raise PositionError(
                f"size_hw {tuple(size_hw)} is not divisible by patch {tuple(patch_hw)}; whole patches are required. "
                'Resize the image, or pass fit="floor" to crop or fit="pad" to pad.'
            )
        height, width = (side or 0 for side in sides)
        return cls(height=height, width=width, frames=frames)

    @classmethod
    def square(cls, tokens: int) -> Grid:
        """Return the square grid of a token count that the caller knows to be square.

        Raises:
            PositionError: if the count is no perfect square. Nothing in the package calls this by itself.

        Example:
            >>> Grid.square(196).shape
            (1, 14, 14)
        """
        side = isqrt(tokens) if is_whole(tokens) else 0
        if side * side != tokens or not side:
            raise PositionError(
                f"tokens is {tokens!r}, which is no square number; a square grid needs one. "
                "Pass Grid(height=..., width=...) with the true sides, without prefix tokens."
            )
        return cls(height=side, width=side)

    def merged(self, merge: int, *, frames: int = 1) -> Grid:
        """Return the grid after merging `merge` x `merge` cells, and `frames` time steps, into one.

        Raises:
            PositionError: if a side is not divisible.

        Example:
            >>> Grid(4, 6).merged(2).shape
            (1, 2, 3)
        """
        if (
            not (is_whole(merge) and is_whole(frames))
            or self.height % merge
            or self.width % merge
            or self.frames % frames
        ):
            raise PositionError(
                f"grid {self.shape} (t, y, x) cannot be merged by {(frames, merge, merge)}; whole numbers that "
                "divide every side are required. Choose an image size that is a multiple of patch * merge."
            )
        return Grid(self.height // merge, self.width // merge, self.frames // frames)


def check_grid(grid: object, name: str = "grid") -> None:
    """Refuse what is no Grid: a pair of sides would not say which is which.

    Raises:
        PositionError: naming the argument and its value.
    """
    if not isinstance(grid, Grid):
        raise PositionError(
            f"{name} is {grid!r}; a Grid of tokens is required. Pass Grid(h, w), or Grid.of_image(size_hw, patch)."
        )


def _check_pair(name: str, pair_hw: Sequence[object]) -> None:
    """Refuse a (height, width) pair that is not two positive whole numbers."""
    given: Any = pair_hw
    listed = hasattr(given, "__len__") and not isinstance(given, (str, bytes)) and len(given) == 2
    if not listed or not all(is_whole(side) for side in given):
        raise PositionError(
            f"{name} is {pair_hw!r}; two whole numbers (height, width) of at least 1 pixel are required."
        )


def is_whole(side: Any) -> bool:
    """Return whether a side is a whole number of at least 1; exporting passes symbolic ones."""
    whole = isinstance(side, (numbers.Integral, torch.SymInt)) and not isinstance(side, bool)
    return whole and bool(side >= 1)


def _cells(side: int, step: int, fit: Fit) -> int | None:
    """Return how many steps a side holds, or None if it must be exact and is not."""
    if side % step == 0:
        return side // step
    return {"exact": None, "floor": side // step, "pad": -(-side // step)}[fit]
