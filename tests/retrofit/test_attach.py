"""attach: nothing changes at strength 0, the named scheme and nothing else at strength 1."""

import functools
import itertools
import warnings
from typing import Any

import numpy as np
import pytest
import timm
import torch
from timm.layers import PatchDropout
from timm.models.eva import Eva
from torch import Tensor, nn

import visionpos as vp
from tests.reference import coords as reference_coords
from tests.reference import rotary as reference_rotary
from tests.reference import sincos as reference_sincos
from tests.retrofit.families import FAMILIES
from tests.retrofit.zoo import (
    CASES,
    HEAD_DIM,
    NAMED,
    Case,
    apart,
    axial,
    hand_rotation,
    image,
    opened,
    vit,
)
from visionpos import retrofit
from visionpos.encodings import MixedRope
from visionpos.errors import PositionError
from visionpos.retrofit.passes import UsedHook
from visionpos.retrofit.places import embeds_of

ROTARY_SPECS = {
    "axial": vp.AxialRopeSpec(),
    "mixed": vp.MixedRopeSpec(),
    "dinov3": vp.AxialRopeSpec(
        coords=vp.CoordSpec(unit="centred"), unit="turns", pairing="half", theta=100.0
    ),
    "partial": vp.AxialRopeSpec(rotary_dim=8),
}


def fitting(case: Case, kind: str = "axial") -> Any:
    """Return a spec whose pairing is that of the model's own rotary encoding."""
    pairing = case.pairing or "adjacent"
    return (
        vp.MixedRopeSpec(pairing=pairing) if kind == "mixed" else vp.AxialRopeSpec(pairing=pairing)
    )


# One of every way in which vectors are added: rows, maps, prefix tokens, several branches, a stem of several parts.
REACHED = (
    "vit_tiny_patch16_224",
    "beit_base_patch16_224",
    "naflexvit_base_patch16_gap",
    "tnt_s_patch16_224",
    "pit_ti_224",
    "crossvit_tiny_240",
    "hiera_tiny_224",
    "sam2_hiera_tiny",
    "swin_tiny_patch4_window7_224",
    "swinv2_cr_tiny_224",
    "coatnet_nano_rw_224",
    "levit_128s",
    "samvit_base_patch16",
    "gemma4_vit_167m",
    "fastvit_sa12",
    "csatv2",
    "botnet26t_256",
    "halonet26t",
)


@pytest.mark.parametrize("name", REACHED)
def test_added_vectors_reach_forward_intermediates(name: str) -> None:
    """The other way through a model has them, too: the same tokens come out of it as out of forward_features."""
    family = next(one for one in FAMILIES if one.name == name)
    model, x = family.build(), family.image(family.start)
    with torch.no_grad():
        last, steps = model.forward_intermediates(x)
        part = retrofit.attach(model, vp.SinCosSpec(), strength=0.0)
        again, same = model.forward_intermediates(x)
        part.set_strength(1.0)
        moved, others = model.forward_intermediates(x)
        features = model.forward_features(x)
    for old, new in zip(listed(last), listed(again), strict=True):
        assert torch.equal(old, new)
    assert all(torch.equal(old, new) for old, new in zip(steps, same, strict=True))
    # A residual network's first map is taken inside its stem, before the place.
    tapped = hasattr(getattr(model, "stem", None), "forward_intermediates")
    pairs = list(zip(steps, others, strict=True))
    assert all(apart(new, old) > 1e-4 for old, new in pairs[tapped:])
    assert all(torch.equal(old, new) for old, new in pairs[:tapped])
    for new, wanted in zip(listed(moved), listed(features), strict=False):
        if new.shape == wanted.shape:  # some models pool or norm them on the way out
            assert apart(new, wanted) < 1e-6


def listed(found: Any) -> list[Tensor]:
    """Return what forward_intermediates gives as a list of tensors."""
    return list(found) if isinstance(found, (tuple, list)) else [found]


@pytest.mark.parametrize("name", ["botnet26t_256", "halonet26t", "vit_small_r26_s32_224"])
def test_reference_width_of_a_stem(name: str) -> None:
    """The vectors are as wide as what the whole module hands out in a forward pass."""
    side = 224 if name.startswith("vit") else 256
    model: Any = timm.create_model(name, num_classes=0).eval()
    stem = getattr(model, "stem", None) or model.patch_embed
    widths: list[int] = []

    def hook(_module: nn.Module, _args: Any, output: Tensor) -> None:
        widths.append(output.shape[1 if output.ndim == 4 else -1])

    stem.register_forward_hook(hook)
    with torch.no_grad():
        model.forward_features(torch.zeros(1, 3, side, side))
    assert [place.width for place in embeds_of(model)] == widths


