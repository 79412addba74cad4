"""What general checks of a model say: how far two answers are apart, and the sentence for it."""

from __future__ import annotations

from torch import Tensor

from visionpos.audit.result import Found

HALF = 5e-2
"""Of the norm, in half precision."""


def apart(found: Tensor, wanted: Tensor) -> float:
    """Return the norm of the difference over that of what is wanted; infinity where shapes differ."""
    if found.shape != wanted.shape:
        return float("inf")
    size = float(wanted.double().norm())
    change = float((found.double() - wanted.double()).norm())
    return change / size if size else (0.0 if change == 0 else float("inf"))


def found_of(
    name: str, value: float, threshold: float, says: str, remedy: str, healthy: str
) -> Found:
    """Return what a check says of a number; above the threshold it is an alarm."""
    alarm = not value <= threshold
    return Found(
        detector=name,
        value=value,
        threshold=threshold,
        alarm=alarm,
        says=says if alarm else healthy,
        remedy=remedy if alarm else "",
    )
