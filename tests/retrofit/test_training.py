"""Every row of the seam table in training as it is really done: a break, copies, averages, crops, dropout, compile.

One small variant of each class carries a rotation where its q and k can be reached, and tokens mixed after a block
where they cannot. The normal run takes the classes whose attention finds its grid in ways of their own elsewhere
(test_attentions); here the whole list runs, most of it in the slow run.
"""

from __future__ import annotations

import copy
import inspect
import io
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from timm.utils import ModelEmaV3
from torch import nn

import visionpos as vp
from tests.retrofit.attentions import VARIANTS, Variant, features
from tests.retrofit.zoo import apart
from visionpos import PositionError, retrofit

if TYPE_CHECKING:
    from pathlib import Path

# One for each way of finding the grid of an attention, small enough for every run.
QUICK = {
    "beit_base_patch16_224",
    "hiera_tiny_224",
    "swinv2_tiny_window8_256",
    "xcit_nano_12_p16_224",
}
CASES = [
    pytest.param(variant, marks=() if variant.name in QUICK else pytest.mark.slow, id=variant.name)
    for variant in VARIANTS
]


def spec_of(variant: Variant) -> Any:
    """Return a rotation where q and k can be reached, else a convolution after the first block."""
    if variant.ports:
        return vp.AxialRopeSpec(pairing=variant.pairing, rotary_dim=variant.rotary_dim)
    return vp.PegSpec(after=(0,))


def attached(variant: Variant, seed: int = 0, **changes: Any) -> Any:
    """Return the model with its attachment at strength 0.7."""
    model = variant.build(seed)
    torch.manual_seed(seed)  # kernels start at random
    retrofit.attach(
        model, spec_of(variant), **{"strength": 0.7, "partial": bool(variant.ports), **changes}
    )
    return model


def needs(model: Any, method: str) -> None:
    """Skip a class that timm has not given a method, or whose method only refuses."""
    if not hasattr(model, method):
        pytest.skip(f"timm's {type(model).__name__} has no {method}")


def tensors_of(out: Any) -> list[torch.Tensor]:
    """Return what forward_features gives, one tensor or several, as a list."""
    if isinstance(out, torch.Tensor):
        return [out]
    return list(out.values() if isinstance(out, dict) else out)


def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Return a loss whose gradients are of size one, however wide the activations are."""
    parts = [part for part in tensors_of(model.forward_features(x)) if part.is_floating_point()]
    return sum((part.relu() / part.detach().norm()).square().sum() for part in parts)  # type: ignore[return-value]


def train(model: Any, optimizer: torch.optim.Optimizer, variant: Variant, steps: range) -> None:
    """Take steps; every draw of a step, dropped paths included, is a function of its number."""
    model.train()
    for step in steps:
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss_of(model, variant.image() * (1 + 0.1 * step)).backward()
        optimizer.step()


def same(one: Any, other: Any) -> list[str]:
    """Return the names under which two models differ."""
    mine, theirs = one.state_dict(), other.state_dict()
    assert list(mine) == list(theirs)
    return [name for name in mine if not torch.equal(mine[name], theirs[name])]


@pytest.mark.parametrize("variant", CASES)
def test_resumed_training_is_unbroken_training(tmp_path: Path, variant: Variant) -> None:
    """Attach, train 3 steps, save, load into another model, train on: bit for bit the run without a break."""
    unbroken, first = (attached(variant, learn_strength=True) for _ in range(2))
    before = copy.deepcopy(unbroken.state_dict())
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-4) for model in (unbroken, first)]
    train(unbroken, optimizers[0], variant, range(6))
    train(first, optimizers[1], variant, range(3))
    retrofit.save(first, tmp_path / "run.safetensors")
    second = attached(variant, 9, strength=0.1, learn_strength=True)
    assert same(second, first)
    retrofit.load(second, tmp_path / "run.safetensors")
    assert not same(second, first)
    optimizer = torch.optim.AdamW(second.parameters(), lr=1e-4)
    optimizer.load_state_dict(optimizers[1].state_dict())
    train(second, optimizer, variant, range(3, 6))
    assert not same(second, unbroken)
    learned = [name for name in before if name.startswith("visionpos")]
    assert any(not torch.equal(before[name], second.state_dict()[name]) for name in learned)
    x = variant.image()
    assert torch.equal(features(second.eval(), x), features(unbroken.eval(), x))


@pytest.mark.parametrize("variant", CASES)
def test_copies_and_averages(variant: Variant) -> None:
    """A deepcopy, a pickle and timm's own average act as the model, and the average follows it alone."""
    model, x = attached(variant, learn_strength=True), variant.image()
    if variant.double:
        model, x = model.double(), x.double()
    turned = features(model, x)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    average = ModelEmaV3(model, decay=0.5, exclude_buffers=True)  # Gemma 4 has infinite ones
    for twin in (copy.deepcopy(model), torch.load(file, weights_only=False), average.module):
        assert torch.equal(features(twin, x), turned)
        (part,) = retrofit.attachments(twin).values()
        part.set_strength(0.0)
        assert apart(features(twin, x), turned) > 1e-6
        part.set_strength(0.7)
        assert torch.equal(features(model, x), turned)
    (mine,) = retrofit.attachments(model).values()
    mine.set_strength(0.1)
    average.update(model)
    (theirs,) = retrofit.attachments(average.module).values()
    assert theirs.strength.item() == pytest.approx(0.4)
    mine.set_strength(0.4)
    assert apart(features(average.module, x), features(model, x)) < 1e-6
    retrofit.detach(average.module)
    retrofit.detach(model)
    assert torch.equal(features(average.module, x), features(model, x))


