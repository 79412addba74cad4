"""What one context-parallel rank may attend to: the mask of the whole row, cut along queries and along keys."""

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa

from tests.tolerances import assert_close_to
from tests.vlm.rows import place
from visionpos.errors import PositionError
from visionpos.vlm import PackedIds, Shards, context_shards, pack_rows
from visionpos.vlm.shards import Order

ORDERS: tuple[Order, ...] = ("zigzag", "contiguous")


def packed(lengths: list[int], **padding: Any) -> PackedIds:
    return pack_rows(
        [place("qwen2_vl", "vendor", [length]) for length in lengths], pad_token=0, **padding
    )


def slow_mask(documents: list[int], *, causal: bool = True) -> Tensor:
    """Pair by pair: the same stretch of the same document, or of padding, and not later."""
    stretch, number = [], 0
    for at, document in enumerate(documents):
        number += at > 0 and document != documents[at - 1]
        stretch.append(number)
    n = len(documents)
    return torch.tensor(
        [[stretch[q] == stretch[k] and (q >= k or not causal) for k in range(n)] for q in range(n)]
    )


def at_hand(shards: Shards, keys: list[int] | None) -> list[int]:
    """Places of the keys, in order."""
    if keys is None:
        return list(range(shards.length))
    return [place_ for rank in keys for place_ in shards.places[rank].tolist()]


@st.composite
def rows(draw: st.DrawFn) -> tuple[PackedIds, Shards]:
    """Unequal documents with padding between or behind them, and how they are dealt out."""
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    ranks, order = draw(st.integers(1, 4)), draw(st.sampled_from(ORDERS))
    pieces = ranks if order == "contiguous" else 2 * ranks
    per_document = draw(st.booleans())
    padding = {"pad_each_to" if per_document else "pad_to_multiple": pieces}
    row = packed(lengths, **padding)
    return row, row.shards(ranks, order=order, per_document=per_document)


@given(rows(), st.booleans(), st.data())
def test_reference_slice_of_the_whole_mask(
    made: tuple[PackedIds, Shards], causal: bool, data: st.DataObject
) -> None:
    row, shards = made
    whole = slow_mask(row.documents.tolist(), causal=causal)
    assert torch.equal(row.mask(causal=causal)[0, 0], whole)
    some = data.draw(st.permutations(range(shards.ranks)))[: data.draw(st.integers(1, 4))]
    for rank, keys in product(range(shards.ranks), (None, list(range(shards.ranks)), some)):
        got = shards.mask(rank, row.documents, keys=keys, causal=causal)
        wanted = whole[shards.places[rank]][:, at_hand(shards, keys)]
        assert got.shape == (1, 1, *wanted.shape)
        assert torch.equal(got[0, 0], wanted)
        rule = shards.mask_mod(rank, row.documents, keys=keys, causal=causal)
        dense = create_mask(rule, None, None, wanted.shape[0], wanted.shape[1], device="cpu")
        assert torch.equal(dense[0, 0], wanted)
    masks = [shards.mask(rank, row.documents, causal=causal) for rank in range(shards.ranks)]
    assert torch.equal(shards.join(masks, -2)[0, 0], whole)  # the way back


@given(rows(), st.integers(1, 6), st.booleans(), st.data())
def test_blocks_hold_every_pair_that_is_seen(
    made: tuple[PackedIds, Shards], block: int, causal: bool, data: st.DataObject
) -> None:
    """A block left out holds no pair that is seen; one that is evaluated by no rule holds no other."""
    row, shards = made
    rank = data.draw(st.integers(0, shards.ranks - 1))
    keys = data.draw(st.none() | st.permutations(range(shards.ranks)))
    got = shards.block_mask(rank, row.documents, keys=keys, causal=causal, block=block)
    dense = shards.mask(rank, row.documents, keys=keys, causal=causal)[0, 0]
    partial, full = listed(got)
    assert not (partial & full).any()
    for query, key in product(*map(range, partial.shape)):
        inside = dense[query * block : (query + 1) * block, key * block : (key + 1) * block]
        if full[query, key]:
            assert inside.shape == (block, block)
            assert inside.all()
        elif not partial[query, key]:
            assert not inside.any()


