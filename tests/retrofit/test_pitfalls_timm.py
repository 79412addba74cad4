"""What is known to go wrong between timm and a retrofit: orders of patches, scripts, masks, wrappers, counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor

import visionpos as vp
from tests.retrofit.attentions import VARIANTS, features
from tests.retrofit.zoo import apart, create, image, opened, vit
from visionpos import PositionError, retrofit
from visionpos.retrofit.coverage import coverage, totals
from visionpos.retrofit.seams import prefix_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

BY_NAME = {variant.name: variant for variant in VARIANTS}
DOORS: list[Any] = [vp.AxialRopeSpec(), vp.AlibiSpec(), vp.SinCosSpec(), vp.PegSpec(after=(0,))]

# Registered models of timm 1.0.31 with an explicit position mechanism, counted by their parameters, buffers and
# modules apart from the seam table. The lambda ResNets whose positions are a convolution are two more.
COUNTED = {
    "VisionTransformer": 199 + 4,  # DeiT's distilled models are a subclass
    "Eva": 65,
    "Beit": 7,
    "VisionTransformerRelPos": 14,
    "NaFlexVit": 14,
    "Cait": 10,
    "ConVit": 3,
    "TNT": 3,
    "PoolingVisionTransformer": 8,
    "CrossVit": 11,
    "VOLO": 11,
    "Visformer": 2,
    "Nest": 6,
    "Hiera": 8,
    "HieraDet": 5,
    "SwinTransformer": 9,
    "SwinTransformerV2": 12,
    "SwinTransformerV2Cr": 16,
    "MaxxVit": 58,
    "GlobalContextVit": 5,
    "Levit": 8,
    "LevitDistilled": 12,
    "TinyVit": 5,
    "EfficientVitMsra": 6,
    "EfficientFormer": 3,
    "EfficientFormerV2": 4,
    "MultiScaleVit": 8,
    "VisionTransformerSAM": 4,
    "Qwen3VitClassifier": 6,
    "Qwen3VitEncoder": 3,
    "DeepseekVitClassifier": 2,
    "DeepseekVitEncoder": 1,
    "Gemma4VitClassifier": 2,
    "Gemma4VitEncoder": 2,
    "Xcit": 28,
    "CoaT": 8,
    "Twins": 6,
    "DaVit": 8,
    "EdgeNeXt": 5,
    "FastVit": 9,
    "CSATv2": 2,
    "ByobNet": 12 + 1 + 5 + 2,
}
# Classes without two tokens whose product a rotation could reach.
UNREACHABLE = {"MultiScaleVit", "VisionTransformerSAM", "Xcit", "CoaT", "EdgeNeXt", "ByobNet"}


def test_golden_counts_of_every_class() -> None:
    """98 % are described and resized, 85 % can be turned; what cannot is a whole class, known by name."""
    rows = {row.model: row for row in coverage()}
    assert {name: row.models for name, row in rows.items()} == COUNTED
    assert sum(COUNTED.values()) == 622
    assert {name for name, row in rows.items() if row.rotate < row.models} == UNREACHABLE
    assert all(rows[name].rotate == 0 for name in UNREACHABLE)
    sums = totals()
    assert sums["rectangles"] >= 0.98 * sums["models"]
    assert sums["rotate"] >= 0.85 * sums["models"]
    assert sums["add"] == sums["conditional"] == sums["models"]


def naflex() -> Any:
    return BY_NAME["naflexvit_base_patch16_gap"].build()


def patches_of(pixels: Tensor, size: int = 16) -> tuple[Tensor, Tensor]:
    """Return `[b, n, 3 * size * size]` patches as NaFlexVit cuts them, and `[b, n, 2]` rows and columns."""
    cells = pixels.unfold(2, size, size).unfold(3, size, size)  # [b, 3, h, w, size, size]
    height, width = cells.shape[2:4]
    places = [(y, x) for y in range(height) for x in range(width)]
    flat = cells.permute(0, 2, 3, 4, 5, 1).flatten(3).flatten(1, 2)
    return flat, torch.tensor(places).expand(len(pixels), -1, -1)


@pytest.mark.parametrize("spec", DOORS, ids=lambda spec: spec.kind)
def test_error_patches_in_an_order_of_their_own(spec: Any) -> None:
    """Raster order would be assumed in silence: every door refuses coordinates, and lets them pass at rest."""
    model = naflex()
    flat, places = patches_of(image((64, 96)))
    call = {"patch_coord": places, "patch_valid": torch.ones(places.shape[:2], dtype=torch.bool)}
    with torch.no_grad():
        plain = model(flat, **call)
        assert apart(plain, model(image((64, 96)))) < 1e-5  # patches are what the image is cut into
        attachment = retrofit.attach(model, spec)
        assert torch.equal(model(flat, **call), plain)
        attachment.set_strength(1.0)
        with pytest.raises(PositionError, match="patch_coord is given"):
            model(flat, **call)
        with pytest.raises(PositionError, match="patch_coord is given"):
            model({"patches": flat, **call})
        retrofit.detach(model)
        assert torch.equal(model(flat, **call), plain)


def test_invariant_a_table_at_points_needs_no_order() -> None:
    """timm adds rows of the table by count; evaluated at coordinates, a shuffled or thinned image keeps its codes."""
    source = naflex().embeds.pos_embed.detach()  # [1, 16, 16, d]
    spec = vp.LearnedSpec(grid_hw=(16, 16), recipe="timm")
    table: Any = vp.build(spec, vp.Dims(embed_dim=64, num_heads=2, depth=1, prefix=0))
    with torch.no_grad():
        table.table.copy_(source.flatten(1, 2).reshape(table.table.shape))
    model = naflex()
    _, places = patches_of(image((64, 96), 1))
    with torch.no_grad():
        raster = torch.zeros(1, 24, 64)
        model.embeds._apply_learned_naflex_pos_embed(raster, places)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    codes = table.at(places.float(), (4.0, 6.0)).detach()
    torch.testing.assert_close(codes, raster, rtol=0, atol=1e-5)
    shuffled = table.at(places[:, order].float(), (4.0, 6.0)).detach()
    assert torch.equal(shuffled, codes[:, order])
    thinned = table.at(places[:, order[:7]].float(), (4.0, 6.0)).detach()
    assert torch.equal(thinned, codes[:, order[:7]])


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")
def test_scripts_refuse_what_they_cannot_carry() -> None:
    """torch.jit.script cannot see these hooks: it fails, and leaves none out; after detach it is timm's again."""
    model, x = vit(), image((64, 96))
    retrofit.attach(model, vp.AxialRopeSpec(), strength=1.0)
    with pytest.raises((RuntimeError, ValueError, NotImplementedError)):
        torch.jit.script(model)
    retrofit.detach(model)
    with torch.no_grad():
        assert torch.equal(torch.jit.script(model)(x), model(x))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")
