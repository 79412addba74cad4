"""Odd orders and odd arguments: each is right, or refused by name with the model as it was."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import visionpos as vp
from tests.retrofit.families import FAMILIES, Family, features
from tests.retrofit.zoo import apart, image, vit
from visionpos import retrofit
from visionpos.errors import PositionError

SIZE = (64, 96)


def family(name: str) -> Family:
    return next(one for one in FAMILIES if one.name == name)


# Strengths and names.


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("strength", [float("nan"), float("inf"), 1e308, -1e39, "0.5", None, [1.0]])
def test_error_strength(strength: Any, learned: bool) -> None:
    model = vit()
    with pytest.raises(PositionError, match=r"strength is .*; a finite number is required"):
        retrofit.attach(model, vp.AxialRopeSpec(), strength=strength, learn_strength=learned)
    assert retrofit.attachments(model) == {}
    part = retrofit.attach(model, vp.AxialRopeSpec(), strength=0.5, learn_strength=learned)
    with pytest.raises(PositionError, match=r"strength is .*; a finite number is required"):
        part.set_strength(strength)
    assert float(torch.as_tensor(part.strength).detach()) == 0.5


@pytest.mark.parametrize("strength", [-1.0, 1e30, torch.tensor(0.5)])
def test_any_finite_strength_is_taken(strength: Any) -> None:
    model = vit()
    part = retrofit.attach(model, vp.AxialRopeSpec(), strength=strength)
    assert features(model, image(SIZE)).isfinite().all()
    assert part.strength == float(strength)


@pytest.mark.parametrize("spec", [None, "rope_mixed", {}, vp.CoordSpec(), vp.AxialRopeSpec])
def test_error_spec(spec: Any) -> None:
    with pytest.raises(PositionError, match=r"^spec is .*AxialRopeSpec"):
        retrofit.attach(vit(), spec)
    model = vit()
    with pytest.raises(PositionError, match=r"^spec is .*AxialRopeSpec"):
        retrofit.fade_table(model, spec or "nothing", retrofit.Schedule(steps=2))
    assert model.pos_embed is not None


def test_error_model_and_name() -> None:
    for model in (None, "vit_tiny_patch16_224"):
        anything: Any = model
        for call in (retrofit.describe, retrofit.attachable, retrofit.dims_of, retrofit.lineage):
            with pytest.raises(PositionError, match=r"model is .*; a timm model is required"):
                call(anything)
        with pytest.raises(PositionError, match=r"model is .*; a timm model is required"):
            retrofit.attach(anything, vp.AxialRopeSpec())
        with pytest.raises(PositionError, match=r"model is .*; a timm model is required"):
            retrofit.save(anything, "nowhere.safetensors")
    number: Any = 3
    with pytest.raises(PositionError, match=r"name is 3; a Python identifier is required"):
        retrofit.attach(vit(), vp.AxialRopeSpec(), name=number)


# Sizes, patches and channels.


@pytest.mark.parametrize("patch", [8.0, (8, 8, 8), (8,), "8", 0, (8, -4)])
def test_error_patch(patch: Any) -> None:
    with pytest.raises(PositionError, match=r"patch is .*; \(height, width\) in pixels"):
        retrofit.resize(vit(), SIZE, patch=patch)


@pytest.mark.parametrize("in_chans", ["3", None, 2.5, 0, True])
def test_error_channels(in_chans: Any) -> None:
    with pytest.raises(PositionError, match=r"in_chans is .*; a whole number above 0 is required"):
        retrofit.adapt_channels(vit(), in_chans)


@pytest.mark.parametrize("recipe", ["nope", 3])
def test_error_recipe_where_nothing_moves(recipe: Any) -> None:
    """A word that means nothing is refused also where no table would ask for it."""
    with pytest.raises(PositionError, match=r"recipe is .*nope|recipe is '?3"):
        retrofit.resize(vit(), SIZE, recipe=recipe)
    swin = family("swin_tiny_patch4_window7_224").build()
    with pytest.raises(PositionError, match=r"windows is \(True, True\)"):
        retrofit.resize(swin, (224, 224), windows=(True, True))


def test_patches_then_channels_then_home() -> None:
    """The kernel that others are resampled from changes its channels, too: nothing is lost on the way."""
    model, other = vit(), vit()
    retrofit.resize(model, SIZE, patch=8)
    retrofit.adapt_channels(model, 1)
    retrofit.resize(model, SIZE, patch=16)
    retrofit.adapt_channels(other, 1)
    assert torch.equal(model.patch_embed.proj.weight, other.patch_embed.proj.weight)


def test_resize_on_the_meta_device() -> None:
    """Without numbers there is no source to go back to; afterwards weights that are loaded are their own."""
    model = vit()
    retrofit.resize(model, (96, 96))
    model.to("meta")
    retrofit.attach(model, vp.MixedRopeSpec(), strength=1.0)
    retrofit.resize(model, SIZE)
    retrofit.lineage(model)
    retrofit.describe(model)
    retrofit.detach(model)
    model.to_empty(device="cpu").load_state_dict(vit().state_dict())
    assert torch.equal(features(model, image(SIZE)), features(vit(), image(SIZE)))


@pytest.mark.parametrize("extent", ["trained", "index"])
def test_error_extent_of_what_turns_in_windows(extent: Any) -> None:
    """The image's grid is not the window's: to follow it would change outputs even where the size stays."""
    one = family("swin_tiny_patch4_window7_224")
    model = one.build()
    retrofit.attach(model, vp.AxialRopeSpec(), strength=1.0)
    expected = features(model, one.image(one.start))
    with pytest.raises(PositionError, match=r"have grids of their own, not the image's"):
        retrofit.resize(model, one.start, extent=extent)
    assert torch.equal(features(model, one.image(one.start)), expected)
    flat = family("beit_base_patch16_224")
    model = flat.build()
    retrofit.attach(model, vp.AxialRopeSpec(), strength=1.0)
    expected = features(model, flat.image(flat.start))
    retrofit.resize(model, flat.start, extent=extent)
    assert torch.equal(features(model, flat.image(flat.start)), expected)


# Passes, copies and frozen copies.


def test_inference_mode() -> None:
    """What is moved in inference mode trains afterwards: its buffers and weights are plain tensors."""
    model = family("swin_tiny_patch4_window7_224").build()
    flat = vit()
    with torch.inference_mode():
        retrofit.resize(model, (448, 224), windows="scale")
        retrofit.adapt_channels(model, 1)
        retrofit.attach(model, vp.MixedRopeSpec(), strength=1.0)
        retrofit.resize(flat, (96, 96))
        retrofit.lift_table(flat)
    model(torch.randn(1, 1, 448, 224)).square().mean().backward()
    flat(image((96, 96))).square().mean().backward()
    assert all(weight.grad is not None for weight in model.visionpos.parameters())
    assert all(weight.grad is not None for weight in flat.visionpos.parameters())


@pytest.mark.parametrize("fused", [False, True])
def test_bias_with_causal_attention(fused: bool) -> None:
    """A causal model keeps its order, and the bias acts: an explicit mask of both is the oracle."""
    model, x = vit(), image(SIZE)
    for block in model.blocks:
        block.attn.fused_attn = fused
    plain = copy.deepcopy(model)
    part = retrofit.attach(model, vp.AlibiSpec(), strength=0.5)
    bias = 0.5 * part.encoding(vp.Grid(4, 6), prefix=1)
    later = torch.ones(25, 25, dtype=torch.bool).triu(1)
    with torch.no_grad():
        found = model.forward_features(x, is_causal=True)
        mask = bias.masked_fill(later, float("-inf")).unsqueeze(0)
        assert apart(found, plain.forward_features(x, attn_mask=mask)) < 1e-6
        assert apart(found, plain.forward_features(x, is_causal=True)) > 1e-3


@pytest.mark.parametrize("name", ["botnet26t_256", "levit_128s", "vit_tiny_patch16_224"])
def test_added_vectors_reach_intermediates(name: str) -> None:
    """ByobNet's forward_intermediates goes around the stem itself."""
    one = family(name)
    model = one.build()
    retrofit.attach(model, vp.SinCosSpec(), strength=0.7)
    with torch.no_grad():
        last, inner = model.forward_intermediates(one.image(one.start))
    assert torch.equal(last, features(model, one.image(one.start)))
    assert apart(last, features(one.build(), one.image(one.start))) > 1e-3
    assert inner


