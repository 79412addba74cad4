"""The prompt encoder of SAM (arXiv 2304.02643) and SAM 2 (2408.00714), number by number."""

import math

import numpy as np


def code(x: float, y: float, turns_xy: np.ndarray) -> np.ndarray:
    """Return [sin, cos] of 2 pi (2 p - 1) B for a place p in [0, 1]^2; `turns_xy [2, pairs]` has x in row 0."""
    phase = [
        2 * math.pi * ((2 * x - 1) * bx + (2 * y - 1) * by)
        for bx, by in zip(turns_xy[0], turns_xy[1], strict=True)
    ]
    return np.array([math.sin(p) for p in phase] + [math.cos(p) for p in phase])


def token(
    point_xy: tuple[float, float],
    label: int,
    input_hw: tuple[int, int],
    turns_xy: np.ndarray,
    vectors: np.ndarray,
    not_a_point: np.ndarray,
) -> np.ndarray:
    """Return the token of a labelled point in input pixels, moved to its pixel's centre."""
    if label == -10:
        return np.zeros(2 * turns_xy.shape[1])
    if label == -1:
        return not_a_point
    x, y = (point_xy[0] + 0.5) / input_hw[1], (point_xy[1] + 0.5) / input_hw[0]
    return code(x, y, turns_xy) + vectors[label]


def grid_code(hw: tuple[int, int], turns_xy: np.ndarray) -> np.ndarray:
    """Return the code of every cell's centre, row by row."""
    return np.array(
        [
            code((x + 0.5) / hw[1], (y + 0.5) / hw[0], turns_xy)
            for y in range(hw[0])
            for x in range(hw[1])
        ]
    )


def mask_path(mask: np.ndarray, parts: list[np.ndarray]) -> np.ndarray:
    """Return `[h / 4, w / 4, d]`: twice 2x2 stride-2 convolution, norm over channels, GELU; then a 1x1 one.

    `parts` are weight and bias of convolution, norm, convolution, norm, convolution.
    """
    maps = mask[:, :, None].astype(np.float64)
    for stage in range(2):
        weight, bias, gain, shift = parts[4 * stage : 4 * stage + 4]
        height, width = maps.shape[0] // 2, maps.shape[1] // 2
        out = np.zeros((height, width, len(weight)))
        for y in range(height):
            for x in range(width):
                patch = maps[2 * y : 2 * y + 2, 2 * x : 2 * x + 2]
                row = np.array(
                    [
                        (patch * w.transpose(1, 2, 0)).sum() + b
                        for w, b in zip(weight, bias, strict=True)
                    ]
                )
                row = (row - row.mean()) / math.sqrt(row.var() + 1e-6) * gain + shift
                out[y, x] = [0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in row]
        maps = out
    weight, bias = parts[8:]
    return maps @ weight[:, :, 0, 0].T + bias


def longest_side(size_hw: tuple[int, int], length: int) -> tuple[int, int]:
    """Return the size whose longest side is `length`, the other rounded half up."""
    factor = length / max(size_hw)
    return int(size_hw[0] * factor + 0.5), int(size_hw[1] * factor + 0.5)


def to_input(
    point_xy: tuple[float, float],
    source_hw: tuple[int, int],
    input_hw: tuple[int, int],
    *,
    resize: str,
    geometric: bool,
) -> tuple[float, float]:
    """Return where a pixel of the source lands in the input, by the sources' rule or by the pixel's centre."""
    new_hw = input_hw if resize == "stretch" else longest_side(source_hw, max(input_hw))
    half = 0.5 if geometric else 0.0
    return (
        (point_xy[0] + half) * new_hw[1] / source_hw[1] - half,
        (point_xy[1] + half) * new_hw[0] / source_hw[0] - half,
    )
