"""Where a port believes that every token stands, against positions written out by hand, class by class.

A constant angle cannot see a class token that turns like a patch, a stride that was forgotten, or height and width that
changed places. Here q and k are caught before and after they turn, and turned once more by the formula.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor

import visionpos as vp
from tests.retrofit.attentions import VARIANTS, features
from tests.retrofit.test_attentions import whole_turn
from tests.retrofit.zoo import apart, image
from visionpos import retrofit

if TYPE_CHECKING:
    from collections.abc import Callable

BY_NAME = {variant.name: variant for variant in VARIANTS}
Points = list[tuple[float, float]]


def cells(height: int, width: int, step: float = 1.0, shift: float = 0.0) -> Points:
    """Return (y, x) of a lattice, row after row."""
    return [(y * step + shift, x * step + shift) for y in range(height) for x in range(width)]


def norm(heads: int) -> Callable[[Tensor], Tensor]:
    """Return a reader of what a norm hands out: [b, heads, n, d] -> [b, n, heads, d]."""
    return lambda x: x.transpose(1, 2) if x.shape[1] == heads else x


def slot(number: int, of: int, heads: int, tokens: int) -> Callable[[Tensor], Tensor]:
    """Return a reader of slot `number` of a projection whose last axis is (slot, head, channel)."""
    return lambda x: x.reshape(-1, tokens, of, heads, x.shape[-1] // (of * heads))[:, :, number]


def head_first(width: int, heads: int) -> Callable[[Tensor], Tensor]:
    """Return a reader of the first `width` channels of every head, heads first, of rows or of a map."""

    def read(x: Tensor) -> Tensor:
        rows = x.flatten(2).mT if x.ndim == 4 else x
        return rows.unflatten(-1, (heads, -1))[..., :width]

    return read


@dataclass(frozen=True)
class Look:
    """One tensor that carries q or k.

    Args:
        name: of the variant.
        at: path of the module that hands it out.
        read: its q or k as `[b, n, heads, d]`.
        prefix: tokens that stay.
        points: where the others stand.
        turned: channels of a head that turn, all when None.
        moved_to: image to resize to, and to run.
        late: path of the attention whose q bias comes after the port.
    """

    name: str
    at: str
    read: Callable[[Tensor], Tensor]
    prefix: int
    points: Points
    turned: int | None = None
    moved_to: tuple[int, int] | None = None
    late: str | None = None

    @property
    def id(self) -> str:
        return f"{self.name}-{self.at}"


LOOKS = (
    Look("deit_tiny_distilled_patch16_224", "blocks.1.attn.k_norm", norm(2), 2, cells(4, 6)),
    Look(
        "crossvit_tiny_240",
        "blocks.0.blocks.0.0.attn.q_norm",
        norm(2),
        1,
        cells(20, 30),
        moved_to=(240, 360),
    ),
    Look(
        "crossvit_tiny_240",
        "blocks.0.blocks.1.0.attn.k_norm",
        norm(2),
        1,
        cells(14, 21),
        moved_to=(240, 360),
    ),
    Look(
        "beit_base_patch16_224",
        "blocks.0.attn.qkv",
        slot(0, 3, 2, 25),
        1,
        cells(4, 6),
        late="blocks.0.attn",
    ),
    Look("cait_xxs24_224", "blocks.0.attn.qkv", slot(1, 3, 2, 24), 0, cells(4, 6)),
    Look(
        "convit_tiny",
        "blocks.0.attn.qk",
        slot(0, 2, 4, 15),
        0,
        cells(3, 5),
        moved_to=(48, 80),
    ),
    Look(
        "convit_tiny",
        "blocks.3.attn.qkv",
        slot(1, 3, 4, 16),
        1,
        cells(3, 5),
        moved_to=(48, 80),
    ),
    Look("pit_ti_distilled_224", "transformers.0.blocks.0.attn.q_norm", norm(2), 2, cells(7, 11)),
    Look("pit_ti_distilled_224", "transformers.1.blocks.1.attn.k_norm", norm(4), 2, cells(4, 6)),
    Look(
        "tnt_s_patch16_224",
        "blocks.0.attn_out.qk",
        slot(1, 2, 6, 25),
        1,
        cells(4, 6),
        turned=4,
    ),
    Look("volo_d1_224", "network.2.0.attn.qkv", slot(0, 3, 2, 24), 0, cells(4, 6)),
    Look(
        "swin_tiny_patch4_window7_224",
        "layers.0.blocks.1.attn.qkv",
        slot(1, 3, 2, 12),
        0,
        cells(4, 3),
    ),
    Look("levit_128s", "stages.0.blocks.0.attn.qkv", head_first(16, 4), 0, cells(4, 6)),
    Look(
        "levit_128s",
        "stages.1.downsample.attn_downsample.q",
        head_first(16, 8),
        0,
        cells(2, 3, step=2.0),
    ),
    Look(
        "levit_conv_128s",
        "stages.1.downsample.attn_downsample.kv",
        head_first(16, 8),
        0,
        cells(4, 6),
    ),
    Look(
        "twins_svt_small",
        "blocks.0.0.attn.qkv",
        slot(0, 3, 1, 49),
        0,
        cells(7, 7),
    ),
    Look("twins_pcpvt_small", "blocks.0.0.attn.q", slot(0, 1, 1, 384), 0, cells(16, 24)),
    Look(
        "twins_pcpvt_small",
        "blocks.0.0.attn.kv",
        slot(0, 2, 1, 6),
        0,
        cells(2, 3, step=8.0, shift=3.5),
    ),
    Look(
        "efficientformerv2_s0",
        "stages.3.downsample.attn.q",
        head_first(16, 8),
        0,
        cells(2, 3, step=2.0),
        moved_to=(64, 96),
    ),
)


def by_hand(x: Tensor, look: Look) -> Tensor:
    """Return `[b, n, heads, d]` turned by axial angles in float64, y bands before x bands, adjacent channels."""
    width = look.turned or x.shape[-1]
    share = width // 4
    speeds = 100.0 ** (-np.arange(share) / share)
    turns = np.array([[*(y * speeds), *(z * speeds)] for y, z in look.points])
    phase = torch.polar(torch.ones(turns.shape, dtype=torch.float64), torch.from_numpy(turns))
    out = x.double().clone()
    moving = out[:, look.prefix :, :, :width].unflatten(-1, (-1, 2)).contiguous()
    turned = torch.view_as_real(torch.view_as_complex(moving) * phase[:, None])
    out[:, look.prefix :, :, :width] = turned.flatten(-2)
    return out


@pytest.mark.parametrize("look", LOOKS, ids=lambda look: look.id)
def test_reference_every_token_turns_by_its_place(look: Look) -> None:
    """Prefix tokens stay bit for bit; a patch turns by its row and its column, on the lattice of the first map."""
    variant = BY_NAME[look.name]
    model = variant.build()
    if look.moved_to is not None:
        retrofit.resize(model, look.moved_to)
        variant = replace(variant, size_hw=look.moved_to)
    caught: list[Tensor] = []
    module = model.get_submodule(look.at)
    module.register_forward_hook(lambda _m, _a, out: caught.append(out.clone()))
    spec: Any = vp.AxialRopeSpec(pairing=variant.pairing, rotary_dim=look.turned)
    retrofit.attach(model, spec, strength=1.0, partial=True)
    module.register_forward_hook(lambda _m, _a, out: caught.append(out.clone()))
    features(model, variant.image())
    before, after = look.read(caught[0]), look.read(caught[1])
    assert before.shape[1] == look.prefix + len(look.points)
    late = torch.zeros(before.shape[-2:])
    if look.late is not None:
        late = model.get_submodule(look.late).q_bias.detach().view(late.shape)
    else:
        assert torch.equal(after[:, : look.prefix], before[:, : look.prefix])
    expected = by_hand(before + late, look) - late.double()
    assert apart(after, expected) < 1e-6
    assert apart(after, before) > 1e-2


# Classes whose variant is a square, or is made at one, moved to a rectangle.
RECTANGLES = {
    "convit_tiny": (48, 80),
    "crossvit_tiny_240": (180, 264),
    "gcvit_xxtiny": (192, 256),
    "efficientvit_m0": (128, 192),
    "efficientformer_l1": (96, 160),
    "beit_base_patch16_224": (48, 80),
    "swinv2_tiny_window8_256": (96, 160),
    "levit_conv_128s": (80, 48),
    "efficientformerv2_s0": (96, 160),
}


@pytest.mark.parametrize("name", RECTANGLES)
def test_constant_angle_on_a_rectangle(name: str) -> None:
    """After a resize too, one angle for all tokens changes nothing, in float64 to its last digits; a true one does."""
    variant, size = BY_NAME[name], RECTANGLES[name]
    model = variant.build()
    retrofit.resize(model, size)
    model, x = model.double(), image(size, 1).double()
    plain = features(model, x)
    spec: Any = vp.AxialRopeSpec(pairing=variant.pairing, rotary_dim=variant.rotary_dim)
    attachment = retrofit.attach(model, spec, partial=True)
    assert torch.equal(features(model, x), plain)
    attachment.set_strength(1.0)
    assert apart(features(model, x), plain) > 1e-4
    whole_turn(attachment, 0.7)
    assert apart(features(model, x), plain) < 1e-12
