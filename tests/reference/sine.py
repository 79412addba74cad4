"""Detector sine codes by loops: facts/vision_pe.md 1F and 8, DETR (arXiv 2005.12872) and its descendants."""

import math

import numpy as np


def lane(place: float, channels: int, theta: float) -> list[float]:
    """One axis: sin and cos of place / theta ** (2 (i // 2) / channels), by even and odd i."""
    out = []
    for i in range(channels):
        angle = place / theta ** (2 * (i // 2) / channels)
        out.append(math.sin(angle) if i % 2 == 0 else math.cos(angle))
    return out


def positions(valid: list[int], *, centre: bool, normalize: bool, scale: float) -> list[float]:
    """Places of the cells of one row or column of a mask, counted over the valid ones."""
    counts, seen = [], 0
    for flag in valid:
        seen += flag
        counts.append(float(seen))
    if not normalize:
        return counts
    if seen == 0:
        return [0.0] * len(valid)
    return [(count - (0.5 if centre else 0.0)) / (seen + 1e-6) * scale for count in counts]


def code(
    valid: np.ndarray,
    dim: int,
    *,
    centre: bool = False,
    normalize: bool = True,
    theta: float = 10000.0,
    scale: float = 2 * math.pi,
) -> np.ndarray:
    """`[h * w, dim]` of one image with mask `valid [h, w]`: y half, then x half."""
    height, width = valid.shape
    how = {"centre": centre, "normalize": normalize, "scale": scale}
    columns = [positions(valid[:, x].tolist(), **how) for x in range(width)]
    rows = [positions(valid[y].tolist(), **how) for y in range(height)]
    return np.array(
        [
            lane(columns[x][y], dim // 2, theta) + lane(rows[y][x], dim // 2, theta)
            for y in range(height)
            for x in range(width)
        ]
    )


def doubled(position: float, dim: int, theta: float = 10000.0) -> list[float]:
    """SAM 2 get_1d_sine_pe: exponents of the interleaved ladder on two blocks, so each frequency stands twice."""
    half = dim // 2
    angles = [position / theta ** (2 * (i // 2) / half) for i in range(half)]
    return [math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles]
