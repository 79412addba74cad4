"""Stream trials: each intervention on a prompt's position ids, as ids before and after."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from visionpos.audit.changes import SHIFTS
from visionpos.audit.outcome import Outcome
from visionpos.audit.streams import (
    FAR,
    NoMeaning,
    StreamPlaces,
    as_raster,
    finer,
    gapped_behind,
    mirrored,
    moved_all,
    moved_along,
    places_of,
    slower,
    swapped_axes,
)
from visionpos.vlm import Text, Video

if TYPE_CHECKING:
    from visionpos.audit.of_stream import Audited
    from visionpos.vlm import Family, TokenStream
    from visionpos.vlm.language import LanguageSpec

_FRAMES = 8
_FPS = (1, 2)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Change:
    """Ids before and after an intervention, of the same contents.

    Args:
        before: `[axes, n]` float64.
        after: the same; of the axes of `language`, where that is given.
        variant: which form of the intervention it is.
        expected: what must happen; read off the ids when None.
        unturned: leading tokens that do not turn.
        turned: whether the second pass turns at all.
        language: the rotary layout of the second pass, where it is another.
        note: what to know when reading the numbers.
    """

    before: Tensor
    after: Tensor
    variant: str = ""
    expected: Outcome | None = None
    unturned: int = 0
    turned: bool = True
    language: LanguageSpec | None = None
    note: str = ""


def changes_of(intervention: str, audited: Audited) -> Iterator[Change]:
    """Yield the changes of an intervention by its id.

    Raises:
        NoMeaning: if it means nothing for this stream.
    """
    yield from _CHANGES[intervention](audited)


def _shift(audited: Audited) -> Iterator[Change]:
    for by in SHIFTS:
        yield _to(audited, moved_all(audited.places, by), f"{by} on all axes")


def _axis_shift(audited: Audited) -> Iterator[Change]:
    for number, name in enumerate(audited.places.axes):
        yield _to(audited, moved_along(audited.places, number), f"{name} alone")


def _gap(audited: Audited) -> Iterator[Change]:
    yield _to(audited, gapped_behind(audited.places), "behind a picture")


def _flip(audited: Audited) -> Iterator[Change]:
    yield _to(audited, mirrored(audited.places), "columns of pictures")


def _transpose(audited: Audited) -> Iterator[Change]:
    yield _to(audited, swapped_axes(audited.places), "rows and columns of pictures")


def _raster(audited: Audited) -> Iterator[Change]:
    language = audited.language
    line = torch.arange(audited.places.count, dtype=torch.float64)[None]
    if language.order != "heads":
        # A layout in which every pair turns with some axis is plain RoPE where all axes agree.
        plain = replace(
            language, sections=(language.pairs,), order="contiguous", still=(), kv_heads=None
        )
        yield Change(
            before=line.expand(len(audited.places.axes), -1),
            after=line,
            variant="text alone beside 1-D RoPE",
            expected="nonzero" if language.still else "zero",
            language=plain,
        )
    if audited.places.media:
        yield _to(audited, as_raster(audited.places), "pictures as lines")


def _finer(audited: Audited) -> Iterator[Change]:
    yield _to(audited, finer(audited.places), "a quarter")


def _ablation(audited: Audited) -> Iterator[Change]:
    ids = audited.places.ids
    moves = bool((ids != ids[:, :1]).any())
    yield Change(before=ids, after=ids, turned=False, expected="nonzero" if moves else "zero")


def _prefix(audited: Audited) -> Iterator[Change]:
    """The first token, on which much attention rests, as the others move far away."""
    ids = audited.places.ids
    if audited.places.count < 3:
        raise NoMeaning("the stream has less than three tokens")
    far = ids + FAR
    yield Change(before=ids[:, 1:], after=far[:, 1:], variant="removed")
    yield Change(before=ids, after=far, variant="moved along")
    yield Change(before=ids, after=far, variant="unrotated", unturned=1, expected="nonzero")


def _slower_clip(audited: Audited) -> Iterator[Change]:
    places = _clip_places(audited)
    yield _to(replace(audited, places=places), slower(places), "twice as long")


def _frame_rate(audited: Audited) -> Iterator[Change]:
    """A clip of the same seconds at one and at two frames a second, of which the frames that both have are compared."""
    family = _family_of(audited)
    streams = [_clip_stream(family, fps) for fps in _FPS]
    steps = [_steps(stream) for stream in streams]
    if len(steps[1]) != 2 * len(steps[0]) or steps[0].shape[1:] != steps[1].shape[1:]:
        raise NoMeaning(
            f"clips of {len(steps[0])} and {len(steps[1])} steps of {steps[0].shape[1]} and {steps[1].shape[1]} cells "
            "have no frames in common"
        )
    shared = [steps[0].flatten(), steps[1][::2].flatten()]
    ids = [
        torch.cat([places.ids[:, :1], places.ids[:, tokens]], 1)
        for places, tokens in zip(
            (places_of(stream, audited.rule) for stream in streams), shared, strict=True
        )
    ]
    told = "ids count seconds" if audited.rule.counts_seconds else "ids count frames"
    yield Change(
        before=ids[0],
        after=ids[1],
        variant=f"{_FPS[0]} to {_FPS[1]} frames a second",
        expected="zero" if audited.rule.counts_seconds else "nonzero",
        note=f"{told}; frames that both clips have, and the first token",
    )


def _to(audited: Audited, ids: Tensor, variant: str) -> Change:
    return Change(before=audited.places.ids, after=ids, variant=variant)


def _family_of(audited: Audited) -> Family:
    if audited.family is None or audited.family.spec.video is None:
        raise NoMeaning("a family that takes clips is needed")
    return audited.family


def _clip_places(audited: Audited) -> StreamPlaces:
    """Return the stream's own places where it has a clip, else those of a short one."""
    if audited.places.clips:
        return audited.places
    return places_of(_clip_stream(_family_of(audited), _FPS[0]), audited.rule)


def _clip_stream(family: Family, fps: int) -> TokenStream:
    """Return five words, a clip of eight seconds and seven words."""
    grid: Any = (family.spec.video or family.spec).grid
    side = grid.patch * grid.merge
    seconds = [frame / fps for frame in range(_FRAMES * fps)]
    clip = Video(size_hw=(4 * side, 6 * side), seconds=seconds)
    return family.stream([Text(tokens=5), clip, Text(tokens=7)])


def _steps(stream: TokenStream) -> Tensor:
    """Return the tokens of a clip's cells, `[steps, cells]`."""
    (tokens,) = (stream.is_feature & (stream.modality == 2)).nonzero(as_tuple=True)
    spans = [span for span in stream.spans if span.kind == "video" and span.grid is not None]
    steps = sum(0 if span.grid is None else span.grid.frames for span in spans)
    if not steps or len(tokens) % steps:
        raise NoMeaning("the clip's cells do not lie in time steps of one size")
    return tokens.view(steps, -1)


_CHANGES: dict[str, Callable[[Audited], Iterator[Change]]] = {
    "S1": _shift,
    "D2": _gap,
    "R1": _flip,
    "R2": _transpose,
    "N2": _ablation,
    "prefix": _prefix,
    "T1": _slower_clip,
    "F1": _frame_rate,
    "S-axis": _axis_shift,
    "M1": _raster,
    "V1": _finer,
}
STREAM_IDS: tuple[str, ...] = tuple(_CHANGES)
