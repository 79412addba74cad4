"""Families read from configs of transformers: the four ways a rotary layout is written, sizes, and what is refused."""

from typing import Any

import pytest
import torch

from visionpos.errors import ConfigError, PositionError
from visionpos.vlm import Image
from visionpos.vlm.hf import family_of, served_types

pytest.importorskip("transformers")

SECTIONS = {"mrope_section": [16, 24, 24]}
TEXT = {"hidden_size": 1536, "num_attention_heads": 12}
LAYOUTS = {
    "nested, rope_parameters": {
        "text_config": {**TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 7e5, **SECTIONS}}
    },
    "nested, rope_scaling": {"text_config": {**TEXT, "rope_theta": 7e5, "rope_scaling": {"type": "mrope", **SECTIONS}}},
    "flat, rope_scaling": {**TEXT, "rope_theta": 7e5, "rope_scaling": {"rope_type": "default", **SECTIONS}},
    "flat, rope_parameters": {**TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 7e5, **SECTIONS}},
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_way_of_writing_a_layout(layout: str) -> None:
    """The four agree with each other and with what transformers makes of the same mapping."""
    from transformers import AutoConfig

    data = {"model_type": "qwen2_vl", **LAYOUTS[layout]}
    theirs = AutoConfig.for_model(**data)
    for config in (data, theirs):
        language = family_of(config).spec.language
        assert language is not None
        assert (language.head_dim, language.rotary_dim, language.theta) == (128, 128, 7e5)
        assert language.sections == (16, 24, 24)


def test_reads_what_the_checkpoint_says_of_time_and_grids() -> None:
    vision = {"patch_size": 16, "spatial_merge_size": 3, "tokens_per_second": 5}
    found = family_of({"model_type": "qwen2_5_vl", "vision_config": vision, **TEXT})
    rule = found.spec.rule
    assert rule is not None
    assert rule.frame_step.per_second == 5  # type: ignore[union-attr]
    assert (found.spec.grid.patch, found.spec.grid.merge) == (16, 3)
    assert found.plan(Image((96, 144))).views[0].size_hw == (96, 144)
    omni = family_of(
        {"model_type": "qwen2_5_omni", "thinker_config": {"position_id_per_seconds": 13}}
    )
    assert omni.spec.rule.frame_step.per_second == 13  # type: ignore[union-attr]
    ernie = family_of(
        {"model_type": "ernie4_5_vl_moe", "vision_config": {"temporal_merge_size": 4}}
    )
    assert ernie.spec.rule is not None
    assert ernie.spec.rule.temporal_merge == 4


def test_axis_order_of_ernie() -> None:
    """Its config writes rows, columns, time; ids count time first."""
    rope = {"mrope_section": [22, 22, 20], "rope_theta": 5e5}
    found = family_of({"model_type": "ernie4_5_vl_moe", "head_dim": 128, "rope_parameters": rope})
    assert found.spec.language is not None
    assert found.spec.language.sections == (20, 22, 22)


def test_partial_heads() -> None:
    """What the class fills in (a quarter for Qwen3.5), what a config says, and what it says nothing of."""
    quarter = family_of({"model_type": "qwen3_5", "text_config": {"head_dim": 256}})
    assert quarter.spec.language.rotary_dim == 64  # type: ignore[union-attr]
    rope = {"partial_rotary_factor": 0.5, "mrope_section": [8, 12, 12]}
    half = family_of(
        {"model_type": "glm4v", "text_config": {"head_dim": 128, "rope_parameters": rope}}
    )
    assert half.spec.language.rotary_dim == 64  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=r"sum to 32 and rotary_dim / 2 is 128.*\(107, 11, 10\)"):
        family_of(
            {"model_type": "qwen4_exp", "text_config": {"head_dim": 256}}
        )  # facts/mrope.md 0.8


def test_scaling() -> None:
    """YaRN and HunYuan's alpha, whose numbers are in facts/mrope.md 3 and 11."""
    yarn = {
        "rope_type": "yarn",
        "factor": 3.0,
        "original_max_position_embeddings": 262144,
        "mrope_section": [24, 20, 20],
    }
    found = family_of(
        {"model_type": "qwen3_vl", "text_config": {"head_dim": 128, "rope_scaling": yarn}}
    )
    scaling = found.spec.language.scaling  # type: ignore[union-attr]
    assert (scaling.factor, scaling.original_positions) == (3.0, 262144)  # type: ignore[union-attr]
    assert scaling.gain == pytest.approx(1.1099, abs=5e-5)  # type: ignore[union-attr]
    alpha = {"type": "xdrope", "alpha": 1000.0, "xdrope_section": [16, 16, 16, 16]}
    other = family_of({"model_type": "hunyuan_vl", "head_dim": 128, "rope_scaling": alpha})
    assert other.spec.language.scaling.alpha == 1000.0  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=r"rope_type is 'longrope'.*yarn"):
        family_of({"model_type": "qwen2_vl", "rope_scaling": {"rope_type": "longrope"}})


