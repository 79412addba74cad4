"""Which frames of a video to take: totals and rates enter, frame indices leave; no pixels."""

import math
from dataclasses import dataclass
from typing import Literal

import torch

from visionpos.errors import PositionError


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameSpec:
    """How many frames of a video to take, and where: `fps` for each second, or `count` in all.

    Args:
        fps: frames wanted for each second of video.
        multiple: the number taken is a multiple of this (frames of a temporal patch); 1 allows odd.
        at_least: fewest frames, rounded up to the multiple.
        at_most: most frames, rounded down to the multiple.
        count: exactly this many, whatever the duration.
        spacing: "ends" runs from the first to the last frame (qwen-vl-utils; transformers' Qwen3-VL
            but for ties); "steps" takes equal strides from the first (transformers' Qwen2-VL).

    Raises:
        PositionError: if a value can sample nothing, or `count` is no multiple of `multiple`.

    Reference: qwen-vl-utils 0.0.14 `vision_process.smart_nframes` (QwenLM/Qwen2.5-VL). Deliberate
    difference: a `count` that is no multiple is refused, not rounded.
    """

    fps: float = 2.0
    multiple: int = 2
    at_least: int = 4
    at_most: int = 768
    count: int | None = None
    spacing: Literal["ends", "steps"] = "ends"

    def __post_init__(self) -> None:
        """Refuse what can sample nothing."""
        checked_rate("fps", self.fps, "Pass the frames wanted for each second, such as 2.0.")
        whole = {"multiple": self.multiple, "at_least": self.at_least, "at_most": self.at_most}
        for name, value in (whole | {"count": 1 if self.count is None else self.count}).items():
            if value < 1 or value % 1:
                raise PositionError(
                    f"{name} is {value!r}; a whole number of at least 1 is required. "
                    f"Pass {name}=1 or more."
                )
        if self.count is not None and self.count % self.multiple:
            raise PositionError(
                f"count is {self.count}; a multiple of {self.multiple} is required. Pass "
                f"{self.count + -self.count % self.multiple}, or multiple=1 (patches() pads)."
            )
        if self.spacing not in {"ends", "steps"}:
            raise PositionError(
                f"spacing is {self.spacing!r}; 'ends' or 'steps' is required. Pass one of the two."
            )

    def indices(self, total: int, source_fps: float) -> tuple[int, ...]:
        """Return the strictly increasing indices to take from `total` frames.

        Args:
            total: frames that really decode.
            source_fps: mean frames a second of the file.

        Raises:
            PositionError: if the video is shorter than the frames to take, or than `multiple`.
        """
        checked_rate("source_fps", source_fps, "Pass the rate at which the video plays.")
        n = int(self._number(total, source_fps) if self.count is None else self.count)
        if not self.multiple <= n <= total:
            raise PositionError(
                f"total is {total} frames and {n} would be taken; {self.multiple} to {total} must "
                "be. Use a longer video, a smaller count, or multiple=1."
            )
        if self.spacing == "steps":
            return tuple(torch.arange(0, total, total / n, dtype=torch.float32)[:n].int().tolist())
        # float32 and half to even, because the sources compute so.
        return tuple(torch.linspace(0, total - 1, n, dtype=torch.float32).round().int().tolist())

    def _number(self, total: int, source_fps: float) -> int:
        least = math.ceil(self.at_least / self.multiple) * self.multiple
        most = min(self.at_most, total) // self.multiple * self.multiple
        wanted = min(max(total / source_fps * self.fps, least), most, total)
        return math.floor(wanted / self.multiple) * self.multiple


def frame_indices(
    total: int,
    source_fps: float,
    fps: float = 2.0,
    *,
    multiple: int = 2,
    at_least: int = 4,
    at_most: int = 768,
) -> tuple[int, ...]:
    """Return the frames of a video that a target rate takes: `FrameSpec(...).indices` in one call.

    Args:
        total: frames that really decode.
        source_fps: frames a second of the file.
        fps: frames wanted a second.
        multiple: see `FrameSpec`, as the rest.
        at_least: fewest frames.
        at_most: most frames.

    Raises:
        PositionError: as `FrameSpec`.

    Example:
        >>> frame_indices(100, 25.0)
        (0, 14, 28, 42, 57, 71, 85, 99)
    """
    spec = FrameSpec(fps=fps, multiple=multiple, at_least=at_least, at_most=at_most)
    return spec.indices(total, source_fps)


def checked_rate(name: str, value: float, remedy: str) -> float:
    """Return a rate as float after refusing 0, negative, NaN and infinite values."""
    if not (math.isfinite(value) and value > 0):
        raise PositionError(
            f"{name} is {value}; a finite rate above 0 frames a second is required. {remedy}"
        )
    return float(value)
