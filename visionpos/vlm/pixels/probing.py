"""What a video file really holds: a path enters, sizes, counts and times leave (OpenCV)."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from visionpos.errors import PositionError
from visionpos.vlm.pixels.files import readable_file
from visionpos.vlm.pixels.opencv import opencv
from visionpos.vlm.pixels.sampling import checked_rate

Clock = Literal["auto", "container", "index"]
HEADER_FPS_LIMIT = 1000.0  # above it stands a time base or a corrupt number, not a frame rate
JITTER_SECONDS = 0.1  # timestamps off the constant rate by less than this (and one frame) are noise


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoInfo:
    """What a video file really holds, found by decoding it once from end to end.

    Args:
        path: the file.
        size_hw: height and width of a frame in pixels, after the rotation stored by phones.
        source_fps: frames a second: the caller's, else the header's.
        header_fps: what the header promises; may be wrong.
        frame_count: frames that decode.
        header_frame_count: what the header promises; 0 if it is silent.
        clock: where `frame_seconds` come from, "container" or "index".
        frame_seconds: time of every frame since the first, strictly increasing.
    """

    path: Path
    size_hw: tuple[int, int]
    source_fps: float
    header_fps: float
    frame_count: int
    header_frame_count: int
    clock: Literal["container", "index"]
    frame_seconds: tuple[float, ...] = field(repr=False)

    @property
    def mean_fps(self) -> float:
        """Frames a second on average by `clock`; the rate that sampling has to use."""
        if self.clock == "index":
            return self.source_fps
        return (self.frame_count - 1) / self.frame_seconds[-1]

    @property
    def duration_seconds(self) -> float:
        """Time from the first frame to the end of the last one."""
        return self.frame_count / self.mean_fps


def video_info(
    path: str | PathLike[str], *, source_fps: float | None = None, clock: Clock = "auto"
) -> VideoInfo:
    """Return what a video file really holds; decodes it once and keeps no pixels.

    The clock "index" says `index / source_fps`. "container" says the presentation timestamps of the
    file. "auto" takes the container's where they increase strictly and leave the constant rate by more
    than one frame or 0.1 s (variable frame rate: phones, screen recordings, GIF), else the index: AVI
    keeps no timestamps and shifts by one frame after B-frames.

    Args:
        path: a file that OpenCV decodes.
        source_fps: frames a second, instead of the header's; implies the clock "index" for "auto".
        clock: "auto", "container" or "index".

    Raises:
        PositionError: if the file is missing, empty or no video, no frame decodes, the rate is not
            above 0 (a header's: in 0..1000), or the clock asked for does not increase.
        ImportError: if OpenCV cannot be loaded.

    Example:
        >>> video_info("gone.mp4")
        Traceback (most recent call last):
        visionpos.errors.PositionError: path 'gone.mp4' is not a file; an existing video file ...
    """
    if clock not in {"auto", "container", "index"}:
        raise PositionError(
            f"clock is {clock!r}; 'auto', 'container' or 'index' is required. Pass one of them."
        )
    cv2 = opencv()
    file = readable_file(path, "video")
    with opened_video(file) as capture:
        header_fps = float(capture.get(cv2.CAP_PROP_FPS))
        promised = capture.get(cv2.CAP_PROP_FRAME_COUNT)
        fps = _header_rate(header_fps, file) if source_fps is None else source_fps
        fps = checked_rate("source_fps", fps, "Pass the rate at which the video was recorded.")
        size_hw, stamps = _measure(capture, file)
    steady = tuple(index / fps for index in range(len(stamps)))
    own = _chosen_clock("index" if clock == "auto" and source_fps else clock, stamps, steady, fps)
    return VideoInfo(
        path=file,
        size_hw=size_hw,
        source_fps=fps,
        header_fps=header_fps,
        frame_count=len(stamps),
        header_frame_count=int(promised) if promised > 0 else 0,
        clock=own,
        frame_seconds=stamps if own == "container" else steady,
    )


@contextmanager
def opened_video(file: Path) -> Iterator[Any]:
    """Give the cv2.VideoCapture of a file, and release it afterwards.

    Raises:
        PositionError: if OpenCV cannot open the file.
        ImportError: if OpenCV cannot be loaded.
    """
    # An absolute path: FFmpeg would take what stands before a colon for a protocol.
    capture = opencv().VideoCapture(str(file.resolve()))
    try:
        if not capture.isOpened():
            raise PositionError(
                f"path {str(file)!r} cannot be opened as a video; a complete file that OpenCV decodes "
                "is required. Copy it again, or convert it: ffmpeg -i IN -c:v libx264 OUT.mp4."
            )
        yield capture
    finally:
        capture.release()


def _header_rate(header_fps: float, file: Path) -> float:
    if math.isfinite(header_fps) and 0 < header_fps <= HEADER_FPS_LIMIT:
        return header_fps
    raise PositionError(
        f"path {str(file)!r} has {header_fps} frames a second in its header; above 0 and at most "
        f"{HEADER_FPS_LIMIT:g} is required. Pass the true rate as source_fps=."
    )


def _measure(capture: Any, file: Path) -> tuple[tuple[int, int], tuple[float, ...]]:
    """Return the size of the first frame and the timestamp of all, in seconds since the first."""
    milliseconds = opencv().CAP_PROP_POS_MSEC
    stamps: list[float] = []
    size_hw = (0, 0)
    while capture.grab():  # decodes; retrieve() would convert colours as well
        if not stamps:
            decoded, frame = capture.retrieve()
            size_hw = frame.shape[:2] if decoded else size_hw
        stamps.append(capture.get(milliseconds) / 1000)
    if not stamps or 0 in size_hw:
        raise PositionError(
            f"path {str(file)!r} holds no frame that decodes; at least 1 is required. Check that the "
            "file is complete and has a picture track."
        )
    return size_hw, tuple(stamp - stamps[0] for stamp in stamps)


def _chosen_clock(
    clock: Clock, stamps: Sequence[float], steady: Sequence[float], fps: float
) -> Literal["container", "index"]:
    if clock == "index":
        return "index"
    increasing = len(stamps) > 1 and all(a < b for a, b in pairwise(stamps))
    if clock == "container":
        if not increasing:
            raise PositionError(
                f"clock is 'container' for {len(stamps)} frames whose timestamps do not increase; at "
                "least 2 increasing ones are required. Use clock='index'."
            )
        return "container"
    tolerance = min(1 / fps, JITTER_SECONDS) + 1e-6
    variable = any(abs(a - b) > tolerance for a, b in zip(stamps, steady, strict=True))
    return "container" if increasing and variable else "index"
