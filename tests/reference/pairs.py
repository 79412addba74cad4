"""Biases of lines, one query and one key after the other, in float64.

Shaw (arXiv 1803.02155), Transformer-XL (1901.02860), TUPE (2006.15595), DeBERTa (2006.03654), CoPE (2405.18719), DAPE
(2405.14722, 2410.04798), FIRE (2310.04418), T5 (1910.10683), Sandwich (2212.10356). `i` is the place of the query and
`j` that of the key; queries are the last n of m tokens.
"""

import math
from collections.abc import Callable

import numpy as np

Array = np.ndarray


def every(n: int, m: int, bias: Callable[[int, int], Array]) -> Array:
    """Return `[..., n, m]` of a function of places (i, j)."""
    rows = [[bias(i, j) for j in range(m)] for i in range(m - n, m)]
    return np.moveaxis(np.array(rows), (0, 1), (-2, -1))


def t5_causal_bucket(i: int, j: int, buckets: int, reach: int) -> int:
    """Return T5's bucket of a decoder."""
    distance, exact = max(i - j, 0), buckets // 2
    if distance < exact:
        return distance
    far = math.log(distance / exact) / math.log(reach / exact) * (buckets - exact)
    return min(exact + int(far), buckets - 1)


def sandwich(distance: int, width: int, head: int, heads: int) -> float:
    """Return the bias of head 1, 2, ..."""
    total = sum(math.cos(distance / 10000 ** (2 * k / width)) for k in range(1, width // 2 + 1))
    return (total - width / 2) / (8 * head / heads)


def fire_input(i: int, j: int, c: float, threshold: float) -> float:
    """Return the number that FIRE's network is given."""
    return math.log(abs(c * abs(i - j)) + 1) / (
        math.log(abs(c * max(i, abs(threshold))) + 1) + 1e-6
    )


def shaw(q: Array, table: Array, reach: int, m: int) -> Array:
    """Return `[b, heads, n, m]`, queries times the vector of the clipped difference, unscaled."""
    n = q.shape[-2]

    def one(i: int, j: int) -> Array:
        return q[..., i - (m - n), :] @ table[min(max(j - i, -reach), reach) + reach]

    return every(n, m, one)


def shaw_term(attention: Array, table: Array, reach: int) -> Array:
    """Return `[b, heads, n, head_dim]`, attention times the vectors of values."""
    n, m = attention.shape[-2:]
    out = np.zeros((*attention.shape[:-1], table.shape[1]))
    for row in range(n):
        for j in range(m):
            place = min(max(j - (m - n + row), -reach), reach) + reach
            out[..., row, :] += attention[..., row, j, None] * table[place]
    return out


def sine_code(distance: float, width: int) -> Array:
    """Return Transformer-XL's code, sines first."""
    turns = distance / 10000 ** (np.arange(0, width, 2) / width)
    return np.concatenate([np.sin(turns), np.cos(turns)])


def transformer_xl(
    q: Array,
    k: Array,
    u: Array,
    v: Array,
    w: Array,
    *,
    causal: bool,
    clamp: float = math.inf,
) -> Array:
    """Return `[b, heads, n, m]`, unscaled, for w `[heads, head_dim, width]`; 0 of the code for later keys if causal."""
    n, m = q.shape[-2], k.shape[-2]

    def one(i: int, j: int) -> Array:
        code = w @ sine_code(float(np.clip(i - j, -clamp, clamp)), w.shape[-1])  # [heads, head_dim]
        place = ((q[:, :, i - (m - n)] + v) * code).sum(-1)
        content = (u * k[:, :, j]).sum(-1)
        return content + (0.0 if causal and j > i else place)

    return every(n, m, one)


def deberta_bucket(distance: int, span: int, reach: int) -> int:
    """Return the signed logarithmic bucket of DeBERTa v2."""
    half = span // 2
    if abs(distance) <= half:
        return distance
    far = math.log(abs(distance) / half) / math.log((reach - 1) / half) * (half - 1)
    return int(math.copysign(math.ceil(far) + half, distance))


def deberta(
    q: Array, k: Array, key_rows: Array, query_rows: Array, place: Callable[[int], int]
) -> Array:
    """Return `[b, heads, n, m]`, unscaled, for projected rows `[heads, rows, head_dim]`.

    The published code's rule: one difference for both terms, where the paper turns the second round.
    """
    n, m = q.shape[-2], k.shape[-2]

    def one(i: int, j: int) -> Array:
        query, key = q[:, :, i - (m - n)], k[:, :, j]
        return (query * key_rows[:, place(i - j)]).sum(-1) + (
            key * query_rows[:, place(i - j)]
        ).sum(-1)

    return every(n, m, one)


def cope(q: Array, logits: Array, table: Array) -> Array:
    """Return `[b, heads, n, m]`; keys after the query are counted as nothing."""
    b, heads, n, m = logits.shape
    out = np.zeros(logits.shape)
    for index in np.ndindex(b, heads, n):
        i = m - n + index[2]
        for j in range(m):
            count = sum(1 / (1 + math.exp(-logits[(*index, t)])) for t in range(j, i + 1))
            count = min(count, len(table) - 1)
            low = math.floor(count)
            high = min(low + 1, len(table) - 1)
            share = count - low
            out[(*index, j)] = q[index] @ ((1 - share) * table[low] + share * table[high])
    return out


def dape(logits: Array, bias: Array, layers: list[tuple[Array, Array]], *, causal: bool) -> Array:
    """Return `B + f(A, B)`, one pair after the other; weights `[out, in, kernel]` along keys."""
    b, _, n, m = logits.shape
    out = np.zeros(logits.shape)
    for sample in range(b):
        x = np.concatenate([logits[sample], bias])  # [2 heads, n, m]
        if causal:
            for row in range(n):
                x[:, row, m - n + row + 1 :] = 0.0
        for step, (weight, shift) in enumerate(layers):
            kernel = weight.shape[-1]
            y = np.zeros((weight.shape[0], n, m))
            for row in range(n):
                for j in range(m):
                    y[:, row, j] = shift
                    for tap in range(kernel):
                        at = j + tap - kernel // 2
                        if 0 <= at < m:
                            y[:, row, j] += weight[:, :, tap] @ x[:, row, at]
            x = np.where(y > 0, y, 0.01 * y) if step == 0 else y
        out[sample] = bias + x
    return out


def tupe(
    rows_q: Array, rows_k: Array, n: int, *, prefix: int, head_dim: int, relative: Array | None
) -> Array:
    """Return `[heads, prefix + n, prefix + n]` from projected rows `[heads, 2 + n, head_dim]`."""
    heads, count = rows_q.shape[0], prefix + n
    out = np.zeros((heads, count, count))
    for i in range(count):
        for j in range(count):
            if i < prefix:  # the row of a class token wins over its column
                value, bucket = (rows_q[:, 0] * rows_k[:, 0]).sum(-1), 16
            elif j < prefix:
                value, bucket = (rows_q[:, 1] * rows_k[:, 1]).sum(-1), 32
            else:
                value = (rows_q[:, 2 + i - prefix] * rows_k[:, 2 + j - prefix]).sum(-1)
                bucket = _both_ways(j - i)
            out[:, i, j] = value / math.sqrt(2 * head_dim)
            if relative is not None:
                out[:, i, j] += relative[bucket]
    return out


def _both_ways(offset: int) -> int:
    """Return T5's bucket of key minus query for 32 buckets and 128."""
    far = abs(offset)
    if far >= 8:
        far = min(8 + int(math.log(far / 8) / math.log(16) * 8), 15)
    return far + (16 if offset > 0 else 0)
