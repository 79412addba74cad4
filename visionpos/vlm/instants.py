"""Instants: exact times of sampled frames, without the rounding of floats.

Timestamps in seconds enter as floats; fractions leave, so that the id of a frame never depends on float order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from visionpos.errors import PositionError

Seconds = float | Fraction
Instant = Literal["mean_of_ends", "first"]

SHORTEST_SECONDS, LONGEST_SECONDS = 1e-6, 86400.0  # one grid step: a microsecond to a day


def exact(seconds: Seconds, *, single: bool = False) -> Fraction:
    """Return a fraction with a small denominator that is stored as this very float.

    `1 / 30` is one thirtieth, not the binary number next to it: `floor(15 * (1 / 30) * 2)` must be 1.

    Args:
        seconds: a finite number; fractions and whole numbers pass through.
        single: whether the float came from float32, which keeps only 24 bits of it.

    Example:
        >>> exact(2 / 25), exact(7 / 29.97)
        (Fraction(2, 25), Fraction(700, 2997))
    """
    given: Any = seconds
    if isinstance(given, np.floating):  # no float, but for float64, and nothing that Fraction takes
        single = single or given.dtype.itemsize < 8
        seconds = float(given)
    value = Fraction(seconds)
    for digits in range(10):
        guess = value.limit_denominator(10**digits)
        if np.float32(guess) == np.float32(seconds) if single else float(guess) == seconds:
            return guess
    return value


def checked_step(seconds: Seconds, name: str) -> Seconds:
    """Return the seconds of one grid step after checking their range.

    Args:
        seconds: temporal patch / sampled frames per second.
        name: the argument and item, for the message.

    Raises:
        PositionError: if the value is NaN, infinite, below a microsecond or above a day.
    """
    if not (math.isfinite(seconds) and SHORTEST_SECONDS <= seconds <= LONGEST_SECONDS):
        raise PositionError(
            f"{name} is {seconds}; the seconds of one grid step, {SHORTEST_SECONDS:g} to "
            f"{LONGEST_SECONDS:g}, are required. Pass temporal_patch / sampled_fps."
        )
    return seconds


def checked_gaps(times: Sequence[Fraction], name: str) -> None:
    """Refuse a clip whose grid steps are beyond sense, as a wrong frame rate makes them.

    Args:
        times: of every grid step, never falling; equal times are allowed.
        name: the clip, for the message.

    Raises:
        PositionError: if a step is longer than a day, or all are shorter than a microsecond.
    """
    longest = max((after - before for before, after in pairwise(times)), default=Fraction(0))
    if longest > LONGEST_SECONDS or 0 < longest < SHORTEST_SECONDS:
        raise PositionError(
            f"{name} has grid steps of {float(longest):g} seconds; {SHORTEST_SECONDS:g} to {LONGEST_SECONDS:g} are "
            "required. Correct sampled_fps, or the times in seconds=."
        )


def grouped(seconds: tuple[float, ...], group: int) -> list[tuple[float, ...]]:
    """Return the times of each group of frames; the last frame is repeated to fill the last group.

    Example:
        >>> grouped((0.0, 0.5, 1.0), 2)
        [(0.0, 0.5), (1.0, 1.0)]
    """
    filled = seconds + seconds[-1:] * (-len(seconds) % group)
    return [filled[at : at + group] for at in range(0, len(filled), group)]


def named_instants(seconds: tuple[float, ...], group: int, which: Instant) -> tuple[float, ...]:
    """Return the time that a text before or after each group of frames names.

    Args:
        seconds: time of every sampled frame.
        group: frames a grid step.
        which: "mean_of_ends" (Qwen3-VL) or "first" (GLM, Kimi, MiniMax).

    Example:
        >>> named_instants((0.0, 0.5, 1.0), 2, "mean_of_ends")
        (0.25, 1.0)
    """
    groups = grouped(seconds, group)
    if which == "first":
        return tuple(times[0] for times in groups)
    return tuple((times[0] + times[-1]) / 2 for times in groups)


def elapsed_steps(seconds: tuple[float, ...], group: int) -> tuple[Fraction, ...]:
    """Return the exact time from the first frame of the clip to the first frame of each group.

    The start of the group counts, not its middle, so that `id / per_second` is the second in which the frame was seen.

    Example:
        >>> [float(step) for step in elapsed_steps((3.0, 3.5, 4.5, 6.0), 2)]
        [0.0, 1.5]
    """
    starts = [exact(times[0]) for times in grouped(seconds, group)]
    return tuple(start - starts[0] for start in starts)
