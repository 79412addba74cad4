"""Writing: a file is either whole or absent."""

from __future__ import annotations

import secrets
import stat
from pathlib import Path

from visionpos.errors import PositionError


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Write a file beside its place and move it there, so that a failure leaves what stood there before.

    A file that is replaced keeps its permissions, and a link to it stays.

    Raises:
        PositionError: if the folder is missing or not writable, or a folder stands there.
    """
    try:
        place = Path(path).resolve()
        if place.is_dir():
            raise IsADirectoryError("it is a folder")
        # A name as long as the file's own may be too long.
        beside = place.with_name(f".{secrets.token_hex(8)}.draft")
        try:
            beside.write_bytes(content.encode() if isinstance(content, str) else content)
            if place.is_file():
                beside.chmod(stat.S_IMODE(place.stat().st_mode))
            beside.replace(place)
        finally:
            beside.unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        said = getattr(error, "strerror", None) or error
        raise PositionError(
            f"path {str(path)!r:.200} cannot be written: {said}. Check folder, space and permissions."
        ) from None
