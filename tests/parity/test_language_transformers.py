"""cos and sin of the rotary layouts of language models, at ids whose axes differ, as transformers has them."""

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.tolerances import assert_close_to
from visionpos.vlm import family
from visionpos.vlm.rotary import language_rotation

pytest.importorskip("transformers")

# module, class -> family, variant
PEERS = [
    ("ernie4_5_vl_moe", "Ernie4_5_VLMoeTextRotaryEmbedding", "ernie4_5_vl", None),
    ("glm4v", "Glm4vTextRotaryEmbedding", "glm4v", None),
    ("glm4v_moe", "Glm4vMoeTextRotaryEmbedding", "glm4v_moe", None),
    ("glm_ocr", "GlmOcrTextRotaryEmbedding", "glm_ocr", None),
    ("glm_image", "GlmImageTextRotaryEmbedding", "glm_image", None),
    ("hy_v4_vl", "HYV4VLRotaryEmbedding", "hy_v4_vl", None),
    ("qwen3_5", "Qwen3_5TextRotaryEmbedding", "qwen3_5", None),
    ("qwen3_5", "Qwen3_5TextRotaryEmbedding", "minicpm_v4_7", None),
    ("cosmos3_edge", "Cosmos3EdgeTextRotaryEmbedding", "cosmos3", "edge"),
    ("cosmos3_edge", "Cosmos3EdgeTextRotaryEmbedding", "cosmos3", "omni"),
    ("paddleocr_vl", "PaddleOCRRotaryEmbedding", "paddleocr_vl", None),
    ("qwen2_5_omni", "Qwen2_5OmniRotaryEmbedding", "qwen2_5_omni", None),
    ("qwen3_omni_moe", "Qwen3OmniMoeThinkerTextRotaryEmbedding", "qwen3_omni", None),
]
ERNIE_SECTIONS = [22, 22, 20]  # written rows, columns, time there


def module(name: str, kind: str, language: Any) -> Any:
    found = getattr(importlib.import_module(f"transformers.models.{name}.modeling_{name}"), kind)
    sections = ERNIE_SECTIONS if language.order == "alternating" else list(language.sections)
    rope = {
        "rope_type": "default", "rope_theta": language.theta, "mrope_section": sections,
        "partial_rotary_factor": 2 * language.pairs / language.head_dim,
    }  # fmt: skip
    config = SimpleNamespace(
        rope_parameters=rope, head_dim=language.head_dim, max_position_embeddings=4096,
        hidden_size=language.head_dim * 2, num_attention_heads=2, qk_rope_head_dim=language.head_dim,
    )  # fmt: skip
    return found(config)


@pytest.mark.parametrize(("name", "kind", "mine", "variant"), PEERS, ids=str)
def test_reference_cos_sin_bit_equal(name: str, kind: str, mine: str, variant: str | None) -> None:
    """Theirs is full width: halves repeated, or every entry twice for adjacent pairs."""
    language = family(mine, variant=variant).spec.language
    assert language is not None
    ids = torch.randint(0, 40000, (3, 2, 57))
    theirs = module(name, kind, language)(torch.zeros(1), ids)
    ours = language_rotation(language, ids)
    for got, full in zip((ours.cos, ours.sin), theirs, strict=True):
        pairs = full[..., ::2] if full[..., 0].equal(full[..., 1]) else full[..., : language.pairs]
        assert_close_to(got[:, 0], pairs, kind="exact")


def test_reference_text_of_xd_rope() -> None:
    """Text stands at one position on all four axes; there, and only there, transformers' module is right."""
    language = family("hunyuan_vl").spec.language
    assert language is not None
    found = module("hunyuan_vl", "HunYuanVLRotaryEmbedding", language)
    text = torch.randint(0, 40000, (1, 2, 57)).expand(4, -1, -1)
    cos, _ = found(torch.zeros(1), text)
    assert_close_to(language_rotation(language, text).cos[:, 0], cos[..., :64], kind="exact")
    cell = torch.tensor([[[9]], [[1]], [[0]], [[0]]])
    cos, sin = found(torch.zeros(1), cell)
    assert not torch.allclose(cos[..., :64], cos[..., 64:])  # one pair, two axes: no rotation
    assert not torch.allclose(
        cos[..., :64] * cos[..., 64:] + sin[..., :64] * sin[..., 64:], torch.ones(64)
    )


@pytest.mark.parametrize("factor", [1.0, 2.0, 3.0, 4.0])
def test_reference_yarn(factor: float) -> None:
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

    rope = {
        "rope_type": "yarn", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "factor": factor,
        "original_max_position_embeddings": 262144,
    }  # fmt: skip
    theirs = Qwen3VLTextRotaryEmbedding(Qwen3VLTextConfig(head_dim=128, rope_parameters=rope))
    scaling = {"kind": "yarn", "factor": factor, "original_positions": 262144}
    fam = family("qwen3_vl", overlay={"language": {"scaling": scaling}})
    ids = torch.randint(0, 40000, (3, 1, 57))
    cos, sin = theirs(torch.zeros(1), ids)
    ours = fam.rotation(ids)
    # float32 frequencies times positions of 40000: one unit in the last place is 0.004 rad.
    assert (ours.cos[:, 0] - cos[..., :64]).abs().max() < 0.01
    assert (ours.sin[:, 0] - sin[..., :64]).abs().max() < 0.01
    near = torch.randint(0, 100, (3, 1, 57))
    cos, _ = theirs(torch.zeros(1), near)
    assert_close_to(fam.rotation(near).cos[:, 0], cos[..., :64], kind="applied")
