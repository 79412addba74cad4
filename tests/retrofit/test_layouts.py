"""Moving a timm model from one rotary layout to another: converted weights, another encoding, the same outputs."""

import copy

import pytest
import timm
import torch

import visionpos as vp
from visionpos import AxialRopeSpec, CoordSpec, retrofit
from visionpos.config import load_encoding

# Fillings with one set of frequencies (facts/vision_pe.md 1B), and one of thirds that leaves channels over.
LAYOUTS = {
    "sam2_memory": load_encoding("sam2_memory"),
    "qwen_vl_vision": load_encoding("qwen_vl_vision"),
    "kimi_k25_vision": load_encoding("kimi_k25_vision"),
    "half_per_axis": AxialRopeSpec(theta=10000.0, pairing="half_per_axis"),
}


def model_of(spec, source=None):
    """A small ViT; its q and k rows are reordered from `source`'s layout where one is given."""
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=(48, 80), depth=2, num_classes=5)
    dims = vp.Dims(embed_dim=192, num_heads=3, depth=2, prefix=1)
    if source is not None:
        old, new = (vp.build(each, dims).layout for each in (source, spec))
        for block in model.blocks:
            for tensor in (block.attn.qkv.weight, block.attn.qkv.bias):
                q, k, v = tensor.detach().chunk(3)
                moved = torch.cat([vp.convert(q, old, new), vp.convert(k, old, new), v])
                with torch.no_grad():
                    tensor.copy_(moved)
    retrofit.attach(model, spec, strength=1.0)
    return model.eval()


@pytest.mark.parametrize("target", sorted(set(LAYOUTS) - {"sam2_memory"}))
def test_invariant_converted_weights_give_the_same_outputs(target):
    """convert on q and k rows and biases, and the encoding of the target: nothing else changes."""
    images = torch.randn(2, 3, 48, 80)
    source = LAYOUTS["sam2_memory"]
    with torch.no_grad():
        before = model_of(source)(images)
        after = model_of(LAYOUTS[target], source)(images)
        skipped = model_of(LAYOUTS[target])(images)
    torch.testing.assert_close(after, before, rtol=0, atol=2e-5)
    assert (skipped - before).abs().max() > 1e-3


def test_invariant_thirds_and_tiling_attach():
    """Channels beyond the thirds pass through; the tiled map of V-JEPA 2 acts, and acts otherwise than the true one."""
    images = torch.randn(1, 3, 48, 80)
    coords = CoordSpec(axes=3)
    specs = [
        AxialRopeSpec(theta=1e4, rotary_dim="most", coords=coords, legacy_tiling=tiled)
        for tiled in (True, False)
    ]
    with torch.no_grad():
        tiled, meant = (model_of(spec)(images) for spec in specs)
    assert tiled.isfinite().all()
    assert (tiled - meant).abs().max() > 1e-4


def test_invariant_a_copy_keeps_its_pairing():
    model = model_of(LAYOUTS["half_per_axis"])
    twin = copy.deepcopy(model)
    images = torch.randn(1, 3, 48, 80)
    with torch.no_grad():
        assert torch.equal(model(images), twin(images))
