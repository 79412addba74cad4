"""Clips: how many of a clip's frames a family is shown."""

from __future__ import annotations

import math
import numbers
from typing import TYPE_CHECKING

from visionpos.errors import PositionError
from visionpos.geometry.grid import is_whole
from visionpos.vlm.instants import LONGEST_SECONDS

if TYPE_CHECKING:
    from visionpos.vlm.grammar import VideoSpec


def sampled_frames(spec: VideoSpec, total_frames: int, source_fps: float) -> int:
    """Return how many frames of a clip are sampled.

    Args:
        spec: the family's rule for clips.
        total_frames: frames of the clip, at least 1.
        source_fps: its frames per second, above 0.

    Raises:
        PositionError: if the clip is too short, or a value is out of range.
    """
    sample = spec.sample
    if sample is None:
        raise PositionError("no rule for sampling frames is known. Choose the frames yourself.")
    given = is_whole(total_frames) and isinstance(source_fps, numbers.Real)
    if (
        not given
        or total_frames < sample.multiple
        or not 1 / LONGEST_SECONDS <= source_fps < math.inf
    ):
        raise PositionError(
            f"total_frames is {total_frames!r} and source_fps {source_fps!r}; at least {sample.multiple} frames and a "
            "finite fps, of a frame a day or more, are required. Pass a single frame as an Image."
        )
    least = -(-sample.at_least // sample.multiple) * sample.multiple
    most = min(sample.at_most, total_frames) // sample.multiple * sample.multiple
    wanted = min(max(total_frames / source_fps * sample.fps, least), most)
    return math.floor(wanted / sample.multiple) * sample.multiple