@pytest.mark.parametrize("kind", ["axial", "mixed"])
@pytest.mark.parametrize("case", NAMED, ids=lambda case: case.name)
def test_strength_zero_is_exact_and_one_is_not(case: Case, kind: str) -> None:
    model, x = case.build(), case.image()
    with torch.no_grad():
        features, pooled = model.forward_features(x), model(x)
        attachment = retrofit.attach(model, fitting(case, kind))
        assert attachment.idle
        assert torch.equal(model.forward_features(x), features)
        assert torch.equal(model(x), pooled)
        attachment.set_strength(1.0)
        assert not attachment.idle
        assert apart(model.forward_features(x), features) > 1e-3
        attachment.set_strength(0.0)
        assert torch.equal(model.forward_features(x), features)


@pytest.mark.parametrize(
    "spec", [vp.LearnedSpec(grid_hw=(3, 5), std=0.5), vp.SinCosSpec()], ids=lambda s: s.kind
)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_strength_zero_is_exact_and_one_is_not_for_added_vectors(case: Case, spec: Any) -> None:
    model, x = case.build(), case.image()
    with torch.no_grad():
        features = model.forward_features(x)
        attachment = retrofit.attach(model, spec)
        assert torch.equal(model.forward_features(x), features)
        attachment.set_strength(1.0)
        assert apart(model.forward_features(x), features) > 1e-3


@pytest.mark.parametrize("learned", [vp.AxialRopeSpec, vp.MixedRopeSpec, vp.SinCosSpec])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_learned_strength_zero_is_exact_too(case: Case, learned: Any) -> None:
    """A zero angle turns nothing, and zero is added to nothing: here even a gate that learns is bit-exact."""
    model, x = case.build(), case.image()
    rotary = learned is not vp.SinCosSpec
    spec = learned(pairing=case.pairing or "adjacent") if rotary else learned()
    with torch.no_grad():
        features = model.forward_features(x)
        assert not retrofit.attach(model, spec, learn_strength=True).idle
        assert torch.equal(model.forward_features(x), features)


def whole_turn(attachment: Any, angle: float, pairing: str) -> None:
    """Make an attachment turn every token, prefix too, by one angle a pair."""

    def rotation(call: Any, layer: int, prefix: int) -> vp.Rotation:
        pairs = attachment.encoding.dims.channels // 2
        return vp.Rotation.of(angle * torch.ones(call.tokens + prefix, pairs), pairing)

    attachment.rotation = rotation


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_constant_angle_changes_nothing(case: Case) -> None:
    """A common turn of all q and k leaves every score; a port that touches v, or turns q alone, does not."""
    model, x = case.build(), case.image()
    with torch.no_grad():
        features = model.forward_features(x)
        attachment = retrofit.attach(model, fitting(case), strength=1.0)
        whole_turn(attachment, 0.7, case.pairing or "adjacent")
        assert 0 < apart(model.forward_features(x), features) < 1e-6


@pytest.mark.parametrize("case", [c for c in NAMED if c.pairing], ids=lambda case: case.name)
def test_constant_angle_finds_the_wrong_pairing(case: Case) -> None:
    """The probe above can fail: beside the model's own rotary encoding the other pairing is not relative."""
    model, x = case.build(), case.image()
    with torch.no_grad():
        features = model.forward_features(x)
        attachment = retrofit.attach(model, fitting(case), strength=1.0)
        whole_turn(attachment, 0.7, "adjacent" if case.pairing == "half" else "half")
        assert apart(model.forward_features(x), features) > 1e-4


