"""Sound in streams: counts, writing order and ids against the installed omni processors."""

from __future__ import annotations

import importlib
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from visionpos.errors import ConfigError, PositionError
from visionpos.vlm import Audio, Image, Text, Video, family, weave
from visionpos.vlm.instants import exact

OMNI = {"qwen2_5_omni": "Qwen2_5OmniProcessor", "qwen3_omni": "Qwen3OmniMoeProcessor"}
MODULES = {"qwen2_5_omni": "qwen2_5_omni", "qwen3_omni": "qwen3_omni_moe"}


def module_of(name: str) -> Any:
    pytest.importorskip("transformers")
    folder = MODULES[name]
    return importlib.import_module(f"transformers.models.{folder}.processing_{folder}")


def spec_of(name: str) -> Any:
    spec = family(name).spec.audio
    assert spec is not None
    return spec


@pytest.mark.parametrize("name", OMNI)
def test_reference_tokens_of_every_length(name: str) -> None:
    count = module_of(name)._get_feat_extract_output_lengths
    spec = spec_of(name)
    for frames in [*range(4, 1300), 2999, 3000, 3001, 29999, 30000]:
        assert spec.tokens(Audio(frames / 100)) == int(count(frames)), frames


@pytest.mark.parametrize("name", OMNI)
@pytest.mark.parametrize("samples", [4800, 15999, 16000, 16001, 48123, 80079])
def test_reference_frames_of_the_feature_extractor(name: str, samples: int) -> None:
    """With the settings of each checkpoint: Qwen2.5 pads to 300 s and counts a frame begun, Qwen3 does not pad."""
    transformers = pytest.importorskip("transformers")
    length = {"chunk_length": 300} if name == "qwen2_5_omni" else {}
    extract = transformers.WhisperFeatureExtractor(feature_size=8, **length)
    how = {"padding": "max_length"} if name == "qwen2_5_omni" else {"padding": True}
    got = extract(
        np.zeros(samples, dtype=np.float32), sampling_rate=16000, return_attention_mask=True,
        truncation=False, return_tensors="np", **how,
    )  # fmt: skip
    frames = int(got["attention_mask"].sum())
    expected = int(module_of(name)._get_feat_extract_output_lengths(frames))
    assert spec_of(name).tokens(Audio(samples / 16000)) == expected


def test_difference_a_neighbour_changes_the_count_of_the_reference() -> None:
    """A sound padded to its neighbour's length counts a frame begun, alone it does not: 101 frames against 100."""
    transformers = pytest.importorskip("transformers")
    extract = transformers.WhisperFeatureExtractor(feature_size=8)
    one, long = np.zeros(16080, dtype=np.float32), np.zeros(48000, dtype=np.float32)
    frames = [
        int(extract(
            batch, sampling_rate=16000, return_attention_mask=True, padding=True, return_tensors="np"
        )["attention_mask"][0].sum())
        for batch in ([one], [one, long])
    ]  # fmt: skip
    assert frames == [100, 101]
    assert spec_of("qwen3_omni").tokens(Audio(16080 / 16000)) == 13


@pytest.mark.parametrize("name", OMNI)
@pytest.mark.parametrize(
    ("frames", "sound"), [(2, 0.5), (6, 3.0), (7, 1.25), (9, 12.0), (16, 7.3), (3, 4.2)]
)
def test_reference_writing_order(name: str, frames: int, sound: float) -> None:
    """The string that the installed processor writes for a clip of 56 x 84 at 2 frames a second."""
    module, fam = module_of(name), family(name)
    clip = Video((56, 84), seconds=[at / 2 for at in range(frames)], audio=Audio(sound))
    stream = fam.stream([clip])
    grid = fam.plan(clip).views[0].patches
    merge = fam.spec.grid.merge
    one = {"audio_token": "a", "video_token": "v", "audio_bos_token": "<", "audio_eos_token": ">"}
    owner = getattr(module, OMNI[name])
    reader = SimpleNamespace(
        **one,
        video_processor=SimpleNamespace(merge_size=merge, temporal_patch_size=2),
        get_chunked_index=lambda *given: owner.get_chunked_index(None, *given),
    )
    tokens = spec_of(name).tokens(Audio(sound))
    per_second = {"qwen2_5_omni": 25, "qwen3_omni": 13.0}[name]
    written = owner.replace_video_with_audio_token(
        reader,
        {"video_grid_thw": np.array([grid.shape]), "video_second_per_grid": [1.0]},
        0,
        {"num_audio_tokens": [tokens]},
        0,
        position_id_per_seconds=per_second,
        seconds_per_chunk=2.0,
    )
    letters = {fam.spec.audio.cell: "a", fam.spec.video.cell: "v"}  # type: ignore[union-attr]
    edges = dict(zip(("<", ">"), ("before", "after"), strict=True))
    ours = "".join(letters.get(token, "") for token in stream.names)
    assert ours == written.strip("<>")
    assert stream.names[1] == fam.spec.audio.stream.at(edges["<"])[0]  # type: ignore[union-attr]
    assert stream.names[-2] == fam.spec.audio.stream.at(edges[">"])[0]  # type: ignore[union-attr]


