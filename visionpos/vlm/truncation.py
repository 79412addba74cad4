"""Truncation: a prompt made shorter without cutting an image or a clip in two.

An image is kept whole, with the markers around it, or goes together with its grid. What is kept is the longest stretch
of at most so many tokens from one end of the prompt, so a shorter prompt is never put together from parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from visionpos.errors import PositionError
from visionpos.geometry.arguments import checked
from visionpos.vlm.families import Family
from visionpos.vlm.inputs import Grids, checked_tokens, token_grids
from visionpos.vlm.pieces import AUDIO, IMAGE, VIDEO, Cells, Run, Words
from visionpos.vlm.stream import TokenStream
from visionpos.vlm.token_units import units_of_tokens

Side = Literal["left", "right"]
Cut = Literal["drop", "raise"]
Stretch = tuple[int, int]


@checked
def truncate_stream(
    stream: TokenStream, length: int, *, side: Side = "right", cut: Cut = "drop"
) -> TokenStream:
    """Return a stream of at most `length` tokens, in which every image and clip is whole.

    Args:
        stream: from `family.stream`.
        length: tokens at most, at least 0.
        side: where tokens are taken off. "right" keeps the beginning, and the ids of what is kept; "left" keeps the
            end, and loses the first images.
        cut: "drop" lets an image that does not fit go, with all beyond it; "raise" refuses to lose any.

    Returns:
        A `TokenStream`. Its runs and spans keep the numbers of their segments, so the images of
        `{span.segment for span in result.spans}` are those whose pixels and grids are still needed.

    Raises:
        PositionError: with the needed length, if cut is "raise" and an image would be lost.

    Example:
        >>> from visionpos.vlm import Image, Text, family
        >>> fam = family("qwen2_vl")
        >>> stream = fam.stream([Text(tokens=3), Image((56, 84)), Text(tokens=4)])  # 3 + 8 + 4
        >>> truncate_stream(stream, 10).length, truncate_stream(stream, 12).length
        (3, 12)
        >>> truncate_stream(stream, 10, side="left").length
        4
    """
    media, place, names = [], 0, []
    for number, group in groupby(stream.runs, lambda run: run.segment):
        runs = list(group)
        inner = [at for at, run in enumerate(runs) if not isinstance(run, Words)]
        if any(isinstance(run, Cells) for run in runs):
            # Text behind the last marker may be joined with the text that follows; it can be cut.
            media.append((place, place + sum(run.count for run in runs[: inner[-1] + 1])))
            names.append(f"the image, clip or sound of segment {number}")
        place += sum(run.count for run in runs)
    first, last = _kept(place, media, names, length, side, cut)
    kept = (_part(run, first - at, last - at) for at, run in stream.placed())
    return replace(stream, runs=tuple(run for run in kept if run is not None))


@dataclass(frozen=True, slots=True, eq=False)
class Truncation:
    """What is kept of a row of tokens.

    Args:
        start: first token kept; tokens, types, mask and labels become `[start:stop]`.
        stop: one past the last.
        images: `[kept]` int64, which of the image grids stay.
        videos: `[kept]` int64, which of the video grids stay.
    """

    start: int
    stop: int
    images: Tensor
    videos: Tensor


@checked
def truncate_tokens(
    modality: Tensor,
    length: int,
    *,
    family: Family,
    image_grids: Grids | None = None,
    video_grids: Grids | None = None,
    around: tuple[int, int] = (1, 1),
    side: Side = "right",
    cut: Cut = "drop",
) -> Truncation:
    """Return which tokens and grids to keep of what a processor returned for one prompt.

    Args:
        modality: `[n]`, 0 text, 1 image, 2 video, without padding.
        length: tokens at most, at least 0.
        family: gives the position rule and the patches a token.
        image_grids: `[images, 3]` in patches.
        video_grids: `[videos, 3]` in patches.
        around: text tokens before and after an image or clip that go with it: (1, 1) for a start and an end token.
        side: where tokens are taken off, as in `truncate_stream`.
        cut: "drop" or "raise", as in `truncate_stream`.

    Raises:
        PositionError: if types and grids do not fit together; with the needed length, if cut is "raise" and an image
            would be lost.

    Example:
        >>> from visionpos.vlm import family
        >>> types = torch.tensor([0, 0, 1, 1, 1, 1, 0, 0, 0])
        >>> kept = truncate_tokens(types, 5, family=family("qwen2_vl"), image_grids=[[1, 4, 4]])
        >>> kept.start, kept.stop, kept.images.tolist()
        (0, 1, [])
    """
    if modality.ndim != 1:
        raise PositionError(
            f"modality has shape {tuple(modality.shape)}; one prompt [n] is required. Truncate rows one by one, before "
            "they are padded."
        )
    counts: Sequence[int] = around
    if len(counts) != 2 or min(counts) < 0:
        raise PositionError(
            f"around is {around}; two token counts of at least 0, before and after an image, are required."
        )
    numbers, media = _media(modality, family, image_grids, video_grids)
    total = len(modality)
    grown: list[Stretch] = []
    for (first, last), behind in zip(media, [*(one for one, _ in media[1:]), total], strict=False):
        # Markers never reach into a neighbour, nor take a token that is one of its markers.
        before = grown[-1][1] if grown else 0
        grown.append((max(first - around[0], before), min(last + around[1], behind)))
    names = [f"{'image' if kind == IMAGE else 'video'} {item}" for kind, item in numbers]
    start, stop = _kept(total, grown, names, length, side, cut)
    kept = [
        one
        for one, (first, last) in zip(numbers, media, strict=True)
        if start <= first and last <= stop
    ]
    images, videos = (
        torch.tensor([item for kind, item in kept if kind == wanted], dtype=torch.int64)
        for wanted in (IMAGE, VIDEO)
    )
    return Truncation(start, stop, images, videos)


def _media(
    modality: Tensor, family: Family, image_grids: Grids | None, video_grids: Grids | None
) -> tuple[list[tuple[int, int]], list[Stretch]]:
    """Return kind and number of every image and clip in reading order, and the tokens each covers."""
    rule, spec = family.spec.rule, family.spec
    if rule is None or rule.place != "unit" or rule.is_sequential:
        raise PositionError(
            f"{family.name} has no position rule that reads grids, so token types do not say where an image ends. Use "
            "truncate_stream on the family's stream."
        )
    types, keep = checked_tokens(modality, modality, None)
    clips = (spec.video or spec).grid.merge
    grids = {
        IMAGE: token_grids(image_grids, "image_grids", merge=spec.grid.merge),
        VIDEO: token_grids(video_grids, "video_grids", merge=clips, frames=rule.temporal_merge),
    }
    if (types == AUDIO).any():
        raise PositionError(
            "modality holds 3 (audio), and token types do not say where a sound ends. Use truncate_stream on the "
            "family's stream."
        )
    units = units_of_tokens(types, keep, grids, (), rule)
    of, spans = units.medium, units.spans
    numbers: list[tuple[int, int]] = []
    media: list[Stretch] = []
    seen = {IMAGE: 0, VIDEO: 0}
    for medium in range(int(of.max(initial=-1)) + 1):
        mine = np.flatnonzero(of == medium)
        first, last = int(units.start[mine[0]]), int(units.start[mine[-1]] + spans[mine[-1]])
        kind = int(types[0, first])
        edge = rule.edge_cells  # placeholders at either end that the rule places as text
        if edge and kind == IMAGE and (types[0, max(first - edge, 0) : first] == IMAGE).any():
            first, last = first - edge, last + edge
        numbers.append((kind, seen[kind]))
        media.append((first, last))
        seen[kind] += 1
    return numbers, media


def _kept(
    total: int, media: Sequence[Stretch], names: Sequence[str], length: int, side: Side, cut: Cut
) -> Stretch:
    """Return the first token kept, and one past the last."""
    length = int(length)  # a count of numpy or torch would go on into the runs
    if length < 0:
        raise PositionError(
            f"length is {length}; a number of tokens of at least 0 is required. Pass the budget of a row."
        )
    first, last = (0, min(length, total)) if side == "right" else (max(total - length, 0), total)
    lost = [at for at, (start, stop) in enumerate(media) if start < first or stop > last]
    if lost and cut == "raise":
        needed = media[-1][1] if side == "right" else total - media[0][0]
        raise PositionError(
            f"length is {length} and {names[lost[0]]} would be lost; {needed} of the {total} tokens are needed to keep "
            "every image and clip whole. Raise length, resize the image, or pass cut='drop'."
        )
    if lost and side == "right":
        last = min(last, media[lost[0]][0])
    elif lost:
        first = max(first, media[lost[-1]][1])
    return first, last


def _part(run: Run, start: int, stop: int) -> Run | None:
    """Return tokens start to stop - 1 of a run, None for none; only text is ever taken apart."""
    start, stop = max(start, 0), min(stop, run.count)
    if start >= stop:
        return None
    if stop - start == run.count or not isinstance(run, Words):
        return run
    if run.token_ids is not None:
        return replace(run, text="", count=stop - start, token_ids=run.token_ids[start:stop])
    words = " ".join(run.text.split()[start:stop]) if run.symbolic else ""
    return replace(run, text=words, count=stop - start)