def test_constant_angle_finds_a_port_that_turns_one_side(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = vit(), image((64, 96))
    with torch.no_grad():
        features = model.forward_features(x)
        attachment = retrofit.attach(model, vp.AxialRopeSpec(), strength=1.0)
        whole_turn(attachment, 0.7, "adjacent")
        for block in model.blocks:
            block.attn.k_norm._forward_hooks.clear()
        with pytest.raises(PositionError, match=r"ran without k_norm, where the encoding acts"):
            model.forward_features(x)
        monkeypatch.setattr(UsedHook, "__call__", lambda *_: None)
        assert apart(model.forward_features(x), features) > 1e-3


# timm's own rotary ViT, and the spec that must give its bits.
TWINS: dict[str, tuple[dict[str, Any], Any]] = {
    "cat": ({"rope_type": "cat", "rope_temperature": 100.0}, vp.AxialRopeSpec()),
    "cat xy": (
        {"rope_type": "cat", "rope_temperature": 100.0, "rope_grid_indexing": "xy"},
        vp.AxialRopeSpec(axis_order=(1, 0)),
    ),
    "cat half": (
        {"rope_type": "cat", "rope_temperature": 10000.0, "rope_rotate_half": True},
        vp.AxialRopeSpec(theta=10000.0, pairing="half"),
    ),
    "cat offset": (
        {"rope_type": "cat", "rope_temperature": 10000.0, "rope_grid_offset": 1.0},
        vp.AxialRopeSpec(theta=10000.0, coords=vp.CoordSpec(offset=1.0)),
    ),
    "cat reference": (
        {"rope_type": "cat", "rope_temperature": 10000.0, "ref_feat_shape": (16, 16)},
        vp.AxialRopeSpec(
            theta=10000.0, coords=vp.CoordSpec(extent="trained", trained_shape=(16, 16))
        ),
    ),
    "mixed": ({"rope_type": "mixed", "rope_grid_indexing": "xy"}, vp.MixedRopeSpec()),
    "dinov3": (
        {"rope_type": "dinov3", "rope_temperature": 100.0, "rope_rotate_half": True},
        vp.AxialRopeSpec(coords=vp.CoordSpec(unit="centred"), unit="turns", pairing="half"),
    ),
    "dinov3 xy adjacent": (
        {"rope_type": "dinov3", "rope_temperature": 50.0, "rope_grid_indexing": "xy"},
        vp.AxialRopeSpec(
            theta=50.0, coords=vp.CoordSpec(unit="centred"), unit="turns", axis_order=(1, 0)
        ),
    ),
}


def twin(model: Any, size_hw: tuple[int, int], **rope: Any) -> Any:
    """Return timm's rotary ViT with the weights of a plain one."""
    other = Eva(
        img_size=size_hw,
        depth=2,
        embed_dim=64,
        num_heads=2,
        num_classes=0,
        attn_type="rope",
        use_rot_pos_emb=True,
        norm_layer=functools.partial(nn.LayerNorm, eps=1e-6),
        global_pool="token",
        dynamic_img_size=model.dynamic_img_size,
        patch_drop_rate=getattr(model.patch_drop, "prob", 0.0),
        **rope,
    ).eval()
    fault = other.load_state_dict(model.state_dict(), strict=False)
    assert fault.unexpected_keys == []
    assert set(fault.missing_keys) <= {"rope.freqs"}
    return other


def share_frequencies(attachment: Any, other: Any) -> None:
    if isinstance(attachment.encoding, MixedRope):
        with torch.no_grad():
            attachment.encoding.frequencies.copy_(MixedRope.from_timm(other.rope.freqs))


@pytest.mark.parametrize("size_hw", [(64, 64), (64, 96), (96, 32), (16, 80)], ids=str)
@pytest.mark.parametrize("name", TWINS)
def test_parity_of_timms_own_rotary_vit(name: str, size_hw: tuple[int, int]) -> None:
    """Adjacent pairs give timm's bits; halves and tables of lattices round once where timm rounds twice."""
    rope, spec = TWINS[name]
    model, x = vit(size_hw), image(size_hw)
    other = twin(model, size_hw, **rope)
    attachment = retrofit.attach(model, spec, strength=1.0)
    share_frequencies(attachment, other)
    with torch.no_grad():
        features, expected = model.forward_features(x), other.forward_features(x)
        assert apart(features, expected) < 1e-6
        if name == "cat":
            assert torch.equal(features, expected)
            assert torch.equal(model(x), other(x))


@pytest.mark.parametrize("name", TWINS)
def test_parity_gradients_of_timms_own_rotary_vit(name: str) -> None:
    rope, spec = TWINS[name]
    model, x = vit().train(), image((64, 96))
    other = twin(model, (64, 96), **rope).train()
    attachment = retrofit.attach(model, spec, strength=1.0)
    share_frequencies(attachment, other)
    for one in (model, other):
        one.forward_features(x).square().sum().backward()
    theirs = dict(other.named_parameters())
    for key, weight in model.named_parameters():
        if key in theirs:
            assert apart(weight.grad, theirs[key].grad) < 1e-5, key
    if name == "mixed":
        assert (
            apart(
                attachment.encoding.frequencies.grad, MixedRope.from_timm(theirs["rope.freqs"].grad)
            )
            < 1e-5
        )


PREFIXES = [
    (cls, reg, bare)
    for cls, reg, bare in itertools.product([True, False], [0, 1, 4], [False, True])
]


@pytest.mark.parametrize(("cls", "reg", "bare"), PREFIXES, ids=str)
@pytest.mark.parametrize("kind", ["axial", "mixed", "dinov3"])
def test_reference_prefix_is_read_from_the_model(
    kind: str, cls: bool, reg: int, bare: bool
) -> None:
    """In every combination of class token, registers and no_embed_class a hand-made rotation gives the same."""
    prefix, pool = cls + reg, "token" if cls else "avg"
    model = vit(class_token=cls, reg_tokens=reg, no_embed_class=bare, global_pool=pool)
    by_hand = vit(class_token=cls, reg_tokens=reg, no_embed_class=bare, global_pool=pool)
    x, spec = image((64, 96)), ROTARY_SPECS[kind]
    attachment = retrofit.attach(model, spec, strength=1.0)
    assert attachment.encoding.dims.prefix == prefix
    hand_rotation(by_hand, oracle(kind, attachment), prefix=prefix, pairing=spec.pairing)
    with torch.no_grad():
        features = model.forward_features(x)
        assert apart(features, by_hand.forward_features(x)) < 1e-6
        plain = vit(class_token=cls, reg_tokens=reg, no_embed_class=bare, global_pool=pool)
        assert apart(features, plain.forward_features(x)) > 1e-3


def oracle(kind: str, attachment: Any, grid: tuple[int, int] = (4, 6)) -> np.ndarray:
    """Return the angles of a spec from the loops of tests/reference."""
    index = reference_coords.index(*grid)
    if kind == "mixed":
        freqs = attachment.encoding.frequencies.detach().double().flip(2).permute(2, 0, 1, 3)
        return np.stack(
            [reference_rotary.mixed_angles(index, freqs[:, layer].numpy()) for layer in range(2)]
        )
    if kind == "dinov3":
        return reference_rotary.axial_angles(
            reference_coords.centred(*grid), HEAD_DIM, 100.0, turns=True
        )
    return reference_rotary.axial_angles(index, HEAD_DIM, 100.0)


def test_reference_strength_scales_the_angles() -> None:
    model, by_hand, x = vit(), vit(), image((64, 96))
    retrofit.attach(model, vp.AxialRopeSpec(), strength=0.25)
    hand_rotation(by_hand, 0.25 * axial(4, 6), prefix=1)
    with torch.no_grad():
        assert apart(model.forward_features(x), by_hand.forward_features(x)) < 1e-6


def test_reference_partial_rotary_leaves_the_other_channels() -> None:
    model, by_hand, x = vit(), vit(), image((64, 96))
    retrofit.attach(model, ROTARY_SPECS["partial"], strength=1.0)
    hand_rotation(by_hand, axial(4, 6, head_dim=8), prefix=1)
    with torch.no_grad():
        assert apart(model.forward_features(x), by_hand.forward_features(x)) < 1e-6


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("bare", [False, True])
def test_reference_added_vectors_are_rows_of_the_table(dynamic: bool, bare: bool) -> None:
    """What is added to patch tokens could as well stand in the model's own table, prefix rows left alone."""
    changes = {"dynamic_img_size": dynamic, "no_embed_class": bare}
    model, by_hand, x = vit(**changes), vit(**changes), image((64, 96))
    retrofit.attach(model, vp.SinCosSpec(), strength=0.5)
    rows = torch.from_numpy(reference_sincos.mae(4, 6, 64)).float()
    with torch.no_grad():
        by_hand.pos_embed[:, by_hand.pos_embed.shape[1] - 24 :] += 0.5 * rows
        assert apart(model.forward_features(x), by_hand.forward_features(x)) < 1e-6


def test_reference_learned_table_on_its_own_grid() -> None:
    model, by_hand, x = vit(), vit(), image((64, 96))
    attachment = retrofit.attach(model, vp.LearnedSpec(grid_hw=(4, 6), std=0.3), strength=0.5)
    with torch.no_grad():
        by_hand.pos_embed[:, 1:] += 0.5 * attachment.encoding.table
        assert apart(model.forward_features(x), by_hand.forward_features(x)) < 1e-6


def test_two_attachments_add_their_angles() -> None:
    model, by_hand, x = vit(), vit(), image((64, 96))
    retrofit.attach(model, vp.AxialRopeSpec(), strength=0.5, name="first")
    retrofit.attach(model, vp.AxialRopeSpec(theta=7.0), strength=0.25, name="second")
    assert list(retrofit.attachments(model)) == ["first", "second"]
    hand_rotation(by_hand, 0.5 * axial(4, 6) + 0.25 * axial(4, 6, theta=7.0), prefix=1)
    with torch.no_grad():
        assert apart(model.forward_features(x), by_hand.forward_features(x)) < 1e-6


def test_two_doors_at_once() -> None:
    model, by_hand, x = vit(), vit(), image((64, 96))
    retrofit.attach(model, vp.SinCosSpec(), strength=0.5)
    retrofit.attach(model, vp.AxialRopeSpec(), strength=1.0)
    hand_rotation(by_hand, axial(4, 6), prefix=1)
    with torch.no_grad():
        by_hand.pos_embed[:, 1:] += 0.5 * torch.from_numpy(reference_sincos.mae(4, 6, 64)).float()
        assert apart(model.forward_features(x), by_hand.forward_features(x)) < 1e-6


def test_cross_fade_of_the_own_table_and_a_new_one() -> None:
    """Two strengths replace one scheme by another: at 1 the new one acts alone."""
    model, x = vit(), image((64, 96))
    new = retrofit.attach(model, vp.AxialRopeSpec(), strength=0.0)
    table = model.pos_embed.detach().clone()
    only_new = vit(pos_embed="none")
    hand_rotation(only_new, axial(4, 6), prefix=1)
    with torch.no_grad():
        for share in (0.0, 0.5, 1.0):
            new.set_strength(share)
            model.pos_embed.copy_(table * (1 - share))
        assert apart(model.forward_features(x), only_new.forward_features(x)) < 1e-6


@pytest.mark.parametrize("path", ["mask", "causal", "unfused"])
def test_reference_every_path_through_attention(path: str) -> None:
    """An attention mask makes timm loop over the blocks itself; unfused attention multiplies by hand."""
    model, by_hand, x = vit(), vit(), image((64, 96))
    retrofit.attach(model, vp.AxialRopeSpec(), strength=1.0)
    hand_rotation(by_hand, axial(4, 6), prefix=1)
    call: dict[str, Any] = {}
    if path == "mask":
        call = {"attn_mask": torch.randn(25, 25)}
    elif path == "causal":
        call = {"is_causal": True}
    else:
        for one in (model, by_hand):
            for block in one.blocks:
                block.attn.fused_attn = False
    with torch.no_grad():
        expected = by_hand.forward_features(x, **call)
        assert apart(model.forward_features(x, **call), expected) < 1e-6


def test_reference_grouped_queries_turn_alike() -> None:
    """Fewer key heads than query heads: one axial rotation serves both."""
    kinds = {"attn_type": "rope", "qkv_fused": False, "num_kv_heads": 1, "use_rot_pos_emb": False}
    models = [
        opened(
            Eva(img_size=(64, 96), depth=2, embed_dim=64, num_heads=2, num_classes=0, **kinds)
        ).eval()
        for _ in range(2)
    ]
    retrofit.attach(models[0], vp.AxialRopeSpec(), strength=1.0)
    hand_rotation(models[1], axial(4, 6), prefix=1)
    x = image((64, 96))
    with torch.no_grad():
        assert apart(models[0].forward_features(x), models[1].forward_features(x)) < 1e-6
    fresh = opened(Eva(img_size=(64, 96), depth=2, embed_dim=64, num_heads=2, **kinds))
    with pytest.raises(PositionError, match=r"2 query heads and 1 key heads.*AxialRopeSpec"):
        retrofit.attach(fresh, vp.MixedRopeSpec())


@pytest.mark.parametrize("attn_type", ["eva", "rope"])
def test_heads_of_their_own_width(attn_type: str) -> None:
    """Unfused projections and q/k norms change nothing in where q and k pass."""
    changes = {"attn_type": attn_type, "qkv_fused": False, "qk_norm": True}
    models = [
        opened(
            Eva(img_size=(64, 96), depth=2, embed_dim=64, num_heads=4, num_classes=0, **changes)
        ).eval()
        for _ in range(2)
    ]
    retrofit.attach(models[0], vp.AxialRopeSpec(), strength=1.0)
    hand_rotation(models[1], axial(4, 6, head_dim=16), prefix=1)
    x = image((64, 96))
    with torch.no_grad():
        assert apart(models[0].forward_features(x), models[1].forward_features(x)) < 1e-6


def test_shape_of_what_is_added_to_the_model() -> None:
    """One submodule, its parameters, and hooks of this package."""
    model = vit()
    keys = list(model.state_dict())
    attachment = retrofit.attach(model, vp.MixedRopeSpec(), learn_strength=True)
    new = ["visionpos.mixed_rope.learned_strength", "visionpos.mixed_rope.encoding.frequencies"]
    assert [key for key in model.state_dict() if key not in keys] == new
    assert [key for key in model.state_dict() if key in keys] == keys
    assert model.get_submodule("visionpos.mixed_rope") is attachment
    hooked = {
        name: len(module._forward_hooks) + len(module._forward_pre_hooks)
        for name, module in model.named_modules()
        if module._forward_hooks or module._forward_pre_hooks
    }
    expected = {"patch_embed": 1, "norm_pre": 1}
    for layer in range(2):
        expected |= {
            f"blocks.{layer}": 4,  # two find the call and hand it on, two see whether the port has acted
            f"blocks.{layer}.attn": 2,  # whether its forward went through the port
            f"blocks.{layer}.attn.q_norm": 1,
            f"blocks.{layer}.attn.k_norm": 1,
        }
    assert hooked == expected


class OwnAttention(timm.layers.Attention):  # type: ignore[misc]
    """A subclass whose forward goes around its norms, as users write them."""

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        b, n, width = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        weights = (q @ k.mT * self.scale).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(b, n, width))  # type: ignore[no-any-return]


