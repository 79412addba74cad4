"""Position rules: where the tokens of a grid stand, as one formula with a few switches.

A unit is an image, a clip, or one frame: T x H x W cells that start at position s. At frame f, row i, column j, with n
counting cells from 1:

    time = s + tau_f    row = o + i * row_step - ci    col = o + j * col_step - cj    index = s - 1 + n * cell_step
    ordinal = unit's number in its row

Text stands at one position on every axis. Nothing here holds state: the only thing a rule carries on is s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, ClassVar, Literal

import numpy as np

from visionpos.errors import ConfigError
from visionpos.vlm.box import check_spec
from visionpos.vlm.clocks import Array, Clock, PerSecond
from visionpos.vlm.rule_parts import AudioInVideo, Circle, Delta

__all__ = ["Array", "AudioInVideo", "Axis", "Circle", "Clock", "Delta", "PerSecond", "Rule"]

Axis = Literal["index", "time", "row", "col", "ordinal"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A position rule.

    Args:
        axes: what each axis of the ids counts, in the model's order.
        origin: where rows and columns start: "start" o = s, "time" o = s + tau_f, "zero" o = 0 (spatial reset).
        centre: take (H - 1) // 2 off rows and (W - 1) // 2 off columns.
        frame_step: tau_f: a number of ids a frame, `PerSecond`, or "extent" for max(H, W) ids a frame.
        row_step: what one row adds to `row` (MM-RoPE: 8 for latents of an eighth).
        col_step: what one column adds to `col`.
        row_ends: "column" makes the marker at the end of a row cell W of that row.
        next: where text goes on: "max" behind the largest offset of any axis, "ceil_max" the same of the next whole
            number, "extent" s + max(H, W), "time" s + last tau + 1. Only clips separate them.
        video: "block" places a clip as one unit, "frames" each frame as an image.
        cell_step: what one cell adds to `index` (V2PE: a fraction); or one number an image or clip of the prompt or
            batch, in reading order, as training draws them (`drawn_steps`).
        cell_span: what all cells of a unit together add to `index`, in place of cell_step (V2PE).
        place: "unit": every view by itself; "canvas": all views of an image over one canvas, the whole image stretched
            (MiniCPM-V 4.7); "aligned": tiles stand where the whole image shows the same (ID-Align). The last two read
            streams alone.
        circle: cells on a circle in place of the formula; None for none.
        temporal_merge: frames of a clip's grid, as processors return it, that are one time step (ERNIE: 2). Streams
            count time steps already.
        edge_cells: placeholders that stand as text at either end of an image in token tensors (HunyuanVL: 1).
        audio: "text": sound tokens stand as text does; "none": they are refused.
        audio_in_video: how the sound of a clip is woven into it; None if it never is.
        delta: book-keeping for decoding.
        pad_id: id of padding.

    Raises:
        ConfigError: if axes repeat or are missing, an axis that does not grow stands without one that does, or two
            switches contradict each other.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    axes: tuple[Axis, ...]
    origin: Literal["start", "time", "zero"] = "start"
    centre: bool = False
    frame_step: int | PerSecond | Literal["extent"] | Fraction = 1
    row_step: Fraction = Fraction(1)
    col_step: Fraction = Fraction(1)
    row_ends: Literal["text", "column"] = "text"
    next: Literal["max", "ceil_max", "extent", "time"] = "max"
    video: Literal["block", "frames"] = "block"
    cell_step: Fraction | tuple[Fraction, ...] = Fraction(1)
    cell_span: Fraction | None = None
    place: Literal["unit", "canvas", "aligned"] = "unit"
    circle: Circle | None = None
    temporal_merge: int = 1
    edge_cells: int = 0
    audio: Literal["none", "text"] = "none"
    audio_in_video: AudioInVideo | None = None
    delta: Delta = field(default_factory=Delta)
    pad_id: int = 0

    def __post_init__(self) -> None:
        check_spec(self, "rule")
        if not self.axes or len(set(self.axes)) != len(self.axes):
            raise ConfigError(
                f"axes are {self.axes}; at least one, each once, is required. Correct the list."
            )
        for name in ("cell_step", "row_step", "col_step", "cell_span"):
            step = getattr(self, name)
            if any(one <= 0 for one in steps_of(step)):
                raise ConfigError(
                    f"{name} is {step}; a step above 0 is required. Use 1, or a fraction as 1/16."
                )
        if isinstance(self.frame_step, int | Fraction) and self.frame_step < 0:
            raise ConfigError(
                f"frame_step is {self.frame_step}; ids that never fall from frame to frame are required. Use 0 or more."
            )
        if min(self.temporal_merge, self.edge_cells + 1) < 1:
            raise ConfigError(
                f"temporal_merge is {self.temporal_merge} and edge_cells {self.edge_cells}; at least 1 and 0 are "
                "required. Leave them out."
            )
        self._check_axes()

    def _check_axes(self) -> None:
        """Refuse axes and switches that do not go together."""
        grows = {"index", "time"} if self.origin == "zero" else {"index"}
        if (self.origin == "zero" or "ordinal" in self.axes) and not grows & set(self.axes):
            raise ConfigError(
                f"axes {self.axes} with origin {self.origin!r} do not say where text goes on; with origin 'zero' the "
                "rule must count 'index' or 'time' too, with an 'ordinal' axis 'index'. Add it to axes."
            )
        spatial = self.axes == ("time", "row", "col")
        if (self.place == "canvas" or self.circle is not None) and not spatial:
            raise ConfigError(
                f"axes are {self.axes} with place {self.place!r} and circle {self.circle}; a canvas and a circle need "
                "axes [time, row, col]. Correct one of them."
            )
        if self.place == "aligned" and (self.axes != ("index",) or self.cell_step != 1):
            raise ConfigError(
                f"axes are {self.axes} with place 'aligned'; [index] in whole steps is required. Correct one of them."
            )
        if self.audio_in_video is not None and not (self.video == "block" and spatial):
            raise ConfigError(
                f"audio_in_video is given with video {self.video!r} and axes {self.axes}; a block with axes "
                "[time, row, col] is required. Leave it out."
            )

    @property
    def counts_seconds(self) -> bool:
        """Return whether a clip's ids depend on time in seconds."""
        timed = "time" in self.axes or self.origin == "time" or self.next == "time"
        return self.video == "block" and timed and isinstance(self.frame_step, PerSecond)

    @property
    def is_sequential(self) -> bool:
        """Return whether ids are 0, 1, 2, ... whatever the tokens are."""
        plain = self.cell_step == 1 and self.cell_span is None and self.place == "unit"
        return self.axes == ("index",) and plain and self.origin == "start"

    @property
    def dtype(self) -> type[np.int64] | type[np.float64]:
        """Return the dtype of ids: int64, or float64 where a rule counts in fractions."""
        tau = self.frame_step
        unrounded = isinstance(tau, PerSecond) and tau.rounding == "none"
        broken = isinstance(tau, Fraction) and tau.denominator > 1
        steps = (*steps_of(self.cell_step), self.row_step, self.col_step)
        fractional = self.cell_span is not None or any(step.denominator > 1 for step in steps)
        return (
            np.float64 if unrounded or broken or fractional or self.circle is not None else np.int64
        )

    def frame_offsets(self, frames: Array, side: Array, clocks: Sequence[Clock | None]) -> Array:
        """Return tau of every frame of every unit, one unit after the other, `[sum(frames)]`.

        Args:
            frames: `[units]` time steps of each unit.
            side: `[units]` max(H, W) of each unit.
            clocks: seconds of each unit, or none at all; read where the rule counts seconds and a unit has several
                frames.
        """
        if frames.max(initial=1) == 1:
            return np.zeros(len(frames), dtype=np.int64)
        first = np.cumsum(frames) - frames
        frame: Array = np.arange(int(frames.sum()), dtype=np.int64) - np.repeat(first, frames)
        if self.frame_step == "extent":
            return np.asarray(frame * np.repeat(side, frames))
        if not isinstance(self.frame_step, PerSecond):
            return times(frame, Fraction(self.frame_step))
        tau = np.zeros(len(frame), dtype=self.dtype)
        for unit in np.flatnonzero(frames > 1):
            clock, count = clocks[unit] if clocks else None, int(frames[unit])
            if clock is not None:
                tau[first[unit] : first[unit] + count] = self.frame_step.offsets(clock, count)
        return tau

    def advance(self, shape: Array, last_tau: Array, reach: Array) -> Array:
        """Return how far behind its start s each unit lets text go on, `[units]`.

        Args:
            shape: `[units, 3]` T, H, W, with the row-end column where the rule has one.
            last_tau: `[units]` tau of the last frame.
            reach: `[units]` of `reach`.
        """
        if self.next == "extent":
            return np.asarray(shape[:, 1:].max(1, initial=0))
        if self.next == "time":
            return last_tau + 1
        return np.asarray((np.ceil(reach) if self.next == "ceil_max" else reach) + 1)

    def reach(self, shape: Array, last_tau: Array, index_span: Array) -> Array:
        """Return how far behind its start s the farthest cell of each unit stands on any axis, `[units]`.

        Args:
            shape: `[units, 3]` T, H, W, with the row-end column where the rule has one.
            last_tau: `[units]` tau of the last frame.
            index_span: `[units]` what all cells together add to `index`.
        """
        reach, *more = (self._top(axis, shape, last_tau, index_span) for axis in self.axes)
        for top in more:
            reach = np.maximum(reach, top)
        return reach

    def _top(self, axis: Axis, shape: Array, last_tau: Array, index_span: Array) -> Array:
        """Return the largest offset of an axis; rows and columns that start at zero take as much room as others."""
        if axis == "index":
            return index_span - 1
        if axis == "time":
            return last_tau
        if axis == "ordinal":
            return np.zeros_like(last_tau)
        side, step = (shape[:, 1], self.row_step) if axis == "row" else (shape[:, 2], self.col_step)
        top = times(side - 1, step)
        if self.centre:
            top = top - (side - 1) // 2
        return top + last_tau if self.origin == "time" else top


def steps_of(step: Fraction | tuple[Fraction, ...] | None) -> tuple[Fraction, ...]:
    """Return one step, several or none as a tuple."""
    return step if isinstance(step, tuple) else () if step is None else (step,)


def times(values: Array, step: Fraction) -> Array:
    """Return values * step, int64 for a whole step, else float64 rounded once.

    Example:
        >>> (
        ...     times(np.array([1, 2]), Fraction(1, 2)).tolist(),
        ...     times(np.array([1, 2]), Fraction(3)).tolist(),
        ... )
        ([0.5, 1.0], [3, 6])
    """
    above, below = step.numerator, step.denominator
    product = values if above == 1 else values * above
    return product if below == 1 else np.asarray(product / below)
