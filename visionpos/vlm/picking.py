"""Picking a tile grid: candidates, then attempts of a filter and ordered keys. Every tiling rule of the field is one.

A candidate is (cols, rows). The first attempt that leaves a candidate wins; inside it the smallest tuple of keys wins,
a leading minus means larger first, and the place in the candidate list decides what is still equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from math import ceil
from typing import Any, ClassVar, Literal

from visionpos.errors import ConfigError
from visionpos.vlm.box import Arithmetic, check_least
from visionpos.vlm.keys import FILTERS, KEYS, Ask, covering

Candidate = tuple[int, int]  # cols, rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where candidates come from: exactly one of tiles, list, near_area and strips.

    Args:
        tiles: all grids of so many tiles, (fewest, most).
        list: the grids themselves, in the order that decides ties.
        near_area: the factor grids of m - 1, m and m + 1 tiles, where m tiles hold the picture's area, up to this.
        strips: (k, 1) for a wide picture and (1, k) for a tall one, k in (fewest, most).
        reading: whether `list` is written (cols, rows) "wh" or (rows, cols) "hw".
        side_at_most: most tiles a side of `tiles`.
        sorted: order of `tiles`: by area then cols, by area then rows, or "ratio_groups": areas falling, cols rising,
            regrouped by ratio at its first appearance.
        share: "images" divides the largest number of `tiles` by the number of images of the prompt, floored.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    tiles: tuple[int, int] | None = None
    list: tuple[tuple[int, int], ...] | None = None
    near_area: int | None = None
    strips: tuple[int, int] | None = None
    reading: Literal["wh", "hw"] = "wh"
    side_at_most: int | None = None
    sorted: Literal["area_cols", "area_rows", "ratio_groups"] = "area_cols"
    share: Literal["images"] | None = None

    def __post_init__(self) -> None:
        least = {"tiles": 1, "list": 1, "near_area": 2, "strips": 1, "side_at_most": 1}
        check_least(self, "pick.from", **least)
        if self.share is not None and self.tiles is None:
            raise ConfigError(
                f"pick.from has share {self.share!r} without tiles; (fewest, most) tiles are required. Leave it out."
            )
        if self.strips is not None and self.strips[0] > self.strips[1]:
            raise ConfigError(
                f"pick.from has strips {self.strips}; (fewest, most) is required. Swap them."
            )
        given = [self.tiles, self.list, self.near_area, self.strips]
        if sum(one is not None for one in given) != 1:
            raise ConfigError(
                f"pick.from holds tiles {self.tiles}, list {self.list}, near_area {self.near_area}, strips "
                f"{self.strips}; exactly one is required. Leave the others out."
            )
        if not _fixed(self) and self.near_area is None and self.strips is None:
            raise ConfigError(f"pick.from {self} offers no grid; at least one is required.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """A filter with a number.

    Args:
        covering_over: `covering` must be more.
        strip_at_least: the long side divided by the number of tiles, floored, must be at least so many pixels.
        strip_ceil_at_least: the same rounded up.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    covering_over: Fraction | None = None
    strip_at_least: int | None = None
    strip_ceil_at_least: int | None = None

    def __post_init__(self) -> None:
        check_least(self, "only", covering_over=0, strip_at_least=0, strip_ceil_at_least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A filter and the keys that order what it leaves.

    Args:
        by: keys, most important first.
        only: the filter; None keeps all.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    by: tuple[str, ...]
    only: Literal["contains", "enlarges", "ratio_inside", "wraps"] | Threshold | None = None

    def __post_init__(self) -> None:
        unknown = [key for key in self.by if key.removeprefix("-") not in KEYS]
        if unknown or not self.by:
            raise ConfigError(
                f"pick key {unknown[0] if unknown else ''!r} is unknown; it must be one of {', '.join(KEYS)}."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PickSpec:
    """How a tile grid is picked.

    Args:
        from_: the candidates.
        attempts: tried in order; if none leaves a candidate, there are no tiles.
        arithmetic: "float64" repeats the float operations of published code, which decide near-ties.
        transpose: judge each candidate on the picture turned by 90 degrees (transformers' Ovis2).
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    from_: Source
    attempts: tuple[Attempt, ...] = field(default=())
    arithmetic: Arithmetic = "exact"
    transpose: bool = False

    def __post_init__(self) -> None:
        if not self.attempts:
            raise ConfigError("pick has no attempts; at least one with `by:` is required. Add it.")


def _passes(only: Threshold, ask: Ask, cols: int, rows: int) -> bool:
    """Return whether a candidate passes a filter with a number."""
    if only.covering_over is not None:
        least = float(only.covering_over) if ask.floats else only.covering_over
        if not covering(ask, cols, rows, 0) > least:
            return False
    tiles = cols * rows
    if only.strip_at_least is not None and ask.long // tiles < only.strip_at_least:
        return False
    least_px = only.strip_ceil_at_least
    return least_px is None or ceil(Fraction(ask.long, tiles)) >= least_px


def picked(spec: PickSpec, size_hw: tuple[int, int], px: int, images: int = 1) -> Candidate | None:
    """Return (cols, rows) of the grid that the rule picks, or None if it leaves none.

    Args:
        spec: the rule.
        size_hw: (height, width) of the picture in pixels, less the margin.
        px: side of a tile in pixels, less the margin.
        images: number of images of the prompt, which may share the tiles.

    Example:
        >>> closest = Attempt(by=("ratio", "half_area"))
        >>> rule = PickSpec(from_=Source(tiles=(1, 12)), attempts=(closest,), arithmetic="float64")
        >>> picked(rule, (400, 1000), 448), picked(rule, (448, 448), 448)
        ((5, 2), (1, 1))
    """
    height, width = size_hw[::-1] if spec.transpose else size_hw
    most = 0 if spec.from_.tiles is None else spec.from_.tiles[1]
    ask = Ask(width, height, px, spec.arithmetic == "float64", spec.transpose, most)
    candidates = _candidates(spec.from_, ask, images)
    for attempt in spec.attempts:
        kept = list(enumerate(candidates))
        if isinstance(attempt.only, Threshold):
            kept = [one for one in kept if _passes(attempt.only, ask, *one[1])]
        elif attempt.only is not None:
            holds = FILTERS[attempt.only]
            kept = [one for one in kept if holds(ask, *one[1])]
        for key in attempt.by:
            if len(kept) > 1:
                kept = _least(kept, ask, key)
        if kept:
            return kept[0][1]
    return None


def _least(
    kept: Sequence[tuple[int, Candidate]], ask: Ask, key: str
) -> list[tuple[int, Candidate]]:
    """Return the candidates whose key is smallest, in order."""
    value, larger_first = KEYS[key.removeprefix("-")], key.startswith("-")
    values = [value(ask, cols, rows, place) for place, (cols, rows) in kept]
    best = max(values) if larger_first else min(values)
    return [one for one, got in zip(kept, values, strict=True) if got == best]


def _candidates(source: Source, ask: Ask, images: int) -> tuple[Candidate, ...]:
    """Return the candidates in the order that decides ties."""
    if source.near_area is not None:
        return _near_area(min(-(-ask.width * ask.height // ask.px**2), source.near_area), source)
    if source.strips is not None:
        fewest, most = source.strips
        wide = ask.width >= ask.height
        return tuple((k, 1) if wide else (1, k) for k in range(fewest, most + 1))
    return _fixed(source) if source.share is None else _shared(source, images)


@lru_cache(maxsize=256)  # a pure function of frozen data
def _shared(source: Source, images: int) -> tuple[Candidate, ...]:
    """Return the grids of an image that shares the tiles with others."""
    fewest, most = source.tiles or (1, 1)
    return _fixed(replace(source, tiles=(fewest, max(fewest, most // images)), share=None))


@lru_cache(maxsize=256)  # a pure function of frozen data
def _near_area(tiles: int, source: Source) -> tuple[Candidate, ...]:
    """Return the factor grids of tiles - 1, tiles, tiles + 1, except 1 and more than allowed."""
    counts = [n for n in (tiles - 1, tiles, tiles + 1) if 1 < n <= (source.near_area or 0)]
    return tuple((c, n // c) for n in counts for c in range(1, n + 1) if n % c == 0)


@lru_cache(maxsize=256)  # a pure function of frozen data
def _fixed(source: Source) -> tuple[Candidate, ...]:
    """Return candidates that do not depend on the picture."""
    if source.list is not None:
        return tuple(one[::-1] if source.reading == "hw" else one for one in source.list)
    fewest, most = source.tiles or (0, 0)
    side = source.side_at_most or most
    grids = [(c, n // c) for n in range(fewest, most + 1) for c in range(1, n + 1) if n % c == 0]
    grids = [grid for grid in grids if max(grid) <= side]
    if source.sorted == "area_rows":
        grids.sort(key=lambda grid: (grid[0] * grid[1], grid[1]))
    if source.sorted == "ratio_groups":
        grids.sort(key=lambda grid: (-grid[0] * grid[1], grid[0]))
        groups: dict[Fraction, list[Candidate]] = {}
        for grid in grids:
            groups.setdefault(Fraction(*grid), []).append(grid)
        grids = [grid for group in groups.values() for grid in group]
    return tuple(grids)
