"""Ids behind a cache: chunks, decoded tokens, speculative windows and resumed turns, rows at unequal places."""

from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.strategies import seeds
from tests.vlm.conversations import NAMES, fam_of, prompts, stream_of
from tests.vlm.prompts import draw
from tests.vlm.rows import clip, image, place, tensors
from visionpos.errors import PositionError
from visionpos.vlm import (
    Image,
    PositionIds,
    Rule,
    Text,
    family,
    ids_after,
    ids_by_delta,
    ids_from_tokens,
    merge_rows,
    next_ids,
    rolled_back,
    split_rows,
)

G2 = [3, image(4, 4), 3]
SIDES = ["left", "right"]


def rule_of(name: str) -> Rule:
    rule = fam_of(name).spec.rule
    assert rule is not None
    return rule


def grown(pos: PositionIds, tokens: int) -> list[list[float]]:
    """Ids of a prompt and so many text tokens behind it, token by token: `[tokens of both][axes]`."""
    line = pos.ids.T.tolist()
    return line + [[int(pos.next_position) + at] * len(pos.ids) for at in range(tokens)]


@pytest.mark.parametrize("side", SIDES)
@settings(max_examples=50)
@given(
    st.sampled_from(NAMES),
    st.lists(prompts(), min_size=1, max_size=3),
    seeds(),
    st.integers(0, 6),
    st.integers(0, 3),
)
def test_reference_every_row_goes_on_where_its_cache_ends(
    side: Any,
    name: str,
    chosen: list[tuple[tuple[str, int], ...]],
    seed: int,
    tokens: int,
    more: int,
) -> None:
    """Each row by itself, at its own place, in the prompt or behind it, however the batch is padded."""
    fam = fam_of(name)
    rows = [fam.position_ids(stream_of(name, parts)) for parts in chosen]
    lengths = torch.tensor([row.ids.shape[-1] for row in rows])
    draws = torch.Generator().manual_seed(seed)
    cached = (torch.rand(len(rows), generator=draws) * (lengths + 9)).long()
    batch = merge_rows(rows, rule_of(name), side=side, length=int(lengths.max()) + more)
    got = ids_after(batch, cached, tokens)
    assert got.shape == (len(batch.ids), len(rows), tokens)
    for number, (row, start) in enumerate(zip(rows, cached.tolist(), strict=True)):
        wanted = grown(row, start + tokens)[start : start + tokens]
        assert got[:, number].T.tolist() == wanted
        assert ids_after(row, start, tokens).T.tolist() == wanted


@pytest.mark.parametrize("dialect", ["vendor", "transformers"])
@pytest.mark.parametrize("side", SIDES)
@given(seeds(), st.integers(1, 4), st.integers(0, 3))
def test_parity_both_conventions_of_delta_go_on_alike(
    side: Any, dialect: str, seed: int, tokens: int, generated: int
) -> None:
    """Mask length + delta, and padded length + delta, are the ids behind the cache (mrope.md 2, -2/0 and -2/-7)."""
    batch = draw(seed)
    fam = family("qwen2_vl", dialect=dialect, overlay={"rule": {"next": "max"}})
    rule = fam.spec.rule
    assert rule is not None
    grids = batch.grids("images"), batch.grids("videos")
    rows = split_rows(
        fam.position_ids_from_tokens(batch.input_ids, batch.types, *grids, batch.mask), rule
    )
    both = merge_rows(rows, rule, side=side, length=batch.types.shape[1] + 2)
    assert both.mask is not None
    real = both.mask.sum(-1)
    counted = real if rule.delta.minus == "unmasked" else torch.tensor(both.ids.shape[-1])
    by_delta = ids_by_delta(both.delta, counted + generated, tokens, 3)
    assert torch.equal(ids_after(both, real + generated, tokens), by_delta)
    padded = both.ids.shape[-1] + generated
    assert torch.equal(ids_after(both, padded, tokens, counted="padded"), by_delta)


