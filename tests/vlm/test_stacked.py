"""Packed rows as one batch: a row is in it what it is alone, whichever side is padded, and comes out as it went in."""

from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.tolerances import assert_close_to
from tests.vlm.conversations import NAMES, fam_of, prompts, stream_of
from tests.vlm.rows import place
from visionpos.errors import PositionError
from visionpos.vlm import (
    PackedIds,
    context_shards,
    merge_rows,
    pack,
    pack_rows,
    split_rows,
    stack_rows,
)
from visionpos.vlm.padding import Side

SIDES: tuple[Side, ...] = ("left", "right")
ROWS = [
    [(("text", 7), ("image", 0)), (("text", 1),)],
    [(("image", 2), ("clip", 4))],
    [(("text", 1),), (("text", 7),), (("image", 1), ("text", 1))],
]


def rows_of(name: str, **padding: Any) -> list[PackedIds]:
    fam = fam_of(name)
    return [pack([stream_of(name, parts) for parts in row], family=fam, **padding) for row in ROWS]


def same(one: PackedIds, other: PackedIds) -> bool:
    for field in fields(PackedIds):
        mine, theirs = getattr(one, field.name), getattr(other, field.name)
        if not (torch.equal(mine, theirs) if isinstance(mine, Tensor) else mine == theirs):
            return False
    return True


def padded_by_hand(values: list[list[int]], n: int, side: Side, value: int) -> list[list[int]]:
    """Lists, one item after another."""
    return [
        [value] * (n - len(row)) + row if side == "left" else row + [value] * (n - len(row))
        for row in values
    ]


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", NAMES)
def test_reference_rows_one_by_one(name: str, side: Side) -> None:
    rows = rows_of(name, pad_each_to=3)
    rule = fam_of(name).spec.rule
    assert rule is not None
    batch = stack_rows(rows, side=side, pad_id=rule.pad_id, pad_to_multiple=16)
    n = batch.shape[1]
    longest = max(row.length for row in rows)
    assert n % 16 == 0
    assert longest <= n < longest + 16
    assert batch.ids.shape == (len(rule.axes), 3, n)
    assert batch.types is not None
    assert batch.tokens is None
    for axis, ids in enumerate(batch.ids):
        wanted = padded_by_hand([row.ids[axis].tolist() for row in rows], n, side, rule.pad_id)
        assert ids.tolist() == wanted
    documents = padded_by_hand([row.documents.tolist() for row in rows], n, side, -1)
    assert batch.documents.tolist() == documents
    assert batch.valid.tolist() == [[one >= 0 for one in row] for row in documents]
    types = [row.types.tolist() for row in rows if row.types is not None]
    assert batch.types.tolist() == padded_by_hand(types, n, side, 0)
    ends = [0]
    for row in rows:
        ends += [ends[-1] + end for end in row.cu_seqlens.tolist()[1:]]
    assert batch.cu_seqlens.tolist() == ends
    assert batch.max_seqlen == max(row.max_seqlen for row in rows)
    assert all(same(one, row) for one, row in zip(batch.rows(), rows, strict=True))


@given(st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=4), min_size=1, max_size=4), st.integers(1, 4),
       st.integers(1, 5), st.sampled_from(SIDES), st.integers(0, 3))  # fmt: skip
