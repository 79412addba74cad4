"""Passes: what checkpointing recomputes has the strength and the image size of its own forward pass, not the latest."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import visionpos as vp
from tests.retrofit.families import FAMILIES, Family
from tests.retrofit.zoo import apart
from visionpos import retrofit

ROTATE, BIAS = vp.AxialRopeSpec(), vp.AlibiSpec()
STRENGTHS = {
    "vit_tiny_patch16_224": (ROTATE, BIAS, vp.PegSpec(before=None, after=(0,))),
    "swin_tiny_patch4_window7_224": (ROTATE, BIAS),
    "swinv2_tiny_window8_256": (ROTATE, BIAS),
    "levit_128s": (ROTATE, BIAS),
    "beit_base_patch16_224": (ROTATE, BIAS),
}
SIZES = {
    "beit_base_patch16_224": ((64, 96), (96, 64), (64, 64)),
    "vit_relpos_small_patch16_224": ((64, 96), (96, 64), (64, 64)),
    "coatnet_nano_rw_224": ((64, 128), (128, 64)),
    "levit_conv_128s": ((64, 128), (128, 64)),
}


def family(name: str) -> Family:
    return next(one for one in FAMILIES if one.name == name)


def gradients(model: Any, passes: Any, *, backward_at_once: bool) -> dict[str, Tensor]:
    """Return the gradients of the summed losses of passes, each prepared by a call of its own."""
    model.zero_grad()
    losses = []
    for prepare, x in passes:
        prepare()
        out = model.forward_features(x)
        losses.append(out.square().mean())
        if backward_at_once:
            losses.pop().backward()
    if losses:
        torch.stack(losses).sum().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_alike(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert torch.allclose(found[name], grad, rtol=1e-3, atol=1e-6 * (1 + grad.abs().max())), (
            name
        )


@pytest.mark.parametrize("name", STRENGTHS)
def test_strength_of_its_own_pass(name: str) -> None:
    """Strengths move between two forward passes and the backward pass, to 0 and away from it too."""
    one = family(name)
    for spec in STRENGTHS[name]:
        model = one.build().train("levit" in name)  # in eval it keeps a bias with its graph
        torch.manual_seed(0)
        part = retrofit.attach(model, spec, strength=0.3)
        with torch.no_grad():
            for weight in part.parameters():
                weight.normal_(std=0.3)
        x = torch.cat([one.image(one.start), one.image(one.start).flip(-1)])
        steps = [(partial(part.set_strength, s), x * (1 + s)) for s in (0.9, 0.0, 0.4, 0.0)]
        expected = gradients(model, steps, backward_at_once=True)
        model.set_grad_checkpointing(True)
        assert_alike(gradients(model, steps, backward_at_once=False), expected)
        assert part.strength == 0.0
        assert part.idle


@pytest.mark.parametrize("name", SIZES)
def test_size_of_its_own_pass(name: str) -> None:
    """Images of several sizes, some of as many tokens, go through a dynamic model before one backward pass."""
    one = family(name)
    model = one.build()
    retrofit.make_dynamic(model)
    steps = [(lambda: None, one.image(size)) for size in SIZES[name]]
    expected = gradients(model, steps, backward_at_once=False)
    assert len(expected) > 4
    for copied in (model, copy.deepcopy(model)):
        copied.set_grad_checkpointing(True)
        assert_alike(gradients(copied, steps, backward_at_once=False), expected)


def test_size_of_its_own_pass_with_an_attachment() -> None:
    one = family("vit_relpos_small_patch16_224")
    model = one.build()
    part = retrofit.attach(model, BIAS, strength=0.5, name="bias")
    retrofit.attach(model, ROTATE, strength=0.5, name="rope")
    retrofit.make_dynamic(model)
    steps = [
        (lambda s=s: part.set_strength(s), one.image(size))
        for size, s in (((64, 96), 0.2), ((96, 64), 1.0))
    ]
    expected = gradients(model, steps, backward_at_once=False)
    model.set_grad_checkpointing(True)
    assert_alike(gradients(model, steps, backward_at_once=False), expected)


def test_whole_model_is_recomputed() -> None:
    """checkpoint(model, x) runs the module that takes the image once more: it says which size it is."""
    one = family("beit_base_patch16_224")
    model = one.build()
    retrofit.make_dynamic(model)
    images = [one.image(size).requires_grad_() for size in ((64, 96), (96, 64))]
    sum(model(x).square().mean() for x in images).backward()
    expected = [x.grad.clone() for x in images if x.grad is not None]
    for x in images:
        x.grad = None
    losses = [
        torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).square().mean()
        for x in images
    ]
    sum(losses).backward()
    for x, wanted in zip(images, expected, strict=True):
        assert x.grad is not None
        assert apart(x.grad, wanted) < 1e-5


def test_marks_leave_no_trace() -> None:
    """Images are not written to; what is detached leaves no hook behind."""
    one = family("swin_tiny_patch4_window7_224")
    model, x = one.build(), one.image(one.start)
    before = sum(len(module._forward_pre_hooks) for module in model.modules())
    retrofit.attach(model, ROTATE, strength=0.5)
    with torch.no_grad():
        model(x)
    assert vars(x) == {}
    assert vars(x.untyped_storage()) == {}
    retrofit.detach(model)
    assert sum(len(module._forward_pre_hooks) for module in model.modules()) == before