@pytest.mark.parametrize("name", OMNI)
def test_ids_of_streams_are_those_of_their_tokens(name: str) -> None:
    """Sound, images, clips with and without sound, of unequal sizes and lengths, longer than wide."""
    fam = family(name)
    times = [[0.0, 0.5, 1.0, 1.5], [at / 2 for at in range(11)], [0.0, 0.5]]
    clips = [
        Video((56, 140), seconds=times[0], audio=Audio(2.5)),
        Video((112, 56), seconds=times[1], audio=Audio(1.0)),
        Video((84, 84), seconds=times[2]),
    ]
    still = Image((60, 200))
    prompt = [
        Text("hear"),
        Audio(0.7),
        clips[0],
        still,
        clips[1],
        Text("and"),
        clips[2],
        Audio(3.1),
    ]
    stream = fam.stream(prompt)
    grids = [fam.plan(clip).views[0].patches.shape for clip in clips]
    types = stream.modality
    merge = fam.spec.grid.merge
    assert int((types == 3).sum()) == sum(
        spec_of(name).tokens(Audio(s)) for s in (0.7, 2.5, 1.0, 3.1)
    )
    assert int((types == 2).sum()) == sum(int(np.prod(grid)) // merge**2 for grid in grids)
    seconds = [1.0, 1.0, 1.0]
    image = [fam.plan(still).views[0].patches.shape]
    expected = fam.position_ids_from_tokens(types, types, image, grids, None, seconds)
    got = fam.position_ids(stream)
    assert torch.equal(got.ids, expected.ids)
    assert got.delta == expected.delta
    assert bool(stream.is_feature.equal(types != 0))


def test_spans_of_a_woven_clip() -> None:
    fam = family("qwen2_5_omni")
    stream = fam.stream([Video((56, 84), seconds=[at / 2 for at in range(6)], audio=Audio(3.0))])
    spans = [(span.kind, span.stop - span.start, span.frame) for span in stream.spans]
    whole = fam.plan(Video((56, 84), frames=6)).views[0].tokens
    frame = whole.height * whole.width
    assert spans == [
        ("video", 2 * frame, 0), ("audio", 50, 0), ("video", frame, 2), ("audio", 25, 50)
    ]  # fmt: skip


def test_irregular_clips_are_woven_by_their_true_times() -> None:
    """Frames at 0 and 5 s: four seconds of sound stand between them, by time and by chunks."""
    for name, between in (("qwen3_omni", 13 * 4), ("qwen2_5_omni", 25 * 4)):
        clip = Video((56, 84), seconds=[0.0, 0.1, 5.0, 5.1], audio=Audio(4.0))
        stream = family(name).stream([clip])
        kinds = [(span.kind, span.stop - span.start) for span in stream.spans]
        assert kinds[1] == ("audio", between)
        assert [kind for kind, _ in kinds] == ["video", "audio", "video"]


def test_difference_steps_longer_than_a_chunk() -> None:
    """Published code ends a chunk a token: of a frame 4 s on, one cell stands by itself, a chunk before the others.

    Here a frame stays whole, in the chunk of its time.
    """
    module = module_of("qwen2_5_omni")
    cut = module.Qwen2_5OmniProcessor.get_chunked_index
    clip = Video((56, 84), seconds=[0.0, 2.0, 4.0, 6.0], sampled_fps=0.5, audio=Audio(5.0))
    stream = family("qwen2_5_omni").stream([clip])
    frame = family("qwen2_5_omni").plan(clip).cells // 2
    tau = np.repeat([0, 100], frame)
    assert cut(None, tau, 50) == [(0, frame), (frame, frame + 1), (frame + 1, 2 * frame)]
    spans = [(span.kind, span.stop - span.start) for span in stream.spans]
    assert spans == [("video", frame), ("audio", 100), ("video", frame), ("audio", 25)]


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_seconds_of_numpy(kind: Any) -> None:
    """Durations and exact fractions of any float of numpy: 48123 samples are 300 frames."""
    expected = int(module_of("qwen3_omni")._get_feat_extract_output_lengths(300))
    assert spec_of("qwen3_omni").tokens(Audio(kind(48123 / 16000))) == expected
    assert exact(kind(0.5)) == Fraction(1, 2)
    assert exact(np.float32(0.08)) == Fraction(2, 25)


@pytest.mark.parametrize("seconds", [True, np.bool_(True), 1e300, 16000 * 3600, 10**400])
def test_error_no_duration(seconds: Any) -> None:
    """Truth values, and samples taken for seconds."""
    with pytest.raises(PositionError, match=r"Audio seconds is .*at most 1e\+07"):
        Audio(seconds)


def test_error_weave_counts() -> None:
    rule = family("qwen3_omni").spec.rule
    assert rule is not None
    with pytest.raises(PositionError, match=r"audio_tokens is -3"):
        weave(rule, np.array([0.0, 13.0]), -3)


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("qwen2_5_omni", Audio(0.01), "too short for one token"),
        ("qwen2_5_omni", Audio(300.1), "at most 300 are required"),
        ("qwen3_omni", Audio(0.001), "too short for one token"),
        ("qwen2_5_omni", Video((56, 84), frames=4, audio=Audio(1.0)), "audio and no seconds"),
        ("qwen2_5_vl", Video((56, 84), frames=4, audio=Audio(1.0)), "takes no audio"),
        ("qwen3_vl", Audio(2.0), "takes no audio"),
    ],
)
def test_error_names_the_sound(name: str, given: Any, message: str) -> None:
    with pytest.raises(PositionError, match=message):
        family(name).stream([given])


def test_error_video_audio_and_specs() -> None:
    with pytest.raises(PositionError, match=r"Video audio is 3\.0; an Audio is required"):
        Video((56, 84), frames=2, audio=3.0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"audio\.hop is 0"):
        family("qwen3_omni", overlay={"audio": {"hop": 0}})
    with pytest.raises(ConfigError, match=r"rule\.audio is 'none'"):
        family("qwen3_omni", overlay={"rule": {"audio": "none"}})
    assert spec_of("qwen3_omni").tokens(Audio(Fraction(1, 3))) == 5  # type: ignore[arg-type]
