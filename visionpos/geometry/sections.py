"""Sections: one frequency ladder shared out to the axes of a multimodal language model, as in M-RoPE."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from visionpos.errors import PositionError
from visionpos.geometry.freqs import ladder, on_axis

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from visionpos.geometry.freqs import Order


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
    counts = [int(count) for count in sections]
    if not counts or min(counts) < 1:
        raise PositionError(f"sections are {tuple(sections)}; at least 1 pair an axis is required.")
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
            "Use order='contiguous', or make the first section the largest."
        )
    return owner


def section_freqs(
    rotary_dim: int,
    sections: Sequence[int],
    *,
    theta: float,
    order: Order,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return one ladder whose pairs are shared out to several axes, as in M-RoPE.

    Args:
        rotary_dim: channels to rotate, even.
        sections: pairs an axis; they must sum to rotary_dim / 2.
        theta: ladder base.
        order: "contiguous" (Qwen2-VL) or "interleaved" (Qwen3-VL).
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
    if rotary_dim < 2 or rotary_dim % 2 or sum(sections) != rotary_dim // 2:
        raise PositionError(
            f"sections {tuple(sections)} sum to {sum(sections)} and rotary_dim is {rotary_dim}; the sum must be "
            "rotary_dim / 2. Read both from the checkpoint's rope parameters."
        )
    values = ladder(rotary_dim // 2, theta=theta, device=device, dtype=dtype)
    return on_axis(values, section_axes(sections, order=order, device=device), len(sections))
