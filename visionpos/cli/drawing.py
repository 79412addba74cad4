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
) -> None:
    """Write the photos among the media with their views, rows, breaks and token numbers.

    Args:
        output: the PNG.
        media: files of the prompt, in order.
        segments: the prompt; its last segments are the media.
        fam: the family.
        tokens: the stream of the prompt.

    Raises:
        PositionError: if there is no photo among the media.
    """
    from visionpos.vlm import Image, pixels

    images = sum(isinstance(segment, Image) for segment in segments)
    drawn = []
    first = len(segments) - len(media)
    for number, path in enumerate(media, start=first):
        segment = segments[number]
        if isinstance(segment, Image):
            plan = fam.plan(segment, images)
            picture = pixels.photo(path)
            drawn.append(pixels.draw_tokens(picture, plan, tokens, number, caption=path.name))
    if not drawn:
        raise PositionError(f"--draw is {output} and no photo is given; give one, or leave it out.")
    pixels.write_png(output, drawn)
