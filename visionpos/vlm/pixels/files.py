"""The check that every media path passes before a decoder sees it."""

from os import PathLike
from pathlib import Path
from typing import Any

from visionpos.errors import PositionError
from visionpos.geometry.arguments import shown

PICTURES = (
    b"\x89PNG",
    b"\xff\xd8\xff",
    b"GIF8",
    b"II*\0",
    b"MM\0*",
    b"BM",
)  # first bytes of stills


def begins_as_picture(path: str | PathLike[str]) -> bool:
    """Return whether a file begins as a still picture does (PNG, JPEG, GIF, TIFF, BMP, WebP), broken or whole."""
    with Path(path).open("rb") as file:
        head = file.read(12)
    return head.startswith(PICTURES) or (head[:4] == b"RIFF" and head[8:] == b"WEBP")


def readable_file(path: str | PathLike[str], kind: str) -> Path:
    """Return the path of a file that exists and holds bytes.

    Args:
        path: where the file is.
        kind: what it should be ("photo", "video"), for the message.

    Raises:
        PositionError: if path is none, there is no file (addresses and folders included) or it is empty.
    """
    given: Any = path
    if not isinstance(given, (str, PathLike)):
        raise PositionError(
            f"path is {shown(path)}; the path of a {kind} file is required. Pass a path, a decoded picture or an "
            "array; bytes are opened with PIL.Image.open(io.BytesIO(data))."
        )
    file = Path(path)
    if not file.is_file():
        raise PositionError(
            f"path {str(path)!r} is not a file; an existing {kind} file is required. "
            "Check the spelling and the working directory, and download addresses first."
        )
    if file.stat().st_size == 0:
        raise PositionError(
            f"path {str(path)!r} is empty (0 bytes); a complete {kind} file is required. "
            "Download or copy it again."
        )
    return file