def test_overlay_lies_on_the_config() -> None:
    found = family_of(
        {"model_type": "qwen2_vl", **TEXT},
        overlay={"language": {"theta": 5e4}, "rule": {"pad_id": 7}},
    )
    assert (found.spec.language.theta, found.spec.language.head_dim) == (5e4, 128)  # type: ignore[union-attr]
    assert found.spec.rule.pad_id == 7  # type: ignore[union-attr]


def test_dialects() -> None:
    """Families with one rule have it in dialect transformers too; other names are refused."""
    assert family_of({"model_type": "qwen2_vl"}, dialect="transformers").spec.rule.next == "extent"  # type: ignore[union-attr]
    assert (
        family_of({"model_type": "glm_ocr", "head_dim": 64}, dialect="transformers").dialect
        == "vendor"
    )
    with pytest.raises(ConfigError, match=r"dialect 'trl'.*vendor"):
        family_of({"model_type": "qwen2_vl"}, dialect="trl")


@pytest.mark.parametrize(("config", "error", "message"), [
    ({"model_type": "llama"}, PositionError, r"model_type is 'llama'; one of cohere_compass.*qwen4_exp"),
    ({}, PositionError, r"model_type is None"),
    ("qwen2_vl", ConfigError, r"config is a str.*model\.config"),
])  # fmt: skip
def test_error_names_what_is_served(config: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        family_of(config)


def test_serves_every_type_of_the_installed_transformers() -> None:
    """Every model of transformers that has get_rope_index, but for helpers of one that is served."""
    from pathlib import Path

    import transformers

    models = Path(transformers.__file__).parent / "models"
    found = {
        file.parent.name
        for file in models.glob("*/modeling_*.py")
        if "def get_rope_index" in file.read_text(encoding="utf-8")
    }
    assert found <= set(served_types())


@pytest.mark.parametrize("gains", [
    {"mscale": 1.0, "mscale_all_dim": 0.5}, {"mscale": 1.0, "mscale_all_dim": 1.0}, {"mscale": 0.7},
    {"mscale": 1.0, "mscale_all_dim": 0.5, "attention_factor": 1.3}, {"mscale": 1.0, "mscale_all_dim": 0.0},
    {"truncate": False},
])  # fmt: skip
def test_reference_gain_and_ladder_of_yarn(gains: dict[str, float]) -> None:
    """What transformers makes of the gains that DeepSeek's configs bring along."""
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    from transformers import Qwen2VLTextConfig

    rope = {
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768, **gains,
    }  # fmt: skip
    text = {"hidden_size": 1536, "num_attention_heads": 12}
    ladder, gain = utils._compute_yarn_parameters(Qwen2VLTextConfig(**text, rope_parameters=rope))
    found = family_of({"model_type": "qwen2_vl", "text_config": {**text, "rope_parameters": rope}})
    scaling = found.spec.language.scaling  # type: ignore[union-attr]
    assert scaling.gain == pytest.approx(gain, rel=1e-12)  # type: ignore[union-attr]
    torch.testing.assert_close(found.frequencies.sum(0), ladder)


@pytest.mark.parametrize(("change", "message"), [
    ({"num_attention_heads": "12"}, r"num_attention_heads is '12'; a whole number"),
    ({"hidden_size": "1536"}, r"hidden_size is '1536'; a whole number"),
    ({"head_dim": "128"}, r"head_dim is '128'; a whole number"),
    ({"partial_rotary_factor": "0.5"}, r"partial_rotary_factor is '0\.5'; a number"),
    ({"rope_scaling": {"type": "mrope", "mrope_section": 64}}, r"sections are 64; a list"),
    ({"rope_scaling": {"type": "yarn", "factor": "4"}}, r"factor is '4'; a number"),
    ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, r"no original_max_position_embeddings; the trained length"),
    ({"vision_config": {"patch_size": "16"}}, r"patch_size is '16'; a whole number"),
    ({"vision_config": {"patch_size": [16, 16]}}, r"patch_size is \[16, 16\]; a whole number"),
    ({"vision_config": {"spatial_merge_size": True}}, r"spatial_merge_size is True; a whole number"),
])  # fmt: skip
def test_error_names_the_key_of_the_config(change: dict[str, Any], message: str) -> None:
    """Nothing that a config says is passed over for the family's own number."""
    with pytest.raises(ConfigError, match=message):
        family_of(
            {"model_type": "qwen2_vl", "hidden_size": 1536, "num_attention_heads": 12, **change}
        )


def test_error_overlay_is_no_mapping() -> None:
    with pytest.raises(ConfigError, match=r"overlay is 3; a mapping"):
        family_of({"model_type": "qwen2_vl"}, overlay=3)  # type: ignore[arg-type]
