"""Slow packing: rows as lists of tokens, one image after another."""

from __future__ import annotations


def rows_of(
    lengths: list[int],
    budget: int,
    *,
    best: bool = False,
    largest_first: bool = False,
    most: int | None = None,
) -> list[list[int]]:
    """Return the images of every row: the first row with room, or the one that it would leave fullest."""
    rows: list[list[int]] = []
    order = list(range(len(lengths)))
    if largest_first:
        order.sort(key=lambda image: (-lengths[image], image))
    for image in order:
        room = [
            (budget - sum(lengths[one] for one in row) - lengths[image], number)
            for number, row in enumerate(rows)
            if most is None or len(row) < most
        ]
        room = [(left, number) for left, number in room if left >= 0]
        if not room:
            rows.append([image])
            continue
        number = min(room)[1] if best else min(number for _, number in room)
        rows[number].append(image)
    return rows


def tokens_of(
    rows: list[list[int]], kept: list[list[int]], budget: int, prefix: int
) -> list[list[tuple[int, int]]]:
    """Return (image, cell) of every place: cell -1 for prefix tokens, (-1, -1) for padding."""
    laid = []
    for row in rows:
        places = [(image, cell) for image in row for cell in [-1] * prefix + sorted(kept[image])]
        laid.append(places + [(-1, -1)] * (budget - len(places)))
    return laid
