"""Models of the installed transformers with random weights, small enough to run a prompt in a test."""

import importlib
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText

VOCABULARY, IMAGE_ID, VIDEO_ID, START_ID, END_ID = 64, 50, 51, 52, 53
SECTIONS = {"qwen2_vl": [2, 3, 3], "qwen2_5_vl": [2, 3, 3], "qwen3_vl": [4, 2, 2]}


def config(name: str) -> Any:
    """A config of two layers of two heads of 16 channels."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": SECTIONS[name]}
    text = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "rope_parameters": rope, "bos_token_id": 0,
        "eos_token_id": 1, "pad_token_id": 0, "max_position_embeddings": 4096,
    }  # fmt: skip
    vision: dict[str, Any] = {"depth": 1, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2}
    if name == "qwen2_vl":
        vision |= {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}
    elif name == "qwen2_5_vl":
        vision |= {
            "hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32, "window_size": 16,
            "fullatt_block_indexes": [0], "tokens_per_second": 2,
        }  # fmt: skip
    else:
        text["head_dim"] = 16
        vision |= {
            "hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32, "deepstack_visual_indexes": [0],
            "num_position_embeddings": 16,
        }  # fmt: skip
    return AutoConfig.for_model(
        name, text_config=text, vision_config=vision, image_token_id=IMAGE_ID, video_token_id=VIDEO_ID,
        vision_start_token_id=START_ID, vision_end_token_id=END_ID,
    )  # fmt: skip


def model(name: str, seed: int = 0) -> Any:
    """A model in eval mode, with weights large enough that positions change its logits."""
    torch.manual_seed(seed)
    made = AutoModelForImageTextToText.from_config(config(name)).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.3)
    return made


def owner(kind: str, cfg: Any) -> nn.Module:
    """The module that has get_rope_index, without its layers: the method reads the config alone."""
    file = kind.removesuffix("_thinker")
    module = importlib.import_module(f"transformers.models.{file}.modeling_{file}")
    found = [
        value
        for name, value in vars(module).items()
        if isinstance(value, type) and hasattr(value, "get_rope_index") and "Talker" not in name
    ]
    named = [cls for cls in found if "get_rope_index" in vars(cls)]
    cls = named[0]
    made = cls.__new__(cls)
    nn.Module.__init__(made)
    made.config = cfg
    made.spatial_merge_size = getattr(getattr(cfg, "vision_config", None), "spatial_merge_size", 2)
    return made
