"""Embedding: a photo as text that a page can hold, so that it needs no second file."""

from __future__ import annotations

import base64
from io import BytesIO

from PIL import Image
from torch import Tensor

from visionpos.errors import PositionError


def data_uri(picture: Tensor, *, longest_px: int = 1600) -> str:
    """Return a photo as a JPEG in a data URI, scaled down where its longer side is beyond what a page shows.

    Args:
        picture: `[3, height, width]` uint8, as `photo` returns it.
        longest_px: longer side of what is embedded, at most.

    Raises:
        PositionError: if the picture has another shape or dtype.
    """
    if picture.ndim != 3 or picture.shape[0] != 3 or str(picture.dtype) != "torch.uint8":
        raise PositionError(
            f"picture is {list(picture.shape)} of {picture.dtype}; [3, height, width] of torch.uint8 is required. "
            "Read it with visionpos.vlm.pixels.photo."
        )
    image = Image.fromarray(picture.cpu().movedim(0, -1).contiguous().numpy())
    image.thumbnail((longest_px, longest_px), Image.Resampling.LANCZOS)
    out = BytesIO()
    image.save(out, format="JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(out.getvalue()).decode("ascii")
