"""Sound: how many tokens a stretch of it becomes, and how they stand, alone or between the cells of their clip."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from itertools import groupby
from typing import Any, ClassVar, Literal

import numpy as np

from visionpos.errors import ConfigError, PositionError
from visionpos.geometry import Grid
from visionpos.vlm.clocks import Array
from visionpos.vlm.instants import exact
from visionpos.vlm.markers import Wrap, check_name
from visionpos.vlm.pieces import AUDIO, VIDEO, Cells, Marker, Run
from visionpos.vlm.rules import Rule
from visionpos.vlm.segments import Audio
from visionpos.vlm.woven import weave


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioSpec:
    """What a family does with sound.

    Args:
        cell: the placeholder token.
        stream: markers around the tokens of a sound.
        sample_rate: samples a second.
        hop: samples a frame of the spectrogram.
        frames: "started" counts a last frame that the samples do not fill, "whole" does not.
        halvings: how each halving of the encoder rounds an odd length, "up" or "down", in order.
        chunk: frames that are encoded by themselves; None for one piece.
        at_most: longest spectrogram in frames, behind which published processors cut the sound; None for no limit.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    cell: str
    stream: Wrap = field(default_factory=Wrap)
    sample_rate: int
    hop: int
    frames: Literal["started", "whole"] = "whole"
    halvings: tuple[Literal["up", "down"], ...]
    chunk: int | None = None
    at_most: int | None = None

    def __post_init__(self) -> None:
        check_name("audio.cell", self.cell)
        for name in ("sample_rate", "hop", "chunk", "at_most"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(
                    f"audio.{name} is {value}; at least 1 is required. Read it from the feature extractor."
                )

    def tokens(self, sound: Audio) -> int:
        """Return the number of tokens of a sound.

        Raises:
            PositionError: if it is too short for one, or longer than the family hears.

        Example:
            >>> spec = AudioSpec(cell="<a>", sample_rate=16000, hop=160, halvings=("up", "down"))
            >>> spec.tokens(Audio(2.0))
            50
        """
        samples = int(exact(sound.seconds) * self.sample_rate)
        frames = -(-samples // self.hop) if self.frames == "started" else samples // self.hop
        if self.at_most is not None and frames > self.at_most:
            longest = Fraction(self.at_most * self.hop, self.sample_rate)
            raise PositionError(
                f"Audio has {sound.seconds} seconds; at most {float(longest):g} are required: published processors cut "
                "off the rest without a word. Split it."
            )
        piece = self.chunk or max(frames, 1)
        count = frames // piece * self._halved(piece) + self._halved(frames % piece)
        if count < 1:
            raise PositionError(
                f"Audio has {sound.seconds} seconds, too short for one token. Leave it out, or pad it with silence."
            )
        return count

    def _halved(self, frames: int) -> int:
        """Return the length that the encoder leaves of so many frames."""
        for rounding in self.halvings:
            frames = (frames + (rounding == "up")) // 2
        return frames


def audio_runs(sound: Audio, spec: AudioSpec, *, segment: int) -> list[Run]:
    """Return the runs of a sound that stands by itself."""
    return _marked([_heard(spec, segment, 0, spec.tokens(sound))], spec.stream, segment)


def clip_with_sound(
    clip: list[Run], sound: Audio, spec: AudioSpec, rule: Rule, *, segment: int
) -> list[Run]:
    """Return the runs of a clip with its sound woven between its cells.

    Args:
        clip: the runs of the clip alone: one block of cells, and markers around it.
        sound: its sound, which starts with it.
        spec: of the family's sound.
        rule: says in which order the two are written.
        segment: which of the prompt's segments it is.

    Raises:
        PositionError: if the clip has no times, or the family weaves no sound into its clips.
    """
    at = next(number for number, run in enumerate(clip) if isinstance(run, Cells))
    block = clip[at]
    if not isinstance(block, Cells) or rule.audio_in_video is None or block.modality != VIDEO:
        raise PositionError(
            "Video has audio and this family weaves no sound into clips. Pass the sound as an Audio segment."
        )
    if block.elapsed is None:
        raise PositionError(
            "Video has audio and no seconds; they say where the sound goes on. Pass Video(size_hw, seconds=[time of "
            "every sampled frame], audio=)."
        )
    frame = block.grid.height * block.grid.width
    frames = np.array([block.grid.frames])
    tau = rule.frame_offsets(frames, np.array([max(block.grid.shape[1:])]), (block.elapsed,))
    heard = weave(rule, np.repeat(tau, frame), spec.tokens(sound))
    pieces = _pieces(block, spec, heard, frame)
    return [*clip[:at], *_marked(pieces, spec.stream, segment), *clip[at + 1 :]]


def _pieces(block: Cells, spec: AudioSpec, heard: Array, frame: int) -> list[Run]:
    """Return whole frames and stretches of sound, in writing order."""
    pieces: list[Run] = []
    seen = spoken = 0
    for is_sound, group in groupby(heard.tolist()):
        count = len(list(group))
        if is_sound:
            pieces.append(_heard(spec, block.segment, spoken, count))
            spoken += count
            continue
        first, frames = seen // frame, count // frame
        times = block.elapsed[first : first + frames] if block.elapsed is not None else None
        grid = Grid(block.grid.height, block.grid.width, frames=frames)
        pieces.append(
            Cells(
                segment=block.segment, name=block.name, modality=VIDEO, grid=grid, count=count,
                node=block.node, frame=first, elapsed=times,
            )
        )  # fmt: skip
        seen += count
    return pieces


def _heard(spec: AudioSpec, segment: int, first: int, count: int) -> Run:
    """Return a stretch of sound tokens: one row, read from `first` on."""
    return Cells(
        segment=segment, name=spec.cell, modality=AUDIO, grid=Grid(1, count), count=count, node="audio",
        frame=first,
    )  # fmt: skip


def _marked(pieces: list[Run], wrap: Wrap, segment: int) -> list[Run]:
    """Return pieces between the markers of a sound."""

    def markers(edge: Literal["before", "after"]) -> list[Run]:
        names = [name for name in wrap.at(edge) if isinstance(name, str)]
        return [Marker(segment=segment, name=name, node="audio", edge=edge) for name in names]

    return [*markers("before"), *pieces, *markers("after")]