def test_error_attention_that_goes_around_its_port() -> None:
    """The hooks would never run, and the encoding would do nothing without a word."""
    model, x = vit(), image((64, 96))
    for block in model.blocks:
        block.attn.__class__ = OwnAttention
    part = retrofit.attach(model, vp.AxialRopeSpec(), strength=0.0)
    expected = model.forward_features(x)
    part.set_strength(1.0)
    with pytest.raises(
        PositionError, match=r"blocks.0.attn is a OwnAttention that ran without q_norm and k_norm"
    ):
        model(x)
    retrofit.detach(model)
    assert torch.equal(model.forward_features(x), expected)
    swin = timm.create_model("swin_tiny_patch4_window7_224", depths=(1, 1, 1, 1), num_classes=0)
    retrofit.attach(swin, vp.AlibiSpec(), strength=1.0)
    attention = swin.layers[0].blocks[0].attn
    attention.forward = lambda x, **_: x
    with pytest.raises(
        PositionError, match=r"that ran without _get_rel_pos_bias, where the encoding acts"
    ):
        swin(torch.zeros(1, 3, 224, 224))


def test_traced_model_serves_its_size() -> None:
    """torch.jit.trace makes tensors of sizes; grids are numbers all the same."""
    model, x = vit(), image((64, 96))
    retrofit.attach(model, vp.AxialRopeSpec(), strength=1.0)
    retrofit.attach(model, vp.AlibiSpec(), strength=0.5)
    retrofit.attach(model, vp.SinCosSpec(), strength=0.5)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(model, x)
        assert torch.equal(traced(2 * x), model(2 * x))


