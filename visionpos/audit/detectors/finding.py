"""Finding: from measured numbers to what a detector says, and the word for a detector that has no meaning somewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from visionpos.audit.result import Found

ABSENT, BROKEN = "does not apply: ", "failed: "


class UnfitError(Exception):
    """A detector has no meaning for a target; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One number that a detector compares.

    Args:
        value: what was measured.
        threshold: where the alarm begins.
        wrong: what an alarm says, without a full stop.
        remedy: what to do then.
        least: the alarm is for numbers below the threshold; above it otherwise.
    """

    value: float
    threshold: float
    wrong: str
    remedy: str
    least: bool = False

    @property
    def alarm(self) -> bool:
        """Return whether the number is out of bounds; what is no number is."""
        if math.isnan(self.value):
            return True
        return self.value < self.threshold if self.least else self.value > self.threshold

    @property
    def severity(self) -> float:
        """Return how far the number is gone: alarms of one detector are compared by it."""
        if not math.isfinite(self.value):
            return math.inf
        over, under = (self.threshold, self.value) if self.least else (self.value, self.threshold)
        if under == 0:
            return math.inf if over > 0 else 0.0
        return over / under


def judged(detector: str, checks: Sequence[Check], healthy: str) -> Found:
    """Return what a detector says: its worst check.

    Args:
        detector: its name.
        checks: at least one.
        healthy: what to say where none raises the alarm.
    """
    worst = max(checks, key=lambda one: (one.alarm, one.severity))
    return Found(
        detector=detector,
        value=worst.value,
        threshold=worst.threshold,
        alarm=worst.alarm,
        says=f"{worst.wrong if worst.alarm else healthy}.",
        remedy=worst.remedy if worst.alarm else "",
    )


def unfit(detector: str, threshold: float, why: str) -> Found:
    """Return that a detector does not apply."""
    return Found(
        detector=detector, value=None, threshold=threshold, alarm=False, says=f"{ABSENT}{why}"
    )


def broken(detector: str, threshold: float, error: Exception) -> Found:
    """Return that a detector failed: a value that is no number, and the reason."""
    words = f"{BROKEN}{type(error).__name__}: {error}"
    return Found(detector=detector, value=math.nan, threshold=threshold, alarm=False, says=words)


def applies(found: Found) -> bool:
    """Return whether a detector had something to look at."""
    return found.value is not None


def did_fail(found: Found) -> bool:
    """Return whether a detector failed instead of measuring."""
    return found.says.startswith(BROKEN)
