"""Shaw: clipped rows, products before pairs, vectors of values, one table an axis."""

import numpy as np
import pytest
import torch

from tests.reference import pairs as oracle
from visionpos import Dims, Grid, PositionError
from visionpos.encodings import Shaw, ShawSpec
from visionpos.geometry.line import differences

DIMS = Dims(embed_dim=12, num_heads=3, depth=2)


def shaw(**fields) -> Shaw:
    return Shaw(
        ShawSpec(std=0.5, **fields), DIMS, generator=torch.Generator().manual_seed(0)
    ).double()


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_golden_rows():
    """Facts 1.2: 5 tokens, reach 2."""
    ids = torch.arange(5).unsqueeze(-1)
    rows = shaw(reach=(2,)).rows(differences(ids, ids))[..., 0]
    assert rows[0].tolist() == [2, 3, 4, 4, 4]
    assert rows[4].tolist() == [0, 0, 0, 1, 2]


@pytest.mark.parametrize(("n", "m"), [(5, 5), (1, 7), (3, 8), (1, 1), (9, 11)])
def test_reference_line(n, m):
    module, q = shaw(reach=(2,)), drawn(2, 3, n, 4)
    expected = oracle.shaw(q.numpy(), module.keys[0].detach().numpy(), 2, m) / 2.0  # sqrt(4)
    out = module(q, Grid(1, m))
    torch.testing.assert_close(out, torch.from_numpy(expected))


@pytest.mark.parametrize(("n", "m"), [(5, 5), (1, 7), (3, 8)])
def test_reference_values(n, m):
    module = shaw(reach=(2,))
    attention = drawn(2, 3, n, m).softmax(-1)
    expected = oracle.shaw_term(attention.numpy(), module.values[0].detach().numpy(), 2)
    torch.testing.assert_close(module.term(attention, Grid(1, m)), torch.from_numpy(expected))


@pytest.mark.parametrize("grid", [Grid(3, 5), Grid(1, 7), Grid(7, 1), Grid(2, 3, frames=2)])
def test_reference_axes(grid):
    """Each axis has a table of its own, and they add up."""
    axes = 3 if grid.frames > 1 else 2
    reach = (1, 2, 3)[-axes:]
    module, q = shaw(reach=reach), drawn(1, 3, grid.size, 4)
    out = module(q, grid)[0].detach()
    sides = grid.shape[-axes:]
    cells = list(np.ndindex(*sides))
    for i, query in enumerate(cells):
        for j, key in enumerate(cells):
            vector = sum(
                module.keys[a][int(np.clip(key[a] - query[a], -reach[a], reach[a])) + reach[a]]
                for a in range(axes)
            )
            torch.testing.assert_close(out[:, i, j], (q[0, :, i] * vector.detach()).sum(-1) / 2.0)


def test_invariant_beyond_the_reach_all_are_alike():
    module = shaw(reach=(2,))
    out = module(drawn(1, 3, 9, 4), Grid(1, 9))
    assert torch.equal(out[:, :, 8, 0], out[:, :, 8, 6])
    assert not torch.equal(out[:, :, 8, 6], out[:, :, 8, 7])


def test_gradient():
    module = shaw(reach=(2, 1))
    attention = drawn(1, 3, 6, 6).softmax(-1)

    def both(q, *tables):
        names = ("keys.0", "keys.1", "values.0", "values.1")
        held = dict(zip(names, tables, strict=True))
        return torch.func.functional_call(module, held, (q, Grid(2, 3))).sum() + sum(
            (attention.sum() * table).sum() for table in tables[2:]
        )

    parts = [p.detach().requires_grad_() for p in module.parameters()]
    assert torch.autograd.gradcheck(both, (drawn(1, 3, 6, 4).requires_grad_(), *parts))
    (
        module(drawn(1, 3, 6, 4), Grid(2, 3)).sum() + module.term(attention, Grid(2, 3)).sum()
    ).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in module.parameters())


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"reach": (0,)}, r"reach is \(0,\); 1 to 3 axes"),
        ({"reach": ()}, r"reach is \(\)"),
        ({"reach": (1, 2, 3, 4)}, r"reach is \(1, 2, 3, 4\)"),
        ({"std": -1.0}, r"std is -1\.0"),
    ],
)
def test_error_spec(fields, match):
    with pytest.raises(PositionError, match=match):
        ShawSpec(**fields)


def test_error_calls():
    module = shaw(reach=(2,))
    with pytest.raises(PositionError, match=r"q has shape \(1, 3, 6, 4\); \[b, 3, 1 to 5, 4\]"):
        module(drawn(1, 3, 6, 4), Grid(1, 5))
    with pytest.raises(PositionError, match="one lattice is required"):
        module(drawn(1, 3, 5, 4), Grid(1, 5), keys=Grid(1, 6))
    with pytest.raises(PositionError, match="has frames and reach"):
        shaw(reach=(2, 2))(drawn(1, 3, 12, 4), Grid(2, 3, frames=2))
    with pytest.raises(PositionError, match="values is False"):
        shaw(values=False).term(drawn(1, 3, 5, 5), Grid(1, 5))


def test_rows_of_odd_differences():
    """Differences beyond int64, and unsigned ones, share the outer rows or have their own as any other."""
    shaw = Shaw(ShawSpec(reach=(301,)), Dims(embed_dim=8, num_heads=2, depth=1))
    far = torch.tensor([[1e30], [-1e30]])
    assert shaw.rows(far).tolist() == [[0], [602]]
    assert shaw.rows(torch.tensor([[1]], dtype=torch.uint8)).tolist() == [[300]]
    assert shaw.rows(torch.tensor([[-2000.0]], dtype=torch.bfloat16)).tolist() == [[602]]
    with pytest.raises(PositionError, match="offsets has 2 axes"):
        shaw.rows(torch.zeros(3, 2))
    with pytest.raises(PositionError, match="offsets holds NaN"):
        shaw.rows(torch.tensor([[torch.nan]]))


def test_error_grid_that_is_none():
    shaw = Shaw(ShawSpec(reach=(2,)), Dims(embed_dim=8, num_heads=2, depth=1))
    with pytest.raises(PositionError, match=r"grid is \(1, 5\)"):
        shaw.term(torch.ones(1, 2, 5, 5), (1, 5))
    with pytest.raises(PositionError, match=r"grid is \(1, 5\)"):
        shaw.lookups(torch.ones(1, 2, 5, 4), (1, 5))
