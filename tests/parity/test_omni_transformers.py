"""Ids of sound, and of clips whose sound is woven in, equal those of the installed transformers (omni models)."""

import random
from fractions import Fraction
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.parity.test_rope_index_transformers import owner
from visionpos.vlm import family
from visionpos.vlm.ids import PositionIds
from visionpos.vlm.woven import weave

pytest.importorskip("transformers")

FEW, MANY = range(150), range(150, 2000)
PEERS = {"qwen2_5_omni": "qwen2_5_omni", "qwen3_omni_moe": "qwen3_omni"}
TEXT, IMAGE_PAD, CLIP_PAD, SOUND_PAD, VISION, VISION_END, SOUND, SOUND_END = range(10, 18)
TYPES = {IMAGE_PAD: 1, CLIP_PAD: 2, SOUND_PAD: 3}


class Prompt:
    """Rows of tokens, and what a processor would return with them."""

    def __init__(self, name: str, seed: int, *, woven: bool) -> None:
        self.rng = random.Random(seed)
        self.name, self.woven = name, woven
        self.images: list[list[int]] = []
        self.clips: list[list[int]] = []
        self.mels: list[int] = []
        self.seconds: list[float] = []
        rows = [self.row() for _ in range(self.rng.randint(1, 3))]
        longest, left = max(map(len, rows)), self.rng.random() < 0.5
        self.ids, self.mask = torch.zeros(2, len(rows), longest, dtype=torch.int64)
        for number, row in enumerate(rows):
            real = slice(longest - len(row), None) if left else slice(0, len(row))
            self.ids[number, real] = torch.tensor(row)
            self.mask[number, real] = 1
        self.types = torch.zeros_like(self.ids)
        for token, kind in TYPES.items():
            self.types[self.ids == token] = kind

    def row(self) -> list[int]:
        row = [TEXT] * self.rng.randint(1, 6)
        for kind in self.rng.choices(("image", "clip", "sound"), k=self.rng.randint(1, 4)):
            if kind == "sound" and not self.woven:
                row += [SOUND] + [SOUND_PAD] * self.sound() + [SOUND_END]
            if kind == "image":
                row += [VISION, *[IMAGE_PAD] * self.grid(self.images, 1), VISION_END]
            if kind == "clip":
                row += self.clip()
            row += [TEXT] * self.rng.randint(0 if kind != "clip" else 1, 6)
        return row

    def sound(self) -> int:
        """Draw mel frames, and return how many tokens the model makes of them."""
        mel = self.rng.randint(30, 900)
        self.mels.append(mel)
        if self.name == "qwen2_5_omni":
            return ((mel - 1) // 2 + 1 - 2) // 2 + 1
        left = (mel % 100 - 1) // 2 + 1
        return ((left - 1) // 2 + 1 - 1) // 2 + 1 + mel // 100 * 13

    def grid(self, into: list[list[int]], frames: int) -> int:
        height, width = self.rng.randint(1, 5), self.rng.randint(1, 5)
        into.append([frames, 2 * height, 2 * width])
        return frames * height * width

    def clip(self) -> list[int]:
        frames = self.rng.randint(1, 6)
        cells = self.grid(self.clips, frames)
        # Steps whose float32 products are exact: where a cell and a sound meet is no question of rounding.
        step = Fraction(self.rng.choice((1, 2, 4, 8)), 4)
        self.seconds.append(float(step))
        if not self.woven:
            return [VISION, *[CLIP_PAD] * cells, VISION_END]
        rule = family(PEERS[self.name]).spec.rule
        assert rule is not None
        tau = np.repeat(rule.frame_step.offsets(step, frames), cells // frames)  # type: ignore[union-attr]
        order = weave(rule, tau, self.sound())
        inside = np.where(order, SOUND_PAD, CLIP_PAD).tolist()
        return [VISION, SOUND, *inside, SOUND_END, VISION_END]


def theirs(name: str, prompt: Prompt) -> tuple[torch.Tensor, torch.Tensor]:
    model = owner(name)
    rate = 25 if name == "qwen2_5_omni" else 13
    config = SimpleNamespace(
        image_token_id=IMAGE_PAD, video_token_id=CLIP_PAD, audio_token_id=SOUND_PAD,
        vision_start_token_id=VISION, audio_start_token_id=SOUND, position_id_per_seconds=rate,
        seconds_per_chunk=2, audio_config=SimpleNamespace(n_window=50),
    )  # fmt: skip
    self: Any = SimpleNamespace(spatial_merge_size=2, config=config)
    for helper in ("get_llm_pos_ids_for_vision", "get_chunked_index"):
        if hasattr(model, helper):
            setattr(self, helper, MethodType(getattr(model, helper), self))
    grids = [torch.tensor(one).reshape(-1, 3) for one in (prompt.images, prompt.clips)]
    return model.get_rope_index(
        self, prompt.ids, *grids, prompt.mask, prompt.woven, torch.tensor(prompt.mels),
        torch.tensor(prompt.seconds),
    )  # fmt: skip


def ours(name: str, prompt: Prompt, dialect: str = "transformers") -> PositionIds:
    return family(PEERS[name], dialect=dialect).position_ids_from_tokens(
        prompt.ids, prompt.types, prompt.images, prompt.clips, prompt.mask, prompt.seconds
    )


def check(name: str, seed: int, *, woven: bool) -> None:
    """Qwen3-Omni stores float32 there: 2e-4 of an id is its rounding at these lengths (facts 2)."""
    prompt = Prompt(name, seed, woven=woven)
    ids, deltas = theirs(name, prompt)
    got = ours(name, prompt)
    real = prompt.mask.bool()
    within = 0 if name == "qwen2_5_omni" else 2e-4
    torch.testing.assert_close(
        got.ids[:, real].double(), ids[:, real].double(), rtol=0, atol=within, msg=f"seed {seed}"
    )
    torch.testing.assert_close(
        got.delta.double(), deltas[:, 0].double(), rtol=0, atol=within, msg=f"seed {seed}: delta"
    )
    assert torch.equal(got.ids[:, ~real].double(), ids[:, ~real].double())


@pytest.mark.parametrize("woven", [False, True], ids=["apart", "woven"])
@pytest.mark.parametrize("name", PEERS)
def test_reference_omni(name: str, woven: bool) -> None:
    for seed in FEW:
        check(name, seed, woven=woven)


@pytest.mark.slow
@pytest.mark.parametrize("woven", [False, True], ids=["apart", "woven"])
@pytest.mark.parametrize("name", PEERS)
def test_reference_omni_many(name: str, woven: bool) -> None:
    for seed in MANY:
        check(name, seed, woven=woven)
