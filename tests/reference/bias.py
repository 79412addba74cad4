"""Attention biases, one pair of cells after the other, in float64.

Swin (arXiv 2103.14030), BEiT (2106.08254), Swin V2 (2111.09883), LeViT (2104.01136), MViTv2 (2112.01526), ALiBi
(2108.12409), T5 (1910.10683), KERPLE (2205.09921), FIRE (2310.04418), LookHere (2405.13985), PaPE (2602.01418).
"""

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np

Cell = tuple[int, ...]


def cells(*sides: int) -> list[Cell]:
    """Return every cell of a grid, the last axis fastest."""
    out: list[Cell] = [()]
    for side in sides:
        out = [(*cell, place) for cell in out for place in range(side)]
    return out


def pairs(sides: tuple[int, ...], bias: Callable[[Cell], np.ndarray]) -> np.ndarray:
    """Return `[heads, n, n]`: the bias of every query-minus-key difference."""
    grid = cells(*sides)
    rows = []
    for query in grid:
        row = [bias(tuple(q - k for q, k in zip(query, key, strict=True))) for key in grid]
        rows.append(row)
    return np.moveaxis(np.array(rows), -1, 0)


def framed(patches: np.ndarray, own: np.ndarray, prefix: int) -> np.ndarray:
    """Return the bias with prefix tokens first; own `[heads, 3]`: to patch, from patch, among themselves."""
    heads, n, _ = patches.shape
    out = np.zeros((heads, prefix + n, prefix + n))
    for head in range(heads):
        for i in range(prefix + n):
            for j in range(prefix + n):
                if i < prefix and j < prefix:
                    out[head, i, j] = own[head, 2]
                elif i < prefix:
                    out[head, i, j] = own[head, 0]
                elif j < prefix:
                    out[head, i, j] = own[head, 1]
                else:
                    out[head, i, j] = patches[head, i - prefix, j - prefix]
    return out


def table_bias(table: np.ndarray, window: tuple[int, int]) -> Callable[[Cell], np.ndarray]:
    """Return Swin's lookup in `[2h - 1, 2w - 1, heads]`: middle plus difference."""
    return lambda d: table[window[0] - 1 + d[0], window[1] - 1 + d[1]]


def offset_bias(table: np.ndarray) -> Callable[[Cell], np.ndarray]:
    """Return LeViT's lookup in `[h, w, heads]`: absolute difference."""
    return lambda d: table[abs(d[0]), abs(d[1])]


def log_coordinate(difference: float, form: str, unit: int) -> float:
    """Return the network's input of one axis: 8 d / (unit - 1), log2(1 + |.|) / 3; or ln(1 + |d|)."""
    sign = (difference > 0) - (difference < 0)
    if form == "cr":
        return sign * math.log(1 + abs(difference))
    if difference == 0:
        return 0.0
    return sign * math.log2(1 + abs(8 * difference / (unit - 1))) / math.log2(8)


def log_bias(
    weights: dict[str, np.ndarray], form: str, unit: tuple[int, int]
) -> Callable[[Cell], np.ndarray]:
    """Return the network's bias: linear, ReLU, linear; 16 sigmoid except in "cr"."""

    def bias(d: Cell) -> np.ndarray:
        x = np.array([log_coordinate(d[axis], form, unit[axis]) for axis in (0, 1)])
        hidden = np.maximum(weights["hidden.weight"] @ x + weights["hidden.bias"], 0)
        raw = weights["out.weight"] @ hidden + weights.get("out.bias", 0.0)
        return raw if form == "cr" else 16 / (1 + np.exp(-raw))

    return bias


def distance(d: Cell, metric: str) -> float:
    """Return the length of a difference."""
    if metric == "l1":
        return float(sum(abs(part) for part in d))
    if metric == "linf":
        return float(max(abs(part) for part in d))
    return math.sqrt(sum(part * part for part in d))


def alibi_slopes(heads: int) -> list[float]:
    """Return the paper's slopes: 2 ** (-8 r / heads), and its rule for counts that are no power of two."""
    if heads & (heads - 1) == 0:
        return [2 ** (-8 * (r + 1) / heads) for r in range(heads)]
    lower = 2 ** int(math.log2(heads))
    return alibi_slopes(lower) + alibi_slopes(2 * lower)[0::2][: heads - lower]


def alibi(heads: int, metric: str) -> Callable[[Cell], np.ndarray]:
    """Return minus slope times distance."""
    return lambda d: np.array([-slope * distance(d, metric) for slope in alibi_slopes(heads)])


def t5_bucket(relative: int, buckets: int, reach: int) -> int:
    """Return T5's two-sided bucket of key minus query."""
    half = buckets // 2
    exact = half // 2
    size = abs(relative)
    if size >= exact:
        size = exact + int(math.log(size / exact) / math.log(reach / exact) * (half - exact))
        size = min(size, half - 1)
    return size + (half if relative > 0 else 0)


