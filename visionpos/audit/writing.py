"""Writing: a file is either whole or absent."""

from __future__ import annotations

import secrets
from pathlib import Path


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Write a file beside its place and move it there, so that a failure leaves what stood there before.

    Raises:
        OSError: if the folder is missing or not writable.
    """
    place = Path(path)
    beside = place.with_name(f".{place.name}.{secrets.token_hex(4)}")
    try:
        beside.write_bytes(content.encode() if isinstance(content, str) else content)
        beside.replace(place)
    finally:
        beside.unlink(missing_ok=True)
