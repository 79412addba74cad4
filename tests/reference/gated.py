"""Gated positional self-attention of ConViT (arXiv 2103.10697), pair by pair."""

import math

import numpy as np


def softmax(row: list[float]) -> list[float]:
    top = max(row)
    parts = [math.exp(value - top) for value in row]
    return [part / sum(parts) for part in parts]


def positions(hw: tuple[int, int], weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Return `[heads, n, n]`: softmax over keys of w . (dx, dy, d^2) + b, with d from query to key."""
    height, width = hw
    cells = [(y, x) for y in range(height) for x in range(width)]
    out = np.zeros((len(weight), len(cells), len(cells)))
    for head, (w, b) in enumerate(zip(weight, bias, strict=True)):
        for i, (qy, qx) in enumerate(cells):
            logits = []
            for ky, kx in cells:
                dx, dy = kx - qx, ky - qy
                logits.append(w[0] * dx + w[1] * dy + w[2] * (dx * dx + dy * dy) + b)
            out[head, i] = softmax(logits)
    return out


def gpsa(
    attention: np.ndarray,
    hw: tuple[int, int],
    weight: np.ndarray,
    bias: np.ndarray,
    gating: np.ndarray,
    prefix: int = 0,
) -> np.ndarray:
    """Return the mixed attention `[heads, m, m]`; rows of prefix tokens stay, their columns keep the share 1 - g."""
    position = positions(hw, weight, bias)
    out = attention.astype(np.float64).copy()
    for head, value in enumerate(gating):
        share = 1 / (1 + math.exp(-value))
        out[head, prefix:] *= 1 - share
        out[head, prefix:, prefix:] += share * position[head]
    return out


def local_start(num_heads: int, strength: float = 1.0) -> np.ndarray:
    """Return the paper's start: head (h1, h2) of a k x k set is centred on the cell h2 - c along x, h1 - c along y."""
    side = math.isqrt(num_heads)
    centre = (side - 1) / 2
    weight = np.zeros((side * side, 3))
    for h1 in range(side):
        for h2 in range(side):
            weight[h1 + side * h2] = [2 * (h2 - centre), 2 * (h1 - centre), -1]
    return strength * weight
