"""What the command line is given: models by name or file, sizes as text, photos and videos by what they decode as."""

from __future__ import annotations

import os
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visionpos import Grid
from visionpos.errors import PositionError

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def hushed() -> Iterator[None]:
    """Keep decoders off standard error: FFmpeg, OpenCV, libpng and libtiff write there what a refusal says better."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def segment(path: Path, fam: Any, fps: float | None) -> Any:
    """Return the Image or Video segment of a file, by what it decodes as."""
    from visionpos.vlm import Image, pixels
    from visionpos.vlm.pixels.files import begins_as_picture

    try:
        return Image(size_hw=pixels.photo_size_hw(path))
    except PositionError as refusal:
        if not path.is_file() or begins_as_picture(path):
            raise
        try:
            info = pixels.video_info(path)
        except PositionError as other:
            raise PositionError(
                f"{path} is neither a readable photo nor a readable video. As a photo: {refusal} As a video: {other}"
            ) from None
    if fps is None:
        count = fam.frame_count(info.frame_count, info.source_fps)
        spec = pixels.FrameSpec(count=count, multiple=1)
    else:
        spec = pixels.FrameSpec(fps=fps)
    return pixels.frames(info, spec=spec).video()


def model_of(name: str, size: str | None, weights: Path | None = None) -> Any:
    """Return a timm model with the given or random weights, or the one that a file holds."""
    from visionpos import retrofit

    if _is_file(name):
        if weights is not None:
            raise PositionError(
                f"weights {weights} are given beside the file {name}, which has its own. Leave --weights out, or give "
                "the name of a model."
            )
        model = retrofit.restore(name)
        if size is not None:
            retrofit.resize(model, size_hw_of(size))
        return model
    return retrofit.create(
        name, size_hw=None if size is None else size_hw_of(size), weights=weights
    )


def _is_file(name: str) -> bool:
    """Return whether what is given for a model is a file, not a name of timm's."""
    return name.endswith(".safetensors") or Path(name).is_file()


def origin(model: str, weights: Path | None) -> str:
    """Return where the weights came from, for the title: random ones must not look like a checkpoint."""
    if _is_file(model):
        return "weights of the file"
    return "random weights, seed 0" if weights is None else f"weights of {weights.name}"


def grid_of(text: str) -> Grid:
    """Return the token grid of a text such as 14x14, or 8x14x14 with frames first."""
    frames, _, rest = (
        text.lower().partition("x") if text.lower().count("x") == 2 else ("1", "", text)
    )
    sides = [part.strip() for part in (frames, *rest.split("x"))]
    if len(sides) != 3 or not all(side.isdecimal() for side in sides):
        raise PositionError(
            f"grid is {text!r}; ROWSxCOLUMNS or FRAMESxROWSxCOLUMNS of tokens is required, such as 14x14."
        )
    return Grid(int(sides[1]), int(sides[2]), frames=int(sides[0]))


def size_hw_of(text: str) -> tuple[int, int]:
    """Return (height, width) of a text such as 320x448, in pixels or tokens."""
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(part.strip().isdecimal() for part in parts):
        raise PositionError(f"size is {text!r}; HEIGHTxWIDTH is required, such as 320x448.")
    return int(parts[0]), int(parts[1])