def test_golden_padded_rows_of_both_versions() -> None:
    """facts/mrope.md G11: G2 and t3, padded to 10 on the left: deltas -2, 0 and -2, -7; both decode at 8 and 3."""
    for dialect, deltas, counted in (("transformers", [-2, 0], [10, 3]), ("vendor", [-2, -7], [10, 10])):  # fmt: skip
        fam = family("qwen2_vl", dialect=dialect)
        types = torch.stack([tensors(G2)["modality"], torch.zeros(10, dtype=torch.int64)])
        mask = torch.tensor([[1] * 10, [0] * 7 + [1] * 3])
        pos = fam.position_ids_from_tokens(types, types, [[1, 4, 4]], None, mask)
        assert pos.delta.tolist() == deltas
        wanted = [[[8, 9, 10], [3, 4, 5]]] * 3
        assert ids_by_delta(pos.delta, torch.tensor(counted), 3, 3).tolist() == wanted
        assert ids_after(pos, torch.tensor([10, 3]), 3).tolist() == wanted
        assert ids_after(pos, 10, 3, counted="padded").tolist() == wanted
        assert next_ids(pos, 3).tolist() == wanted


def test_golden_chunks_of_rows_at_unequal_places() -> None:
    """mlx-vlm#1741 and ik_llama.cpp#988: each row is cut at its own offset, and never across axes."""
    fam = family("qwen2_vl")
    rule = fam.spec.rule
    assert rule is not None
    batch = merge_rows(
        [place("qwen2_vl", "vendor", G2), place("qwen2_vl", "vendor", [4])], rule, side="left"
    )
    got = ids_after(batch, torch.tensor([5, 2]), 3)
    assert got[:, 0].tolist() == [[3, 3, 5], [4, 4, 5], [3, 4, 5]]
    assert got[:, 1].tolist() == [[2, 3, 4]] * 3


@given(seeds(), st.integers(1, 9), st.sampled_from(SIDES))
def test_invariant_chunks_of_a_batch_make_the_whole(seed: int, size: int, side: Any) -> None:
    rule = rule_of("qwen3_vl")
    batch = draw(seed, per_frame=True)
    fam = family("qwen3_vl")
    grids = batch.grids("images"), batch.grids("videos")
    pos = fam.position_ids_from_tokens(batch.input_ids, batch.types, *grids, batch.mask)
    pos = merge_rows(split_rows(pos, rule), rule, side=side)
    for counted in ("unmasked", "padded"):
        length = pos.ids.shape[-1]
        parts = [
            ids_after(pos, start, min(size, length - start), counted=counted)
            for start in range(0, length, size)
        ]
        whole = torch.cat(parts, -1)
        if counted == "padded":
            assert torch.equal(whole, pos.ids)
            continue
        for number, row in enumerate(split_rows(pos, rule)):
            assert torch.equal(whole[:, number, : row.ids.shape[-1]], row.ids)


def test_resumed_turn_of_a_batch_with_new_images() -> None:
    """Only what is new is asked for; each row has cached another first turn."""
    fam = family("qwen2_5_vl")
    rule = fam.spec.rule
    assert rule is not None
    firsts: list[Any] = [[Text(tokens=4), Image((84, 56))], [Text(tokens=9)]]
    second: list[Any] = [Text(tokens=2), Image((56, 84)), Text(tokens=3)]
    ones = [fam.position_ids(fam.stream(first)) for first in firsts]
    whole = [fam.position_ids(fam.stream([*first, *second])) for first in firsts]
    cached = torch.tensor([one.ids.shape[-1] for one in ones])
    got = ids_after(merge_rows(whole, rule, side="left"), cached, 13)
    for number, (one, both) in enumerate(zip(ones, whole, strict=True)):
        assert torch.equal(got[:, number], both.ids[:, one.ids.shape[-1] :])
        start = int(one.next_position)
        alone = fam.position_ids(fam.stream(second)).ids
        assert torch.equal(got[:, number], alone + start)


