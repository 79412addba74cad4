"""Tiny random models of the installed transformers: logits with our ids, packed prompts, decoding with a cache."""

from inspect import signature
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from tests.vlm import tiny_models
from tests.vlm.tiny_prompts import Part, batched, prompt
from visionpos.vlm.hf import Collator, attach, family_of

NAMES = list(tiny_models.SECTIONS)
APART = 1e-3  # logits of these models move by more than this if one token stands elsewhere


def example(name: str, parts: list[Part], seed: int = 0) -> dict[str, Any]:
    """A prompt in the model's own layout, with seconds where its rule counts them."""
    out = prompt(parts, seed, frames=name == "qwen3_vl")
    if name == "qwen2_5_vl" and "video_grid_thw" in out:
        out["second_per_grid_ts"] = torch.ones(len(out["video_grid_thw"]))
    return out


def logits(model: Any, example: dict[str, Any], **more: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(**{**example, **more}).logits


def our_ids(model: Any, given: dict[str, Any], dialect: str = "vendor") -> torch.Tensor:
    pos = family_of(model.config, dialect).position_ids_from_tokens(
        given["input_ids"], given["mm_token_type_ids"], given.get("image_grid_thw"), given.get("video_grid_thw"),
        None, given.get("second_per_grid_ts"),
    )  # fmt: skip
    return pos.ids


SHORT: list[Part] = [3, ("image", (1, 6, 10)), 2, ("image", (1, 2, 8)), 4]
LONG: list[Part] = [3, ("video", (9, 4, 6)), 3]  # nine steps of 2x3 cells: longer than wide


@pytest.mark.parametrize("name", NAMES)
def test_logits_where_the_model_s_ids_are_right(name: str) -> None:
    """Rectangular images; and a clip, where every frame is an image."""
    model = tiny_models.model(name)
    for parts in (SHORT, LONG) if name == "qwen3_vl" else (SHORT,):
        given = batched(example(name, parts))
        own, ids = logits(model, given), our_ids(model, given)
        assert torch.equal(logits(model, given, position_ids=ids), own)
        moved = ids.clone()
        moved[1, 0, -1] += 3
        assert (logits(model, given, position_ids=moved) - own).abs().max() > APART


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_logits_behind_a_long_clip(name: str) -> None:
    """There the installed release places text inside the clip: its logits are those of dialect transformers."""
    model = tiny_models.model(name)
    given = batched(example(name, LONG))
    own = logits(model, given)
    assert torch.equal(
        logits(model, given, position_ids=our_ids(model, given, "transformers")), own
    )
    right = logits(model, given, position_ids=our_ids(model, given))
    assert (right - own).abs().max() > APART
    with attach(model):
        assert torch.equal(logits(model, given), right)
    assert torch.equal(logits(model, given), own)


@pytest.mark.parametrize("name", NAMES)
def test_packed_equals_separate(name: str) -> None:
    """Three prompts in one row, the middle one without media, and padding behind them: within 1e-5."""
    model = tiny_models.model(name)
    parts: list[list[Part]] = [SHORT, [6], LONG]
    examples = [example(name, one, seed) for seed, one in enumerate(parts)]
    batch = Collator(family=family_of(model.config), packing=True, pad_to_multiple_of=64)(examples)
    labels = batch.pop("labels")
    assert batch["position_ids"].shape == (4, 1, labels.shape[1])
    assert labels.shape[1] % 64 == 0
    packed = logits(model, batch)
    begin = 0
    for one in examples:
        given, count = batched(one), len(one["input_ids"])
        alone = logits(model, given, position_ids=our_ids(model, given))
        torch.testing.assert_close(packed[:, begin : begin + count], alone, rtol=0, atol=1e-5)
        begin += count
    three = logits(model, {**batch, "position_ids": batch["position_ids"][1:]})
    begin = len(examples[0]["input_ids"])
    assert (three - packed)[
        :, begin:
    ].abs().max() > APART  # without the fourth row prompts see each other


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", NAMES)
def test_padded_equals_separate(name: str, side: Any) -> None:
    model = tiny_models.model(name)
    examples = [example(name, one, seed) for seed, one in enumerate(([6], SHORT, LONG))]
    batch = Collator(family=family_of(model.config), side=side)(examples)
    batch.pop("labels")
    rows = logits(model, batch)
    for number, one in enumerate(examples):
        given = batched(one)
        alone = logits(model, given, position_ids=our_ids(model, given))
        real = batch["attention_mask"][number].bool()
        torch.testing.assert_close(rows[number, real], alone[0], rtol=0, atol=1e-5)


def with_cache(model: Any, given: dict[str, Any], tokens: list[int]) -> torch.Tensor:
    """Logits of tokens fed one by one behind a prompt, `[tokens, words]`."""
    from transformers import DynamicCache

    name = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
    kept, out = {name: DynamicCache(config=model.config)}, []
    with torch.no_grad():
        model(**given, **kept, use_cache=True)
        for token in tokens:
            one = torch.tensor([[token]])
            step = model(input_ids=one, mm_token_type_ids=0 * one, **kept, use_cache=True)
            out.append(step.logits[0, -1])
    return torch.stack(out)


def extended(given: dict[str, Any], tokens: list[int]) -> dict[str, Any]:
    more = torch.tensor([tokens])
    return {
        **given,
        "input_ids": torch.cat([given["input_ids"], more], 1),
        "mm_token_type_ids": torch.cat([given["mm_token_type_ids"], torch.zeros_like(more)], 1),
    }


@pytest.mark.parametrize("parts", [SHORT, LONG], ids=["images", "long clip"])
@pytest.mark.parametrize("name", NAMES)
def test_cached_decoding_equals_one_pass(name: str, parts: list[Part]) -> None:
    """Tokens fed one by one with a cache, and all at once."""
    model, tokens = tiny_models.model(name), [7, 8, 9]
    given = batched(example(name, parts))
    with attach(model):
        cached = with_cache(model, given, tokens)
        whole = logits(model, extended(given, tokens))[0, -len(tokens) :]
    torch.testing.assert_close(cached, whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_reference_defect_of_cached_decoding(name: str) -> None:
    """facts/mrope.md 0.1: behind a long clip the installed release has two answers, with and without a cache."""
    model, tokens = tiny_models.model(name), [7, 8, 9]
    given = batched(example(name, LONG))
    cached = with_cache(model, given, tokens)
    whole = logits(model, extended(given, tokens))[0, -len(tokens) :]
    assert (cached - whole).abs().max() > APART


@pytest.mark.parametrize("parts", [SHORT, LONG], ids=["images", "long clip"])
@pytest.mark.parametrize("name", NAMES)
def test_generate_takes_what_one_pass_says(name: str, parts: list[Part]) -> None:
    """Greedy tokens of generate are the best of one pass over prompt and answer."""
    model = tiny_models.model(name)
    given = batched(example(name, parts))
    with attach(model), torch.no_grad():
        answer = model.generate(
            **given, attention_mask=torch.ones_like(given["input_ids"]), max_new_tokens=5, min_new_tokens=5,
            do_sample=False, output_scores=True, return_dict_in_generate=True,
        )  # fmt: skip
        tokens = answer.sequences[0, given["input_ids"].shape[1] :].tolist()
        whole = logits(model, extended(given, tokens))[0, -len(tokens) - 1 : -1]
    scores = torch.cat(answer.scores)
    seen = scores.isfinite()  # min_new_tokens forbids the end token
    torch.testing.assert_close(scores[seen], whole[seen], rtol=0, atol=1e-5)
