"""Segments and tokens: what a prompt may hold, and how text gets its length."""

from typing import Any

import numpy as np
import pytest

from visionpos.errors import PositionError
from visionpos.vlm import Audio, Image, Special, Text, Video, family
from visionpos.vlm.tokens import encode, token_id


class Encoding:
    """As the tokenizers package returns it."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids


class Characters:
    """A tokenizer object: one token a character; `wrapped` as tokenizers does, a list as transformers does."""

    def __init__(self, *, wrapped: bool = False) -> None:
        self.wrapped = wrapped

    def encode(self, text: str, *, add_special_tokens: bool) -> Any:
        assert not add_special_tokens
        ids = [ord(one) for one in text]
        return Encoding(ids) if self.wrapped else ids

    def __call__(self, text: str) -> Any:
        raise AssertionError(f"transformers' call adds special tokens to {text!r}; use encode")


@pytest.mark.parametrize("tokenizer", [
    Characters(), Characters(wrapped=True), lambda text: [ord(one) for one in text],
], ids=["transformers", "tokenizers", "callable"])  # fmt: skip
def test_text_of_every_kind_of_tokenizer(tokenizer: Any) -> None:
    assert Text.of("cat", tokenizer).token_ids == (99, 97, 116)
    assert encode("", tokenizer) == ()
    assert token_id("c", tokenizer) == 99
    with pytest.raises(PositionError, match=r"'cat' is 3 tokens.*exactly one.*checkpoint"):
        token_id("cat", tokenizer)


def test_text_of_a_mapping_counts_words() -> None:
    assert Text.of("a cat  a", {"a": 1, "cat": 2}).token_ids == (1, 2, 1)
    with pytest.raises(PositionError, match=r"mapping without 'dog', 'the'.*Add them"):
        encode("the dog", {"a": 1})
    with pytest.raises(PositionError, match=r"'<pad>' is 0 tokens"):
        token_id("<pad>", {})


def test_text_length_is_known_or_says_it_is_not() -> None:
    assert Text("Describe this").tokens is None
    assert Text(tokens=7).tokens == 7
    assert Text(token_ids=np.array([3, 4])).token_ids == (3, 4)
    assert Text("x", tokens=2) == Text("x", tokens=2)
    with pytest.raises(PositionError, match=r"tokens is 3 and token_ids holds 2.*agree"):
        Text(tokens=3, token_ids=[1, 2])
    with pytest.raises(PositionError, match=r"tokens is -1.*at least 0"):
        Text(tokens=-1)


def test_segments_are_values() -> None:
    assert Video((4, 6), seconds=[0, 0.5]) == Video(np.array([4, 6]), seconds=(0.0, 0.5))
    assert len({Image((4, 6)), Image([4, 6]), Special("<s>"), Audio(1.5)}) == 3
    assert Video((4, 6), frames=3).num_frames == 3


@pytest.mark.parametrize(
    "size_hw", [(0, 640), (-1, 4), (480.0, 640), (480,), (1, 2, 3), "ab", None, 5]
)
def test_error_size(size_hw: Any) -> None:
    for media in (Image, lambda size: Video(size, frames=2)):
        with pytest.raises(PositionError, match=r"size_hw is .*whole pixels.*decoded image"):
            media(size_hw)


@pytest.mark.parametrize(("arguments", "message"), [
    ({}, r"frames is None and seconds holds 0.*at least one frame"),
    ({"seconds": []}, r"seconds holds 0 times.*at least one frame"),
    ({"frames": 0}, r"frames is 0.*at least one"),
    ({"seconds": [0.0, 1.0], "frames": 3}, r"frames is 3 and seconds holds 2.*agree"),
    ({"seconds": [0.0, -1.0]}, r"seconds\[1\] is -1.0.*never fall"),
    ({"seconds": [1.0, 0.5]}, r"seconds\[1\] is 0.5.*never fall.*source_fps"),
    ({"seconds": [float("nan")]}, r"seconds\[0\] is nan"),
    ({"seconds": [float("inf")]}, r"seconds\[0\] is inf"),
    ({"frames": 2, "sampled_fps": 0}, r"sampled_fps is 0.*above 0"),
    ({"frames": 2, "sampled_fps": float("nan")}, r"sampled_fps is nan"),
])  # fmt: skip
def test_error_video(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(PositionError, match=message):
        Video((4, 6), **arguments)


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf")])
def test_error_audio(seconds: float) -> None:
    with pytest.raises(PositionError, match=rf"Audio seconds is {seconds}.*above 0"):
        Audio(seconds)


@pytest.mark.parametrize(("segment", "message"), [
    (Audio(2.0), r"segment 1: Audio is given and qwen2_vl takes no audio.*Leave it out"),
    ("a string", r"segment 1: 'a string' is no segment.*Wrap a string in Text"),
    (Image((1, 900)), r"segment 1: qwen2_vl: size_hw is \(1, 900\)"),
])  # fmt: skip
def test_error_names_the_segment(segment: Any, message: str) -> None:
    with pytest.raises(PositionError, match=message):
        family("qwen2_vl").stream([Text("a"), segment])
