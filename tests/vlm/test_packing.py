"""Packing: rows, masks and coordinates of ragged images, against slow lists and against each image alone."""

import itertools
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import visionpos as vp
from tests.reference.packing import rows_of, tokens_of
from tests.strategies import grids as sides
from tests.strategies import seeds
from tests.tolerances import assert_close_to
from visionpos import CoordSpec, Dims, Grid
from visionpos.errors import PositionError
from visionpos.vlm import Packed, keep_tokens, pack_images
from visionpos.vlm.documents import cumulative_lengths, document_blocks, document_mask

DIMS = Dims(embed_dim=16, num_heads=2, depth=1)
RAGGED = [Grid(3, 5), Grid(1, 7), Grid(7, 1), Grid(2, 2), Grid(1, 1), Grid(5, 3), Grid(4, 4)]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@st.composite
def sets(draw: st.DrawFn) -> dict[str, object]:
    """Draw the arguments of a packing that fits, every option among them."""
    grids = [Grid(*hw) for hw in draw(st.lists(sides(max_side=6), max_size=9))]
    prefix = draw(st.integers(0, 2))
    longest = max((grid.size for grid in grids), default=1) + prefix
    keep = None
    if draw(st.booleans()):
        keep = keep_tokens(grids, draw(st.floats(0, 0.95)), generator=generator(draw(seeds())))
    return {
        "grids": grids,
        "budget": draw(st.integers(longest, 3 * longest)),
        "method": draw(st.sampled_from(["first_fit", "best_fit"])),
        "largest_first": draw(st.booleans()),
        "max_images": draw(st.sampled_from([None, 1, 3])),
        "prefix": prefix,
        "keep": keep,
    }


def kept_of(drawn: dict) -> list[list[int]]:
    """The cells that every image keeps."""
    sizes = [grid.size for grid in drawn["grids"]]
    keep = drawn["keep"]
    keep = torch.ones(sum(sizes), dtype=torch.bool) if keep is None else keep
    return [part.nonzero().flatten().tolist() for part in keep.split(sizes)] if sizes else []