def test_error_scripted_models() -> None:
    scripted = torch.jit.script(vit())
    for act in (
        lambda: retrofit.attach(scripted, vp.AxialRopeSpec()),
        lambda: retrofit.resize(scripted, (96, 96)),
    ):
        with pytest.raises(
            PositionError, match=r"model is a RecursiveScriptModule, .*VisionTransformer"
        ):
            act()


def test_a_bias_leaves_checkpointing_on() -> None:
    """timm's own attn_mask argument skips checkpointing without a word; a bias attached here does not."""
    model, seen = vit().train(), []
    model.set_grad_checkpointing(True)
    model.blocks[0].register_forward_pre_hook(lambda *_: seen.append(1))
    retrofit.attach(model, vp.AlibiSpec(), strength=1.0)
    model.forward_features(image((64, 96))).square().sum().backward()
    assert len(seen) == 2


@pytest.mark.parametrize("name", ["eva02_tiny_patch14_224", "naflexvit_base_patch16_gap"])
def test_reference_a_bias_follows_dropped_patches(name: str) -> None:
    """timm's own mask is not gathered and fails; rows and columns of a bias are those of the patches that are left."""
    variant = BY_NAME[name]
    options = {**variant.extra, "patch_drop_rate": 0.5, "num_classes": 0}
    sizes = {"img_size": variant.size_hw} if variant.sized else {}
    model = opened(timm.create_model(name, **sizes, **options)).train()
    attachment = retrofit.attach(model, vp.AlibiSpec(), strength=1.0)
    masks, kept = [], []
    model.blocks[0].attn.register_forward_pre_hook(
        lambda _m, _a, kwargs: masks.append(kwargs["attn_mask"]), with_kwargs=True
    )
    model.patch_drop.register_forward_hook(lambda _m, _a, out: kept.append(out[1]))
    model.forward_features(variant.image())
    prefix = prefix_of(model)
    whole = attachment.encoding(vp.Grid(4, 6), prefix=prefix).detach()
    for sample in range(2):
        rows = torch.cat([torch.arange(prefix), kept[0][sample] + prefix])
        torch.testing.assert_close(masks[0][sample].detach(), whole[:, rows][:, :, rows])


