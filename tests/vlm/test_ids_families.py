"""Ids of single families: the tables G13, G16, G19 and G21 of facts/mrope.md 7, and the edge cases of its section 8."""

from typing import Any

import pytest
import torch

from tests.vlm.rows import numbers
from visionpos.errors import PositionError
from visionpos.vlm import Image, Special, Text, Video, family


def place(name: str, types: list[int], dialect: str = "vendor", **grids: Any) -> Any:
    row = torch.tensor(types)
    return family(name, dialect=dialect).position_ids_from_tokens(row, row, **grids)


@pytest.mark.parametrize(("dialect", "after", "delta"), [
    ("vendor", [6, 7], -12), ("transformers", [4, 5], -14),
])  # fmt: skip
def test_golden_g13_ernie_merges_time(dialect: str, after: list[int], delta: int) -> None:
    """(8, 4, 4): four steps of two grid frames; the dialects part behind it."""
    got = place("ernie4_5_vl", [0, 0, *[2] * 16, 0, 0], dialect, video_grids=[[8, 4, 4]])
    assert got.ids[0].tolist() == numbers("0 1 2*4 3*4 4*4 5*4") + after
    assert got.ids[1].tolist() == [0, 1, *[2, 2, 3, 3] * 4, *after]
    assert got.ids[2].tolist() == [0, 1, *[2, 3, 2, 3] * 4, *after]
    assert int(got.delta) == delta


@pytest.mark.parametrize(("frames", "steps"), [(1, 1), (2, 1), (4, 2), (5, 2)])
def test_golden_ernie_odd_frames(frames: int, steps: int) -> None:
    """facts/mrope.md 8: a single frame is a step (the vendor), a rest is left out."""
    got = place("ernie4_5_vl", [0, *[2] * (4 * steps), 0], video_grids=[[frames, 4, 4]])
    assert got.ids[0, 1:-1].unique().tolist() == list(range(1, 1 + steps))


def test_golden_ernie_both_rules_agree_on_short_clips() -> None:
    """(4, 4, 4): two steps of 2x2."""
    types, grids = [0, 0, *[2] * 8, 0, 0], {"video_grids": [[4, 4, 4]]}
    one, other = (
        place("ernie4_5_vl", types, dialect, **grids) for dialect in ("vendor", "transformers")
    )
    assert torch.equal(one.ids, other.ids)
    assert one.ids[0].tolist() == numbers("0 1 2*4 3*4 4 5")


@pytest.mark.parametrize("edges", [0, 1])
def test_golden_g16_hunyuan_with_and_without_typed_edges(edges: int) -> None:
    """Its processor types the begin and end token of an image as image; the ids are the same."""
    inside = [1] * (6 + 2 * edges)
    got = place(
        "hunyuan_vl", [0, *[0] * (2 - edges), *inside, *[0] * (2 - edges)], image_grids=[[1, 4, 4]]
    )
    assert got.ids.tolist() == [
        list(range(11)),
        [0, 1, 2, 0, 1, 2, 0, 1, 2, 9, 10],
        [0, 1, 2, 0, 0, 0, 1, 1, 1, 9, 10],
        [0, 1, 2, 0, 0, 0, 0, 0, 0, 9, 10],
    ]
    with pytest.raises(PositionError, match=r"row 0: image 0 has 5 tokens.*6 cells"):
        place("hunyuan_vl", [0, *[1] * 5, 0], image_grids=[[1, 4, 4]])


def test_golden_g19_canvas() -> None:
    """t2 <image> 2x2 </image> t2."""
    square = [{"kind": "stretch", "box": 112}]  # 2x2 tokens of 4x4 patches of 14
    fam = family(
        "minicpm_v4_7",
        overlay={
            "views": {"replace": True, "global": {"size": square}},
            "untiled": {"views": {"replace": True, "global": {"size": square}}},
        },
    )
    pos = fam.position_ids(fam.stream([Text(tokens=2), Image((50, 50)), Text(tokens=2)]))
    assert pos.ids.tolist() == [
        numbers("0 1 2 2 2 2 2 2 5 6"), numbers("0 1 1 2 2 3 3 4 5 6"), numbers("0 1 1 2 3 2 3 4 5 6"),
    ]  # fmt: skip
    assert int(pos.delta) == -3


