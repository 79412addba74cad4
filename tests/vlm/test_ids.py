"""Position ids: the vendor's rule by loops, exact time, invariants, shapes, and what is refused."""

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
from tests.vlm.rows import DIALECTS, FAMILIES, Part, clip, image, numbers, place
from visionpos.errors import PositionError
from visionpos.vlm import Rule, family, ids_from_tokens


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