def test_tokens_without_a_table_keep_their_count() -> None:
    """pos_embed="none" still has a class token and registers: none of them turns, all of them are counted."""
    model = vit(pos_embed="none", reg_tokens=4)
    assert [part.kind for part in retrofit.describe(model)] == ["ports"]
    retrofit.resize(model, (48, 80))
    retrofit.attach(model, vp.AxialRopeSpec(), strength=1.0)
    caught: list[Tensor] = []
    model.blocks[0].attn.q_norm.register_forward_hook(
        lambda _m, args, out: caught.extend([args[0], out])
    )
    assert features(model, image((48, 80))).shape == (2, 1 + 4 + 15, 64)
    assert torch.equal(
        caught[1][:, :, :6], caught[0][:, :, :6]
    )  # five prefix tokens and the patch at the origin
    assert apart(caught[1][:, :, 6:], caught[0][:, :, 6:]) > 1e-2


def test_error_weights_of_another_size(tmp_path: Path) -> None:
    """timm fails on a checkpoint of another image size from the depths; here what is wanted is named."""
    path = tmp_path / "weights.safetensors"
    save_file(timm.create_model("vit_tiny_patch16_224", num_classes=0).state_dict(), path)
    with pytest.raises(PositionError, match=r"do not fit.*pos_embed.*its own image size"):
        retrofit.create("vit_tiny_patch16_224", size_hw=(64, 64), weights=path)


def test_frequencies_of_a_naflex_model_do_not_decay() -> None:
    """timm names "freqs" where the parameter is rope.freqs, and leaves out the tables of the axes."""
    model = opened(create("naflexvit_base_patch16_parfac_gap", None, rope_type="mixed"))
    assert "rope.freqs" not in model.no_weight_decay()
    groups = retrofit.parameter_groups(model, weight_decay=0.1)
    decayed = {
        id(weight) for group in groups if group["weight_decay"] for weight in group["params"]
    }
    names = [name for name, weight in model.named_parameters() if id(weight) in decayed]
    assert names
    assert not [name for name in names if "freqs" in name or "pos_embed" in name]


def wrapper(name: str, **options: Any) -> Any:
    return timm.create_model(name, features_only=True, **options).eval()


