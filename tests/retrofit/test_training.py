"""Every row of the seam table in training as it is really done: a break, copies, averages, crops, dropout, compile.

One small variant of each class carries a rotation where its q and k can be reached, and tokens mixed after a block
where they cannot. The normal run takes the classes whose attention finds its grid in ways of their own elsewhere
(test_attentions); here the whole list runs, most of it in the slow run.
"""

from __future__ import annotations

import copy
import inspect
import io
from typing import TYPE_CHECKING, Any

import pytest
import timm
import torch
from timm.utils import ModelEmaV3
from torch import nn

import visionpos as vp
from tests.retrofit.attentions import VARIANTS, Variant, features
from tests.retrofit.zoo import apart, opened
from visionpos import retrofit

if TYPE_CHECKING:
    from pathlib import Path

# One for each way of finding the grid of an attention, small enough for every run.
QUICK = {"beit_base_patch16_224", "hiera_tiny_224", "swinv2_tiny_window8_256", "xcit_nano_12_p16_224"}
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
    retrofit.attach(
        model, spec_of(variant), **{"strength": 0.7, "partial": bool(variant.ports), **changes}
    )
    return model


def having(*names: str) -> list[Any]:
    """Return the variants whose class has all of these methods."""
    kept = []
    for case in CASES:
        (variant,) = case.values
        with torch.device("meta"):
            model = variant.made()
        if all(hasattr(model, name) for name in names):
            kept.append(case)
    return kept


def train(model: Any, optimizer: torch.optim.Optimizer, variant: Variant, steps: range) -> None:
    """Take steps; every draw of a step, dropped paths included, is a function of its number."""
    model.train()
    for step in steps:
        torch.manual_seed(step)
        optimizer.zero_grad()
        out = model.forward_features(variant.image() * (1 + 0.1 * step))
        out = out["patches"] if isinstance(out, dict) else out
        parts = out if isinstance(out, (list, tuple)) else [out]
        sum((part / part.detach().norm()).square().sum() * part.mean() for part in parts).backward()
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
    turned = features(model, x)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    average = ModelEmaV3(model, decay=0.5)
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
    assert float(theirs.strength) == pytest.approx(0.4)
    mine.set_strength(0.4)
    assert apart(features(average.module, x), features(model, x)) < 1e-6
    retrofit.detach(average.module)
    retrofit.detach(model)
    assert torch.equal(features(average.module, x), features(model, x))


def gradients(model: Any, images: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """Return the gradients of two crops under one backward pass."""
    model.zero_grad()
    torch.manual_seed(3)
    loss = 0.0
    for x in images:
        out = model.forward_features(x)
        out = out["patches"] if isinstance(out, dict) else out
        for part in out if isinstance(out, (list, tuple)) else [out]:
            loss = loss + (part / part.detach().norm()).square().sum() + (part.mean() / part.detach().std())
    loss.backward()
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("variant", having("set_grad_checkpointing"))
def test_two_crops_under_checkpointing(variant: Variant) -> None:
    """Two forwards, then one backward that recomputes both: the gradients of a run without checkpointing."""
    model = attached(variant, learn_strength=True).train()
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


@pytest.mark.parametrize("variant", having("forward_intermediates"))
def test_forward_intermediates(variant: Variant) -> None:
    """timm's second way through the blocks: bit-identical at strength 0, the same turned tokens at strength 1."""
    model, x = variant.build(), variant.image()
    with torch.no_grad():
        plain = model.forward_intermediates(x)
        attachment = retrofit.attach(model, spec_of(variant), partial=bool(variant.ports))
        rest = model.forward_intermediates(x)
        attachment.set_strength(1.0)
        turned, inner = model.forward_intermediates(x)
        whole = model.forward_features(x)
    flat = lambda out: [out] if isinstance(out, torch.Tensor) else list(out.values() if isinstance(out, dict) else out)
    for one, other in zip([*flat(plain[0]), *plain[1]], [*flat(rest[0]), *rest[1]], strict=True):
        assert torch.equal(one, other)
    for one, other in zip(flat(turned), flat(whole), strict=True):
        assert torch.equal(one, other)
    assert apart(inner[-1], plain[1][-1]) > 1e-6


@pytest.mark.parametrize("variant", CASES)
def test_bfloat16(variant: Variant) -> None:
    """Autocast and weights of bfloat16 move features by no more than they do without an attachment, about."""
    bare, x = variant.build(), variant.image()
    moved = apart(features(copy.deepcopy(bare).bfloat16(), x.bfloat16()), features(bare, x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = apart(features(bare, x), features(bare, x))
    model = attached(variant, strength=1.0)
    expected = features(model, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        soft = features(model, x)
    hard = features(copy.deepcopy(model).bfloat16(), x.bfloat16())
    assert hard.dtype == torch.bfloat16
    print(variant.name, moved, apart(hard, expected), apart(soft, expected), cast)


@pytest.mark.slow
@pytest.mark.parametrize("variant", CASES)
def test_compiles_whole(variant: Variant) -> None:
    """One graph, the numbers of the model."""
    model, x = attached(variant), variant.image()
    bare = variant.build()
    torch.compiler.reset()
    try:
        with torch.no_grad():
            torch.compile(bare.forward_features, backend="eager", fullgraph=True)(x)
    except Exception as error:
        pytest.skip(f"timm itself does not compile whole: {type(error)}")
    torch.compiler.reset()
    expected = features(model, x)
    compiled = torch.compile(model.forward_features, backend="eager", fullgraph=True)
    assert apart(features(type("Call", (), {"forward_features": staticmethod(compiled)}), x), expected) < 1e-6
    torch.compiler.reset()


def sizes_after(variant: Variant) -> tuple[int, int]:
    return variant.size_hw[0] * 2, variant.size_hw[1] * 2


@pytest.mark.parametrize("variant", having("set_input_size"))
@pytest.mark.filterwarnings("ignore")
def test_set_input_size_after_attach(variant: Variant) -> None:
    """timm's own move after attach is attach after timm's own move."""
    size = sizes_after(variant)
    x = torch.randn(1, 3, *size, generator=torch.Generator().manual_seed(1))
    early = attached(variant, strength=1.0)
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


@pytest.mark.parametrize("variant", CASES)
def test_patch_dropout(variant: Variant) -> None:
    """Where timm drops patches, a constant strength of 0 draws and keeps what it did, and training goes on."""
    with torch.device("meta"):
        model = variant.made()
    if "patch_drop_rate" not in inspect.signature(type(model).__init__).parameters and not hasattr(model, "patch_drop"):
        pytest.skip("no patch dropout")
    changed = copy.copy(variant)
    object.__setattr__(changed, "extra", {**variant.extra, "patch_drop_rate": 0.5})
    model, x = changed.build().train(), variant.image()
    torch.manual_seed(3)
    plain = features(model, x)
    attachment = retrofit.attach(model, spec_of(variant), partial=bool(variant.ports))
    torch.manual_seed(3)
    assert torch.equal(features(model, x), plain)
    attachment.set_strength(1.0)
    torch.manual_seed(3)
    assert features(model, x).shape == plain.shape
