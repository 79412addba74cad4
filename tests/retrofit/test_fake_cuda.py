"""Attached models run on fake CUDA tensors: whatever mixes devices raises, without a GPU.

Parameters and buffers of a real model are replaced by fake ones that claim to live on a CUDA device; what the package
builds by itself must follow them there.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import visionpos as vp
from tests.retrofit.zoo import Case, vit
from visionpos import retrofit
from visionpos.encodings import Rotary

SIZE = (64, 96)
JITTER = {"shift": 1.0, "jitter": 1.5, "rescale": 1.5}
SPECS = {
    "axial": vp.AxialRopeSpec(),
    "half": vp.AxialRopeSpec(pairing="half"),
    "turns": vp.AxialRopeSpec(coords=vp.CoordSpec(unit="centred"), unit="turns", axis_order=(1, 0)),
    "periods": vp.AxialRopeSpec(coords=vp.CoordSpec(unit="centred"), periods=(0.5, 8.0)),
    "dealt": vp.AxialRopeSpec(order="interleaved", bands="dealt"),
    "endpoint": vp.AxialRopeSpec(coords=vp.CoordSpec(unit="endpoint", scale=(0.5, 0.5))),
    "trained": vp.AxialRopeSpec(coords=vp.CoordSpec(extent="trained", trained_shape=(4, 4))),
    "partial": vp.AxialRopeSpec(rotary_dim=8),
    "mixed": vp.MixedRopeSpec(),
    "jitter": vp.AxialRopeSpec(coords=vp.CoordSpec(**JITTER)),
    "jitter block": vp.MixedRopeSpec(coords=vp.CoordSpec(**JITTER, scope="block")),
    "jitter sample": vp.AxialRopeSpec(coords=vp.CoordSpec(**JITTER, scope="sample")),
    "learned": vp.LearnedSpec(grid_hw=(3, 5)),
    "learned big_vision": vp.LearnedSpec(grid_hw=(3, 5), recipe="big_vision"),
    "learned dinov2": vp.LearnedSpec(grid_hw=(3, 5), recipe="dinov2"),
    "learned nearest": vp.LearnedSpec(grid_hw=(3, 5), recipe="nearest"),
    "sincos": vp.SinCosSpec(),
    "sincos big_vision": vp.SinCosSpec(dialect="big_vision"),
}


def to_fake_cuda(model: nn.Module, mode: FakeTensorMode) -> Any:
    """Replace every parameter and buffer by a fake one on a CUDA device."""
    with mode:
        for module in model.modules():
            for name, weight in list(module._parameters.items()):
                if weight is not None:
                    twin = torch.empty(weight.shape, dtype=weight.dtype, device="cuda")
                    module._parameters[name] = nn.Parameter(
                        twin, requires_grad=weight.requires_grad
                    )
            for name, value in list(module._buffers.items()):
                if value is not None:
                    module._buffers[name] = torch.empty(
                        value.shape, dtype=value.dtype, device="cuda"
                    )
    return model


def run(model: Any, size_hw: tuple[int, int] = SIZE) -> Tensor:
    """Run a fake model forwards and return its features; backwards autograd asks for a real device."""
    mode = FakeTensorMode()
    to_fake_cuda(model, mode)
    with mode:
        features: Tensor = model.forward_features(torch.empty(2, 3, *size_hw, device="cuda"))
    assert features.device.type == "cuda"
    return features


@pytest.mark.parametrize("learn", [False, True])
@pytest.mark.parametrize("kind", SPECS)
def test_device_of_every_encoding(kind: str, learn: bool) -> None:
    model = vit(patch_drop_rate=0.25).train()
    retrofit.attach(model, SPECS[kind], strength=0.5, learn_strength=learn, name="mine")
    features = run(model)
    assert features.requires_grad


@pytest.mark.parametrize("kind", ["axial", "mixed", "learned", "sincos"])
def test_device_under_checkpoints_and_any_size(kind: str) -> None:
    model = vit(dynamic_img_size=True).train()
    model.set_grad_checkpointing(True)
    retrofit.attach(model, SPECS[kind], strength=0.5, learn_strength=True)
    assert run(model, (96, 32)).shape == (2, 13, 64)


@pytest.mark.parametrize("kind", ["jitter", "jitter block", "jitter sample"])
def test_device_of_draws_from_a_generator_of_the_cpu(kind: str) -> None:
    model = vit().train()
    retrofit.attach(model, SPECS[kind], strength=0.5, generator=torch.Generator().manual_seed(0))
    assert run(model).device.type == "cuda"


@pytest.mark.parametrize("kind", ["axial", "half", "mixed", "learned", "sincos"])
def test_device_in_bfloat16(kind: str) -> None:
    model = vit()
    retrofit.attach(model, SPECS[kind], strength=0.5, learn_strength=True)
    model.bfloat16()
    mode = FakeTensorMode()
    to_fake_cuda(model, mode)
    with mode, torch.no_grad():
        x = torch.empty(2, 3, *SIZE, device="cuda", dtype=torch.bfloat16)
        assert model.forward_features(x).dtype == torch.bfloat16


ROPES = [
    "vit_small_patch16_dinov3",
    "vit_small_patch16_rope_224",
    "vit_small_patch16_rope_mixed_224",
]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("extent", ["trained", "index"])
@pytest.mark.parametrize("name", ROPES)
def test_device_of_a_grid_rope(name: str, extent: Any, dynamic: bool) -> None:
    """The rotary module that resize puts in follows the model to its device."""
    model = Case(name).build(dynamic_img_size=dynamic).train()
    retrofit.resize(model, (96, 64), extent=extent)
    assert run(model, (96, 64)).device.type == "cuda"


def test_device_of_a_grid_rope_follows_a_move() -> None:
    model = Case("vit_small_patch16_dinov3").build()
    retrofit.resize(model, (96, 64), extent="index")
    assert isinstance(model.rope, retrofit.GridRope)
    model.to("meta")
    assert model.rope.get_embed((4, 6)).device.type == "meta"
    assert [key for key in model.state_dict() if "rope" in key] == []


@pytest.mark.parametrize("recipe", ["timm", "dinov2", "big_vision", "nearest"])
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "eva02_tiny_patch14_224"])
def test_device_of_a_resize(name: str, recipe: str) -> None:
    """The table is resampled where it lives."""
    case = Case(name, 14 if "14" in name else 16)
    model, mode = case.build(), FakeTensorMode()
    to_fake_cuda(model, mode)
    table = model.pos_embed
    with mode:
        retrofit.resize(model, (case.patch * 6, case.patch * 5), recipe=recipe)
        x = torch.empty(1, 3, case.patch * 6, case.patch * 5, device="cuda")
        assert model.forward_features(x).shape == (1, 31, 64)
    assert model.pos_embed is table
    assert table.device.type == "cuda"
    assert table.shape == (1, 31, 64)


def stay_on_cpu(model: nn.Module, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant one tensor on the CPU."""
    attachment = model.visionpos.mine
    if what == "coordinates":
        right = Rotary.points
        monkeypatch.setattr(
            Rotary, "points", lambda self, grid, **_: right(self, grid, device=torch.device("cpu"))
        )
    elif what == "strength":
        attachment.learned_strength = nn.Parameter(torch.ones(1))
    else:
        attachment.encoding.freqs = lambda *_, **__: torch.ones(2, 16)


@pytest.mark.parametrize("what", ["coordinates", "strength", "frequencies"])
def test_a_planted_cpu_tensor_is_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests can fail: one tensor left on the CPU raises."""
    model = vit()
    retrofit.attach(model, vp.AxialRopeSpec(), strength=0.5, learn_strength=True, name="mine")
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    to_fake_cuda(model, mode)
    with mode:
        stay_on_cpu(model, what, monkeypatch)
        with pytest.raises(RuntimeError, match=r"(?i)device"):
            model.forward_features(torch.empty(2, 3, *SIZE, device="cuda"))
