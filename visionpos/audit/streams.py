"""Streams: the position ids of a prompt, and the changes that an audit makes to them, as pure functions.

Ids are `[axes, n]` float64, so that quarters of a step are exact. What has no meaning for a stream raises `NoMeaning`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from visionpos.vlm import stream_ids

if TYPE_CHECKING:
    from torch import Tensor

    from visionpos.vlm import Rule, TokenStream

FAR = 1000  # shift of all axes
ALONG = 100  # shift of one
APART = 50  # gap behind a picture


class NoMeaning(Exception):  # noqa: N818 (an answer, not an error: the row is "undefined")
    """Raised where an intervention means nothing for a stream; says why."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StreamPlaces:
    """Where the tokens of a prompt are.

    Args:
        ids: `[axes, n]` float64.
        axes: a name an axis: "time", "row", "col", "index" or "ordinal".
        media: (start, stop) of every view, frame or clip in the stream.
        clips: those of clips.
    """

    ids: Tensor
    axes: tuple[str, ...]
    media: tuple[tuple[int, int], ...]
    clips: tuple[tuple[int, int], ...]

    @property
    def count(self) -> int:
        """Return the number of tokens."""
        return int(self.ids.shape[1])

    def axis(self, name: str) -> int:
        """Return the number of an axis.

        Raises:
            NoMeaning: if the rule has none of this name.
        """
        if name not in self.axes:
            raise NoMeaning(f"the rule counts {', '.join(self.axes)} and no {name}")
        return self.axes.index(name)

    def pictures(self) -> tuple[tuple[int, int], ...]:
        """Return the media.

        Raises:
            NoMeaning: if there are none.
        """
        if not self.media:
            raise NoMeaning("the stream holds no picture")
        return self.media

    def at(self, ids: Tensor) -> StreamPlaces:
        """Return the same tokens elsewhere."""
        return replace(self, ids=ids)


def places_of(stream: TokenStream, rule: Rule) -> StreamPlaces:
    """Return where the tokens of a stream are by a rule."""
    media = [span for span in stream.spans if span.kind in ("image", "video")]
    return StreamPlaces(
        ids=stream_ids(stream, rule).ids.double(),
        axes=tuple(rule.axes),
        media=tuple((span.start, span.stop) for span in media),
        clips=_clips([(s.segment, s.start, s.stop) for s in media if s.kind == "video"]),
    )


def _clips(spans: list[tuple[int, int, int]]) -> tuple[tuple[int, int], ...]:
    """Return (start, stop) a clip, whose frames may be spans of their own."""
    found: dict[int, tuple[int, int]] = {}
    for segment, start, stop in spans:
        before = found.get(segment, (start, stop))
        found[segment] = min(before[0], start), max(before[1], stop)
    return tuple(found.values())


def moved_all(places: StreamPlaces, by: float = FAR) -> Tensor:
    """Return ids that grow alike on every axis."""
    return places.ids + by


def moved_along(places: StreamPlaces, axis: int, by: float = ALONG) -> Tensor:
    """Return ids that grow on one axis, on every token."""
    ids = places.ids.clone()
    ids[axis] += by
    return ids


def as_raster(places: StreamPlaces) -> Tensor:
    """Return 0, 1, 2, ... on every axis: pictures become lines."""
    places.pictures()
    line = torch.arange(places.count, dtype=torch.float64)
    return line.expand(len(places.axes), -1).clone()


def swapped_axes(places: StreamPlaces) -> Tensor:
    """Return ids with rows and columns of every picture swapped, from where the picture starts."""
    row, col = places.axis("row"), places.axis("col")
    ids = places.ids.clone()
    for start, stop in places.pictures():
        down, across = (places.ids[axis, start:stop] for axis in (row, col))
        ids[row, start:stop] = down.min() + across - across.min()
        ids[col, start:stop] = across.min() + down - down.min()
    return ids


def mirrored(places: StreamPlaces) -> Tensor:
    """Return ids with the columns of every picture in reverse."""
    col = places.axis("col")
    ids = places.ids.clone()
    for start, stop in places.pictures():
        across = places.ids[col, start:stop]
        ids[col, start:stop] = across.min() + across.max() - across
    return ids


def finer(places: StreamPlaces, share: float = 0.25) -> Tensor:
    """Return ids whose steps inside pictures are a share of what they were; what follows closes up (V2PE)."""
    ids = places.ids.clone()
    for start, stop in places.pictures():
        own = places.ids[:, start:stop]
        ids[:, start:stop] += (own - own.amin(1, keepdim=True)) * (share - 1)
        if stop < places.count:
            room = float(places.ids[:, stop].max() - own.min())  # that the picture took
            ids[:, stop:] += room * (share - 1)
    return ids


def gapped_behind(places: StreamPlaces, gap: float = APART) -> Tensor:
    """Return ids with a gap behind the first picture: all that follows moves away."""
    stop = places.pictures()[0][1]
    if stop >= places.count:
        raise NoMeaning("nothing follows the picture")
    ids = places.ids.clone()
    ids[:, stop:] += gap
    return ids


def slower(places: StreamPlaces, factor: float = 2.0) -> Tensor:
    """Return ids whose time inside clips is stretched; what follows a clip keeps its distance to the clip's end."""
    time = places.axis("time")
    if not places.clips:
        raise NoMeaning("the stream holds no clip")
    ids = places.ids.clone()
    for start, stop in places.clips:
        own = places.ids[time, start:stop]
        ids[time, start:stop] += (own - own.min()) * (factor - 1)
        ids[:, stop:] += (own.max() - own.min()) * (factor - 1)
    return ids


def still_apart(before: Tensor, after: Tensor, freqs: Tensor) -> bool:
    """Return whether all differences between tokens that a rotation can see stay what they were.

    Args:
        before: ids `[axes, n]`.
        after: the same of the changed stream.
        freqs: `[..., axes, pairs]`; an axis that drives no pair is not seen.
    """
    driven = freqs.reshape(-1, *freqs.shape[-2:]).abs().amax((0, 2)) > 0
    moves = (after - before)[driven]
    slack = 1e-12 * float(torch.stack([before.abs().max(), after.abs().max()]).max())  # of thirds
    return bool(((moves - moves[:, :1]).abs() <= slack).all())
