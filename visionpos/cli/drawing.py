"""How the command line draws: every photo of a prompt with its tokens on it, one below the other in one PNG."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from visionpos.errors import PositionError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from visionpos.vlm import Family, TokenStream


def draw_photos(
    output: Path, media: Sequence[Path], segments: Sequence[Any], fam: Family, tokens: TokenStream
) -> dict[str, Any]:
    """Write the photos among the media with their views, rows, breaks and token numbers.

    Args:
        output: the PNG.
        media: files of the prompt, in order.
        segments: the prompt; its last segments are the media.
        fam: the family.
        tokens: the stream of the prompt.

    Returns:
        What was written: the file, and first and last token of every photo.

    Raises:
        PositionError: if there is no photo among the media, or the file cannot be written.
    """
    from visionpos.vlm import Image, pixels

    images = sum(isinstance(segment, Image) for segment in segments)
    drawn, photos = [], []
    first = len(segments) - len(media)
    for number, path in enumerate(media, start=first):
        segment = segments[number]
        if isinstance(segment, Image):
            plan = fam.plan(segment, images)
            picture = pixels.photo(path)
            drawn.append(pixels.draw_tokens(picture, plan, tokens, number, caption=path.name))
            spans = [span for span in tokens.spans if span.segment == number]
            ends = {"first": spans[0].start, "last": spans[-1].stop - 1}
            photos.append({"photo": path.name, "segment": number, **ends})
    if not drawn:
        raise PositionError(f"--draw is {output} and no photo is given; give one, or leave it out.")
    pixels.write_png(output, drawn)
    return {"file": str(output), "photos": photos}


def drawn_line(drawing: dict[str, Any]) -> str:
    """Return in words what was drawn."""
    photos = [f"{one['photo']} tokens {one['first']}..{one['last']}" for one in drawing["photos"]]
    return f"wrote {drawing['file']}: {', '.join(photos)}"