@pytest.mark.parametrize("spec", [vp.AxialRopeSpec(), vp.SinCosSpec()], ids=lambda s: s.kind)
def test_shape_of_parameter_free_schemes(spec: Any) -> None:
    model = vit()
    keys = list(model.state_dict())
    retrofit.attach(model, spec, strength=1.0)
    assert list(model.state_dict()) == keys


def test_shape_additive_hooks_nothing_but_the_patches() -> None:
    model = vit(patch_drop_rate=0.5)
    retrofit.attach(model, vp.SinCosSpec())
    hooked = [n for n, m in model.named_modules() if m._forward_hooks or m._forward_pre_hooks]
    assert hooked == ["patch_embed"]
    assert type(model.patch_drop) is PatchDropout


def test_mode_and_device_follow_the_model() -> None:
    model = vit().train()
    assert retrofit.attach(model, vp.MixedRopeSpec()).training
    assert not retrofit.attach(vit(), vp.MixedRopeSpec()).training
    model.eval()
    assert not model.visionpos.mixed_rope.encoding.training
    with torch.device("meta"):
        meta = timm.create_model("vit_tiny_patch16_224", depth=1)
    attachment = retrofit.attach(meta, vp.MixedRopeSpec(), learn_strength=True)
    assert {weight.device.type for weight in attachment.parameters()} == {"meta"}


