"""Clocks: ids that count seconds, exact or in the float order of a reference.

Seconds of a clip enter as fractions; the time offsets of its frames leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from visionpos.errors import ConfigError
from visionpos.vlm.box import check_spec

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
        check_spec(self, "PerSecond")
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
