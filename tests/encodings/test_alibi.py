"""ALiBi on a grid: slopes of any number of heads, three metrics, any number of axes."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.reference import bias as oracle
from visionpos import Dims, Grid, PositionError
from visionpos.config import load_encoding
from visionpos.encodings import Alibi, AlibiSpec, build


def alibi(heads: int = 4, **fields) -> Alibi:
    return Alibi(AlibiSpec(**fields), Dims(embed_dim=heads * 4, num_heads=heads, depth=1))


@pytest.mark.parametrize(("name", "metric"), [("croma_alibi", "l2"), ("data2vec2_alibi", "l1")])
def test_shape_of_shipped(name, metric):
    spec = load_encoding(name)
    assert (spec.metric, spec.max_bias) == (metric, 8.0)
    assert build(spec, Dims(embed_dim=64, num_heads=16, depth=1))(Grid(3, 5)).shape == (16, 15, 15)


@given(st.integers(1, 70))
def test_reference_slopes(heads):
    """The paper's rule for any number of heads, powers of two or not."""
    assert alibi(heads).slopes() == pytest.approx(oracle.alibi_slopes(heads), rel=1e-12)


def test_reference_max_bias():
    """MPT's setting: the last slope of a power of two is 2 ** -max_bias."""
    assert alibi(8, max_bias=4.0).slopes()[-1] == 2**-4
    assert alibi(8).slopes()[-1] == 2**-8


def test_reference_three_metrics():
    """The knight's move (1, 2) is 3, sqrt(5) and 2 cells away."""
    for metric, far in (("l1", 3.0), ("l2", math.sqrt(5)), ("linf", 2.0)):
        bias = alibi(metric=metric).values(torch.tensor([[1.0, -2.0]], dtype=torch.float64))
        torch.testing.assert_close(bias[0, 0].item(), -0.25 * far)


def test_invariant_float64_and_halves():
    """Distances are formed in float32 or better, whatever the offsets' dtype."""
    offsets = torch.tensor([[300.0, 301.0]])
    assert alibi().values(offsets.double()).dtype == torch.float64
    assert alibi().values(offsets.bfloat16()).dtype == torch.float32
    assert alibi().values(torch.zeros(2)).shape == (4,)


def test_invariant_falls_with_distance():
    """Every step away from the query lowers the bias of every head."""
    out = alibi()(Grid(1, 9))[:, 0]
    assert (out.diff(dim=-1) < 0).all()
    assert (out[:, 0] == 0).all()


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"metric": "cosine"}, r"metric is 'cosine'; it must be one of 'l1', 'l2', 'linf'"),
        ({"max_bias": 0.0}, r"max_bias is 0\.0; a finite number above 0"),
        ({"max_bias": float("nan")}, r"max_bias is nan"),
        ({"max_bias": float("inf")}, r"max_bias is inf"),
    ],
)
def test_error_spec(fields, match):
    with pytest.raises(PositionError, match=match):
        AlibiSpec(**fields)
