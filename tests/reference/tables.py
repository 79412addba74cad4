"""Learned tables put together of parts, cell by cell: facts/vision_pe.md 1C, 1H and 2 (NaViT, Hiera, SAM 2)."""

import numpy as np

from tests.reference.resampling import SOURCES, weights


def line(table: np.ndarray, cells: int, source_name: str) -> np.ndarray:
    """A 1-D table `[l, d]` on another number of cells."""
    return weights(len(table), cells, **SOURCES[source_name]) @ table


def joined(
    rows: np.ndarray, columns: np.ndarray, how: str, order: tuple[int, int] = (0, 1)
) -> np.ndarray:
    """`[h * w, d]` of the vectors of rows and columns."""
    out = []
    for y in rows:
        for x in columns:
            if how == "add":
                out.append(y + x)
            elif how == "product":
                out.append(y * x)
            else:
                out.append(np.concatenate([(y, x)[axis] for axis in order]))
    return np.array(out)


def window(
    whole: np.ndarray, window_table: np.ndarray, hw: tuple[int, int], source_name: str
) -> np.ndarray:
    """`[h * w, d]`: the global table `[gh, gw, d]` stretched, plus the window table `[wh, ww, d]` again and again."""
    rows = weights(whole.shape[0], hw[0], **SOURCES[source_name])
    columns = weights(whole.shape[1], hw[1], **SOURCES[source_name])
    out = []
    for y in range(hw[0]):
        for x in range(hw[1]):
            cell = window_table[y % window_table.shape[0], x % window_table.shape[1]].copy()
            for i in range(whole.shape[0]):
                for j in range(whole.shape[1]):
                    cell += rows[y, i] * columns[x, j] * whole[i, j]
            out.append(cell)
    return np.array(out)


def clip(spatial: np.ndarray, temporal: np.ndarray) -> np.ndarray:
    """`[t * n, d]`: every frame has the spatial table plus its own vector."""
    return np.array([cell + frame for frame in temporal for cell in spatial])
