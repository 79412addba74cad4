"""Turns of whole blocks of channels, float64: LieRE (arXiv 2406.10322), ComRoPE (2506.03737), STRING (2502.02562)."""

import numpy as np


def expm(matrix: np.ndarray) -> np.ndarray:
    """Return the matrix exponential by its power series on a halved matrix, squared back."""
    halvings = max(0, int(np.ceil(np.log2(max(np.abs(matrix).sum(1).max(), 1e-12)))) + 4)
    small, term, out = matrix / 2**halvings, np.eye(len(matrix)), np.eye(len(matrix))
    for k in range(1, 20):
        term = term @ small / k
        out = out + term
    for _ in range(halvings):
        out = out @ out
    return out


def skew_of(entries: np.ndarray, size: int) -> np.ndarray:
    """Return the skew-symmetric matrix with these entries above its diagonal, row by row."""
    out, k = np.zeros((size, size)), 0
    for i in range(size):
        for j in range(i + 1, size):
            out[i, j], out[j, i] = entries[k], -entries[k]
            k += 1
    return out


def block_diagonal(blocks: list[np.ndarray]) -> np.ndarray:
    """Return one matrix with these blocks on its diagonal."""
    side = sum(len(block) for block in blocks)
    out, at = np.zeros((side, side)), 0
    for block in blocks:
        out[at : at + len(block), at : at + len(block)] = block
        at += len(block)
    return out


def liere(point: np.ndarray, entries: np.ndarray, size: int) -> np.ndarray:
    """Return the rotation of one token and head: entries `[axes, blocks, size (size - 1) / 2]`."""
    axes, blocks, _ = entries.shape
    return block_diagonal(
        [
            expm(sum(point[a] * skew_of(entries[a, j], size) for a in range(axes)))
            for j in range(blocks)
        ]
    )


def comrope(
    point: np.ndarray, entries: np.ndarray, size: int, multiplier: np.ndarray | None = None
) -> np.ndarray:
    """Return the rotation of one token and head: entries `[blocks, size (size - 1) / 2]`.

    AP (no multiplier): axis a alone moves the blocks a, a + axes, ...; LD: multiplier `[axes, blocks]`.
    """
    axes = len(point)
    out = []
    for j in range(len(entries)):
        base = skew_of(entries[j], size)
        reach = 0.0
        for a in range(axes):
            if multiplier is None:
                reach += point[a] if j % axes == a else 0.0
            else:
                reach += point[a] * multiplier[a, j]
        out.append(expm(reach * base))
    return block_diagonal(out)


def cayley_basis(entries: np.ndarray, size: int) -> np.ndarray:
    """Return (1 - S)(1 + S)^-1."""
    s = skew_of(entries, size)
    return (np.eye(size) - s) @ np.linalg.inv(np.eye(size) + s)


def circulant(row: np.ndarray, size: int) -> np.ndarray:
    """Return the antisymmetric circulant matrix whose first row is 0, row[0], row[1], ..., -row[1], -row[0]."""
    first = np.zeros(size)
    for k, value in enumerate(row, start=1):
        first[k] += value
        first[size - k] -= value
    return np.array([[first[(j - i) % size] for j in range(size)] for i in range(size)])


def circulant_string(point: np.ndarray, rows: np.ndarray, size: int) -> np.ndarray:
    """Return the rotation of one token and head: rows `[axes, blocks, (size - 1) // 2]`, dense exponentials."""
    axes, blocks, _ = rows.shape
    return block_diagonal(
        [
            expm(sum(point[a] * circulant(rows[a, j], size) for a in range(axes)))
            for j in range(blocks)
        ]
    )