def t5(tables: list[np.ndarray], reach: tuple[int, ...]) -> Callable[[Cell], np.ndarray]:
    """Return the sum of the axes' buckets; d is query minus key."""
    return lambda d: sum(
        table[t5_bucket(-part, len(table), far)]
        for table, part, far in zip(tables, d, reach, strict=True)
    )


def kerple(p: np.ndarray, a: np.ndarray, form: str, metric: str) -> Callable[[Cell], np.ndarray]:
    """Return -p log(1 + a d), or -a d ** p."""
    if form == "log":
        return lambda d: -p * np.log(1 + a * distance(d, metric))
    return lambda d: -a * distance(d, metric) ** p


def fire_input(far: float, reach: float, c: float, threshold: float) -> float:
    """Return FIRE's normalised distance; reach is the causal query's index in the paper."""
    return math.log(c * far + 1) / (math.log(c * max(reach, threshold) + 1) + 1e-6)


def _eighths(side: int) -> dict[str, Callable[[int, int], bool]]:
    """Return what LookHere's 45-degree heads see; side is -1 (left, up) or 1 (right, down)."""
    return {
        "up": lambda y, x: y <= -abs(x) and x * side >= 0,
        "down": lambda y, x: y >= abs(x) and x * side >= 0,
        "left": lambda y, x: x <= -abs(y) and y * side >= 0,
        "right": lambda y, x: x >= abs(y) and y * side >= 0,
    }


# Whether a head sees the key at (y down, x right) of the query.
VIEWS: dict[str, dict[str, Callable[[int, int], bool]]] = {
    "halves": {
        "up": lambda y, _: y <= 0,
        "down": lambda y, _: y >= 0,
        "left": lambda _, x: x <= 0,
        "right": lambda _, x: x >= 0,
    },
    "corners": {
        "up left": lambda y, x: y <= 0 and x <= 0,
        "up right": lambda y, x: y <= 0 and x >= 0,
        "down left": lambda y, x: y >= 0 and x <= 0,
        "down right": lambda y, x: y >= 0 and x >= 0,
    },
    "triangles": {
        "up": lambda y, x: y <= -abs(x),
        "down": lambda y, x: y >= abs(x),
        "left": lambda y, x: x <= -abs(y),
        "right": lambda y, x: x >= abs(y),
    },
    "eighths1": _eighths(-1),
    "eighths2": _eighths(1),
    "none": dict.fromkeys("abcd", lambda *_: True),
}


def lookhere(
    views: list[tuple[str, int]], scale: float, hidden: float
) -> Callable[[Cell], np.ndarray]:
    """Return minus scale, head slope and distance; `hidden` where the head does not see. d is query minus key."""
    heads = []
    for name, count in views:
        for head in range(count):
            see = list(VIEWS[name].values())[head % 4]
            if name == "none":
                slope = 4.0 ** -(1 + head * 4 // max(count, 4))
            else:
                slope = 2.0 ** -(1 + head // 4)
            heads.append((see, slope))
    return lambda d: np.array(
        [
            -scale * slope * distance(d, "l2") if see(-d[0], -d[1]) else hidden
            for see, slope in heads
        ]
    )


def table_row(query: int, key: int, queries: int, keys: int) -> int:
    """Return MViTv2's row of a pair on lattices of two strides: exact, then cut to a whole number."""
    finer_q = max(Fraction(keys, queries), Fraction(1))
    finer_k = max(Fraction(queries, keys), Fraction(1))
    return int(query * finer_q - key * finer_k + (keys - 1) * finer_k)


def decomposed(
    q: np.ndarray, tables: list[np.ndarray], sides: tuple[int, ...], keys: tuple[int, ...]
) -> np.ndarray:
    """Return `[b, heads, n, m]` of q `[b, heads, n, d]`: q . (R_t + R_y + R_x), table lengths already right."""
    here, there = cells(*sides), cells(*keys)
    out = np.zeros((*q.shape[:3], len(there)))
    for n, query in enumerate(here):
        for m, key in enumerate(there):
            vector = sum(
                tables[a][table_row(query[a], key[a], sides[a], keys[a])] for a in range(len(sides))
            )
            out[..., n, m] = q[..., n, :] @ vector
    return out


def parabolas(
    a: np.ndarray, b: np.ndarray | None, projection: np.ndarray, points: np.ndarray
) -> np.ndarray:
    """Return `[b, heads, n, n]` of PaPE: -sum a (P d)^2 + sum b (P d), d query minus key, before the scale.

    a and b are `[batch, heads, n, m]`, projection `[heads, m, axes]`, points `[n, axes]`.
    """
    batch, heads, n, _ = a.shape
    out = np.zeros((batch, heads, n, n))
    for s in range(batch):
        for h in range(heads):
            for i in range(n):
                for j in range(n):
                    along = projection[h] @ (points[i] - points[j])
                    out[s, h, i, j] = -(a[s, h, i] * along**2).sum()
                    if b is not None:
                        out[s, h, i, j] += (b[s, h, i] * along).sum()
    return out