def test_detach_in_any_order() -> None:
    model, x = vit(), image(SIZE)
    expected = features(model, x)
    specs = (
        vp.AxialRopeSpec(),
        vp.AlibiSpec(),
        vp.SinCosSpec(),
        vp.PegSpec(before=None, after=(0,)),
    )
    for number, spec in enumerate(specs):
        retrofit.attach(model, spec, name=f"a{number}", strength=0.6)
    full = features(model, x)
    other = copy.deepcopy(model)
    for name in ("a1", "a3", "a0", "a2"):
        retrofit.detach(other, name)
    assert torch.equal(features(other, x), expected)
    assert torch.equal(features(model, x), full)
    retrofit.resize(model, (96, 64))
    retrofit.resize(model, SIZE)
    assert torch.equal(features(model, x), full)
    retrofit.detach(model)
    assert torch.equal(features(model, x), expected)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_error_of_a_frozen_copy(tmp_path: Path) -> None:
    """Constants cannot follow: another size, another strength, a lineage that would be wrong."""
    model, x = vit(), image(SIZE)
    retrofit.attach(model, vp.MixedRopeSpec(), name="rope", strength=0.6)
    frozen = retrofit.freeze(model, SIZE)
    expected = features(frozen, x)
    with pytest.raises(PositionError, match=r"frozen for images of 64x96, and cannot be resized"):
        retrofit.resize(frozen, (96, 96))
    with pytest.raises(PositionError, match=r"frozen for images of 64x96, and cannot be saved"):
        retrofit.save(frozen, tmp_path / "a.safetensors")
    part = retrofit.attachments(frozen)["rope"]
    with pytest.raises(PositionError, match=r"strength is 0.1; this attachment is frozen at 0.6"):
        part.set_strength(0.1)
    part.set_strength(0.6)
    assert torch.equal(features(frozen, x), expected)
    retrofit.detach(frozen)
    assert torch.equal(features(frozen, x), features(vit(), x))