def listed(mask: BlockMask) -> tuple[Tensor, Tensor]:
    """Which key blocks each query block evaluates by the rule, and which it takes whole."""
    found = []
    for count, index in (
        (mask.kv_num_blocks, mask.kv_indices),
        (mask.full_kv_num_blocks, mask.full_kv_indices),
    ):
        assert count is not None
        assert index is not None
        chosen = torch.zeros(index.shape[-2:], dtype=torch.bool)
        for query, (number, blocks) in enumerate(zip(count[0, 0], index[0, 0], strict=True)):
            chosen[query, blocks[: int(number)].long()] = True
        found.append(chosen)
    return found[0], found[1]


def test_blocks_are_no_more_than_needed() -> None:
    """Where no block straddles two stretches of a shard, none is evaluated in vain: 4 x 4 places of two documents."""
    row = packed([8, 24])
    shards = row.shards(2)
    partial, full = listed(shards.block_mask(1, row.documents, block=4))
    seen = shards.mask(1, row.documents)[0, 0].unflatten(0, (4, 4)).unflatten(-1, (8, 4))
    assert torch.equal(partial | full, seen.any(-1).any(1))
    assert torch.equal(full, seen.all(-1).all(1))
    one = row.shards(1)
    assert torch.equal(
        one.block_mask(0, row.documents, block=8).to_dense(), row.block_mask(8).to_dense()
    )


def test_golden_ring_of_two() -> None:
    """16 tokens on two ranks (users F12), three documents of 5, 7 and 3 and one place of padding; drawn by hand.

    Rank 0 holds 0-3 and 12-15: places 12, 13, 14 are document 2, 15 is padding; document 1 is 5-11, all on rank 1.
    """
    row = packed([5, 7, 3], pad_to_multiple=4)
    shards = row.shards(2)
    own = shards.mask(0, row.documents, keys=[0])[0, 0].int().tolist()
    assert own == [
        [1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0, 0],
        [0, 0, 0, 0, 1, 0, 0, 0],
        [0, 0, 0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 1, 1, 0],
        [0, 0, 0, 0, 0, 0, 0, 1],
    ]
    assert not shards.mask(0, row.documents, keys=[1]).any()
    back = shards.mask(1, row.documents, keys=[0])[0, 0]
    assert back[0].tolist() == [True] * 4 + [False] * 4  # place 4, the last of document 0
    assert not back[1:].any()


def heads(n: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    draws = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, 1, 2, n, 16, dtype=torch.float64, generator=draws)
    return q, k, v


