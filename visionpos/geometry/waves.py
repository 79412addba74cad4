"""Waves: sines and cosines of angles as features to add; angles enter, channels leave."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from visionpos.errors import PositionError

if TYPE_CHECKING:
    from torch import Tensor

WaveOrder = Literal["sin_cos", "cos_sin", "interleaved"]


def waves(turns: Tensor, order: WaveOrder = "sin_cos") -> Tensor:
    """Return the sine and the cosine of every angle, side by side.

    Two tokens' features have the dot product `sum_p cos(turns[n, p] - turns[m, p])`: it sees differences only.

    Args:
        turns: `[..., pairs]` radians, from `angles`.
        order: "sin_cos" all sines, then all cosines (SAM); "cos_sin" the other way round (Tancik, learnable Fourier
            features); "interleaved" sine and cosine of each pair together (DETR).

    Returns:
        `[..., 2 * pairs]` in the dtype of `turns`.

    Raises:
        PositionError: for an unknown order.

    Example:
        >>> waves(torch.tensor([[0.0, 1.0]]))
        tensor([[0.0000, 0.8415, 1.0000, 0.5403]])

    Reference:
        facebookresearch/segment-anything modeling/prompt_encoder.py for "sin_cos"; Tancik et al. (arXiv 2006.10739).
    """
    if order not in ("sin_cos", "cos_sin", "interleaved"):
        raise PositionError(
            f"order is {order!r}; it must be 'sin_cos', 'cos_sin' or 'interleaved'."
        )
    if order == "interleaved":
        return torch.stack([turns.sin(), turns.cos()], dim=-1).flatten(-2)
    parts = (turns.sin(), turns.cos()) if order == "sin_cos" else (turns.cos(), turns.sin())
    return torch.cat(parts, dim=-1)
