"""Biases against the modules of timm: every key loads, every window and policy gives timm's numbers."""

import math

import pytest
import torch
from timm.layers.bottleneck_attn import PosEmbedRel as BottleneckRel
from timm.layers.halo_attn import PosEmbedRel as HaloRel
from timm.layers.pos_embed_rel import (
    RelPosBias,
    RelPosBiasTf,
    RelPosMlp,
    resize_rel_pos_bias_table_levit,
    resize_rel_pos_bias_table_simple,
)
from timm.models import (
    beit,
    efficientformer,
    efficientformer_v2,
    efficientvit_msra,
    levit,
    tiny_vit,
)
from timm.models.mvitv2 import MultiScaleAttention, cal_rel_pos_type
from timm.models.swin_transformer import WindowAttention as SwinAttention
from timm.models.swin_transformer_v2 import WindowAttention as SwinV2Attention
from timm.models.swin_transformer_v2_cr import WindowMultiHeadAttention
from timm.models.vision_transformer_sam import Attention as SamAttention
from timm.models.vision_transformer_sam import get_decomposed_rel_pos_bias
from torch import nn

import visionpos as vp
from tests.tolerances import assert_close_to
from visionpos import Dims, Grid
from visionpos.config import load_encoding
from visionpos.encodings import (
    DecomposedBias,
    DecomposedBiasSpec,
    LogBias,
    LogBiasSpec,
    OffsetTable,
    OffsetTableSpec,
    SwinTable,
    SwinTableSpec,
)

# Two of timm's own interpolator: an index that is a list, a search in a strided tensor.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
DIMS = Dims(embed_dim=24, num_heads=3, depth=1)
WINDOWS = [(3, 5), (5, 3), (1, 4), (7, 7)]


def drawn(module: nn.Module) -> nn.Module:
    """The module with every parameter drawn: zero starts hide errors (facts, pitfall 23)."""
    for weight in module.parameters():
        weight.data.normal_(std=0.5)
    module.eval()  # LeViT's returns None
    return module


def logits_of(attention: nn.Module, tokens: int) -> torch.Tensor:
    """What enters the softmax for zero queries and keys: the bias alone."""
    seen = []
    attention.softmax.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    with torch.no_grad():
        attention.q_bias.zero_()
        attention(torch.zeros(1, tokens, attention.dim))
    return seen[0][0]


@pytest.mark.parametrize("prefix", [0, 1])
@pytest.mark.parametrize("window", WINDOWS)
def test_swin_bias(window, prefix):
    """RelPosBias: equal to the bit on its window, to rounding on any window that set_window_size goes to."""
    theirs = drawn(RelPosBias(window, 3, prefix_tokens=prefix))
    spec = SwinTableSpec(window_hw=window, recipe="beit", class_rows=bool(prefix))
    ours = SwinTable.from_source(theirs.state_dict(), spec, DIMS)
    assert torch.equal(ours(Grid(*window), prefix=prefix), theirs.get_bias()[0])
    for other in ((4, 6), (9, 2), (2, 2)):
        moved = drawn(RelPosBias(window, 3, prefix_tokens=prefix))
        moved.load_state_dict(theirs.state_dict())
        moved.set_window_size(other)
        assert_close_to(ours(Grid(*other), prefix=prefix), moved.get_bias()[0])
        assert_close_to(ours.resized(other).table, moved.relative_position_bias_table)


@pytest.mark.parametrize("window", WINDOWS)
def test_swin_attention(window):
    """The index that timm registers is compared and left behind."""
    theirs = drawn(SwinAttention(24, num_heads=3, window_size=window))
    state = {**theirs.state_dict(), "relative_position_index": theirs.relative_position_index}
    ours = SwinTable.from_source(state, SwinTableSpec(window_hw=window), DIMS)
    assert torch.equal(ours(Grid(*window)), theirs._get_rel_pos_bias()[0])


@pytest.mark.parametrize("window", WINDOWS)
def test_beit_attention(window):
    """Three class rows; set_window_size is the recipe "beit"."""
    theirs = drawn(beit.Attention(24, num_heads=3, window_size=window))
    spec = SwinTableSpec(window_hw=window, recipe="beit", class_rows=True)
    state = {**theirs.state_dict(), "relative_position_index": theirs.relative_position_index}
    ours = SwinTable.from_source(state, spec, DIMS)
    assert torch.equal(ours(Grid(*window), prefix=1), theirs._get_rel_pos_bias()[0])
    theirs.set_window_size((6, 2))
    assert_close_to(ours(Grid(6, 2), prefix=1), theirs._get_rel_pos_bias()[0])


