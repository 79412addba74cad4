"""Position ids: the published tables, G1 to G12 and G22 of facts/mrope.md 7, and those of facts/users.md f.

Patch grids, merge 2. The same numbers were measured with the vendors' code and several versions of transformers.
"""

import pytest
import torch

from tests.vlm.rows import DIALECTS, FAMILIES, clip, image, numbers, place, tensors
from visionpos.vlm import family

# name -> parts, T, H, W, delta of the transformers convention (vendor: the same without padding). Every family and
# dialect agrees on images and text.
IMAGES = {
    "G1": ([4], "0 1 2 3", "0 1 2 3", "0 1 2 3", 0),
    "G2": (
        [3, image(4, 4), 3],
        "0 1 2 3 3 3 3 5 6 7",
        "0 1 2 3 3 4 4 5 6 7",
        "0 1 2 3 4 3 4 5 6 7",
        -2,
    ),
    "G3": (
        [2, image(4, 4), 2, image(2, 6), 2],
        "0 1 2 2 2 2 4 5 6 6 6 9 10",
        "0 1 2 2 3 3 4 5 6 6 6 9 10",
        "0 1 2 3 2 3 4 5 6 7 8 9 10",
        -2,
    ),
    "G8": ([image(4, 6), 2], "0*6 3 4", "0*3 1*3 3 4", "0 1 2 0 1 2 3 4", -3),
    "G9": ([2, image(6, 4)], "0 1 2*6", "0 1 2 2 3 3 4 4", "0 1 2 3 2 3 2 3", -3),
    "G22": (
        [3, image(4, 4), 2, image(4, 4), 1],
        "0 1 2 3*4 5 6 7*4 9",
        "0 1 2 3 3 4 4 5 6 7 7 8 8 9",
        "0 1 2 3 4 3 4 5 6 7 8 7 8 9",
        -4,
    ),
    "G10": ([image(4, 4)], "0*4", "0 0 1 1", "0 1 0 1", -2),
}


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("table", IMAGES)
def test_golden_images(table: str, name: str, dialect: str) -> None:
    parts, *axes, delta = IMAGES[table]
    got = place(name, dialect, parts)
    assert got.ids.tolist() == [numbers(axis) for axis in axes]
    assert int(got.delta) == delta
    assert got.ids.dtype == torch.int64


# (table, family, dialect, seconds) -> parts, T, H, W, delta
G4, G5 = [2, clip(2, 4, 4), 3], [2, clip(4, 2, 2), 3]
G6 = [2, image(4, 4), 3, clip(3, 2, 4), 2]
G4_HW = "0 1 2 2 3 3 2 2 3 3", "0 1 2 3 2 3 2 3 2 3"
G6_HW = "0 1 2 2 3 3 4 5 6 7*6", "0 1 2 3 2 3 4 5 6 7 8 7 8 7 8"
CLIPS = {
    ("G4", "qwen2_vl", "vendor", None): (G4, "0 1 2*4 3*4", *G4_HW, "4 5 6", -6),
    ("G4", "qwen2_vl", "transformers", None): (G4, "0 1 2*4 3*4", *G4_HW, "4 5 6", -6),
    ("G4", "qwen2_5_vl", "vendor", 1.0): (G4, "0 1 2*4 4*4", *G4_HW, "5 6 7", -5),
    ("G4", "qwen2_5_vl", "transformers", 1.0): (G4, "0 1 2*4 4*4", *G4_HW, "4 5 6", -6),
    ("G5", "qwen2_vl", "vendor", None): (G5, "0 1 2 3 4 5", *["0 1 2*4"] * 2, "6 7 8", 0),
    ("G5", "qwen2_vl", "transformers", None): (G5, "0 1 2 3 4 5", *["0 1 2*4"] * 2, "3 4 5", -3),
    ("G5", "qwen2_5_vl", "vendor", 1.0): (G5, "0 1 2 4 6 8", *["0 1 2*4"] * 2, "9 10 11", 3),
    ("G5", "qwen2_5_vl", "transformers", 1.0): (G5, "0 1 2 4 6 8", *["0 1 2*4"] * 2, "3 4 5", 0),
    ("G5", "qwen2_5_vl", "vendor", 0.75): (G5, "0 1 2 3 5 6", *["0 1 2*4"] * 2, "7 8 9", 1),
    ("G6", "qwen2_5_vl", "vendor", 1.0): (
        G6, "0 1 2*4 4 5 6 7 7 9 9 11 11", *G6_HW, "12 13", -3,
    ),
    ("G6", "qwen2_5_vl", "transformers", 1.0): (
        G6, "0 1 2*4 4 5 6 7 7 9 9 11 11", *G6_HW, "9 10", -5,
    ),
    ("G6", "qwen2_vl", "vendor", None): (G6, "0 1 2*4 4 5 6 7 7 8 8 9 9", *G6_HW, "10 11", -5),
    ("G6", "qwen2_vl", "transformers", None): (
        G6, "0 1 2*4 4 5 6 7 7 8 8 9 9", *G6_HW, "9 10", -6,
    ),
}  # fmt: skip


