"""Context-parallel shards: one map for every tensor of a row, along the sequence, and its inverse."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tolerances import assert_close_to
from tests.vlm.conversations import NAMES, fam_of, stream_of
from tests.vlm.rows import place
from visionpos.errors import PositionError
from visionpos.vlm import context_shards, pack, pack_rows
from visionpos.vlm.shards import Order

ORDERS: tuple[Order, ...] = ("zigzag", "contiguous")
PROMPTS = [(("text", 7), ("image", 0)), (("text", 1),), (("image", 2), ("clip", 4))]


def slow_places(length: int, ranks: int, order: str) -> list[list[int]]:
    """Cut the row as the picture of it is drawn: card for card."""
    pieces = ranks if order == "contiguous" else 2 * ranks
    size = length // pieces
    held: list[list[int]] = [[] for _ in range(ranks)]
    for place_ in range(length):
        piece = place_ // size
        held[min(piece, pieces - 1 - piece) if order == "zigzag" else piece].append(place_)
    return held


def test_golden_sixteen_tokens_on_two_ranks() -> None:
    """users F12."""
    zigzag = [[0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 8, 9, 10, 11]]
    assert context_shards(16, 2).places.tolist() == zigzag
    contiguous = [list(range(8)), list(range(8, 16))]
    assert context_shards(16, 2, order="contiguous").places.tolist() == contiguous


@given(st.integers(1, 5), st.integers(1, 7), st.sampled_from(ORDERS))
def test_reference_places(size: int, ranks: int, order: Order) -> None:
    length = size * 2 * ranks
    assert context_shards(length, ranks, order=order).places.tolist() == slow_places(
        length, ranks, order
    )


@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=4), st.integers(1, 4), st.sampled_from(ORDERS)
)
def test_reference_places_by_document(sizes: list[int], ranks: int, order: Order) -> None:
    """Every document is dealt out as if it were alone, one behind the other."""
    lengths = [size * 2 * ranks for size in sizes]
    row = pack_rows([place("qwen2_vl", "vendor", [length]) for length in lengths])
    got = row.shards(ranks, order=order, per_document=True)
    wanted: list[list[int]] = [[] for _ in range(ranks)]
    first = 0
    for length in lengths:
        for mine, places in zip(wanted, slow_places(length, ranks, order), strict=True):
            mine += [first + one for one in places]
        first += length
    assert got.places.tolist() == wanted


@given(st.integers(1, 4), st.integers(1, 5), st.sampled_from(ORDERS), st.sampled_from([-1, 0, 1]))
def test_invariant_join_undoes_split(size: int, ranks: int, order: Order, dim: int) -> None:
    shards = context_shards(size * 2 * ranks, ranks, order=order)
    shape = [2, 3]
    shape.insert(dim if dim >= 0 else 2, shards.length)
    x = torch.randn(shape)
    parts = shards.split(x, dim)
    assert len(parts) == shards.ranks == ranks
    assert torch.equal(shards.join(parts, dim), x)
    assert torch.equal(torch.cat(parts, dim).index_select(dim, shards.inverse), x)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("per_document", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_invariant_a_shard_turns_as_the_whole_does(
    name: str, per_document: bool, order: Order, ranks: int
) -> None:
    """Ids of every layout are cut along the sequence, never along their axes (ms-swift#8468, Megatron-LM PR 1612)."""
    fam = fam_of(name)
    streams = [stream_of(name, parts) for parts in PROMPTS]
    row = pack(streams, family=fam, pad_each_to=2 * ranks)
    shards = row.shards(ranks, order=order, per_document=per_document)
    whole = fam.rotation(row.ids)
    for ids in (row.ids, row.four_rows, row.three_rows):
        parts = shards.split(ids)
        assert {part.shape[:-1] for part in parts} == {ids.shape[:-1]}
        assert torch.equal(shards.join(parts), ids)
    for rank in range(ranks):
        own = fam.rotation(shards.take(row.ids, rank))
        assert_close_to(own.cos, shards.take(whole.cos, rank, -2), kind="exact")
        assert_close_to(own.sin, shards.take(whole.sin, rank, -2), kind="exact")


def test_zigzag_shares_causal_work_evenly() -> None:
    """Keys that all queries of a rank see: alike in zigzag order, unlike in contiguous order."""
    mask = pack_rows([place("qwen2_vl", "vendor", [48])]).mask()[0, 0]
    work = {
        order: [int(mask[places].sum()) for places in context_shards(48, 4, order=order).places]
        for order in ORDERS
    }
    assert len(set(work["zigzag"])) == 1
    assert len(set(work["contiguous"])) == 4


def test_gradient_comes_home() -> None:
    shards = context_shards(8, 2)
    x = torch.randn(2, 8, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda one: shards.split(one, 1), x)
    parts = tuple(part.detach().requires_grad_() for part in shards.split(x, 1))
    assert torch.autograd.gradcheck(lambda *held: shards.join(held, 1), parts)


def test_error_names_what_is_wrong() -> None:
    shards = context_shards(8, 2)
    row = pack_rows([place("qwen2_vl", "vendor", [length]) for length in (8, 6, 2)])
    cases: list[tuple[Any, str]] = [
        (lambda: context_shards(18, 2), "length is 18 .* multiple of 4 .* pad_to_multiple=4"),
        (lambda: context_shards(9, 2, order="contiguous"), "multiple of 2"),
        (lambda: row.shards(2, per_document=True), "document 1 has 6 .* pad_each_to=4"),
        (lambda: context_shards(0, 2), "length is 0"),
        (lambda: context_shards(8, 0), "ranks is 0"),
        (lambda: context_shards(8, 2, order="ring"), "order is 'ring'"),
        (lambda: context_shards(8, 2, cu_seqlens=torch.tensor([0, 4])), r"cu_seqlens is \[0, 4\]"),
        (lambda: shards.take(torch.zeros(8), 2), "rank is 2 of 2"),
        (lambda: shards.take(torch.zeros(3, 1, 8), 0, 0), r"shape \(3, 1, 8\) and dim is 0; 8"),
        (lambda: shards.take(torch.zeros(8), 0, 1), "dim is 1"),
        (lambda: shards.join([torch.zeros(4)]), "1 tensors for 2 ranks"),
        (lambda: shards.join([torch.zeros(4), torch.zeros(3)]), r"parts\[1\] has shape \(3,\)"),
    ]
    for call, words in cases:
        with pytest.raises(PositionError, match=words):
            call()
