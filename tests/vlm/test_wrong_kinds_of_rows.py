"""Arguments of another kind in rows, shards, truncation and decoding: refused by name, never bare."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from visionpos import vlm
from visionpos.errors import PositionError

FAM = vlm.family("qwen2_5_vl")
STREAM = FAM.stream([vlm.Text("a b"), vlm.Image((56, 84))])
POS = FAM.position_ids(STREAM)
RULE = FAM.spec.rule
BATCH = vlm.merge_rows([POS, POS], RULE) if RULE is not None else None
ROW = vlm.pack([STREAM, STREAM], family=FAM, pad_each_to=4)
SHARDS = ROW.shards(2)
STACKED = vlm.stack_rows([ROW, ROW])
TYPES = STREAM.modality

# A call that works, of every public function and method.
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "pack": (
        vlm.pack,
        {
            "streams": [STREAM], "family": FAM, "tokenizer": None, "pad_token": 0, "pad_to_multiple": 4,
            "pad_each_to": 2, "length": None,
        },
    ),
    "pack_rows": (
        vlm.pack_rows,
        {"rows": [POS], "types": [TYPES], "tokens": [TYPES], "pad_id": 0, "pad_token": 0, "length": None},
    ),
    "bin_lengths": (
        vlm.bin_lengths,
        {"lengths": [3, 4], "budget": 9, "method": "best_fit", "largest_first": True, "most": None},
    ),
    "context_shards": (
        vlm.context_shards, {"length": 8, "ranks": 2, "order": "zigzag", "cu_seqlens": torch.tensor([0, 4, 8])},
    ),
    "truncate_stream": (
        vlm.truncate_stream, {"stream": STREAM, "length": 3, "side": "right", "cut": "drop"},
    ),
    "truncate_tokens": (
        vlm.truncate_tokens,
        {
            "modality": TYPES, "length": 3, "family": FAM, "image_grids": torch.tensor([[1, 4, 6]]),
            "video_grids": None, "around": (1, 1), "side": "right", "cut": "drop",
        },
    ),
    "ids_after": (vlm.ids_after, {"pos": BATCH, "cached": 2, "tokens": 2, "counted": "unmasked"}),
    "next_ids": (vlm.next_ids, {"pos": BATCH, "tokens": 2, "skip": 0}),
    "rolled_back": (
        vlm.rolled_back,
        {"pos": POS, "tokens": 1, "modality": TYPES},
    ),
    "take": (SHARDS.take, {"x": ROW.ids, "rank": 0, "dim": -1}),
    "split": (SHARDS.split, {"x": ROW.ids, "dim": -1}),
    "join": (SHARDS.join, {"parts": SHARDS.split(ROW.ids), "dim": -1}),
    "fill": (ROW.fill, {"parts": [TYPES, TYPES], "value": 0, "dim": -1}),
    "unpack": (ROW.unpack, {"x": ROW.ids, "dim": -1}),
    "mask": (ROW.mask, {"causal": True}),
    "block_mask": (ROW.block_mask, {"block": 4, "causal": True}),
    "shards": (ROW.shards, {"ranks": 2, "order": "zigzag", "per_document": False}),
    "shard mask": (SHARDS.mask, {"rank": 0, "documents": ROW.documents, "keys": [1, 0], "causal": True}),
    "shard mask_mod": (SHARDS.mask_mod, {"rank": 0, "documents": ROW.documents, "keys": [1], "causal": True}),
    "shard block_mask": (
        SHARDS.block_mask, {"rank": 0, "documents": ROW.documents, "keys": [1, 0], "causal": True, "block": 4},
    ),
    "stack_rows": (
        vlm.stack_rows,
        {
            "rows": [ROW], "labels": [ROW.text], "side": "left", "pad_id": 0, "pad_token": 0, "pad_to_multiple": 4,
            "length": 40,
        },
    ),
    "stacked fill": (STACKED.fill, {"parts": [ROW.text, ROW.text], "value": 0}),
    "stacked unstack": (STACKED.unstack, {"x": STACKED.ids, "dim": -1}),
    "stacked mask": (STACKED.mask, {"causal": True}),
    "stacked block_mask": (STACKED.block_mask, {"block": 4, "causal": True}),
}  # fmt: skip
ODD: list[Any] = [
    None, "a", "3", 3, -1, 2.5, [1], ["a"], {"a": 1}, float("nan"), True, object(), (), torch.ones(2, 2),
    torch.tensor(2.5), torch.tensor(True), np.array(2.5),
]  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_error_kinds(name: str) -> None:
    """One argument wrong, the others right: a refusal that says so in a few words, or an answer."""
    call, right = CALLS[name]
    call(**right)
    for argument in right:
        refusals = []
        for wrong in ODD:
            try:
                call(**{**right, argument: wrong})
            except PositionError as refusal:
                refusals.append(str(refusal))
            except Exception as bare:
                pytest.fail(f"{name}({argument}={wrong!r}) raises {type(bare).__name__}: {bare}")
        assert len(refusals) > 5, argument
        assert max(map(len, refusals)) < 700, argument


@pytest.mark.parametrize(("dtype", "value"), [
    (torch.uint8, -100), (torch.int32, 2**40), (torch.bool, 2), (torch.int64, float("nan")), (torch.int16, 0.5),
])  # fmt: skip
def test_error_value_is_beyond_the_dtype_of_parts(dtype: torch.dtype, value: float) -> None:
    """-100 in uint8 would be 156, a label like any other."""
    parts = [torch.ones(STREAM.length, dtype=dtype)] * 2
    with pytest.raises(PositionError, match=rf"value is .* parts are {dtype}; a whole number from"):
        ROW.fill(parts, value)


def test_error_parts_of_unequal_sides() -> None:
    long, n = SHARDS.places.shape[1], STREAM.length
    for parts, dim in (
        ([torch.ones(2, n), torch.ones(3, n)], -1), ([torch.ones(n), torch.ones(3, n)], -1),
        ([torch.ones(n, 2), torch.ones(n, 2, 1)], 0),
    ):  # fmt: skip
        with pytest.raises(PositionError, match=r"parts\[1\] has shape .*equal sides"):
            ROW.fill(parts, 0, dim)
    with pytest.raises(PositionError, match=r"parts\[1\] has shape .*equal sides"):
        SHARDS.join([torch.ones(long), torch.ones(2, long)])


@pytest.mark.parametrize("count", [np.int64(5), np.uint8(5), torch.tensor(5)])
def test_whole_numbers_of_numpy_and_torch_count(count: Any) -> None:
    assert vlm.truncate_stream(STREAM, count) == vlm.truncate_stream(STREAM, 5)
    assert torch.equal(vlm.next_ids(POS, count), vlm.next_ids(POS, 5))


@pytest.mark.parametrize("merge", [np.int64(2), torch.tensor(2), (2, 2), [2, 2], np.array([2, 2])])
def test_merge_of_every_kind(merge: Any) -> None:
    assert RULE is not None
    got = vlm.ids_from_tokens(TYPES, TYPES, [[1, 4, 6]], rule=RULE, merge=merge)
    assert torch.equal(got.ids, POS.ids)


def test_error_pending_images_without_cells() -> None:
    pos = vlm.PositionIds(torch.arange(9).expand(3, -1), torch.tensor(9), torch.tensor(0))
    rule = vlm.Rule(axes=("time", "row", "col"))
    for odd in ((-2, 2), (3, 0)):
        with pytest.raises(PositionError, match=r"grids_hw\[1\] is .*at least one row"):
            vlm.pending_ids(pos, [(2, 2), odd], rule)
