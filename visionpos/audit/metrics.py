"""Metrics: how far attention and outputs of two forward passes are apart."""

from __future__ import annotations

import torch
from torch import Tensor


def attention_change(weights: Tensor, other: Tensor) -> float:
    """Return A: the mean over heads and queries of the summed difference of attention weights, from 0 to 2.

    Args:
        weights: `[..., heads, n, m]`.
        other: the same of the other pass.
    """
    return float((weights.double() - other.double()).abs().sum(-1).mean())


def output_change(outputs: Tensor, other: Tensor) -> float:
    """Return O: the Frobenius norm of the difference over that of the first.

    Args:
        outputs: `[..., n, d]` before.
        other: the same after.
    """
    before = outputs.double()
    size = torch.linalg.vector_norm(before)
    change = torch.linalg.vector_norm(before - other.double())
    return float(change / size) if size else (0.0 if not change else float("inf"))


def entropy_share(weights: Tensor) -> float:
    """Return the mean entropy of attention over the largest possible, ln m: 1 for even attention, 0 for one key."""
    chances = weights.double()
    if chances.shape[-1] < 2:
        return 0.0
    entropy = -torch.special.xlogy(chances, chances).sum(-1).mean()
    return float(entropy / torch.log(torch.tensor(float(chances.shape[-1]), dtype=torch.float64)))
