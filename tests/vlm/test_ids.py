"""Position ids: the published tables, the vendor's rule by loops, invariants, and what is refused.

Tables G1 to G12 are those of facts/mrope.md 7; patch grids, merge 2. A row is written as text, image and clip in order.
"""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.reference.mrope import vendor_ids
from tests.strategies import seeds, volumes
from tests.vlm.prompts import Batch, draw
from visionpos.errors import PositionError
from visionpos.vlm import Rule, family, ids_from_tokens

FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]
DIALECTS = ["vendor", "transformers"]
IMAGE, CLIP = 1, 2

Part = int | tuple[int, tuple[int, int, int]]  # number of text tokens, or (type, patch grid)


def tensors(parts: list[Part]) -> dict[str, Any]:
    """One row as a processor returns it."""
    types: list[int] = []
    grids: dict[int, list[tuple[int, int, int]]] = {IMAGE: [], CLIP: []}
    for part in parts:
        if isinstance(part, int):
            types += [0] * part
            continue
        kind, (frames, height, width) = part
        grids[kind].append((frames, height, width))
        types += [kind] * (frames * height * width // 4)
    row = torch.tensor(types)
    return {
        "input_ids": row,
        "modality": row,
        "image_grids": grids[IMAGE],
        "video_grids": grids[CLIP],
    }


def place(name: str, dialect: str, parts: list[Part], seconds: Any = 1.0) -> Any:
    return family(name, dialect=dialect).position_ids_from_tokens(
        **tensors(parts), seconds_per_grid=seconds
    )


def numbers(text: str) -> list[int]:
    """`0 1 2*4` as [0, 1, 2, 2, 2, 2]."""
    out = []
    for word in text.split():
        value, _, times = word.partition("*")
        out += [int(value)] * int(times or 1)
    return out


def image(height: int, width: int) -> Part:
    return IMAGE, (1, height, width)


def clip(frames: int, height: int, width: int) -> Part:
    return CLIP, (frames, height, width)


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


@pytest.mark.parametrize("given", [
    [0.08, 2 / 24], (Fraction(2, 25), Fraction(1, 12)), torch.tensor([0.08, 2 / 24]),
    np.array([0.08, 2 / 24]), np.array([0.08, 2 / 24], dtype=np.float32), list(torch.tensor([0.08, 2 / 24])),
], ids=["list", "fractions", "tensor", "array", "float32 array", "list of tensors"])  # fmt: skip
def test_shape_seconds_of_every_kind(given: Any) -> None:
    """25 fps and 24 fps: the first clip reaches id 2 at frame 13, the second at frame 12."""
    types = torch.tensor([2] * 14 + [0] + [2] * 14)
    got = family("qwen2_5_vl").position_ids_from_tokens(
        types, types, video_grids=[[14, 2, 2]] * 2, seconds_per_grid=given
    )
    assert got.ids[0, :14].tolist() == [0] * 7 + [1] * 6 + [2]
    assert (got.ids[0, 15:] - got.ids[0, 15]).tolist() == [0] * 6 + [1] * 6 + [2] * 2


def test_shape_empty_prompt() -> None:
    for name in FAMILIES:
        fam = family(name)
        got = fam.position_ids(fam.stream([]))
        assert got.ids.shape == (3, 0)
        assert (int(got.next_position), int(got.delta)) == (0, 0)


@pytest.mark.parametrize("fps", [1, 3, 24, 25, 29.97, 35, 41, 47, 50, 55, 60])
@pytest.mark.parametrize("single", [False, True])
def test_reference_time_ids_are_exact(fps: float, single: bool) -> None:
    """floor(frame * 2 / fps * 2) in whole numbers, whatever float the seconds came in."""
    step = Fraction(2) / Fraction(str(fps))
    seconds = torch.tensor([2 / fps]) if single else [2 / fps]
    ids = place("qwen2_5_vl", "vendor", [clip(768, 2, 2)], seconds).ids
    assert ids[0].tolist() == [frame * step * 2 // 1 for frame in range(768)]


def check_against_oracle(name: str, seed: int) -> None:
    batch = draw(seed, per_frame=name == "qwen3_vl", glued=seed % 2 == 1)
    rates = [2 * step for step in batch.seconds] if name == "qwen2_5_vl" else None
    ids, following, deltas = vendor_ids(
        batch.types.tolist(),
        batch.mask.tolist(),
        batch.images,
        batch.videos,
        merge=2,
        per_frame=name == "qwen3_vl",
        ids_per_step=rates,
    )
    got = family(name).position_ids_from_tokens(
        batch.input_ids,
        batch.types,
        batch.grids("images"),
        batch.grids("videos"),
        batch.mask,
        [float(step) for step in batch.seconds],
    )
    assert got.ids.tolist() == ids, f"seed {seed}"
    assert got.next_position.tolist() == following, f"seed {seed}"
    assert got.delta.tolist() == deltas, f"seed {seed}"


@pytest.mark.parametrize("name", FAMILIES)
def test_reference_vendor_rule(name: str) -> None:
    for seed in range(150):
        check_against_oracle(name, seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_reference_vendor_rule_many(name: str) -> None:
    for seed in range(150, 2000):
        check_against_oracle(name, seed)


def ids_of(name: str, batch: Batch, dialect: str = "vendor") -> Any:
    return family(name, dialect=dialect).position_ids_from_tokens(
        batch.input_ids,
        batch.types,
        batch.grids("images"),
        batch.grids("videos"),
        batch.mask,
        [float(step) for step in batch.seconds],
    )


def joined(first: Batch, second: Batch) -> Batch:
    """Two batches as one, padded on the left."""
    longest = max(first.types.shape[1], second.types.shape[1])

    def wide(part: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(part, (longest - part.shape[1], 0))

    return Batch(
        torch.cat([wide(first.types), wide(second.types)]),
        torch.cat([wide(first.mask), wide(second.mask)]),
        first.images + second.images,
        first.videos + second.videos,
        first.seconds + second.seconds,
    )


@given(seeds(), seeds(), st.sampled_from(FAMILIES), st.sampled_from(DIALECTS))
def test_invariant_a_row_never_depends_on_its_neighbours(
    first: int, second: int, name: str, dialect: str
) -> None:
    per_frame = name == "qwen3_vl"
    one, other = (draw(seed, per_frame=per_frame) for seed in (first, second))
    together, alone = ids_of(name, joined(one, other), dialect), ids_of(name, one, dialect)
    rows = len(one.types)
    for row in range(rows):
        real = one.mask[row].bool()
        padded = joined(one, other).mask[row].bool()
        assert torch.equal(together.ids[:, row, padded], alone.ids[:, row, real])
    assert torch.equal(together.next_position[:rows], alone.next_position)


@given(seeds(), st.integers(1, 50), st.sampled_from(FAMILIES), st.sampled_from(DIALECTS))
def test_invariant_text_before_shifts_every_axis(
    seed: int, shift: int, name: str, dialect: str
) -> None:
    batch = draw(seed, per_frame=name == "qwen3_vl", rows=(1, 1))
    batch.mask = torch.ones_like(batch.mask)
    longer = Batch(
        torch.nn.functional.pad(batch.types, (shift, 0)),
        torch.nn.functional.pad(batch.mask, (shift, 0), value=1),
        batch.images,
        batch.videos,
        batch.seconds,
    )
    before, after = ids_of(name, batch, dialect), ids_of(name, longer, dialect)
    assert torch.equal(after.ids[..., shift:], before.ids + shift)
    assert torch.equal(after.delta, before.delta)


@given(st.integers(0, 300), st.sampled_from(FAMILIES), st.sampled_from(DIALECTS))
def test_invariant_text_is_one_dimensional(tokens: int, name: str, dialect: str) -> None:
    types = torch.zeros(tokens, dtype=torch.int64)
    got = family(name, dialect=dialect).position_ids_from_tokens(types, types)
    assert torch.equal(got.ids, torch.arange(tokens).expand(3, -1))
    assert (int(got.next_position), int(got.delta)) == (tokens, 0)


@given(volumes(max_side=9, max_frames=5))
def test_shape_any_rectangle(shape: tuple[int, int, int]) -> None:
    """Rows vary slower than columns, frames slowest; the next position clears every axis."""
    frames, height, width = shape
    parts: list[Part] = [1, clip(frames, 2 * height, 2 * width), 1]
    ids = place("qwen2_vl", "vendor", parts).ids
    grid = ids[:, 1:-1].reshape(3, frames, height, width) - 1
    assert torch.equal(grid[0, :, 0, 0], torch.arange(frames))
    assert torch.equal(grid[1, 0, :, 0], torch.arange(height))
    assert torch.equal(grid[2, 0, 0], torch.arange(width))
    assert ids[:, -1].tolist() == [max(shape) + 1] * 3


def test_shape_touching_images_are_shared_out_by_size() -> None:
    """Two images without a token between them are one run of placeholders."""
    apart = place("qwen2_vl", "vendor", [1, image(4, 6), image(2, 4), 1])
    assert apart.ids[1].tolist() == numbers("0 1 1 1 2 2 2 4 4 6")
    assert apart.ids[2].tolist() == numbers("0 1 2 3 1 2 3 4 5 6")


def test_shape_int32_tokens_and_fully_masked_row() -> None:
    types = torch.zeros(2, 4, dtype=torch.int32)
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]], dtype=torch.int32)
    got = family("qwen2_vl", dialect="transformers").position_ids_from_tokens(
        types, types, attention_mask=mask
    )
    assert got.ids.dtype == torch.int64
    assert got.next_position.tolist() == [4, 0]
    assert got.delta.tolist() == [0, 0]


def test_shape_inputs_are_not_written() -> None:
    batch = draw(3)
    copies = batch.types.clone(), batch.mask.clone()
    grids = batch.grids("videos")
    before = None if grids is None else grids.clone()
    ids_of("qwen2_vl", batch)
    assert torch.equal(batch.types, copies[0])
    assert torch.equal(batch.mask, copies[1])
    assert grids is None or torch.equal(grids, before)


def test_device_ids_come_back_where_tokens_are(device: torch.device) -> None:
    types = torch.tensor([[0, 1, 1, 0]], device=device)
    got = family("qwen2_vl").position_ids_from_tokens(
        types,
        types,
        torch.tensor([[1, 2, 4]], device=device),
        attention_mask=torch.ones_like(types),
    )
    assert {part.device.type for part in (got.ids, got.delta, got.next_position, got.mask)} == {
        device.type
    }


# What is refused: changed arguments -> what the message must name.
BASE = {
    "input_ids": torch.tensor([[0, 1, 1, 0]]),
    "modality": torch.tensor([[0, 1, 1, 0]]),
    "image_grids": [[1, 2, 4]],
}
CLIP_ROW = torch.tensor([[0, 2, 2, 0]])
TIMED = {
    "input_ids": CLIP_ROW,
    "modality": CLIP_ROW,
    "image_grids": None,
    "video_grids": [[2, 2, 2]],
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "truncated": ({"image_grids": [[1, 2, 6]]}, r"row 0: image 0 has 2 tokens.*\(1, 1, 3\).*3 cells.*truncated"),
    "too long": ({"image_grids": [[1, 2, 2]]}, r"row 0: image 1 has 1 tokens.*no grid.*image_grids"),
    "no grids": ({"image_grids": None}, r"row 0: image 0 has 2 tokens.*no grid"),
    "left over": ({"image_grids": [[1, 2, 4], [1, 2, 2]]}, r"image_grids holds 2 grids.*tokens for 1.*Drop"),
    "zero side": ({"image_grids": [[1, 0, 4]]}, r"image_grids\[0\] is \(1.0, 0.0, 4.0\).*merge 2"),
    "not divisible": ({"image_grids": [[1, 5, 4]]}, r"image_grids\[0\].*5.0.*multiples of merge 2.*patch grids"),
    "fraction": ({"image_grids": [[1, 2.5, 4]]}, r"image_grids\[0\].*2.5"),
    "shape": ({"image_grids": [1, 2, 4]}, r"image_grids has shape \(3,\).*\[items, 3\].*grid_thw"),
    "image with frames": ({"image_grids": [[2, 2, 2]]}, r"image_grids\[0\] has 2 frames.*video_grids"),
    "type 4": ({"modality": torch.tensor([[0, 4, 4, 0]])}, r"modality is 4 at row 0, token 1.*mm_token_type_ids"),
    "audio": ({"modality": torch.tensor([[0, 3, 3, 0]])}, r"modality is 3 \(audio\) in row 0.*takes no audio"),
    "other length": ({"modality": torch.tensor([[0, 1, 1]])}, r"shapes \(1, 4\), \(1, 3\).*same length"),
    "padded on the other side": (
        {"attention_mask": torch.tensor([[1, 1, 0, 0]])},
        r"modality is 1 at row 0, token 2, which attention_mask calls padding.*same side",
    ),
    "document numbers": ({"attention_mask": torch.tensor([[1, 1, 2, 2]])}, r"attention_mask is 2.*Split packed"),
    "stray placeholder": (
        {"input_ids": torch.zeros(1, 6), "modality": torch.tensor([[0, 1, 1, 0, 1, 0]])},
        r"row 0: image 1 has 1 tokens.*no grid.*generated placeholders 0",
    ),
    "no seconds": (TIMED, r"seconds_per_grid is None for 1 videos.*sampled_fps"),
    "zero seconds": ({**TIMED, "seconds_per_grid": [0.0]}, r"seconds_per_grid\[0\] is 0.0.*temporal_patch"),
    "negative seconds": ({**TIMED, "seconds_per_grid": -1}, r"seconds_per_grid\[0\] is -1"),
    "nan seconds": ({**TIMED, "seconds_per_grid": [float("nan")]}, r"seconds_per_grid\[0\] is nan"),
    "fps 1e-6": ({**TIMED, "seconds_per_grid": [2e6]}, r"seconds_per_grid\[0\] is 2000000.0.*86400"),
    "seconds of another count": ({**TIMED, "seconds_per_grid": [1.0, 1.0]}, r"holds 2 values for 1 videos"),
    "half precision": ({**TIMED, "seconds_per_grid": torch.ones(1, dtype=torch.bfloat16)}, r"is torch.bfloat16.*half"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_error_names_row_item_expected_and_found(case: str) -> None:
    changed, message = REFUSED[case]
    with pytest.raises(PositionError, match=message):
        family("qwen2_5_vl").position_ids_from_tokens(**{**BASE, **changed})


def test_error_second_row_is_named() -> None:
    types = torch.tensor([[0, 1, 1, 0], [1, 1, 0, 0]])
    with pytest.raises(PositionError, match=r"row 1: image 1 has 2 tokens.*\(1, 2, 2\).*4 cells"):
        family("qwen2_vl").position_ids_from_tokens(types, types, [[1, 2, 4], [1, 4, 4]])


def test_seconds_are_not_asked_of_rules_that_count_none() -> None:
    for name in ("qwen2_vl", "qwen3_vl"):
        got = family(name).position_ids_from_tokens(**{**TIMED, "seconds_per_grid": None})
        assert got.ids.shape == (3, 1, 4)


def test_merge_may_differ_between_images_and_clips() -> None:
    types = torch.tensor([1, 1, 2, 2])
    got = ids_from_tokens(
        types, types, [[1, 1, 2]], [[1, 2, 4]], rule=Rule(axes=("time", "row", "col")), merge=(1, 2)
    )
    assert got.ids[2].tolist() == [0, 1, 2, 3]
