"""The check that every media path passes before a decoder sees it."""

from os import PathLike
from pathlib import Path

from visionpos.errors import PositionError


def readable_file(path: str | PathLike[str], kind: str) -> Path:
    """Return the path of a file that exists and holds bytes.

    Args:
        path: where the file is.
        kind: what it should be ("photo", "video"), for the message.

    Raises:
        PositionError: if there is no file (addresses and folders included) or it is empty.
    """
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
