"""Fixed sin-cos by loops, one function a source: facts/vision_pe.md 1A."""

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


def timm_reversed(height: int, width: int, dim: int, theta: float = 10000.0) -> np.ndarray:
    """timm's reverse_coord: the tokens of the turned grid, so that they run down the columns; y and x swap places."""
    return timm(width, height, dim, theta)


def omdet_turbo(height: int, width: int, dim: int, theta: float = 10000.0) -> np.ndarray:
    """OmDet-Turbo and the original RT-DETR: [sin x, cos x, sin y, cos y], tokens down the columns."""
    freqs = _ladder(dim, theta, dim // 4)

    def row(y: int, x: int) -> list[float]:
        (sin_x, cos_x), (sin_y, cos_y) = _waves(x, freqs), _waves(y, freqs)
        return sin_x + cos_x + sin_y + cos_y

    return np.array([row(y, x) for x in range(width) for y in range(height)])


DIALECTS = {
    "mae": mae,
    "timm": timm,
    "big_vision": big_vision,
    "vjepa": vjepa,
    "timm_reversed": timm_reversed,
    "omdet_turbo": omdet_turbo,
}


def _axis(position: int, channels: int, theta: float) -> list[float]:
    """[sines, cosines] of one axis with a ladder of its own."""
    sin, cos = _waves(position, [theta ** (-i / (channels // 2)) for i in range(channels // 2)])
    return sin + cos


def vjepa_3d(
    frames: int, height: int, width: int, dim: int, theta: float = 10000.0, *, uniform: bool = False
) -> np.ndarray:
    """V-JEPA pos_embs.py 3-D: t has D/2, y and x D/4; uniform_power gives each 2 ceil(D/6) and cuts to D."""
    widths = [2 * math.ceil(dim / 6)] * 3 if uniform else [dim // 2, dim // 4, dim // 4]

    def row(*place: int) -> list[float]:
        out = []
        for position, channels in zip(place, widths, strict=True):
            out += _axis(position, channels, theta)
        return out[:dim]

    return np.array(
        [row(t, y, x) for t in range(frames) for y in range(height) for x in range(width)]
    )


def big_vision_3d(
    frames: int, height: int, width: int, dim: int, theta: float = 10000.0
) -> np.ndarray:
    """vit-pytorch simple_vit_3d: x, y, t, a sixth of D to each wave, inclusive ladder, zeros at the end."""
    sixth = dim // 6
    freqs = [theta ** (-i / (sixth - 1)) for i in range(sixth)]

    def row(t: int, y: int, x: int) -> list[float]:
        out = []
        for position in (x, y, t):
            sin, cos = _waves(position, freqs)
            out += sin + cos
        return out + [0.0] * (dim - 6 * sixth)

    return np.array(
        [row(t, y, x) for t in range(frames) for y in range(height) for x in range(width)]
    )
