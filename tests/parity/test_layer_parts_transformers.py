"""Parts of layers against the installed transformers: growth of queries, latent attention, and who differs where."""

from __future__ import annotations

import pytest
import torch

from tests.tolerances import assert_close_to
from visionpos import config
from visionpos.geometry.latent import Latent, turn_latent
from visionpos.geometry.layer_views import layer_gains, layer_mask
from visionpos.geometry.layers import LayerKind, LayerPlan, Temperature
from visionpos.geometry.rope_turn import RopeTurn
from visionpos.geometry.scaling_params import write_rope_parameters

pytest.importorskip("transformers")

from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    apply_rotary_pos_emb_interleave,
    yarn_apply_mscale,
)
from transformers.models.llama4.configuration_llama4 import Llama4TextConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextAttention
from transformers.models.ministral3.configuration_ministral3 import Ministral3Config
from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale


def test_temperature_of_ministral3():
    plan = config.load_language("ministral3")
    ids = torch.tensor([0, 16383, 16384, 65535, 262143])
    expected = get_llama_4_attn_scale(ids[None], 0.1, 16384).flatten()
    assert_close_to(layer_gains(plan, 0, ids), expected.double())
    theirs = Ministral3Config().rope_parameters
    kind = plan.kind(0).temperature
    assert (kind.scale, kind.every, kind.shift) == (
        theirs["llama_4_scaling_beta"],
        theirs["original_max_position_embeddings"],
        0,
    )


def llama4_layer():
    """Return a small NoPE layer of Llama 4 and its plan; gains step every 2 positions."""
    theirs = Llama4TextConfig(
        hidden_size=16,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_hidden_layers=4,
        floor_scale=2,
        attn_scale=0.5,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    module = Llama4TextAttention(theirs, 3).eval()
    kind = LayerKind(name="full", temperature=Temperature(scale=0.5, every=2, shift=1))
    return module, LayerPlan(layers=1, head_dim=8, kinds=(kind,), pattern=("full",))


def llama4_output(module, x, documents):
    mask = torch.zeros(len(documents), len(documents))
    allowed = (documents[:, None] == documents).tril()
    mask = mask.masked_fill(~allowed, -1e30)[None, None]
    return module(x, position_embeddings=None, attention_mask=mask)[0]


def our_output(module, plan, x, documents, ids):
    q, k, v = (
        project(x).unflatten(-1, (2, 8)).transpose(1, 2)
        for project in (module.q_proj, module.k_proj, module.v_proj)
    )
    q = q * layer_gains(plan, 0, ids).unsqueeze(-1)
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=layer_mask(plan, 0, documents), scale=plan.softmax_scale(0)
    )
    return module.o_proj(out.transpose(1, 2).flatten(-2))


@torch.no_grad()
def test_llama4_counts_places_and_packed_rows_differ():
    """Pinned: transformers scales by the place in the row, so a second document is not as it is alone; ours is."""
    module, plan = llama4_layer()
    x = 3 * torch.randn(1, 9, 16, generator=torch.Generator().manual_seed(1))
    one = torch.zeros(9, dtype=torch.int64)
    assert_close_to(
        our_output(module, plan, x, one, torch.arange(9)),
        llama4_output(module, x, one).double(),
    )
    documents, ids = torch.tensor([0] * 4 + [1] * 5), torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4])
    alone = llama4_output(module, x[:, 4:], documents[4:])
    theirs = llama4_output(module, x, documents)[:, 4:]
    ours = our_output(module, plan, x, documents, ids)[:, 4:]
    assert ((theirs - alone).norm() / alone.norm()).item() > 1e-3
    assert_close_to(ours, alone.double())


@torch.no_grad()
def test_latent_scores_are_deepseek_s():
    """q . k of turned and still channels, at one scale; transformers lays turned channels out in halves."""
    sizes = Latent(still_dim=6, rope_dim=8, value_dim=6, kv_rank=10)
    source = torch.Generator().manual_seed(0)
    q, k, shared = (
        torch.randn(2, heads, 5, width, generator=source)
        for heads, width in ((3, 14), (3, 6), (1, 8))
    )
    ids = torch.tensor([0, 1, 5, 100, 4097])
    rope = config.load_language("deepseek_v3").kind(0).rope
    rotation = RopeTurn(rope=rope, head_dim=8, pairing="adjacent")(ids)
    ours_q, ours_k = turn_latent(q, k, shared, rotation, sizes=sizes)
    cos, sin = (torch.cat([one, one], -1)[None] for one in (rotation.cos, rotation.sin))
    rope_q, rope_k = apply_rotary_pos_emb_interleave(q[..., 6:], shared, cos, sin)
    theirs_q = torch.cat([q[..., :6], rope_q], -1)
    theirs_k = torch.cat([k, rope_k.expand(-1, 3, -1, -1)], -1)
    expected = theirs_q.double() @ theirs_k.double().transpose(-1, -2)
    assert_close_to(ours_q @ ours_k.transpose(-1, -2), expected)


def test_scale_of_deepseek_is_that_of_its_module():
    plan = config.load_language("deepseek_v3")
    rope = write_rope_parameters(plan.kind(0).rope)
    theirs = DeepseekV3Config(max_position_embeddings=163840, rope_parameters=rope)
    assert plan.softmax_scale(0) == pytest.approx(
        yarn_apply_mscale(theirs.rope_parameters, theirs.qk_head_dim**-0.5)
    )
    sizes = plan.latent
    assert (sizes.still_dim, sizes.rope_dim, sizes.value_dim, sizes.kv_rank, sizes.q_rank) == (
        theirs.qk_nope_head_dim,
        theirs.qk_rope_head_dim,
        theirs.v_head_dim,
        theirs.kv_lora_rank,
        theirs.q_lora_rank,
    )
    assert (plan.pairing == "adjacent") == theirs.rope_interleave
