"""Units of token tensors: runs of placeholders are filled with grids, in reading order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from visionpos.errors import PositionError
from visionpos.vlm.clocks import Array, Clock
from visionpos.vlm.pieces import IMAGE, MODALITY_NAMES, TEXT, VIDEO
from visionpos.vlm.rules import Rule
from visionpos.vlm.units import Units
from visionpos.vlm.woven import Threads, Woven, unwoven


def units_of_tokens(
    types: Array,
    keep: Array,
    grids: dict[int, Array],
    clocks: Sequence[Clock],
    rule: Rule,
) -> Units:
    """Return the units of token tensors: runs of equal types are filled with grids, in order.

    Args:
        types: `[b, n]` 0 text, 1 image, 2 video, 3 audio.
        keep: `[b, n]` bool, False for padding.
        grids: modality -> `[items, 3]` frames, height, width in tokens, in reading order over the batch.
        clocks: seconds of one grid step of each video; empty if the rule counts none.
        rule: says whether clips are blocks or frames, and whether row ends are cells.

    Raises:
        PositionError: if a run of placeholders is not the sum of its grids, or grids are left over.
    """
    line, threads = (types.ravel() if keep.all() else types[keep]), None
    row_lengths = lengths = np.count_nonzero(keep, axis=1)
    if rule.audio_in_video is not None:
        line, lengths, threads = unwoven(line, lengths, rule.audio_in_video)
    column = np.array([0, 0, rule.row_ends == "column"], dtype=np.int64)
    if rule.edge_cells:
        cells = (grids[IMAGE] + column).prod(1)
        line = _without_edges(line, _runs(line, lengths)[IMAGE], cells, rule.edge_cells)
    runs = _runs(line, lengths)
    rows, starts, shapes, media = [], [], [], []
    timed: list[Clock | None] = []
    for kind in (IMAGE, VIDEO):
        shape, item = grids[kind] + column, np.arange(len(grids[kind]))
        if rule.video == "frames":
            item = np.repeat(item, shape[:, 0])
            shape = shape[item]
            shape[:, 0] = 1
        row, start = runs[kind].fill(shape, item)
        rows.append(row)
        starts.append(start)
        shapes.append(shape)
        media.append(2 * item + (kind == VIDEO))
        timed += list(clocks) if kind == VIDEO and clocks else [None] * len(shape)
    order = np.argsort(np.concatenate(starts), kind="stable")
    medium = np.concatenate(media)[order]
    units = Units(
        row_lengths=row_lengths,
        row=np.concatenate(rows)[order],
        start=np.concatenate(starts)[order],
        shape=np.concatenate(shapes)[order],
        clocks=tuple(timed[unit] for unit in order),
        medium=np.cumsum(np.diff(medium, prepend=medium[:1]) != 0),
    )
    return units if threads is None else _rewoven(units, threads)


def _runs(line: Array, lengths: Array) -> dict[int, _Runs]:
    """Return the runs of images and of clips in a line of token types, which never go on into the next row."""
    begins = np.empty(len(line), dtype=bool)
    np.not_equal(line[1:], line[:-1], out=begins[1:])
    ends = np.cumsum(lengths)
    begins[(ends - lengths)[lengths > 0]] = True
    start = np.flatnonzero(begins)
    length = np.diff(np.append(start, len(line)))
    kinds = line[start]
    row = np.searchsorted(ends, start, side="right")
    return {
        kind: _Runs(kind, *(part[kinds == kind] for part in (start, length, row)))
        for kind in (IMAGE, VIDEO)
    }


def _without_edges(line: Array, runs: _Runs, cells: Array, edge: int) -> Array:
    """Return types in which the outermost placeholders of an image are text, where its run holds them."""
    if len(runs.length) != len(cells):
        return line
    line = line.copy()
    wide = runs.length == cells + 2 * edge
    for at in range(edge):
        line[runs.start[wide] + at] = TEXT
        line[(runs.start + runs.length)[wide] - 1 - at] = TEXT
    return line


def _rewoven(units: Units, threads: Threads) -> Units:
    """Return units of a line without woven sound as units of the whole line."""
    woven: dict[int, Woven] = {}
    start = threads.kept[units.start]
    for unit, first in enumerate(units.start.tolist()):
        if first not in threads.clips:
            continue
        start[unit], woven[unit] = threads.clips[first]
        cells, found = int(units.sizes[unit]), len(woven[unit].cells)
        if cells != found:
            raise PositionError(
                f"row {units.row[unit]}: a clip with sound has {found} cells in modality and its grid {cells}; the two "
                "must be equal, one clip a stretch. Look for truncated placeholders, or clips that touch."
            )
    return replace(units, start=start, woven=woven)


@dataclass(frozen=True, slots=True, eq=False)
class _Runs:
    """The runs of one kind of placeholder, through all rows."""

    kind: int
    start: Array
    length: Array
    row: Array

    def fill(self, shape: Array, item: Array) -> tuple[Array, Array]:
        """Return row and start of each unit, laid into the runs in order.

        Two images with nothing between them are one run; it is shared out by their sizes.
        """
        filled = np.cumsum(shape.prod(1))  # cells up to and with each unit
        runs = np.cumsum(self.length)  # placeholders up to and with each run
        place = np.searchsorted(filled, runs)  # the unit that ends where the run ends, if they fit
        fits = (place < len(filled)) & (np.append(filled, -1)[place] == runs)
        if not fits.all():
            self._refuse_run(int(np.argmin(fits)), filled, runs, shape, item)
        if len(filled) and (not len(runs) or filled[-1] > runs[-1]):
            self._refuse_grids(item, filled, runs)
        first = filled - shape.prod(1)
        run = np.searchsorted(runs, first, side="right")
        return self.row[run], self.start[run] + first - (runs - self.length)[run]

    def _refuse_run(self, run: int, filled: Array, runs: Array, shape: Array, item: Array) -> None:
        name = MODALITY_NAMES[self.kind]
        unit = int(np.searchsorted(filled, runs[run]))  # the first that reaches the end of the run
        found = int(runs[run]) - (int(filled[unit - 1]) if unit else 0)
        if unit == len(filled):
            raise PositionError(
                f"row {self.row[run]}: {name} {len(set(item))} has {found} tokens in modality and no grid; every one "
                f"needs a grid. Pass all {name}_grids in reading order over the batch; type generated placeholders 0."
            )
        size = tuple(int(side) for side in shape[unit])
        raise PositionError(
            f"row {self.row[run]}: {name} {item[unit]} has {found} tokens in modality and its grid {size} (t, y, x) "
            f"has {shape[unit].prod()} cells; the two must be equal. Look for truncated placeholders, or grids in "
            "another order than the tokens."
        )

    def _refuse_grids(self, item: Array, filled: Array, runs: Array) -> None:
        name = MODALITY_NAMES[self.kind]
        unit = int(np.searchsorted(filled, runs[-1] if len(runs) else 0, side="right"))
        raise PositionError(
            f"{name}_grids holds {int(item[-1]) + 1} grids and modality has tokens for {int(item[unit])}; all must be "
            f"used. Drop the grids of {name}s that the tokens lack, or look for truncated placeholders."
        )
