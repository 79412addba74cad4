"""Biases of lines against x-transformers: T5's buckets, ALiBi, CoPE."""

import pytest
import torch

from tests.tolerances import assert_close_to
from visionpos import Dims, Grid
from visionpos.encodings import Alibi, AlibiSpec, Cope, CopeSpec, T5Bias, T5BiasSpec

peer = pytest.importorskip("x_transformers.x_transformers")

DIMS = Dims(embed_dim=24, num_heads=3, depth=1)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("n", "m"), [(5, 5), (7, 200), (1, 140)])
def test_t5(n, m, causal):
    """It multiplies the bias by a scale, sqrt(head_dim) by default of its attention; transformers has none."""
    theirs = peer.RelativePositionBias(1.0, causal=causal, heads=3)
    spec = T5BiasSpec(buckets=(32,), max_distance=(128,), direction="causal" if causal else "both")
    ours = T5Bias.from_source(theirs.state_dict(), spec, DIMS)
    assert_close_to(ours.along(n, m), theirs(n, m), kind="exact")


@pytest.mark.parametrize("heads", [1, 3, 6, 8, 12])
def test_alibi(heads):
    ours = Alibi(AlibiSpec(), Dims(embed_dim=heads * 8, num_heads=heads, depth=1))
    theirs = peer.AlibiPositionalBias(heads=heads)
    assert_close_to(ours.along(5, 17), theirs(5, 17))
    ids = torch.cat([torch.arange(5), torch.arange(4)])  # two documents in a row
    own = theirs.forward_custom_pos(ids)
    assert_close_to(ours.between(ids.unsqueeze(-1), ids.unsqueeze(-1)), own)


@pytest.mark.parametrize("positions", [4, 64])
def test_cope(positions):
    """On causal logits; later keys have no part in it."""
    theirs = peer.CoPE(dim=8, heads=3, max_pos=positions)
    theirs.pos_emb.data.normal_()
    ours = Cope(CopeSpec(positions=positions), DIMS)
    ours.load_state_dict({"table": theirs.pos_emb})
    q, k = torch.randn(2, 2, 3, 9, 8).unbind()
    later = torch.ones(9, 9, dtype=torch.bool).triu(1)
    logits = (q @ k.mT / 8**0.5).masked_fill(later, -torch.finfo(torch.float32).max)
    expected = theirs(q, logits)
    assert_close_to(ours(q, k, Grid(1, 9)), expected)
    assert_close_to(ours.of_logits(q, q @ k.mT / 8**0.5), expected)