def gradients(model: Any, images: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """Return the gradients of two crops under one backward pass."""
    model.zero_grad()
    torch.manual_seed(3)
    loss = sum(loss_of(model, x) for x in images)
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("variant", CASES)
def test_two_crops_under_checkpointing(variant: Variant) -> None:
    """Two forwards, then one backward that recomputes both: the gradients of a run without checkpointing."""
    model = attached(variant, learn_strength=True).train()
    needs(model, "set_grad_checkpointing")
    try:
        model.set_grad_checkpointing(True)
    except AssertionError:
        pytest.skip("timm's own refusal: gradient checkpointing not supported")
    model.set_grad_checkpointing(False)
    for part in model.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            part.eval()
    images = [variant.image(), variant.image() * 0.5 + 0.1]
    expected = gradients(model, images)
    model.set_grad_checkpointing(True)
    for actual, wanted in zip(gradients(model, images), expected, strict=True):
        assert (actual is None) == (wanted is None)
        if wanted is not None:
            torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("variant", CASES)
def test_forward_intermediates(variant: Variant) -> None:
    """timm's second way through the blocks: bit-identical at strength 0, the same turned tokens at strength 1."""
    model, x = variant.build(), variant.image()
    needs(model, "forward_intermediates")
    with torch.no_grad():
        plain = model.forward_intermediates(x)
        attachment = retrofit.attach(model, spec_of(variant), partial=bool(variant.ports))
        rest = model.forward_intermediates(x)
        attachment.set_strength(1.0)
        turned, inner = model.forward_intermediates(x)
        whole = model.forward_features(x)
    before, after = ([*tensors_of(last), *each] for last, each in (plain, rest))
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    pairs = zip(tensors_of(turned), tensors_of(whole), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert apart(inner[-1], plain[1][-1]) > 1e-6


def half(model: Any, x: torch.Tensor, *, autocast: bool) -> torch.Tensor | None:
    """Return features in bfloat16, None where timm has no such kernel."""
    try:
        if not autocast:
            return features(copy.deepcopy(model).bfloat16(), x.bfloat16())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return features(model, x)
    except NotImplementedError:
        return None


@pytest.mark.filterwarnings(
    "ignore:Mismatch dtype:UserWarning"
)  # of the norm in timm's DiffAttention
@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "weights"])
@pytest.mark.parametrize("variant", CASES)
def test_bfloat16(variant: Variant, autocast: bool) -> None:
    """An attachment costs no digits: half precision moves features about as far as it moves the bare model's."""
    bare, model, x = variant.build(), attached(variant, strength=1.0), variant.image()
    without, with_it = (half(one, x, autocast=autocast) for one in (bare, model))
    if without is None:
        pytest.skip("timm's own forward has no bfloat16 kernel here")
    assert with_it is not None
    assert autocast or with_it.dtype == torch.bfloat16
    assert apart(with_it, features(model, x)) < 2 * apart(without, features(bare, x))


