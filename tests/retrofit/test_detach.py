"""detach: the model is bit for bit what it was, and so are its state dict, its hooks and its classes."""

import copy
from typing import Any

import pytest
import torch
from timm.layers import PatchDropout, PatchDropoutWithIndices
from torch import nn

import visionpos as vp
from tests.retrofit.zoo import CASES, NAMED, Case, image, vit
from visionpos import retrofit
from visionpos.errors import PositionError

SPECS = [
    vp.AxialRopeSpec(),
    vp.MixedRopeSpec(),
    vp.LearnedSpec(grid_hw=(3, 5), std=0.5),
    vp.SinCosSpec(),
]


def fingerprint(model: nn.Module) -> dict[str, Any]:
    """Return what must not differ: classes, attribute names, hooks and keys of every module."""
    return {
        name: (
            type(module),
            sorted(vars(module)),
            list(module._modules),
            list(module._forward_hooks.values()),
            list(module._forward_pre_hooks.values()),
        )
        for name, module in model.named_modules()
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_outputs_and_state_come_back_bit_for_bit(case: Case) -> None:
    model, x = case.build(), case.image()
    before, was = fingerprint(model), {k: v.clone() for k, v in model.state_dict().items()}
    with torch.no_grad():
        features = model.forward_features(x)
        pairing = case.pairing or "adjacent"
        retrofit.attach(model, vp.AxialRopeSpec(pairing=pairing), strength=1.0)
        retrofit.attach(model, vp.MixedRopeSpec(pairing=pairing), learn_strength=True, strength=0.5)
        retrofit.attach(model, vp.SinCosSpec(), strength=1.0)
        assert not torch.equal(model.forward_features(x), features)
        retrofit.detach(model)
        assert torch.equal(model.forward_features(x), features)
    assert fingerprint(model) == before
    assert list(model.state_dict()) == list(was)
    assert all(torch.equal(value, was[key]) for key, value in model.state_dict().items())
    assert retrofit.attachments(model) == {}


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.kind)
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "eva02_tiny_patch14_224"])
def test_patch_dropout_comes_back(name: str, spec: Any) -> None:
    """The dropout has its class, its rate of now, its mode and its draw; hooks that others put on it survive."""
    case = next(case for case in NAMED if case.name == name)
    model, x = case.build(patch_drop_rate=0.5).train(), case.image()
    drop, calls = model.patch_drop, []
    drop.register_forward_hook(lambda module, *_: calls.append(module))
    before = fingerprint(model)
    torch.manual_seed(7)
    features = model.forward_features(x)
    assert len(calls) == 1
    retrofit.attach(model, spec, strength=1.0)
    model.forward_features(x)
    assert len(calls) == 2
    assert model.patch_drop.prob == 0.5
    model.patch_drop.prob = 0.25
    assert model.forward_features(x).shape[1] == 1 + 18
    model.patch_drop.prob = 0.5
    retrofit.detach(model)
    assert fingerprint(model) == before
    assert model.patch_drop is drop
    assert type(drop) is (PatchDropoutWithIndices if "eva" in name else PatchDropout)
    torch.manual_seed(7)
    assert torch.equal(model.forward_features(x), features)


def test_a_rate_changed_meanwhile_stays() -> None:
    model = vit(patch_drop_rate=0.5).train()
    retrofit.attach(model, vp.AxialRopeSpec(), strength=1.0)
    model.patch_drop.prob = 0.25
    retrofit.detach(model)
    assert model.patch_drop.prob == 0.25
    assert type(model.patch_drop) is PatchDropout


def test_one_of_two_leaves_the_other() -> None:
    model, other, x = (
        vit(patch_drop_rate=0.5).train(),
        vit(patch_drop_rate=0.5).train(),
        image((64, 96)),
    )
    retrofit.attach(model, vp.AxialRopeSpec(theta=7.0), strength=1.0, name="first")
    retrofit.attach(model, vp.AxialRopeSpec(), strength=0.5, name="second")
    retrofit.attach(other, vp.AxialRopeSpec(), strength=0.5, name="second")
    retrofit.detach(model, "first")
    assert list(retrofit.attachments(model)) == ["second"]
    results = []
    for one in (model, other):
        torch.manual_seed(3)
        results.append(one.forward_features(x))
    assert torch.equal(results[0], results[1])
    retrofit.detach(model, "second")
    assert not hasattr(model, "visionpos")


def test_hooks_of_others_survive() -> None:
    model, seen = vit(), []
    for module in (model.patch_embed, model.blocks[0], model.blocks[0].attn.q_norm):
        module.register_forward_hook(lambda module, *_: seen.append(module))
    retrofit.attach(model, vp.AxialRopeSpec(), strength=1.0)
    retrofit.detach(model)
    model(image((64, 96)))
    assert len(seen) == 3


def test_a_copy_is_detached_alone() -> None:
    model, x = vit(), image((64, 96))
    with torch.no_grad():
        plain = model.forward_features(x)
        retrofit.attach(model, vp.MixedRopeSpec(), strength=1.0)
        turned = model.forward_features(x)
        twin = copy.deepcopy(model)
        retrofit.detach(twin)
        assert torch.equal(twin.forward_features(x), plain)
        assert torch.equal(model.forward_features(x), turned)


def test_attach_again_under_the_same_name() -> None:
    model, x = vit(), image((64, 96))
    with torch.no_grad():
        retrofit.attach(model, vp.AxialRopeSpec(), strength=1.0)
        turned = model.forward_features(x)
        retrofit.detach(model, "axial_rope")
        retrofit.attach(model, vp.AxialRopeSpec(), strength=1.0)
        assert torch.equal(model.forward_features(x), turned)


def test_after_set_input_size_and_resize() -> None:
    """Detaching does not undo a resize: the model is as if it had been resized without an attachment."""
    model, other = vit(), vit()
    retrofit.attach(model, vp.MixedRopeSpec(), strength=1.0)
    for one in (model, other):
        retrofit.resize(one, (96, 128))
    retrofit.detach(model)
    x = image((96, 128))
    with torch.no_grad():
        assert torch.equal(model.forward_features(x), other.forward_features(x))


def test_error_nothing_to_detach() -> None:
    model = vit()
    with pytest.raises(PositionError, match=r"model has no attachment; attach one first"):
        retrofit.detach(model)
    with pytest.raises(PositionError, match=r"name 'other' is not attached; attached are none"):
        retrofit.detach(model, "other")
    retrofit.attach(model, vp.AxialRopeSpec(), name="mine")
    with pytest.raises(PositionError, match=r"name 'other' is not attached; attached are mine"):
        retrofit.detach(model, "other")
    assert list(retrofit.attachments(model)) == ["mine"]
