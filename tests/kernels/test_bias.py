"""expand: every pair reads its difference's number, every number gets the gradients of its pairs, and nothing else."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.reference import bias as oracle
from tests.strategies import grids, seeds, volumes
from tests.tolerances import assert_close_to
from visionpos import Grid
from visionpos.kernels import bias as kernel
from visionpos.kernels.bias import expand

SIDES = [(3, 5), (5, 3), (1, 7), (7, 1), (1, 1), (13, 11), (2, 3, 4), (3, 1, 2), (2, 1, 1)]
FEW = settings(max_examples=25)


@pytest.fixture(params=["few", "many"])
def stretches(request, monkeypatch):
    """Stretches at every size, with the gradient by one padded sum, or row by row: as for few and for many numbers."""
    monkeypatch.setattr(kernel, "_LEARNS", 0)
    monkeypatch.setattr(kernel, "_STANDS", 0)
    few = 10**9 if request.param == "few" else 0
    monkeypatch.setattr(kernel, "_FEW", {"cpu": few, "cuda": few})


def grid_of(sides: tuple[int, ...]) -> Grid:
    return Grid(*sides) if len(sides) == 2 else Grid(*sides[1:], frames=sides[0])


def drawn(sides: tuple[int, ...], heads: int = 3, dtype: torch.dtype = torch.float64):
    """Return `[heads, distinct]` and `[heads, 3]`."""
    distinct = int(np.prod([2 * side - 1 for side in sides]))
    return torch.randn(heads, distinct).to(dtype), torch.randn(heads, 3).to(dtype)


def looped(table: Tensor, own: Tensor, sides: tuple[int, ...], prefix: int) -> np.ndarray:
    """Return the pairs, one after the other."""
    lattice = table.double().numpy().reshape(-1, *(2 * side - 1 for side in sides))

    def one(d: oracle.Cell) -> np.ndarray:
        place = tuple(part + side - 1 for part, side in zip(d, sides, strict=True))
        return lattice[(slice(None), *place)]

    return oracle.framed(oracle.pairs(sides, one), own.double().numpy(), prefix)


def summed(grad: np.ndarray, sides: tuple[int, ...], prefix: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the gradients of table and own numbers, pair after pair, in float64."""
    heads, cells = grad.shape[0], oracle.cells(*sides)
    lattice, own = np.zeros((heads, *(2 * side - 1 for side in sides))), np.zeros((heads, 3))
    for i, j in product(range(grad.shape[1]), repeat=2):
        if i < prefix or j < prefix:
            own[:, 2 if max(i, j) < prefix else int(j < prefix)] += grad[:, i, j]
            continue
        query, key = cells[i - prefix], cells[j - prefix]
        place = tuple(q - k + s - 1 for q, k, s in zip(query, key, sides, strict=True))
        lattice[(slice(None), *place)] += grad[:, i, j]
    return lattice.reshape(heads, -1), own


