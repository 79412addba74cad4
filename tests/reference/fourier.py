"""Fourier features of one point by loops: facts/vision_pe.md 2 (Tancik, NeRF, SAM, LFF), Perceiver (arXiv 2103.03206).

Points and matrices are ordered (t,) y, x; matrices B are in turns a unit, `[axes][pairs]`.
"""

import math


def _turns(point: list[float], B: list[list[float]]) -> list[float]:
    return [
        2 * math.pi * sum(p * row[k] for p, row in zip(point, B, strict=True))
        for k in range(len(B[0]))
    ]


def tancik(point: list[float], B: list[list[float]]) -> list[float]:
    """[cos 2 pi B v, sin 2 pi B v], v on [0, 1]."""
    turns = _turns(point, B)
    return [math.cos(t) for t in turns] + [math.sin(t) for t in turns]


def sam(share: list[float], B: list[list[float]]) -> list[float]:
    """[sin, cos] of 2 pi B (2 p - 1), p the share of the image."""
    turns = _turns([2 * p - 1 for p in share], B)
    return [math.sin(t) for t in turns] + [math.cos(t) for t in turns]


def nerf(point: list[float], bands: int) -> list[float]:
    """bmild/nerf's code: band by band, sines of all coordinates, then cosines; x first; no pi."""
    out = []
    for k in range(bands):
        for wave in (math.sin, math.cos):
            out += [wave(2.0**k * p) for p in reversed(point)]
    return out


def nerf_paper(point: list[float], bands: int) -> list[float]:
    """Equation 4: sin 2^k pi p, cos 2^k pi p for k = 0 .. L-1, coordinate by coordinate; x first."""
    return [
        wave(2.0**k * math.pi * p)
        for p in reversed(point)
        for k in range(bands)
        for wave in (math.sin, math.cos)
    ]


def perceiver(point: list[float], bands: int, resolution: list[int]) -> list[float]:
    """[sines, cosines] of pi f p, f from 1 to half the resolution of the axis, axis by axis."""
    turns = [
        math.pi * p * (1 + (cells / 2 - 1) * (k / (bands - 1) if bands > 1 else 0))
        for p, cells in zip(point, resolution, strict=True)
        for k in range(bands)
    ]
    return [math.sin(t) for t in turns] + [math.cos(t) for t in turns]


def gelu(x: float) -> float:
    return 0.5 * x * (1 + math.erf(x / math.sqrt(2)))


def dense(x: list[float], weight: list[list[float]], bias: list[float]) -> list[float]:
    return [
        sum(w * v for w, v in zip(row, x, strict=True)) + b
        for row, b in zip(weight, bias, strict=True)
    ]


def learnable(
    point: list[float], groups: int, W: list[list[float]], layers: list[tuple[list, list]]
) -> list[float]:
    """Li et al. 2021, equations 2 and 6: MLP([cos x W, sin x W] / sqrt F) a group; W `[axes of a group][F / 2]`."""
    size, out = len(point) // groups, []
    for g in range(groups):
        part = point[g * size : (g + 1) * size]
        turns = [sum(p * row[k] for p, row in zip(part, W, strict=True)) for k in range(len(W[0]))]
        norm = math.sqrt(2 * len(turns))
        features = [math.cos(t) / norm for t in turns] + [math.sin(t) / norm for t in turns]
        hidden = [gelu(h) for h in dense(features, *layers[0])]
        out += dense(hidden, *layers[1])
    return out