@pytest.mark.filterwarnings("ignore:flex_attention called")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("per_document", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
def test_attention_of_ranks_joined_is_that_of_the_row(
    ranks: int, per_document: bool, order: Order
) -> None:
    """Keys gathered in rank order, keys of the row, FlexAttention, and a ring merged by log-sum-exp."""
    row = packed([11, 3, 20, 1], pad_each_to=2 * ranks)
    shards = row.shards(ranks, order=order, per_document=per_document)
    q, k, v = heads(row.length, 5)
    wanted = sdpa(q, k, v, attn_mask=row.mask())
    ks, vs = shards.split(k, -2), shards.split(v, -2)
    every = list(range(ranks))
    outputs: dict[str, list[Tensor]] = {"row": [], "gathered": [], "flex": [], "ring": []}
    for rank in every:
        mine = shards.take(q, rank, -2)
        outputs["row"].append(sdpa(mine, k, v, attn_mask=shards.mask(rank, row.documents)))
        gathered = shards.mask(rank, row.documents, keys=every)
        outputs["gathered"].append(sdpa(mine, torch.cat(ks, -2), torch.cat(vs, -2), gathered))
        blocks = shards.block_mask(rank, row.documents)
        out = flex_attention(mine, k, v, block_mask=blocks)
        assert isinstance(out, Tensor)
        outputs["flex"].append(out)
        outputs["ring"].append(ring(shards, row, rank, mine, ks, vs))
    for parts in outputs.values():
        assert_close_to(shards.join(parts, -2), wanted)


def ring(
    shards: Shards, row: PackedIds, rank: int, q: Tensor, ks: tuple[Tensor, ...], vs: tuple[Tensor, ...]
) -> Tensor:  # fmt: skip
    """One shard of keys after another, each softmax by itself, merged by the weight of its sum."""
    total, weight = torch.zeros_like(q), torch.zeros_like(q[..., :1])
    for step in range(shards.ranks):
        other = (rank - step) % shards.ranks
        seen = shards.mask(rank, row.documents, keys=[other])
        mass = (q @ ks[other].mT / q.shape[-1] ** 0.5).exp() * seen
        total, weight = total + mass @ vs[other], weight + mass.sum(-1, keepdim=True)
    return total / weight


@pytest.mark.slow  # compiles a kernel
@pytest.mark.parametrize("keys", [None, [1, 0]])
def test_compile_blocks_in_the_fused_kernel(keys: list[int] | None) -> None:
    """The compiled kernel goes by the blocks alone: one left out too many would be missed in the sum."""
    row = packed([300, 77, 260], pad_to_multiple=1024)
    shards = row.shards(2)
    fused = torch.compile(flex_attention)
    q, k, v = (one.float() for one in heads(row.length, 9))
    held = torch.tensor(at_hand(shards, keys))
    with torch.no_grad():
        parts = [
            fused(
                shards.take(q, rank, -2), k[..., held, :], v[..., held, :],
                block_mask=shards.block_mask(rank, row.documents, keys=keys),
            )
            for rank in range(2)
        ]  # fmt: skip
    assert_close_to(shards.join(parts, -2), sdpa(q, k, v, attn_mask=row.mask()))


@pytest.mark.parametrize("order", ORDERS)
def test_one_document_needs_no_documents(order: Order) -> None:
    """Plain causal: any batch takes the mask, dense or by rule."""
    shards = context_shards(24, 3, order=order)
    whole = torch.ones(24, 24).tril().bool()
    for rank in range(3):
        wanted = whole[shards.places[rank]]
        assert torch.equal(shards.mask(rank)[0, 0], wanted)
        assert shards.mask(rank, causal=False).all()
        dense = create_mask(shards.mask_mod(rank), 2, 3, 8, 24, device="cpu")
        assert torch.equal(dense, wanted.expand(2, 3, -1, -1))


def test_rows_dealt_out_alike() -> None:
    """`[rows, n]`: every row has a mask of its own."""
    one, two = packed([5, 7]), packed([3, 1, 6], length=12)
    shards = context_shards(12, 2)
    documents = torch.stack([one.documents, two.documents])
    got = shards.mask(1, documents, keys=[1, 0])
    for number, row in enumerate((one, two)):
        assert torch.equal(got[number], shards.mask(1, row.documents, keys=[1, 0])[0])
    dense = create_mask(shards.mask_mod(1, documents, keys=[1, 0]), 2, 1, 6, 12, device="cpu")
    assert torch.equal(dense, got)
    assert shards.block_mask(1, documents, block=2).shape == (2, 1, 6, 12)


def test_length_that_does_not_divide() -> None:
    """18 places on 2 ranks are refused with the remedy, and the remedy works; padding sees itself."""
    with pytest.raises(PositionError, match=r"length is 18 .* multiple of 4 .* pad_to_multiple=4"):
        packed([11, 7]).shards(2)
    with pytest.raises(PositionError, match=r"document 0 has 11 .* pad_each_to=4"):
        packed([11, 7]).shards(2, per_document=True)
    for row in (packed([11, 7], pad_to_multiple=4), packed([11, 7], pad_each_to=4)):
        shards = row.shards(2, per_document=row.cu_seqlens_padded.tolist() == [0, 12, 20])
        masks = [shards.mask(rank, row.documents) for rank in range(2)]
        assert torch.equal(shards.join(masks, -2), row.mask())
        assert all(mask.any(-1).all() for mask in masks)


def test_error_names_what_is_wrong() -> None:
    row = packed([5, 3])
    shards = row.shards(2)
    cases: list[tuple[Any, str]] = [
        (lambda: shards.mask(2), "rank is 2 of 2"),
        (lambda: shards.mask(0, keys=[0, 2]), "a rank of keys is 2 of 2"),
        (lambda: shards.mask(0, keys=[]), r"keys are of ranks \[\]"),
        (lambda: shards.mask_mod(0, keys=[1, 1]), r"keys are of ranks \[1, 1\].*none twice"),
        (lambda: shards.mask(0, row.documents[:6]), r"documents has shape \(6,\).*8 entries"),
        (lambda: shards.mask(0, row.valid), r"documents are torch\.bool"),
        (lambda: shards.mask(0, torch.zeros(1, 1, 8).long()), r"documents are .* \(1, 1, 8\)"),
        (lambda: shards.mask(0, shards.take(row.documents, 0)), "8 entries"),
        (lambda: shards.mask(0, torch.tensor([0, 0, 1, 0, 0, 1, 1, 1])), "document 0 in several"),
        (lambda: shards.block_mask(0, row.documents, block=0), "block is 0"),
        (lambda: shards.mask(0, causal=1), "causal is 1"),  # type: ignore[arg-type]
    ]
    for call, words in cases:
        with pytest.raises(PositionError, match=words):
            call()
