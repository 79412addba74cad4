"""Transformer-XL: both shifts against loops, memory, clamp, shared biases."""

import math

import pytest
import torch

from tests.reference import pairs as oracle
from visionpos import Dims, Grid, PositionError
from visionpos.encodings import TransformerXl, TransformerXlSpec

DIMS = Dims(embed_dim=12, num_heads=3, depth=2)


def xl(**fields) -> TransformerXl:
    spec = TransformerXlSpec(std=0.5, **fields)
    return TransformerXl(spec, DIMS, generator=torch.Generator().manual_seed(0)).double()


def drawn(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("direction", ["causal", "both"])
@pytest.mark.parametrize(
    ("n", "m", "clamp"), [(5, 5, None), (3, 7, None), (1, 6, 2), (1, 1, None), (7, 8, 3)]
)
def test_reference(direction, n, m, clamp):
    module = xl(direction=direction, clamp=clamp)
    q, k = drawn(2, 3, n, 4), drawn(2, 3, m, 4, seed=2)
    u, v, w = (x.detach().numpy() for x in (module.content, module.place, module.code.weight))
    expected = oracle.transformer_xl(
        q.numpy(),
        k.numpy(),
        u,
        v,
        w.reshape(3, 4, 12),
        causal=direction == "causal",
        clamp=math.inf if clamp is None else clamp,
    )
    out = module(q, k, Grid(1, m))
    torch.testing.assert_close(out, torch.from_numpy(expected) / 2.0)


def test_invariant_memory_is_a_longer_line():
    """Queries behind cached keys get the rows that they have in the whole line."""
    module, x = xl(direction="both"), drawn(1, 3, 9, 4)
    whole = module(x, x, Grid(1, 9))
    torch.testing.assert_close(module(x[:, :, 6:], x, Grid(1, 9)), whole[:, :, 6:])


def test_invariant_clamp():
    """Beyond the clamp every distance has one code."""
    codes = xl(clamp=3).codes(torch.arange(8.0))
    assert torch.equal(codes[:, 3], codes[:, 7])
    assert not torch.equal(codes[:, 2], codes[:, 3])


def test_gradient():
    module, x = xl(), drawn(1, 3, 4, 4)
    names = [name for name, _ in module.named_parameters()]
    parts = [p.detach().requires_grad_() for p in module.parameters()]

    def run(q, *weights):
        return torch.func.functional_call(
            module, dict(zip(names, weights, strict=True)), (q, x, Grid(1, 4))
        )

    assert torch.autograd.gradcheck(run, (x.clone().requires_grad_(), *parts))


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"clamp": 0}, "clamp is 0; a distance of at least 1"),
        ({"direction": "left"}, "direction is 'left'"),
        ({"std": -1.0}, r"std is -1\.0"),
        ({"theta": 0.0}, r"theta is 0\.0"),
    ],
)
def test_error_spec(fields, match):
    with pytest.raises(PositionError, match=match):
        TransformerXlSpec(**fields)


def test_error_calls():
    with pytest.raises(PositionError, match=r"k has shape .*; \[b, 3, 5, 4\]"):
        xl()(drawn(1, 3, 2, 4), drawn(1, 3, 4, 4), Grid(1, 5))
    with pytest.raises(PositionError, match="embed_dim is 9; an even width"):
        TransformerXl(TransformerXlSpec(), Dims(embed_dim=9, num_heads=3, depth=1))
