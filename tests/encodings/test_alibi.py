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


def test_golden_slopes():
    """Facts 1.2: Bloom, MPT and x-transformers agree on 6 and 12 heads, in this order."""
    assert alibi(6).slopes() == [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8]
    twelve = [2.0**-step for step in range(1, 9)] + [0.707107, 0.353553, 0.176777, 0.088388]
    assert alibi(12).slopes() == pytest.approx(twelve, abs=5e-7)


def test_reference_line():
    """-slope |i - j|, any number of queries at the end of a line, ids of any place."""
    bias = alibi(3)
    i, j = torch.arange(6, 9).unsqueeze(1), torch.arange(9)
    expected = -torch.tensor(bias.slopes()).view(3, 1, 1) * (i - j).abs()
    assert torch.equal(bias.along(3, 9), expected)
    ids = torch.arange(9).unsqueeze(-1) + 2**24
    assert torch.equal(bias.between(ids[6:], ids), expected)
    assert torch.equal(bias(Grid(1, 9))[:, 6:], expected)


def test_invariant_key_only_under_a_causal_mask():
    """Softmax drops what a whole row shares: both forms give the same attention, of causal queries alone."""
    bias = alibi(4)
    row = bias.key_only(torch.arange(9), dtype=torch.float64)
    assert row.shape == (4, 1, 9)
    later = torch.ones(9, 9, dtype=torch.bool).triu(1)
    logits = torch.randn(4, 9, 9, dtype=torch.float64)
    near, far = (
        (logits + part).masked_fill(later, -torch.inf).softmax(-1)
        for part in (bias.along(9).double(), row)
    )
    torch.testing.assert_close(near, far)
    assert not torch.allclose((logits + bias.along(9)).softmax(-1), (logits + row).softmax(-1))


@pytest.mark.parametrize(("length", "left"), [(512, 33), (2048, 9), (8192, 3), (32768, 2)])
def test_golden_key_only_in_halves(length, left):
    """Facts 1.2: what bfloat16 leaves of the last 64 keys; here it is refused, and float32 keeps all 64."""
    row = alibi(16).key_only(torch.arange(length))[:, 0, -64:]
    assert all(len(set(head.tolist())) == 64 for head in row)
    assert max(len(set(head.tolist())) for head in row.bfloat16()) <= left
    for dtype in (torch.bfloat16, torch.float16):
        with pytest.raises(PositionError, match=rf"dtype is {dtype}; the key-only form needs"):
            alibi(16).key_only(torch.arange(length), dtype=dtype)


def test_invariant_distance_form_in_halves():
    """Near the query a rounded distance form is exact at any length."""
    far = alibi(4).along(4, 8192)
    for step in (0, 1, 64):
        keys = 8192 - 1 - step
        assert far[:, -1, keys].bfloat16().float().tolist() == far[:, -1, keys].tolist()


def test_invariant_own_slopes():
    assert alibi(2, slopes=(0.5, 3.0)).slopes() == [0.5, 3.0]
    assert alibi(2, slopes=(0.5, 3.0)).along(2)[:, 1, 0].tolist() == [-0.5, -3.0]


def test_error_slopes_and_keys():
    with pytest.raises(PositionError, match=r"slopes are \(0\.5, -0\.25\); numbers above 0"):
        AlibiSpec(slopes=(0.5, -0.25))
    with pytest.raises(PositionError, match=r"slopes are \(0\.0,\)"):
        AlibiSpec(slopes=(0.0,))
    with pytest.raises(PositionError, match="slopes are 2 for 4 heads"):
        alibi(4, slopes=(0.5, 0.25))
    with pytest.raises(PositionError, match=r"keys are torch\.float32 and reach"):
        alibi(4).key_only(torch.tensor([2.0**24 + 2]))


def test_key_only_past_float32():
    bias = build(AlibiSpec(), Dims(embed_dim=8, num_heads=2, depth=1))
    keys = torch.tensor([2**24 - 1, 2**24, 2**24 + 1])
    with pytest.raises(PositionError, match=r"keys reach 16777217.*float64"):
        bias.key_only(keys)
    assert bias.key_only(keys, dtype=torch.float64)[0, 0].diff().tolist() == [0.0625, 0.0625]
    assert bias.key_only(keys[:1])[0].item() == (2**24 - 1) / 16
