"""Shipped layer plans against the installed transformers: layer types, windows, ladders, scales."""

from __future__ import annotations

import importlib
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.tolerances import assert_close_to
from visionpos import config
from visionpos.geometry.layer_views import layer_mask, layer_rotation, layer_turn
from visionpos.geometry.layers import LayerKind, LayerPlan
from visionpos.geometry.scaling_params import read_rope_parameters, write_rope_parameters

pytest.importorskip("transformers")

LINEAR = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 32768,
}


def part(model: str, kind: str, *, of: str = "modeling") -> Any:
    return getattr(importlib.import_module(f"transformers.models.{model}.{of}_{model}"), kind)


CONFIGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma2": ("gemma2", "Gemma2Config", {}),
    "gemma4": ("gemma4", "Gemma4TextConfig", {}),
    "llama4": ("llama4", "Llama4TextConfig", {}),
    "command_a": ("cohere2", "Cohere2Config", {}),
    "ministral3": ("ministral3", "Ministral3Config", {}),
    "llama3_1": (
        "llama",
        "LlamaConfig",
        {
            "max_position_embeddings": 131072,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
    "qwen2_5_yarn": (
        "qwen2",
        "Qwen2Config",
        {
            "hidden_size": 3584,
            "num_attention_heads": 28,
            "num_hidden_layers": 28,
            "max_position_embeddings": 131072,
            "rope_parameters": YARN,
        },
    ),
    "qwen3_yarn": (
        "qwen3",
        "Qwen3Config",
        {
            "head_dim": 128,
            "num_hidden_layers": 36,
            "max_position_embeddings": 131072,
            "rope_parameters": YARN,
        },
    ),
    "phi3_longrope": ("phi3", "Phi3Config", {"max_position_embeddings": 131072}),
    "gemma3": (
        "gemma3",
        "Gemma3TextConfig",
        {
            "num_hidden_layers": 48,
            "sliding_window": 1024,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": LINEAR,
            },
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        "DeepseekV3Config",
        {
            "max_position_embeddings": 163840,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 40.0,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 4096,
            },
        },
    ),
}


def config_of(name: str) -> Any:
    """Return transformers' config for a shipped plan: its defaults, but for what the YAML names as the checkpoint's."""
    model, kind, given = CONFIGS[name]
    given = deepcopy(given)  # configs write into what they are given
    if name == "phi3_longrope":
        given["rope_parameters"] = write_rope_parameters(config.load_language(name).kind(0).rope)
    return part(model, kind, of="configuration")(**given)


MODULES = {
    "llama3_1": ("llama", "LlamaRotaryEmbedding"),
    "qwen2_5_yarn": ("qwen2", "Qwen2RotaryEmbedding"),
    "qwen3_yarn": ("qwen3", "Qwen3RotaryEmbedding"),
    "phi3_longrope": ("phi3", "Phi3RotaryEmbedding"),
    "gemma2": ("gemma2", "Gemma2RotaryEmbedding"),
    "gemma3": ("gemma3", "Gemma3RotaryEmbedding"),
    "gemma4": ("gemma4", "Gemma4TextRotaryEmbedding"),
    "llama4": ("llama4", "Llama4TextRotaryEmbedding"),
    "command_a": ("cohere2", "Cohere2RotaryEmbedding"),
    "ministral3": ("ministral3", "Ministral3RotaryEmbedding"),
    "deepseek_v3": ("deepseek_v3", "DeepseekV3RotaryEmbedding"),
}
CALLED = {"sliding": "sliding_attention", "chunked": "chunked_attention", "full": "full_attention"}


@pytest.mark.parametrize("name", sorted(config.shipped("language")))
def test_layers_are_those_of_the_config(name):
    plan, theirs = config.load_language(name), config_of(name)
    assert plan.layers == theirs.num_hidden_layers
    types = getattr(theirs, "layer_types", None)
    if types is not None and name not in ("qwen2_5_yarn", "qwen3_yarn", "phi3_longrope"):
        assert [CALLED[layer] for layer in plan.names] == list(types)
    for kind in plan.kinds:
        if kind.window is not None:
            assert kind.window == theirs.sliding_window
        if kind.chunk is not None:
            assert kind.chunk == theirs.attention_chunk_size


@pytest.mark.parametrize("name", sorted(config.shipped("language")))
def test_widths_and_scales_are_those_of_the_config(name):
    plan, theirs = config.load_language(name), config_of(name)
    if name == "gemma4":
        for layer in (0, 5, 29):
            assert plan.head_dim_of(layer) == theirs.per_layer_config[layer].head_dim
    elif plan.latent is None:
        wide = theirs.hidden_size // theirs.num_attention_heads
        assert plan.head_dim == (getattr(theirs, "head_dim", None) or wide)
    scalar = getattr(theirs, "query_pre_attn_scalar", None)
    if scalar is not None:
        assert plan.softmax_scale(0) == pytest.approx(scalar**-0.5)


