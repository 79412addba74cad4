"""Odd tensors: every dtype that holds 0 and 1, rows of nothing, tensors without numbers, grids beyond all sense.

Expected ids are G2 of facts/mrope.md 7: two texts and a start, an image (1, 4, 4), an end and two texts.
"""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from visionpos.errors import PositionError
from visionpos.vlm import PositionIds, family, truncate_tokens

TYPES = torch.tensor([0, 0, 0, 1, 1, 1, 1, 0, 0, 0])
ROWS = [[0, 1, 2, 3, 3, 4, 4, 5, 6, 7], [0, 1, 2, 3, 4, 3, 4, 5, 6, 7]]
DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint16, torch.uint32, torch.uint64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn,
]  # fmt: skip


def place(types: Tensor, grids: Any = ((1, 4, 4),), mask: Tensor | None = None) -> PositionIds:
    return family("qwen2_vl").position_ids_from_tokens(types, types, grids, None, mask)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_golden_in_every_dtype(dtype: torch.dtype) -> None:
    padded = torch.cat([torch.zeros(3, dtype=torch.int64), TYPES])
    mask = torch.cat([torch.zeros(3, dtype=torch.int64), torch.ones_like(TYPES)])
    assert place(TYPES.to(dtype)).ids[1:].tolist() == ROWS
    pos = place(padded.to(dtype), mask=mask.to(dtype))
    assert pos.ids[1:, 3:].tolist() == ROWS
    assert pos.ids.dtype == torch.int64
    kept = truncate_tokens(TYPES.to(dtype), 9, family=family("qwen2_vl"), image_grids=[[1, 4, 4]])
    assert (kept.start, kept.stop, kept.images.tolist()) == (0, 9, [0])


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.float16, torch.float64, torch.uint64], ids=str
)
def test_golden_with_grids_in_every_dtype(dtype: torch.dtype) -> None:
    grids = torch.tensor([[1, 4, 4]]).to(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert place(TYPES, grids).ids[1:].tolist() == ROWS
    if dtype.is_floating_point:
        assert place(TYPES, grids.requires_grad_()).ids[1:].tolist() == ROWS


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 5)])
def test_shape_of_nothing(shape: tuple[int, ...]) -> None:
    """Rows without tokens, and batches without rows, with a mask and without."""
    none = torch.zeros(shape, dtype=torch.int64)
    for mask in (None, none):
        pos = place(none, None, mask)
        assert pos.ids.shape == (3, *shape)
        assert not pos.next_position.any()
        assert not pos.delta.any()


def test_rows_of_padding_alone() -> None:
    types = torch.stack([torch.zeros_like(TYPES), TYPES])
    pos = place(types, mask=torch.stack([torch.zeros_like(TYPES), torch.ones_like(TYPES)]))
    assert pos.ids[1:, 1].tolist() == ROWS
    assert pos.next_position.tolist() == [0, 8]


@pytest.mark.parametrize(("types", "message"), [
    (TYPES.to("meta"), r"modality is a Tensor on meta that cannot be read"),
    (TYPES.to_sparse(), r"modality is a Tensor on cpu that cannot be read.*dense"),
    (TYPES.to(torch.complex64), r"modality is torch.complex64; whole numbers"),
    (TYPES * -1, r"modality is -1 at row 0, token 3"),
    (TYPES * 2**40, r"modality is 1099511627776 at row 0, token 3"),
    (TYPES * float("nan"), r"modality is nan at row 0, token 0"),
    (TYPES.clamp(min=0.5), r"modality is 0.5 at row 0, token 0"),
    (TYPES.bfloat16() * float("inf"), r"modality is nan at row 0, token 0"),
])  # fmt: skip
def test_error_types_that_are_none(types: Tensor, message: str) -> None:
    with pytest.raises(PositionError, match=message):
        family("qwen2_vl").position_ids_from_tokens(TYPES, types, [[1, 4, 4]])


def test_error_fake_tensors() -> None:
    """A traced graph has no numbers in it."""
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(TYPES)
        with pytest.raises(PositionError, match=r"modality is a FakeTensor .*cannot be read"):
            place(fake)


HUGE = [
    [[1, 2**40, 2**40]], [[1, 4, 4], [1, 2**33, 2**34]], [[1, 2**33, 2**34], [1, 4, 4]],
    [[1, float("inf"), 4]], [[1, 1e30, 4]],
]  # fmt: skip


@pytest.mark.parametrize("grids", HUGE, ids=str)
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl", "hunyuan_vl"])
def test_error_sides_beyond_all_sense(name: str, grids: Any) -> None:
    """Products of such sides pass int64 by: 2^33 x 2^34 patches are 0 cells there."""
    with pytest.raises(PositionError, match=r"image_grids holds .*at most 2147483647 patches"):
        family(name).position_ids_from_tokens(TYPES, TYPES, grids)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl", "ernie4_5_vl", "glm46v"])
@pytest.mark.parametrize("grids", [
    [[2**30, 4, 4]], [[1, 2**31 - 4, 2**31 - 4]], [[2**30, 2**30, 2**30]], [[1, 4, 4], [2**30, 2**18, 2**18]],
], ids=str)  # fmt: skip
def test_error_clips_that_fill_memory(name: str, grids: Any) -> None:
    """A frame a unit would take gigabytes before the first look at the tokens."""
    with pytest.raises(PositionError, match=r"video_grids\[\d\] is .*for a batch of 10 tokens"):
        family(name).position_ids_from_tokens(TYPES, TYPES * 2, None, grids)


@pytest.mark.parametrize("seconds", [torch.tensor([True]), torch.tensor([1j])], ids=str)
def test_error_seconds_that_are_none(seconds: Tensor) -> None:
    with pytest.raises(PositionError, match=r"seconds_per_grid\[0\] is torch.*number of seconds"):
        family("qwen2_5_vl").position_ids_from_tokens(
            TYPES, TYPES * 2, None, [[1, 4, 4]], None, seconds
        )
