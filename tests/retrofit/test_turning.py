"""Turns of blocks of channels (LieRE, ComRoPE, STRING) at the ports: the encoding, applied by hand, is the oracle."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor

import visionpos as vp
from tests.retrofit.families import FAMILIES, Family
from tests.retrofit.zoo import Case, apart, image, vit
from visionpos import retrofit
from visionpos.errors import PositionError

SIZE = (64, 96)
SPECS: dict[str, Any] = {
    "liere": vp.LiereSpec(block=8, start=1.0),
    "comrope": vp.ComropeSpec(),
    "comrope_axial": vp.ComropeSpec(variant="axial"),
    "string": vp.StringRopeSpec(learn_frequencies=True),
    "circulant": vp.StringRopeSpec(variant="circulant"),
}


def family(name: str) -> Family:
    return next(one for one in FAMILIES if one.name == name)


def attached(spec: Any, model: Any = None, **changes: Any) -> Any:
    """Return a model with a turn attached whose bases are no unit matrices."""
    torch.manual_seed(5)
    model = vit() if model is None else model
    part = retrofit.attach(model, spec, name="mine", **{"strength": 1.0, **changes})
    with torch.no_grad():
        for name, weight in part.encoding.named_parameters():
            if name == "skew":
                weight.normal_(std=0.2)
    return model


def features(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model.forward_features(x)  # type: ignore[no-any-return]


def by_hand(encoding: Any, strength: float, layer: int) -> Any:
    """Return a hook that turns q or k at coordinates drawn together by the strength."""

    def turn(_: Any, __: Any, x: Tensor) -> Tensor:
        points = encoding.points(vp.Grid(4, 6)) * strength
        return encoding.turn(x, points, layer, prefix=1)  # type: ignore[no-any-return]

    return turn


@pytest.mark.parametrize("kind", SPECS)
def test_ports_turn_as_the_encoding_does(kind: str) -> None:
    x = image(SIZE)
    for strength in (1.0, 0.4):
        model, plain = attached(SPECS[kind], strength=strength), vit()
        encoding = retrofit.attachments(model)["mine"].encoding
        for layer, block in enumerate(plain.blocks):
            for norm in (block.attn.q_norm, block.attn.k_norm):
                norm.register_forward_hook(by_hand(encoding, strength, layer))
        expected = features(plain, x)
        assert apart(features(model, x), expected) < 1e-6
        assert apart(expected, features(vit(), x)) > 1e-2


@pytest.mark.parametrize("kind", SPECS)
def test_strength_zero(kind: str) -> None:
    model, x = attached(SPECS[kind], strength=0.0), image(SIZE)
    assert torch.equal(features(model, x), features(vit(), x))
    learned = attached(SPECS[kind], strength=0.0, learn_strength=True)
    assert apart(features(learned, x), features(vit(), x)) < 1e-6
    learned.forward_features(x).square().mean().backward()
    gate = retrofit.attachments(learned)["mine"].learned_strength
    assert gate is not None
    assert gate.grad is not None
    retrofit.detach(model)
    assert torch.equal(features(model, x), features(vit(), x))


@pytest.mark.parametrize("kind", ["liere", "string"])
def test_as_training_does(kind: str, tmp_path: Path) -> None:
    """Two crops checkpointed, patches dropped, copied, pickled, saved and restored."""
    model = attached(SPECS[kind], vit(dynamic_img_size=True))
    crops = image(SIZE), image((96, 64)), image((32, 32))
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(features(copied, crops[1]), features(model, crops[1]))
    grads = []
    for checkpointing in (False, True):
        model.zero_grad()
        model.set_grad_checkpointing(checkpointing)
        sum(model.forward_features(x).square().mean() for x in crops).backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert all(apart(a, b) < 1e-5 for a, b in zip(*grads, strict=True))
    dropping = attached(SPECS[kind], vit(patch_drop_rate=0.5)).train()
    assert dropping.forward_features(crops[0]).shape == (2, 1 + 12, 64)
    name = "vit_tiny_patch16_224"
    whole = attached(SPECS[kind], timm.create_model(name, num_classes=0, img_size=SIZE).eval())
    retrofit.save(whole, tmp_path / "model.safetensors")
    restored = retrofit.restore(tmp_path / "model.safetensors")
    assert torch.equal(features(restored, crops[0]), features(whole, crops[0]))


def test_in_windows() -> None:
    """Windows turn by places inside them; a model of several head sizes has an encoding for each."""
    one = family("swin_tiny_patch4_window7_224")
    model = attached(SPECS["comrope"], one.build())
    other, x = one.build(), one.image(one.start)
    assert apart(features(model, x), features(other, x)) > 1e-3
    model.set_grad_checkpointing(True)
    model.forward_features(x).square().mean().backward()
    assert all(p.grad is not None for p in model.visionpos.parameters())


def test_errors() -> None:
    own = Case("vit_small_patch16_dinov3").build()
    with pytest.raises(
        PositionError, match=r"'liere' meets the model's own rotary .* no function of distance"
    ):
        retrofit.attach(own, SPECS["liere"])
    assert retrofit.attachments(own) == {}
    model = attached(SPECS["comrope"])
    with pytest.raises(
        PositionError, match=r"'axial_rope' meets attached 'mine'; 'comrope' turns blocks"
    ):
        retrofit.attach(model, vp.AxialRopeSpec())
    one = family("efficientvit_m0")
    with pytest.raises(
        PositionError, match=r"one head at a time; 'liere' turns all heads together"
    ):
        retrofit.attach(one.build(), vp.LiereSpec(block=4))
    grouped = family("qwen3_vit_88m").build()
    with pytest.raises(PositionError):
        retrofit.attach(grouped, SPECS["liere"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["liere", "comrope", "string"])
def test_compile_one_graph(kind: str) -> None:
    model, x = attached(SPECS[kind]), image(SIZE)
    torch.compiler.reset()
    graph = torch.compile(model.forward_features, fullgraph=True)
    with torch.no_grad():
        assert apart(graph(x), features(model, x)) < 1e-5