def test_an_idle_attachment_draws_no_random_number() -> None:
    """Dropout of the model falls on the same channels with and without an idle attachment."""
    jitter = vp.CoordSpec(jitter=2.0, shift=1.0)
    changes = {"proj_drop_rate": 0.3, "attn_drop_rate": 0.3, "patch_drop_rate": 0.5}
    model, x = vit(**changes).train(), image((64, 96))
    torch.manual_seed(5)
    expected = model.forward_features(x)
    retrofit.attach(model, vp.AxialRopeSpec(coords=jitter))
    torch.manual_seed(5)
    assert torch.equal(model.forward_features(x), expected)


def test_inputs_are_not_written_to() -> None:
    model, x = vit(), image((64, 96))
    before = x.clone()
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    retrofit.attach(model, vp.AxialRopeSpec(), strength=1.0)
    retrofit.attach(model, vp.SinCosSpec(), strength=1.0)
    with torch.no_grad():
        assert torch.equal(model.forward_features(x), model.forward_features(x))
    assert torch.equal(x, before)
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())


def test_error_attached_twice() -> None:
    model = vit()
    retrofit.attach(model, vp.AxialRopeSpec())
    with pytest.raises(PositionError, match=r"name 'axial_rope' is already attached; detach"):
        retrofit.attach(model, vp.AxialRopeSpec())


