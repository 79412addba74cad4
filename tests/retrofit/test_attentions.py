"""attach over the attention classes of timm: every port, every door, on one small variant of each."""

from __future__ import annotations

import copy
import io
import itertools
from typing import Any

import pytest
import timm
import torch
from timm.models.swin_transformer import WindowAttention
from torch import nn

import visionpos as vp
from tests.retrofit.attentions import CASES, VARIANTS, Variant, features
from tests.retrofit.zoo import apart
from visionpos import PositionError, retrofit
from visionpos.retrofit.lattice import Sites, reader_of
from visionpos.retrofit.plan import attachable
from visionpos.retrofit.port_rows import known_attentions
from visionpos.retrofit.ports import attentions_of
from visionpos.retrofit.seams import prefix_of

TURNED = [case for case in CASES if case.values[0].ports]
BIASED = [case for case in CASES if case.values[0].biased]
BY_NAME = {variant.name: variant for variant in VARIANTS}


def rotary(variant: Variant, **changes: Any) -> vp.AxialRopeSpec:
    return vp.AxialRopeSpec(pairing=variant.pairing, rotary_dim=variant.rotary_dim, **changes)


def whole_turn(attachment: Any, angle: float) -> None:
    """Make an attachment turn every token, prefix too, by one angle a pair."""

    def constant(rotation: vp.Rotation) -> vp.Rotation:
        turns = torch.full_like(rotation.cos, angle, dtype=torch.float64)
        return vp.Rotation(turns.cos(), turns.sin(), rotation.pairing, rotation.axes)

    of_call, of_attention = attachment.rotation, attachment.rotations
    attachment.rotation = lambda *args: constant(of_call(*args))
    attachment.rotations = lambda *args: {
        slot: constant(rotation) for slot, rotation in of_attention(*args).items()
    }


@pytest.mark.parametrize("variant", TURNED)
def test_strength_constant_angle_and_detach(variant: Variant) -> None:
    """At 0 every bit stays; a common turn of all tokens changes nothing, a true one does; detach leaves no trace."""
    model, x = variant.build(), variant.image()
    if variant.double:
        model, x = model.double(), x.double()
    plain, keys = features(model, x), list(model.state_dict())
    attachment = retrofit.attach(model, rotary(variant), partial=True)
    assert torch.equal(features(model, x), plain)
    attachment.set_strength(1.0)
    assert apart(features(model, x), plain) > 1e-4
    whole_turn(attachment, 0.7)
    error = apart(features(model, x), plain)
    assert error < 1e-6, error
    del attachment.rotation, attachment.rotations
    attachment.set_strength(0.0)
    assert torch.equal(features(model, x), plain)
    retrofit.detach(model)
    assert torch.equal(features(model, x), plain)
    assert list(model.state_dict()) == keys
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


@pytest.mark.parametrize("variant", CASES)
def test_golden_ports(variant: Variant) -> None:
    """A change of timm's classes changes these numbers."""
    with torch.device("meta"):
        model = variant.made()
    found = attachable(model)
    total = variant.ports + variant.skipped
    assert found["rotate"][:2] == (variant.ports, total)
    assert found["bias"][:2] == (variant.biased, total)
    assert found["add"][0] >= 1
    assert found["conditional"][0] >= 1
    assert bool(found["rotate"][2]) == bool(variant.skipped)


@pytest.mark.slow
def test_every_attention_class_has_a_variant() -> None:
    seen = set()
    for variant in VARIANTS:
        with torch.device("meta"):
            model = variant.made()
        seen |= {
            base.__name__ for port in attentions_of(model) for base in type(port.holder).__mro__[:1]
        }
    unseen = {"ChannelAttentionV2", "MultiScaleAttentionPoolFirst", "AttentionRope"}
    assert set(known_attentions()) - seen <= unseen


@pytest.mark.parametrize("variant", BIASED)
def test_bias_enters_the_logits(variant: Variant) -> None:
    model, x = variant.build(), variant.image()
    plain = features(model, x)
    attachment = retrofit.attach(model, vp.AlibiSpec(), partial=bool(variant.skipped))
    assert torch.equal(features(model, x), plain)
    attachment.set_strength(1.0)
    with_bias = features(model, x)
    assert apart(with_bias, plain) > 1e-5
    twin = pickled(copy.deepcopy(model))
    assert torch.equal(features(twin, x), with_bias)
    retrofit.detach(twin)
    assert torch.equal(features(twin, x), plain)
    assert torch.equal(features(model, x), with_bias)
    retrofit.detach(model)
    assert torch.equal(features(model, x), plain)


