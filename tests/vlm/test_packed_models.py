"""Packed rows through the language models of transformers: a document in a row is that document alone.

They know a packed row by its text row, without a mask and without a cache (facts/mrope.md 0.7 and 13.11). Two layers of
random weights; the error is that of float32 sums in another order.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    Glm4vTextModel,
    HunYuanVLTextModel,
    Qwen2_5_VLTextModel,
    Qwen3VLTextModel,
)

from tests.tolerances import assert_close_to
from tests.vlm.conversations import fam_of, stream_of
from visionpos.vlm import PackedIds, ids_after, merge_rows, next_ids, pack

MODELS: dict[str, tuple[type, dict[str, Any]]] = {
    "qwen2_5_vl": (Qwen2_5_VLTextModel, {}),
    "qwen3_vl": (Qwen3VLTextModel, {"head_dim": 128}),
    "glm4v": (Glm4vTextModel, {"partial_rotary_factor": 0.5}),
    "hunyuan_vl": (HunYuanVLTextModel, {"head_dim": 128}),
}
PROMPTS = [(("text", 7), ("image", 0)), (("text", 1), ("text", 7)), (("image", 2), ("text", 1))]


def model_of(name: str) -> Any:
    """A language model of two small layers, with the sections of the checkpoint."""
    kind, own = MODELS[name]
    language = fam_of(name).spec.language
    assert language is not None
    sections = "xdrope_section" if name == "hunyuan_vl" else "mrope_section"
    rope = {"rope_type": "default", "rope_theta": float(language.theta)}
    rope |= {sections: list(language.sections)}
    if "partial_rotary_factor" in own:
        rope["partial_rotary_factor"] = own["partial_rotary_factor"]
    config = kind.config_class(
        hidden_size=2 * language.head_dim, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, vocab_size=9, rope_parameters=rope, pad_token_id=0,
        **own,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    return kind(config).eval()


def through(model: Any, embeds: Tensor, positions: Tensor, mask: Tensor | None = None) -> Tensor:
    """`[1, n, width]` of embeddings at positions, without cache."""
    with torch.no_grad():
        out = model(
            inputs_embeds=embeds, position_ids=positions, attention_mask=mask, use_cache=False
        )
    hidden: Tensor = out.last_hidden_state
    return hidden


def packed(name: str) -> tuple[PackedIds, list[Tensor], Any]:
    """A row of three prompts, embeddings of each, and the model."""
    row = pack([stream_of(name, parts) for parts in PROMPTS], family=fam_of(name), pad_each_to=8)
    model = model_of(name)
    draws = torch.Generator().manual_seed(1)
    lengths = row.cu_seqlens.diff().tolist()
    wide = model.config.hidden_size
    return row, [torch.randn(1, length, wide, generator=draws) for length in lengths], model


# HunYuanVL of transformers 5.24 asks for five rows and refuses them; it takes the mask.
FORMS = [
    (name, form)
    for name in MODELS
    for form in ("rows", "mask")
    if (name, form) != ("hunyuan_vl", "rows")
]


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_parity_a_document_in_a_row_is_that_document_alone(name: str, form: str) -> None:
    row, embeds, model = packed(name)
    positions = (row.four_rows, None) if form == "rows" else (row.three_rows, row.mask())
    out = row.unpack(through(model, row.fill(embeds, dim=1), *positions), dim=1)
    for parts, own, got in zip(PROMPTS, embeds, out, strict=True):
        ids = fam_of(name).position_ids(stream_of(name, parts)).ids
        assert_close_to(got, through(model, own, ids[:, None]))


@pytest.mark.parametrize("name", MODELS)
def test_three_rows_alone_leak(name: str) -> None:
    """What the fourth row is for: without it, the second document sees the first."""
    row, embeds, model = packed(name)
    fill = row.fill(embeds, dim=1)
    right = through(model, fill, row.three_rows, row.mask())
    leaked = through(model, fill, row.three_rows)
    first, second = (
        (one - other).abs().max().item()
        for one, other in list(zip(row.unpack(right, 1), row.unpack(leaked, 1), strict=True))[:2]
    )
    assert first < 1e-5
    assert second > 1e-2


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "hunyuan_vl"])
def test_parity_decoding_behind_a_cache_is_one_pass(name: str) -> None:
    """A padded batch is prefilled in two chunks, then decodes a window of 3 and one token more, as each row alone."""
    fam, model = fam_of(name), model_of(name)
    streams = [stream_of(name, parts) for parts in (PROMPTS[0], PROMPTS[1])]
    rows = [fam.position_ids(stream) for stream in streams]
    assert fam.spec.rule is not None
    batch = merge_rows(rows, fam.spec.rule, side="left")
    assert batch.mask is not None
    longest = batch.ids.shape[-1]
    draws = torch.Generator().manual_seed(2)
    wide = (2, longest + 4, model.config.hidden_size)
    embeds = torch.randn(wide, generator=draws)
    seen = torch.cat([batch.mask, torch.ones(2, 4, dtype=torch.bool)], -1)

    cache, parts, first = DynamicCache(config=model.config), [], 0
    for chunk in (longest - 5, 5, 3, 1):
        after = first + chunk
        positions = ids_after(batch, first, chunk, counted="padded")
        with torch.no_grad():
            out = model(
                inputs_embeds=embeds[:, first:after], position_ids=positions, cache=cache,
                attention_mask=seen[:, :after].long(), use_cache=True,
            )  # fmt: skip
        parts.append(out.last_hidden_state)
        first = after
    got = torch.cat(parts, 1)
    for number, row in enumerate(rows):
        own = embeds[number : number + 1, seen[number]]
        whole = torch.cat([row.ids, next_ids(row, 4)], -1)[:, None]
        assert_close_to(got[number, seen[number]], through(model, own, whole)[0])