@pytest.mark.parametrize(
    "name", ["", "two words", "1st", "a.b", "half", "training", "to", "forward", "_modules"]
)
def test_error_name_that_a_module_cannot_bear(name: str) -> None:
    model = vit()
    with pytest.raises(PositionError, match=r"name is"):
        retrofit.attach(model, vp.AxialRopeSpec(), name=name)
    assert_untouched(model)


def assert_untouched(model: Any) -> None:
    """A refusal leaves no trace."""
    assert not hasattr(model, "visionpos")
    assert not [n for n, m in model.named_modules() if m._forward_hooks or m._forward_pre_hooks]


def test_error_second_rotation_in_other_planes() -> None:
    """Two rotations in different planes are no function of distance, whoever owns the first."""
    own = Case("vit_small_patch16_dinov3", 16, "half").build()
    with pytest.raises(
        PositionError, match=r"'adjacent' differs from the model's own 'half'.*Use pairing='half'"
    ):
        retrofit.attach(own, vp.AxialRopeSpec())
    assert_untouched(own)
    model = vit()
    retrofit.attach(model, vp.AxialRopeSpec())
    with pytest.raises(
        PositionError, match=r"'half' differs from .*'adjacent'.*Use pairing='adjacent'"
    ):
        retrofit.attach(model, vp.MixedRopeSpec(pairing="half"))
    assert list(retrofit.attachments(model)) == ["axial_rope"]


def test_error_half_planes_of_another_width() -> None:
    """Half pairing joins channel i with i + pairs: a rotation of fewer pairs lies in other planes."""
    own = Case("vit_small_patch16_dinov3", 16, "half").build()
    with pytest.raises(PositionError, match=r"turns 8 pairs and the model's own 16.*rotary_dim=32"):
        retrofit.attach(own, vp.AxialRopeSpec(pairing="half", rotary_dim=16))
    model = vit()
    retrofit.attach(model, vp.AxialRopeSpec(pairing="half", rotary_dim=16), name="part")
    with pytest.raises(PositionError, match=r"turns 16 pairs and attached 'part' 8.*rotary_dim=16"):
        retrofit.attach(model, vp.AxialRopeSpec(pairing="half"))
    # Adjacent planes are the same whatever their number.
    other = vit()
    retrofit.attach(other, vp.AxialRopeSpec(rotary_dim=16), name="part")
    retrofit.attach(other, vp.AxialRopeSpec())


def test_error_prefix_rows_in_an_attached_table() -> None:
    model = vit()
    with pytest.raises(PositionError, match=r"1 prefix_rows.*Set prefix_rows=0"):
        retrofit.attach(model, vp.LearnedSpec(grid_hw=(4, 6), prefix_rows=1))
    assert_untouched(model)