def test_invariant_rows_undo_stacking(
    lengths: list[list[int]], each: int, multiple: int, side: Side, more: int
) -> None:
    """Also of prompts without a token, and of rows of padding alone."""
    rows = []
    for row in lengths:
        placed = [place("qwen2_vl", "vendor", [length]) for length in row]
        tokens = [torch.arange(length) + 5 for length in row]
        rows.append(
            pack_rows(
                placed, tokens=tokens, pad_each_to=each, length=None if sum(row) else 2 * each
            )
        )
    n = -(-max(row.length for row in rows) // multiple) * multiple + more * multiple
    batch = stack_rows(rows, side=side, pad_to_multiple=multiple, pad_token=3, length=n)
    assert batch.shape == (len(rows), n)
    assert all(same(one, row) for one, row in zip(batch.rows(), rows, strict=True))
    assert batch.tokens is not None
    assert batch.tokens.tolist() == padded_by_hand(
        [(row.tokens.masked_fill(~row.valid, 0)).tolist() for row in rows if row.tokens is not None],
        n, side, 3,
    )  # fmt: skip
    for text, documents in zip(batch.text.tolist(), batch.documents.tolist(), strict=True):
        for at, (own, document) in enumerate(zip(text, documents, strict=True)):
            begins = at == 0 or documents[at - 1] != document
            assert own == (0 if begins else text[at - 1] + 1)


@given(st.lists(prompts(), min_size=1, max_size=4), st.sampled_from(NAMES), st.sampled_from(SIDES))
def test_reference_one_prompt_a_row_is_the_padded_batch(
    chosen: list[tuple[tuple[str, int], ...]], name: str, side: Side
) -> None:
    """What merge_rows says of the same prompts, and split_rows takes apart."""
    fam = fam_of(name)
    rule = fam.spec.rule
    assert rule is not None
    placed = [fam.position_ids(stream_of(name, parts)) for parts in chosen]
    merged = merge_rows(placed, rule, side=side)
    batch = stack_rows([pack_rows([one]) for one in placed], side=side, pad_id=rule.pad_id)
    assert torch.equal(batch.ids, merged.ids)
    assert merged.mask is not None
    assert torch.equal(batch.valid, merged.mask)
    for row, one in zip(batch.rows(), split_rows(merged, rule), strict=True):
        assert torch.equal(row.ids, one.ids)


@pytest.mark.parametrize("side", SIDES)
def test_masks_are_those_of_the_rows(side: Side) -> None:
    """Within a row as alone; padding of the batch sees padding, so that no row of a softmax is empty."""
    rows = rows_of("qwen2_5_vl", pad_each_to=4)
    batch = stack_rows(rows, side=side)
    n = batch.shape[1]
    for causal in (True, False):
        mask = batch.mask(causal=causal)
        assert mask.shape == (3, 1, n, n)
        assert mask.any(-1).all()
        for number, row in enumerate(rows):
            own = slice(n - row.length, n) if side == "left" else slice(0, row.length)
            inside = mask[number, 0, own, own]
            assert torch.equal(inside[row.valid], row.mask(causal=causal)[0, 0][row.valid])
            others = torch.ones(n, dtype=torch.bool)
            others[own] = False
            assert not mask[number, 0, own][row.valid][:, others].any()
        blocks = batch.block_mask(1, causal=causal).to_dense()
        assert torch.equal(blocks.bool(), mask)


def test_reference_transformers_finds_the_documents() -> None:
    """The text row over the ids, as its own helper reads packed rows; stretches of padding are pieces of their own."""
    utils = pytest.importorskip("transformers.masking_utils")
    batch = stack_rows(rows_of("qwen3_vl", pad_each_to=4), side="left", pad_to_multiple=8)
    assert batch.four_rows.shape == (4, *batch.shape)
    assert torch.equal(batch.four_rows[1:], batch.ids)
    found = utils.find_packed_sequence_indices(batch.four_rows[0])
    theirs = found[:, None, :, None] == found[:, None, None, :]
    assert torch.equal(theirs, batch.mask(causal=False))


def test_labels_and_what_a_model_made() -> None:
    rows = rows_of("qwen2_vl")
    labels = [row.fill([torch.arange(int(n)) for n in row.cu_seqlens.diff()], -100) for row in rows]
    for side in SIDES:
        batch = stack_rows(rows, labels=labels, side=side, pad_to_multiple=7)
        assert batch.labels is not None
        assert (batch.labels[~batch.valid] == -100).all()
        back = batch.unstack(batch.labels)
        assert all(torch.equal(one, label) for one, label in zip(back, labels, strict=True))
        weights = [torch.rand(2, row.length) for row in rows]
        assert batch.fill(weights).shape == (2, *batch.shape)
        again = batch.unstack(batch.fill(weights))
        assert all(torch.equal(one, weight) for one, weight in zip(again, weights, strict=True))
        logits = torch.randn(*batch.shape, 5)
        for number, part in enumerate(batch.unstack(logits, 1)):
            assert part.shape == (rows[number].length, 5)
            own = batch.fill([torch.arange(row.length) + 1 for row in rows])[number] > 0
            assert torch.equal(part, logits[number, own])
        ids = batch.unstack(batch.ids)
        assert all(torch.equal(one, row.ids) for one, row in zip(ids, rows, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_turns_as_its_rows_do(name: str) -> None:
    fam = fam_of(name)
    rows = rows_of(name)
    batch = stack_rows(rows, side="left", pad_to_multiple=4)
    turned = fam.rotation(batch.ids)
    for number, row in enumerate(rows):
        alone = fam.rotation(row.ids)
        assert_close_to(turned.cos[number, 0, -row.length :], alone.cos, kind="exact")
        assert_close_to(turned.sin[number, 0, -row.length :], alone.sin, kind="exact")


def test_a_batch_is_sharded_along_the_sequence() -> None:
    """Ids, text and masks of all rows by one map."""
    batch = stack_rows(rows_of("qwen2_vl"), pad_to_multiple=6)
    shards = context_shards(batch.shape[1], 3)
    assert torch.equal(shards.join(shards.split(batch.four_rows)), batch.four_rows)
    masks = [shards.mask(rank, batch.documents) for rank in range(3)]
    assert torch.equal(shards.join(masks, -2), batch.mask())


def test_to_moves_every_tensor() -> None:
    batch = stack_rows(rows_of("qwen2_vl"))
    moved = batch.to("meta")
    held = [getattr(moved, field.name) for field in fields(moved)]
    assert {one.device.type for one in held if isinstance(one, Tensor)} == {"meta"}
    assert moved.side == batch.side


def test_error_names_what_is_wrong() -> None:
    rows = rows_of("qwen2_vl")
    lengths = [row.length for row in rows]
    batch = stack_rows(rows)
    untyped = pack_rows([place("qwen2_vl", "vendor", [3])])
    other = rows_of("hunyuan_vl")
    cases: list[tuple[Any, str]] = [
        (lambda: stack_rows([]), "rows is empty"),
        (lambda: stack_rows([rows[0], other[0]]), r"rows\[1\] and rows\[0\] have axes 4 and 3"),
        (lambda: stack_rows([rows[0], untyped]), "types given False and True"),
        (lambda: stack_rows(rows, length=max(lengths) - 1), f"has {max(lengths)} places"),
        (lambda: stack_rows(rows, length=max(lengths) + 1, pad_to_multiple=1000), "multiple of 1000"),
        (lambda: stack_rows(rows, pad_to_multiple=0), "pad_to_multiple is 0"),
        (lambda: stack_rows(rows, side="top"), "side is 'top'"),  # type: ignore[arg-type]
        (lambda: stack_rows(rows, labels=[torch.zeros(3)]), r"parts have shapes \[\(3,\)\] and the rows"),
        (lambda: stack_rows(rows, labels=[torch.zeros(2, n) for n in lengths]), r"labels\[0\] has shape \(2, \d+\)"),
        (lambda: stack_rows([1]), "rows is"),  # type: ignore[list-item]
        (lambda: batch.fill([torch.zeros(n, dtype=torch.uint8) for n in lengths], -100), "value is -100.*uint8"),
        (lambda: batch.fill([torch.zeros(k, n) for k, n in enumerate(lengths)]), r"parts\[1\] has shape"),
        (lambda: batch.unstack(torch.zeros(3, 5)), r"x has shape \(3, 5\) and dim is -1"),
        (lambda: batch.unstack(torch.zeros(batch.shape[1])), "entries are required along"),
        (lambda: batch.unstack(batch.ids, 3), "dim is 3"),
    ]  # fmt: skip
    for call, words in cases:
        with pytest.raises(PositionError, match=words):
            call()
