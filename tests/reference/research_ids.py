"""Position ids of research rules by loops, one cell at a time; from facts/vision_pe.md 4 and the papers' formulas.

A part is a number of text tokens, or a grid (frames, rows, columns). Nothing here is vectorised or shared.
"""

from fractions import Fraction
from math import atan2, ceil, cos, pi, sin, sqrt

Part = int | tuple[int, int, int]
Ids = list[list[float]]


def placed(parts: list[Part], kind: str) -> tuple[Ids, float]:
    """Return ids [3][n] and the next position.

    kind: "videorope", "hope" (1.5 a frame), "reset", "scaled" (4, 8, 8), "circle" (radius 10, alpha 0.5).
    """
    ids: Ids = [[], [], []]
    position: float = 0
    for part in parts:
        if isinstance(part, int):
            for _ in range(part):
                for axis in ids:
                    axis.append(position)
                position += 1
            continue
        cells = [(f, i, j) for f in range(part[0]) for i in range(part[1]) for j in range(part[2])]
        where = [cell_place(kind, position, cell, part) for cell in cells]
        for one in where:
            for axis, value in zip(ids, one, strict=True):
                axis.append(value)
        position = after(kind, position, part, where)
    return ids, position


def cell_place(
    kind: str, s: float, cell: tuple[int, int, int], grid: tuple[int, int, int]
) -> tuple[float, float, float]:
    frame, row, col = cell
    if kind in ("videorope", "hope"):
        time = s + frame * (2 if kind == "videorope" else 1.5)
        return time, time + row - (grid[1] - 1) // 2, time + col - (grid[2] - 1) // 2
    if kind == "reset":
        return s + frame, row, col
    if kind == "scaled":
        return s + 4 * frame, s + 8 * row, s + 8 * col
    x, y, t = circle(row, col, grid[1], grid[2])
    return s + frame + t, s + frame + y, s + frame + x


def after(
    kind: str, s: float, grid: tuple[int, int, int], where: list[tuple[float, float, float]]
) -> float:
    if kind in ("videorope", "hope"):
        return max(one[0] for one in where) + 1
    if kind == "reset":
        return s + max(grid)
    return max(max(one) for one in where) + 1


def circle(row: int, col: int, height: int, width: int) -> tuple[float, float, float]:
    """x, y, t: a circle of radius 10 in the plane across (1, 1, 1), half seen angle, half raster number."""
    seen = [
        atan2(i - (height - 1) / 2, j - (width - 1) / 2)
        for i in range(height)
        for j in range(width)
    ]
    number = row * width + col
    low, high = min(seen), max(seen)
    angle = (seen[number] - low) / (high - low) * 2 * pi if high > low else seen[number]
    turn = 0.5 * angle + 0.5 * number / (height * width) * 2 * pi
    a, b = 10 * cos(turn), 10 * sin(turn)
    return -a / sqrt(2) - b / sqrt(6), a / sqrt(2) - b / sqrt(6), 2 * b / sqrt(6)


def v2pe(parts: list[int | tuple[int, Fraction]], *, whole: bool) -> list[Fraction]:
    """Return ids [n]; a part is a number of text tokens, or (visual tokens, increment).

    whole: text goes on at the next whole number after the last visual token + 1 (the code), or at last + 1 (the paper).
    """
    out: list[Fraction] = []
    last = Fraction(-1)
    for part in parts:
        count, step = part if isinstance(part, tuple) else (part, Fraction(1))
        for _ in range(count):
            last += step
            out.append(last)
        if isinstance(part, tuple) and whole:
            last = Fraction(ceil(last))
    return out
