"""Segments: what a prompt is made of, in reading order, before any family has looked at it.

Sizes and times enter, never pixels; a family turns a list of segments into a `TokenStream`.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from visionpos.errors import PositionError
from visionpos.geometry.grid import is_whole
from visionpos.geometry.ranges import is_integer
from visionpos.vlm.tokens import Tokenizer, encode


@dataclass(frozen=True, slots=True)
class Text:
    """A stretch of text: as characters, as token ids, or as a bare number of tokens.

    Characters have no length until a tokenizer has seen them. `family.stream(..., tokenizer=)` tokenises them;
    without a tokenizer every whitespace-separated word stands for one token, and the stream says so
    (`text_is_symbolic`).

    Args:
        text: the characters.
        tokens: the number of tokens, where it is known; it then wins over any tokenizer.
        token_ids: the tokens themselves, which fix `tokens`.

    Raises:
        PositionError: if `tokens` is negative or disagrees with `token_ids`.

    Example:
        >>> Text("Describe this.").text, Text(tokens=5).tokens, Text(token_ids=[7, 8]).tokens
        ('Describe this.', 5, 2)
    """

    text: str = ""
    tokens: int | None = None
    token_ids: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise PositionError(
                f"Text text is {self.text!r}; characters are required. Pass ids as token_ids=, a number as tokens=."
            )
        if self.token_ids is not None:
            ids = _whole_ids(self.token_ids)
            if self.tokens is not None and not (_is_count(self.tokens) and self.tokens == len(ids)):
                raise PositionError(
                    f"Text tokens is {self.tokens} and token_ids holds {len(ids)}; they must agree. "
                    "Pass token_ids alone."
                )
            object.__setattr__(self, "token_ids", ids)
            object.__setattr__(self, "tokens", len(ids))
        if self.tokens is not None and not _is_count(self.tokens):
            raise PositionError(
                f"Text tokens is {self.tokens!r}; a token count of at least 0 is required. Leave it out if unknown."
            )

    @classmethod
    def of(cls, text: str, tokenizer: Tokenizer) -> Text:
        """Return the text with the token ids that `tokenizer` gives it.

        Args:
            text: the characters.
            tokenizer: a tokenizer with `encode`, a callable from text to ids, or a mapping from word to id.

        Example:
            >>> Text.of("a cat", {"a": 1, "cat": 2}).token_ids
            (1, 2)
        """
        return cls(text, token_ids=encode(text, tokenizer))


@dataclass(frozen=True, slots=True)
class Image:
    """A still image.

    Args:
        size_hw: (height, width) in pixels before any resizing, each at least 1.

    Raises:
        PositionError: if a side is not a whole number of at least 1.
    """

    size_hw: tuple[int, int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "size_hw", _whole_size(self.size_hw))


@dataclass(frozen=True, slots=True)
class Video:
    """The sampled frames of a clip.

    Args:
        size_hw: (height, width) of a frame in pixels before any resizing.
        seconds: true time of every sampled frame, from 0 upwards, never falling; the spacing may vary.
        frames: number of sampled frames, where their times are unknown. Families that count or write seconds
            refuse such a clip.
        sampled_fps: sampled frames per second as a processor reports it. Then a rule that counts seconds takes
            `temporal_patch / sampled_fps` for every grid step, as published processors do, not the true times.
        audio: the sound of the clip, which starts with it; the omni families weave it between the frames.

    Raises:
        PositionError: if there is no frame, a time is negative, falling or not finite, the counts disagree,
            `sampled_fps` is not above 0, or audio is no `Audio`.

    Example:
        >>> Video((360, 640), seconds=[0.0, 0.5, 1.0]).num_frames
        3
    """

    size_hw: tuple[int, int]
    seconds: Sequence[float] | None = None
    frames: int | None = None
    sampled_fps: float | None = None
    audio: Audio | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "size_hw", _whole_size(self.size_hw))
        sound: Any = self.audio
        if sound is not None and not isinstance(sound, Audio):
            raise PositionError(
                f"Video audio is {sound!r}; an Audio is required. Pass Audio(seconds) with its duration."
            )
        if self.seconds is not None:
            object.__setattr__(self, "seconds", _rising_times(self.seconds))
        if not is_whole(self.num_frames) or (
            self.seconds is not None and self.frames not in (None, len(self.seconds))
        ):
            raise PositionError(
                f"Video frames is {self.frames!r} and seconds holds {len(self.seconds or ())} times; at least one "
                "frame is required, and the two must agree. Pass the time of every sampled frame as seconds=."
            )
        if self.sampled_fps is not None and not _is_above_0(self.sampled_fps):
            raise PositionError(
                f"Video sampled_fps is {self.sampled_fps!r}; a finite number above 0 is required. "
                "Leave it out to count the true times in seconds=."
            )

    @property
    def num_frames(self) -> int:
        """Return the number of sampled frames."""
        if self.seconds is not None:
            return len(self.seconds)
        return 0 if self.frames is None else self.frames


@dataclass(frozen=True, slots=True)
class Audio:
    """A stretch of sound.

    Args:
        seconds: its duration, above 0, at most 1e7.

    Raises:
        PositionError: if the duration is not above 0, or too long.
    """

    seconds: float

    def __post_init__(self) -> None:
        if not _is_above_0(self.seconds) or float(self.seconds) > LATEST_SECONDS:
            raise PositionError(
                f"Audio seconds is {self.seconds!r}; a duration above 0 and at most {LATEST_SECONDS:g} is required. "
                "Leave an empty sound out of the prompt; samples are no seconds."
            )


@dataclass(frozen=True, slots=True)
class Special:
    """One token of the vocabulary, by its name, such as `<|im_start|>`."""

    name: str

    def __post_init__(self) -> None:
        name: Any = self.name
        if not isinstance(name, str) or not name:
            raise PositionError(
                f"Special name is {name!r}; the name of a token is required. Pass ids as Text(token_ids=)."
            )


Segment = Text | Image | Video | Audio | Special


LONGEST_SIDE_PX = (
    2**31 - 1
)  # of a PNG: beyond it no file holds a picture, and floats lose whole pixels


def _whole_size(size_hw: tuple[int, int]) -> tuple[int, int]:
    """Return (height, width) as whole numbers of at least 1."""
    try:
        height, width = (
            0 if isinstance(side, (bool, np.bool_)) else operator.index(side) for side in size_hw
        )
    except (TypeError, ValueError):
        height = width = 0
    if min(height, width) < 1 or max(height, width) > LONGEST_SIDE_PX:
        raise PositionError(
            f"size_hw is {size_hw!r}; (height, width) in whole pixels, each at least 1 and at most {LONGEST_SIDE_PX}, "
            "is required. Pass the size of the decoded image."
        )
    return height, width


def _whole_ids(token_ids: Sequence[int]) -> tuple[int, ...]:
    """Return token ids as whole numbers of at least 0."""
    try:
        ids = tuple(operator.index(one) for one in token_ids)
    except TypeError:
        ids = (-1,)
    if min(ids, default=0) < 0:
        raise PositionError(
            f"Text token_ids is {token_ids!r}; whole numbers of at least 0 are required. "
            "Pass characters as text."
        )
    return ids


def _is_count(value: Any) -> bool:
    """Return whether a value is a whole number of at least 0."""
    return is_whole(value) or (is_integer(value) and bool(value == 0))


def _is_above_0(value: Any) -> bool:
    """Return whether a value is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    try:
        return 0 < float(value) < math.inf
    except OverflowError:  # a whole number that no float reaches
        return False


LATEST_SECONDS = 1e7  # four months of video: beyond it, position ids lose their meaning


def _rising_times(seconds: Sequence[float]) -> tuple[float, ...]:
    """Return timestamps that are finite, not negative and never fall."""
    try:
        times = tuple(float(time) for time in seconds)
    except (TypeError, ValueError):
        raise PositionError(
            f"Video seconds is {seconds!r}; the time of every sampled frame is required. "
            "Pass a list of numbers; a number of frames is frames=."
        ) from None
    for at, time in enumerate(times):
        if not 0 <= time <= LATEST_SECONDS or (at and time < times[at - 1]):
            raise PositionError(
                f"Video seconds[{at}] is {time}; times from 0 to {LATEST_SECONDS:g} that never fall are required. "
                "Pass frame_index / source_fps of every sampled frame, or the container's timestamps less the first."
            )
    return times
