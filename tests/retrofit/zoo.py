"""Small timm models with every gate open, the oracles of a retrofit, and how far two results are apart.

Random start values hide errors: biases, layer scales and heads begin at zero, so `opened` gives every parameter a
value that matters, and tests compare `forward_features`.
"""

import math
import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn

SMALL = {"depth": 2, "embed_dim": 64, "num_heads": 2, "num_classes": 0}
HEAD_DIM = 32


@dataclass(frozen=True)
class Case:
    """One named timm model, made small.

    `grid_hw` is a rectangle; `patch` is the stride of a token. `pairing` is that of the model's own rotary encoding.
    """

    name: str
    patch: int = 16
    pairing: str | None = None
    grid_hw: tuple[int, int] = (4, 6)
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def size_hw(self) -> tuple[int, int]:
        return self.grid_hw[0] * self.patch, self.grid_hw[1] * self.patch

    def build(self, **changes: Any) -> Any:
        return opened(create(self.name, self.size_hw, **{**self.extra, **changes}))

    def image(self, batch: int = 2) -> Tensor:
        return image(self.size_hw, batch)


NAMED = (
    Case("vit_tiny_patch16_224"),
    Case("deit3_small_patch16_224"),
    Case("deit_tiny_distilled_patch16_224"),
    Case("vit_small_patch14_dinov2", 14),
    Case("vit_small_patch14_reg4_dinov2", 14),
    Case("vit_base_patch16_siglip_224"),
    Case("vit_base_patch32_clip_quickgelu_224", 32),
    Case("beit3_base_patch16_224"),
    Case("vit_huge_patch14_xp_224", 14),
    Case("vit_pwee_patch16_reg1_gap_256"),
    Case("vit_small_patch16_18x2_224"),
    Case("vit_dwee_patch16_reg1_gap_256"),
    Case("vit_dpwee_patch16_reg1_gap_256"),
    Case("vit_small_r26_s32_224", 32, grid_hw=(2, 3)),
    Case("eva_giant_patch14_224", 14),
    Case("eva02_tiny_patch14_224", 14, "adjacent"),
    Case("vit_small_patch16_dinov3", 16, "half"),
    Case("vit_pe_core_tiny_patch16_384", 16, "adjacent"),
    Case("vit_small_patch16_rope_224", 16, "adjacent"),
    Case("vit_small_patch16_rope_mixed_224", 16, "adjacent"),
    Case("vit_small_patch16_rope_mixed_ape_224", 16, "adjacent"),
    Case("vit_betwixt_patch16_rope_reg4_gap_256", 16, "adjacent"),
)

# The convolutional stem has a hundred times the weights of the others; most tests leave it to the slow run.
CASES = [
    pytest.param(case, marks=pytest.mark.slow) if "r26" in case.name else case for case in NAMED
]


def create(name: str, size_hw: tuple[int, int] | None = (64, 96), **changes: Any) -> Any:
    """Return a model of two blocks and two heads of 32 channels, in eval mode."""
    return timm.create_model(name, img_size=size_hw, **{**SMALL, **changes}).eval()


def vit(size_hw: tuple[int, int] | None = (64, 96), **changes: Any) -> Any:
    """Return a small opened VisionTransformer with patches of 16 pixels."""
    return opened(create("vit_tiny_patch16_224", size_hw, **changes))


@torch.no_grad()
def opened(model: nn.Module, seed: int = 0) -> Any:
    """Give every parameter a value that matters: tables, biases, layer scales, norms, frequencies."""
    for name, weight in model.named_parameters():
        # By name, so that a weight is the same whatever other parts a model has.
        generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
        noise = torch.randn(weight.shape, generator=generator).to(weight)
        if name.endswith("freqs"):
            weight.copy_(0.5 * noise)
        elif name.rpartition(".")[2] in ("gamma", "gamma_1", "gamma_2") or (
            weight.ndim == 1 and name.endswith("weight")
        ):
            weight.copy_(1 + 0.2 * noise)
        elif weight.ndim == 1 or weight.ndim == 0:
            weight.copy_(0.3 * noise)
        elif weight.ndim == 3:
            weight.copy_(0.5 * noise)  # tables, class tokens, registers
        else:
            weight.copy_(noise / math.sqrt(weight[0].numel()))
    return model


def image(size_hw: tuple[int, int], batch: int = 2, seed: int = 1) -> Tensor:
    """Return `[batch, 3, height, width]` normal pixels, the same at every call."""
    return torch.randn(batch, 3, *size_hw, generator=torch.Generator().manual_seed(seed))


def apart(actual: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference relative to the norm of what was expected."""
    wanted = expected.detach().double()
    return float((actual.detach().double() - wanted).norm() / wanted.norm())


def hand_rotation(
    model: Any, angles: np.ndarray, *, prefix: int, pairing: str = "adjacent"
) -> list[Any]:
    """Turn q and k of every attention by hand-made angles, and return the handles of the hooks.

    Args:
        model: its attentions hand out `[b, heads, n, head_dim]` after q_norm and k_norm.
        angles: `[n, pairs]`, `[layers, heads, n, pairs]` or `[layers, b, 1, n, pairs]` radians, float64.
        prefix: leading tokens that stay.
        pairing: which channels turn together.
    """
    cos, sin = (torch.from_numpy(wave(angles)).float() for wave in (np.cos, np.sin))

    def hook(layer: int) -> Any:
        c, s = (cos, sin) if angles.ndim == 2 else (cos[layer], sin[layer])

        def turn(module: nn.Module, args: Any, x: Tensor) -> Tensor:
            out = x.clone()
            for pair in range(angles.shape[-1]):
                a, b = (pair, pair + c.shape[-1]) if pairing == "half" else (2 * pair, 2 * pair + 1)
                first, second = x[..., prefix:, a], x[..., prefix:, b]
                out[..., prefix:, a] = first * c[..., pair] - second * s[..., pair]
                out[..., prefix:, b] = second * c[..., pair] + first * s[..., pair]
            return out

        return turn

    norms = [(i, m) for i, block in enumerate(model.blocks) for m in _norms(block)]
    return [norm.register_forward_hook(hook(layer)) for layer, norm in norms]


def _norms(block: nn.Module) -> list[nn.Module]:
    return [
        m for name, m in block.named_modules() if name.rpartition(".")[2] in ("q_norm", "k_norm")
    ]


def axial(
    height: int,
    width: int,
    head_dim: int = HEAD_DIM,
    theta: float = 100.0,
    *,
    x_first: bool = False,
) -> np.ndarray:
    """Return `[n, pairs]` radians of axial RoPE on plain indices, written out for tests of whole models."""
    share = head_dim // 4
    rows = [[y, x] for y in range(height) for x in range(width)]
    speeds = np.array([theta ** (-k / share) for k in range(share)])
    order = (1, 0) if x_first else (0, 1)
    return np.array([np.concatenate([row[axis] * speeds for axis in order]) for row in rows])