@pytest.mark.parametrize("window", WINDOWS)
def test_tensorflow_layout(window):
    """RelPosBiasTf holds a map a head, key minus query, looked up by two one-hot products."""
    theirs = drawn(RelPosBiasTf(window, 3))
    ours = SwinTable.from_source(
        theirs.state_dict(), SwinTableSpec(window_hw=window, recipe="beit"), DIMS
    )
    assert_close_to(ours(Grid(*window)), theirs.get_bias())
    theirs.set_window_size((6, 2))
    assert_close_to(ours(Grid(6, 2)), theirs.get_bias())


@pytest.mark.parametrize(("old", "new"), [(7, 12), (12, 7), (14, 24), (7, 8)])
def test_simple_and_levit_resizers(old, new):
    """resize_rel_pos_bias_table_simple is "swin"; _levit is bicubic with antialias, "timm"."""
    ours = drawn(SwinTable(SwinTableSpec(window_hw=(old, old)), DIMS))
    rows = (2 * new - 1) ** 2
    simple = resize_rel_pos_bias_table_simple(ours.table, (new, new), (rows, 3))
    assert_close_to(ours.resized((new, new)).table, simple)
    smooth = SwinTable(SwinTableSpec(window_hw=(old, old), recipe="timm"), DIMS)
    smooth.load_state_dict(ours.state_dict())
    theirs = resize_rel_pos_bias_table_levit(ours.table, (rows, 3))
    assert_close_to(smooth.resized((new, new)).table, theirs)


@pytest.mark.parametrize("pretrained", [(0, 0), (4, 6)])
@pytest.mark.parametrize("window", [(3, 5), (5, 3), (1, 4), (1, 1)])
def test_swinv2_attention(window, pretrained):
    """Pretrained window 0 is form "torchvision"; recorded it is "microsoft", at every window."""
    theirs = drawn(SwinV2Attention(24, window, 3, pretrained_window_size=pretrained))
    spec = (
        LogBiasSpec(pretrained_window_hw=pretrained)
        if pretrained[0]
        else LogBiasSpec(form="torchvision")
    )
    state = {**theirs.state_dict(), "relative_coords_table": theirs.relative_coords_table}
    ours = LogBias.from_source(state, spec, DIMS, window_hw=window)
    assert_close_to(ours(Grid(*window)), logits_of(theirs, math.prod(window)))
    other = drawn(SwinV2Attention(24, window, 3, pretrained_window_size=pretrained))
    other.load_state_dict(theirs.state_dict())
    other.set_window_size((6, 2))
    assert_close_to(ours(Grid(6, 2)), logits_of(other, 12))


def test_swinv2_without_a_record():
    """Our record of the trained window: equal there, and constant elsewhere, where timm's changes by its units."""
    theirs = drawn(SwinV2Attention(24, (4, 4), 3))
    ours = LogBias.from_source(theirs.state_dict(), LogBiasSpec(pretrained_window_hw=(4, 4)), DIMS)
    assert_close_to(ours(Grid(4, 4)), logits_of(theirs, 16))
    theirs.set_window_size((6, 6))
    assert (ours(Grid(6, 6)) - logits_of(theirs, 36)).abs().max() > 0.1


@pytest.mark.parametrize("window", WINDOWS)
def test_swinv2_cr_attention(window):
    """timm runs the network on all pairs; ours on the distinct differences, with the same result."""
    theirs = drawn(WindowMultiHeadAttention(24, 3, window))
    spec = LogBiasSpec(form="cr", hidden=384, out_bias=True)
    ours = LogBias.from_source(theirs.state_dict(), spec, DIMS)
    assert_close_to(ours(Grid(*window)), theirs._relative_positional_encodings()[0])
    theirs.set_window_size((6, 2))
    assert_close_to(ours(Grid(6, 2)), theirs._relative_positional_encodings()[0])