def test_rows_that_accepted_unequal_windows() -> None:
    """omlx#2363: windows of 3 behind G2 and t4, of which 1 and 3 tokens were right; rolling back is counting less."""
    rule = rule_of("qwen2_vl")
    batch = merge_rows(
        [place("qwen2_vl", "vendor", G2), place("qwen2_vl", "vendor", [4])], rule, side="left"
    )
    assert next_ids(batch, 3).tolist() == [[[8, 9, 10], [4, 5, 6]]] * 3
    kept = torch.tensor([1, 3])
    assert next_ids(batch, 3, skip=kept).tolist() == [[[9, 10, 11], [7, 8, 9]]] * 3
    assert torch.equal(
        ids_after(batch, torch.tensor([10, 4]) + kept, 3), next_ids(batch, 3, skip=kept)
    )


def test_text_row_keeps_no_delta_of_another() -> None:
    """users F19 and transformers#36009: a text row beside an image row, and after it, counts 0 to 9."""
    rule = rule_of("qwen2_vl")
    rows = [place("qwen2_vl", "vendor", G2), place("qwen2_vl", "vendor", [10])]
    for order in (rows, rows[::-1]):
        batch = merge_rows(order, rule)
        for row, one in zip(split_rows(batch, rule), order, strict=True):
            assert torch.equal(row.delta, one.delta)
    assert rows[1].ids.tolist() == [list(range(10))] * 3
    assert int(rows[1].delta) == 0


# --- rollback


@settings(max_examples=60)
@given(st.sampled_from(NAMES), prompts(), st.floats(0, 1))
def test_reference_rollback_is_the_shorter_prompt(
    name: str, parts: tuple[tuple[str, int], ...], share: float
) -> None:
    """Dropped text and whole images leave the ids and the next position of the prompt without them."""
    fam, stream = fam_of(name), stream_of(name, parts)
    pos = fam.position_ids(stream)
    last = stream.spans[-1]
    if last.kind == "text":
        tokens = round(share * (last.stop - last.start))
        back = rolled_back(pos, tokens, stream.modality)
        assert int(back.next_position) == int(pos.next_position) - tokens
    for whole in range(1, len(parts)):  # segments
        shorter = fam.position_ids(stream_of(name, parts[:whole]))
        dropped = stream.length - shorter.ids.shape[-1]
        back = rolled_back(pos, dropped, stream.modality)
        assert torch.equal(back.ids, shorter.ids)
        assert torch.equal(back.next_position, shorter.next_position)
        again = rolled_back(pos, dropped)
        assert torch.equal(again.next_position, shorter.next_position)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl", "hunyuan_vl", "internvl_v2pe"])
def test_rollback_refuses_every_cut_inside_an_image(name: str) -> None:
    """users F16: also where a cell happens to stand at one position on all axes."""
    stream = stream_of(name, (("text", 7), ("image", 0)))
    pos = fam_of(name).position_ids(stream)
    cells = stream.modality.nonzero().flatten().tolist()
    for cell in cells[1:]:
        if cell - 1 in cells:
            with pytest.raises(PositionError, match="inside an image"):
                rolled_back(pos, stream.length - cell)
            with pytest.raises(PositionError, match="inside an image"):
                rolled_back(pos, stream.length - cell, stream.modality)


def test_rollback_refuses_a_diagonal_cell_of_a_clip() -> None:
    """Cell (1, 1, 1) of a clip stands at s + 1 on every axis, and is no text."""
    pos = place("qwen2_vl", "vendor", [3, clip(3, 4, 4), 2])
    assert pos.ids[:, 10].tolist() == [4, 4, 4]
    with pytest.raises(PositionError, match=r"token 10 stands at \[4, 4, 4\], inside an image"):
        rolled_back(pos, pos.ids.shape[-1] - 10)


