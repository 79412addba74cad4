"""Rotation: channel pairs turned by angles; norms kept, dot products of differences alone."""

import copy
import pickle
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import visionpos as vp
from tests.compiled import SIZES, graphs_of
from tests.reference import rotary as oracle
from tests.strategies import grids, seeds, shifts
from tests.tolerances import assert_close_to
from visionpos import Grid, PositionError, Rotation
from visionpos.geometry import rotate as plain_rotate
from visionpos.geometry.separable import joined

PAIRINGS = ("half", "adjacent")


def turn(grid: Grid, channels: int, pairing: str, *, dtype=torch.float32) -> Rotation:
    """The rotation of an axial RoPE over a grid."""
    freqs = vp.axial_freqs(channels, theta=100.0, dtype=dtype)
    return Rotation.of(vp.angles(vp.coordinates(grid), freqs), pairing)


def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return q @ k.transpose(-1, -2)


@pytest.mark.parametrize("hw", [(3, 5), (1, 7), (7, 1), (13, 11)])
@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize(("prefix", "suffix"), [(0, 0), (1, 0), (5, 2)])
def test_shape_of_rotate(hw, pairing, prefix, suffix):
    """Shapes and dtypes stay; k may have fewer heads than q."""
    rotation = turn(Grid(*hw), 8, pairing)
    n = prefix + hw[0] * hw[1] + suffix
    assert (rotation.n, rotation.pairs) == (hw[0] * hw[1], 4)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        q, k = torch.randn(2, 6, n, 8).to(dtype), torch.randn(2, 2, n, 8).to(dtype)
        out_q, out_k = vp.rotate(q, k, rotation, prefix=prefix, suffix=suffix)
        assert (out_q.shape, out_q.dtype) == (q.shape, dtype)
        assert (out_k.shape, out_k.dtype) == (k.shape, dtype)


@pytest.mark.parametrize(
    "lead", [(), (6,), (2, 1), (1, 6), (2, 6)], ids=["shared", "heads", "sample", "one", "both"]
)
def test_shape_of_leading_sizes(lead):
    """[heads, n, pairs] turns every head its own way, [b, 1, n, pairs] every sample: as broadcasting reads them."""
    turns = torch.randn(*lead, 15, 4, dtype=torch.float64)
    x = torch.randn(2, 6, 15, 8, dtype=torch.float64)
    out = Rotation.of(turns, "half").apply(x)
    whole = turns.broadcast_to(2, 6, 15, 4)
    for b, h in ((0, 0), (1, 5), (0, 3)):
        expected = oracle.rotate(x[b, h].numpy(), whole[b, h].numpy(), "half")
        assert_close_to(out[b, h], torch.from_numpy(expected))


def test_shape_of_select_and_padded():
    rotation = turn(Grid(3, 5), 8, "half")
    assert rotation.padded(1, 2).cos.shape == (18, 4)
    assert rotation.padded() is rotation
    assert rotation.select(torch.tensor([4, 0, 4])).cos.shape == (3, 4)
    assert rotation.select(torch.tensor([[4, 0], [1, 14]])).cos.shape == (2, 1, 2, 4)
    per_head = Rotation.of(torch.randn(6, 15, 4))
    assert per_head.select(torch.tensor([[4, 0], [1, 14]])).cos.shape == (2, 6, 2, 4)