@pytest.mark.parametrize("prefix", [0, 1])
@pytest.mark.parametrize("mode", ["cr", "swin"])
def test_rel_pos_mlp(mode, prefix):
    """Both modes, on a rectangle and after set_window_size; prefix rows are zeros."""
    theirs = drawn(RelPosMlp((3, 5), 3, hidden_dim=32, prefix_tokens=prefix, mode=mode))
    spec = (
        LogBiasSpec(form="cr", hidden=32, out_bias=True)
        if mode == "cr"
        else LogBiasSpec(form="torchvision", hidden=32)
    )
    ours = LogBias.from_source(theirs.state_dict(), spec, DIMS)
    assert_close_to(ours(Grid(3, 5), prefix=prefix), theirs.get_bias()[0])
    theirs.set_window_size((6, 2))
    assert_close_to(ours(Grid(6, 2), prefix=prefix), theirs.get_bias()[0])


def test_rel_pos_mlp_window_of_one():
    """Facts 1.5: timm's 'swin' mode is NaN at a side of 1; ours is coordinate 0."""
    theirs = drawn(RelPosMlp((1, 4), 3, hidden_dim=32, mode="swin"))
    spec = LogBiasSpec(form="torchvision", hidden=32)
    ours = LogBias.from_source(theirs.state_dict(), spec, DIMS)(Grid(1, 4))
    assert theirs.get_bias().isnan().all()
    assert ours.isfinite().all()
    with torch.no_grad():  # the same network, told that the coordinate is 0
        theirs.rel_coords_log[..., 0] = 0.0
    assert_close_to(ours, theirs.get_bias()[0])


def test_rel_pos_mlp_hides_the_class_token():
    """Facts 1.5: at zero logits a patch gives cls 1e-6 of its attention with timm's zeros, 5e-3 with an own value."""
    theirs = RelPosMlp((14, 14), 3, hidden_dim=512, prefix_tokens=1, mode="swin").eval()
    nn.init.normal_(theirs.mlp.fc1.weight, std=0.02)
    nn.init.normal_(theirs.mlp.fc2.weight, std=0.02)
    spec = LogBiasSpec(form="torchvision", prefix="learned")
    ours = LogBias.from_source(theirs.state_dict(), spec, DIMS)
    shares = [
        bias.softmax(-1)[:, 1:, 0].mean().item()
        for bias in (theirs.get_bias()[0], ours(Grid(14, 14), prefix=1))
    ]
    assert shares[0] < 3e-6
    assert shares[1] == pytest.approx(5.1e-3, rel=0.3)


OFFSET_ATTENTION = {
    "levit": (lambda hw: levit.Attention(24, 8, num_heads=3, resolution=hw), WINDOWS),
    "tiny_vit": (lambda hw: tiny_vit.Attention(24, 8, num_heads=3, resolution=hw), WINDOWS),
    "efficientformer": (
        lambda hw: efficientformer.Attention(24, 8, num_heads=3, resolution=hw),
        WINDOWS,
    ),
    "efficientformer_v2": (
        lambda hw: efficientformer_v2.Attention2d(24, 8, num_heads=3, resolution=hw),
        WINDOWS,
    ),
    "msra": (
        lambda hw: efficientvit_msra.CascadedGroupAttention(24, 8, num_heads=3, resolution=hw[0]),
        [(7, 7), (4, 4)],
    ),
}


@pytest.mark.parametrize(
    ("name", "window"),
    [(name, hw) for name, (_, sides) in OFFSET_ATTENTION.items() for hw in sides],
)
def test_offset_attention(name, window):
    """Five classes, one function; a stored index (EfficientFormer) agrees and is left behind."""
    theirs = drawn(OFFSET_ATTENTION[name][0](window))
    spec = OffsetTableSpec(window_hw=window)
    state = {**theirs.state_dict(), "attention_bias_idxs": theirs.attention_bias_idxs}
    ours = OffsetTable.from_source(state, spec, DIMS)
    assert torch.equal(ours(Grid(*window)), theirs.get_attention_biases(torch.device("cpu")))


