"""Frames of a video file: a path and a choice enter, pixels and their true seconds leave."""

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from visionpos.errors import PositionError
from visionpos.vlm.pixels.probing import VideoInfo, opened_video, video_info
from visionpos.vlm.pixels.sampling import FrameSpec

if TYPE_CHECKING:
    from visionpos.vlm.segments import Video


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VideoFrames:
    """Frames taken from a video.

    Args:
        pixels: `[frames, 3, height, width]` uint8 RGB.
        indices: of the frames in the source, counted among those that decode.
        seconds: of the frames in the source since its first one; never `index / target fps`.
        info: the source.
    """

    pixels: Tensor
    indices: tuple[int, ...]
    seconds: tuple[float, ...]
    info: VideoInfo

    @property
    def source_fps(self) -> float:
        """Frames a second of the source."""
        return self.info.source_fps

    @property
    def size_hw(self) -> tuple[int, int]:
        """Height and width of a frame in pixels."""
        return self.info.size_hw

    @property
    def sampled_fps(self) -> float:
        """Frames taken for each second of the source, as qwen-vl-utils reports it."""
        return len(self.indices) / self.info.duration_seconds

    def video(self) -> "Video":
        """Return the segment that stands for these frames in a token stream."""
        from visionpos.vlm.segments import Video  # pixels work without streams

        return Video(size_hw=self.size_hw, seconds=self.seconds)


def frames(
    source: str | PathLike[str] | VideoInfo,
    indices: Sequence[int] | None = None,
    *,
    spec: FrameSpec | None = None,
    source_fps: float | None = None,
) -> VideoFrames:
    """Return the wanted frames of a video with the seconds at which they stand in it.

    Reads the file in order, twice (once if `source` is a VideoInfo), holding only the wanted frames.
    Frames that a header promises and that do not decode are never sampled.

    Args:
        source: a file, or what `video_info` found in it (with another clock, say).
        indices: frames to take, not decreasing, counted among those that decode.
        spec: how to choose them instead; two a second by default.
        source_fps: frames a second, if the header of the file is wrong.

    Raises:
        PositionError: as `video_info` and `FrameSpec`; if an index is not in the video, `indices`
            stand beside a `spec`, or the file changed since `source` was made.
        ImportError: if OpenCV cannot be loaded.
    """
    if isinstance(source, VideoInfo) and source_fps is not None:
        raise PositionError(
            f"source_fps is {source_fps} beside a VideoInfo that has {source.source_fps}; one rate "
            "is required. Pass it to video_info()."
        )
    if indices is not None and spec is not None:
        raise PositionError(
            f"indices are {list(indices)} and spec is {spec}; one choice is required. Drop one."
        )
    info = source if isinstance(source, VideoInfo) else video_info(source, source_fps=source_fps)
    if indices is None:
        chosen = (spec or FrameSpec()).indices(info.frame_count, info.mean_fps)
    else:
        chosen = _checked_indices(indices, info)
    seconds = tuple(info.frame_seconds[index] for index in chosen)
    return VideoFrames(pixels=_read(info, chosen), indices=chosen, seconds=seconds, info=info)


def _checked_indices(indices: Sequence[int], info: VideoInfo) -> tuple[int, ...]:
    chosen = tuple(int(index) for index in indices)
    if not chosen or list(chosen) != sorted(chosen):
        raise PositionError(
            f"indices are {list(chosen)}; at least 1, in order of time, is required. Sort them."
        )
    if chosen[0] < 0 or chosen[-1] >= info.frame_count:
        raise PositionError(
            f"indices run from {chosen[0]} to {chosen[-1]}; 0 to {info.frame_count - 1} is required: "
            f"{info.frame_count} frames decode of the {info.header_frame_count} that the header of "
            f"{str(info.path)!r} promises. Sample among those that decode."
        )
    return chosen


def _read(info: VideoInfo, indices: tuple[int, ...]) -> Tensor:
    """Return `[frames, 3, height, width]` uint8 RGB, decoding up to the last wanted frame."""
    pixels = torch.empty((len(indices), 3, *info.size_hw), dtype=torch.uint8)
    slot = 0
    with opened_video(info.path) as capture:
        for index in range(indices[-1] + 1):
            grabbed = capture.grab()
            if grabbed and index != indices[slot]:
                continue
            frame = capture.retrieve()[1] if grabbed else None
            if frame is None or frame.shape != (*info.size_hw, 3):
                got = "no longer decodes" if frame is None else f"has shape {frame.shape}"
                raise PositionError(
                    f"path {str(info.path)!r} has a frame {index} that {got}; {info.frame_count} "
                    f"frames of {(*info.size_hw, 3)} are required. Convert it to a constant size."
                )
            rgb = torch.from_numpy(frame).movedim(-1, 0).flip(0)  # OpenCV gives blue first
            while slot < len(indices) and indices[slot] == index:
                pixels[slot] = rgb
                slot += 1
    return pixels