def test_rollback_to_an_image_that_counts_in_fractions() -> None:
    """Text behind cells at 1/4 and 1/2 stands at 2, one behind the next whole number; so it does when it is dropped."""
    rule = Rule(axes=("index",), cell_step=Fraction(1, 4), next="ceil_max")
    types = torch.tensor([0, 1, 1, 0, 0])
    pos = ids_from_tokens(types, types, [[1, 1, 2]], rule=rule)
    assert pos.ids.tolist() == [[0, 0.25, 0.5, 2, 3]]
    assert int(rolled_back(pos, 2).next_position) == 2
    with pytest.raises(PositionError, match="inside an image"):
        rolled_back(pos, 3)


def test_rollback_with_types_sees_what_ids_do_not() -> None:
    """One axis in whole steps counts through an image as through text."""
    stream = stream_of("internvl", (("text", 7), ("image", 0)))
    pos = fam_of("internvl").position_ids(stream)
    assert int(rolled_back(pos, 5).next_position) == stream.length - 5
    with pytest.raises(PositionError, match="inside an image"):
        rolled_back(pos, 5, stream.modality)
    with pytest.raises(PositionError, match=r"modality has shape \(3,\)"):
        rolled_back(pos, 5, stream.modality[:3])


# --- shape, device, refusals


def test_shape_edges() -> None:
    fam = family("qwen2_vl")
    empty = fam.position_ids(fam.stream([]))
    assert ids_after(empty, 0, 2).tolist() == [[0, 1]] * 3
    pos = place("qwen2_vl", "vendor", G2)
    assert ids_after(pos, 4, 0).shape == (3, 0)
    assert ids_after(pos, 0, 10).tolist() == pos.ids.tolist()
    no_mask = PositionIds(pos.ids[:, None], pos.next_position[None], pos.delta[None])
    assert ids_after(no_mask, 9, 2).tolist() == [[[7, 8]]] * 3
    fractional = fam_of("internvl_v2pe").position_ids(stream_of("internvl_v2pe", (("image", 0),)))
    assert ids_after(fractional, fractional.ids.shape[-1] - 1, 2).dtype == torch.float64


def test_device(device: torch.device) -> None:
    pos = place("qwen2_vl", "vendor", G2)
    held = (pos.ids[:, None], pos.next_position[None], pos.delta[None], torch.ones(1, 10).bool())
    there = PositionIds(*(one.to(device) for one in held))
    cached: Tensor = torch.tensor([8], device=device)
    got = ids_after(there, cached, 4)
    assert got.device.type == device.type
    assert got.tolist() == [[[6, 7, 8, 9]]] * 3
    assert next_ids(there, 2, skip=cached).tolist() == [[[16, 17]]] * 3


def test_error_names_what_is_wrong() -> None:
    pos = place("qwen2_vl", "vendor", G2)
    batch = merge_rows([pos, pos], rule_of("qwen2_vl"))
    cases: list[tuple[Any, str]] = [
        (lambda: ids_after(pos, -1, 2), "cached is -1"),
        (lambda: ids_after(pos, 1, -2), "tokens is -2"),
        (lambda: ids_after(batch, torch.tensor([1, 2, 3]), 2), r"cached is torch.int64 of shape \(3,\)"),
        (lambda: ids_after(batch, torch.tensor([1.0, 2.0]), 2), "cached is torch.float32"),
        (lambda: ids_after(pos, torch.tensor([1]), 2), r"shape \(1,\) for ids \(3, 10\)"),
        (lambda: ids_after(pos, 1, 2, counted="cached"), "counted is 'cached'"),
        (lambda: next_ids(batch, 2, skip=torch.tensor([1, -1])), r"skip is \[1, -1\]"),
        (lambda: next_ids(batch, 2, skip=torch.tensor([[1, 1]])), r"skip .* shape \(1, 2\)"),
    ]  # fmt: skip
    for call, words in cases:
        with pytest.raises(PositionError, match=words):
            call()