@pytest.mark.parametrize("strength", [float("nan"), float("inf")])
def test_error_strength(strength: float) -> None:
    model = vit()
    with pytest.raises(PositionError, match=r"strength is .*finite"):
        retrofit.attach(model, vp.AxialRopeSpec(), strength=strength)
    assert_untouched(model)
    attachment = retrofit.attach(model, vp.AxialRopeSpec(), strength=0.5)
    with pytest.raises(PositionError, match=r"strength is .*finite"):
        attachment.set_strength(strength)
    assert attachment.strength == 0.5


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("rope_mixed", r"a shipped encoding.* Pass visionpos.config.load_encoding\('rope_mixed'\)"),
        ("rope_mixt", r"no shipped encoding has this name. Did you mean rope_mixed"),
    ],
)
def test_error_name_in_place_of_a_spec(name: Any, hint: str) -> None:
    with pytest.raises(PositionError, match=hint):
        retrofit.attach(vit(), name)
    with pytest.raises(PositionError, match=rf"load_encoding\('{name}'\)"):
        vp.build(name, vp.Dims(embed_dim=64, num_heads=2, depth=1))


def test_start_values_come_from_torchs_generator() -> None:
    """As attach says: seeded by torch.manual_seed, and the state of the global generator moves on."""
    found = []
    for _ in range(2):
        torch.manual_seed(5)
        before = torch.get_rng_state()
        part = retrofit.attach(vit(), vp.MixedRopeSpec(), generator=torch.Generator())
        assert not torch.equal(torch.get_rng_state(), before)
        found.append(part.encoding.frequencies.detach())
    assert torch.equal(*found)


def test_error_classes_without_a_row() -> None:
    with pytest.raises(
        PositionError,
        match=r"ResNet, which is no class that visionpos knows; VisionTransformer, Eva",
    ):
        retrofit.attach(timm.create_model("resnet18"), vp.AxialRopeSpec())
    wrapped = timm.create_model("vit_tiny_patch16_224", depth=3, features_only=True)
    with pytest.raises(PositionError, match=r"FeatureGetterNet.*Unwrap"):
        retrofit.attach(wrapped, vp.AxialRopeSpec())
    with pytest.raises(PositionError, match=r"OptimizedModule.*Unwrap"):
        retrofit.attach(torch.compile(vit()), vp.AxialRopeSpec())


def test_error_heads_that_cannot_be_shared_out() -> None:
    model = vit(embed_dim=60, num_heads=10)
    with pytest.raises(PositionError, match=r"of head_dim 6|head_dim is 6"):
        retrofit.attach(model, vp.AxialRopeSpec())
    assert_untouched(model)


def test_layers_of_different_heads_have_encodings_of_their_own() -> None:
    model, x = vit(), image((64, 96))
    model.blocks[1].attn.num_heads, model.blocks[1].attn.head_dim = 4, 16
    with torch.no_grad():
        features = model.forward_features(x)
        attachment = retrofit.attach(model, vp.MixedRopeSpec())
        assert [encoding.dims.channels for encoding in attachment.encodings] == [32, 16]
        assert torch.equal(model.forward_features(x), features)
        attachment.set_strength(1.0)
        turned = model.forward_features(x)
        assert apart(turned, features) > 1e-3
        attachment.encodings[1].frequencies.zero_()
        assert apart(model.forward_features(x), turned) > 1e-4
    with pytest.raises(PositionError, match=r"different \(heads, head_dim\)"):
        retrofit.dims_of(model)


def test_error_block_without_a_known_attention() -> None:
    model = vit()
    model.blocks[1] = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64))
    with pytest.raises(
        PositionError, match=r"blocks.1 is a Sequential without an attention.*door add"
    ):
        retrofit.attach(model, vp.AxialRopeSpec())


def test_error_tokens_dropped_or_added_on_the_way() -> None:
    """The prefix is the model's; a token count that does not fit it is never explained away as prefix."""
    model, x = vit(), image((64, 96))
    retrofit.attach(model, vp.MixedRopeSpec(), strength=1.0)
    with torch.no_grad():
        model(x)
        tokens = model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(x))))
        for count in (20, 24, 26, 37):
            grown = torch.cat([tokens, tokens], dim=1)[:, :count]
            with pytest.raises(
                PositionError, match=rf"got {count} tokens.*24 patches and 1 prefix"
            ):
                model.blocks(grown)


def test_error_blocks_before_any_patches() -> None:
    model = vit()
    retrofit.attach(model, vp.AxialRopeSpec(), strength=1.0)
    with pytest.raises(PositionError, match=r"a block ran before patch_embed.*run the whole model"):
        model.blocks(torch.randn(1, 25, 64))


def test_error_attention_alone() -> None:
    model = vit()
    retrofit.attach(model, vp.AxialRopeSpec(), strength=1.0)
    model(image((64, 96)))
    with pytest.raises(PositionError, match=r"attention of block 0 ran without its block"):
        model.blocks[0].attn(torch.randn(1, 25, 64))
