"""Position rules: where the tokens of a grid stand, as one formula with a few switches.

A unit is an image, a clip, or one frame: T x H x W cells that start at position s. At frame f, row i, column j, with n
counting cells from 1:

    time = s + tau_f    row = o + i - ci    col = o + j - cj    index = s - 1 + n * cell_step    ordinal = unit's number

Text stands at one position on every axis. Nothing here holds state: the only thing a rule carries on is s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from visionpos.errors import ConfigError

Axis = Literal["index", "time", "row", "col", "ordinal"]
Clock = Fraction | tuple[Fraction, ...]  # seconds of one grid step, or from the start to each step
Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PerSecond:
    """Ids that count seconds: `tau_f = floor(seconds_f * per_second)`.

    Args:
        per_second: ids a second.
        rounding: "floor", or "none" for ids that are no whole numbers (Qwen3-Omni).
        arithmetic: "exact" in fractions; "float32_step" is `f * (per_second * seconds)` in float32, as transformers
            since 5.18 does for Qwen2.5-VL; "float32_seconds" is `(f * seconds) * per_second` in float32, as vLLM and
            the omni models do. The float orders hold for a regular clip (one number of seconds a grid step); true
            times are always exact.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    per_second: Fraction
    rounding: Literal["floor", "none"] = "floor"
    arithmetic: Literal["exact", "float32_step", "float32_seconds"] = "exact"

    def __post_init__(self) -> None:
        if self.per_second <= 0:
            raise ConfigError(
                f"per_second is {self.per_second}; a number of ids a second above 0 is required."
                " Read it from the checkpoint's tokens_per_second."
            )
        if self.rounding == "none" and self.arithmetic != "exact":
            raise ConfigError(
                f"arithmetic is {self.arithmetic!r} with rounding 'none'; float orders exist to reproduce truncation. "
                "Use arithmetic: exact."
            )

    def offsets(self, clock: Clock, frames: int) -> Array:
        """Return tau_f of every frame, `[frames]` int64 (float64 without rounding).

        Args:
            clock: seconds of one grid step, or from the start of the clip to each step.
            frames: number of grid steps.

        Example:
            >>> PerSecond(per_second=Fraction(25)).offsets(Fraction(2, 25), 6).tolist()
            [0, 2, 4, 6, 8, 10]
        """
        if isinstance(clock, tuple):
            return self._counted([(time * self.per_second).as_integer_ratio() for time in clock])
        if self.arithmetic == "exact":
            ids, each = (clock * self.per_second).as_integer_ratio()
            return self._counted([(frame * ids, each) for frame in range(frames)])
        frame = np.arange(frames, dtype=np.float32)
        rate, seconds = float(self.per_second), float(clock)
        if self.arithmetic == "float32_step":
            return (frame * np.float32(rate * seconds)).astype(np.int64)
        return (frame * np.float32(seconds) * np.float32(rate)).astype(np.int64)

    def _counted(self, ratios: Sequence[tuple[int, int]]) -> Array:
        """Return `[frames]` ids of exact ratios, rounded once."""
        if self.rounding == "none":
            return np.array([above / below for above, below in ratios])
        return np.array([above // below for above, below in ratios], dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """How the number is kept that decoding adds to a token count, rope_deltas in transformers.

    Args:
        from_: "next" is the next position, "max" the largest id + 1, "none" is always 0.
        minus: "unmasked" takes off the number of real tokens, "padded" the length of the padded row.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    from_: Literal["next", "max", "none"] = "next"
    minus: Literal["unmasked", "padded"] = "unmasked"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A position rule.

    Args:
        axes: what each axis of the ids counts, in the model's order.
        origin: where rows and columns start: "start" o = s, "time" o = s + tau_f, "zero" o = 0.
        centre: take (H - 1) // 2 off rows and (W - 1) // 2 off columns.
        frame_step: tau_f: a number of ids a frame, `PerSecond`, or "extent" for max(H, W) ids a frame.
        row_ends: "column" makes the marker at the end of a row cell W of that row.
        next: where text goes on: "max" over all axes + 1, "ceil_max" the same of the next whole number, "extent"
            s + max(H, W), "time" s + last tau + 1. Only clips separate them.
        video: "block" places a clip as one unit, "frames" each frame as an image.
        cell_step: what one cell adds to `index` (V2PE: a fraction).
        delta: book-keeping for decoding.
        pad_id: id of padding.

    Raises:
        ConfigError: if axes repeat or are missing, or an axis that does not grow stands without `index`.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    axes: tuple[Axis, ...]
    origin: Literal["start", "time", "zero"] = "start"
    centre: bool = False
    frame_step: int | PerSecond | Literal["extent"] = 1
    row_ends: Literal["text", "column"] = "text"
    next: Literal["max", "ceil_max", "extent", "time"] = "max"
    video: Literal["block", "frames"] = "block"
    cell_step: Fraction = Fraction(1)
    delta: Delta = field(default_factory=Delta)
    pad_id: int = 0

    def __post_init__(self) -> None:
        if not self.axes or len(set(self.axes)) != len(self.axes):
            raise ConfigError(
                f"axes are {self.axes}; at least one, each once, is required. Correct the list."
            )
        if self.cell_step <= 0:
            raise ConfigError(
                f"cell_step is {self.cell_step}; a step above 0 is required. Use 1, or a fraction as 1/16."
            )
        if isinstance(self.frame_step, int) and self.frame_step < 0:
            raise ConfigError(
                f"frame_step is {self.frame_step}; ids that never fall from frame to frame are required. Use 0 or more."
            )
        if (self.origin == "zero" or "ordinal" in self.axes) and "index" not in self.axes:
            raise ConfigError(
                f"axes {self.axes} with origin {self.origin!r} do not say where text goes on; with origin 'zero' or an "
                "'ordinal' axis the rule must count 'index' too. Add it to axes."
            )

    @property
    def counts_seconds(self) -> bool:
        """Return whether a clip's ids depend on time in seconds."""
        timed = "time" in self.axes or self.origin == "time" or self.next == "time"
        return self.video == "block" and timed and isinstance(self.frame_step, PerSecond)

    @property
    def is_sequential(self) -> bool:
        """Return whether ids are 0, 1, 2, ... whatever the tokens are."""
        return self.axes == ("index",) and self.cell_step == 1 and self.origin == "start"

    @property
    def step(self) -> float:
        """Return what one cell adds to `index`."""
        return float(self.cell_step)

    @property
    def dtype(self) -> type[np.int64] | type[np.float64]:
        """Return the dtype of ids: int64, or float64 where a rule counts in fractions."""
        fractional = isinstance(self.frame_step, PerSecond) and self.frame_step.rounding == "none"
        return np.float64 if fractional or self.cell_step != 1 else np.int64

    def frame_offsets(self, frames: Array, side: Array, clocks: Sequence[Clock | None]) -> Array:
        """Return tau of every frame of every unit, one unit after the other, `[sum(frames)]`.

        Args:
            frames: `[units]` time steps of each unit.
            side: `[units]` max(H, W) of each unit.
            clocks: seconds of each unit, read where the rule counts seconds and a unit has several frames.
        """
        first = np.cumsum(frames) - frames
        frame: Array = np.arange(int(frames.sum()), dtype=np.int64) - np.repeat(first, frames)
        if self.frame_step == "extent":
            return np.asarray(frame * np.repeat(side, frames))
        if not isinstance(self.frame_step, PerSecond):
            return np.asarray(frame * self.frame_step)
        tau = np.zeros(len(frame), dtype=self.dtype)
        for unit in np.flatnonzero(frames > 1):
            clock, count = clocks[unit], int(frames[unit])
            if clock is not None:
                tau[first[unit] : first[unit] + count] = self.frame_step.offsets(clock, count)
        return tau

    def advance(self, frames: Array, height: Array, width: Array, last_tau: Array) -> Array:
        """Return how far behind its start s each unit lets text go on, `[units]`.

        Args:
            frames: `[units]` T.
            height: `[units]` H.
            width: `[units]` W, with the row-end column where the rule has one.
            last_tau: `[units]` tau of the last frame.
        """
        if self.next == "extent":
            return np.maximum(height, width)
        if self.next == "time":
            return last_tau + 1
        top = np.stack(
            [self._top(axis, frames, height, width, last_tau) for axis in self.axes]
        ).max(0)
        return np.asarray((np.ceil(top) if self.next == "ceil_max" else top) + 1)

    def _top(
        self, axis: Axis, frames: Array, height: Array, width: Array, last_tau: Array
    ) -> Array:
        """Return the largest id of an axis less s; axes that start at zero never hold the largest."""
        if axis == "index":
            cells = frames * height * width
            return cells - 1 if self.cell_step == 1 else cells * self.step - 1
        if axis == "time":
            return last_tau
        if axis == "ordinal" or self.origin == "zero":
            return np.zeros_like(last_tau)
        side = height if axis == "row" else width
        centre = (side - 1) // 2 if self.centre else 0
        return side - 1 - centre + (last_tau if self.origin == "time" else 0)
