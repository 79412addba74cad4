"""TUPE: untied places against loops, the class token, buckets of TUPE-R, what lies beyond the table."""

import pytest
import torch
from torch import nn

from tests.reference import pairs as oracle
from visionpos import Dims, Grid, PositionError
from visionpos.encodings import Tupe, TupeSpec

DIMS = Dims(embed_dim=12, num_heads=3, depth=2)


def tupe(**fields) -> Tupe:
    spec = TupeSpec(std=0.5, **fields)
    return Tupe(spec, DIMS, generator=torch.Generator().manual_seed(0)).double()


def projected(module: Tupe, n: int) -> list:
    """Return the rows of places as queries and keys, `[heads, 2 + n, head_dim]`, as the source's lines make them."""
    rows = module.proj(module.norm(module.table[: 2 + n]))
    return [part.detach().numpy() for part in rows.reshape(2 + n, 2, 3, 4).permute(1, 2, 0, 3)]


@pytest.mark.parametrize("buckets", [0, 32])
@pytest.mark.parametrize("prefix", [0, 1, 2])
@pytest.mark.parametrize("n", [1, 7, 40])
def test_reference(n, prefix, buckets):
    module = tupe(extent=(40,), buckets=buckets)
    relative = module.relative.detach().numpy() if buckets else None
    expected = oracle.tupe(*projected(module, n), n, prefix=prefix, head_dim=4, relative=relative)
    out = module.bias(Grid(1, n), prefix=prefix)
    torch.testing.assert_close(out, torch.from_numpy(expected))


def test_golden_rows_of_the_class_token():
    """Facts 1.1: others to the class token have bucket 32, it has 16 to them, which no difference reaches."""
    module = tupe(extent=(200,), buckets=32)
    for weight in (module.table, module.proj.weight, module.proj.bias):
        weight.data.zero_()
    module.relative.data = (
        torch.arange(33.0, dtype=torch.float64).unsqueeze(1).expand(33, 3).clone()
    )
    out = module.bias(Grid(1, 199), prefix=1)[0]
    assert (out[0] == 16).all()
    assert (out[1:, 0] == 32).all()
    inside = set(out[1:, 1:].long().flatten().tolist())
    assert inside == set(range(32)) - {16}


def test_invariant_one_bias_for_all_samples():
    """Content does not enter; later queries of a longer line get its last rows."""
    module, x = tupe(extent=(3, 5)), torch.randn(2, 3, 15, 4, dtype=torch.float64)
    out = module(x, x, Grid(3, 5))
    assert out.shape == (1, 3, 15, 15)
    assert torch.equal(out, module(x * 2, x + 1, Grid(3, 5)))
    assert torch.equal(module(x[:, :, 10:], x, Grid(3, 5)), out[:, :, 10:])
    cls = torch.cat([x[:, :, :1], x], 2)
    assert torch.equal(module(cls, cls, Grid(3, 5), prefix=1)[0], module.bias(Grid(3, 5), prefix=1))
    assert module.scale == 8**-0.5


def test_invariant_absolute():
    """Not a function of differences: the same step has another bias elsewhere."""
    out = tupe(extent=(6,)).bias(Grid(1, 6))[0]
    assert not torch.allclose(out.diagonal(1)[0], out.diagonal(1)[1])


def test_invariant_source_keys():
    module = tupe(extent=(9,), buckets=32)
    state = {"pos.weight": module.table, "relative_attention_bias.weight": module.relative}
    for own, source in (("norm", "pos_ln"), ("proj", "pos_proj")):
        layer = getattr(module, own)
        state |= {f"encoder.{source}.{name}": p for name, p in layer.named_parameters()}
    copy = Tupe.from_source(state, TupeSpec(extent=(9,), buckets=32), DIMS).double()
    torch.testing.assert_close(copy.bias(Grid(1, 9)), module.bias(Grid(1, 9)), atol=1e-6, rtol=1e-6)


def test_gradient_reaches_every_part():
    module = tupe(extent=(9,), buckets=32)
    module.bias(Grid(1, 9), prefix=1).square().sum().backward()
    for name, weight in module.named_parameters():
        if name != "proj.bias":
            assert weight.grad.abs().sum() > 0, name
    still = (module.relative.grad == 0).all(-1).nonzero().flatten().tolist()
    assert set(still) == set(range(33)) - {*range(9), *range(17, 25), 16, 32}


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"extent": ()}, r"extent is \(\)"),
        ({"extent": (0,)}, r"extent is \(0,\)"),
        ({"extent": (9,), "buckets": 6}, "buckets is 6"),
        ({"extent": (9,), "buckets": 32, "max_distance": 8}, "max_distance 8"),
        ({"extent": (9,), "std": -1.0}, r"std is -1\.0"),
    ],
)
def test_error_spec(fields, match):
    with pytest.raises(PositionError, match=match):
        TupeSpec(**fields)


@pytest.mark.parametrize(
    ("extent", "grid"),
    [
        ((5,), Grid(1, 6)),
        ((3, 5), Grid(5, 3)),
        ((3, 5), Grid(1, 15)),
        ((3, 5), Grid(3, 5, frames=2)),
    ],
)
def test_error_beyond_the_table(extent, grid):
    with pytest.raises(PositionError, match=r"grid .* has places that a table of extent"):
        tupe(extent=extent).bias(grid)


def test_error_tokens():
    module, x = tupe(extent=(5,)), torch.zeros(1, 3, 4, 4, dtype=torch.float64)
    with pytest.raises(PositionError, match=r"k has shape"):
        module(x, x, Grid(1, 5))
    assert isinstance(module.norm, nn.LayerNorm)