def test_canvas_of_slices_by_hand() -> None:
    """Two rows of three slices, 7x9 tokens each: canvas 14x27 from 2, whole view spread over it."""
    fam = family("minicpm_v4_7")
    stream = fam.stream([Text(tokens=2), Image((700, 1400)), Text(tokens=1)])
    t, h, w = fam.position_ids(stream).ids
    at = {
        name: [n for n, one in enumerate(stream.names) if one == name] for name in set(stream.names)
    }
    assert [(int(h[n]), int(w[n])) for n in at["<slice>"]] == [
        (2, 2), (2, 11), (2, 20), (9, 2), (9, 11), (9, 20),
    ]  # fmt: skip
    assert [(int(h[n]), int(w[n])) for n in at["</slice>"]][:2] == [(8, 10), (8, 19)]
    assert [(int(h[n]), int(w[n])) for n in at["\n"]] == [(8, 29)]
    assert [(int(h[n]), int(w[n])) for n in at["<image>"] + at["</image>"]] == [(1, 1), (16, 29)]
    assert t[2:-1].unique().tolist() == [2]
    assert int(t[-1]) == 2 + 27 + 1
    whole = stream.spans[1]
    assert whole.grid is not None
    seen = torch.stack([h, w])[:, whole.start : whole.stop]
    assert seen.amin(1).tolist() == [2, 2]
    assert seen.amax(1).tolist() == [2 + 13, 2 + 26]


def test_line_ends_behind_an_image_on_a_canvas_take_no_room() -> None:
    fam = family("minicpm_v4_7")
    stream = fam.stream(
        [Image((448, 448)), Text("\n", tokens=1), Text(tokens=1), Text("\n", tokens=1)]
    )
    ids = fam.position_ids(stream).ids
    after = int(ids[0, -2])
    assert ids[:, -3:].T.tolist() == [[0] * 3, [after] * 3, [after + 1] * 3]


def test_canvas_from_tokens_is_refused() -> None:
    """Types and grids do not say which slice stands where."""
    row = torch.tensor([0, 1, 0])
    with pytest.raises(PositionError, match=r"place 'canvas'.*stream"):
        family("minicpm_v4_7").position_ids_from_tokens(row, row, [[1, 4, 4]])


def test_golden_g21_glm_frames_between_markers() -> None:
    """Begin, [frame of 4, end, text] twice, end: T 0 1 2 3333 5 6 7 8888 10 11 12 13, delta -4."""
    types = [0, 0, 0, 2, 2, 2, 2, 0, 0, 0, 2, 2, 2, 2, 0, 0, 0, 0]
    for name in ("glm4v", "glm46v", "glm4v_moe", "glm_ocr"):
        got = place(name, types, video_grids=[[2, 4, 4]])
        assert got.ids[0].tolist() == numbers("0 1 2 3*4 5 6 7 8*4 10 11 12 13")
        assert int(got.delta) == -4


def test_a_model_s_own_placeholder_counts_as_text() -> None:
    """ms-swift#9287: a generated pad token is typed 0, and ids go on by one."""
    fam = family("qwen2_vl")
    stream = fam.stream([Image((56, 84)), Text(tokens=1), Special("<|image_pad|>"), Text(tokens=1)])
    ids = fam.position_ids(stream).ids
    assert ids[:, -3:].tolist() == [[5, 6, 7]] * 3


@pytest.mark.parametrize("fps", [1e-6, 1e9])
def test_frame_rates_beyond_sense_are_refused(fps: float) -> None:
    """A step of weeks, or of a nanosecond; 0, negative and NaN are refused by Video itself."""
    fam = family("qwen2_5_vl")
    stream = fam.stream([Video((56, 56), frames=4, sampled_fps=fps)])
    with pytest.raises(
        PositionError, match=r"Video in segment 0 has grid steps of .* seconds.*sampled_fps"
    ):
        fam.position_ids(stream)
    for wrong in (0.0, -2.0, float("nan")):
        with pytest.raises(PositionError, match=r"sampled_fps is .*above 0"):
            Video((56, 56), frames=4, sampled_fps=wrong)


def test_golden_grid_that_is_not_divisible_is_refused() -> None:
    """facts/mrope.md 8: 5x4 floors silently to 2x2 in transformers."""
    with pytest.raises(PositionError, match=r"image_grids\[0\].*5.*multiples of merge 2"):
        place("qwen3_vl", [0, 1, 1, 1, 1, 0], image_grids=[[1, 5, 4]])
