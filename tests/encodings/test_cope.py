"""CoPE: counts against loops, the mask before the gate, counts in half precision."""

import pytest
import torch

from tests.reference import pairs as oracle
from visionpos import Dims, Grid, PositionError
from visionpos.encodings import Cope, CopeSpec

DIMS = Dims(embed_dim=12, num_heads=3, depth=2)


def cope(**fields) -> Cope:
    return Cope(
        CopeSpec(std=0.5, **fields), DIMS, generator=torch.Generator().manual_seed(0)
    ).double()


def drawn(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_golden_counts():
    """Facts 1.2: all gates 0.5."""
    counts = cope().counts(torch.zeros(3, 3))
    assert counts[0, :1].tolist() == [0.5]
    assert counts[1, :2].tolist() == [1.0, 0.5]
    assert counts[2].tolist() == [1.5, 1.0, 0.5]


@pytest.mark.parametrize(("n", "m", "positions"), [(5, 5, 64), (3, 7, 3), (1, 9, 2), (1, 1, 2)])
def test_reference(n, m, positions):
    module = cope(positions=positions)
    q, k = drawn(2, 3, n, 4), drawn(2, 3, m, 4, seed=2)
    logits = (q @ k.mT) / 2.0
    expected = oracle.cope(q.numpy(), logits.numpy(), module.table.detach().numpy())
    torch.testing.assert_close(module(q, k, Grid(1, m)), torch.from_numpy(expected))


def test_invariant_later_keys_are_not_counted():
    """Content of a key after the query moves nothing at or before it."""
    module, q, k = cope(), drawn(1, 3, 6, 4), drawn(1, 3, 6, 4, seed=2)
    other = k.clone()
    other[:, :, 4:] = 9.0
    one, two = module(q, k, Grid(1, 6)), module(q, other, Grid(1, 6))
    assert torch.equal(one[:, :, :4, :4], two[:, :, :4, :4])
    assert not torch.equal(one[:, :, 5], two[:, :, 5])


def test_invariant_masked_keys_are_not_counted():
    """A logit of minus infinity opens no gate: padding counts as nothing."""
    module, logits = cope(), drawn(1, 3, 5, 5)
    masked = logits.clone()
    masked[..., 0] = -torch.inf
    assert torch.equal(module.counts(masked)[..., 1:], module.counts(logits)[..., 1:])


def test_invariant_counts_of_halves():
    """300 open gates count 300 in bfloat16, whose own sum stops at 256."""
    logits = torch.full((1, 300), 30.0, dtype=torch.bfloat16)
    assert cope(positions=400).counts(logits)[0, 0] == 300.0
    own = torch.zeros((), dtype=torch.bfloat16)
    for _ in range(300):
        own = own + 1
    assert own == 256.0


def test_gradient():
    module, q, k = cope(positions=8), drawn(1, 3, 5, 4), drawn(1, 3, 5, 4, seed=2)

    def run(q, k, table):
        return torch.func.functional_call(module, {"table": table}, (q, k, Grid(1, 5)))

    parts = [x.detach().clone().requires_grad_() for x in (q, k, module.table)]
    assert torch.autograd.gradcheck(run, parts)


@pytest.mark.parametrize(
    ("fields", "match"),
    [({"positions": 1}, "positions is 1; a table"), ({"std": -1.0}, r"std is -1\.0")],
)
def test_error_spec(fields, match):
    with pytest.raises(PositionError, match=match):
        CopeSpec(**fields)


def test_error_no_score_function():
    with pytest.raises(PositionError, match=r"encoding is Cope, .*no score function"):
        cope().lookups(drawn(1, 3, 5, 4), drawn(1, 3, 5, 4), Grid(1, 5))


def test_error_logits_of_other_queries():
    cope = Cope(CopeSpec(), Dims(embed_dim=8, num_heads=2, depth=1))
    q = torch.ones(1, 2, 5, 4)
    with pytest.raises(
        PositionError, match=r"q has shape \(1, 2, 5, 4\) beside logits \(1, 2, 3, 5\)"
    ):
        cope.of_logits(q, torch.zeros(1, 2, 3, 5))
    with pytest.raises(PositionError, match=r"logits have shape \(1, 2, 5, 3\)"):
        cope.of_logits(q, torch.zeros(1, 2, 5, 3))
