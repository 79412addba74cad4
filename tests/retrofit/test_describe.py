"""describe and the seam table: what position parts a model has, read from the model, for every class that has a row."""

import subprocess
import sys
import textwrap
from typing import Any

import pytest
import timm
import torch
from timm.layers import Attention
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import nn

import visionpos as vp
from tests.retrofit.zoo import CASES, SMALL, Case, opened, vit
from visionpos import retrofit
from visionpos.errors import PositionError
from visionpos.retrofit.ports import ports_of
from visionpos.retrofit.seams import grid_of, row_of, table_prefix

# name -> (table rows that are prefix, tokens that are prefix, heads, channels of a head, attentions, own rotation)
FACTS = {
    "vit_tiny_patch16_224": (1, 1, 2, 32, 2, None),
    "deit3_small_patch16_224": (0, 1, 2, 32, 2, None),
    "deit_tiny_distilled_patch16_224": (2, 2, 2, 32, 2, None),
    "vit_small_patch14_dinov2": (1, 1, 2, 32, 2, None),
    "vit_small_patch14_reg4_dinov2": (0, 5, 2, 32, 2, None),
    "vit_base_patch16_siglip_224": (0, 0, 2, 32, 2, None),
    "vit_base_patch32_clip_quickgelu_224": (1, 1, 2, 32, 2, None),
    "beit3_base_patch16_224": (1, 1, 2, 32, 2, None),
    "vit_huge_patch14_xp_224": (0, 1, 2, 32, 2, None),
    "vit_pwee_patch16_reg1_gap_256": (0, 1, 2, 32, 2, None),
    "vit_small_patch16_18x2_224": (1, 1, 2, 32, 4, None),
    "vit_dwee_patch16_reg1_gap_256": (0, 1, 4, 16, 2, None),
    "vit_dpwee_patch16_reg1_gap_256": (0, 1, 4, 16, 2, None),
    "vit_small_r26_s32_224": (1, 1, 2, 32, 2, None),
    "eva_giant_patch14_224": (1, 1, 2, 32, 2, None),
    "eva02_tiny_patch14_224": (1, 1, 2, 32, 2, "RotaryEmbeddingCat"),
    "vit_small_patch16_dinov3": (None, 5, 2, 32, 2, "RotaryEmbeddingDinoV3"),
    "vit_pe_core_tiny_patch16_384": (1, 1, 2, 32, 2, "RotaryEmbeddingCat"),
    "vit_small_patch16_rope_224": (None, 1, 2, 32, 2, "RotaryEmbeddingCat"),
    "vit_small_patch16_rope_mixed_224": (None, 1, 2, 32, 2, "RotaryEmbeddingMixed"),
    "vit_small_patch16_rope_mixed_ape_224": (0, 1, 2, 32, 2, "RotaryEmbeddingMixed"),
    "vit_betwixt_patch16_rope_reg4_gap_256": (None, 4, 2, 32, 2, "RotaryEmbeddingCat"),
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_reference_parts_of_every_model(case: Case) -> None:
    """Counts by hand: a silent change of a class of timm's shows here."""
    rows, prefix, heads, head_dim, attentions, rotary = FACTS[case.name]
    model = case.build()
    parts = {part.kind: part for part in retrofit.describe(model)}
    expected = (
        {"ports"} | ({"table"} if rows is not None else set()) | ({"rotary"} if rotary else set())
    )
    assert parts.keys() == expected
    if rows is not None:
        table = parts["table"]
        assert (table.path, table.prefix, table.grid_hw) == ("pos_embed", rows, case.grid_hw)
        assert table.shape == (1, rows + case.grid_hw[0] * case.grid_hw[1], 64)
        assert (
            table.detail
            == f"recipe {retrofit.recipe_for(model)[0]} ({retrofit.recipe_for(model)[1]})"
        )
        assert table_prefix(model) == rows
    if rotary:
        assert parts["rotary"].path == "rope"
        assert parts["rotary"].prefix == prefix
        assert parts["rotary"].detail.startswith(f"{rotary}: ")
        fixed = None if model.dynamic_img_size else case.grid_hw
        assert parts["rotary"].grid_hw == fixed
        assert parts["rotary"].shape == ((2, 2, 2, 16) if rotary.endswith("Mixed") else ())
    assert parts["ports"].detail == (
        f"{attentions} attentions, {heads} heads of {head_dim} channels, q and k after q_norm and k_norm"
    )
    assert parts["ports"].prefix == prefix
    assert retrofit.dims_of(model) == vp.Dims(
        embed_dim=64, num_heads=heads, depth=2, prefix=prefix, head_dim=head_dim
    )
    assert grid_of(model) == vp.Grid(*case.grid_hw)


def test_attached_parts() -> None:
    model = vit()
    retrofit.attach(model, vp.AxialRopeSpec(theta=50.0), strength=0.25, name="one")
    retrofit.attach(model, vp.MixedRopeSpec(), strength=0.5, learn_strength=True, name="two")
    retrofit.attach(model, vp.LearnedSpec(grid_hw=(3, 5)), name="three")
    parts = {part.path: part for part in retrofit.describe(model) if part.kind == "attached"}
    assert list(parts) == ["visionpos.one", "visionpos.two", "visionpos.three"]
    assert parts["visionpos.one"].detail == "strength 0.25, axial_rope(theta=50.0)"
    assert parts["visionpos.two"].detail == "learned strength 0.5, mixed_rope()"
    assert parts["visionpos.two"].shape == (2, 2, 2, 16)
    assert parts["visionpos.three"].detail == "strength 0, learned(grid_hw=(3, 5))"
    assert parts["visionpos.three"].shape == (15, 64)
    assert {part.prefix for part in parts.values()} == {1}


def test_resized_parts() -> None:
    model = Case("eva02_tiny_patch14_224", 14).build()
    retrofit.resize(model, (84, 70), recipe="timm", extent="index")
    parts = {part.kind: part for part in retrofit.describe(model)}
    assert parts["table"].grid_hw == (6, 5)
    assert parts["table"].detail == "recipe timm, evaluated from 4x6"
    assert parts["rotary"].grid_hw == (6, 5)
    assert parts["rotary"].detail.startswith("GridRope: axial_rope(")
    with torch.no_grad():
        model.pos_embed += 1.0
    table = next(part for part in retrofit.describe(model) if part.kind == "table")
    assert "evaluated" not in table.detail, "a table that was trained since comes from nowhere else"


def test_describe_changes_nothing_and_draws_nothing() -> None:
    model = Case("vit_small_patch16_rope_mixed_ape_224").build()
    retrofit.attach(model, vp.MixedRopeSpec(), strength=0.5, learn_strength=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    retrofit.describe(model)
    retrofit.lineage(model)
    retrofit.recipe_for(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(weight.grad is None for weight in model.parameters())


def test_describe_a_model_for_every_size_and_on_meta() -> None:
    model = vit(dynamic_img_size=True)
    model.patch_embed.img_size = None
    assert retrofit.describe(model)[0].grid_hw == (4, 6)
    with torch.device("meta"):
        meta = timm.create_model("vit_tiny_patch16_224", depth=1)
    assert retrofit.describe(meta)[0].shape == (1, 197, 192)


@pytest.mark.parametrize("rope", ["mrope", "mixed", "dinov3", "cat"])
def test_describe_ropes_that_no_spec_says(rope: str) -> None:
    """Also what timm alone can say has a row; nothing raises."""
    model = Eva(
        img_size=(64, 96),
        depth=1,
        embed_dim=64,
        num_heads=2,
        attn_type="rope",
        use_rot_pos_emb=True,
        rope_type=rope,
        use_abs_pos_emb=False,
    )
    part = next(part for part in retrofit.describe(model) if part.kind == "rotary")
    if rope in ("mrope", "mixed"):  # mixed with y first is what Eva makes unless told otherwise
        assert part.detail.endswith("coordinates and bands of timm")
        assert retrofit.lineage(model).rope is None
    else:
        assert retrofit.lineage(model).rope["kind"] == "axial_rope"


class OwnAttention(Attention):
    """A user's subclass, known by its base."""


class OwnVit(VisionTransformer):
    """A user's subclass, known by its base."""


def test_subclasses_are_known_by_their_bases() -> None:
    model = opened(OwnVit(img_size=(64, 96), attn_layer=OwnAttention, **SMALL)).eval()
    assert row_of(model) is row_of(vit())
    assert [type(port.holder) for port in ports_of(model)] == [OwnAttention] * 2
    x = torch.randn(1, 3, 64, 96)
    with torch.no_grad():
        before = model.forward_features(x)
        attachment = retrofit.attach(model, vp.AxialRopeSpec())
        assert torch.equal(model.forward_features(x), before)
        attachment.set_strength(1.0)
        assert not torch.equal(model.forward_features(x), before)


def test_ports_in_order_and_by_path() -> None:
    paths = [port.path for port in ports_of(Case("vit_small_patch16_18x2_224").build())]
    assert paths == [f"blocks.{b}.attns.{a}.attn" for b in (0, 1) for a in (0, 1)]
    assert [port.path for port in ports_of(Case("vit_huge_patch14_xp_224", 14).build())] == [
        "blocks.0",
        "blocks.1",
    ]
    layers = [port.layer for port in ports_of(Case("vit_small_patch16_18x2_224").build())]
    assert layers == [0, 0, 1, 1]


@pytest.mark.parametrize("name", ["resnet18", "convnext_atto"])
def test_error_classes_without_a_row(name: str) -> None:
    """A class that is not in the table is refused by every reader of it; describe says so."""
    with torch.device("meta"):
        model = timm.create_model(name)
    assert retrofit.describe(model)[0].kind == "unknown"
    for read in (retrofit.lineage, grid_of):
        with pytest.raises(
            PositionError, match=r"which is no class that visionpos knows; VisionTransformer, Eva"
        ):
            read(model)


def test_plain_modules() -> None:
    parts = retrofit.describe(nn.Linear(2, 2))
    assert [part.detail for part in parts] == [
        "Linear is no class that visionpos knows; attach and resize refuse"
    ]
    wrapped = retrofit.describe(nn.Sequential(vit()))
    assert ("0.pos_embed", "unknown") in {(part.path, part.kind) for part in wrapped}


def test_attention_of_an_older_timm_without_a_head_dim() -> None:
    """EvaAttention kept no note of its channels before timm 1.0.26."""
    model = Case("eva02_tiny_patch14_224", 14).build()
    for block in model.blocks:
        del block.attn.head_dim
    assert retrofit.dims_of(model).channels == 32


# What the oldest timm of pyproject.toml does not have yet, or writes otherwise (read in its source at v1.0.20).
OLDER = """
import timm.layers, timm.models.vision_transformer as vit, timm.models.eva as eva
del timm.layers.DiffAttention  # 1.0.23
del vit.DiffParallelScalingBlock  # 1.0.23

make = eva.EvaAttention.__init__
def init(self, *args, **kwargs):
    make(self, *args, **kwargs)
    del self.head_dim  # 1.0.26
eva.EvaAttention.__init__ = init

import torch
import visionpos as vp
from visionpos import retrofit

for name, pairing in (("vit_tiny_patch16_224", "adjacent"), ("eva02_tiny_patch14_224", "adjacent"),
                      ("eva_giant_patch14_224", "adjacent"), ("vit_small_patch16_dinov3", "half")):
    model = timm.create_model(name, img_size=(112, 112), depth=2, embed_dim=64, num_heads=2, num_classes=0).eval()
    x = torch.randn(1, 3, 112, 112)
    with torch.no_grad():
        before = model.forward_features(x)
        attachment = retrofit.attach(model, vp.AxialRopeSpec(pairing=pairing))
        assert torch.equal(model.forward_features(x), before)
        attachment.set_strength(1.0)
        assert not torch.equal(model.forward_features(x), before)
    assert retrofit.dims_of(model).channels == 32
    retrofit.describe(model)
    retrofit.resize(model, (112, 224))
    retrofit.parameter_groups(model, layer_decay=0.8)
"""


@pytest.mark.slow
def test_the_oldest_timm_of_pyproject() -> None:
    """Names and attributes that younger versions added are not needed for what older ones have."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(OLDER)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr[-2000:]


@pytest.mark.slow
def test_every_registered_model_of_both_classes() -> None:
    """All VisionTransformer and Eva models of timm describe and attach, on the meta device."""
    seen = 0
    for name in timm.list_models(module="vision_transformer") + timm.list_models(module="eva"):
        try:
            with torch.device("meta"):
                model: Any = timm.create_model(name, depth=2)
        except (TypeError, RuntimeError, NotImplementedError, AssertionError):
            continue  # a stem that cannot be built on meta, or a depth that is not free
        if not isinstance(model, (VisionTransformer, Eva)):
            continue
        dims = retrofit.dims_of(model)
        parts = retrofit.describe(model)
        assert parts[-1].kind == "ports"
        own = getattr(model.blocks[0], "attn", None)
        pairing = "half" if getattr(own, "rotate_half", False) else "adjacent"
        retrofit.attach(model, vp.AxialRopeSpec(pairing=pairing))
        assert dims.depth == 2
        seen += 1
    assert seen > 200


def test_heads_of_a_pyramid_in_words() -> None:
    model = timm.create_model("swin_tiny_patch4_window7_224", depths=(1, 1, 1, 1), num_classes=0)
    ports = next(part for part in retrofit.describe(model) if part.kind == "ports")
    assert ports.detail == "4 attentions, 3, 6, 12 or 24 heads of 32 channels, q and k after qkv"