@pytest.mark.parametrize("prefix", [0, 1, 5])
@pytest.mark.parametrize("sides", SIDES)
def test_reference_pairs(sides, prefix, stretches):
    """Copies, so equal to the bit, contiguous, in every dtype, from a table of any strides."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        table, own = drawn(sides, dtype=dtype)
        target = torch.from_numpy(looped(table, own, sides, prefix))
        strided = torch.stack([table, table], dim=-1)[..., 1]
        for given_ in (table, table.mT.contiguous().mT, strided):
            out = expand(given_, own, grid_of(sides), prefix)
            assert out.is_contiguous()
            assert out.dtype == dtype
            torch.testing.assert_close(out.double(), target, rtol=0, atol=0)


@FEW
@given(volumes(max_side=5, max_frames=3), seeds())
def test_reference_index_and_stretches(sides, seed):
    """At sizes where the forms change over, by an index or by stretches: the same numbers."""
    torch.manual_seed(seed)
    sides = sides if sides[0] > 1 else sides[1:]
    table, own = drawn(sides, heads=40)
    grid = grid_of(sides)
    target = torch.from_numpy(looped(table[:2], own[:2], sides, 1))
    for out in (expand(table, own, grid, 1), kernel._indexed(table, own, grid, 1)):
        torch.testing.assert_close(out[:2], target, rtol=0, atol=0)


@pytest.mark.parametrize("sides", [(16, 24), (41, 3), (1, 150), (97, 1), (2, 8, 12)])
def test_reference_above_the_threshold(sides):
    """Sizes that take stretches by themselves: the numbers of the index, whose law the loops hold."""
    table, own = drawn(sides, heads=24, dtype=torch.float32)
    grid = grid_of(sides)
    assert 24 * grid.size**2 > kernel._LEARNS
    table.requires_grad_()
    out, index = expand(table, own, grid), kernel._indexed(table, own, grid, 0)
    assert torch.equal(out, index)
    grad = torch.randn_like(index)
    wide = table.detach().double().requires_grad_()
    (target,) = torch.autograd.grad(
        kernel._indexed(wide, own.double(), grid, 0), wide, grad.double()
    )
    ours, theirs = (torch.autograd.grad(x, table, grad)[0].double() for x in (out, index))
    # Sums over an axis, then over the other, round less than one running sum over all pairs.
    assert (ours - target).norm() <= 1.05 * (theirs - target).norm()
    assert (ours - target).abs().max() < 1e-6 * grid.size


@pytest.mark.parametrize("prefix", [0, 1, 5])
@pytest.mark.parametrize("sides", SIDES)
def test_gradient_is_the_sum_over_pairs(sides, prefix, stretches):
    """Float64 loops, for gradients of any strides: transposed, expanded from one number, cut out of a larger one."""
    table, own = (x.requires_grad_() for x in drawn(sides))
    m = prefix + grid_of(sides).size
    plain = torch.randn(3, m, m, dtype=torch.float64)
    strided = torch.randn(3, m + 1, m + 3, dtype=torch.float64)[:, 1:, 2:-1]
    for grad in (plain, plain.mT, strided, torch.ones((), dtype=torch.float64).expand(3, m, m)):
        found = torch.autograd.grad(expand(table, own, grid_of(sides), prefix), (table, own), grad)
        for ours, target in zip(found, summed(grad.numpy(), sides, prefix), strict=True):
            assert_close_to(ours, torch.from_numpy(target))


@FEW
@given(grids(max_side=7), seeds())
def test_gradient_in_half_precision(hw, seed):
    """Half precision is summed in float32 and rounded once, at every size."""
    torch.manual_seed(seed)
    table, own = (x.requires_grad_() for x in drawn(hw, dtype=torch.bfloat16))
    m = 1 + hw[0] * hw[1]
    grad = torch.randn(3, m, m).bfloat16()
    found = torch.autograd.grad(expand(table, own, grid_of(hw), 1), (table, own), grad)
    for ours, target in zip(found, summed(grad.double().numpy(), hw, 1), strict=True):
        assert ours.dtype == torch.bfloat16
        assert_close_to(ours, torch.from_numpy(target).float())


# torch compiles its own rules of forward derivatives with a part of itself that it has deprecated.
@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")
@pytest.mark.parametrize("sides", [(2, 3), (3, 1), (2, 2, 1)])
def test_gradient_check(sides, stretches):
    """Backward, forward and second derivatives, also where only one of the two learns."""
    table, own = (x.requires_grad_() for x in drawn(sides, heads=2))

    def run(table: Tensor, own: Tensor) -> Tensor:
        return expand(table, own, grid_of(sides), 2)

    assert torch.autograd.gradcheck(run, (table, own), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(run, (table, own))
    assert torch.autograd.gradcheck(run, (table, own.detach()), check_forward_ad=True)
    assert torch.autograd.gradcheck(run, (table.detach(), own), check_forward_ad=True)


def test_gradient_keeps_nothing(stretches):
    """Nothing is held between forward and backward: the map is linear."""
    held: list[Tensor] = []
    table, own = (x.requires_grad_() for x in drawn((5, 3)))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: held.append(x) or x, lambda x: x):
        expand(table, own, Grid(5, 3), 1)
    assert held == []


@pytest.mark.parametrize("prefix", [0, 2])
def test_memory_is_written_in_full(prefix, stretches):
    """Fresh memory is filled with NaN by torch: none is left, in the result or in its gradient."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        assert torch.empty(3).isnan().all()
        table, own = (x.requires_grad_() for x in drawn((4, 7)))
        out = expand(table, own, Grid(4, 7), prefix)
        out.sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = before
    assert out.isfinite().all()
    assert table.grad.isfinite().all()
    assert own.grad.isfinite().all()


def test_invariant_inputs_stay(stretches):
    table, own = drawn((4, 7))
    kept = table.clone(), own.clone()
    out = expand(table, own, Grid(4, 7), 1)
    out.zero_()
    assert torch.equal(table, kept[0])
    assert torch.equal(own, kept[1])


