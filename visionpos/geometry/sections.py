"""Sections: one frequency ladder shared out to the axes of a multimodal language model, as in M-RoPE."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

import torch

from visionpos.errors import PositionError
from visionpos.geometry.fields import check_choice
from visionpos.geometry.freqs import Order, ladder, on_axis
from visionpos.geometry.grid import is_whole

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def section_axes(
    sections: Sequence[int], *, order: Order, device: torch.device | None = None
) -> Tensor:
    """Return which axis drives each pair of a multimodal ladder, `[pairs]` int64.

    Args:
        sections: pairs an axis, in axis order (t, y, x for three).
        order: "contiguous" gives each axis one run of pairs (Qwen2-VL); "interleaved" starts from the first axis
            everywhere and gives axis a the pairs a, a + axes, a + 2 axes, ... up to its count (Qwen3-VL).
        device: where to build.

    Raises:
        PositionError: if a section is below 1, or interleaving cannot give an axis its count: the message says
            what each axis would really get.

    Example:
        >>> section_axes((2, 1, 1), order="interleaved").tolist()
        [0, 1, 2, 0]
    """
    check_choice("order", order, get_args(Order))
    counts = list(sections)
    if not counts or not all(map(is_whole, counts)):
        raise PositionError(
            f"sections are {tuple(sections)}; whole numbers of at least 1 pair an axis are required. Read them from "
            "the checkpoint."
        )
    if order == "contiguous":
        axis = [a for a, count in enumerate(counts) for _ in range(count)]
    else:
        axis = _dealt_axes(counts)
    return torch.tensor(axis, device=device)


def _dealt_axes(counts: list[int]) -> list[int]:
    """Return the interleaved owner of each pair, refusing counts that do not fit."""
    axes, pairs = len(counts), sum(counts)
    owner = [0] * pairs
    for axis, count in list(enumerate(counts))[1:]:
        for pair in range(axis, min(axes * count, pairs), axes):
            owner[pair] = axis
    real = [owner.count(axis) for axis in range(axes)]
    if real != counts:
        raise PositionError(
            f"sections {tuple(counts)} cannot be interleaved over {pairs} pairs; the axes would get {tuple(real)}. "
            "Use order='contiguous', or let the first section take what the others leave, as in (24, 20, 20)."
        )
    return owner


def clamped_axes(
    sections: Sequence[int], pairs: int, *, device: torch.device | None = None
) -> Tensor:
    """Return the interleaved owner of each pair where sections need not fit: strides end with the pairs.

    Axis a > 0 takes the pairs a, a + axes, ... below axes * sections[a]; the first axis takes all others.

    Args:
        sections: pairs an axis, as written in the source; the first number has no effect.
        pairs: number of pairs, whatever the sections sum to.
        device: where to build.

    Returns:
        `[pairs]` int64. What an axis really gets may differ from its section.

    Raises:
        PositionError: if a section is negative, or there are no pairs.

    Example:
        >>> clamped_axes((8, 12, 12), 32).bincount().tolist()
        [11, 11, 10]

    Reference:
        GenLIP as in timm's RotaryEmbeddingMRope, whose weights depend on it.
    """
    whole = all(count == 0 or is_whole(count) for count in sections)
    if not sections or not whole or pairs < 1:
        raise PositionError(
            f"sections are {tuple(sections)} over {pairs} pairs; whole numbers of at least 0 and at least 1 pair are "
            "required. Read the sections from the checkpoint."
        )
    axes = len(sections)
    place = torch.arange(pairs, device=device)
    axis = place % axes
    reach = axes * torch.tensor(list(sections), device=device)
    return torch.where(place < reach[axis], axis, torch.zeros_like(axis))


def section_freqs(
    rotary_dim: int,
    sections: Sequence[int],
    *,
    theta: float,
    order: Order,
    clamp: bool = False,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return one ladder whose pairs are shared out to several axes, as in M-RoPE.

    Args:
        rotary_dim: channels to rotate, even.
        sections: pairs an axis; they must sum to rotary_dim / 2.
        theta: ladder base.
        order: "contiguous" (Qwen2-VL) or "interleaved" (Qwen3-VL).
        clamp: share the pairs out as `clamped_axes` does, whatever the sections sum to (GenLIP); "interleaved" only.
        device: where to build.
        dtype: float32, or float64 for ids beyond 2**17.

    Returns:
        `[axes, pairs]`, zero where an axis does not drive a pair. Tokens whose axes all agree turn as in 1-D RoPE.

    Raises:
        PositionError: if the sections do not sum to rotary_dim / 2 or cannot be interleaved.

    Example:
        >>> section_freqs(8, (2, 1, 1), theta=10000.0, order="contiguous")
        tensor([[1.0000, 0.1000, 0.0000, 0.0000],
                [0.0000, 0.0000, 0.0100, 0.0000],
                [0.0000, 0.0000, 0.0000, 0.0010]])

    Reference:
        Qwen2-VL (arXiv 2409.12191), Qwen3-VL; facts of both layouts as transformers computes them.
    """
    fits = clamp or sum(sections) == rotary_dim // 2
    if clamp and order != "interleaved":
        raise PositionError(f"clamp needs order 'interleaved', not {order!r}; leave clamp out.")
    if rotary_dim < 2 or rotary_dim % 2 or not fits:
        raise PositionError(
            f"sections {tuple(sections)} sum to {sum(sections)} and rotary_dim is {rotary_dim}; the sum must be "
            "rotary_dim / 2. Read both from the checkpoint's rope parameters."
        )
    values = ladder(rotary_dim // 2, theta=theta, device=device, dtype=dtype)
    if clamp:
        owner = clamped_axes(sections, rotary_dim // 2, device=device)
    else:
        owner = section_axes(sections, order=order, device=device)
    return on_axis(values, owner, len(sections))
