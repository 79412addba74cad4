"""Schedules: the strength of an attachment as a pure function of the training step."""

from __future__ import annotations

import dataclasses
import math
import operator
from dataclasses import dataclass
from typing import Literal, get_args

from visionpos.errors import PositionError
from visionpos.retrofit.kinds import check_kinds

Shape = Literal["linear", "cosine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A strength that moves from one value to another.

    It is `start` up to step `begin`, `end` from step `begin + steps` on, exactly, and never turns back between. It
    remembers nothing: a run that resumes at a step has that step's strength.

    Args:
        steps: optimizer steps that the move takes, at least 1.
        begin: optimizer step at which it starts, at least 0.
        start: value before, any finite number.
        end: value after, any finite number.
        shape: "linear", or "cosine": half a wave, slow at both ends.

    Raises:
        PositionError: if a field is out of range.

    Example:
        >>> ramp = Schedule(steps=4, begin=2, shape="cosine")
        >>> [round(ramp.at(step), 3) for step in (0, 2, 3, 4, 6, 100)]
        [0.0, 0.0, 0.146, 0.5, 1.0, 1.0]

    Reference:
        cosine: SGDR (arXiv 1608.03983), equation 5, as torch.optim.lr_scheduler.CosineAnnealingLR.
    """

    steps: int
    begin: int = 0
    start: float = 0.0
    end: float = 1.0
    shape: Shape = "linear"

    def __post_init__(self) -> None:
        if self.shape not in get_args(Shape):
            raise PositionError(f"shape is {self.shape!r}; it must be 'linear' or 'cosine'.")
        if whole(self.steps) < 1 or whole(self.begin) < 0:
            raise PositionError(
                f"steps is {self.steps!r} and begin {self.begin!r}; whole numbers of at least 1 and 0 are required. "
                "Count optimizer steps."
            )
        check_kinds("start", self.start, float, int)
        check_kinds("end", self.end, float, int)
        if not (math.isfinite(self.start) and math.isfinite(self.end)):
            raise PositionError(
                f"start is {self.start} and end {self.end}; finite numbers are required, 0 for none and 1 for full."
            )

    def at(self, step: int) -> float:
        """Return the strength after `step` optimizer steps.

        Raises:
            PositionError: if step is no whole number of at least 0.
        """
        done = whole(step)
        if done < 0:
            raise PositionError(
                f"step is {step!r}; a whole number of at least 0 is required. Pass the optimizer steps taken so far."
            )
        if done <= self.begin:
            return float(self.start)
        if done >= self.begin + self.steps:
            return float(self.end)
        share = (done - self.begin) / self.steps
        if self.shape == "cosine":
            share = (1.0 - math.cos(math.pi * share)) / 2.0
        value = self.start + (self.end - self.start) * share
        # Rounding must not carry it past an end.
        return min(max(value, min(self.start, self.end)), max(self.start, self.end))

    def reversed(self) -> Schedule:
        """Return the schedule from `end` to `start` over the same steps: the other side of a cross-fade."""
        return dataclasses.replace(self, start=self.end, end=self.start)


def whole(value: object) -> int:
    """Return a whole number of any kind, -1 for anything else."""
    try:
        return operator.index(value)  # type: ignore[arg-type]  # what has no __index__ raises
    except TypeError:
        return -1
