"""Where tokens are, by loops: facts/vision_pe.md 1B, 1G, 2 (DINOv3, EVA-02) and facts/timm.md 1.4."""

import math

import numpy as np


def index(height: int, width: int, offset: float = 0.0) -> np.ndarray:
    """Return (y, x) cell indices, `[n, 2]`, row-major: x runs fastest."""
    return np.array([[y + offset, x + offset] for y in range(height) for x in range(width)])


def index_to_reference(
    height: int, width: int, reference_hw: tuple[int, int], offset: float = 0.0
) -> np.ndarray:
    """Return EVA-02's indices, stretched to the grid of pre-training: (i + offset) / side * reference."""
    rows, columns = reference_hw
    return np.array(
        [
            [(y + offset) / height * rows, (x + offset) / width * columns]
            for y in range(height)
            for x in range(width)
        ]
    )


def centred(height: int, width: int, normalize: str = "separate") -> np.ndarray:
    """Return DINOv3's cell centres, 2 (i + 1/2) / m - 1 with m the own, shortest or longest side."""
    m_y, m_x = {
        "separate": (height, width),
        "min": (min(height, width),) * 2,
        "max": (max(height, width),) * 2,
    }[normalize]
    return np.array(
        [
            [2 * (y + 0.5) / m_y - 1, 2 * (x + 0.5) / m_x - 1]
            for y in range(height)
            for x in range(width)
        ]
    )


def fractional(height: int, width: int) -> np.ndarray:
    """Return NaViT's cell centres on [0, 1], (2 i + 1) / (2 N)."""
    return np.array(
        [
            [(2 * y + 1) / (2 * height), (2 * x + 1) / (2 * width)]
            for y in range(height)
            for x in range(width)
        ]
    )


def endpoint(height: int, width: int) -> np.ndarray:
    """Return coordinates with the outer cells on -1 and 1; a single cell stands on -1, as linspace puts it."""

    def tick(i: int, side: int) -> float:
        return -1.0 if side == 1 else -1 + 2 * i / (side - 1)

    return np.array(
        [[tick(y, height), tick(x, width)] for y in range(height) for x in range(width)]
    )


def jittered(
    coords: np.ndarray,
    *,
    shift: tuple[float, ...] = (0.0, 0.0),
    jitter: tuple[float, ...] = (0.0, 0.0),
    rescale: float = 0.0,
) -> np.ndarray:
    """Return (c + shift) * exp(jitter) * exp(rescale): DINOv3's order, the last two drawn as logarithms."""
    out = np.empty_like(coords)
    for n, row in enumerate(coords):
        for a, value in enumerate(row):
            out[n, a] = (value + shift[a]) * math.exp(jitter[a]) * math.exp(rescale)
    return out
