"""Taps: the views through which q and k inside a packed tensor are turned; one word of the table each.

A tensor that carries q, k and perhaps v enters; the same layout leaves, with q and k turned and v untouched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from visionpos.attention import turn
from visionpos.geometry import Rotation

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from visionpos.retrofit.attachment import Turn
    from visionpos.retrofit.port_rows import Tap


def turned(
    x: Tensor, tap: Tap, rotations: Mapping[str, Turn], *, heads: int, head_dim: int
) -> Tensor:
    """Return what a tap carries, with q and k turned.

    Args:
        x: the tensor, in the layout that the tap says; not changed.
        tap: from the table.
        rotations: of "q" and "k", for all their tokens.
        heads: on this tensor.
        head_dim: channels of one head of q and k.
    """
    if tap.order == "bhnd":
        return _turn(x, rotations[tap.holds])
    if tap.order == "bnhd":
        return _turn(x.transpose(1, 2), rotations[tap.holds]).transpose(1, 2)
    if tap.maps and x.ndim == 4:
        flat = x.flatten(2).transpose(1, 2)  # [b, n, channels]
        out = _packed(flat, tap, rotations, heads, head_dim)
        return out.transpose(1, 2).reshape(x.shape)
    tokens = rotations[next(slot for slot in tap.holds if slot in "qk")].n
    rows = x.reshape(-1, tokens, x.shape[-1])
    return _packed(rows, tap, rotations, heads, head_dim).reshape(x.shape)


def _packed(
    x: Tensor, tap: Tap, rotations: Mapping[str, Turn], heads: int, head_dim: int
) -> Tensor:
    """Return `[b, n, channels]` with the slots of q and k turned."""
    if tap.order == "slots":
        slot = heads * head_dim
        cuts = [
            _heads_turned(x[..., i * slot : (i + 1) * slot].unflatten(-1, (heads, head_dim)), by)
            for i, by in _slots(tap, rotations)
        ]
        pieces = [cut.flatten(-2) for cut in cuts]
        return _joined(x, pieces, [i for i, _ in _slots(tap, rotations)], slot)
    rows = x.unflatten(-1, (heads, -1))  # [b, n, heads, slots]
    cuts = [
        _heads_turned(rows[..., i * head_dim : (i + 1) * head_dim], by)
        for i, by in _slots(tap, rotations)
    ]
    return _joined(rows, cuts, [i for i, _ in _slots(tap, rotations)], head_dim).flatten(-2)


def _slots(tap: Tap, rotations: Mapping[str, Turn]) -> list[tuple[int, Turn]]:
    return [(i, rotations[slot]) for i, slot in enumerate(tap.holds) if slot in "qk"]


def _heads_turned(x: Tensor, rotation: Turn) -> Tensor:
    """Return `[b, n, heads, head_dim]` turned."""
    return _turn(x.transpose(1, 2), rotation).transpose(1, 2)


def _turn(x: Tensor, by: Turn) -> Tensor:
    """Return `[b, heads, n, head_dim]` turned, by the fastest form for pairs."""
    return turn(x, by) if isinstance(by, Rotation) else by.apply(x)


def _joined(x: Tensor, pieces: list[Tensor], slots: list[int], width: int) -> Tensor:
    """Return x with the slots replaced; slots that turn stand side by side in every row of the table."""
    first, last = slots[0] * width, (slots[-1] + 1) * width
    parts = [x[..., :first]] if first else []
    parts += pieces
    if last < x.shape[-1]:
        parts.append(x[..., last:])
    return torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]
