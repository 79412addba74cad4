"""Prompts in one row: restarts, boundaries, padding, masks and the way back, in the rows of real families."""

import itertools
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers.modeling_flash_attention_utils import prepare_fa_kwargs_from_position_ids

import visionpos as vp
from tests.reference.packing import rows_of
from tests.strategies import seeds
from tests.tolerances import assert_close_to
from tests.vlm.conversations import NAMES, fam_of, prompts, stream_of
from tests.vlm.rows import image, place
from visionpos.errors import PositionError
from visionpos.vlm import (
    Image,
    PackedIds,
    Text,
    TokenStream,
    bin_lengths,
    family,
    merge_rows,
    pack,
    pack_rows,
)

G2 = [3, image(4, 4), 3]
SHORT = (("text", 7), ("image", 0))


def streams_of(name: str, chosen: list[tuple[tuple[str, int], ...]]) -> list[TokenStream]:
    return [stream_of(name, parts) for parts in chosen]


def paddings() -> st.SearchStrategy[dict[str, int]]:
    """Draw how a row is padded."""
    each, row = st.sampled_from([1, 2, 8]), st.sampled_from([1, 8, 64])
    return st.fixed_dictionaries({"pad_each_to": each, "pad_to_multiple": row})


# --- restarts


@settings(max_examples=40)
@given(st.sampled_from(NAMES), st.lists(prompts(), min_size=1, max_size=4), paddings())
def test_invariant_many_are_one_by_one(
    name: str, chosen: list[tuple[tuple[str, int], ...]], padding: dict[str, int]
) -> None:
    """Ids, types and places of every prompt are those it has alone, whatever its neighbours and its padding."""
    fam, streams = fam_of(name), streams_of(name, chosen)
    row = pack(streams, family=fam, **padding)
    assert row.length % padding["pad_to_multiple"] == 0
    assert row.types is not None
    parts = (row.unpack(one) for one in (row.ids, row.types, row.text, row.documents))
    for number, (stream, ids, types, text, documents) in enumerate(
        zip(streams, *parts, strict=True)
    ):
        assert torch.equal(ids, fam.position_ids(stream).ids)
        assert torch.equal(types, stream.modality)
        assert text.tolist() == list(range(stream.length))
        assert documents.tolist() == [number] * stream.length
    assert row.max_seqlen == max(stream.length for stream in streams)
    assert not row.types[~row.valid].any()
    rule = fam.spec.rule
    assert rule is not None
    assert (row.ids[:, ~row.valid] == rule.pad_id).all()


def test_golden_rows_of_g2() -> None:
    """facts/mrope.md G2 twice: three rows restart at 0, and row 0 of four counts 0 to 9 (transformers#40136)."""
    fam = family("qwen2_vl")
    stream = fam.stream([Text(tokens=2), Image((56, 56)), Text(tokens=2)])
    row = pack([stream, stream], family=fam)
    time = [0, 1, 2, 3, 3, 3, 3, 5, 6, 7]
    high = [0, 1, 2, 3, 3, 4, 4, 5, 6, 7]
    wide = [0, 1, 2, 3, 4, 3, 4, 5, 6, 7]
    assert row.three_rows[:, 0].tolist() == [time * 2, high * 2, wide * 2]
    assert row.four_rows[:, 0].tolist() == [[*range(10)] * 2, time * 2, high * 2, wide * 2]
    assert row.cu_seqlens.tolist() == [0, 10, 20]
    assert row.max_seqlen == 10


@pytest.mark.parametrize(("name", "rows"), [("qwen2_vl", 4), ("hunyuan_vl", 5), ("internvl", 2)])
def test_shape_text_row_stands_over_the_axes(name: str, rows: int) -> None:
    """The text row comes on top of as many axes as the family has: hunyuan's first axis is not it."""
    row = pack(streams_of(name, [SHORT, SHORT]), family=fam_of(name))
    assert row.four_rows.shape == (rows, 1, row.length)
    assert row.three_rows.shape == (rows - 1, 1, row.length)


def test_fractional_ids_stay_fractional() -> None:
    row = pack(streams_of("internvl_v2pe", [SHORT, SHORT]), family=fam_of("internvl_v2pe"))
    assert row.ids.dtype == row.four_rows.dtype == torch.float64
    assert (row.ids % 1 != 0).any()
    assert row.text.dtype == torch.int64