@pytest.mark.parametrize("variant", CASES)
def test_add_and_conditional_serve_every_class(variant: Variant) -> None:
    model, x = variant.build(), variant.image()
    plain = features(model, x)
    blocks = attachable(model)["conditional"][0]
    last = max(0, blocks - 2)  # PiT's last map goes nowhere
    for spec in (vp.SinCosSpec(), vp.PegSpec(after=(0,)), vp.PegSpec(after=(last,))):
        attachment = retrofit.attach(model, spec)
        assert torch.equal(features(model, x), plain)
        attachment.set_strength(1.0)
        assert apart(features(model, x), plain) > 1e-5
        retrofit.detach(model)
        assert torch.equal(features(model, x), plain)


def pickled(model: nn.Module) -> Any:
    """Return a model through a file."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


KINDS = [  # one for each way in which an attention finds its grid, and for each order of q and k
    "beit_base_patch16_224",
    "convit_tiny",
    "tnt_s_patch16_224",
    "pit_ti_224",
    "volo_d1_224",
    "nest_tiny",
    "hiera_tiny_224",
    "swin_tiny_patch4_window7_224",
    "swinv2_tiny_window8_256",
    "gcvit_xxtiny",
    "levit_128s",
    "twins_pcpvt_small",
    "vit_relpos_small_patch16_224",
]


@pytest.mark.parametrize("name", KINDS)
def test_copies_are_their_own(name: str) -> None:
    """A copy, through memory or a file, acts as its original and follows its own strength and frequencies alone."""
    variant = BY_NAME[name]
    model, x = variant.build(), variant.image()
    retrofit.attach(model, vp.MixedRopeSpec(), strength=1.0, partial=True)
    turned = features(model, x)
    for twin in (copy.deepcopy(model), pickled(model)):
        assert torch.equal(features(twin, x), turned)
        part = retrofit.attachments(twin)["mixed_rope"]
        with torch.no_grad():
            for weight in part.parameters():
                weight.mul_(3.0)
        assert apart(features(twin, x), turned) > 1e-4
        assert torch.equal(features(model, x), turned)


def loss_grads(model: Any, images: list[torch.Tensor], *, checkpoint: bool) -> list[torch.Tensor]:
    model.set_grad_checkpointing(checkpoint)
    model.zero_grad()
    torch.manual_seed(3)
    sum(model.forward_features(x).square().mean() for x in images).backward()
    return [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]


@pytest.mark.parametrize(
    "name",
    [
        "swin_tiny_patch4_window7_224",
        "swinv2_tiny_window8_256",
        "beit_base_patch16_224",
        "hiera_tiny_224",
        "levit_128s",
        "volo_d1_224",
        "vit_relpos_small_patch16_224",
    ],
)
def test_two_crops_under_checkpointing(name: str) -> None:
    """Two forwards before one backward, recomputed: the gradients are those without checkpointing, draws included."""
    variant = BY_NAME[name]
    model = variant.build().train()
    for part in model.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            part.eval()
    jitter = vp.CoordSpec(jitter=1.5, rescale=2.0)
    retrofit.attach(
        model, rotary(variant, coords=jitter), strength=0.7, learn_strength=True, partial=True
    )
    images = [variant.image(), variant.image() * 0.5 + 0.1]
    expected = loss_grads(model, images, checkpoint=False)
    for actual, wanted in zip(loss_grads(model, images, checkpoint=True), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-6)


def test_bias_under_checkpointing() -> None:
    variant = BY_NAME["swin_tiny_patch4_window7_224"]
    model = variant.build().train()
    retrofit.attach(model, vp.LogBiasSpec(form="torchvision"), strength=0.7, learn_strength=True)
    images = [variant.image(), variant.image() * 0.5 + 0.1]
    expected = loss_grads(model, images, checkpoint=False)
    for actual, wanted in zip(loss_grads(model, images, checkpoint=True), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["beit_base_patch16_224", "swinv2_tiny_window8_256"])
def test_late_biases_turn_too(name: str) -> None:
    """Pitfall: q and v biases are added after the port. At rest, and after detach, the flag is what it was."""
    variant = BY_NAME[name]
    model, x = variant.build(), variant.image()
    holders = [port.holder for port in attentions_of(model)]
    attachment = retrofit.attach(model, rotary(variant), strength=1.0)
    features(model, x)
    assert not any(holder.qkv_bias_separate for holder in holders)
    whole_turn(attachment, 0.7)
    with torch.no_grad():
        for holder in holders:
            holder.q_bias.mul_(5.0)
    retrofit_off = copy.deepcopy(model)
    del retrofit_off.visionpos._modules["axial_rope"].rotation
    retrofit.attachments(retrofit_off)["axial_rope"].set_strength(0.0)
    assert apart(features(model, x), features(retrofit_off, x)) < 1e-6


# Stride of the first map that an attention sees, and how far a stem's overlap may move the largest change.
STRIDES = {
    "vit_tiny_patch16_224": (16, 0),
    "deit_tiny_distilled_patch16_224": (16, 0),
    "vit_relpos_small_patch16_224": (16, 0),
    "naflexvit_base_patch16_gap": (16, 0),
    "qwen3_vit_88m": (16, 0),
    "gemma4_vit_167m": (16, 0),
    "cait_xxs24_224": (16, 0),
    "convit_tiny": (16, 0),
    "pit_ti_224": (8, 1),
    "nest_tiny": (4, 0),
    "hiera_tiny_224": (4, 1),
    "sam2_hiera_tiny": (4, 1),
    "swin_tiny_patch4_window7_224": (4, 0),
    "swinv2_cr_tiny_ns_224": (4, 0),
    "coatnet_pico_rw_224": (16, 1),
    "levit_128s": (16, 1),
    "levit_conv_128s": (16, 1),
    "twins_svt_small": (4, 0),
    "davit_tiny": (4, 1),
    "efficientformerv2_s0": (16, 1),
    "volo_d1_224": (16, 1),
}


@pytest.mark.parametrize("name", STRIDES)
def test_token_order(name: str) -> None:
    """One image cell is changed: the token that changes most stands where the port says that this cell is."""
    variant, (stride, slack) = BY_NAME[name], STRIDES[name]
    model, x = variant.build(), variant.image(1)
    port = next(port for port in attentions_of(model) if port.refusal is None)
    outputs: list[torch.Tensor] = []
    sites: list[Sites] = []
    reader = reader_of(port) if port.local else None

    def place(module: Any, args: Any, kwargs: Any) -> None:
        sites.append(reader.sites(module, args, kwargs) if reader else None)

    reading = port.holder.register_forward_pre_hook(place, with_kwargs=True)
    handles = [
        reading,
        port.taps()[0][2].register_forward_hook(lambda _m, _a, out: outputs.append(out)),
    ]
    if reader is not None and reader.lattice.kind == "container":
        handles.append(
            reader.anchor.register_forward_pre_hook(lambda _m, a: reader.see(a[0][0].shape[-2:]))
        )
    height, width = (side // stride for side in variant.size_hw)
    for cell in [(0, width - 1), (height - 1, 0), (height // 2, 1)]:
        outputs.clear()
        y, z = cell[0] * stride, cell[1] * stride
        moved = x.clone()
        moved[..., y : y + stride, z : z + stride] += 2.0
        features(model, x)
        features(model, moved)
        at = sites[-1] or Sites(vp.Grid(height, width), prefix_of(model))
        points = at.queries(vp.coordinates(at.grid))
        found = changed_token(
            outputs[1] - outputs[0], port.seams.taps[0].order, at.prefix + len(points)
        )
        expected = [cell[0] % at.grid.height, cell[1] % at.grid.width]
        far = (points[found - at.prefix] - torch.tensor(expected)).abs()
        wrapped = torch.minimum(far, torch.tensor([at.grid.height, at.grid.width]) - far)
        assert wrapped.max() <= slack, (cell, points[found - at.prefix])
    for handle in handles:
        handle.remove()


def changed_token(change: torch.Tensor, order: str, tokens: int) -> int:
    """Return which token of its window changes most."""
    if order == "bhnd":
        rows = change.abs().sum(dim=(1, 3))
    elif order == "bnhd":
        rows = change.abs().sum(dim=(2, 3))
    elif change.ndim == 4 and change.shape[2] * change.shape[3] == tokens:
        rows = change.abs().sum(1).flatten(1)
    else:
        rows = change.abs().sum(-1).reshape(-1, tokens)
    return int(rows.argmax()) % tokens


def test_layerwise_biases_differ() -> None:
    variant = BY_NAME["vit_tiny_patch16_224"]
    model, x = variant.build(), variant.image()
    plain = features(model, x)
    retrofit.attach(model, vp.KerpleSpec(), strength=1.0)
    assert apart(features(model, x), plain) > 1e-5


@pytest.mark.parametrize(
    "spec",
    [
        vp.AlibiSpec(),
        vp.KerpleSpec(),
        vp.FireSpec(),
        vp.T5BiasSpec(),
        vp.SwinTableSpec(window_hw=(4, 6), std=0.5),
        vp.OffsetTableSpec(window_hw=(4, 6), std=0.5),
        vp.LogBiasSpec(form="cr"),
    ],
    ids=lambda spec: spec.kind,
)
@pytest.mark.parametrize(
    "name", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "levit_128s"]
)
def test_every_bias_attaches(name: str, spec: Any) -> None:
    variant = BY_NAME[name]
    model, x = variant.build(), variant.image()
    plain = features(model, x)
    attachment = retrofit.attach(model, spec, strength=1.0)
    for encoding, weight in itertools.product(attachment.encodings, [0.3]):
        with torch.no_grad():
            for parameter in encoding.parameters():
                parameter.add_(
                    weight
                    * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
                )
    assert features(model, x).isfinite().all()
    assert apart(features(model, x), plain) > 1e-6


def test_bias_of_a_window_is_the_encoding() -> None:
    """What Swin adds to its logits is its own table and the encoding of the window, number for number."""
    variant = BY_NAME["swin_tiny_patch4_window7_224"]
    model = variant.build()
    attention = attentions_of(model)[0].holder
    own = attention._get_rel_pos_bias()
    attachment = retrofit.attach(model, vp.AlibiSpec(), strength=0.5)
    expected = own + 0.5 * attachment.encodings[0](vp.Grid(*attention.window_size))
    torch.testing.assert_close(attention._get_rel_pos_bias(), expected, rtol=0, atol=0)


def test_bias_reads_prefix_rows_and_follows_patch_dropout() -> None:
    variant = BY_NAME["vit_tiny_patch16_224"]
    dropped = Variant(variant.name, 2, biased=2, extra={**variant.extra, "patch_drop_rate": 0.5})
    model = dropped.build().train()
    x = variant.image()
    spec = vp.SwinTableSpec(window_hw=(4, 6), class_rows=True, std=0.5)
    attachment = retrofit.attach(model, spec, strength=1.0)
    masks = []
    hook = model.blocks[0].attn.register_forward_pre_hook(
        lambda _m, _a, kwargs: masks.append(kwargs["attn_mask"]), with_kwargs=True
    )
    kept = []
    model.patch_drop.register_forward_hook(lambda module, _a, _o: kept.append(module.relay.get()))
    model.forward_features(x)
    hook.remove()
    whole = attachment.encoding(vp.Grid(4, 6), prefix=1)
    rows = torch.cat([torch.zeros(2, 1, dtype=torch.long), kept[0] + 1], dim=1)
    for sample in range(2):
        expected = whole[:, rows[sample]][:, :, rows[sample]]
        torch.testing.assert_close(masks[0][sample], expected)
    features(model.eval(), x)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "xcit_nano_12_p16_224",
            r"attention in XCA is between channels, not tokens.*Use the door add or conditional",
        ),
        ("samvit_base_patch16", r"q also feeds the relative table of Attention"),
        (
            "volo_d1_224",
            r"OutlookAttention; 1 of 4 attention modules would be skipped. Pass partial=True",
        ),
        (
            "hiera_tiny_224",
            r"q is max-pooled in MaskUnitAttention.*3 of 4 attention modules would be skipped",
        ),
        ("davit_tiny", r"ChannelAttention is between channels.*4 of 8 attention modules"),
    ],
)
def test_error_unreachable(name: str, sentence: str) -> None:
    model = BY_NAME[name].build()
    with pytest.raises(PositionError, match=sentence):
        retrofit.attach(model, vp.AxialRopeSpec())
    assert not hasattr(model, "visionpos")


def test_error_pairing_of_gemma() -> None:
    model = BY_NAME["gemma4_vit_167m"].build()
    with pytest.raises(PositionError, match="differs from the model's own 'half_per_axis'"):
        retrofit.attach(model, vp.AxialRopeSpec())


def test_error_odd_heads_name_the_group() -> None:
    model = BY_NAME["tnt_s_patch16_224"].build()
    with pytest.raises(PositionError, match=r"heads of 6 channels do not fit.*partial=True"):
        retrofit.attach(model, vp.AxialRopeSpec())
    part = retrofit.attach(model, vp.AxialRopeSpec(), partial=True)
    assert len(part.encodings) == 1


def test_error_draws_in_windows() -> None:
    model = BY_NAME["swin_tiny_patch4_window7_224"].build()
    jitter = vp.AxialRopeSpec(coords=vp.CoordSpec(jitter=2.0))
    with pytest.raises(PositionError, match="generator is given"):
        retrofit.attach(model, jitter, generator=torch.Generator())
    sample = vp.AxialRopeSpec(coords=vp.CoordSpec(jitter=2.0, scope="sample"))
    with pytest.raises(PositionError, match="scope is 'sample'"):
        retrofit.attach(model, sample)


def test_one_encoding_a_size() -> None:
    """Stages of one size share an encoding; a model of one size keeps the keys it had."""
    swin = BY_NAME["swin_tiny_patch4_window7_224"].build()
    part = retrofit.attach(swin, vp.MixedRopeSpec())
    assert [encoding.dims.depth for encoding in part.encodings] == [2, 2]
    names = [name for name in swin.state_dict() if name.startswith("visionpos")]
    assert names == [
        "visionpos.mixed_rope.encoding.frequencies",
        "visionpos.mixed_rope.others.for_4x16.frequencies",
    ]
    flat = BY_NAME["vit_tiny_patch16_224"].build()
    retrofit.attach(flat, vp.MixedRopeSpec())
    names = [name for name in flat.state_dict() if name.startswith("visionpos")]
    assert names == ["visionpos.mixed_rope.encoding.frequencies"]


@pytest.mark.parametrize(
    "name",
    [
        "swin_tiny_patch4_window7_224",
        pytest.param("beit_base_patch16_224", marks=pytest.mark.slow),
        pytest.param("levit_128s", marks=pytest.mark.slow),
    ],
)
def test_compiles_whole(name: str) -> None:
    variant = BY_NAME[name]
    model, x = variant.build(), variant.image()
    retrofit.attach(model, rotary(variant), strength=0.7, partial=True)
    expected = features(model, x)
    compiled = torch.compile(model.forward_features, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert apart(compiled(x), expected) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("spec", [vp.AxialRopeSpec(), vp.AlibiSpec()], ids=lambda spec: spec.kind)
def test_compiles_with_checkpointing(spec: Any) -> None:
    """A checkpoint inside a graph allows no writing: windows form what they need where they need it."""
    variant = BY_NAME["swin_tiny_patch4_window7_224"]
    still = Variant(variant.name, 4, extra={**variant.extra, "drop_path_rate": 0.0})
    model, x = still.build().train(), variant.image()
    retrofit.attach(model, spec, strength=0.7, learn_strength=True)
    expected = loss_grads(model, [x], checkpoint=True)
    model.zero_grad()
    compiled = torch.compile(model.forward_features, backend="aot_eager", fullgraph=True)
    compiled(x).square().mean().backward()
    actual = [weight.grad for weight in model.parameters() if weight.grad is not None]
    for one, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_compiles_a_bias() -> None:
    variant = BY_NAME["swin_tiny_patch4_window7_224"]
    model, x = variant.build(), variant.image()
    retrofit.attach(model, vp.AlibiSpec(), strength=0.7)
    expected = features(model, x)
    compiled = torch.compile(model.forward_features, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert apart(compiled(x), expected) < 1e-6


@pytest.mark.parametrize("name", KINDS)
def test_bfloat16_stays_close(name: str) -> None:
    variant = BY_NAME[name]
    model, x = variant.build(), variant.image()
    retrofit.attach(model, rotary(variant), strength=1.0, partial=True)
    expected = features(model, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert apart(features(model, x), expected) < 0.1
    actual = features(model.bfloat16(), x.bfloat16())
    assert actual.dtype == torch.bfloat16
    assert apart(actual, expected) < 0.1


def test_features_only_wrappers_have_ports() -> None:
    """Windows tell their own grid: a wrapper that has lost its class can still be turned."""
    x = BY_NAME["swin_tiny_patch4_window7_224"].image(1)
    body = timm.create_model(
        "swin_tiny_patch4_window7_224",
        img_size=(64, 96),
        depths=(2, 2),
        num_heads=(2, 4),
        embed_dim=32,
        window_size=4,
        features_only=True,
        out_indices=(0, 1),
    ).eval()
    with torch.no_grad():
        plain = body(x)
        part = retrofit.attach(body, vp.AxialRopeSpec())
        assert all(torch.equal(a, b) for a, b in zip(body(x), plain, strict=True))
        part.set_strength(1.0)
        assert apart(body(x)[-1], plain[-1]) > 1e-4


@pytest.mark.parametrize("spec", [vp.AxialRopeSpec(), vp.AlibiSpec()], ids=lambda spec: spec.kind)
def test_windows_follow_timms_own_resize(spec: Any) -> None:
    """set_input_size after attach: windows change under the hooks, and the attachment with them."""
    variant = BY_NAME["swinv2_tiny_window8_256"]
    model = variant.build()
    attachment = retrofit.attach(model, spec, strength=1.0)
    model.set_input_size((96, 64))
    x = variant.image().transpose(-1, -2)[..., :96, :64].contiguous()
    turned = features(model, x)
    attachment.set_strength(0.0)
    plain = features(model, x)
    assert apart(turned, plain) > 1e-4
    retrofit.detach(model)
    assert torch.equal(features(model, x), plain)


def test_doors_live_side_by_side() -> None:
    """A rotation, a bias, vectors and a convolution on one model, under checkpointing, and each taken off alone."""
    variant = BY_NAME["vit_tiny_patch16_224"]
    model = variant.build().train()
    specs = [vp.AxialRopeSpec(), vp.AlibiSpec(), vp.SinCosSpec(), vp.PegSpec(after=(0,))]
    for spec in specs:
        retrofit.attach(model, spec, strength=0.5, learn_strength=True)
    images = [variant.image(), variant.image() * 0.5 + 0.1]
    expected = loss_grads(model, images, checkpoint=False)
    for actual, wanted in zip(loss_grads(model, images, checkpoint=True), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-6)
    x, plain = images[0], features(variant.build(), images[0])
    model.eval()
    for spec in specs:
        assert apart(features(model, x), plain) > 1e-3
        retrofit.detach(model, spec.kind)
    assert torch.equal(features(model, x), plain)


def test_error_patches_with_coordinates() -> None:
    model = BY_NAME["naflexvit_base_patch16_gap"].build()
    retrofit.attach(model, vp.AxialRopeSpec(), strength=1.0)
    coords = torch.stack(torch.meshgrid(torch.arange(2), torch.arange(3), indexing="ij"), -1)
    with pytest.raises(PositionError, match="patch_coord is given"):
        model(
            torch.randn(1, 6, 768),
            patch_coord=coords.reshape(1, 6, 2),
            patch_valid=torch.ones(1, 6, dtype=torch.bool),
        )


def test_groups_keep_position_parameters_from_decaying() -> None:
    model = BY_NAME["swin_tiny_patch4_window7_224"].build()
    retrofit.attach(model, vp.MixedRopeSpec(), learn_strength=True)
    groups = retrofit.parameter_groups(model, weight_decay=0.1, layer_decay=0.5)
    decayed = {
        id(weight) for group in groups if group["weight_decay"] for weight in group["params"]
    }
    names = [name for name, weight in model.named_parameters() if id(weight) in decayed]
    assert names
    assert not [name for name in names if "bias_table" in name or name.startswith("visionpos")]
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))


def test_a_subclass_keeps_its_ports() -> None:
    """Rows are found by base class: a user's own subclass, here with a method of its own, is widened and restored."""

    variant = BY_NAME["swin_tiny_patch4_window7_224"]
    model, x = variant.build(), variant.image()
    attention = attentions_of(model)[0].holder
    attention.__class__ = Louder
    plain = features(model, x)
    retrofit.attach(model, vp.AlibiSpec(), strength=1.0)
    assert isinstance(attention, Louder)
    assert torch.equal(features(pickled(model), x), features(model, x))
    retrofit.detach(model)
    assert type(attention) is Louder
    assert torch.equal(features(model, x), plain)


class Louder(WindowAttention):  # type: ignore[misc]  # timm has no types
    """A user's attention."""

    def _get_rel_pos_bias(self) -> torch.Tensor:
        return 2.0 * super()._get_rel_pos_bias()
