"""Slow float64 oracles of 1-D id schemes, written from their papers and public code, one loop a line of theirs."""

import math


def turned(x, angles):
    """Return one head vector with pairs (i, i + half) turned by angles."""
    half = len(x) // 2
    out = list(x)
    for i, angle in enumerate(angles):
        a, b = x[i], x[i + half]
        out[i] = a * math.cos(angle) - b * math.sin(angle)
        out[i + half] = b * math.cos(angle) + a * math.sin(angle)
    return out


def self_extend_distance(q, k, group, window, *, fraction=False):
    """Return the distance at which SelfExtend shows key k to query q."""
    if q - k < window:
        return q - k
    taken = window / group if fraction else window // group
    return q // group + window - taken - k // group


def self_extend(q, k, v, ids, group, window, inv_freq, allowed, *, fraction=False):
    """Return the attention of one head: lists q [n][d], k [m][d], v [m][e], ids [m], allowed(i, j) over keys."""
    n, m, first = len(q), len(k), len(k) - len(q)
    out = []
    for i in range(n):
        place, scores = first + i, {}
        for j in range(m):
            if j > place or not allowed(i, j):
                continue
            away = self_extend_distance(ids[place], ids[j], group, window, fraction=fraction)
            moved = turned(q[i], [away * f for f in inv_freq])
            scores[j] = sum(a * b for a, b in zip(moved, k[j], strict=True)) / math.sqrt(len(q[i]))
        top = max(scores.values(), default=0.0)
        weights = {j: math.exp(s - top) for j, s in scores.items()}
        total = sum(weights.values()) or 1.0
        out.append([sum(w * v[j][c] for j, w in weights.items()) / total for c in range(len(v[0]))])
    return out


def dype(dim, theta, trained, target, time):
    """Return DyPE's ladder of one axis, guyyariv/DyPE flux/transformer_flux.py method "yarn", plane by plane."""
    scale, kappa = target / trained, time**2

    def plane(turns):
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    def share(k, fast, slow):
        low = max(math.floor(plane(fast)), 0)
        high = min(math.ceil(plane(slow)), dim - 1, dim // 2)
        ramp = (k - low) / (high - low if high != low else 0.001)
        return 1 - min(max(ramp, 0.0), 1.0)

    out = []
    for k in range(dim // 2):
        own = theta ** (-2 * k / dim)
        raised = (theta * scale ** (dim / (dim - 2))) ** (-2 * k / dim)
        mid = share(k, 1.25 * kappa, 0.75 * kappa)
        blend = own / scale * (1 - mid) + raised * mid
        top = share(k, 16 * kappa, 2 * kappa)
        out.append(blend * (1 - top) + own * top)
    return out


def masks(documents, window, chunk):
    """Return who sees whom in a packed row of a layer with a window or chunk, by loops."""
    n = len(documents)
    out = [[False] * n for _ in range(n)]
    for q in range(n):
        start = q
        while start and documents[start - 1] == documents[q]:
            start -= 1
        for k in range(start, q + 1):
            near = window is None or q - k < window
            same = chunk is None or (q - start) // chunk == (k - start) // chunk
            out[q][k] = near and same
    return out
