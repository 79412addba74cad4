"""Biases against the modules of transformers and torchvision, and where the ports part from their sources."""

import math

import pytest
import torch
from torch import nn
from torchvision.models.swin_transformer import ShiftedWindowAttention, ShiftedWindowAttentionV2
from transformers import BeitConfig, LayoutLMv3Config, SamVisionConfig, Swinv2Config
from transformers.models.beit.modeling_beit import BeitRelativePositionBias
from transformers.models.layoutlmv3.modeling_layoutlmv3 import LayoutLMv3Encoder
from transformers.models.sam.modeling_sam import SamVisionAttention
from transformers.models.swin.modeling_swin import SwinRelativePositionBias
from transformers.models.swinv2.modeling_swinv2 import Swinv2SelfAttention

from tests.tolerances import assert_close_to
from visionpos import Dims, Grid
from visionpos.encodings import (
    DecomposedBias,
    DecomposedBiasSpec,
    LogBias,
    LogBiasSpec,
    SwinTable,
    SwinTableSpec,
    T5Bias,
    T5BiasSpec,
)

DIMS = Dims(embed_dim=24, num_heads=3, depth=1)
WINDOWS = [(3, 5), (5, 3), (1, 4), (7, 7)]


def drawn(module: nn.Module) -> nn.Module:
    for weight in module.parameters():
        weight.data.normal_(std=0.5)
    return module.eval()


@pytest.mark.parametrize("window", WINDOWS)
def test_swin(window):
    theirs = drawn(SwinRelativePositionBias(3, window))
    state = {f"relative_position_bias.{k}": v for k, v in theirs.state_dict().items()}
    ours = SwinTable.from_source(state, SwinTableSpec(window_hw=window), DIMS)
    assert torch.equal(ours(Grid(*window)), theirs()[0])


@pytest.mark.parametrize("window", WINDOWS)
def test_torchvision_swin(window):
    """The index is a persistent buffer, flattened: compared, and rebuilt at need."""
    theirs = drawn(ShiftedWindowAttention(24, list(window), [0, 0], 3))
    ours = SwinTable.from_source(theirs.state_dict(), SwinTableSpec(window_hw=window), DIMS)
    assert torch.equal(ours(Grid(*window)), theirs.get_relative_position_bias()[0])


@pytest.mark.parametrize("window", [(3, 5), (5, 3), (8, 8), (16, 16)])
def test_torchvision_swinv2(window):
    """Always in units of the current window: form "torchvision"; its stored coordinate table is left behind."""
    theirs = drawn(ShiftedWindowAttentionV2(24, list(window), [0, 0], 3))
    spec = LogBiasSpec(form="torchvision")
    ours = LogBias.from_source(theirs.state_dict(), spec, DIMS, window_hw=window)
    assert_close_to(ours(Grid(*window)), theirs.get_relative_position_bias()[0])
    moved = ShiftedWindowAttentionV2(24, [6, 4], [0, 0], 3)
    moved.cpb_mlp.load_state_dict(theirs.cpb_mlp.state_dict())
    assert_close_to(ours(Grid(6, 4)), moved.get_relative_position_bias()[0])


def test_torchvision_swinv2_window_of_one():
    """Facts 1D: 0 / 0 there, coordinate 0 here."""
    theirs = drawn(ShiftedWindowAttentionV2(24, [1, 4], [0, 0], 3))
    ours = LogBias.from_source(theirs.state_dict(), LogBiasSpec(form="torchvision"), DIMS)
    assert theirs.get_relative_position_bias().isnan().any()
    assert ours(Grid(1, 4)).isfinite().all()


def swinv2(window: tuple[int, int], pretrained: tuple[int, int]) -> Swinv2SelfAttention:
    config = Swinv2Config(embed_dim=24)
    attention = Swinv2SelfAttention(config, 24, 3, window, list(pretrained))
    return drawn(attention)


def bias_of(attention: Swinv2SelfAttention) -> torch.Tensor:
    """The bias alone: queries and keys of zero tokens are zero when the query has no bias."""
    seen = []
    attention.dropout.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        attention.query.bias.zero_()
        attention(torch.zeros(1, math.prod(attention.window_size), 24))
    return seen[0][0].log()  # of the softmax: the bias up to a constant a row


@pytest.mark.parametrize("pretrained", [(0, 0), (4, 6)])
@pytest.mark.parametrize("window", [(3, 5), (5, 3), (4, 4)])
def test_swinv2(window, pretrained):
    theirs = swinv2(window, pretrained)
    spec = (
        LogBiasSpec(pretrained_window_hw=pretrained)
        if pretrained[0]
        else LogBiasSpec(form="torchvision")
    )
    ours = LogBias.from_source(theirs.state_dict(), spec, DIMS)(Grid(*window))
    assert_close_to(ours.log_softmax(-1), bias_of(theirs))


def test_swinv2_one_row_is_not_normalised():
    """The port guards the height alone: at one row the width is left in cells, at one column it is NaN."""
    wide, tall = swinv2((1, 4), (0, 0)), swinv2((4, 1), (0, 0))
    assert wide.relative_coords_table.abs().max() > 1.5  # 1.0566 in every other source
    assert tall.relative_coords_table.isnan().any()
    for theirs, hw in ((wide, (1, 4)), (tall, (4, 1))):
        ours = LogBias.from_source(theirs.state_dict(), LogBiasSpec(form="torchvision"), DIMS)
        assert ours(Grid(*hw)).isfinite().all()


