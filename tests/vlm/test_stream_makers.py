"""A stream is placed by the family that made it: ids laid on another's have the right shape and are wrong."""

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.vlm.conversations import NAMES, fam_of, stream_of
from visionpos.errors import PositionError
from visionpos.vlm import (
    Audio,
    Family,
    Image,
    Text,
    TokenStream,
    Video,
    family,
    family_names,
    pack,
    stream_ids,
    truncate_stream,
)

PARTS = (("text", 7), ("image", 0), ("text", 1))
SECONDS = [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]
SIZES_HW = [(300, 520), (1100, 700), (96, 160)]


def segments_of(fam: Family, size_hw: tuple[int, int]) -> list[Any]:
    clip = [] if fam.spec.video is None else [Video(size_hw, seconds=SECONDS)]
    sound = [] if fam.spec.audio is None else [Audio(2.0)]
    return [Text(tokens=3), Image(size_hw), Text(tokens=1), *clip, *sound]


def accepts(fam: Family, stream: TokenStream) -> bool:
    try:
        fam.position_ids(stream)
    except PositionError:
        return False
    return True


@pytest.mark.parametrize("asked", NAMES)
@pytest.mark.parametrize("maker", NAMES)
def test_only_the_maker_places_a_stream(maker: str, asked: str) -> None:
    stream, fam = stream_of(maker, PARTS), fam_of(asked)
    assert stream.made_by == fam_of(maker)
    if maker == asked:
        assert fam.position_ids(stream).ids.shape[-1] == stream.length
        return
    words = (
        rf"stream was made by family '{maker}' .*placed by family '{asked}' .*stream_ids\(stream"
    )
    with pytest.raises(PositionError, match=words):
        fam.position_ids(stream)
    with pytest.raises(PositionError, match=words):
        pack([stream_of(asked, PARTS), stream], family=fam)
    for part in (
        truncate_stream(stream, 6),
        truncate_stream(stream, 6, side="left"),
        replace(stream, runs=stream.runs[1:]),
        pickle.loads(pickle.dumps(stream)),
        copy.deepcopy(stream),
    ):
        with pytest.raises(PositionError, match=words):
            fam.position_ids(part)
    rule = fam.spec.rule
    assert rule is not None
    by_hand = TokenStream(stream.runs)
    assert by_hand.made_by is None
    if (
        rule.row_ends == "text"
    ):  # others need markers at the ends of rows, which not all streams have
        assert torch.equal(stream_ids(stream, rule).ids, fam.position_ids(by_hand).ids)


def test_a_maker_is_not_what_a_stream_is() -> None:
    """Equal runs are equal streams, in a set too, and what is printed is as short as before."""
    stream = stream_of("qwen2_vl", PARTS)
    by_hand = TokenStream(stream.runs)
    assert stream == by_hand
    assert hash(stream) == hash(by_hand)
    assert "made_by" not in repr(stream)
    joined = TokenStream(stream.runs + stream_of("qwen3_vl", PARTS).runs)
    assert joined.made_by is None


def test_a_family_built_again_is_the_same() -> None:
    stream = family("qwen2_vl").stream([Text(tokens=2), Image((56, 84))])
    again = family("qwen2_vl").position_ids(pickle.loads(pickle.dumps(stream)))
    turned = family("qwen2_vl", overlay={"language": {"theta": 5e5}}).position_ids(stream)
    assert torch.equal(again.ids, turned.ids)


@pytest.mark.parametrize("name", family_names())
def test_invariant_whoever_may_place_a_stream_would_have_written_it(name: str) -> None:
    """Dialects and variants: accepted only where their own stream of the prompt is this one; else data are named."""
    maker = family(name)
    if maker.spec.rule is None:
        pytest.skip("no rule")
    others = [
        family(name, dialect=dialect, variant=variant)
        for dialect in maker.dialects
        for variant in (None, *maker.variants)
    ]
    for other in others:
        for size_hw in SIZES_HW:
            segments = segments_of(maker, size_hw)
            stream = maker.stream(segments)
            if accepts(other, stream):
                assert other.stream(segments) == stream
            else:
                assert other != maker
                label = rf"placed by family '{name}' \(dialect '{other.dialect}'.*differ; a stream"
                with pytest.raises(PositionError, match=label):
                    other.position_ids(stream)


@pytest.mark.parametrize(("change", "named"), [
    ({"grid": {"patch": 16}}, "views, grid"),
    ({"cell": "<cell>"}, "cell"),
    ({"stream": {"image": {"after": []}}}, "stream"),
])  # fmt: skip
def test_an_overlay_that_writes_another_stream_is_another_maker(change: Any, named: str) -> None:
    stream = family("qwen2_vl").stream([Text(tokens=2), Image((56, 84))])
    with pytest.raises(PositionError, match=f"their {named}.* differ"):
        family("qwen2_vl", overlay=change).position_ids(stream)


def test_another_rule_by_overlay_places_the_same_stream() -> None:
    stream = family("qwen2_vl").stream([Text(tokens=2), Image((56, 84)), Text(tokens=1)])
    flat = family("qwen2_vl", overlay={"rule": {"next": "time"}})
    own = flat.stream([Text(tokens=2), Image((56, 84)), Text(tokens=1)])
    assert torch.equal(flat.position_ids(stream).ids, flat.position_ids(own).ids)


def test_a_rule_that_weaves_sound_writes_the_stream() -> None:
    """Sound stands between the frames where the rule says, so its stream is another's under another rule."""
    fam = family("qwen2_5_omni")
    slow = family("qwen2_5_omni", overlay={"rule": {"frame_step": {"per_second": 10}}})
    clip = Video((96, 160), seconds=SECONDS)
    silent, heard = fam.stream([clip]), fam.stream([replace(clip, audio=Audio(3.0))])
    assert slow.position_ids(silent).ids.shape[-1] == silent.length
    assert slow.stream([replace(clip, audio=Audio(3.0))]) != heard
    with pytest.raises(PositionError, match="their rule differ"):
        slow.position_ids(heard)
