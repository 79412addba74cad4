"""Rotary encodings by loops: which axis turns which pair, how fast, and the 2x2 matrix of every pair.

RoFormer (arXiv 2104.09864) equation 34; facts/vision_pe.md 1B and 2; facts/mrope.md for sections.
"""

import math
from collections.abc import Sequence

import numpy as np


def axial_angles(
    coords: np.ndarray,
    head_dim: int,
    theta: float,
    *,
    axis_order: Sequence[int] = (0, 1),
    interleaved: bool = False,
    dealt: bool = False,
    turns: bool = False,
) -> np.ndarray:
    """Return `[n, head_dim / 2]` radians of an axial scheme.

    Args:
        coords: `[n, axes]`.
        head_dim: channels that turn.
        theta: the k-th of K steps on an axis turns by theta ** (-k / K) a unit.
        axis_order: axis of the first, second, ... share of pairs.
        interleaved: deal pairs to the axes in turn instead of in blocks.
        dealt: Pixtral: one ladder of all pairs, whose steps the axes take in turn.
        turns: DINOv3: coordinates count whole turns.
    """
    axes = len(axis_order)
    share = head_dim // 2 // axes
    out = np.zeros((len(coords), head_dim // 2))
    for n, point in enumerate(coords):
        for slot, axis in enumerate(axis_order):
            for k in range(share):
                pair = k * axes + slot if interleaved else slot * share + k
                exponent = (k * axes + slot) / (share * axes) if dealt else k / share
                speed = theta**-exponent * (2 * math.pi if turns else 1)
                out[n, pair] = point[axis] * speed
    return out


def period_angles(coords: np.ndarray, head_dim: int, shortest: float, longest: float) -> np.ndarray:
    """Return DINOv3's angles with periods running geometrically from shortest to longest, both included."""
    axes = coords.shape[1]
    share = head_dim // 2 // axes
    out = np.zeros((len(coords), head_dim // 2))
    for n, point in enumerate(coords):
        for axis in range(axes):
            for k in range(share):
                place = k / (share - 1) if share > 1 else 0.0
                period = shortest * (longest / shortest) ** place
                out[n, axis * share + k] = 2 * math.pi * point[axis] / period
    return out


def mixed_angles(coords_yx: np.ndarray, freqs_xy: np.ndarray) -> np.ndarray:
    """Return RoPE-Mixed's `[heads, n, pairs]`: x fx + y fy, with freqs `[2, heads, pairs]`, x first."""
    _, heads, pairs = freqs_xy.shape
    out = np.zeros((heads, len(coords_yx), pairs))
    for h in range(heads):
        for n, (y, x) in enumerate(coords_yx):
            for p in range(pairs):
                out[h, n, p] = x * freqs_xy[0, h, p] + y * freqs_xy[1, h, p]
    return out


def mixed_start(head_dim: int, direction: float, theta: float) -> tuple[np.ndarray, np.ndarray]:
    """Return (fx, fy) of one head of RoPE-Mixed: half the pairs along `direction`, half at +90 degrees."""
    fx, fy = [], []
    for turned in (direction, direction + math.pi / 2):
        for k in range(head_dim // 4):
            magnitude = theta ** (-4 * k / head_dim)
            fx.append(magnitude * math.cos(turned))
            fy.append(magnitude * math.sin(turned))
    return np.array(fx), np.array(fy)


def section_angles(
    ids: np.ndarray, rotary_dim: int, sections: Sequence[int], theta: float, *, interleaved: bool
) -> np.ndarray:
    """Return M-RoPE's `[n, rotary_dim / 2]`: one ladder, whose pair p follows the axis that owns p.

    Contiguous (Qwen2-VL): axis 0 owns the first sections[0] pairs, and so on. Interleaved (Qwen3-VL): axis a > 0
    owns the pairs a, a + axes, a + 2 axes, ..., sections[a] of them; axis 0 owns all others.
    """
    axes, pairs = len(sections), rotary_dim // 2
    owner = [0] * pairs
    if interleaved:
        for a in range(1, axes):
            for step in range(sections[a]):
                owner[a + step * axes] = a
    else:
        p = 0
        for a in range(axes):
            for _ in range(sections[a]):
                owner[p] = a
                p += 1
    out = np.zeros((len(ids), pairs))
    for n in range(len(ids)):
        for p in range(pairs):
            out[n, p] = ids[n, owner[p]] * theta ** (-p / pairs)
    return out


def pair_channels(pairs: int, pairing: str, axes: int = 2) -> list[tuple[int, int]]:
    """Return the two channels of every pair: "half" is (p, p + pairs), "adjacent" is (2p, 2p + 1).

    "half_per_axis" is "half" inside the run of channels of every axis.
    """
    if pairing == "half":
        return [(p, p + pairs) for p in range(pairs)]
    if pairing == "half_per_axis":
        share = pairs // axes
        starts = [(2 * share * (p // share), p % share) for p in range(pairs)]
        return [(start + step, start + share + step) for start, step in starts]
    return [(2 * p, 2 * p + 1) for p in range(pairs)]


def rotation_matrix(angles: np.ndarray, channels: int, pairing: str) -> np.ndarray:
    """Return the `[channels, channels]` matrix that turns one head of one token, built from 2x2 blocks."""
    matrix = np.eye(channels)
    for angle, (a, b) in zip(angles, pair_channels(len(angles), pairing), strict=True):
        c, s = math.cos(angle), math.sin(angle)
        matrix[a, a], matrix[a, b], matrix[b, a], matrix[b, b] = c, -s, s, c
    return matrix


def rotate(x: np.ndarray, angles: np.ndarray, pairing: str, *, prefix: int = 0) -> np.ndarray:
    """Return `[tokens, channels]` with every token after the prefix turned by its own matrix."""
    out = np.array(x, dtype=np.float64)
    for n in range(len(angles)):
        out[prefix + n] = rotation_matrix(angles[n], x.shape[-1], pairing) @ out[prefix + n]
    return out