def tokens_for(grids: list[Grid], *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(sum(grid.size for grid in grids), *shape, dtype=dtype)


# --- rows


@given(sets())
def test_reference_rows(drawn: dict) -> None:
    """Every place holds the token that slow lists put there, whatever the method and the order."""
    kept = kept_of(drawn)
    rows = rows_of(
        [len(cells) + drawn["prefix"] for cells in kept],
        drawn["budget"],
        best=drawn["method"] == "best_fit",
        largest_first=drawn["largest_first"],
        most=drawn["max_images"],
    )
    packed = pack_images(**drawn)
    assert packed.shape == (len(rows), drawn["budget"])
    places = torch.stack([packed.documents, packed.cells], dim=-1).tolist()
    wanted = tokens_of(rows, kept, drawn["budget"], drawn["prefix"])
    assert [[tuple(place) for place in row] for row in places] == wanted


def test_reference_methods_differ() -> None:
    grids = [Grid(2, 3), Grid(1, 7), Grid(1, 3)]
    assert pack_images(grids, 10).rows.tolist() == [0, 1, 0]
    assert pack_images(grids, 10, method="best_fit").rows.tolist() == [0, 1, 1]
    late = [Grid(1, 3), Grid(1, 3), Grid(1, 7), Grid(1, 7)]
    assert pack_images(late, 10).shape[0] == 3
    assert pack_images(late, 10, largest_first=True).shape[0] == 2


def test_reference_rows_are_a_tree_deep() -> None:
    """Sizes that the drawn sets do not reach: a tree of many levels, and rows that fill up to the brim."""
    grids = [Grid(1, 1 + number * 37 % 29) for number in range(700)]
    lengths = [grid.size for grid in grids]
    for method in ("first_fit", "best_fit"):
        rows = rows_of(lengths, 31, best=method == "best_fit")
        packed = pack_images(grids, 31, method=method)
        wanted = [number for image in range(700) for number, row in enumerate(rows) if image in row]
        assert packed.rows.tolist() == wanted


@given(sets())
def test_invariant_round_trip(drawn: dict) -> None:
    """What is filled comes back, image by image, bit for bit; padding and prefix places hold zeros."""
    grids, packed = drawn["grids"], pack_images(**drawn)
    tokens = tokens_for(grids, 3, 2)
    rows = packed.fill(tokens)
    whole = tokens.split([grid.size for grid in grids]) if grids else ()
    wanted = [one[cells] for one, cells in zip(whole, kept_of(drawn), strict=True)]
    for one, expected in zip(packed.unpack(rows), wanted, strict=True):
        assert torch.equal(one, expected)
    assert not rows[~packed.is_patch].any()
    if grids:
        assert torch.equal(packed.fill(list(whole)), rows)
    assert torch.equal(packed.unflatten(packed.flatten(rows)), rows)


def test_gradient_reaches_kept_tokens_alone() -> None:
    keep = keep_tokens(RAGGED, 0.5, generator=generator())
    packed = pack_images(RAGGED, 20, keep=keep)
    tokens = tokens_for(RAGGED, 2).requires_grad_()
    weight = torch.randn(int(keep.sum()), 2, dtype=torch.float64)
    (torch.cat(packed.unpack(packed.fill(tokens))) * weight).sum().backward()
    assert torch.equal(tokens.grad[keep], weight)
    assert not tokens.grad[~keep].any()


def test_prefix_tokens() -> None:
    packed = pack_images(RAGGED, 24, prefix=2)
    rows = packed.fill(tokens_for(RAGGED, 4))
    shared = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    full = packed.with_prefix(rows, shared)
    assert torch.equal(packed.prefix_of(full), shared.expand(len(RAGGED), 2, 4))
    assert all(map(torch.equal, packed.unpack(full), packed.unpack(rows)))
    full.sum().backward()
    assert torch.equal(shared.grad, torch.full_like(shared, len(RAGGED)))
    own = torch.randn(len(RAGGED), 2, 4, dtype=torch.float64)
    assert torch.equal(packed.prefix_of(packed.with_prefix(rows, own)), own)


def test_padding_is_flagged_and_zeroed() -> None:
    packed = pack_images(RAGGED, 20)
    rows = packed.fill(tokens_for(RAGGED, 4)) + 1.0  # an embedding with a bias
    rows[~packed.valid] = float("nan")
    clean = packed.zeroed(rows)
    assert clean.isfinite().all()
    assert not clean[~packed.valid].any()
    assert torch.equal(clean[packed.valid], rows[packed.valid])
    assert int(packed.valid.sum()) == sum(grid.size for grid in RAGGED)


def test_shape_edges() -> None:
    empty = pack_images([], 8, prefix=1)
    assert empty.shape == (0, 8)
    assert empty.cu_seqlens.tolist() == [0]
    assert empty.max_seqlen == 0
    assert empty.fill(torch.zeros(0, 5)).shape == (0, 8, 5)
    assert empty.coords().shape == (0, 8, 2)
    assert empty.unpack(torch.zeros(0, 8, 5)) == ()
    assert empty.pool(torch.zeros(0, 8, 5)).shape == (0, 5)
    assert empty.pool_mask().shape == (0, 1, 0, 8)
    assert empty.mask().shape == (0, 1, 8, 8)
    fixed = pack_images([], 8, rows=2)
    assert fixed.documents.tolist() == [[-1] * 8] * 2
    assert fixed.padded_seqlens()[0].tolist() == [0, 8, 16]
    ones = pack_images([Grid(1, 1)] * 3, 1)
    assert ones.documents.tolist() == [[0], [1], [2]]
    assert ones.cu_seqlens.tolist() == [0, 1, 2, 3]
    more = pack_images(RAGGED, 20, rows=7)
    needed = pack_images(RAGGED, 20)
    assert torch.equal(more.documents[: needed.shape[0]], needed.documents)
    assert (more.documents[needed.shape[0] :] == -1).all()


# --- who sees whom


@given(sets())
def test_reference_lengths(drawn: dict) -> None:
    packed = pack_images(**drawn)
    assert packed.mask().any(-1).all(), "no query may see nothing"
    own = [len(cells) + drawn["prefix"] for cells in kept_of(drawn)]
    line = [image for row in packed.documents.tolist() for image in dict.fromkeys(row)]
    ends, total = [0], 0
    for image in (one for one in line if one >= 0):
        total += own[image]
        ends.append(total)
    assert packed.cu_seqlens.dtype == torch.int32
    assert packed.cu_seqlens.tolist() == ends
    assert packed.max_seqlen == max(own, default=0)
    padded, longest = packed.padded_seqlens()
    tails = [(row == -1).sum().item() for row in packed.documents]
    assert padded[-1] == packed.documents.numel()
    assert len(padded) == 1 + len(own) + sum(map(bool, tails))
    assert longest == max([*own, *tails], default=0)
    assert (padded.diff() > 0).all()


@settings(max_examples=40)
@given(sets(), st.sampled_from([4, 8, 128]))
def test_parity_block_mask(drawn: dict, block: int) -> None:
    """Our block mask is the one that create_block_mask makes out of all pairs, block for block."""
    packed = pack_images(**drawn)
    rows, budget = packed.shape
    if not rows:
        return
    documents = packed.documents

    def same(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return documents[row, query] == documents[row, key]

    theirs = create_block_mask(same, rows, None, budget, budget, device="cpu", BLOCK_SIZE=block)
    ours = packed.block_mask(block)
    assert ours.shape == theirs.shape
    assert ours.BLOCK_SIZE == theirs.BLOCK_SIZE
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    for name in ("kv", "full_kv"):
        counts = getattr(theirs, f"{name}_num_blocks")
        listed = (
            torch.arange(counts.shape[-1]) < counts[..., None]
        )  # the rest of a list is never read
        mine, other = (getattr(one, f"{name}_indices") for one in (ours, theirs))
        assert torch.equal(mine[listed], other[listed]), name


def test_reference_masks_of_unequal_rows() -> None:
    documents = torch.tensor([[0, 0, 1, 2, 2], [3, 3, 3, -1, -1]])
    mask = document_mask(documents)
    wanted = [[[i == j for j in row] for i in row] for row in documents.tolist()]
    assert mask[:, 0].tolist() == wanted
    assert document_blocks(documents, block=1).to_dense()[:, 0].bool().tolist() == wanted
    assert cumulative_lengths(documents)[0].tolist() == [0, 2, 3, 5, 8, 10]


Attend = Callable[[Packed, Tensor, Tensor, Tensor], Tensor]


def dense(packed: Packed, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=packed.mask())


def flex(packed: Packed, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # eager flex_attention warns once a process that it is slow
        return flex_attention(q, k, v, block_mask=packed.block_mask(block=16))


def by_lengths(packed: Packed, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What varlen kernels do: one attention for each stretch of the flat tokens."""
    flat = [packed.flatten(one.transpose(1, 2)).transpose(0, 1) for one in (q, k, v)]
    ends = packed.cu_seqlens.tolist()
    parts = [
        F.scaled_dot_product_attention(*(one[:, first:last] for one in flat))
        for first, last in itertools.pairwise(ends)
    ]
    return packed.unflatten(torch.cat(parts, dim=1).transpose(0, 1)).transpose(1, 2)


def over_padded_rows(packed: Packed, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same without leaving padding out."""
    flat = [one.transpose(1, 2).flatten(0, 1).transpose(0, 1) for one in (q, k, v)]
    ends = packed.padded_seqlens()[0].tolist()
    parts = [
        F.scaled_dot_product_attention(*(one[:, first:last] for one in flat))
        for first, last in itertools.pairwise(ends)
    ]
    joined = torch.cat(parts, dim=1).transpose(0, 1)
    return joined.unflatten(0, packed.shape).transpose(1, 2)


def turned(x: Tensor, rotation: vp.Rotation | None, prefix: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v `[b, heads, n, head_dim]` of tokens, with q and k rotated."""
    q, k, v = x.unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
    if rotation is not None:
        q, k = vp.rotate(q, k, rotation, prefix=prefix)
    return q, k, v


@pytest.mark.parametrize("attend", [dense, flex, by_lengths, over_padded_rows])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("rate", [0.0, 0.6])
def test_invariant_attention_is_of_each_image_alone(
    attend: Attend, dtype: torch.dtype, rate: float
) -> None:
    """Rotary attention of packed rows, prefix tokens and dropped tokens included, is that of every image alone."""
    spec, freqs = CoordSpec(unit="centred"), vp.axial_freqs(8, theta=100.0)
    keep = keep_tokens(RAGGED, rate, generator=generator(3))
    packed = pack_images(RAGGED, 24, prefix=1, keep=keep, method="best_fit")
    tokens, first = tokens_for(RAGGED, 48, dtype=dtype), torch.randn(1, 48, dtype=dtype)
    turns = vp.angles(packed.coords(spec), freqs).unsqueeze(1)  # [rows, 1, budget, pairs]
    rows = packed.with_prefix(packed.fill(tokens), first)
    out = attend(packed, *turned(rows, vp.Rotation.of(turns, pairing="half"), 0))
    out = packed.zeroed(out.transpose(1, 2).flatten(2))
    assert out.isfinite().all()
    sizes = [grid.size for grid in RAGGED]
    images = zip(RAGGED, tokens.split(sizes), keep.split(sizes), strict=True)
    for number, (grid, own, kept) in enumerate(images):
        angles = vp.angles(vp.coordinates(grid, spec), freqs)[kept]
        x = torch.cat([first, own[kept]]).unsqueeze(0)
        q, k, v = turned(x, vp.Rotation.of(angles, pairing="half"), 1)
        alone = F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).flatten(1)
        assert_close_to(packed.prefix_of(out)[number], alone[:1])
        assert_close_to(packed.unpack(out)[number], alone[1:])


def test_device(device: torch.device) -> None:
    """Rows that moved give the same attention; nothing stays behind on the CPU."""
    packed, here = pack_images(RAGGED, 24, prefix=1).to(device), pack_images(RAGGED, 24, prefix=1)
    tokens = tokens_for(RAGGED, 48, dtype=torch.float32)
    out = dense(packed, *turned(packed.fill(tokens.to(device)), None, 0)).transpose(1, 2).flatten(2)
    wanted = dense(here, *turned(here.fill(tokens), None, 0)).transpose(1, 2).flatten(2)
    assert_close_to(packed.pool(packed.zeroed(out)).cpu(), here.pool(wanted))
    assert torch.equal(packed.coords().cpu(), here.coords())
    assert torch.equal(packed.block_mask().to_dense().cpu(), here.block_mask().to_dense())
    assert torch.equal(packed.pool_mask().cpu(), here.pool_mask())
    assert torch.equal(packed.extents_hw().cpu(), here.extents_hw())


# --- where tokens are


@settings(max_examples=30)
@given(sets(), st.sampled_from(["index", "centred", "fractional", "endpoint"]))
def test_reference_coords(drawn: dict, unit: str) -> None:
    """Every patch stands where its own grid puts it; dropping and packing move nothing."""
    spec = CoordSpec(unit=unit)
    packed = pack_images(**drawn)
    coords = packed.coords(spec)
    assert not coords[~packed.is_patch].any()
    images = zip(packed.unpack(coords), drawn["grids"], kept_of(drawn), strict=True)
    for own, grid, kept in images:
        assert torch.equal(own, vp.coordinates(grid, spec)[kept])


def test_reference_coords_of_clips() -> None:
    clips = [Grid(2, 3, frames=2), Grid(3, 1, frames=4), Grid(2, 2)]
    packed = pack_images(clips, 16)
    for axes in (1, 2, 3):
        spec = CoordSpec(axes=axes)
        for own, grid in zip(packed.unpack(packed.coords(spec)), clips, strict=True):
            assert torch.equal(own, vp.coordinates(grid, spec))


@pytest.mark.parametrize(
    "spec",
    [
        vp.FactorizedSpec(table_hw=(9, 8), std=1.0),
        vp.FactorizedSpec(table_hw=(6, 5), coords="fractional", combine="product"),
        vp.FactorizedSpec(table_hw=(6, 5), coords="fractional", aspect="square", recipe="nearest"),
        vp.LearnedSpec(grid_hw=(5, 4)),
    ],
)
def test_reference_codes(spec: vp.FactorizedSpec | vp.LearnedSpec) -> None:
    """Absolute, fractional and resampled tables, read for packed rows, are those of every whole grid."""
    encoding = vp.build(spec, DIMS)
    keep = keep_tokens(RAGGED, 0.4, generator=generator(1))
    packed = pack_images(RAGGED, 21, prefix=1, keep=keep)
    codes = packed.codes(encoding)
    assert not codes[~packed.is_patch].any()
    kept = keep.split([grid.size for grid in RAGGED])
    for own, grid, stays in zip(packed.unpack(codes), RAGGED, kept, strict=True):
        assert_close_to(own, encoding(grid)[stays])
    codes.sum().backward()
    assert all(parameter.grad.any() for parameter in encoding.parameters())


# --- pooling


def test_reference_pool() -> None:
    keep = keep_tokens(RAGGED, 0.3, generator=generator(2))
    packed = pack_images(RAGGED, 20, prefix=1, keep=keep)
    x = torch.randn(*packed.shape, 3, dtype=torch.float64, requires_grad=True)
    parts = packed.unpack(x)
    assert_close_to(packed.pool(x), torch.stack([one.mean(0) for one in parts]))
    assert torch.equal(packed.pool(x, "max"), torch.stack([one.amax(0) for one in parts]))
    packed.pool(x).sum().backward()
    assert torch.equal(x.grad.any(-1), packed.is_patch)
    assert packed.pool(x.detach().bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("slots", [None, 9])
def test_reference_attention_pool(slots: int | None) -> None:
    """One query a slot, masked, is the pooling query of every image alone (NaViT's head)."""
    packed = pack_images(RAGGED, 20, prefix=1, rows=6)
    assert len(set(torch.bincount(packed.rows, minlength=6).tolist())) > 1, (
        "rows must hold unequal numbers"
    )
    x = torch.randn(*packed.shape, 8, dtype=torch.float64)
    mask = packed.pool_mask(slots)
    assert mask.any(-1).all(), "no query may see nothing"
    query = torch.randn(8, dtype=torch.float64)
    keys = x.unsqueeze(1)
    asked = query.expand(mask.shape[0], 1, mask.shape[2], 8)
    answers = F.scaled_dot_product_attention(asked, keys, keys, attn_mask=mask)[:, 0]
    assert answers.isfinite().all()
    pooled = answers[packed.rows, packed.slots]
    for own, image in zip(pooled, packed.unpack(x), strict=True):
        alone = F.scaled_dot_product_attention(query[None, None], image[None], image[None])[0, 0]
        assert_close_to(own, alone)


def test_keep_as_a_list_is_keep_as_a_tensor() -> None:
    keep = torch.arange(65) != 3
    listed, given = (pack_images(RAGGED, 20, keep=one) for one in (keep.tolist(), keep))
    assert torch.equal(listed.cells, given.cells)


# --- refusals


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"budget": 14}, ["image 0", "15 tokens", "budget is 14", "keep="]),
        ({"budget": 15, "prefix": 1}, ["16 tokens", "prefix 1"]),
        ({"budget": 0}, ["budget is 0", "at least 1"]),
        ({"budget": 2.5}, ["budget is 2.5"]),
        ({"budget": None}, ["budget is None"]),
        ({"budget": True}, ["budget is True"]),
        ({"rows": 1}, ["rows is 1", "need 4 rows of 20", "keep="]),
        ({"rows": 0}, ["rows is 0"]),
        ({"max_images": 0}, ["max_images is 0", "Leave it out"]),
        ({"prefix": -1}, ["prefix is -1", "at least 0"]),
        ({"method": "greedy"}, ["method is 'greedy'", "first_fit"]),
        ({"keep": torch.ones(3, dtype=torch.bool)}, ["keep is torch.bool", "(65,)", "keep_tokens"]),
        ({"keep": torch.ones(65)}, ["keep is torch.float32"]),
        ({"keep": "all"}, ["keep is of type str", "keep_tokens"]),
        ({"keep": [True] * 3}, ["keep is torch.bool of shape (3,)"]),
        ({"keep": torch.arange(65) < 65 - 16}, ["keep leaves no token of image 6"]),
        ({"grids": [Grid(2, 2), (2, 3)]}, ["grids[1] is (2, 3)", "Grid"]),
        ({"grids": Grid(2, 2)}, ["grids is Grid", "sequence"]),
    ],
)
def test_error_pack(change: dict, words: list[str]) -> None:
    arguments = {"grids": RAGGED, "budget": 20} | change
    with pytest.raises(PositionError) as error:
        pack_images(**arguments)
    assert all(word in str(error.value) for word in words), error.value


def test_error_tokens() -> None:
    packed = pack_images(RAGGED, 20)
    sizes = [grid.size for grid in RAGGED]
    parts = list(torch.zeros(sum(sizes), 2).split(sizes))
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: packed.fill(torch.zeros(64, 2)), r"\(64, 2\) and the grids 65 cells"),
        (lambda: packed.fill(parts[:-1]), "of 6 images and grids of 7"),
        (lambda: packed.fill([parts[1], parts[0], *parts[2:]]), r"tokens\[0\] has shape \(7, 2\)"),
        (lambda: pack_images([], 3).fill([]), r"pass a tensor \[0, ...\]"),
        (lambda: packed.unpack(torch.zeros(2, 20, 3)), r"x has shape \(2, 20, 3\)"),
        (lambda: packed.with_prefix(torch.zeros(*packed.shape, 3), torch.zeros(1, 3)), "prefix="),
        (lambda: packed.unflatten(torch.zeros(3, 2)), "hold 65 tokens"),
        (lambda: packed.pool_mask(1), "slots is 1 and a row holds [2-9] images.*max_images"),
        (lambda: packed.pool(torch.zeros(*packed.shape, 3), "sum"), "how is 'sum'"),
        (lambda: packed.pool(torch.zeros(*packed.shape)), r"floats \[rows, budget, d\]"),
        (lambda: packed.pool(torch.zeros(*packed.shape, 3, dtype=torch.int64)), "x is torch.int64"),
        (lambda: packed.pool_mask(2.5), "slots is 2.5"),
        (lambda: packed.block_mask(0), "block is 0.*at least 1"),
        (lambda: packed.block_mask(2.5), "block is 2.5"),
        (lambda: packed.fill(None), "tokens are a NoneType"),
        (lambda: packed.fill([part.numpy() for part in parts]), "from_numpy"),
        (lambda: packed.fill([*parts[:-1], parts[-1][:, :1]]), r"tokens\[6\].*one width"),
    ]
    for call, words in cases:
        with pytest.raises(PositionError, match=words):
            call()