@pytest.mark.slow
@pytest.mark.parametrize("variant", CASES)
def test_compiles_whole(variant: Variant) -> None:
    """One graph, the numbers of the model."""
    model, x = attached(variant), variant.image()
    expected = features(model, x)
    torch.compiler.reset()
    model.forward_features = torch.compile(model.forward_features, backend="eager", fullgraph=True)
    assert apart(features(model, x), expected) < 1e-6
    torch.compiler.reset()


@pytest.mark.parametrize("variant", CASES)
@pytest.mark.filterwarnings("ignore:.*:UserWarning")  # of timm's own resampling
def test_set_input_size_after_attach(variant: Variant) -> None:
    """timm's own move after attach is attach after timm's own move."""
    size = 2 * variant.size_hw[0], 2 * variant.size_hw[1]
    x = torch.randn(1, 3, *size, generator=torch.Generator().manual_seed(1))
    early = attached(variant, strength=1.0)
    needs(early, "set_input_size")
    early.set_input_size(size)
    late = variant.build()
    late.set_input_size(size)
    plain = features(late, x)
    retrofit.attach(late, spec_of(variant), strength=1.0, partial=bool(variant.ports))
    late.visionpos.load_state_dict(early.visionpos.state_dict())
    assert torch.equal(features(early, x), features(late, x))
    assert apart(features(early, x), plain) > 1e-6
    retrofit.detach(early)
    assert torch.equal(features(early, x), plain)


# DeiT's own module would drop its second prefix token, Hiera hands on masks that cannot be followed.
REFUSED_DROPOUT = {
    "deit_tiny_distilled_patch16_224": r"patch_drop spares 1 prefix tokens and the model has 2",
    "hiera_tiny_224": r"Masked mask units .* are not followed: set patch_drop_rate=0",
    "hiera_small_abswin_256": r"Masked mask units .* are not followed: set patch_drop_rate=0",
}


@pytest.mark.parametrize("name", REFUSED_DROPOUT)
def test_error_patch_dropout(name: str) -> None:
    """Refused by name, at the latest when patches are dropped; a constant strength of 0 needs no positions."""
    (variant,) = (one for one in VARIANTS if one.name == name)
    model = replace(variant, extra={**variant.extra, "patch_drop_rate": 0.5}).build().train()

    def attach_and_run() -> None:
        retrofit.attach(model, spec_of(variant), strength=1.0, partial=True)
        features(model, variant.image())

    with pytest.raises(PositionError, match=REFUSED_DROPOUT[name]):
        attach_and_run()


@pytest.mark.parametrize("variant", CASES)
def test_patch_dropout(variant: Variant) -> None:
    """The same patches are dropped with an attachment as without; at strength 0 nothing else happens either."""
    if variant.name in {*REFUSED_DROPOUT, "samvit_base_patch16"}:
        pytest.skip("refused above by name; SAM's fails in timm, before anything is attached")
    with torch.device("meta"):
        parameters = inspect.signature(type(variant.made()).__init__).parameters
    if "patch_drop_rate" not in parameters:
        pytest.skip("the class drops no patches")
    model = replace(variant, extra={**variant.extra, "patch_drop_rate": 0.5}).build().train()
    x = variant.image()
    torch.manual_seed(3)
    plain = features(model, x)
    attachment = retrofit.attach(model, spec_of(variant), partial=bool(variant.ports))
    torch.manual_seed(3)
    assert torch.equal(features(model, x), plain)
    attachment.set_strength(1.0)
    torch.manual_seed(3)
    turned = features(model, x)
    assert turned.shape == plain.shape
    assert apart(turned, plain) > 1e-4
