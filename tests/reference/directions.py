"""Newer rotary fillings by loops: golden-gate RoPE, Circle-RoPE, pixel bands, whole turns, clamped sections, tiling."""

import math

import numpy as np


def pixel_bands(count: int, max_freq: float, *, log: bool) -> np.ndarray:
    """Return bands from pi to pi * max_freq / 2, evenly spaced or evenly spaced in the exponent of 2."""
    out = []
    for k in range(count):
        place = k / (count - 1) if count > 1 else 0.0
        out.append(
            2 ** (place * (math.log2(max_freq) - 1)) if log else 1 + place * (max_freq / 2 - 1)
        )
    return math.pi * np.array(out)


def pixel_angles(coords: np.ndarray, head_dim: int, max_freq: float, *, log: bool) -> np.ndarray:
    """Return `[n, head_dim / 2]`: y pairs, then x pairs."""
    axes = coords.shape[1]
    bands = pixel_bands(head_dim // 2 // axes, max_freq, log=log)
    return np.concatenate([coords[:, a : a + 1] * bands for a in range(axes)], axis=1)


def golden(head_dim: int, heads: int, slowest: float, fastest: float, still: float) -> np.ndarray:
    """Return `[heads, 2 (y, x), pairs]`: pair number k of all heads points along k pi / phi, x = cos, y = sin."""
    pairs, phi = head_dim // 2, (1 + math.sqrt(5)) / 2
    resting = round(still * pairs)
    out = np.zeros((heads, 2, pairs))
    for h in range(heads):
        for p in range(resting, pairs):
            place = (p - resting) / (pairs - resting - 1) if pairs - resting > 1 else 0.0
            speed = slowest * (fastest / slowest) ** place
            turn = (h * pairs + p) * math.pi / phi
            out[h, :, p] = speed * math.sin(turn), speed * math.cos(turn)
    return out


def circle(height: int, width: int, radius: float | None, alpha: float) -> np.ndarray:
    """Return `[n, 3]` (t, y, x) of the cells of an image by Circle-RoPE with move_to_origin."""
    cells = [
        (y - (height - 1) / 2, x - (width - 1) / 2) for y in range(height) for x in range(width)
    ]
    seen = [math.atan2(y, x) for y, x in cells]
    low, high = min(seen), max(seen)
    if radius is None:
        radius = max(max(cell) for cell in cells)
    text = np.array([1.0, 1.0, 1.0]) / math.sqrt(3)  # x, y, t
    u = np.array([-text[1], text[0], 0.0])
    u /= np.linalg.norm(u)
    v = np.cross(text, u)
    out = []
    for n, angle in enumerate(seen):
        stretched = (angle - low) / (high - low) * 2 * math.pi if high > low else angle
        turn = alpha * stretched + (1 - alpha) * n / len(cells) * 2 * math.pi
        x, y, t = radius * math.cos(turn) * u + radius * math.sin(turn) * v
        out.append((t, y, x))
    return np.array(out)


def clamped_owners(sections: tuple[int, ...], pairs: int) -> list[int]:
    """Return the axis of every pair: all are t, then y takes 1, 4, ... below 3 s_y, x takes 2, 5, ... below 3 s_x."""
    owner = [0] * pairs
    for axis in range(1, len(sections)):
        for pair in range(axis, min(len(sections) * sections[axis], pairs), len(sections)):
            owner[pair] = axis
    return owner


def tiled(x: np.ndarray, angles: np.ndarray, axes: int) -> np.ndarray:
    """Return V-JEPA 2's map of one head: cosines and sines tiled, partners adjacent, inside the run of every axis.

    Args:
        x: `[n, channels]`; channels beyond the runs pass through.
        angles: `[n, pairs]`, the pairs of the first axis first.
        axes: runs.
    """
    out = np.array(x, dtype=np.float64)
    share = angles.shape[1] // axes
    for n in range(len(x)):
        for axis in range(axes):
            start = axis * 2 * share
            for c in range(2 * share):
                angle = angles[n, axis * share + c % share]
                partner = -x[n, start + c + 1] if c % 2 == 0 else x[n, start + c - 1]
                out[n, start + c] = x[n, start + c] * math.cos(angle) + partner * math.sin(angle)
    return out
