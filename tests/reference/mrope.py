"""M-RoPE ids by loops, one token at a time, in whole numbers and fractions. Slow on purpose.

Written from the vendor's rule: QwenLM/Qwen3-VL qwen-vl-finetune/qwenvl/data/rope2d.py, as formulas in facts/mrope.md 2:
text moves all axes by one, a vision token stands at (start + time, start + row, start + col) of its merged grid, and
what follows stands at the maximum over all axes + 1.
"""

from fractions import Fraction
from math import floor


def vendor_ids(
    types: list[list[int]],
    mask: list[list[int]],
    images: list[tuple[int, int, int]],
    videos: list[tuple[int, int, int]],
    *,
    merge: int,
    per_frame: bool,
    ids_per_step: list[Fraction] | None = None,
    pad_id: int = 1,
) -> tuple[list[list[list[int]]], list[int], list[int]]:
    """Return ids [3][b][n], the next position of each row, and the delta of each row.

    types: 0 text, 1 image, 2 video. images and videos: (t, h, w) in patches, in reading order over the batch.
    per_frame: every frame of a video is a span of its own. ids_per_step: of each video; 1 if None.
    The delta is taken over the padded length, as the vendor does.
    """
    steps = ids_per_step or [Fraction(1)] * len(videos)
    grids = {1: [(grid, Fraction(1)) for grid in images], 2: []}
    for (frames, height, width), step in zip(videos, steps, strict=True):
        if per_frame:
            grids[2] += [((1, height, width), Fraction(1))] * frames
        else:
            grids[2].append(((frames, height, width), step))
    ids = [[[pad_id] * len(row) for row in types] for _ in range(3)]
    next_positions, deltas = [], []
    for row, row_types in enumerate(types):
        places = [place for place, real in enumerate(mask[row]) if real]
        position, done = 0, 0
        while done < len(places):
            kind = row_types[places[done]]
            if kind == 0:
                for axis in range(3):
                    ids[axis][row][places[done]] = position
                position, done = position + 1, done + 1
                continue
            (frames, height, width), step = grids[kind].pop(0)
            largest = position
            for frame in range(frames):
                for y in range(height // merge):
                    for x in range(width // merge):
                        where = (position + floor(frame * step), position + y, position + x)
                        for axis in range(3):
                            ids[axis][row][places[done]] = where[axis]
                        assert row_types[places[done]] == kind
                        largest = max(largest, *where)
                        done += 1
            position = largest + 1
        next_positions.append(position)
        deltas.append(position - len(row_types))
    assert not grids[1]
    assert not grids[2]
    return ids, next_positions, deltas
