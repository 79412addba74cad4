"""Decoding and batches: next tokens, chunks, rollback, resumed turns, padding on either side, packing."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import seeds
from tests.vlm.prompts import draw
from tests.vlm.rows import clip, image, place
from visionpos.errors import PositionError
from visionpos.vlm import Image, PositionIds, Rule, Text, Video, family
from visionpos.vlm.batches import merge_rows, split_rows
from visionpos.vlm.decoding import (
    chunk,
    continued,
    ids_by_delta,
    next_ids,
    pending_ids,
    rolled_back,
)
from visionpos.vlm.prompt_rows import pack_rows

FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "videorope", "hy_v4_vl"]
G2 = [3, image(4, 4), 3]


def rule_of(name: str, dialect: str = "vendor") -> Rule:
    rule = family(name, dialect=dialect).spec.rule
    assert rule is not None
    return rule


def rows_of(seed: int, name: str, dialect: str = "vendor") -> list[PositionIds]:
    """The rows of a random batch, each on its own."""
    batch = draw(seed, per_frame=name == "qwen3_vl", column=int(name == "hy_v4_vl"))
    fam = family(name, dialect=dialect)
    got = fam.position_ids_from_tokens(
        batch.input_ids, batch.types, batch.grids("images"), batch.grids("videos"), batch.mask,
        [float(step) for step in batch.seconds],
    )  # fmt: skip
    return split_rows(got, rule_of(name, dialect))


def test_golden_decode_after_g2() -> None:
    """8, 9, 10 on every axis (omlx#2363); two generated tokens extend a retracted request to 8 and 9 (sglang)."""
    pos = place("qwen2_vl", "vendor", G2)
    assert next_ids(pos, 3).tolist() == [[8, 9, 10]] * 3
    assert next_ids(pos, 1, skip=2).tolist() == [[10]] * 3
    longer = continued(pos, 2)
    assert longer.ids[:, -2:].tolist() == [[8, 9]] * 3
    assert int(longer.next_position) == 10
    assert int(longer.delta) == -2


def test_golden_decode_after_a_prompt_that_ends_on_an_image() -> None:
    """facts/mrope.md 0.10: t2 + (1, 6, 4) decodes at 5, 5, 5 and 6, 6, 6; the reference goes on at 3, 5, 4."""
    pos = place("qwen2_vl", "vendor", [2, image(12, 8)])
    assert pos.ids[:, -1].tolist() == [2, 7, 5]
    assert next_ids(pos, 2).tolist() == [[8, 9]] * 3
    pos = place("qwen2_vl", "vendor", [2, image(6, 4)])
    assert next_ids(pos, 2).tolist() == [[5, 6]] * 3


def test_golden_chunks_are_cut_by_token() -> None:
    """Tokens 5 to 7 of G2: T 3 3 5, H 4 4 5, W 3 4 5 (mlx-vlm#1741)."""
    pos = place("qwen2_vl", "vendor", G2)
    assert chunk(pos, 5, 8).tolist() == [[3, 3, 5], [4, 4, 5], [3, 4, 5]]
    assert chunk(pos, 8).shape == (3, 2)
    with pytest.raises(PositionError, match=r"start is 5 and stop 11 of 10 tokens"):
        chunk(pos, 5, 11)


@given(seeds(), st.integers(1, 9), st.sampled_from(FAMILIES))
def test_invariant_chunks_make_the_whole(seed: int, size: int, name: str) -> None:
    for pos in rows_of(seed, name):
        length = pos.ids.shape[-1]
        parts = [chunk(pos, at, min(at + size, length)) for at in range(0, length, size)]
        assert torch.equal(torch.cat(parts, -1), pos.ids)


@given(seeds(), st.integers(0, 5), st.integers(0, 5), st.sampled_from(FAMILIES))
def test_invariant_decode_after_prefix_is_one_pass(
    seed: int, tokens: int, dropped: int, name: str
) -> None:
    """A prompt with so much text behind it has the ids of the prompt and of its continuation; rollback undoes it."""
    batch = draw(seed, per_frame=name == "qwen3_vl", column=int(name == "hy_v4_vl"), rows=(1, 1))
    fam = family(name)
    seconds = [float(step) for step in batch.seconds]
    real = batch.mask[0].bool()
    types = batch.types[0][real]
    grids = batch.grids("images"), batch.grids("videos")
    pos = fam.position_ids_from_tokens(types, types, *grids, None, seconds)
    long = torch.cat([types, types.new_zeros(tokens)])
    whole = fam.position_ids_from_tokens(long, long, *grids, None, seconds)
    longer = continued(pos, tokens)
    assert torch.equal(longer.ids, whole.ids)
    assert torch.equal(longer.next_position, whole.next_position)
    back = rolled_back(longer, min(dropped, tokens))
    assert int(back.next_position) == int(longer.next_position) - min(dropped, tokens)
    assert torch.equal(back.ids, whole.ids[:, : len(long) - min(dropped, tokens)])


def test_rollback_refuses_to_cut_an_image() -> None:
    """users F16: position(n tokens) is not n; only text is dropped."""
    pos = place("qwen2_vl", "vendor", G2)
    assert int(rolled_back(pos, 3).next_position) == 5
    with pytest.raises(PositionError, match=r"token 6 stands at \[3, 4, 4\]|inside an image"):
        rolled_back(pos, 4)
    with pytest.raises(PositionError, match=r"tokens is 11"):
        rolled_back(pos, 11)
    batch = merge_rows([pos, pos], rule_of("qwen2_vl"))
    with pytest.raises(PositionError, match=r"one row"):
        rolled_back(batch, 1)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl", "hunyuan_vl", "hy_v4_vl", "glm_image"])
def test_rollback_of_an_image_has_the_delta_of_the_shorter_prompt(name: str) -> None:
    """G2 and G3: -2 after one image; without it, what follows stands at its own token count, as text alone does."""
    fam = family(name)
    grid = (4, 6) if name == "glm_image" else (8, 12)
    merge = fam.spec.grid.merge
    cells = (grid[0] // merge) * (grid[1] // merge + int(name in ("hunyuan_vl", "hy_v4_vl")))
    cells += 2 * rule_of(name, "vendor").edge_cells
    types = torch.tensor([0] * 3 + [1] * cells + [0] * 2 + [1] * cells + [0] * 4)
    grids = [(1, *grid)] * 2
    pos = fam.position_ids_from_tokens(types, types, grids)
    for kept, images in ((len(types) - 2, 2), (3 + cells + 2, 1), (3 + cells, 1), (3, 0), (2, 0)):
        back = rolled_back(pos, len(types) - kept, types)
        alone = fam.position_ids_from_tokens(types[:kept], types[:kept], grids[:images])
        assert torch.equal(back.ids, alone.ids)
        assert torch.equal(back.next_position, alone.next_position)
        assert torch.equal(back.delta, alone.delta)


def test_rollback_of_text_behind_padding_keeps_the_delta() -> None:
    """Both conventions of the book-keeping: tokens without padding, and places of the padded row."""
    types = torch.tensor([[0] * 4 + [0, 1, 1, 1, 1, 0, 0]])
    mask = torch.tensor([[0] * 4 + [1] * 7])
    for dialect in ("vendor", "transformers"):
        fam = family("qwen2_vl", dialect=dialect)
        pos = fam.position_ids_from_tokens(types, types, [(1, 4, 4)], None, mask).row(0)
        assert torch.equal(rolled_back(pos, 2, types[0]).delta, pos.delta)
        empty = fam.position_ids_from_tokens(types[:, :5], types[:, :5], None, None, mask[:, :5])
        assert int(rolled_back(pos, 6, types[0]).delta) == int(empty.delta)


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_error_rollback_of_padding(tokens: int) -> None:
    """Padding stands at pad_id, which is no place to go on from."""
    types = torch.tensor([[0, 0, 1, 1, 1, 1, 0, 0, 0, 0]])
    mask = torch.tensor([[1] * 8 + [0] * 2])
    pos = family("qwen2_vl").position_ids_from_tokens(types, types, [(1, 4, 4)], None, mask)
    for kinds in (None, types[0]):
        with pytest.raises(PositionError, match=rf"tokens is {tokens} and the row has padding"):
            rolled_back(pos.row(0), tokens, kinds)
    (row,) = split_rows(pos, rule_of("qwen2_vl"))
    assert int(rolled_back(row, 1).next_position) == 5


def test_continued_from_nothing() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    pos = family("qwen2_vl").position_ids_from_tokens(none, none, attention_mask=none)
    assert continued(pos, 2).ids.tolist() == [[0, 1]] * 3


def test_resumed_turn_with_a_new_image() -> None:
    """Ids of the first turn do not change; those of the second are the rest of the whole conversation."""
    fam = family("qwen2_5_vl")
    clip_ = Video((112, 112), seconds=[0.0, 4.0, 8.0, 12.0])
    first = [Text(tokens=4), clip_, Text(tokens=3)]
    one = fam.position_ids(fam.stream(first))
    both = fam.position_ids(fam.stream([*first, Text(tokens=5), Image((56, 84)), Text(tokens=2)]))
    length = one.ids.shape[-1]
    assert torch.equal(chunk(both, 0, length), one.ids)
    assert torch.equal(chunk(both, length, length + 5), next_ids(one, 5))


@pytest.mark.parametrize("dialect", ["vendor", "transformers"])
@pytest.mark.parametrize("side", ["left", "right"])
@given(seeds(), st.integers(0, 3), st.sampled_from(["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]))
def test_invariant_merge_and_split(
    side: Any, dialect: str, seed: int, more: int, name: str
) -> None:
    """Rows merged equal the padded batch computed at once, delta in the rule's own convention; split is the inverse."""
    rule = rule_of(name, dialect)
    rows = rows_of(seed, name, dialect)
    longest = max(row.ids.shape[-1] for row in rows)
    batch = merge_rows(rows, rule, side=side, length=longest + more)
    assert batch.mask is not None
    assert batch.mask.shape == (len(rows), longest + more)
    for row, back in zip(rows, split_rows(batch, rule), strict=True):
        assert torch.equal(row.ids, back.ids)
        assert torch.equal(row.delta, back.delta)
    assert batch.ids[:, ~batch.mask].eq(rule.pad_id).all()
    counted = (
        torch.full((len(rows),), longest + more)
        if rule.delta.minus == "padded"
        else batch.mask.sum(-1)
    )
    if rule.next == "max":
        assert torch.equal(
            ids_by_delta(batch.delta, counted, 2, 3), next_ids(batch, 2)
        )  # a cache of either convention goes on where one pass does


def test_padded_batch_at_once_equals_rows_merged() -> None:
    for seed in range(40):
        for dialect in ("vendor", "transformers"):
            batch = draw(seed)
            fam = family("qwen2_vl", dialect=dialect)
            got = fam.position_ids_from_tokens(
                batch.input_ids,
                batch.types,
                batch.grids("images"),
                batch.grids("videos"),
                batch.mask,
            )
            rule = rule_of("qwen2_vl", dialect)
            left = bool(batch.mask[:, -1].all())
            again = merge_rows(
                split_rows(got, rule),
                rule,
                side="left" if left else "right",
                length=got.ids.shape[-1],
            )
            assert torch.equal(again.ids, got.ids)
            assert torch.equal(again.delta, got.delta)
            assert torch.equal(again.mask, got.mask)


def test_transformers_extent_rule_has_two_continuations() -> None:
    """facts/mrope.md 0.1: after a long clip `next` and `count + delta` differ in that dialect, as they do there."""
    pos = place("qwen2_5_vl", "transformers", [2, clip(24, 8, 8), 2], 1.0)
    by_delta = int(ids_by_delta(pos.delta[None], pos.ids.shape[-1], 1, 3)[0, 0, 0])
    assert int(pos.next_position) == 2 + 4 + 2
    assert by_delta == 2 + 23 * 2 + 1
    vendor = place("qwen2_5_vl", "vendor", [2, clip(24, 8, 8), 2], 1.0)
    assert int(ids_by_delta(vendor.delta[None], vendor.ids.shape[-1], 1, 3)[0, 0, 0]) == int(
        vendor.next_position
    )


def test_packing_restarts_with_every_prompt() -> None:
    """users F09: four rows, row 0 restarting per prompt; cu_seqlens from the tokens, never from T (19 of facts 13)."""
    rows = [place("qwen2_vl", "vendor", parts) for parts in (G2, [4], [1, image(4, 6), 2])]
    row = pack_rows(rows)
    assert row.cu_seqlens.tolist() == [0, 10, 14, 23]
    assert row.max_seqlen == 10
    assert row.text.tolist() == [*range(10), *range(4), *range(9)]
    assert row.four_rows.shape == (4, 1, 23)
    assert torch.equal(row.four_rows[0, 0], row.text)
    assert row.documents.tolist() == [0] * 10 + [1] * 4 + [2] * 9
    for one, back in zip(rows, row.unpacked(), strict=True):
        assert torch.equal(one.ids, back)


def test_golden_images_to_generate() -> None:
    """G20: pending grid (2, 2) decodes at T 9 9 9 9 then 11."""
    fam = family("glm_image")
    types = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0, 0])
    pos = fam.position_ids_from_tokens(types, types, [[1, 2, 3]])
    got = pending_ids(pos, [(2, 2)], rule_of("glm_image"))
    assert got.tolist() == [[9, 9, 9, 9, 11], [9, 9, 10, 10, 11], [9, 10, 9, 10, 11]]
    with pytest.raises(PositionError, match=r"time, row, col and one row"):
        pending_ids(pos, [(2, 2)], Rule(axes=("index",)))


def test_error_names_what_is_wrong() -> None:
    rule, pos = rule_of("qwen2_vl"), place("qwen2_vl", "vendor", [3])
    with pytest.raises(PositionError, match=r"rows holds 0 items"):
        merge_rows([], rule)
    with pytest.raises(PositionError, match=r"length is 2 and the longest row has 3"):
        merge_rows([pos], rule, length=2)
    right = merge_rows([pos, place("qwen2_vl", "vendor", [5])], rule)
    with pytest.raises(PositionError, match=r"padding on the right"):
        continued(right, 1)
    with pytest.raises(PositionError, match=r"padded already"):
        merge_rows([right.row(0)], rule)
    with pytest.raises(PositionError, match=r"tokens is -1"):
        next_ids(pos, -1)
    with pytest.raises(PositionError, match=r"\[axes, n\] each"):
        pack_rows([right])


def test_error_merge_rows_of_other_axes() -> None:
    """Rows of two families are no batch; torch's stack would say so in its own words."""
    from visionpos.vlm import Text, family, merge_rows

    rows = [
        family(name).position_ids(family(name).stream([Text(tokens=3)]))
        for name in ("qwen2_vl", "hunyuan_vl")
    ]
    rule = family("qwen2_vl").spec.rule
    with pytest.raises(PositionError, match=r"rows have \[3, 4\] axes"):
        merge_rows(rows, rule)  # type: ignore[arg-type]


def test_error_a_frame_rate_beyond_sense() -> None:
    from visionpos.vlm import family

    for fps in (0.0, -1.0, float("nan"), float("inf"), 1e-6):
        with pytest.raises(PositionError, match="a frame a day or more"):
            family("qwen2_vl").frame_count(100, fps)