@pytest.mark.parametrize("key", CLIPS, ids=str)
def test_golden_clips(key: tuple[str, str, str, float | None]) -> None:
    _, name, dialect, seconds = key
    parts, *axes, after, delta = CLIPS[key]
    got = place(name, dialect, parts, seconds)
    assert got.ids.tolist() == [numbers(f"{axis} {after}") for axis in axes]
    assert int(got.delta) == delta
    assert int(got.next_position) == numbers(after)[-1] + 1


@pytest.mark.parametrize("dialect", DIALECTS)
def test_golden_g7_timestamped_frames(dialect: str) -> None:
    """The processor's one grid (3, 4, 4) stands for three spans with text between."""
    types = torch.tensor([0] + [0, 0, 0, 2, 2, 2, 2, 0] * 3 + [0, 0])
    got = family("qwen3_vl", dialect=dialect).position_ids_from_tokens(
        types, types, video_grids=[[3, 4, 4]]
    )
    assert got.ids.tolist() == [
        numbers("0 1 2 3 4*4 6 7 8 9 10*4 12 13 14 15 16*4 18 19 20"),
        numbers("0 1 2 3 4 4 5 5 6 7 8 9 10 10 11 11 12 13 14 15 16 16 17 17 18 19 20"),
        numbers("0 1 2 3 4 5 4 5 6 7 8 9 10 11 10 11 12 13 14 15 16 17 16 17 18 19 20"),
    ]
    assert int(got.delta) == -6


@pytest.mark.parametrize(
    ("dialect", "after", "delta"),
    [("vendor", [356, 357, 358], -31731), ("transformers", [39, 40, 41], -31741)],
)
def test_golden_where_the_dialects_part(dialect: str, after: list[int], delta: int) -> None:
    """15 text, start, a clip of (167, 24, 32) at 1.0 s a step, end, 9 text (facts/mrope.md 0.1)."""
    got = place("qwen2_5_vl", dialect, [16, clip(167, 24, 32), 10], 1.0)
    assert got.ids[:, -3:].tolist() == [after] * 3
    assert int(got.delta) == delta
    assert int(got.ids[0, -11]) == 16 + 166 * 2  # the last frame, in both


@pytest.mark.parametrize(
    ("dialect", "pad", "deltas"), [("vendor", 1, [-2, -7]), ("transformers", 0, [-2, 0])]
)
@pytest.mark.parametrize("side", ["left", "right"])
def test_golden_g11_padding(side: str, dialect: str, pad: int, deltas: list[int]) -> None:
    """Row 0 is G2, row 1 three text tokens padded to 10."""
    types = torch.zeros(2, 10, dtype=torch.int64)
    types[0, 3:7] = 1
    mask = torch.ones_like(types)
    mask[1, slice(0, 7) if side == "left" else slice(3, 10)] = 0
    got = family("qwen2_vl", dialect=dialect).position_ids_from_tokens(
        types, types, [[1, 4, 4]], attention_mask=mask
    )
    text, room = [0, 1, 2], [pad] * 7
    assert got.ids[:, 1].tolist() == [room + text if side == "left" else text + room] * 3
    assert got.ids[0, 0].tolist() == numbers("0 1 2 3*4 5 6 7")
    assert got.delta.tolist() == deltas
    assert got.next_position.tolist() == [8, 3]
    assert torch.equal(got.mask, mask.bool())


def test_golden_g11_without_a_mask_counts_padding() -> None:
    types = torch.zeros(1, 10, dtype=torch.int64)
    got = family("qwen2_vl").position_ids_from_tokens(types, types)
    assert got.ids[0].tolist() == [list(range(10))]


