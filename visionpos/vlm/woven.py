"""Woven: a clip whose sound stands between its cells, as the omni models write it.

`weave` says in which order the two are written; `unwoven` finds such stretches in token types again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from visionpos.errors import PositionError
from visionpos.geometry.arguments import checked
from visionpos.vlm.clocks import Array, PerSecond
from visionpos.vlm.pieces import AUDIO, TEXT, VIDEO
from visionpos.vlm.rules import AudioInVideo, Rule


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Woven:
    """The tokens of one clip with sound, counted from the first of them.

    Args:
        cells: `[cells]` place of every cell, frame-major.
        audio: `[tokens]` place of every sound token.
        edges: whether the first and the last token are the start and end of the sound, which share the positions of
            those of the clip.
    """

    cells: Array
    audio: Array
    edges: bool

    @property
    def span(self) -> int:
        """Return the number of tokens."""
        return len(self.cells) + len(self.audio) + 2 * self.edges

    @property
    def ends_in_audio(self) -> bool:
        """Return whether the last of them is sound."""
        return bool(self.audio[-1] > self.cells[-1])

    def write(self, ids: Array, start: int, position: float, following: float) -> None:
        """Write the ids of sound tokens and edges into `ids [axes, tokens]`.

        Args:
            ids: written in place.
            start: first token of the clip.
            position: s, where clip and sound start.
            following: where the token behind the last one stands.
        """
        ids[:, start + self.audio] = position + np.arange(len(self.audio))
        if self.edges:
            ids[:, start] = position - 1
            ids[:, start + self.span - 1] = following


@dataclass(frozen=True, slots=True, eq=False)
class Threads:
    """What was taken out of a line of token types.

    Args:
        kept: `[tokens left]` place in the whole line of each token that is left.
        clips: first cell in the line that is left -> first token in the whole line, and the clip.
    """

    kept: Array
    clips: Mapping[int, tuple[int, Woven]]


@checked
def weave(rule: Rule, cell_times: Array, audio_tokens: int) -> Array:
    """Return `[cells + audio_tokens]` bool in writing order, True for sound.

    Args:
        rule: with `audio_in_video`.
        cell_times: `[cells]` time offset tau of every cell, never falling.
        audio_tokens: number of sound tokens, one id each.

    Published code opens one chunk a token: where steps of a clip are longer than a chunk, it tears frames apart. Here a
    frame is written whole, in the chunk of its time.

    Example:
        >>> rule = Rule(axes=("time", "row", "col"), audio_in_video=AudioInVideo(interleave="time"))
        >>> weave(rule, np.array([0, 0, 2]), 3).tolist()
        [False, False, True, True, False, True]
    """
    if audio_tokens < 0:
        raise PositionError(
            f"audio_tokens is {audio_tokens}; at least 0 is required. Read it from the family's AudioSpec.tokens."
        )
    spec, sound = rule.audio_in_video, np.arange(audio_tokens)
    if spec is None:
        raise PositionError(
            "rule has no audio_in_video; clips of this family carry no sound. Pass the sound as Audio."
        )
    at = np.concatenate([cell_times, sound])
    if spec.chunk_seconds is not None:
        rate = rule.frame_step.per_second if isinstance(rule.frame_step, PerSecond) else Fraction(1)
        at = at // int(rate * spec.chunk_seconds)
    is_sound = np.arange(len(at)) >= len(cell_times)
    return np.asarray(is_sound[np.argsort(at, kind="stable")])


def unwoven(types: Array, row_lengths: Array, spec: AudioInVideo) -> tuple[Array, Array, Threads]:
    """Return token types and row lengths without the sound that stands between cells, and how to put it back.

    Args:
        types: `[tokens]` of all rows, one after another.
        row_lengths: `[b]`.
        spec: how sound is woven in.

    Raises:
        PositionError: if the edges of a clip with sound are missing.
    """
    row = np.repeat(np.arange(len(row_lengths)), row_lengths)
    media = (types == VIDEO) | (types == AUDIO)
    begins = np.ones(len(types), dtype=bool)
    begins[1:] = (media[1:] != media[:-1]) | (row[1:] != row[:-1])
    starts = np.flatnonzero(begins)
    stops = np.append(starts[1:], len(types))
    dropped = np.zeros(len(types), dtype=bool)
    found: list[tuple[int, int, Woven]] = []
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        sound = types[start:stop] == AUDIO
        if not media[start] or sound.all() or not sound.any():
            continue
        if spec.share_edges:
            _check_edges(types, row, start, stop)
        places = np.arange(len(sound)) + spec.share_edges
        clip = Woven(cells=places[~sound], audio=places[sound], edges=spec.share_edges)
        dropped[start:stop] = sound
        found.append((start + int(np.argmin(sound)), start - spec.share_edges, clip))
    kept = np.flatnonzero(~dropped)
    clips = {int(np.searchsorted(kept, cell)): (start, clip) for cell, start, clip in found}
    lengths = np.bincount(row[kept], minlength=len(row_lengths))
    return types[kept], lengths, Threads(kept, clips)


def _check_edges(types: Array, row: Array, start: int, stop: int) -> None:
    """Refuse a clip with sound at the end of its row, or next to other media."""
    outside = (start - 1, stop)
    inside = all(0 <= at < len(types) and row[at] == row[start] for at in outside)
    if not inside or any(types[at] != TEXT for at in outside):
        raise PositionError(
            f"row {row[start]}: a clip with sound fills tokens {start} to {stop - 1} and has no start and end token "
            "around it; both are required. Look for truncated prompts."
        )