@pytest.mark.parametrize("window", [(4, 6), (5, 3), (7, 7)])
def test_offset_downsampling(window):
    """Strided queries among all keys: LeViT's and EfficientFormerV2's between stages."""
    queries = Grid(-(-window[0] // 2), -(-window[1] // 2))
    for theirs in (
        levit.AttentionDownsample(24, 24, 8, num_heads=3, resolution=window),
        efficientformer_v2.Attention2dDownsample(24, 8, num_heads=3, resolution=window),
    ):
        drawn(theirs)
        ours = OffsetTable.from_source(theirs.state_dict(), OffsetTableSpec(window_hw=window), DIMS)
        bias = ours.between(vp.coordinates(queries) * 2, vp.coordinates(Grid(*window)))
        assert torch.equal(bias, theirs.get_attention_biases(torch.device("cpu")))


@pytest.mark.parametrize(("old", "new"), [(7, 14), (14, 7), (7, 12)])
def test_offset_resizing_dialects(old, new):
    """timm resamples the one-sided table ("direct"); mirrored is another table, 10 % away and more."""
    theirs = drawn(efficientvit_msra.CascadedGroupAttention(24, 8, num_heads=3, resolution=old))
    tables = {}
    for resize in ("direct", "mirrored"):
        spec = OffsetTableSpec(window_hw=(old, old), resize=resize)
        tables[resize] = (
            OffsetTable.from_source(theirs.state_dict(), spec, DIMS).resized((new, new)).table
        )
    theirs.set_resolution(new)
    assert_close_to(tables["direct"], theirs.attention_biases.mT)
    apart = (tables["mirrored"] - tables["direct"]).norm() / tables["direct"].norm()
    assert apart > 0.1


def test_offset_cache():
    """timm issue 695: an edit in eval mode does not show there; here it does."""
    theirs = drawn(levit.Attention(24, 8, num_heads=3, resolution=(3, 5)))
    ours = OffsetTable.from_source(theirs.state_dict(), OffsetTableSpec(window_hw=(3, 5)), DIMS)
    before = theirs.get_attention_biases(torch.device("cpu"))
    with torch.no_grad():
        theirs.attention_biases.add_(1.0)
        ours.table.add_(1.0)
    assert torch.equal(theirs.get_attention_biases(torch.device("cpu")), before)
    theirs.train()
    assert torch.equal(ours(Grid(3, 5)), theirs.get_attention_biases(torch.device("cpu")))


@pytest.mark.parametrize("cls", [False, True])
@pytest.mark.parametrize(
    ("q_hw", "k_hw"),
    [((4, 6), (4, 6)), ((4, 6), (2, 3)), ((3, 2), (6, 8)), ((7, 5), (3, 2)), ((14, 9), (6, 4))],
)
def test_mvitv2(q_hw, k_hw, cls):
    """Strides that divide and strides that do not: timm's float32 distances, cut to rows."""
    extent = tuple(max(pair) for pair in zip(q_hw, k_hw, strict=True))
    ours = drawn(DecomposedBias(DecomposedBiasSpec(extent=extent), DIMS))
    n, m = q_hw[0] * q_hw[1] + cls, k_hw[0] * k_hw[1] + cls
    q, attn = torch.randn(2, 3, n, 8), torch.zeros(2, 3, n, m)
    theirs = cal_rel_pos_type(attn, q, cls, list(q_hw), list(k_hw), *ours.tables)
    out = ours(q, Grid(*q_hw), keys=Grid(*k_hw), prefix=int(cls))
    assert_close_to(out, theirs)


def test_mvitv2_attention():
    """The attention itself, with pooled keys: its unscaled q gives the bias that its logits have."""
    theirs = drawn(
        MultiScaleAttention(
            24, 24, (6, 6), num_heads=3, mode="conv", kernel_kv=(3, 3), stride_kv=(2, 2)
        )
    )
    spec = DecomposedBiasSpec(extent=(6, 6))
    ours = DecomposedBias.from_source(theirs.state_dict(), spec, DIMS)
    x = torch.randn(2, 37, 24)
    qkv = theirs.qkv(x).reshape(2, 37, 3, 3, 8).permute(2, 0, 3, 1, 4)
    k = theirs.pool_k(qkv[1][:, :, 1:].reshape(6, 6, 6, 8).permute(0, 3, 1, 2))
    v = theirs.pool_v(qkv[2][:, :, 1:].reshape(6, 6, 6, 8).permute(0, 3, 1, 2))

    def joined(pooled, first, norm):
        rows = pooled.flatten(2).mT.reshape(2, 3, 9, 8)
        return norm(torch.cat([first, rows], 2))

    k = joined(k, qkv[1][:, :, :1], theirs.norm_k)
    v = joined(v, qkv[2][:, :, :1], theirs.norm_v)
    bias = ours(qkv[0], Grid(6, 6), keys=Grid(3, 3), prefix=1)
    attn = ((qkv[0] * theirs.scale) @ k.mT + bias).softmax(-1)
    out = theirs.proj((attn @ v + qkv[0]).transpose(1, 2).reshape(2, 37, 24))
    assert_close_to(out, theirs(x, [6, 6])[0])


@pytest.mark.parametrize(
    ("extent", "hw"), [((4, 6), (4, 6)), ((4, 6), (7, 3)), ((14, 14), (5, 9)), ((3, 3), (1, 8))]
)
def test_sam(extent, hw):
    """timm's SAM: linear resampling of each axis for another size."""
    theirs = drawn(SamAttention(24, num_heads=3, use_rel_pos=True, input_size=extent))
    spec = DecomposedBiasSpec(extent=extent, std=0.0)
    ours = DecomposedBias.from_source(theirs.state_dict(), spec, DIMS)
    q = torch.randn(2, 3, hw[0] * hw[1], 8)
    flat = get_decomposed_rel_pos_bias(q.flatten(0, 1), theirs.rel_pos_h, theirs.rel_pos_w, hw, hw)
    assert_close_to(ours(q, Grid(*hw)), flat.unflatten(0, (2, 3)))


@pytest.mark.parametrize("hw", WINDOWS)
def test_botnet(hw):
    """Key minus query, turned round on loading."""
    theirs = drawn(BottleneckRel(hw, 8, scale=1.0))
    ours = DecomposedBias.from_source(theirs.state_dict(), DecomposedBiasSpec(extent=hw), DIMS)
    q = torch.randn(2, 3, hw[0] * hw[1], 8)
    assert_close_to(ours(q, Grid(*hw)), theirs(q.flatten(0, 1)).unflatten(0, (2, 3)))


@pytest.mark.parametrize(("block", "halo"), [(8, 3), (4, 1), (5, 2)])
def test_halonet(block, halo):
    """A block of queries and the window around it: one lattice, no scaling."""
    window = block + 2 * halo
    theirs = drawn(HaloRel(block, window, 8, scale=1.0))
    spec = DecomposedBiasSpec(extent=(window, window), keys="around")
    ours = DecomposedBias.from_source(theirs.state_dict(), spec, DIMS)
    q = torch.randn(2, 3, block * block, 8)
    out = ours(q, Grid(block, block), keys=Grid(window, window))
    assert_close_to(out, theirs(q))


@pytest.mark.parametrize(
    ("name", "theirs", "hidden", "out_bias"),
    [
        ("swinv2_8", lambda: SwinV2Attention(24, (4, 4), 3), 512, False),
        ("swinv2_cr", lambda: WindowMultiHeadAttention(24, 3, (4, 4)), 384, True),
        ("relpos_mlp_cr", lambda: RelPosMlp((4, 4), 3, hidden_dim=512, mode="cr"), 512, True),
        (None, lambda: RelPosMlp((4, 4), 3, mode="cr"), 128, True),
        (None, lambda: RelPosMlp((4, 4), 3, mode="swin"), 128, False),
    ],
    ids=["swinv2", "cr", "maxxvit", "relpos cr", "relpos swin"],
)
def test_networks_of_log_biases(name, theirs, hidden, out_bias):
    """Facts 1D: widths and biases of the networks; timm stores neither the coordinates nor the index."""
    state = theirs().state_dict()
    found = [key for key in state if "mlp" in key]
    assert len(found) == 3 + out_bias
    assert not [key for key in state if "relative" in key or "coords" in key]
    spec = (
        LogBiasSpec(form="cr", hidden=hidden, out_bias=out_bias)
        if name is None
        else load_encoding(name)
    )
    assert (spec.hidden, spec.out_bias) == (hidden, out_bias)
    assert LogBias.from_source(state, spec, DIMS).hidden.weight.shape == (hidden, 2)
