"""What it costs to build an encoding for a 64x64 grid at ViT-B width, beside the module of the same name elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from timm.layers.pos_embed_rel import RelPosBias
from timm.layers.pos_embed_sincos import (
    RotaryEmbeddingCat,
    RotaryEmbeddingDinoV3,
    RotaryEmbeddingMixed,
    build_sincos2d_pos_embed,
)
from timm.models.swin_transformer_v2 import WindowAttention
from timm.models.xcit import PositionalEncodingFourier
from transformers.models.detr.modeling_detr import DetrSinePositionEmbedding
from transformers.models.sam.configuration_sam import SamVisionConfig
from transformers.models.sam.modeling_sam import SamPositionalEmbedding

import visionpos as vp
from benchmarks.paired import ratio
from visionpos import config
from visionpos.encodings import LogBias, LogBiasSpec, SwinTable, SwinTableSpec

GRID = vp.Grid(64, 64)
VIT_B = vp.Dims(embed_dim=768, num_heads=12, depth=12, prefix=1)
SAM = vp.Dims(embed_dim=256, num_heads=1, depth=1)
Pair = tuple[str, str, Callable[[], Any], Callable[[], torch.Tensor]]


def _as_table(found: Any) -> torch.Tensor:
    """Return what was built as one tensor; rotations as timm keeps them: full width, sines before cosines."""
    if isinstance(found, vp.Rotation):
        cos, sin = found.full_width()
        return torch.cat([sin, cos], -1)
    return torch.stack([_as_table(layer) for layer in found]) if isinstance(found, list) else found


def pairs() -> list[Pair]:
    """Return (name, peer, ours, theirs); equal results are checked before any timing."""
    sincos = vp.build(vp.SinCosSpec(dialect="timm"), VIT_B)
    cat = vp.build(config.load_encoding("eva02"), VIT_B)
    cat_peer = RotaryEmbeddingCat(64, in_pixels=False, ref_feat_shape=[16, 16])
    dino = vp.build(config.load_encoding("dinov3"), VIT_B)
    dino_peer = RotaryEmbeddingDinoV3(64)
    mixed, mixed_peer = (
        vp.build(vp.MixedRopeSpec(), VIT_B),
        RotaryEmbeddingMixed(768, depth=12, num_heads=12),
    )
    with torch.no_grad():
        mixed.frequencies.copy_(mixed.from_timm(mixed_peer.freqs))
    return [
        ("sin-cos", "timm", lambda: sincos(GRID), lambda: build_sincos2d_pos_embed([64, 64], 768)),
        ("axial RoPE", "timm", lambda: cat(GRID), lambda: cat_peer.get_embed([64, 64])),
        ("DINOv3 RoPE", "timm", lambda: dino(GRID), lambda: dino_peer.get_embed([64, 64])),
        (
            "RoPE-Mixed, 12 layers",
            "timm",
            lambda: [mixed(GRID, layer=layer) for layer in range(12)],
            lambda: mixed_peer.get_embed([64, 64]),
        ),
        *_detectors(),
        *_biases(),
    ]


def _detectors() -> list[Pair]:
    sine = vp.build(config.load_encoding("detr_sine"), VIT_B)
    sine_peer = DetrSinePositionEmbedding(384, normalize=True)

    def mask() -> torch.Tensor:
        return torch.ones(1, 64, 64, dtype=torch.bool)

    xcit = vp.build(config.load_encoding("xcit_fourier"), VIT_B)
    xcit_peer = PositionalEncodingFourier(dim=768)
    sam = vp.build(config.load_encoding("sam_prompt"), SAM)
    sam_peer = SamPositionalEmbedding(SamVisionConfig(num_pos_feats=128, scale=1.0))
    spots = (
        torch.stack(torch.meshgrid(torch.arange(64.0), torch.arange(64.0), indexing="xy"), -1) + 0.5
    ) * 16
    return [
        (
            "DETR sine",
            "transformers",
            lambda: sine(GRID),
            # A fresh mask each time: the peer keeps its last answer.
            lambda: sine_peer(
                torch.Size((1, 768, 64, 64)), torch.device("cpu"), torch.float32, mask()
            ),
        ),
        (
            "SAM dense code",
            "transformers",
            lambda: sam.grid_code(GRID),
            lambda: sam_peer(spots[None], (1024, 1024)),
        ),
        ("XCiT Fourier", "timm", lambda: xcit(GRID), lambda: xcit_peer(1, 64, 64)),
    ]


def _biases() -> list[Pair]:
    window = vp.Grid(24, 24)
    dims = vp.Dims(embed_dim=768, num_heads=12, depth=1)
    table, table_peer = SwinTable(SwinTableSpec(window_hw=(24, 24)), dims), RelPosBias((24, 24), 12)
    mlp = LogBias(LogBiasSpec(pretrained_window_hw=(12, 12)), dims)
    mlp_peer = WindowAttention(768, (24, 24), 12, pretrained_window_size=(12, 12))

    def theirs() -> torch.Tensor:
        head = mlp_peer.cpb_mlp(mlp_peer.relative_coords_table).view(-1, 12)
        bias = head[mlp_peer.relative_position_index.view(-1)].view(576, 576, -1)
        return 16 * torch.sigmoid(bias.permute(2, 0, 1).contiguous())

    return [
        ("Swin table, window 24", "timm", lambda: table(window), table_peer.get_bias),
        ("log-CPB, window 24", "timm", lambda: mlp(window), theirs),
    ]


def rows() -> list[dict[str, object]]:
    """Return the measured ratios, for benchmarks/run.py."""
    with torch.no_grad():
        return [
            {"op": f"build {name}", "peer": peer, "to peer": ratio(ours, theirs, rounds=9)}
            for name, peer, ours, theirs in pairs()
        ]


if __name__ == "__main__":
    torch.set_num_threads(1)
    for row in rows():
        print(f"{row['op']:34} {row['peer']:12} {row['to peer']:11.2f}")
