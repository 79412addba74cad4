"""Position from convolutions, cell by cell: the PEG of CPVT (arXiv 2102.10882), the term of CoaT (2104.06399)."""

import math

import numpy as np


def depthwise(
    cells: np.ndarray, weight: np.ndarray, bias: np.ndarray, *, circular: bool = False
) -> np.ndarray:
    """Return every channel of `cells [h, w, c]` correlated with its own kernel `[c, k, k]`, as large as before.

    Outside the map there are zeros, or the other side of it.
    """
    height, width, channels = cells.shape
    reach = weight.shape[-1] // 2
    out = np.zeros((height, width, channels))
    for y in range(height):
        for x in range(width):
            total = bias.astype(np.float64).copy()
            for dy in range(-reach, reach + 1):
                for dx in range(-reach, reach + 1):
                    row, column = y + dy, x + dx
                    if circular:
                        row, column = row % height, column % width
                    elif not (0 <= row < height and 0 <= column < width):
                        continue
                    total += weight[:, dy + reach, dx + reach] * cells[row, column]
            out[y, x] = total
    return out


def gelu(x: np.ndarray) -> np.ndarray:
    return np.vectorize(lambda v: 0.5 * v * (1 + math.erf(v / math.sqrt(2))))(x)


def peg(
    tokens: np.ndarray,
    hw: tuple[int, int],
    weight: np.ndarray,
    bias: np.ndarray,
    *,
    prefix: int = 0,
    masked: np.ndarray | None = None,
    residual: bool = True,
    activation: str = "none",
    circular: bool = False,
) -> np.ndarray:
    """Return the tokens `[prefix + h * w, c]` of one image after a PEG; `masked [h * w]` is True where hidden."""
    out = tokens.astype(np.float64).copy()
    patches = out[prefix:]
    seen = patches if masked is None else np.where(masked[:, None], 0.0, patches)
    moved = depthwise(seen.reshape(*hw, -1), weight, bias, circular=circular)
    moved = gelu(moved) if activation == "gelu" else moved
    moved = moved.reshape(len(patches), -1)
    out[prefix:] = patches + moved if residual else moved
    return out


def conv_relative(
    q: np.ndarray,
    v: np.ndarray,
    hw: tuple[int, int],
    weights: list[np.ndarray],
    biases: list[np.ndarray],
    *,
    prefix: int = 0,
) -> np.ndarray:
    """Return CoaT's term `q * conv(v)` for `q, v [heads, prefix + n, c]`; group i of heads has kernel i.

    `weights[i]` is `[heads of the group, c, k, k]`, `biases[i]` `[heads of the group, c]`.
    """
    out = np.zeros(q.shape)
    head = 0
    for weight, bias in zip(weights, biases, strict=True):
        for kernels, shift in zip(weight, bias, strict=True):
            around = depthwise(v[head, prefix:].reshape(*hw, -1), kernels, shift)
            out[head, prefix:] = q[head, prefix:] * around.reshape(hw[0] * hw[1], -1)
            head += 1
    return out
