"""How the command line writes pages: of a prompt, and any page whole or not at all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from visionpos.errors import PositionError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from visionpos.vlm import Family, PositionIds, TokenStream


def write_page(path: Path, page: str) -> None:
    """Write an HTML page, whole or not at all, where `check_page` has seen that one can be written."""
    from visionpos.audit.writing import write_whole

    write_whole(path, page)


def check_page(path: Path) -> None:
    """Refuse what no page can be written to, before the work is done.

    Raises:
        PositionError: if the name ends in another format's suffix, or there is no such folder.
    """
    if path.suffix.lower() not in (".html", ".htm") or path.is_dir():
        raise PositionError(
            f"page {str(path)!r} is no HTML file; a name that ends in .html is required. Rename it."
        )
    if not path.parent.is_dir():
        raise PositionError(
            f"page {str(path)!r} is in no existing folder; create {path.parent} first."
        )


def stream_html(
    media: Sequence[Path],
    segments: Sequence[Any],
    fam: Family,
    tokens: TokenStream,
    pos: PositionIds | None,
    *,
    title: str,
) -> str:
    """Return the page of a prompt, its photos embedded.

    Args:
        media: files of the prompt, in order.
        segments: the prompt; its last segments are the media.
        fam: the family.
        tokens: the stream of the prompt.
        pos: its ids; None where the family has no rule.
        title: heading of the page.
    """
    from visionpos.audit.report import stream_page
    from visionpos.vlm import Image, Video, pixels

    images = max(sum(isinstance(segment, Image) for segment in segments), 1)
    plans = {
        number: fam.plan(segment, images)
        for number, segment in enumerate(segments)
        if isinstance(segment, Image | Video)
    }
    first = len(segments) - len(media)
    photos = {
        number: pixels.photo(path)
        for number, path in enumerate(media, start=first)
        if isinstance(segments[number], Image)
    }
    axes = () if pos is None or fam.spec.rule is None else fam.spec.rule.axes
    return stream_page(tokens, pos, photo=photos, plan=plans, axes=axes, title=title)
