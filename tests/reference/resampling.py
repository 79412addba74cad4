"""Resampling of a table, one wanted cell after the other.

Kernels: Keys 1981 (cubic, coefficient a); windows and normalisation of the antialiased form as PIL and PyTorch's
_upsample_*_aa write them; facts/vision_pe.md 1C and facts/timm.md 1.5 and 3 for who uses which.
"""

import math

import numpy as np

NO_AA = {"kernel": "bicubic", "a": -0.75}
AA = {"kernel": "bicubic", "a": -0.5, "antialias": True}
PINNED = {"kernel": "bilinear", "align_corners": True}

# What each source does, from facts/vision_pe.md 1C and facts/timm.md 1.5 and 3; "beit" has its own oracle.
SOURCES = {
    "timm": AA,
    "dinov2": {**NO_AA, "drift": 0.1},
    "dinov2_reg": AA,
    "hf_dinov2": NO_AA,
    "mae": NO_AA,
    "torchvision": {**NO_AA, "align_corners": True},
    "big_vision": PINNED,
    "flexivit": {"kernel": "bilinear", "antialias": True},
    "siglip2_naflex": {"kernel": "bilinear", "antialias": True},
    "qwen3_vl": PINNED,
    "paddleocr_vl": {"kernel": "bilinear"},
    "perception_encoder": {"kernel": "bilinear"},
    "kimi_k25": NO_AA,
    "swin": NO_AA,
    "sam": {"kernel": "bilinear"},
    "hf_beit": {"kernel": "bilinear"},
    "sam2": NO_AA,
    "hiera": AA,
    "muse": {"kernel": "bilinear", "zero_border": True},
    "nearest": {"kernel": "nearest"},
    "nearest_idefics2": {"kernel": "nearest", "boundaries": "reciprocal"},
    "nearest_transformers": {"kernel": "nearest", "boundaries": "quotient"},
}


def cubic(x: float, a: float) -> float:
    """Return Keys' cubic at distance x."""
    x = abs(x)
    if x <= 1:
        return (a + 2) * x**3 - (a + 3) * x**2 + 1
    if x < 2:
        return a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a
    return 0.0


def triangle(x: float) -> float:
    """Return the linear kernel at distance x."""
    return max(0.0, 1.0 - abs(x))


def _kernel(kernel: str, x: float, a: float) -> float:
    return cubic(x, a) if kernel == "bicubic" else triangle(x)


def weights(
    source: int,
    target: int,
    *,
    kernel: str,
    a: float = -0.75,
    antialias: bool = False,
    align_corners: bool = False,
    drift: float = 0.0,
    boundaries: str = "exact",
    zero_border: bool = False,
) -> np.ndarray:
    """Return the `[target, source]` weights of one axis."""
    out = np.zeros((target, source))
    for i in range(target):
        if kernel == "nearest" and boundaries == "exact":
            out[i, i * source // target] = 1.0
        elif kernel == "nearest":
            out[i, _float32_bucket(i, source, target, boundaries)] = 1.0
        elif antialias:
            _antialiased_row(out[i], i, source / target, kernel, a)
        else:
            if align_corners:
                place = i * (source - 1) / (target - 1) if target > 1 else 0.0
            else:
                # A scale factor (target + drift) / source is handed over instead of a size.
                place = (i + 0.5) / ((target + drift) / source) - 0.5
            _plain_row(out[i], place, kernel, a, zero_border=zero_border)
    return out


def _float32_bucket(i: int, source: int, target: int, boundaries: str) -> int:
    """Return in which of `source` buckets float32 arithmetic puts cell i of `target`.

    transformers' Idefics and get_vision_nearest_position_ids count the boundaries 1/n, 2/n, ... that a fraction has
    reached; torch.arange forms a boundary in double and rounds it to float32.
    """
    f32 = np.float32
    if boundaries == "reciprocal":
        share = min(f32(i) * (f32(1) / f32(target)), f32(1 - 1e-6))
    else:
        share = f32(i) / f32(target)
    step = 1 / source
    count = math.ceil((1.0 - step) / step)
    reached = sum(1 for k in range(count) if f32(step + k * step) <= share)
    return min(reached, source - 1)


def _antialiased_row(row: np.ndarray, i: int, scale: float, kernel: str, a: float) -> None:
    """Fill one row: the kernel is stretched when shrinking, cut at the border, then normalised."""
    stretch = max(scale, 1.0)
    support = (2.0 if kernel == "bicubic" else 1.0) * stretch
    centre = scale * (i + 0.5)
    first = max(int(centre - support + 0.5), 0)
    end = min(int(centre + support + 0.5), len(row))
    taps = [_kernel(kernel, (j - centre + 0.5) / stretch, a) for j in range(first, end)]
    for j, tap in zip(range(first, end), taps, strict=True):
        row[j] = tap / sum(taps)


def _plain_row(
    row: np.ndarray, place: float, kernel: str, a: float, *, zero_border: bool = False
) -> None:
    """Fill one row: two or four neighbours, the border cell repeated outside, or left out."""
    if kernel == "bilinear" and not zero_border:
        place = max(place, 0.0)
    first = math.floor(place)
    for j in (first, first + 1) if kernel == "bilinear" else range(first - 1, first + 3):
        if zero_border and not 0 <= j < len(row):
            continue
        row[min(max(j, 0), len(row) - 1)] += _kernel(kernel, j - place, a)


def geometric_weights(source: int, target: int) -> np.ndarray:
    """Return BEiT's `[target, source]` weights of one axis of a relative table.

    unilm beit/run_class_finetuning.py: the source samples are laid at 0, ±1, ±(1 + q), ±(1 + q + q²), ... with the
    q in [1.01, 1.5] that brings the outermost to the edge of the target; the target reads between them linearly
    and is clamped beyond them (timm's RegularGridInterpolator).
    """
    left, right = 1.01, 1.5
    while right - left > 1e-6:
        q = (left + right) / 2
        if (1 - q ** (source // 2)) / (1 - q) > target // 2:
            right = q
        else:
            left = q
    knots, current = [], 1.0
    for i in range(source // 2):
        knots.append(current)
        current += q ** (i + 1)
    knots = [-k for k in reversed(knots)] + [0.0] + knots
    out = np.zeros((target, source))
    for i in range(target):
        place = min(max(i - target // 2, knots[0]), knots[-1])
        for j in range(source - 1):
            if knots[j] <= place <= knots[j + 1]:
                share = (place - knots[j]) / (knots[j + 1] - knots[j])
                out[i] = 0.0
                out[i, j], out[i, j + 1] = 1 - share, share
    return out


def resize(table: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Return `[target y, target x, d]` of a table `[y, x, d]`: every wanted cell is a weighted sum of all cells."""
    out = np.zeros((len(rows), len(columns), table.shape[-1]))
    for i in range(len(rows)):
        for k in range(len(columns)):
            for y in range(table.shape[0]):
                for x in range(table.shape[1]):
                    out[i, k] += rows[i, y] * columns[k, x] * table[y, x]
    return out


def resized(table: np.ndarray, target_hw: tuple[int, int], source_name: str) -> np.ndarray:
    """Return a table `[y, x, d]` on another grid, as one of SOURCES or "beit" does it."""
    axes = [
        geometric_weights(old, new)
        if source_name == "beit"
        else weights(old, new, **SOURCES[source_name])
        for old, new in zip(table.shape[:2], target_hw, strict=True)
    ]
    return resize(table, *axes)
