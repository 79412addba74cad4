"""Ids of every family that has a get_rope_index in the installed transformers, in dialect `transformers`.

Random prompts of text, images and clips in unequal rows, padded on either side: 150 in the normal set, 2,000 in all.
The three that carry models (qwen2_vl, qwen2_5_vl, qwen3_vl) are in test_mrope_transformers.py.
"""

import importlib
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.vlm.prompts import Batch, draw
from visionpos.vlm import Rule, family
from visionpos.vlm.ids import PositionIds

pytest.importorskip("transformers")

FEW, MANY = range(150), range(150, 2000)
FRAMES = {"per_frame": True}
# name in transformers -> family here, what prompts look like
PEERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_vl_moe": ("qwen3_vl", FRAMES),
    "qwen3_5": ("qwen3_5", FRAMES),
    "qwen3_5_moe": ("qwen3_5", FRAMES),
    "qwen4_exp": ("qwen3_5", FRAMES),
    "cosmos3_edge": ("cosmos3", FRAMES),
    "cosmos3_omni": ("cosmos3", FRAMES),
    "cohere_compass": ("cohere_compass", FRAMES),
    "glm4v": ("glm4v", FRAMES),
    "glm4v_moe": ("glm4v_moe", FRAMES),
    "glm46v": ("glm46v", FRAMES),
    "glm_ocr": ("glm_ocr", FRAMES),
    "ernie4_5_vl_moe": ("ernie4_5_vl", {"temporal": 2}),
    "paddleocr_vl": ("paddleocr_vl", {}),
    "hy_v4_vl": ("hy_v4_vl", {"column": 1}),
    "hunyuan_vl": ("hunyuan_vl", {"column": 1, "edges": 1, "kinds": (0, 1)}),
}
ONE_ROW = {"hunyuan_vl"}  # transformers counts images through the whole batch there


def owner(name: str) -> Any:
    """The class of transformers that has get_rope_index."""
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    return next(
        value
        for value in vars(module).values()
        if isinstance(value, type) and "get_rope_index" in vars(value)
    )


def stub(model: Any) -> Any:
    """What get_rope_index reads of a model: two sizes and its own helper; no weights."""
    vision = SimpleNamespace(spatial_merge_size=2, temporal_merge_size=2, tokens_per_second=2)
    text = SimpleNamespace(rope_parameters={"mrope_section": [16, 16, 16, 16]})
    self = SimpleNamespace(config=SimpleNamespace(vision_config=vision, text_config=text))
    for name in ("get_vision_position_ids", "_group_visual_frames", "_frame_end_idx"):
        if hasattr(model, name):
            static = isinstance(vars(model).get(name), staticmethod)
            found = getattr(model, name)
            setattr(self, name, found if static else partial(found, self))
    return self


def theirs(name: str, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    model = owner(name)
    grids = {"image_grid_thw": batch.grids("images")}
    if "videos" in batch.__dict__ and name != "hunyuan_vl":
        grids["video_grid_thw"] = batch.grids("videos")
    return model.get_rope_index(
        stub(model), batch.input_ids, batch.types, attention_mask=batch.mask, **grids
    )


def ours(name: str, batch: Batch) -> PositionIds:
    fam = family(name)
    if "transformers" in fam.dialects:
        fam = family(name, dialect="transformers")
    if fam.spec.video is None and batch.videos:  # token tensors need no plan
        from visionpos.vlm import ids_from_tokens

        rule = fam.spec.rule
        assert isinstance(rule, Rule)
        return ids_from_tokens(
            batch.input_ids, batch.types, batch.grids("images"), batch.grids("videos"), batch.mask,
            rule=rule, merge=2,
        )  # fmt: skip
    return fam.position_ids_from_tokens(
        batch.input_ids, batch.types, batch.grids("images"), batch.grids("videos"), batch.mask
    )


def check(name: str, seed: int) -> None:
    """hunyuan_vl and hy_v4_vl have no transformers dialect: there is one rule."""
    mine, look = PEERS[name]
    batch = draw(seed, **look, rows=(1, 1) if name in ONE_ROW else (1, 4))
    ids, deltas = theirs(name, batch)
    got = ours(mine, batch)
    real = batch.mask.bool()
    assert torch.equal(got.ids[:, real], ids[:, real]), f"seed {seed}"
    assert torch.equal(got.delta, deltas[:, 0].to(torch.int64)), f"seed {seed}"
    assert got.ids[:, ~real].eq(ids[:, ~real]).all(), f"seed {seed}: padding"


@pytest.mark.parametrize("name", PEERS)
def test_reference_rope_index(name: str) -> None:
    for seed in FEW:
        check(name, seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", PEERS)
def test_reference_rope_index_many(name: str) -> None:
    for seed in MANY:
        check(name, seed)


def test_reference_defect_image_numbers_run_through_the_batch() -> None:
    """facts/mrope.md 0.3: two equal rows get image numbers 0 and 1 there, 0 and 0 here."""
    types = torch.tensor([[0, 1, 1, 1, 1, 0]] * 2)
    batch = Batch(types, torch.ones_like(types), [(1, 2, 2)] * 2, [], [])
    ids, _ = theirs("hunyuan_vl", batch)
    assert ids[3, :, 2].tolist() == [0, 1]
    assert ours("hunyuan_vl", batch).ids[3, :, 2].tolist() == [0, 0]