def test_rope_or_none_by_layer():
    """Llama 4 by its list of layers, Command A by its windows: which layers turn."""
    plan, theirs = config.load_language("llama4"), config_of("llama4")
    turns = [int(plan.kind(layer).rope is not None) for layer in range(plan.layers)]
    assert turns == theirs.no_rope_layers
    assert [plan.kind(n).norm == "l2" for n in range(4)] == [True, True, True, False]
    plan, theirs = config.load_language("command_a"), config_of("command_a")
    turns = [plan.kind(layer).rope is not None for layer in range(plan.layers)]
    assert turns == [one == "sliding_attention" for one in theirs.layer_types]


@pytest.mark.parametrize("length", [300, 5000])
@pytest.mark.parametrize("name", sorted(MODULES))
def test_ladders_are_those_of_the_module(name, length):
    """cos and sin at every 37th id, on either side of LongRoPE's trained length."""
    plan, theirs = config.load_language(name), config_of(name)
    module = part(*MODULES[name])(theirs)
    ids = torch.arange(0, length, 37)
    for layer in {plan.names.index(kind.name): kind for kind in plan.kinds}:
        rotation = layer_rotation(plan, layer, ids)
        if rotation is None:
            continue
        typed = (CALLED[plan.names[layer]],) if name in ("gemma3", "gemma4") else ()
        found = module(torch.ones(1), ids[None], *typed)
        if name == "llama4":
            cos, sin = found.real[0], found.imag[0]
        else:  # one value a channel: doubled in turns by Command A, as two halves by all others
            step = 2 if name == "command_a" else 1
            cos, sin = (table[0, :, ::step][:, : rotation.pairs] for table in found)
        assert_close_to(rotation.cos, cos.double())
        assert_close_to(rotation.sin, sin.double())


@pytest.mark.parametrize("name", ["llama3_1", "qwen3_yarn", "gemma3", "gemma4", "deepseek_v3"])
def test_plans_say_what_the_config_says(name):
    """The reader of rope parameters makes of the config what the YAML holds."""
    plan, theirs = config.load_language(name), config_of(name)
    read = read_rope_parameters(theirs.rope_parameters, positions=theirs.max_position_embeddings)
    for layer, called in enumerate(plan.names[:6]):
        found = read[CALLED[called]] if isinstance(read, dict) else read
        ours = layer_turn(plan, layer)
        their_turn = replace(ours, rope=found)
        ids = torch.tensor([0, 1, 77, 4096])
        assert_close_to(ours(ids).cos, their_turn(ids).cos.double(), kind="table")


@pytest.mark.parametrize(("kind", "size"), [("window", 3), ("chunk", 4)])
def test_masks_are_those_of_masking_utils(kind, size):
    from transformers import masking_utils

    plan = LayerPlan(
        layers=1, head_dim=4, kinds=(LayerKind(name="a", **{kind: size}),), pattern=("a",)
    )
    rule = (
        masking_utils.sliding_window_overlay(size)
        if kind == "window"
        else masking_utils.chunked_overlay(size, torch.zeros(1, dtype=torch.int64))
    )
    found = layer_mask(plan, 0, torch.zeros(11, dtype=torch.int64))
    theirs = [[k <= q and bool(rule(0, 0, q, k)) for k in range(11)] for q in range(11)]
    assert found.tolist() == theirs


ATTENTIONS = {
    "gemma4": "Gemma4TextAttention",
    "llama4": "Llama4TextAttention",
    "llama3_1": "LlamaAttention",
    "qwen2_5_yarn": "Qwen2Attention",
    "qwen3_yarn": "Qwen3Attention",
    "phi3_longrope": "Phi3Attention",
    "gemma2": "Gemma2Attention",
    "gemma3": "Gemma3Attention",
    "command_a": "Cohere2Attention",
    "ministral3": "Ministral3Attention",
    "deepseek_v3": "DeepseekV3Attention",
}


@pytest.mark.parametrize("name", sorted(ATTENTIONS))
def test_scales_are_those_of_the_modules(name):
    """What attention modules multiply q . k by, YaRN's second gain in it or not, as each of them has it."""
    plan = config.load_language(name)
    for layer in sorted({plan.names.index(kind.name) for kind in plan.kinds}):
        with torch.device("meta"):
            module = part(MODULES[name][0], ATTENTIONS[name])(config_of(name), layer)
        assert plan.softmax_scale(layer) == pytest.approx(module.scaling, rel=1e-9)