def beit_bias(grid_hw: tuple[int, int]) -> BeitRelativePositionBias:
    size = (grid_hw[0] * 16, grid_hw[1] * 16)
    config = BeitConfig(
        image_size=size,
        patch_size=16,
        hidden_size=24,
        num_attention_heads=3,
        use_relative_position_bias=True,
    )
    return drawn(BeitRelativePositionBias(config))


@pytest.mark.parametrize("other", [(4, 4), (3, 5), (6, 2), (7, 7)])
def test_beit(other):
    """Bilinear on any other grid: "hf_beit", where timm and unilm space the samples geometrically."""
    theirs = beit_bias((4, 4))
    spec = SwinTableSpec(window_hw=(4, 4), recipe="hf_beit", class_rows=True)
    ours = SwinTable.from_source(theirs.state_dict(), spec, DIMS)
    assert_close_to(ours(Grid(*other), prefix=1), theirs(other)[0])


def test_beit_rectangular_pretrained_grid():
    """The port reads its table as width by height: away from its own rectangular grid the map is scrambled."""
    theirs = beit_bias((3, 5))
    spec = SwinTableSpec(window_hw=(3, 5), recipe="hf_beit", class_rows=True)
    ours = SwinTable.from_source(theirs.state_dict(), spec, DIMS)
    ours.table.data[:-3] = 0.0
    h, w = 5, 9
    map_ = ours.table.data[:-3].view(h, w, 3)
    map_[:] = torch.arange(float(h)).view(h, 1, 1)  # rows differ, columns do not
    theirs.relative_position_bias_table.data.copy_(ours.table.data)
    right, wrong = ours(Grid(5, 3), prefix=1), theirs((5, 3))[0]
    for bias, along in ((right, 0.0), (wrong, 1.0)):
        row = bias[0, 1:, 1:].unflatten(0, (5, 3)).unflatten(-1, (5, 3))
        assert (row - row[:, :1, :, :1]).abs().max().item() == pytest.approx(along, abs=1e-5)


@pytest.fixture(scope="module")
def layoutlm() -> LayoutLMv3Encoder:
    config = LayoutLMv3Config(
        hidden_size=24,
        num_attention_heads=3,
        num_hidden_layers=1,
        intermediate_size=8,
        has_relative_attention_bias=True,
        has_spatial_attention_bias=True,
    )
    return drawn(LayoutLMv3Encoder(config))


def test_layoutlmv3(layoutlm):
    """1-D, lower edge and left edge, divided by sqrt(head_dim)."""
    boxes = torch.randint(0, 1000, (1, 9, 4))
    positions = torch.randperm(200)[:9].unsqueeze(0)
    spec = T5BiasSpec(buckets=(32, 64, 64), max_distance=(128, 256, 256), scale="sqrt_head_dim")
    ours = T5Bias.from_source(layoutlm.state_dict(), spec, DIMS)
    points = torch.stack([positions[0], boxes[0, :, 3], boxes[0, :, 0]], -1).float()
    theirs = layoutlm._compute_position_bias(positions, boxes)[0]
    assert_close_to(ours.between(points, points), theirs)
    assert not theirs.requires_grad  # their tables never learn
    assert ours.between(points, points).requires_grad


def test_layoutlmv3_spatial_alone(layoutlm):
    boxes = torch.randint(0, 1000, (1, 9, 4))
    spec = T5BiasSpec(buckets=(64, 64), max_distance=(256, 256))
    ours = T5Bias.from_source(layoutlm.state_dict(), spec, DIMS)
    points = torch.stack([boxes[0, :, 3], boxes[0, :, 0]], -1).float()
    assert_close_to(ours.between(points, points), layoutlm._cal_2d_pos_emb(boxes)[0])


@pytest.mark.parametrize("hw", [(4, 4), (3, 5), (6, 2)])
def test_sam(hw):
    config = SamVisionConfig(
        hidden_size=24, num_attention_heads=3, image_size=64, patch_size=16, use_rel_pos=True
    )
    theirs = drawn(SamVisionAttention(config, window_size=0))
    spec = DecomposedBiasSpec(extent=(4, 4), std=0.0)
    ours = DecomposedBias.from_source(theirs.state_dict(), spec, DIMS)
    q = torch.randn(2, 3, hw[0] * hw[1], 8)
    flat = theirs.get_decomposed_rel_pos(
        q.flatten(0, 1), theirs.rel_pos_h, theirs.rel_pos_w, hw, hw
    )
    assert_close_to(ours(q, Grid(*hw)), flat.reshape(2, 3, q.shape[2], q.shape[2]))


def test_swinv2_buffers_that_are_stored():
    """Facts 1D, 5.29: torchvision stores the table of coordinates and the index, transformers neither.

    A stored table belongs to one window and is left behind: the weights serve any other.
    """
    stored = drawn(ShiftedWindowAttentionV2(24, [4, 4], [0, 0], 3)).state_dict()
    buffers = {"relative_coords_table", "relative_position_index"}
    assert buffers <= stored.keys()
    assert not [key for key in swinv2((4, 4), (0, 0)).state_dict() if "relative" in key]
    ours, without = (
        LogBias.from_source(state, LogBiasSpec(form="torchvision"), DIMS)
        for state in (stored, {k: v for k, v in stored.items() if k not in buffers})
    )
    assert not [key for key in ours.state_dict() if "relative" in key]
    assert torch.equal(ours(Grid(6, 5)), without(Grid(6, 5)))
