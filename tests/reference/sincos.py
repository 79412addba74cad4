"""Fixed 2-D sin-cos by loops, one function a source: facts/vision_pe.md 1A."""

import math

import numpy as np


def _waves(position: float, freqs: list[float]) -> tuple[list[float], list[float]]:
    return [math.sin(position * w) for w in freqs], [math.cos(position * w) for w in freqs]


def _table(height: int, width: int, row) -> np.ndarray:
    return np.array([row(y, x) for y in range(height) for x in range(width)])


def _ladder(dim: int, theta: float, last: int) -> list[float]:
    """Return theta ** (-i / last) for the D/4 frequencies of an axis."""
    return [theta ** (-i / last) for i in range(dim // 4)]


def mae(height: int, width: int, dim: int, theta: float = 10000.0) -> np.ndarray:
    """MAE util/pos_embed.py: [sin x, cos x, sin y, cos y]."""
    freqs = _ladder(dim, theta, dim // 4)

    def row(y: int, x: int) -> list[float]:
        (sin_x, cos_x), (sin_y, cos_y) = _waves(x, freqs), _waves(y, freqs)
        return sin_x + cos_x + sin_y + cos_y

    return _table(height, width, row)


def vjepa(height: int, width: int, dim: int, theta: float = 10000.0) -> np.ndarray:
    """V-JEPA pos_embs.py: [sin y, cos y, sin x, cos x]."""
    freqs = _ladder(dim, theta, dim // 4)

    def row(y: int, x: int) -> list[float]:
        (sin_x, cos_x), (sin_y, cos_y) = _waves(x, freqs), _waves(y, freqs)
        return sin_y + cos_y + sin_x + cos_x

    return _table(height, width, row)


def timm(height: int, width: int, dim: int, theta: float = 10000.0) -> np.ndarray:
    """timm build_sincos2d_pos_embed, default flags: [sin y, sin x, cos y, cos x]."""
    freqs = _ladder(dim, theta, dim // 4)

    def row(y: int, x: int) -> list[float]:
        (sin_x, cos_x), (sin_y, cos_y) = _waves(x, freqs), _waves(y, freqs)
        return sin_y + sin_x + cos_y + cos_x

    return _table(height, width, row)


def big_vision(height: int, width: int, dim: int, theta: float = 10000.0) -> np.ndarray:
    """big_vision vit.py: MAE's order, exponents i / (D/4 - 1), so that the last frequency is 1 / theta."""
    freqs = _ladder(dim, theta, dim // 4 - 1)

    def row(y: int, x: int) -> list[float]:
        (sin_x, cos_x), (sin_y, cos_y) = _waves(x, freqs), _waves(y, freqs)
        return sin_x + cos_x + sin_y + cos_y

    return _table(height, width, row)


DIALECTS = {"mae": mae, "timm": timm, "big_vision": big_vision, "vjepa": vjepa}