@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")
def test_invariant_other_interpreters(stretches):
    """Under vmap, torch.func, tracing and fake tensors: the same numbers, no strides of a form that is not there."""
    grid, (table, own) = Grid(4, 5), drawn((4, 5))
    plain = expand(table, own, grid, 1)
    batched = torch.vmap(lambda t: expand(t, own, grid, 1))(torch.stack([table, 2 * table]))
    assert torch.equal(batched[0], plain)
    pulled = torch.func.grad(lambda t: expand(t, own, grid, 1).square().sum())(table)
    leaf = table.clone().requires_grad_()
    expand(leaf, own, grid, 1).square().sum().backward()
    assert_close_to(pulled, leaf.grad)
    traced = torch.jit.trace(lambda t: expand(t, own, grid, 1), (table,))
    assert torch.equal(traced(3 * table), expand(3 * table, own, grid, 1))
    with FakeTensorMode() as mode:
        faked = expand(mode.from_tensor(table), mode.from_tensor(own), grid, 1)
    assert faked.shape == plain.shape


@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize("first", ["inference mode", "fake tensors", "func", "plain"])
def test_invariant_kept_index(first, prefix):
    """An index is made once: whatever mode the first call was in, later calls learn, with the numbers of the loops."""
    sides = (3, 7)
    table, own = drawn(sides)
    kernel._kept_index.cache_clear()
    if first == "inference mode":
        with torch.inference_mode():
            expand(table, own, Grid(*sides), prefix)
    elif first == "fake tensors":
        with FakeTensorMode(allow_non_fake_inputs=True):
            expand(table, own, Grid(*sides), prefix)
    elif first == "func":
        torch.func.grad(lambda t: expand(t, own, Grid(*sides), prefix).sum())(table)
    for _ in range(2):
        leaf, free = table.clone().requires_grad_(), own.clone().requires_grad_()
        out = expand(leaf, free, Grid(*sides), prefix)
        wanted = torch.from_numpy(looped(table, own, sides, prefix))
        torch.testing.assert_close(out.detach().double(), wanted, rtol=0, atol=0)
        grad = torch.randn_like(out)
        found = torch.autograd.grad(out, (leaf, free), grad, allow_unused=not prefix)
        targets = summed(grad.double().numpy(), sides, prefix)
        assert_close_to(found[0], torch.from_numpy(targets[0]).to(found[0].dtype))
        if prefix:
            assert_close_to(found[1], torch.from_numpy(targets[1]).to(found[1].dtype))


def test_device_same_sum_at_every_call(device):
    """One order of summation, wherever it runs: two gradients are equal to the bit."""
    table, own = (x.to(device).requires_grad_() for x in drawn((14, 15), 8, torch.float32))
    grad = torch.randn(8, 211, 211).to(device)
    once, again = (
        torch.autograd.grad(expand(table, own, Grid(14, 15), 1), (table, own), grad)
        for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
    wide = table.detach().cpu().double().requires_grad_()
    pairs = kernel._indexed(wide, own.detach().cpu().double(), Grid(14, 15), 1)
    (target,) = torch.autograd.grad(pairs, wide, grad.cpu().double())
    assert_close_to(once[0], target)


@pytest.mark.parametrize("heads", [0, 1, 2])
@pytest.mark.parametrize("sides", [(1, 1), (1, 2), (2, 1), (1, 1, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("stretches")
def test_every_place_is_written(heads: int, sides: tuple[int, ...], dtype: torch.dtype) -> None:
    """One head and one cell behind a prefix were left as memory was found; no heads were an error of a view."""
    table, own = (part.to(dtype) for part in drawn(sides, heads))
    grid, prefix = grid_of(sides), 2
    tokens = [None] * prefix + list(np.ndindex(*sides))

    def number(query: tuple[int, ...] | None, key: tuple[int, ...] | None) -> Tensor:
        if query is None or key is None:
            return own[:, 0 if key is not None else 1 if query is not None else 2]
        place = 0
        for at, (a, b, side) in enumerate(zip(query, key, sides, strict=True)):
            place = place * (2 * sides[at] - 1) + a - b + side - 1
        return table[:, place]

    wanted = torch.stack([number(q, k) for q in tokens for k in tokens], -1)
    torch.use_deterministic_algorithms(True)  # new memory is filled with NaN
    try:
        assert torch.empty(1).isnan()
        assert torch.equal(expand(table, own, grid, prefix).flatten(1), wanted)
    finally:
        torch.use_deterministic_algorithms(False)
