"""Other patches and other channels: FlexiViT's resampling, oblong patches, spectrograms, extra bands."""

import copy
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.retrofit.families import FAMILIES, features
from tests.retrofit.zoo import apart, create, opened, vit
from visionpos import retrofit
from visionpos.errors import PositionError


def state(model: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("patch", [(32, 32), (16, 8), (8, 24), (24, 16)], ids=str)
def test_tokens_of_resized_images_are_the_same(patch: tuple[int, int]) -> None:
    """What PI-resize promises: enlarge image and patch alike, and the tokens do not change."""
    model = vit((64, 96))
    x = torch.randn(1, 3, 64, 96)
    patches = x.unfold(2, 16, 16).unfold(3, 16, 16)  # [1, 3, 4, 6, 16, 16]
    before = model.patch_embed(x)
    size = (4 * patch[0], 6 * patch[1])
    retrofit.resize(model, size, patch=patch)
    assert model.patch_embed.patch_size == patch
    assert model.patch_embed.grid_size == (4, 6)
    flat = patches.permute(0, 2, 3, 1, 4, 5).flatten(0, 2)
    grown = F.interpolate(flat, size=patch, mode="bicubic", antialias=True, align_corners=False)
    image = grown.unflatten(0, (4, 6)).permute(2, 0, 3, 1, 4).reshape(1, 3, *size)
    after = model.patch_embed(image)
    if patch[0] >= 16 and patch[1] >= 16:  # nothing is lost
        assert apart(after, before) < 1e-3
    else:
        assert apart(after, before) < 1.0


@pytest.mark.parametrize(
    "name",
    ["vit_tiny_patch16_224", "eva02_tiny_patch14_224", "cait_xxs24_224", "beit_base_patch16_224"],
)
def test_there_and_back_is_exact(name: str) -> None:
    """The kernel comes from the one that was trained, and stays the same Parameter; so do table and bias."""
    family = next(one for one in FAMILIES if one.name == name)
    model = family.build()
    step = model.patch_embed.patch_size[0]
    before, parameters, x = state(model), list(model.parameters()), family.image(family.start)
    at_home = features(model, x)
    retrofit.resize(model, (96, 96), patch=8)
    retrofit.resize(model, (96, 144), patch=(12, 24))
    assert features(model, family.image((96, 144))).isfinite().all()
    retrofit.resize(model, family.start, patch=step)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert torch.equal(features(model, x), at_home)


def test_parity_with_set_input_size() -> None:
    model, other = vit(), vit()
    retrofit.resize(model, (72, 96), patch=(8, 12), recipe="timm")
    other.set_input_size(img_size=(72, 96), patch_size=(8, 12))
    x = torch.randn(1, 3, 72, 96)
    assert apart(features(model, x), features(other, x)) < 1e-5
    assert vars(model.patch_embed)["grid_size"] == other.patch_embed.grid_size == (9, 8)


def test_the_optimizer_goes_on() -> None:
    model = vit().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)

    def step(size: tuple[int, int]) -> None:
        optimizer.zero_grad()
        model.forward_features(torch.randn(1, 3, *size)).square().mean().backward()
        optimizer.step()

    step((64, 96))
    retrofit.resize(model, (64, 96), patch=8, optimizer=optimizer)
    weight = model.patch_embed.proj.weight
    assert optimizer.state[weight]["exp_avg"].shape == weight.shape == (64, 3, 8, 8)
    assert (optimizer.state[weight]["exp_avg_sq"] >= 0).all()
    step((64, 96))


@pytest.mark.parametrize(
    ("name", "patch", "message"),
    [
        ("vit_tiny_patch16_224", (10, 16), r"not divisible into patches of \(10, 16\)"),
        ("vit_tiny_patch16_224", 0, r"patch is 0; \(height, width\) in pixels"),
        (
            "levit_128s",
            8,
            r"patch is 8; the patches of a Levit\w* are cut by more than one convolution",
        ),
        ("pit_ti_224", 8, r"patches of a PoolingVisionTransformer"),
        ("vit_small_r26_s32_224", 2, r"patch is 2|not divisible"),
    ],
)
def test_error_patches(name: str, patch: Any, message: str) -> None:
    model = timm.create_model(name, img_size=(64, 96) if "r26" not in name else (96, 96))
    other = copy.deepcopy(model)
    with pytest.raises(PositionError, match=message):
        retrofit.resize(model, (64, 96) if "r26" not in name else (100, 96), patch=patch)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )


def test_spectrograms() -> None:
    """One channel, 128 mel bands by 1024 frames: a table of 8 x 64 from a square one, axes not swapped."""
    model = create("vit_tiny_patch16_224", (224, 224))
    opened(model)
    grey = torch.randn(1, 1, 224, 224)
    with torch.no_grad():
        as_rgb = model.patch_embed(grey.expand(-1, 3, -1, -1))
    retrofit.adapt_channels(model, 1)
    with torch.no_grad():
        assert apart(model.patch_embed(grey), as_rgb) < 1e-5
    retrofit.resize(model, (128, 1024))
    assert retrofit.grid_of(model).shape == (1, 8, 64)
    assert features(model, torch.randn(1, 1, 128, 1024)).shape == (1, 513, 64)
    retrofit.resize(model, (128, 1008), patch=(16, 12))
    assert retrofit.grid_of(model).shape == (1, 8, 84)
    assert retrofit.lineage(model).build["in_chans"] == 1


@pytest.mark.parametrize("channels", [2, 4, 8])
def test_extra_channels_are_timms(channels: int) -> None:
    from timm.models import adapt_input_conv

    model = vit()
    weight = model.patch_embed.proj.weight
    wanted = adapt_input_conv(channels, weight.detach().clone())
    retrofit.adapt_channels(model, channels)
    assert model.patch_embed.proj.weight is weight
    assert torch.equal(weight, wanted)
    assert features(model, torch.randn(1, channels, 64, 96)).isfinite().all()
    assert model.in_chans == channels if hasattr(model, "in_chans") else True


def test_channels_of_other_classes() -> None:
    for name in (
        "levit_128s",
        "swin_tiny_patch4_window7_224",
        "crossvit_tiny_240",
        "botnet26t_256",
    ):
        family = next(one for one in FAMILIES if one.name == name)
        model = family.build()
        retrofit.adapt_channels(model, 4)
        height, width = family.start
        assert features(model, torch.randn(1, 4, height, width)).isfinite().all()


def test_error_channels() -> None:
    model = vit()
    for bad in (0, -1, 1.5, True):
        with pytest.raises(PositionError, match=r"in_chans is"):
            retrofit.adapt_channels(model, bad)  # type: ignore[arg-type]
    flex = timm.create_model("naflexvit_base_patch16_gap", depth=1, embed_dim=64, num_heads=2)
    with pytest.raises(PositionError, match=r"no plain convolution of the image"):
        retrofit.adapt_channels(flex, 1)