# --- boundaries


@settings(max_examples=40)
@given(st.sampled_from(NAMES), st.lists(prompts(), min_size=1, max_size=4), paddings())
def test_parity_boundaries_that_transformers_reads_off_the_text_row(
    name: str, chosen: list[tuple[tuple[str, int], ...]], padding: dict[str, int]
) -> None:
    """Never from T, which falls and repeats: [3, 1, 256] is one piece of 256 tokens (transformers PR 44911)."""
    row = pack(streams_of(name, chosen), family=fam_of(name), **padding)
    (theirs, _), (longest, _) = prepare_fa_kwargs_from_position_ids(row.four_rows[0].long())
    ours, most = row.padded_seqlens()
    assert torch.equal(ours, theirs)
    assert ours.dtype == torch.int32
    assert most == int(longest)
    if bool(row.valid.all()):
        assert torch.equal(row.cu_seqlens, theirs)
        assert torch.equal(row.cu_seqlens_padded, theirs)


def test_golden_boundaries_with_padding() -> None:
    """Prompts of 10, 4 and 3 tokens, each to a multiple of 4, the row to one of 16."""
    rows = [place("qwen2_vl", "vendor", parts) for parts in (G2, [4], [3])]
    row = pack_rows(rows, pad_each_to=4, pad_to_multiple=16)
    assert row.length == 32
    assert row.cu_seqlens.tolist() == [0, 10, 14, 17]
    assert row.cu_seqlens_padded.tolist() == [0, 12, 16, 32]  # the end of the row is the last one's
    assert row.padded_seqlens()[0].tolist() == [0, 10, 12, 16, 19, 32]
    assert row.documents.tolist() == [0] * 10 + [-1] * 2 + [1] * 4 + [2] * 3 + [-1] * 13
    text = [*range(10), 0, 1, *range(4), *range(3), *range(13)]
    assert row.text.tolist() == text
    assert row.max_seqlen == 10


def test_padding_is_emitted_where_nothing_is_padded() -> None:
    """users F12: cu_seqlens_padded is there also when every prompt is a multiple already."""
    rows = [place("qwen2_vl", "vendor", [length]) for length in (4, 8)]
    row = pack_rows(rows, pad_each_to=4)
    assert row.cu_seqlens.tolist() == row.cu_seqlens_padded.tolist() == [0, 4, 12]


def test_tokens_ids_and_types_are_padded_alike() -> None:
    fam = family("qwen2_vl")
    words = {"<|vision_start|>": 9, "<|image_pad|>": 8, "<|vision_end|>": 7}
    streams = [fam.stream([Text(token_ids=ids), Image((56, 56))]) for ids in ([1, 2], [3])]
    row = pack(streams, family=fam, tokenizer=words, pad_token=99, pad_each_to=5, length=32)
    assert row.tokens is not None
    assert row.types is not None
    assert row.ids.shape[-1] == len(row.tokens) == len(row.types) == len(row.text) == 32
    first = [1, 2, 9, 8, 8, 8, 8, 7]
    assert row.tokens.tolist() == [*first, 99, 99, 3, *first[2:], *[99] * 15]
    assert row.types.tolist() == [0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0, 1, 1, 1, 1, *[0] * 16]
    for stream, back in zip(streams, row.unpack(row.tokens), strict=True):
        assert torch.equal(back, stream.token_ids(words))
    assert pack(streams, family=fam).tokens is None


