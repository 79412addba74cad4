"""Sizes in turn without a resize, and options of timm's constructors that no registered model uses."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import timm
import torch
from timm.layers import resample_abs_pos_embed
from timm.models.mvitv2 import MultiScaleVit, model_cfgs

import visionpos as vp
from tests.retrofit.attentions import VARIANTS, Variant, features
from tests.retrofit.zoo import apart, image, opened
from visionpos import retrofit

BY_NAME = {variant.name: variant for variant in VARIANTS}
# Classes that take another image at the next call: name -> a size and its transpose, of equal token counts.
SIZES = {
    "naflexvit_base_patch16_gap": (64, 128),
    "gemma4_vit_167m": (96, 48),
    "qwen3_vit_88m": (64, 128),
    "deepseek_vit_412m": (56, 84),
    "twins_svt_small": (64, 128),
    "twins_pcpvt_small": (64, 128),
    "davit_tiny": (64, 128),
    "edgenext_xx_small": (64, 128),
    "xcit_nano_12_p16_224": (64, 128),
    "sam2_hiera_tiny": (64, 128),
    "tiny_vit_5m_224": (64, 128),
    "fastvit_sa12": (64, 128),
    "csatv2": (64, 128),
}
CASES = [
    pytest.param(name, marks=pytest.mark.slow if BY_NAME[name].slow else (), id=name)
    for name in SIZES
]


def specs_of(variant: Variant) -> list[Any]:
    """Return a convolution between blocks, and a rotation where there is one."""
    turning = vp.AxialRopeSpec(pairing=variant.pairing, rotary_dim=variant.rotary_dim)
    return [vp.PegSpec(after=(0,)), *([turning] if variant.ports else [])]


@pytest.mark.parametrize("name", CASES)
def test_sizes_in_turn_of_every_class_that_takes_them(name: str) -> None:
    """A, its transpose B, and A again: no grid of the last call is left over, though the token counts are equal."""
    variant, one = BY_NAME[name], image(SIZES[name], 1)
    other = image(SIZES[name][::-1], 1)
    for spec in specs_of(variant):
        model, fresh = variant.build(), variant.build()
        for each in (model, fresh):
            torch.manual_seed(0)
            retrofit.attach(each, spec, strength=1.0, partial=True)
        first = features(model, one)
        second = features(model, other)
        assert torch.equal(features(model, one), first)
        assert torch.equal(second, features(fresh, other))
        retrofit.attachments(fresh)[spec.kind].set_strength(0.0)
        assert apart(second, features(fresh, other)) > 1e-6


def mvit(size: tuple[int, int], *, cls: bool) -> Any:
    """Return a small MViTv2 with a learned table, as its configuration can ask for."""
    small = dataclasses.replace(
        model_cfgs["mvitv2_base_cls" if cls else "mvitv2_tiny"],
        use_abs_pos=True,
        depths=(1, 1, 1, 1),
        embed_dim=(32, 64, 64, 128),
        num_heads=(1, 2, 2, 4),
    )
    return opened(MultiScaleVit(small, img_size=size, num_classes=0)).eval()


@pytest.mark.parametrize("cls", [False, True])
def test_parity_learned_table_of_mvit(cls: bool) -> None:
    """The table lies on the map of the first stage, behind the class token; timm builds squares only."""
    model = mvit((64, 64), cls=cls)
    table = model.pos_embed.detach().clone()
    (part,) = (part for part in retrofit.describe(model) if part.kind == "table")
    assert (part.grid_hw, part.prefix) == ((16, 16), int(cls))
    for size in ((96, 96), (96, 160)):
        retrofit.resize(model, size)
        wanted = resample_abs_pos_embed(
            table,
            new_size=[size[0] // 4, size[1] // 4],
            old_size=[16, 16],
            num_prefix_tokens=int(cls),
        )
        assert (model.pos_embed - wanted).abs().max() <= 6e-6
        if size[0] == size[1]:
            twin = mvit(size, cls=cls)
            twin.load_state_dict(model.state_dict())
            assert torch.equal(features(model, image(size, 1)), features(twin, image(size, 1)))
        assert features(model, image(size, 1)).isfinite().all()
    retrofit.resize(model, (64, 64))
    assert torch.equal(model.pos_embed, table)


def test_parity_learned_table_of_beit() -> None:
    """BEiT can have a table of tokens beside its relative ones; both move."""
    kinds = {"use_abs_pos_emb": True, "depth": 2, "embed_dim": 64, "num_heads": 2, "num_classes": 0}
    model, twin = (
        opened(timm.create_model("beit_base_patch16_224", img_size=size, **kinds)).eval()
        for size in ((64, 64), (96, 160))
    )
    assert [part.kind for part in retrofit.describe(model)] == [
        "table",
        "rel_table",
        "rel_table",
        "ports",
    ]
    wanted = resample_abs_pos_embed(
        model.pos_embed.detach(), new_size=[6, 10], old_size=[4, 4], num_prefix_tokens=1
    )
    retrofit.resize(model, (96, 160))
    assert (model.pos_embed - wanted).abs().max() <= 6e-6
    twin.load_state_dict(model.state_dict())
    x = image((96, 160), 1)
    assert torch.equal(features(model, x), features(twin, x))


def test_half_precision_tables_attach_to_a_cast_model() -> None:
    """A model cast before attach: added tables and biases keep their precision and give the model's dtype."""
    for spec in (vp.LearnedSpec(grid_hw=(4, 6)), vp.LogBiasSpec(form="cr"), vp.AxialRopeSpec()):
        variant = BY_NAME["vit_tiny_patch16_224"]
        model = variant.build()
        retrofit.attach(model, spec, strength=1.0)
        expected = features(model, variant.image())
        early = variant.build().bfloat16()
        retrofit.attach(early, spec, strength=1.0)
        state = retrofit.attachments(model)[spec.kind].state_dict()
        retrofit.attachments(early)[spec.kind].load_state_dict(state)
        out = features(early, variant.image().bfloat16())
        assert out.dtype == torch.bfloat16
        assert apart(out, expected) < 0.05
