"""Turns of whole blocks and of planes in another basis."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import visionpos as vp
from tests.reference import turning as oracle
from tests.strategies import seeds
from tests.tolerances import assert_close_to
from visionpos import PositionError, Rotation
from visionpos.geometry import BasisTurn, BlockTurn
from visionpos.geometry.blocks import cayley, exponential, real_fourier_basis, skew


def rotations(*shape: int, size: int, seed: int = 0) -> torch.Tensor:
    """Random rotation matrices, float64."""
    draw = torch.Generator().manual_seed(seed)
    entries = torch.randn(*shape, size * (size - 1) // 2, dtype=torch.float64, generator=draw)
    return exponential(skew(entries, size))


def basis_turn(n: int = 5, heads: int = 2, dim: int = 6, seed: int = 0) -> BasisTurn:
    draw = torch.Generator().manual_seed(seed)
    entries = torch.randn(heads, dim * (dim - 1) // 2, dtype=torch.float64, generator=draw)
    turns = torch.randn(heads, n, dim // 2, dtype=torch.float64, generator=draw)
    return BasisTurn(Rotation.of(turns, "adjacent"), cayley(skew(entries, dim)))


@pytest.mark.parametrize("lead", [(), (2,), (3, 1), (3, 2)])
def test_shape_of_leading_sizes(lead):
    """One turn for all, one a head, one a sample, one a sample and head; other channels pass through."""
    turn = BlockTurn(rotations(*lead, 5, 2, size=3).float())
    x = torch.randn(3, 2, 5, 8)
    out = turn.apply(x)
    assert out.shape == x.shape
    assert torch.equal(out[..., 6:], x[..., 6:])
    assert not torch.equal(out[..., :6], x[..., :6])


@given(st.integers(2, 9), seeds())
def test_reference_skew_and_exponential(size, seed):
    entries = np.random.default_rng(seed).normal(size=size * (size - 1) // 2)
    matrix = skew(torch.from_numpy(entries), size)
    assert torch.equal(matrix, torch.from_numpy(oracle.skew_of(entries, size)))
    assert torch.equal(matrix, -matrix.mT)
    expected = torch.from_numpy(oracle.expm(matrix.numpy()))
    torch.testing.assert_close(
        exponential(matrix), expected, rtol=0, atol=1e-9
    )  # torch stops at 5e-11


@given(st.integers(2, 8), seeds())
def test_reference_cayley(size, seed):
    entries = np.random.default_rng(seed).normal(size=size * (size - 1) // 2)
    basis = cayley(skew(torch.from_numpy(entries), size))
    expected = torch.from_numpy(oracle.cayley_basis(entries, size))
    torch.testing.assert_close(basis, expected, rtol=0, atol=1e-11)
    torch.testing.assert_close(basis @ basis.T, torch.eye(size).double(), rtol=0, atol=1e-12)


@given(st.integers(1, 17), st.integers(1, 3))
def test_reference_fourier_basis(block, blocks):
    """Orthonormal; column 2k of a block is a cosine of k + 1 cycles."""
    basis = real_fourier_basis(block, blocks)
    eye = torch.eye(block * blocks, dtype=torch.float64)
    torch.testing.assert_close(basis.T @ basis, eye, rtol=0, atol=1e-12)
    for m in range((block - 1) // 2):
        wave = np.cos(2 * np.pi * (m + 1) * np.arange(block) / block) * np.sqrt(2 / block)
        torch.testing.assert_close(basis[:block, 2 * m], torch.from_numpy(wave), rtol=0, atol=1e-12)


@given(seeds())
def test_reference_block_apply(seed):
    """Every token, head and block by its own matrix product."""
    matrices = rotations(2, 4, 3, size=5, seed=seed)
    x = torch.randn(2, 2, 6, 16, dtype=torch.float64)
    out = BlockTurn(matrices).apply(x, prefix=1, suffix=1)
    expected = x.clone()
    for head in range(2):
        for n in range(4):
            for j in range(3):
                part = slice(5 * j, 5 * j + 5)
                expected[:, head, n + 1, part] = x[:, head, n + 1, part] @ matrices[head, n, j].T
    assert_close_to(out, expected)


@given(seeds())
def test_reference_basis_apply(seed):
    """basis R basis^T, as dense matrices."""
    turn = basis_turn(seed=seed)
    x = torch.randn(1, 2, 5, 6, dtype=torch.float64)
    out = turn.apply(x)
    for head in range(2):
        for n in range(5):
            inside = torch.eye(6, dtype=torch.float64)
            inside = (
                turn.rotation.select(torch.tensor([n]))
                .apply(inside[:, None, None].expand(6, 2, 1, 6))[:, head, 0]
                .T
            )
            dense = turn.basis[head] @ inside @ turn.basis[head].T
            torch.testing.assert_close(out[0, head, n], dense @ x[0, head, n], rtol=0, atol=1e-12)


@pytest.mark.parametrize("turn", [BlockTurn(rotations(2, 5, 2, size=3)), basis_turn()])
def test_invariant_exempt_tokens_and_norms(turn):
    """Prefix and suffix keep every bit; norms are kept; padded() is the same as prefix= and suffix=."""
    x = torch.randn(1, 2, 8, 6, dtype=torch.float64)
    out = turn.apply(x, prefix=2, suffix=1)
    assert torch.equal(out[..., :2, :], x[..., :2, :])
    assert torch.equal(out[..., -1:, :], x[..., -1:, :])
    torch.testing.assert_close(out.norm(dim=-1), x.norm(dim=-1), rtol=1e-12, atol=0)
    torch.testing.assert_close(turn.padded(2, 1).apply(x), out, rtol=0, atol=1e-12)
    assert turn.padded() is turn or turn.padded().n == turn.n
    kept = torch.tensor([3, 0])
    some = turn.select(kept)
    assert some.n == 2
    torch.testing.assert_close(some.apply(x[..., kept, :]), turn.apply(x[..., :5, :])[..., kept, :])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_invariant_half_precision_inputs(dtype):
    """The arithmetic runs in float32, rounded once at the end; autocast changes nothing."""
    x = torch.randn(2, 2, 5, 6)
    for turn in (
        BlockTurn(rotations(2, 5, 2, size=3).float()),
        BasisTurn(basis_turn().rotation, basis_turn().basis.float()),
    ):
        exact = turn.apply(x.to(dtype).float())
        assert_close_to(turn.apply(x.to(dtype)), exact)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(turn.apply(x), turn.apply(x.clone()))
            inside = turn.apply(x)
        torch.testing.assert_close(inside, turn.apply(x), rtol=0, atol=0)


def test_invariant_rotate_takes_them():
    """The face of a Rotation: vp.rotate turns q and k by either."""
    q, k = torch.randn(2, 1, 2, 6, 6)
    turn = BlockTurn(rotations(2, 5, 2, size=3).float())
    a, b = vp.rotate(q, k, turn, prefix=1)
    torch.testing.assert_close(a, turn.apply(q, prefix=1), rtol=0, atol=1e-6)
    torch.testing.assert_close(b, turn.apply(k, prefix=1), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: skew(torch.zeros(4), 3), r"entries are 4 for size 3;.*its 3 entries"),
        (lambda: skew(torch.zeros(0), 1), r"size 1; a size of at least 2"),
        (lambda: BlockTurn(torch.zeros(5, 3, 3)), r"matrices have shape \(5, 3, 3\)"),
        (lambda: BlockTurn(torch.zeros(5, 2, 3, 4)), r"\(5, 2, 3, 4\)"),
        (
            lambda: BlockTurn(torch.zeros(5, 2, 3, 3)).apply(torch.zeros(1, 1, 7, 6), prefix=1),
            r"x has 7 tokens, the turn 5 and prefix \+ suffix is 1",
        ),
        (
            lambda: BlockTurn(torch.zeros(5, 2, 3, 3)).apply(torch.zeros(1, 1, 5, 4)),
            r"x has 4 channels a head and the turn takes 6",
        ),
        (lambda: basis_turn().apply(torch.zeros(1, 2, 5, 4)), r"x has 4 channels"),
        (lambda: basis_turn().apply(torch.zeros(1, 2, 5, 6), prefix=-1), r"prefix is -1"),
        (lambda: BlockTurn(torch.zeros(5, 2, 3, 3)).padded(suffix=-2), r"suffix -2"),
    ],
)
def test_error(call, match):
    with pytest.raises(PositionError, match=match):
        call()


def test_gradient_of_apply():
    entries = torch.randn(1, 2, 1, 3, dtype=torch.float64, requires_grad=True)
    x = torch.randn(1, 1, 2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda e, x: BlockTurn(exponential(skew(e, 3))).apply(x), (entries, x)
    )
    flat = torch.randn(1, 6, dtype=torch.float64, requires_grad=True)
    rotation = Rotation.of(torch.randn(2, 2, dtype=torch.float64), "adjacent")
    y = torch.randn(1, 1, 2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda e, y: BasisTurn(rotation, cayley(skew(e, 4))).apply(y), (flat, y)
    )


def test_device(device):
    turn = BlockTurn(rotations(2, 5, 2, size=3).float().to(device))
    x = torch.randn(1, 2, 5, 6)
    there = turn.apply(x.to(device))
    assert there.device.type == device.type
    expected = BlockTurn(turn.matrices.cpu()).apply(x)
    torch.testing.assert_close(there.cpu(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lead", [(), (2,), (3, 1), (1, 2), (3, 2)])
def test_select_a_choice_a_sample(lead):
    """[b, kept]: turning then picking is picking then turning, as for a Rotation (patch dropout)."""
    turn = BlockTurn(rotations(*lead, 5, 2, size=3).float())
    x = torch.randn(3, 2, 5, 6)
    kept = torch.tensor([[4, 0], [1, 1], [2, 3]])
    whole = turn.apply(x)
    picked, expected = (torch.stack([part[b][:, kept[b]] for b in range(3)]) for part in (x, whole))
    some = turn.select(kept)
    assert some.matrices.shape[0] == 3
    assert some.n == 2
    assert_close_to(some.apply(picked), expected)
    assert torch.equal(turn.select(kept.int()).matrices, some.matrices)


TURNS = {
    "rotation": Rotation.of(torch.randn(3, 2, 5, 4)),
    "block": BlockTurn(rotations(3, 2, 5, 2, size=3)),
    "basis": basis_turn(),
}


@pytest.mark.parametrize("name", TURNS)
@pytest.mark.parametrize(
    ("indices", "match"),
    [
        (
            torch.tensor(1),
            r"indices are torch\.int64 of shape \(\); int64 \[kept\], or \[b, kept\]",
        ),
        (torch.zeros(1, 2, 3, dtype=torch.int64), r"of shape \(1, 2, 3\)"),
        (torch.zeros(3), r"indices are torch\.float32 of shape \(3,\)"),
        (torch.ones(5, dtype=torch.bool), r"indices are torch\.bool .*mask\.nonzero\(\)"),
        (torch.tensor([0, 5]), r"indices reach from 0 to 5 and the turn has 5 tokens"),
        (torch.tensor([[0], [-1], [0]]), r"indices reach from -1 to 0 and the turn has 5"),
    ],
)
def test_error_select(name, indices, match):
    with pytest.raises(PositionError, match=match):
        TURNS[name].select(indices)


@pytest.mark.parametrize("name", ["rotation", "block"])
def test_error_select_another_batch(name):
    with pytest.raises(
        PositionError, match=r"indices have shape \(2, 1\) .*leading sizes \(3, 2\)"
    ):
        TURNS[name].select(torch.zeros(2, 1, dtype=torch.int64))