@given(seeds(), paddings(), st.sampled_from([-1, 0, 1]))
def test_invariant_unpack_undoes_fill(seed: int, padding: dict[str, int], dim: int) -> None:
    """Labels, weights and embeddings go in and come out bit for bit; padding holds the value given."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (3,), generator=generator).tolist()
    row = pack_rows([place("qwen2_vl", "vendor", [length]) for length in lengths], **padding)
    shapes = [[2, 3] for _ in lengths]
    for shape, length in zip(shapes, lengths, strict=True):
        shape.insert(dim if dim >= 0 else 2, length)
    parts = [torch.randn(shape, generator=generator) for shape in shapes]
    filled = row.fill(parts, value=-100, dim=dim)
    assert all(map(torch.equal, row.unpack(filled, dim), parts))
    assert (filled.index_select(dim, (~row.valid).nonzero().flatten()) == -100).all()
    assert filled.shape[dim] == row.length


def test_gradient_reaches_every_part() -> None:
    row = pack_rows([place("qwen2_vl", "vendor", [n]) for n in (2, 3)], pad_each_to=4)
    parts = [torch.randn(n, 2, dtype=torch.float64, requires_grad=True) for n in (2, 3)]
    assert torch.autograd.gradcheck(lambda *held: row.fill(held, dim=0), parts)


# --- who sees whom


def slow_mask(row: PackedIds, *, causal: bool) -> list[list[bool]]:
    """Pairs of places: of one prompt, or of one stretch of padding; a later place is hidden."""
    piece, number, before = [], -1, None
    for document in row.documents.tolist():
        number += document != before
        before = document
        piece.append(number)
    n = len(piece)
    return [[piece[q] == piece[k] and (k <= q or not causal) for k in range(n)] for q in range(n)]


@pytest.mark.parametrize("causal", [True, False])
@settings(max_examples=25)
@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=5),
    paddings(),
    st.sampled_from([1, 4, 16, 128]),
)
def test_reference_masks(
    causal: bool, lengths: list[int], padding: dict[str, int], block: int
) -> None:
    """The dense mask is the slow one, the block mask is what create_block_mask makes of it, block for block."""
    row = pack_rows([place("qwen2_vl", "vendor", [length]) for length in lengths], **padding)
    dense = row.mask(causal=causal)
    assert dense.shape == (1, 1, row.length, row.length)
    assert dense[0, 0].tolist() == slow_mask(row, causal=causal)
    assert dense.any(-1).all(), "no query may see nothing"

    def seen(_row: Any, _head: Any, query: Any, key: Any) -> Any:
        return dense[0, 0, query, key]

    theirs = create_block_mask(
        seen, 1, None, row.length, row.length, device="cpu", BLOCK_SIZE=block
    )
    ours = row.block_mask(block, causal=causal)
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


def test_causal_order_is_that_of_places() -> None:
    """llama.cpp#13694: ids repeat in an image, and fall behind it; the mask of G2 is plain lower-triangular."""
    pos = place("qwen2_vl", "vendor", G2)
    assert bool((pos.ids[2].diff() < 0).any())
    mask = pack_rows([pos]).mask()[0, 0]
    assert torch.equal(mask, torch.ones(10, 10, dtype=torch.bool).tril())


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "hunyuan_vl"])
@pytest.mark.parametrize("how", ["dense", "flex", "lengths"])
def test_invariant_attention_is_of_each_prompt_alone(name: str, how: str) -> None:
    """Causal rotary attention over a packed row, by all three forms of the boundaries, is that of each prompt alone."""
    fam = fam_of(name)
    chosen = [(("text", 7), ("image", 0)), (("text", 1),), (("clip", 4), ("text", 7))]
    streams = streams_of(name, chosen)
    row = pack(streams, family=fam, pad_each_to=8, pad_to_multiple=64)
    language = fam.spec.language
    assert language is not None
    draws = torch.Generator().manual_seed(4)
    q, k, v = torch.randn(3, 1, 2, row.length, language.head_dim, generator=draws)
    turned = vp.rotate(q, k, fam.rotation(row.ids))
    out = _attend(how, row, *turned, v)
    assert out.isfinite().all()
    parts = zip(streams, *(row.unpack(one, -2) for one in (q, k, v, out)), strict=True)
    for stream, q_own, k_own, v_own, own in parts:
        rotation = fam.rotation(fam.position_ids(stream).ids)
        alone = F.scaled_dot_product_attention(
            *vp.rotate(q_own, k_own, rotation), v_own, is_causal=True
        )
        assert_close_to(own, alone)


def _attend(how: str, row: PackedIds, q: Any, k: Any, v: Any) -> Any:
    if how == "dense":
        return F.scaled_dot_product_attention(q, k, v, attn_mask=row.mask())
    if how == "flex":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # eager flex_attention warns once that it is slow
            return flex_attention(q, k, v, block_mask=row.block_mask(block=16))
    ends = row.padded_seqlens()[0].tolist()
    parts = [
        F.scaled_dot_product_attention(
            *(one[..., first:last, :] for one in (q, k, v)), is_causal=True
        )
        for first, last in itertools.pairwise(ends)
    ]
    return torch.cat(parts, -2)


