"""Biases of lines against transformers: T5, Bloom, MPT, DeBERTa v1 and v2; and where it parts from one rule."""

import pytest
import torch
from torch import nn
from transformers import DebertaConfig, DebertaV2Config, MptConfig, T5Config
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.deberta.modeling_deberta import (
    DisentangledSelfAttention as AttentionV1,
)
from transformers.models.deberta.modeling_deberta import build_relative_position as places_v1
from transformers.models.deberta_v2.modeling_deberta_v2 import (
    DisentangledSelfAttention as AttentionV2,
)
from transformers.models.deberta_v2.modeling_deberta_v2 import (
    build_relative_position as places_v2,
)
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

from tests.tolerances import assert_close_to
from visionpos import Dims, Grid
from visionpos.encodings import Alibi, AlibiSpec, Deberta, DebertaSpec, T5Bias, T5BiasSpec


def drawn(module: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for weight in module.parameters():
        weight.data.normal_(std=0.5)
    return module.eval()


@pytest.mark.parametrize("direction", ["both", "causal"])
@pytest.mark.parametrize(("n", "m"), [(5, 5), (300, 300), (3, 200), (1, 150)])
def test_t5(direction, n, m):
    config = T5Config(d_model=24, d_kv=8, num_heads=3, is_decoder=direction == "causal")
    theirs = drawn(T5Attention(config, has_relative_attention_bias=True, layer_idx=0))
    spec = T5BiasSpec(buckets=(32,), max_distance=(128,), direction=direction)
    dims = Dims(embed_dim=24, num_heads=3, depth=1)
    ours = T5Bias.from_source(theirs.state_dict(), spec, dims)
    expected = theirs.compute_bias(m, m)[0, :, m - n :]
    assert_close_to(ours.along(n, m), expected, kind="exact")
    if n == m:
        assert_close_to(ours(Grid(1, m)), expected, kind="exact")


@pytest.mark.parametrize("heads", [1, 6, 8, 12, 25])
def test_alibi(heads):
    """Bloom's key-only row for any number of heads; MPT counts back from the last key: one number a head apart."""
    ours = Alibi(AlibiSpec(), Dims(embed_dim=heads * 8, num_heads=heads, depth=1))
    row = ours.key_only(torch.arange(40))
    assert_close_to(build_alibi_tensor(torch.ones(1, 40), heads, torch.float32), row)
    mpt = build_mpt_alibi_tensor(heads, 40)
    assert_close_to(mpt + row[..., -1:], row)
    four = Alibi(AlibiSpec(max_bias=4.0), ours.dims).key_only(torch.arange(40))
    assert_close_to(build_mpt_alibi_tensor(heads, 40, alibi_bias_max=4) + four[..., -1:], four)
    assert MptConfig().attn_config.alibi_bias_max == 8


@pytest.mark.parametrize(("length", "left"), [(512, 33), (2048, 9), (8192, 3)])
def test_bloom_in_bfloat16(length, left):
    """Recorded: its builder leaves so few distinct numbers of the last 64 keys, on the head that keeps most."""
    theirs = build_alibi_tensor(torch.ones(1, length), 16, torch.bfloat16)[:, 0, -64:]
    assert max(len(set(head.tolist())) for head in theirs) <= left < 64


@pytest.mark.parametrize(("n", "span"), [(5, 4), (9, 4), (3, 8)])
@pytest.mark.parametrize("terms", [("c2p", "p2c"), ("c2p",), ("p2c",)])
def test_deberta_v1(n, span, terms):
    config = DebertaConfig(
        hidden_size=24,
        num_attention_heads=3,
        relative_attention=True,
        max_relative_positions=span,
        pos_att_type=list(terms),
    )
    theirs, table = drawn(AttentionV1(config)), torch.randn(2 * span, 24)
    q, k = torch.randn(2, 2, 3, n, 8).unbind()
    parts = 1 + len(terms)
    spec, dims = DebertaSpec(span=span, terms=terms), Dims(embed_dim=24, num_heads=3, depth=1)
    state = {**theirs.state_dict(), "rel_embeddings.weight": table}
    ours = Deberta.from_source(state, spec, dims)
    # Its queries are scaled before they get here.
    expected = theirs.disentangled_att_bias(
        q / (8 * parts) ** 0.5, k, places_v1(q, k), table, parts
    )
    assert_close_to(ours(q, k, Grid(1, n)), expected)
    assert ours.scale == (8 * parts) ** -0.5


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(("n", "buckets", "reach"), [(5, 4, 8), (40, 8, 20), (600, 256, 512)])
def test_deberta_v2(n, buckets, reach, shared):
    config = DebertaV2Config(
        hidden_size=24,
        num_attention_heads=3,
        relative_attention=True,
        max_relative_positions=reach,
        position_buckets=buckets,
        pos_att_type=["c2p", "p2c"],
        share_att_key=shared,
    )
    theirs, norm, table = (
        drawn(AttentionV2(config)),
        nn.LayerNorm(24, 1e-7),
        torch.randn(2 * buckets, 24),
    )
    q, k = torch.randn(2, 1, 3, n, 8).unbind()
    spec = DebertaSpec(span=buckets, max_distance=reach, norm=True, key_bias=True)
    state = {**theirs.state_dict(), "encoder.rel_embeddings.weight": table}
    state |= {f"encoder.LayerNorm.{name}": value for name, value in norm.state_dict().items()}
    ours = Deberta.from_source(state, spec, Dims(embed_dim=24, num_heads=3, depth=1))
    places = places_v2(q, k, bucket_size=buckets, max_position=reach)
    with torch.no_grad():
        expected = theirs.disentangled_attention_bias(q[0], k[0], places, norm(table), 3)
        assert_close_to(ours(q, k, Grid(1, n))[0], expected)


def test_deberta_v2_buckets():
    """Every difference to 4000, where the logarithm is float32's."""
    steps = torch.arange(-4000, 4001)
    ours = Deberta(
        DebertaSpec(span=256, max_distance=512), Dims(embed_dim=24, num_heads=3, depth=1)
    )
    expected = make_log_bucket_position(steps, 256, 512).long()
    assert torch.equal(ours.buckets(steps), expected)


def test_deberta_v2_fewer_queries():
    """Recorded: with fewer queries transformers swaps its two settings for the second term; here rows stay."""
    config = DebertaV2Config(
        hidden_size=24,
        num_attention_heads=3,
        relative_attention=True,
        max_relative_positions=20,
        position_buckets=8,
        pos_att_type=["p2c"],
        share_att_key=True,
    )
    theirs, table = drawn(AttentionV2(config)), torch.randn(16, 24)
    spec = DebertaSpec(span=8, max_distance=20, terms=("p2c",), key_bias=True)
    state = {**theirs.state_dict(), "rel_embeddings.weight": table}
    ours = Deberta.from_source(state, spec, Dims(embed_dim=24, num_heads=3, depth=1))
    x = torch.randn(1, 3, 40, 8)
    whole = ours(x, x, Grid(1, 40))
    with torch.no_grad():
        few = theirs.disentangled_attention_bias(
            x[0, :, :10], x[0], places_v2(x[:, :, :10], x, 8, 20), table, 2
        )
    assert_close_to(ours(x[:, :, 30:], x, Grid(1, 40)), whole[:, :, 30:])
    assert few.shape == (3, 40, 40)
    assert not torch.allclose(few, whole[0], atol=0.1)
