"""Modules are replaced for inference: what is attached or resized before and after that is right, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from timm.models import reparameterize_model
from torch import Tensor, nn

import visionpos as vp
from tests.retrofit.attentions import VARIANTS, Variant
from tests.retrofit.attentions import features as features_of
from tests.retrofit.families import FAMILIES, features
from tests.retrofit.zoo import apart
from visionpos import PositionError, retrofit

BY_NAME = {variant.name: variant for variant in VARIANTS}
# Classes of which timm fuses parts. In float64: folding a batch norm into its weights rounds.
FUSED = [
    "levit_128s",
    "levit_conv_128s",
    "efficientvit_m0",
    pytest.param("tiny_vit_5m_224", marks=pytest.mark.slow),
    pytest.param("fastvit_sa12", marks=pytest.mark.slow),
]
NEAR = 1e-9


def rotary(variant: Variant) -> Any:
    return vp.AxialRopeSpec(pairing=variant.pairing, rotary_dim=variant.rotary_dim)


def fuse(model: nn.Module) -> Any:
    """Return a copy of a float64 model as timm fuses it; the modules that timm makes have the default dtype."""
    torch.set_default_dtype(torch.float64)
    try:
        return reparameterize_model(model)
    finally:
        torch.set_default_dtype(torch.float32)


def parts_of(model: nn.Module) -> set[str]:
    return {type(part).__name__ for part in model.modules()}


@pytest.mark.parametrize("name", FUSED)
def test_attach_after_fusing(name: str) -> None:
    """The fused model has the same ports: it turns as the plain one does, and detach gives it back."""
    variant = BY_NAME[name]
    model, x = variant.build().double(), variant.image(1).double()
    fused = fuse(model)
    assert parts_of(fused) != parts_of(model)
    plain = features_of(fused, x)
    assert apart(plain, features_of(model, x)) < NEAR
    for spec in (rotary(variant), vp.SinCosSpec()):
        retrofit.attach(model, spec, strength=1.0, partial=True)
        attachment = retrofit.attach(fused, spec, partial=True)
        assert torch.equal(features_of(fused, x), plain)
        attachment.set_strength(1.0)
        expected = features_of(model, x)
        assert apart(features_of(fused, x), expected) < NEAR
        assert apart(expected, plain) > 1e-5
        retrofit.detach(model)
        retrofit.detach(fused)
    assert torch.equal(features_of(fused, x), plain)


@pytest.mark.parametrize("name", ["levit_128s", "levit_conv_128s", "efficientvit_m0"])
def test_error_fused_after_attach(name: str) -> None:
    """The port went with its module: refused when it is needed, not left out; without it the model is whole."""
    variant = BY_NAME[name]
    model, x = variant.build().double(), variant.image(1).double()
    plain = features_of(model, x)
    attachment = retrofit.attach(model, rotary(variant))
    fused = fuse(model)
    assert apart(features_of(fused, x), plain) < NEAR
    retrofit.attachments(fused)["axial_rope"].set_strength(1.0)
    with pytest.raises(
        PositionError,
        match=r"ran without .*, where the encoding acts|since the encoding was attached",
    ):
        features_of(fused, x)
    retrofit.detach(fused)
    assert apart(features_of(fused, x), plain) < NEAR
    attachment.set_strength(1.0)
    assert apart(features_of(model, x), plain) > 1e-5


@pytest.mark.parametrize("name", FUSED)
def test_fusing_what_keeps_its_port(name: str) -> None:
    """Where the port is not on a fused module, and for doors that are elsewhere, attach and fuse in any order."""
    variant = BY_NAME[name]
    x = variant.image(1).double()
    lost = name in ("levit_128s", "levit_conv_128s", "efficientvit_m0")
    doors: list[Any] = [vp.SinCosSpec(), vp.PegSpec(after=(0,))]
    doors += [] if lost else [rotary(variant)]
    doors += [vp.AlibiSpec()] if variant.biased else []
    for spec in doors:
        model = variant.build().double()
        plain = features_of(model, x)
        retrofit.attach(model, spec, strength=1.0, partial=True)
        model.double()  # new convolutions are float32
        expected = features_of(model, x)
        fused = fuse(model)
        assert apart(features_of(fused, x), expected) < NEAR
        assert apart(expected, plain) > 1e-6
        retrofit.detach(fused)
        assert apart(features_of(fused, x), plain) < NEAR


@pytest.mark.parametrize(
    "name",
    [
        "levit_128s",
        "levit_conv_128s",
        "efficientvit_m0",
        "tiny_vit_5m_224",
        pytest.param("fastvit_sa12", marks=pytest.mark.slow),
    ],
)
def test_resize_before_and_after_fusing(name: str) -> None:
    """A fused model moves as the plain one does, its strided queries and its caches too, and comes home."""
    family = next(one for one in FAMILIES if one.name == name)
    model = family.build().double()
    home, away = family.image(family.start).double(), family.image().double()
    at_home = features(model, home)  # fills the caches of biases
    early = fuse(model)
    features(early, home)
    kinds = [(part.kind, part.path) for part in retrofit.describe(model) if part.kind != "conv"]
    found = [(part.kind, part.path) for part in retrofit.describe(early) if part.kind != "conv"]
    assert found == kinds
    retrofit.resize(model, family.target)
    retrofit.resize(early, family.target)
    expected = features(model, away)
    assert apart(features(early, away), expected) < NEAR
    late = fuse(model)
    assert apart(features(late, away), expected) < NEAR
    for fused in (early, late):
        retrofit.resize(fused, family.start)
        assert apart(features(fused, home), at_home) < NEAR


def test_conditional_positions_survive_fusing() -> None:
    """FastViT's own positions become one convolution; describe still lists them as positions."""
    model = next(one for one in FAMILIES if one.name == "fastvit_sa12").build().double()
    before = [part.path for part in retrofit.describe(model) if part.kind == "conv"]
    after = [part.path for part in retrofit.describe(fuse(model)) if part.kind == "conv"]
    assert len(before) == len(after) == 1
    assert before[0].rpartition(".")[0] == after[0].rpartition(".")[0]
    assert not [part for part in retrofit.describe(fuse(model)) if part.kind == "unknown"]


class LowRank(nn.Module):
    """What an adapter puts in the place of a projection: the old one and a share of its own."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.share = nn.Linear(base.in_features, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return both together."""
        return self.base_layer(x) + self.share(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "name",
    ["swin_tiny_patch4_window7_224", "cait_xxs24_224", "vit_tiny_patch16_224", "twins_pcpvt_small"],
)
def test_attach_to_adapted_projections(name: str) -> None:
    """An adapter's share of q and k turns with the rest: as in the model with both merged into one matrix."""
    variant = BY_NAME[name]
    adapted, merged, x = variant.build(), variant.build(), variant.image(1)
    torch.manual_seed(0)
    for path, part in list(merged.named_modules()):
        stem, _, last = path.rpartition(".")
        if last in ("q", "kv", "qkv"):
            wrapper = LowRank(adapted.get_submodule(path))
            setattr(adapted.get_submodule(stem), last, wrapper)
            with torch.no_grad():
                part.weight += wrapper.share.weight
    plain = features_of(adapted, x)
    for model in (adapted, merged):
        retrofit.attach(model, rotary(variant), strength=1.0)
    expected = features_of(merged, x)
    assert apart(features_of(adapted, x), expected) < 1e-6
    assert apart(expected, plain) > 1e-4