@given(
    grids(max_side=5),
    st.sampled_from(PAIRINGS),
    st.integers(1, 4),
    st.integers(0, 2),
    st.integers(0, 3),
)
def test_reference_matrices(hw, pairing, share, prefix, rest):
    """Every token is turned by its own block matrix; channels beyond the pairs, and the prefix, are not."""
    turned, n = 4 * share, hw[0] * hw[1]
    turns = vp.angles(vp.coordinates(Grid(*hw)), vp.axial_freqs(turned, dtype=torch.float64))
    x = torch.randn(1, 1, prefix + n, turned + rest, dtype=torch.float64)
    out = Rotation.of(turns, pairing).apply(x, prefix=prefix)
    expected = oracle.rotate(x[0, 0].numpy(), turns.numpy(), pairing, prefix=prefix)
    assert_close_to(out[0, 0], torch.from_numpy(expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_reference_dtypes(pairing, dtype):
    """Halves are rotated in float32 and rounded once, at the end."""
    rotation = turn(Grid(3, 5), 16, pairing)
    x = torch.randn(1, 1, 15, 16).to(dtype)
    exact = vp.angles(vp.coordinates(Grid(3, 5)).double(), vp.axial_freqs(16, dtype=torch.float64))
    expected = oracle.rotate(x[0, 0].double().numpy(), exact.numpy(), pairing)
    out = rotation.apply(x)[0, 0]
    assert_close_to(out, torch.from_numpy(expected))
    assert torch.equal(out, rotation.apply(x.float())[0, 0].to(dtype))


@given(grids(max_side=6), st.sampled_from(PAIRINGS), seeds())
def test_invariant_orthogonal(hw, pairing, seed):
    """Facts 5.14: the map of a token is orthogonal. Repeated angles with a half split, the usual bug, are not."""
    draw = torch.Generator().manual_seed(seed)
    turns = 3 * torch.randn(hw[0] * hw[1], 4, dtype=torch.float64, generator=draw)
    basis = torch.eye(8, dtype=torch.float64).unsqueeze(-2).expand(8, len(turns), 8)
    maps = Rotation.of(turns, pairing).apply(basis[None])[0].transpose(0, 1)  # [n, 8, 8]
    eye = torch.eye(8, dtype=torch.float64).expand_as(maps)
    torch.testing.assert_close(maps @ maps.mT, eye, rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.linalg.det(maps), eye[:, 0, 0], rtol=0, atol=1e-12)


def test_invariant_full_width_follows_the_pairing():
    """ "half" repeats the block of pairs, "adjacent" every element; mixing the two is no rotation (facts 5.14)."""
    turns = torch.tensor([[0.1, 0.2]])
    half, adjacent = (Rotation.of(turns, pairing).full_width()[1] for pairing in PAIRINGS)
    torch.testing.assert_close(half, torch.tensor([[0.1, 0.2, 0.1, 0.2]]).sin())
    torch.testing.assert_close(adjacent, torch.tensor([[0.1, 0.1, 0.2, 0.2]]).sin())


@given(grids(max_side=6), shifts(), st.sampled_from(PAIRINGS), seeds())
def test_invariant_shift(hw, shift, pairing, seed):
    """q.k after rotation depends on coordinate differences alone, on any rectangle and for any frequencies."""
    draw = torch.Generator().manual_seed(seed)
    coords = vp.coordinates(Grid(*hw)).double()
    freqs = torch.randn(2, 4, dtype=torch.float64, generator=draw)
    q, k = torch.randn(2, 1, 1, len(coords), 8, dtype=torch.float64, generator=draw)
    here = scores(*vp.rotate(q, k, Rotation.of(vp.angles(coords, freqs), pairing)))
    moved = coords + torch.tensor(shift)
    there = scores(*vp.rotate(q, k, Rotation.of(vp.angles(moved, freqs), pairing)))
    torch.testing.assert_close(here, there, rtol=1e-10, atol=1e-10)


@given(grids(max_side=6), st.sampled_from(PAIRINGS))
def test_invariant_transpose(hw, pairing):
    """Turning the picture swaps the axes: scores of the turned grid are those of the axes swapped."""
    turned = (hw[1], hw[0])
    q, k = torch.randn(2, 1, 1, hw[0] * hw[1], 16, dtype=torch.float64)
    upright = scores(*vp.rotate(q, k, turn(Grid(*hw), 16, pairing, dtype=torch.float64)))
    order = torch.arange(hw[0] * hw[1]).unflatten(0, hw).T.flatten()  # old index of every new token
    freqs = vp.axial_freqs(16, dtype=torch.float64).flip(0)  # y and x trade their frequencies
    turns = vp.angles(vp.coordinates(Grid(*turned)), freqs)
    lying = scores(*vp.rotate(q[..., order, :], k[..., order, :], Rotation.of(turns, pairing)))
    torch.testing.assert_close(lying, upright[..., order, :][..., order], rtol=1e-10, atol=1e-10)


@given(grids(max_side=7), st.integers(1, 5), st.sampled_from(PAIRINGS))
def test_invariant_prefix(hw, prefix, pairing):
    """Prefix tokens stand FIRST and do not turn (facts 5.16: a zero angle at the end turned the class token)."""
    rotation, n = turn(Grid(*hw), 8, pairing), hw[0] * hw[1]
    x = torch.randn(1, 2, prefix + n, 8)
    out = rotation.apply(x, prefix=prefix)
    assert torch.equal(out[..., :prefix, :], x[..., :prefix, :])
    assert torch.equal(out[..., prefix:, :], rotation.apply(x[..., prefix:, :]))
    last = rotation.apply(x, suffix=prefix)  # Llama 4's class token, SAM 2's object pointers
    assert torch.equal(last[..., n:, :], x[..., n:, :])
    assert torch.equal(last[..., :n, :], rotation.apply(x[..., :n, :]))


def test_invariant_shift_moves_prefix_logits_alone():
    """facts/timm.md 1.4: shift_coords changes prefix-patch logits and no patch-patch logit."""
    coords, freqs = vp.coordinates(Grid(3, 5)), vp.axial_freqs(16)
    q, k = torch.randn(2, 1, 1, 16, 16)
    plain, moved = (
        scores(*vp.rotate(q, k, Rotation.of(vp.angles(coords + by, freqs)), prefix=1))[0, 0]
        for by in (0.0, 0.7)
    )
    assert (plain - moved)[1:, 1:].abs().max() < 1.5e-5
    assert (plain - moved)[0, 1:].abs().max() > 0.1


@given(grids(max_side=6), seeds(), st.sampled_from(PAIRINGS))
def test_invariant_token_order(hw, seed, pairing):
    """select() keeps tokens in any order: rotating then picking is picking then rotating (patch dropout)."""
    rotation, n = turn(Grid(*hw), 8, pairing), hw[0] * hw[1]
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 3, n, 8, generator=draw)
    kept = torch.stack([torch.randperm(n, generator=draw)[: 1 + n // 2] for _ in range(2)])
    picked = torch.stack([x[b][:, kept[b]] for b in range(2)])
    whole = rotation.apply(x)
    expected = torch.stack([whole[b][:, kept[b]] for b in range(2)])
    assert torch.equal(rotation.select(kept).apply(picked), expected)
    assert torch.equal(rotation.select(kept[0]).apply(x[:, :, kept[0]]), whole[:, :, kept[0]])


def test_invariant_zero_angles_change_nothing():
    """Strength 0: the very bits come back, halves included."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.randn(2, 3, 15, 8).to(dtype)
        for pairing in PAIRINGS:
            assert torch.equal(Rotation.of(torch.zeros(15, 4), pairing).apply(x), x)


def test_invariant_scale():
    """scale multiplies the norm (YaRN's attention factor) and not the angle."""
    turns, x = torch.randn(15, 4), torch.randn(1, 1, 15, 8)
    torch.testing.assert_close(
        Rotation.of(turns, scale=1.25).apply(x), 1.25 * Rotation.of(turns).apply(x)
    )


def test_invariant_inputs_are_not_written():
    q, k = torch.randn(2, 1, 3, 16, 10)
    kept, rotation = (q.clone(), k.clone()), turn(Grid(3, 5), 8, "adjacent")
    cos = rotation.cos.clone()
    out_q, out_k = vp.rotate(q, k, rotation, prefix=1)
    out_q.zero_()
    out_k.zero_()
    assert torch.equal(q, kept[0])
    assert torch.equal(k, kept[1])
    assert torch.equal(rotation.cos, cos)


def test_invariant_copies():
    """A Rotation is a value: it deep-copies and pickles, and holds half-width tables."""
    rotation = turn(Grid(3, 5), 8, "adjacent")
    for other in (copy.deepcopy(rotation), pickle.loads(pickle.dumps(rotation))):
        assert other.pairing == "adjacent"
        assert torch.equal(other.cos, rotation.cos)
        assert other.cos.data_ptr() != rotation.cos.data_ptr()


def test_error_pairing():
    with pytest.raises(
        PositionError, match=r"pairing is 'interleaved'; it must be 'half' or 'adjacent'"
    ):
        Rotation.of(torch.zeros(3, 4), "interleaved")


@pytest.mark.parametrize(("cos", "sin"), [((3, 4), (3, 5)), ((4,), (4,)), ((3, 4), (2, 3, 4))])
def test_error_tables(cos, sin):
    with pytest.raises(PositionError, match=r"cos has shape \(.*sin \(.*Rotation\.of\(angles\)"):
        Rotation(torch.zeros(cos), torch.zeros(sin))


def test_error_tokens():
    """The message counts tokens, rotation and prefix, and says where they come from."""
    rotation = turn(Grid(3, 5), 8, "half")
    match = r"x has 17 tokens, the rotation 15 and prefix \+ suffix is 1;.*select\(\)"
    with pytest.raises(PositionError, match=match):
        rotation.apply(torch.zeros(1, 1, 17, 8), prefix=1)
    with pytest.raises(PositionError, match=r"x has 17 tokens"):
        vp.rotate(torch.zeros(1, 1, 17, 8), torch.zeros(1, 1, 17, 8), rotation, prefix=1)


def test_error_channels():
    with pytest.raises(
        PositionError, match=r"x has 6 channels a head and the rotation turns 8;.*head_dim"
    ):
        turn(Grid(3, 5), 8, "half").apply(torch.zeros(1, 1, 15, 6))


@pytest.mark.parametrize(("prefix", "suffix"), [(-1, 0), (0, -2)])
def test_error_prefix(prefix, suffix):
    with pytest.raises(
        PositionError, match=rf"prefix is {prefix} and suffix {suffix};.*at least 0"
    ):
        turn(Grid(3, 5), 8, "half").padded(prefix, suffix)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_gradient_of_rotate(pairing):
    """The gradient reaches x and, for learned frequencies, the angles; prefix and free channels included."""
    turns = torch.randn(2, 6, 2, dtype=torch.float64, requires_grad=True)
    x = torch.randn(1, 2, 7, 5, dtype=torch.float64, requires_grad=True)

    def run(turns, x):
        return Rotation.of(turns, pairing).apply(x, prefix=1)

    assert torch.autograd.gradcheck(run, (turns, x))


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("prefix", [0, 1])
def test_compile_one_graph_over_six_sizes(pairing, prefix):
    """From grid to rotated q and k in one graph, for all rectangles."""
    freqs = vp.axial_freqs(24)

    def run(q, k, height, width, rotate=vp.rotate):
        turns = vp.angles(vp.coordinates(Grid(height, width)), freqs)
        return rotate(q, k, Rotation.of(turns, pairing), prefix=prefix)

    calls = [(*torch.randn(2, 2, 3, h * w + prefix, 24), h, w) for h, w in SIZES]
    assert graphs_of(run, calls, partial(run, rotate=plain_rotate)) == 1


def test_compile_takes_a_rotation():
    """A Rotation is an argument that a graph can take: the caller holds the result, no hidden cache."""

    def run(q, k, rotation, rotate=vp.rotate):
        return rotate(q, k, rotation, prefix=1)

    calls = [(*torch.randn(2, 2, 3, h * w + 1, 24), turn(Grid(h, w), 24, "half")) for h, w in SIZES]
    assert graphs_of(run, calls, partial(run, rotate=plain_rotate)) == 1


def test_compile_backward():
    """AOTAutograd traces the backward too; its gradients are the eager ones."""
    rotation = turn(Grid(3, 5), 8, "half")
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: rotation.apply(x, prefix=1), backend="aot_eager", fullgraph=True
    )
    x = torch.randn(1, 2, 16, 8, requires_grad=True)
    weight = torch.randn(1, 2, 16, 8)
    gradients = [
        torch.autograd.grad((run(x) * weight).sum(), x)[0]
        for run in (compiled, lambda x: rotation.apply(x, prefix=1))
    ]
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


def test_device(device):
    rotation = turn(Grid(3, 5), 8, "adjacent")
    there = Rotation(rotation.cos.to(device), rotation.sin.to(device), "adjacent")
    x = torch.randn(2, 3, 16, 8)
    out = there.apply(x.to(device), prefix=1)
    torch.testing.assert_close(out.cpu(), rotation.apply(x, prefix=1))
    kept = torch.tensor([[3, 1], [0, 14]])
    assert there.select(kept.to(device)).cos.device.type == device.type


def test_device_fake_cuda():
    """DESIGN.md 7: from coordinates to rotated and selected tokens, nothing is built on another device."""
    cuda = torch.device("cuda", 0)
    with FakeTensorMode():
        freqs = vp.axial_freqs(8, bands="dealt", axis_order=(1, 0), device=cuda)
        turns = vp.angles(vp.coordinates(Grid(3, 5), device=cuda), freqs)
        rotation = Rotation.of(turns, "adjacent", scale=1.1)
        q = torch.empty(2, 3, 17, 8, device=cuda, dtype=torch.bfloat16)
        assert all(x.device == cuda for x in vp.rotate(q, q, rotation, prefix=1, suffix=1))
        assert rotation.select(torch.zeros(2, 4, dtype=torch.int64, device=cuda)).sin.device == cuda
        assert vp.convert(q[0, 0, :16], vp.Layout(head_dim=8), vp.Layout(head_dim=8)).device == cuda


def test_reference_half_precision_tables():
    """apply() promises float32 or better, whatever the dtypes of its parts."""
    rotation = turn(Grid(3, 5), 8, "half")
    halves = Rotation(rotation.cos.bfloat16(), rotation.sin.bfloat16(), "half")
    wide = Rotation(halves.cos.float(), halves.sin.float(), "half")
    x = torch.randn(1, 1, 15, 8).bfloat16()
    assert torch.equal(halves.apply(x), wide.apply(x))


@pytest.mark.parametrize(
    ("cos", "sin", "words"),
    [
        (torch.zeros(3, 4, dtype=torch.int64), torch.zeros(3, 4), "cos is torch.int64"),
        (torch.zeros(3, 4), torch.zeros(3, 4, dtype=torch.complex64), "sin is torch.complex64"),
        (1, 2, "cos is int"),
        (torch.zeros(3, 4), torch.zeros(3, 4, device="meta"), "one device"),
    ],
)
def test_error_names_tables_that_are_none(cos: Any, sin: Any, words: str) -> None:
    with pytest.raises(PositionError, match=words):
        Rotation(cos, sin)


def test_tables_of_one_numpy_array_are_joined_by_a_copy() -> None:
    parts = np.random.default_rng(0).random((3, 4, 2)).astype(np.float32)
    cos, sin = torch.from_numpy(parts[..., 0]), torch.from_numpy(parts[..., 1])
    assert torch.equal(torch.view_as_real(joined(cos, sin)), torch.from_numpy(parts))
    turns = torch.complex(cos, sin).conj()
    assert torch.equal(joined(turns.real, turns.imag).imag, -sin)
