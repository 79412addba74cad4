"""One small timm model of every row of the seam table, opened, and what a model created at a size looks like inside."""

from dataclasses import dataclass, field
from typing import Any

import timm
import torch
from torch import Tensor, nn

from tests.retrofit.zoo import opened

FLAT = {"depth": 2, "embed_dim": 64, "num_heads": 2}


@dataclass(frozen=True)
class Family:
    """A model class made small.

    Args:
        name: timm's name of a variant.
        start: image it is made for.
        target: image it is moved to, a rectangle where the class allows one.
        options: what makes it small.
        parts: kinds of parts that describe must find, with their number.
        twin: options of a model created at the target, None where timm cannot create it.
        kind: how it comes to another size.
    """

    name: str
    start: tuple[int, int]
    target: tuple[int, int]
    parts: dict[str, int]
    options: dict[str, Any] = field(default_factory=dict)
    twin: dict[str, Any] | None = field(default_factory=dict)
    heavy: bool = False

    def build(self, size: tuple[int, int] | None = None, seed: int = 0, **changes: Any) -> Any:
        """Return the model at a size, every gate open."""
        extra = {} if self.sizeless else {"img_size": size or self.start}
        model = timm.create_model(self.name, num_classes=0, **{**self.options, **extra, **changes})
        return opened(model, seed).eval()

    @property
    def sizeless(self) -> bool:
        """Return whether the class takes no image size."""
        return self.options.get("img_size", 0) is None

    def image(self, size: tuple[int, int] | None = None) -> Tensor:
        """Return one image of normal pixels."""
        generator = torch.Generator().manual_seed(1)
        return torch.randn(1, 3, *(size or self.target), generator=generator)


def features(model: nn.Module, x: Tensor) -> Tensor:
    """Return forward_features as one tensor."""
    with torch.no_grad():
        found: Any = model.forward_features(x)
    if isinstance(found, dict):
        found = next(iter(found.values()))
    if isinstance(found, (tuple, list)):
        found = torch.cat([part.flatten() for part in found])
    return found


SIMPLE = (bool, int, float, str, type(None))
BLIND = {
    "training",
    "attention_bias_cache",
    "visionpos_image",
    "visionpos_tables",
    "visionpos_windows",
}