@pytest.mark.parametrize("name", FAMILIES)
def test_golden_g12_two_rows_with_images_left_padded(name: str) -> None:
    rows = [
        tensors(parts)["modality"].tolist() for parts in ([1, image(4, 4), 2], [3, image(4, 6), 4])
    ]
    types = torch.tensor([[0] * 6 + rows[0], rows[1]])
    mask = torch.tensor([[0] * 6 + [1] * 7, [1] * 13])
    got = family(name, dialect="transformers").position_ids_from_tokens(
        types, types, [[1, 4, 4], [1, 4, 6]], attention_mask=mask
    )
    assert got.ids[:, 0].tolist() == [
        numbers("0*6 0 1*4 3 4"), numbers("0*6 0 1 1 2 2 3 4"), numbers("0*6 0 1 2 1 2 3 4"),
    ]  # fmt: skip
    assert got.ids[:, 1].tolist() == [
        numbers("0 1 2 3*6 6 7 8 9"),
        numbers("0 1 2 3 3 3 4 4 4 6 7 8 9"),
        numbers("0 1 2 3 4 5 3 4 5 6 7 8 9"),
    ]
    assert got.delta.tolist() == [-2, -3]


def test_golden_chunk_and_first_decoded() -> None:
    got = place("qwen2_vl", "vendor", IMAGES["G2"][0])
    assert got.ids[:, 5:8].tolist() == [[3, 3, 5], [4, 4, 5], [3, 4, 5]]
    assert int(got.next_position) == 8
    assert int(got.next_position) == got.ids.shape[-1] + int(got.delta)


def test_golden_first_decoded_after_a_large_image() -> None:
    """users F14: 10 text, image of 6x8 merged cells, 3 text: ids end at 20, delta -40."""
    got = place("qwen2_vl", "transformers", [10, image(12, 16), 3])
    assert (int(got.ids.max()), int(got.next_position), int(got.delta)) == (20, 21, -40)


def test_golden_blocks_of_timestamped_frames() -> None:
    """users F26: (3, 4, 4) with stamps of 4 tokens: 29 tokens, delta -6, blocks at 6, 13 and 20."""
    types = torch.tensor([0] + ([0] * 5 + [2] * 4) * 3 + [0])
    got = family("qwen3_vl").position_ids_from_tokens(types, types, video_grids=[[3, 4, 4]])
    assert len(types) == 29
    assert got.ids[0, types == 2].unique().tolist() == [6, 13, 20]
    assert int(got.delta) == -6


def test_golden_still_image_is_not_scaled_by_time() -> None:
    """users F01: after 5 text tokens a merged 2x3 image stands at t = 5, text goes on at 8."""
    got = place("qwen2_5_vl", "vendor", [5, image(4, 6), 3], 4.0)
    assert got.ids[0].tolist() == numbers("0 1 2 3 4 5*6 8 9 10")
    assert int(got.delta) == -3


def test_golden_frames_of_clip_have_their_own_time_and_rows() -> None:
    """transformers#45381: (3, 4, 4) at 1.0 s."""
    ids = place("qwen2_5_vl", "vendor", [2, clip(3, 4, 4)], 1.0).ids[:, 2:]
    assert ids[0].tolist() == numbers("2*4 4*4 6*4")
    assert ids[1].tolist() == numbers("2 2 3 3") * 3


@pytest.mark.parametrize(
    ("fps", "times"),
    [(0.5, [0, 8]), (1, [0, 4, 8, 12]), (2, list(range(0, 15, 2))), (4, list(range(16)))],
)
def test_golden_fps_table(fps: float, times: list[int]) -> None:
    """An 8 s clip, 2 ids a second, 2 frames a step: the same instants get the same ids (facts/mrope.md 8)."""
    steps = int(8 * fps / 2)
    ids = place("qwen2_5_vl", "vendor", [clip(steps, 2, 2)], 2 / fps).ids
    assert ids[0].tolist() == times


@pytest.mark.parametrize(("fps", "distinct"), [(5, 9), (6, 8), (8, 6), (10, 5)])
def test_golden_ids_repeat_above_four_fps(fps: int, distinct: int) -> None:
    ids = place("qwen2_5_vl", "vendor", [clip(12, 2, 2)], 2 / fps).ids
    assert ids[0].unique().numel() == distinct
