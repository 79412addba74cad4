"""Sound: as text, and woven into a clip by chunks and by time (G15 of facts/mrope.md 7)."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from visionpos.errors import PositionError
from visionpos.vlm import PerSecond, Rule, family, ids_from_tokens
from visionpos.vlm.rules import AudioInVideo
from visionpos.vlm.woven import weave

CLIP, SOUND = 2, 3


def place(name: str, types: list[int], clips: list[list[int]], seconds: Any = 1.0) -> Any:
    row = torch.tensor(types)
    return family(name).position_ids_from_tokens(row, row, None, clips, None, seconds)


def rule_of(name: str) -> Rule:
    rule = family(name).spec.rule
    assert rule is not None
    return rule


def test_golden_g15_by_chunks_with_shared_edges() -> None:
    """Text, VS and AS share 1; a chunk of 2 s: both frames at 2 and 27, then 50 sounds; AE and VE share 52, next 53."""
    rule = rule_of("qwen2_5_omni")
    tau = np.repeat([0, 25], 4)
    order = weave(rule, tau, 50)
    assert order.tolist() == [False] * 8 + [True] * 50
    types = [0, 0, 0, *np.where(order, SOUND, CLIP).tolist(), 0, 0, 0]
    got = place("qwen2_5_omni", types, [[2, 4, 4]])
    assert got.ids[0].tolist() == [0, 1, 1, *[2] * 4, *[27] * 4, *range(2, 52), 52, 52, 53]
    assert got.ids[1, 3:11].tolist() == [2, 2, 3, 3] * 2
    assert got.ids[2, 3:11].tolist() == [2, 3, 2, 3] * 2
    assert int(got.delta) == -10


def test_golden_g15_by_time() -> None:
    """VS 1, AS 2; first frame at 3, sounds 3 to 15, second frame at 16, sounds 16 to 28, ends 29 and 30, next 31."""
    rule = rule_of("qwen3_omni")
    order = weave(rule, np.repeat([0.0, 13.0], 4), 26)
    assert order.tolist() == [False] * 4 + [True] * 13 + [False] * 4 + [True] * 13
    types = [0, 0, 0, *np.where(order, SOUND, CLIP).tolist(), 0, 0, 0]
    got = place("qwen3_omni", types, [[2, 4, 4]])
    times = [*[3] * 4, *range(3, 16), *[16] * 4, *range(16, 29)]
    assert got.ids[0].tolist() == [0, 1, 2, *times, 29, 30, 31]
    assert got.ids[1, 20:24].tolist() == [3, 3, 4, 4]
    assert got.ids[2, 20:24].tolist() == [3, 4, 3, 4]
    assert float(got.delta) == -8


def test_golden_sound_is_text() -> None:
    """One id a sound token on every axis, before and after an image; images never share edges (vllm PR 16878)."""
    row = torch.tensor([0, 0, 3, 3, 3, 0, 0, 1, 1, 1, 1, 0])
    got = family("qwen2_5_omni").position_ids_from_tokens(row, row, [[1, 4, 4]])
    assert got.ids[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 7, 7, 7, 9]


def test_batch_of_clips_with_and_without_sound() -> None:
    """VeOmni#493: rows keep their ids whatever their neighbours carry."""
    with_sound = [0, 0, *[CLIP] * 4, *[SOUND] * 5, 0, 0]
    silent = [0, 0, *[CLIP] * 4, 0, 0, 0, 0, 0, 0, 0]
    rows = torch.tensor([with_sound, silent])
    fam = family("qwen2_5_omni")
    both = fam.position_ids_from_tokens(rows, rows, None, [[1, 4, 4]] * 2, None, 1.0)
    for number, row in enumerate(rows):
        alone = fam.position_ids_from_tokens(row, row, None, [[1, 4, 4]], None, 1.0)
        assert torch.equal(both.ids[:, number], alone.ids)


def test_text_goes_on_behind_the_last_piece() -> None:
    """A clip of 3 s with 1 s of sound: by chunks the clip is last, and text clears its last frame."""
    rule = rule_of("qwen2_5_omni")
    order = weave(rule, np.repeat([0, 25, 50], 1), 25)
    assert order.tolist() == [False, False] + [True] * 25 + [False]
    types = [0, 0, *np.where(order, SOUND, CLIP).tolist(), 0, 0, 0]
    got = place("qwen2_5_omni", types, [[3, 2, 2]])
    assert got.ids[0, -3:].tolist() == [52, 52, 53]
    assert int(got.ids[0, -4]) == 51


@given(
    st.integers(1, 6), st.integers(1, 30), st.integers(1, 12), st.sampled_from(["chunks", "time"])
)
def test_invariant_weaving_keeps_both_in_order(
    frames: int, sounds: int, rate: int, how: str
) -> None:
    """By time, tau never falls; by chunks, no token stands before one of an earlier chunk, cells before sound."""
    spec = AudioInVideo(
        interleave=how,  # type: ignore[arg-type]
        chunk_seconds=Fraction(2) if how == "chunks" else None,
    )
    rule = Rule(
        axes=("time", "row", "col"), audio="text", audio_in_video=spec,
        frame_step=PerSecond(per_second=Fraction(rate)),
    )  # fmt: skip
    tau = np.arange(frames) * rate
    order = weave(rule, tau, sounds)
    assert order.sum() == sounds
    at = np.zeros(len(order))
    at[order], at[~order] = np.arange(sounds), tau
    if how == "time":
        assert (np.diff(at) >= 0).all()
    else:
        key = at // (2 * rate) * 2 + order
        assert (np.diff(key) >= 0).all()


@pytest.mark.parametrize(("types", "clips", "message"), [
    ([2, 2, 3, 0], [[1, 2, 4]], r"row 0: a clip with sound fills tokens 0 to 2.*no start and end"),
    ([0, 2, 3, 2], [[1, 2, 4]], r"row 0: a clip with sound fills tokens 1 to 3"),
    ([0, 0, 2, 3, 2, 0, 0], [[1, 2, 6]], r"row 0: video 0 has 2 tokens.*3 cells"),
    ([0, 0, 2, 3, 2, 0, 0], [[1, 2, 2], [1, 2, 2]],
     r"row 0: a clip with sound has 2 cells.*grid 1.*one clip a stretch"),
])  # fmt: skip
def test_error_of_a_woven_clip(types: list[int], clips: list[list[int]], message: str) -> None:
    with pytest.raises(PositionError, match=message):
        place("qwen2_5_omni", types, clips)


def test_error_where_a_family_takes_no_sound() -> None:
    row = torch.tensor([0, 3, 0])
    with pytest.raises(
        PositionError, match=r"modality is 3 \(audio\) in row 0; this family takes no audio"
    ):
        family("qwen2_vl").position_ids_from_tokens(row, row)
    with pytest.raises(PositionError, match=r"no audio_in_video.*Audio"):
        weave(Rule(axes=("time",)), np.zeros(2), 3)
    assert ids_from_tokens(row, row, rule=Rule(axes=("index",), audio="text")).ids.tolist() == [
        [0, 1, 2]
    ]
