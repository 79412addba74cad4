"""One small variant of every attention class of the seam table, and of every class that keeps attentions."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from tests.retrofit.zoo import image, opened

TINY = {"depth": 2, "embed_dim": 64, "num_heads": 2}


@dataclass(frozen=True)
class Variant:
    """One timm model made small.

    Args:
        name: timm's name.
        ports: attentions whose q and k can be reached.
        skipped: attentions whose q and k cannot.
        biased: attentions whose logits take a bias.
        size_hw: the image.
        pairing: that a rotation must have here.
        sized: whether the model takes img_size.
        rotary_dim: channels that turn, where heads are odd.
        double: whether its activations are so wide that float32 is too coarse for them.
        slow: whether it takes more than a second or two.
        extra: what makes it small.
        made_by: class to make it by, below timm.models, where timm's own function takes no sizes.
    """

    name: str
    ports: int
    skipped: int = 0
    biased: int = 0
    size_hw: tuple[int, int] = (64, 96)
    pairing: Any = "adjacent"
    sized: bool = True
    rotary_dim: int | None = None
    slow: bool = False
    double: bool = False
    extra: dict[str, Any] = field(default_factory=dict)
    made_by: str | None = None

    def build(self, seed: int = 0) -> Any:
        """Return the model, every gate open."""
        return settled(opened(self.made().eval(), seed))

    def made(self) -> Any:
        """Return the model as timm makes it."""
        sizes = {"img_size": self.size_hw} if self.sized else {}
        options = {**sizes, "num_classes": 0, **self.extra}
        if self.made_by is None:
            return timm.create_model(self.name, **options)
        room, _, kind = self.made_by.rpartition(".")
        return getattr(importlib.import_module(f"timm.models.{room}"), kind)(**options)

    def image(self, batch: int = 2) -> Tensor:
        return image(self.size_hw, batch)


@torch.no_grad()
def settled(model: nn.Module) -> Any:
    """Return a model whose batch norms neither start at zero nor blow activations up."""
    for part in model.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            part.running_mean.normal_(0, 0.1, generator=torch.Generator().manual_seed(1))
            part.running_var.fill_(2.0)
    return model


def features(model: Any, x: Tensor) -> Tensor:
    """Return forward_features as one tensor."""
    with torch.no_grad():
        out = model.forward_features(x)
    if isinstance(out, dict):
        out = out["patches"]
    return torch.cat([part.flatten() for part in out]) if isinstance(out, (list, tuple)) else out


VARIANTS = (
    Variant("vit_tiny_patch16_224", 2, biased=2, extra=TINY),
    Variant("vit_pwee_patch16_reg1_gap_256", 2, biased=2, extra=TINY),
    Variant("vit_dwee_patch16_reg1_gap_256", 2, biased=2, extra=TINY),
    Variant("vit_dpwee_patch16_reg1_gap_256", 2, biased=2, extra=TINY),
    Variant("deit_tiny_distilled_patch16_224", 2, biased=2, extra=TINY),
    Variant("vit_small_patch16_rope_224", 2, biased=2, extra=TINY),
    Variant("vit_small_patch16_dinov3", 2, biased=2, pairing="half", extra=TINY),
    Variant("eva02_tiny_patch14_224", 2, biased=2, size_hw=(56, 84), extra=TINY),
    Variant("beit_base_patch16_224", 2, biased=2, extra=TINY),
    Variant("vit_relpos_small_patch16_224", 2, biased=2, extra=TINY),
    Variant("vit_srelpos_small_patch16_224", 2, biased=2, extra=TINY),
    Variant("naflexvit_base_patch16_gap", 2, biased=2, sized=False, extra=TINY),
    Variant("qwen3_vit_88m", 2, biased=2, pairing="half", extra=TINY),
    Variant("deepseek_vit_412m", 2, size_hw=(56, 84), biased=2, pairing="half", extra=TINY),
    Variant("gemma4_vit_167m", 2, biased=2, pairing="half_per_axis", sized=False, extra=TINY),
    Variant("cait_xxs24_224", 2, 0, extra=TINY),
    Variant("convit_tiny", 4, size_hw=(64, 64), extra={"depth": 4, "local_up_to_layer": 2}),
    Variant("tnt_s_legacy_patch16_224", 4, rotary_dim=4, extra={"depth": 2}),
    Variant("tnt_s_patch16_224", 4, rotary_dim=4, extra={"depth": 2}),
    Variant("pit_ti_224", 4, biased=4, extra={"depth": (1, 2, 1)}),
    Variant("pit_ti_distilled_224", 4, biased=4, extra={"depth": (1, 2, 1)}),
    Variant(
        "crossvit_tiny_240",
        3,
        biased=3,
        size_hw=(240, 240),
        extra={"depth": ((1, 2, 0),), "embed_dim": (32, 64), "num_heads": (2, 2)},
    ),
    Variant(
        "volo_d1_224",
        3,
        1,
        extra={"layers": (1, 1, 1, 1), "embed_dims": (32, 64, 64, 64), "num_heads": (1, 2, 2, 2)},
        made_by="volo.VOLO",
    ),
    Variant("visformer_tiny", 4, extra={"depth": (1, 2, 2)}),
    Variant(
        "nest_tiny",
        4,
        size_hw=(64, 64),
        extra={"depths": (1, 1, 2), "embed_dims": (32, 64, 64), "num_heads": (1, 2, 2)},
        made_by="nest.Nest",
    ),
    Variant("hiera_tiny_224", 1, 3, extra={"embed_dim": 32, "stages": (1, 1, 1, 1)}),
    Variant("hiera_small_abswin_256", 4, 3, extra={"embed_dim": 32, "stages": (1, 2, 3, 1)}),
    Variant(
        "sam2_hiera_tiny",
        4,
        3,
        sized=False,
        extra={"embed_dim": 32, "stages": (1, 2, 3, 1), "num_heads": 1, "global_att_blocks": (4,)},
    ),
    Variant(
        "swin_tiny_patch4_window7_224",
        4,
        biased=4,
        extra={"depths": (2, 2), "num_heads": (2, 4), "embed_dim": 32, "window_size": (4, 3)},
    ),
    Variant(
        "swinv2_tiny_window8_256",
        4,
        biased=4,
        extra={"depths": (2, 2), "num_heads": (2, 4), "embed_dim": 32, "window_size": 4},
    ),
    Variant(
        "swinv2_cr_tiny_ns_224",
        4,
        biased=4,
        extra={"depths": (2, 2), "num_heads": (2, 4), "embed_dim": 32, "window_size": 4},
    ),
    Variant("maxvit_pico_rw_256", 22, biased=22, slow=True),
    Variant("maxvit_tiny_tf_224", 22, biased=22, slow=True),
    Variant("maxvit_rmlp_pico_rw_256", 22, biased=22, slow=True),
    Variant("coatnet_pico_rw_224", 7, biased=7),
    Variant("coatnet_rmlp_nano_rw_224", 9, biased=9, slow=True),
    Variant(
        "gcvit_xxtiny",
        6,
        biased=6,
        size_hw=(224, 224),
        extra={
            "depths": (2, 2, 1, 1),
            "embed_dim": 32,
            "num_heads": (1, 2, 2, 4),
            "window_ratio": (32, 32, 16, 32),
        },
        made_by="gcvit.GlobalContextVit",
    ),
    Variant("levit_128s", 11, biased=11),
    Variant("levit_conv_128s", 11, biased=11),
    Variant("tiny_vit_5m_224", 10, biased=10, sized=False, slow=True),
    Variant("efficientvit_m0", 6, biased=6, size_hw=(224, 224)),
    Variant("efficientformer_l1", 1, biased=1, size_hw=(224, 224), sized=False),
    Variant("efficientformerv2_s0", 5, biased=5),
    Variant("mvitv2_tiny", 0, 10, size_hw=(64, 64), slow=True),
    Variant("samvit_base_patch16", 0, 2, extra={**TINY, "global_attn_indexes": (1,)}),
    Variant("xcit_nano_12_p16_224", 0, 2, extra={"depth": 2}),
    Variant("coat_tiny", 0, 8, slow=True),
    Variant(
        "twins_svt_small",
        6,
        extra={"depths": (1, 1, 2, 2), "embed_dims": (32, 32, 64, 64), "num_heads": (1, 2, 2, 4)},
    ),
    Variant(
        "twins_pcpvt_small",
        5,
        extra={"depths": (1, 1, 2, 1), "embed_dims": (32, 32, 64, 64), "num_heads": (1, 2, 2, 4)},
    ),
    Variant(
        "davit_tiny",
        4,
        4,
        sized=False,
        extra={"depths": (1, 1, 1, 1), "embed_dims": (32, 32, 64, 64), "num_heads": (1, 2, 2, 4)},
    ),
    Variant("edgenext_xx_small", 0, 3, sized=False),
    Variant("fastvit_sa12", 2, sized=False, slow=True, double=True),
    Variant("csatv2", 4, 14, biased=4, size_hw=(128, 192), sized=False, slow=True),
    Variant("botnet26t_256", 0, 3, slow=True),
    Variant("halonet26t", 0, 3, size_hw=(256, 256), sized=False, slow=True),
    Variant("lambda_resnet26t", 0, 3, sized=False, slow=True),
)

CASES = [
    pytest.param(variant, marks=pytest.mark.slow if variant.slow else (), id=variant.name)
    for variant in VARIANTS
]