def test_device(device: torch.device) -> None:
    here = pack(streams_of("qwen2_vl", [SHORT, SHORT]), family=fam_of("qwen2_vl"), pad_each_to=8)
    there = here.to(device)
    assert torch.equal(there.mask().cpu(), here.mask())
    assert torch.equal(there.block_mask().to_dense().cpu(), here.block_mask().to_dense())
    assert torch.equal(there.four_rows.cpu(), here.four_rows)
    assert all(map(torch.equal, [one.cpu() for one in there.unpacked()], here.unpacked()))


# --- which prompts go together


@given(
    st.lists(st.integers(1, 50), max_size=40),
    st.integers(50, 90),
    st.sampled_from(["best_fit", "first_fit"]),
    st.booleans(),
    st.sampled_from([None, 2]),
)
def test_reference_bins(
    lengths: list[int], budget: int, method: Any, largest_first: bool, most: int | None
) -> None:
    best = method == "best_fit"
    wanted = rows_of(lengths, budget, best=best, largest_first=largest_first, most=most)
    got = bin_lengths(lengths, budget, method=method, largest_first=largest_first, most=most)
    assert got == wanted


def test_bins_fill_rows_of_one_length() -> None:
    """Lengths, bins, rows: every row has the budget, every stream comes back."""
    fam = family("qwen2_vl")
    streams = [fam.stream([Text(tokens=n), Image((56, 28 * n))]) for n in (3, 9, 5, 2, 7)]
    bins = bin_lengths([stream.length for stream in streams], 40)
    rows = [pack([streams[one] for one in held], family=fam, length=40) for held in bins]
    assert {row.length for row in rows} == {40}
    back: dict[int, torch.Tensor] = {}
    for held, row in zip(bins, rows, strict=True):
        back |= dict(zip(held, row.unpacked(), strict=True))
    for number, stream in enumerate(streams):
        assert torch.equal(back[number], fam.position_ids(stream).ids)


# --- refusals


def test_error_names_what_is_wrong() -> None:
    fam = family("qwen2_vl")
    stream = fam.stream([Text(tokens=3)])
    pos = fam.position_ids(stream)
    rule = fam.spec.rule
    assert rule is not None
    padded = merge_rows([pos, place("qwen2_vl", "vendor", [5])], rule).row(0)
    row = pack([stream], family=fam)
    one = family("internvl")
    mixed = [pos, one.position_ids(one.stream([Text(tokens=3)]))]
    cases: list[tuple[Any, str]] = [
        (lambda: pack([], family=fam), "rows holds 0 items"),
        (lambda: pack(stream, family=fam), "streams is"),
        (lambda: pack([pos], family=fam), "streams is"),
        (lambda: pack([stream], family="qwen2_vl"), "family is 'qwen2_vl'"),
        (lambda: pack([stream], family=fam, pad_to_multiple=0), "pad_to_multiple is 0"),
        (lambda: pack([stream], family=fam, pad_each_to=-2), "pad_each_to is -2"),
        (lambda: pack([stream], family=fam, length=2), r"length is 2 and the prompts need 3"),
        (lambda: pack([stream], family=fam, length=9, pad_to_multiple=4), "multiple of 4"),
        (lambda: pack_rows([padded]), "padded already"),
        (lambda: pack_rows(mixed), r"rows have \[3, 1\] axes"),
        (lambda: pack_rows([pos], types=[torch.zeros(4)]), r"types have shapes \[\(4,\)\]"),
        (lambda: pack_rows([pos], tokens=[]), r"tokens have shapes \[\]"),
        (lambda: row.fill([torch.zeros(4)]), r"parts\[0\] has shape \(4,\) and its prompt 3"),
        (lambda: row.fill([]), "0 tensors for 1 prompts"),
        (lambda: row.fill([torch.zeros(3)], dim=1), "along dim 1"),
        (lambda: row.unpack(torch.zeros(3, 4)), r"x has shape \(3, 4\) and dim is -1"),
        (lambda: row.unpack(torch.zeros(3), dim=2), "dim is 2"),
        (lambda: bin_lengths([3, 11], 10), r"lengths\[1\] is 11 and budget 10"),
        (lambda: bin_lengths([0], 10), r"lengths\[0\] is 0"),
        (lambda: bin_lengths([3], 0), "budget is 0"),
        (lambda: bin_lengths([3], 5, most=0), "most is 0"),
    ]  # fmt: skip
    for call, words in cases:
        with pytest.raises(PositionError, match=words):
            call()
