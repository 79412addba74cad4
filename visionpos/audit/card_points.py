"""What a release card holds: its points, line by line."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from visionpos.audit.writing import write_whole

State = Literal["measured", "failed", "undefined"]
CONTROL = "control"
"""The line of a model without position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One evaluation.

    Args:
        line: the intervention, or "control".
        grid_hw: rows and columns of patch tokens.
        size_hw: image (height, width) in pixels.
        value: what `evaluate` returned; None where there is none.
        state: "measured"; "failed" where `evaluate` raised or gave no finite number; "undefined" where the model cannot
            take the grid, or the intervention has no meaning for it.
        note: why there is no value.
        seconds: of the evaluation.
    """

    line: str
    grid_hw: tuple[int, int]
    size_hw: tuple[int, int]
    value: float | None
    state: State
    note: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """What a model's quality is at several grids.

    Args:
        target: the model's name.
        trained_hw: rows and columns that it serves as it is given.
        points: line by line, in the order of grids.
        complete: False where an evaluation failed.
    """

    target: str
    trained_hw: tuple[int, int]
    points: tuple[Point, ...]
    complete: bool

    def __iter__(self) -> Iterator[Point]:
        """Return the points in order."""
        return iter(self.points)

    @property
    def lines(self) -> dict[str, tuple[Point, ...]]:
        """Return line -> its points, those without a value too: a figure shows a gap there."""
        names = dict.fromkeys(point.line for point in self.points)
        return {name: tuple(one for one in self.points if one.line == name) for name in names}

    @property
    def drawn(self) -> dict[str, list[tuple[str, float]]]:
        """Return line -> (grid, quality) pairs as `report.figures.resolution_curves` draws them; NaN is a gap."""
        return {
            name: [
                (
                    f"{one.grid_hw[0]}x{one.grid_hw[1]}",
                    math.nan if one.value is None else one.value,
                )
                for one in points
            ]
            for name, points in self.lines.items()
        }

    def data(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return {
            "target": self.target,
            "trained_hw": list(self.trained_hw),
            "complete": self.complete,
            "points": [asdict(point) for point in self.points],
        }

    def to_json(self, path: str | Path) -> None:
        """Write the data as JSON, whole or not at all."""
        write_whole(path, json.dumps(self.data(), indent=2, allow_nan=False) + "\n")