@pytest.mark.parametrize(
    ("name", "size"), [("gcvit_xxtiny", (224, 224)), ("davit_tiny", (64, 96))], ids=str
)
def test_windows_inside_wrappers_turn(name: str, size: tuple[int, int]) -> None:
    """A FeatureListNet has lost its class, but windows tell their own grid: exact at 0, another result at 1."""
    body = opened(wrapper(name)).eval()
    x = image(size, 1)
    with torch.no_grad():
        plain = body(x)
        part = retrofit.attach(body, vp.AxialRopeSpec(), partial=True)
        assert all(torch.equal(one, two) for one, two in zip(body(x), plain, strict=True))
        part.set_strength(1.0)
        assert apart(body(x)[-1], plain[-1]) > 1e-6
        with pytest.raises(
            PositionError, match=r"model is a FeatureListNet, .*without features_only"
        ):
            retrofit.resize(body, size)
        retrofit.detach(body)
        assert all(torch.equal(one, two) for one, two in zip(body(x), plain, strict=True))


def test_a_wrapper_is_unwrapped() -> None:
    """A FeatureGetterNet keeps its model: attached and resized there, the wrapper gives the maps of the new size."""
    body = wrapper("vit_tiny_patch16_224", img_size=(64, 96), depth=3, embed_dim=64, num_heads=2)
    opened(body)
    x = image((64, 96), 1)
    with torch.no_grad():
        plain = body(x)
        part = retrofit.attach(body.model, vp.AxialRopeSpec())
        assert all(torch.equal(one, two) for one, two in zip(body(x), plain, strict=True))
        part.set_strength(1.0)
        assert apart(body(x)[-1], plain[-1]) > 1e-4
        retrofit.resize(body.model, (48, 80))
        assert [tuple(out.shape[-2:]) for out in body(image((48, 80), 1))] == [(3, 5)] * 3


WRAPPED: list[tuple[str, Callable[[Any], Any]]] = [
    ("resize", lambda model: retrofit.resize(model, (64, 96))),
    ("attach", lambda model: retrofit.attach(model, vp.AxialRopeSpec())),
]


@pytest.mark.parametrize(("verb", "act"), WRAPPED, ids=[verb for verb, _ in WRAPPED])
def test_error_hooked_wrapper(verb: str, act: Callable[[Any], Any]) -> None:
    with torch.device("meta"):
        body = wrapper("pit_ti_224")
    with pytest.raises(PositionError, match=r"model is a FeatureHookNet, .*without features_only"):
        act(body)
    assert not hasattr(body, "visionpos"), verb


SENTENCES = {
    "edgenext_xx_small": r"attention in CrossCovarianceAttn is between channels, not tokens.*door add or conditional",
    "coat_tiny": r"FactorAttnConvRelPosEnc multiplies keys and values before queries; a rotation would not be relative",
    "lambda_resnet26t": r"no separate q and k to rotate in LambdaLayer.*door add or conditional",
    "botnet26t_256": r"no separate q and k to rotate in BottleneckAttn",
    "halonet26t": r"no separate q and k to rotate in HaloAttn",
    "csatv2": r"in SpatialTransformerBlock; 14 of 18 attention modules would be skipped. Pass partial=True",
    "mvitv2_tiny": r"q also feeds the relative table of MultiScaleAttention; rotating it would bend that bias",
    "sam2_hiera_tiny": r"q is max-pooled in MultiScaleAttention.*3 of 7 attention modules would be skipped",
}


@pytest.mark.parametrize("name", SENTENCES)
def test_error_what_cannot_turn(name: str) -> None:
    with torch.device("meta"):
        model = BY_NAME[name].made()
    with pytest.raises(PositionError, match=SENTENCES[name]):
        retrofit.attach(model, vp.AxialRopeSpec())
    assert not hasattr(model, "visionpos")


@pytest.mark.parametrize(
    "name", ["cait_xxs24_224", "xcit_nano_12_p16_224", "coat_tiny", "mvitv2_tiny", "hiera_tiny_224"]
)
def test_error_no_place_for_a_bias(name: str) -> None:
    with torch.device("meta"):
        model = BY_NAME[name].made()
    with pytest.raises(PositionError, match=r"no place for a bias in the logits of \w+"):
        retrofit.attach(model, vp.AlibiSpec())
    assert not hasattr(model, "visionpos")
