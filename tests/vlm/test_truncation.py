"""Truncation: a shorter prompt holds whole images alone, and the grids that go with them."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.strategies import seeds
from tests.vlm.conversations import NAMES, fam_of, prompts, stream_of
from tests.vlm.prompts import draw
from tests.vlm.rows import clip, image, tensors
from visionpos import Grid
from visionpos.errors import PositionError
from visionpos.vlm import (
    Audio,
    Cells,
    Image,
    Text,
    TokenStream,
    Truncation,
    Video,
    Words,
    family,
    truncate_stream,
    truncate_tokens,
)

SIDES = ["left", "right"]


def atoms(stream: TokenStream) -> list[bool]:
    """Whether the row may be cut before each token, and behind the last: never inside an image with its markers."""
    owner: list[int] = []
    for run in stream.runs:
        owner += [run.segment] * run.count
    shown = {span.segment for span in stream.spans if span.grid is not None}
    cut = [True]
    cut += [one not in shown or one != other for one, other in pairwise(owner)]
    return [*cut, True][: len(owner) + 1]


def slow_length(stream: TokenStream, length: int, side: str) -> int:
    """The most tokens, at most length, that can be left: look at every place to cut."""
    cuts, n = atoms(stream), stream.length
    fits = [
        kept for kept in range(min(length, n) + 1) if cuts[kept if side == "right" else n - kept]
    ]
    return max(fits)


@pytest.mark.parametrize("side", SIDES)
@settings(max_examples=60)
@given(st.sampled_from(NAMES), prompts(most=5), st.floats(0, 1.1))
def test_reference_streams(
    side: Any, name: str, parts: tuple[tuple[str, int], ...], share: float
) -> None:
    """As long as can be, cut between atoms, and one end of the stream as it was."""
    stream = stream_of(name, parts)
    length = round(share * stream.length)
    got = truncate_stream(stream, length, side=side)
    assert got.length == slow_length(stream, length, side)
    n, kept = stream.length, got.length
    within = slice(0, kept) if side == "right" else slice(n - kept, n)
    assert got.names == stream.names[within]
    assert torch.equal(got.modality, stream.modality[within])
    whole = [one for one in stream.spans if one.grid is not None]
    left = [one for one in got.spans if one.grid is not None]
    sizes = {(one.segment, one.view, one.frame): one.stop - one.start for one in whole}
    assert all(sizes[one.segment, one.view, one.frame] == one.stop - one.start for one in left)
    segments = {one.segment for one in left}
    assert len(left) == sum(one.segment in segments for one in whole), "an image lost a view"


@settings(max_examples=40)
@given(st.sampled_from(NAMES), prompts(most=5), st.floats(0, 1))
def test_invariant_ids_of_a_kept_beginning_are_those_of_the_whole(
    name: str, parts: tuple[tuple[str, int], ...], share: float
) -> None:
    fam, stream = fam_of(name), stream_of(name, parts)
    got = truncate_stream(stream, round(share * stream.length))
    ids = fam.position_ids(stream).ids
    assert torch.equal(fam.position_ids(got).ids, ids[:, : got.length])


def test_left_truncation_loses_the_first_images() -> None:
    """users F21: the grids to drop are the first ones; ids start again at 0."""
    fam = family("qwen2_vl")
    segments = [Image((56, 84)), Text(tokens=4), Image((84, 56)), Text(tokens=2)]
    stream = fam.stream(segments)
    got = truncate_stream(stream, 15, side="left")
    assert {one.segment for one in got.spans} == {1, 2, 3}
    alone = fam.position_ids(fam.stream(segments[1:])).ids
    assert torch.equal(fam.position_ids(got).ids, alone)
    assert truncate_stream(stream, 15).length == 12


@pytest.mark.parametrize(
    ("side", "length", "needed"), [("right", 33, 34), ("left", 31, 32), ("right", 0, 34)]
)
def test_raise_says_how_long_it_must_be(side: Any, length: int, needed: int) -> None:
    """users F21: refused with the needed length, which is enough, and one token less is not."""
    # 6 text, 8 image, 6 text, 14 clip, 4 text
    segments = [Text(tokens=6), Image((56, 84)), Text(tokens=6), Video((56, 84), frames=4)]
    overlay = {"video": {"size": [{"kind": "multiple", "of": "factor"}]}}
    fam = family("qwen2_vl", overlay=overlay)
    stream = fam.stream([*segments, Text(tokens=4)])
    assert [one.stop - one.start for one in stream.spans if one.grid] == [6, 12]
    with pytest.raises(PositionError, match=rf"length is {length} .* {needed} of the 38 tokens"):
        truncate_stream(stream, length, side=side, cut="raise")
    kept = truncate_stream(stream, needed, side=side, cut="raise")
    assert kept.length == needed
    with pytest.raises(PositionError, match="needed"):
        truncate_stream(stream, needed - 1, side=side, cut="raise")


def test_words_and_token_ids_are_cut_with_the_text() -> None:
    fam = family("qwen2_vl")
    symbolic = fam.stream([Text("one two three four")])
    assert truncate_stream(symbolic, 2).names == ("one", "two")
    assert truncate_stream(symbolic, 2, side="left").names == ("three", "four")
    real = fam.stream([Text(token_ids=[5, 6, 7, 8])])
    assert truncate_stream(real, 3).token_ids({}).tolist() == [5, 6, 7]
    assert truncate_stream(real, 3, side="left").token_ids({}).tolist() == [6, 7, 8]


def test_text_joined_to_a_stamp_can_be_cut() -> None:
    """A tokenizer joins text with the stamp beside it; what lies outside the markers of the clip is text."""
    fam = family("glm4v")
    words = [Text("a b c"), Video((112, 140), seconds=[0.0, 1.0, 2.0, 3.0]), Text("d e f g")]
    stream = fam.stream(words, tokenizer=lambda text: [ord(one) for one in text])
    got = truncate_stream(stream, stream.length - 3)
    assert got.length == stream.length - 3
    assert truncate_stream(stream, 4).length == 4


# --- token tensors


def slow_tokens(types: list[int], media: list[tuple[int, int]], length: int, side: str) -> int:
    n = len(types)
    cuts = [not any(first < at < last for first, last in media) for at in range(n + 1)]
    return max(
        kept for kept in range(min(length, n) + 1) if cuts[kept if side == "right" else n - kept]
    )


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl", "hy_v4_vl"])
@settings(max_examples=60)
@given(seeds(), st.floats(0, 1.1))
def test_reference_tokens(side: Any, name: str, seed: int, share: float) -> None:
    """Without markers: the ids of what is kept can be built from the grids that are kept, and no more would fit."""
    fam = family(name)
    batch = draw(
        seed, per_frame=name == "qwen3_vl", column=int(name == "hy_v4_vl"), rows=(1, 1), glued=True
    )
    types = batch.types[0][batch.mask[0].bool()]
    grids = {"image_grids": batch.grids("images"), "video_grids": batch.grids("videos")}
    length = round(share * len(types))
    got = truncate_tokens(types, length, family=fam, **grids, around=(0, 0), side=side)
    kept = types[got.start : got.stop]
    left = [
        None if one is None else one[which]
        for one, which in zip(grids.values(), (got.images, got.videos), strict=True)
    ]
    ids = fam.position_ids_from_tokens(kept, kept, *left).ids  # refuses what is not whole
    if side == "right":
        whole = fam.position_ids_from_tokens(types, types, *grids.values()).ids
        assert torch.equal(ids, whole[:, : len(kept)])
    assert (got.start == 0) if side == "right" else (got.stop == len(types))
    assert len(kept) <= length
    media = _media_of(types.tolist(), batch, name)
    assert len(kept) == slow_tokens(types.tolist(), media, length, side)


def _media_of(types: list[int], batch: Any, name: str) -> list[tuple[int, int]]:
    """First and last place of each image and clip: count its cells along the row."""
    wide = int(name == "hy_v4_vl")
    media = []
    for kind, grids in ((1, batch.images), (2, batch.videos)):
        places = iter([at for at, one in enumerate(types) if one == kind])
        for frames, height, width in grids:
            own = [next(places) for _ in range(frames * (height // 2) * (width // 2 + wide))]
            media.append((own[0], own[-1] + 1))
    return media


def test_markers_go_with_their_image() -> None:
    """t2 VS image VE t2: no start token is left without its image, nor an end token."""
    row = tensors([3, image(4, 4), 3])
    types, grids = row["modality"], {"image_grids": row["image_grids"]}

    def kept(length: int, **more: Any) -> Truncation:
        return truncate_tokens(types, length, family=family("qwen2_vl"), **grids, **more)

    for length in (3, 5, 7):
        got = kept(length)
        assert (got.start, got.stop, got.images.tolist()) == (0, 2, [])
    assert (kept(8).stop, kept(8).images.tolist()) == (8, [0])
    assert (kept(7, side="left").start, kept(8, side="left").start) == (8, 2)
    assert kept(7, around=(1, 0)).stop == 7
    with pytest.raises(PositionError, match=r"length is 7 and image 0 would be lost; 8 of the 10"):
        kept(7, cut="raise")


def test_grids_that_stay_are_told_by_kind() -> None:
    """The batch of users F21: what is dropped on the left are the first grids, of images and clips each."""
    parts = [1, image(4, 4), 2, clip(2, 4, 4), 2, image(4, 8), 2, clip(1, 4, 6), 2]
    row = tensors(parts)
    grids = {"image_grids": row["image_grids"], "video_grids": row["video_grids"]}
    types = row["modality"]
    fam = family("qwen2_vl")
    got = truncate_tokens(types, 22, family=fam, **grids, side="left")
    assert (got.images.tolist(), got.videos.tolist()) == ([1], [1])
    got = truncate_tokens(types, 17, family=fam, **grids)
    assert (got.images.tolist(), got.videos.tolist()) == ([0], [0])


def test_placeholders_at_the_ends_of_an_image_belong_to_it() -> None:
    """HunyuanVL types the markers around the cells as placeholders too."""
    types = torch.tensor([0, 0] + [1] * (2 * 3 + 2) + [0, 0])
    fam = family("hunyuan_vl")
    for length in range(1, 11):
        assert truncate_tokens(types, length, family=fam, image_grids=[[1, 4, 4]]).stop == 1
    got = truncate_tokens(types, 11, family=fam, image_grids=[[1, 4, 4]])
    assert (got.stop, got.images.tolist()) == (11, [0])


def test_error_names_what_is_wrong() -> None:
    fam = family("qwen2_vl")
    stream = fam.stream([Text(tokens=3)])
    types = torch.tensor([0, 1, 1, 0])
    cases: list[tuple[Any, str]] = [
        (lambda: truncate_stream(stream, -1), "length is -1"),
        (lambda: truncate_stream(stream, 2.5), "length is 2.5"),
        (lambda: truncate_stream("text", 2), "stream is 'text'"),
        (lambda: truncate_stream(stream, 2, side="top"), "side is 'top'"),
        (lambda: truncate_stream(stream, 2, cut="off"), "cut is 'off'"),
        (lambda: truncate_tokens(types, 2, family=fam), "image 0 has 2 tokens .* no grid"),
        (lambda: truncate_tokens(types[None], 2, family=fam), r"modality has shape \(1, 4\)"),
        (lambda: truncate_tokens(types, 2, family=family("internvl")), "Use truncate_stream"),
        (lambda: truncate_tokens(types, 2, family=family("minicpm_v4_7")), "Use truncate_stream"),
        (lambda: truncate_tokens(types, 2, family=fam, around=(-1, 0)), r"around is \(-1, 0\)"),
        (lambda: truncate_tokens(types * 3, 2, family=family("qwen3_omni")), "where a sound ends"),
    ]
    for call, words in cases:
        with pytest.raises(PositionError, match=words):
            call()


def test_sound_is_kept_whole_too() -> None:
    """A sound, and a clip with its own sound woven in, have features as images have."""
    fam = family("qwen2_5_omni")
    clip_ = Video((56, 84), seconds=[0.0, 0.5, 1.0, 1.5, 2.0, 2.5], audio=Audio(3.0))
    stream = fam.stream([Text(tokens=2), Audio(1.0), Text(tokens=2), clip_, Text(tokens=2)])
    wholes = {truncate_stream(stream, length).length for length in range(stream.length + 1)}
    sound = stream.length - fam.stream([Text(tokens=4), clip_, Text(tokens=2)]).length
    assert wholes == {
        *range(3), *range(2 + sound, 5 + sound), *range(stream.length - 2, stream.length + 1)
    }  # fmt: skip


def test_text_joined_behind_cells_is_text() -> None:
    """Where no marker closes a clip, its last stamp may be one run with the text that follows."""
    cells = Cells(segment=1, name="<v>", modality=2, grid=Grid(2, 3), count=6, node="frame")
    text = Words(segment=1, text="", count=5, token_ids=(1, 2, 3, 4, 5))
    stream = TokenStream((Words(segment=0, text="", count=2), cells, text))
    lengths = [truncate_stream(stream, length).length for length in range(14)]
    assert lengths == [0, 1, 2, 2, 2, 2, 2, 2, 8, 9, 10, 11, 12, 13]
    assert truncate_stream(stream, 11).runs[-1].names == ("#1", "#2", "#3")


def test_media_that_touch_have_no_markers_between_them() -> None:
    """Room for markers is what lies between, one token for one image; at the ends of the prompt there is none."""
    types = torch.tensor([1] * 4 + [1] * 6 + [0, 1, 1])
    grids = [[1, 4, 4], [1, 4, 6], [1, 2, 4]]
    fam = family("qwen2_vl")
    for length, stop, images in ((3, 0, []), (4, 4, [0]), (10, 4, [0]), (11, 11, [0, 1])):
        got = truncate_tokens(types, length, family=fam, image_grids=grids)
        assert (got.stop, got.images.tolist()) == (stop, images)
    for length, start, images in ((1, 13, []), (2, 11, [2]), (8, 11, [2]), (9, 4, [1, 2])):
        got = truncate_tokens(types, length, family=fam, image_grids=grids, side="left")
        assert (got.start, got.images.tolist()) == (start, images)