def plain(value: Any) -> Any:
    """Return a value as plain data, or a mark where it is none."""
    if isinstance(value, SIMPLE):
        return value
    if isinstance(value, (tuple, list, torch.Size)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    return "object"


def inside(model: nn.Module) -> dict[str, Any]:
    """Return path -> plain value of every attribute, shape of every parameter, value of every buffer."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name in BLIND or (name.startswith("_") and not name.startswith("_ref")):
                continue
            if name in ("pretrained_cfg", "default_cfg", "feature_info"):
                continue
            found[f"{path}.{name}"] = plain(value)
    found |= {f"{name}:shape": tuple(p.shape) for name, p in model.named_parameters()}
    return found


def apart_from_twin(model: nn.Module, twin: nn.Module) -> list[str]:
    """Return one line for every attribute, shape or buffer in which two models differ."""
    one, other = inside(model), inside(twin)
    lines = [
        f"{key}: {one.get(key)} and {other.get(key)}"
        for key in sorted({*one, *other})
        if one.get(key) != other.get(key)
    ]
    mine, theirs = dict(model.named_buffers()), dict(twin.named_buffers())
    for name in sorted({*mine, *theirs}):
        a, b = mine.get(name), theirs.get(name)
        alike = a is not None and b is not None and a.shape == b.shape and torch.equal(a, b)
        if not alike and not name.endswith(("running_mean", "running_var", "num_batches_tracked")):
            lines.append(f"buffer {name}")
    return lines


FAMILIES = (
    Family("vit_tiny_patch16_224", (64, 96), (96, 160), {"table": 1}, FLAT),
    Family("deit_tiny_distilled_patch16_224", (64, 96), (96, 160), {"table": 1}, FLAT),
    Family("eva02_tiny_patch14_224", (56, 84), (84, 140), {"table": 1, "rotary": 1}, FLAT),
    Family("beit_base_patch16_224", (64, 64), (96, 160), {"rel_table": 2}, FLAT),
    Family("vit_relpos_small_patch16_224", (64, 64), (96, 160), {"log_mlp": 2}, FLAT),
    Family("vit_srelpos_small_patch16_224", (64, 64), (96, 160), {"log_mlp": 1}, FLAT),
    Family("vit_relpos_medium_patch16_cls_224", (64, 64), (96, 160), {"log_mlp": 2}, FLAT),
    Family(
        "naflexvit_base_patch16_gap", (64, 64), (96, 160), {"table": 1}, {**FLAT, "img_size": None}
    ),
    Family(
        "naflexvit_base_patch16_parfac_gap",
        (64, 64),
        (96, 160),
        {"table": 1},
        {**FLAT, "img_size": None},
    ),
    Family("cait_xxs24_224", (64, 64), (96, 160), {"table": 1}, FLAT),
    Family(
        "convit_tiny",
        (64, 64),
        (96, 160),
        {"table": 1, "offset_feature": 1},
        {"depth": 2, "local_up_to_layer": 1},
        None,
    ),
    Family("tnt_s_patch16_224", (64, 64), (96, 160), {"table": 2}, {"depth": 2}),
    Family("pit_ti_224", (96, 96), (128, 192), {"table": 1}, {"depth": (1, 1, 1)}),
    Family(
        "crossvit_tiny_240",
        (240, 240),
        (240, 360),
        {"table": 2},
        {"depth": ([1, 1, 0], [1, 1, 0])},
        None,
    ),
    Family("volo_d1_224", (64, 64), (96, 160), {"table": 1}),
    Family("visformer_tiny", (64, 64), (96, 160), {"table": 3}, {"depth": (1, 1, 1)}),
    Family("nest_tiny_jx", (64, 64), (128, 128), {"table": 3}),
    Family("hiera_tiny_224", (64, 64), (96, 160), {"table": 1}, {"stages": (1, 1, 1, 1)}),
    Family(
        "hiera_small_abswin_256",
        (64, 64),
        (96, 160),
        {"table": 1, "abs_tiled": 1},
        {"stages": (1, 1, 1, 1)},
    ),
    Family(
        "sam2_hiera_tiny",
        (64, 64),
        (96, 160),
        {"table": 1, "abs_tiled": 1},
        {"stages": (1, 1, 1, 1), "img_size": None},
    ),
    Family(
        "swin_tiny_patch4_window7_224",
        (224, 224),
        (192, 256),
        {"rel_table": 4},
        {"depths": (1, 1, 1, 1), "embed_dim": 24},
    ),
    Family(
        "swinv2_tiny_window8_256",
        (256, 256),
        (192, 320),
        {"log_mlp": 5},
        {"depths": (2, 1, 1, 1), "embed_dim": 24},
        {"pretrained_window_sizes": (0, 0, 0, 8)},
    ),
    Family(
        "swinv2_cr_tiny_224",
        (224, 224),
        (192, 256),
        {"log_mlp": 5},
        {"depths": (2, 1, 1, 1), "embed_dim": 24},
    ),
    Family("maxvit_tiny_tf_224", (64, 64), (96, 160), {"rel_table": 8}, {"depths": (1, 1, 1, 1)}),
    Family(
        "maxvit_rmlp_nano_rw_256",
        (64, 64),
        (96, 160),
        {"log_mlp": 8},
        {"depths": (1, 1, 1, 1)},
        heavy=True,
    ),
    Family("coatnet_nano_rw_224", (64, 64), (96, 160), {"rel_table": 2}, {"depths": (1, 1, 1, 1)}),
    Family("gcvit_xxtiny", (224, 224), (192, 256), {"rel_table": 12}),
    Family("levit_128s", (64, 64), (96, 160), {"abs_offset": 11}),
    Family("levit_conv_128s", (64, 64), (96, 160), {"abs_offset": 11}),
    Family("tiny_vit_5m_224", (64, 64), (96, 160), {"abs_offset": 10}, {"img_size": None}),
    Family("efficientvit_m0", (96, 96), (128, 192), {"abs_offset": 6}),
    Family("efficientformer_l1", (224, 224), (192, 256), {"abs_offset": 1}, {}, None),
    Family("efficientformerv2_s0", (64, 64), (96, 160), {"abs_offset": 5}),
    Family("mvitv2_tiny", (64, 64), (96, 160), {"axis_table": 10}, {}, None),
    Family("mvitv2_base_cls", (64, 64), (96, 160), {"axis_table": 24}, {}, None, heavy=True),
    Family(
        "samvit_base_patch16",
        (64, 64),
        (96, 160),
        {"table": 1, "axis_table": 3},
        {
            "depth": 3,
            "embed_dim": 64,
            "num_heads": 2,
            "window_size": 4,
            "global_attn_indexes": (1,),
        },
    ),
    Family(
        "qwen3_vit_88m",
        (64, 64),
        (96, 160),
        {"table": 1, "rotary": 1},
        {"depth": 2, "embed_dim": 64, "num_heads": 2},
    ),
    Family(
        "deepseek_vit_412m_enc",
        (56, 56),
        (84, 140),
        {"rotary": 1},
        {"depth": 2, "embed_dim": 64, "num_heads": 2},
    ),
    Family("gemma4_vit_167m", (96, 96), (96, 192), {"index_lookup": 1, "rotary": 1}, {"depth": 2}),
    Family("xcit_nano_12_p16_224", (64, 64), (96, 160), {"fourier": 1}, {"depth": 2}),
    Family(
        "coat_tiny",
        (64, 64),
        (96, 160),
        {"conv": 8},
        {"serial_depths": (1, 1, 1, 1), "parallel_depth": 1},
    ),
    Family("twins_svt_small", (64, 64), (96, 160), {"conv": 4}, {"depths": (1, 1, 1, 1)}),
    Family(
        "davit_tiny", (64, 64), (96, 160), {"conv": 16}, {"depths": (1, 1, 1, 1), "img_size": None}
    ),
    Family("edgenext_xx_small", (64, 64), (96, 160), {"fourier": 1}, {"img_size": None}),
    Family(
        "fastvit_sa12", (64, 64), (96, 160), {"conv": 1}, {"layers": (1, 1, 1, 1), "img_size": None}
    ),
    Family("csatv2", (64, 64), (128, 192), {"conv": 18}, {"img_size": None}),
    Family("botnet26t_256", (64, 64), (96, 160), {"axis_table": 3}),
    Family("halonet26t", (256, 256), (256, 512), {"axis_table": 3}, {"img_size": None}),
    Family("lambda_resnet26rpt_256", (64, 64), (96, 160), {"lambda": 3}, heavy=True),
    Family("resnet50_clip", (64, 64), (96, 160), {"table": 1}, heavy=True),
)
