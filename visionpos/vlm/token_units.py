"""Units of token tensors: runs of placeholders are filled with grids, in reading order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import groupby

import numpy as np

from visionpos.errors import PositionError
from visionpos.vlm.clocks import Array, Clock
from visionpos.vlm.inputs import check_cells, check_types
from visionpos.vlm.padding import unpadded
from visionpos.vlm.pieces import AUDIO, IMAGE, MODALITY_NAMES, TEXT, VIDEO, Cells
from visionpos.vlm.rules import Rule
from visionpos.vlm.stream import TokenStream
from visionpos.vlm.units import Units, clock_of, shape_of
from visionpos.vlm.woven import Threads, Woven, unwoven


def units_of_tokens(
    types: Array,
    keep: Array | None,
    grids: dict[int, Array],
    clocks: Sequence[Clock],
    rule: Rule,
) -> Units:
    """Return the units of token tensors: runs of equal types are filled with grids, in order.

    Args:
        types: `[b, n]` 0 text, 1 image, 2 video, 3 audio.
        keep: `[b, n]` bool, False for padding; None if nothing is padded.
        grids: modality -> `[items, 3]` frames, height, width in tokens, in reading order over the batch.
        clocks: seconds of one grid step of each video; empty if the rule counts none.
        rule: says whether clips are blocks or frames, and whether row ends are cells.

    Raises:
        PositionError: if a run of placeholders is not the sum of its grids, or grids are left over.
    """
    line, threads = unpadded(types, keep), None
    row_lengths = (
        np.full(len(types), types.shape[1]) if keep is None else np.count_nonzero(keep, axis=1)
    )
    runs, found = _runs(line, row_lengths), []
    check_types(runs.kinds, types, rule)
    for kind, table in grids.items():
        check_cells(table, types.size, MODALITY_NAMES[kind])
    lengths = row_lengths
    if rule.audio_in_video is not None:
        line, lengths, threads = unwoven(line, lengths, rule.audio_in_video)
        runs = _runs(line, lengths)
    column = int(rule.row_ends == "column")
    if rule.edge_cells:
        cells = (grids[IMAGE] + [0, 0, column]).prod(1)
        line = _without_edges(line, runs.of(IMAGE), cells, rule.edge_cells)
        runs = _runs(line, lengths)
    seen = set(runs.kinds.tolist())
    # Where ids only count, placeholders of newlines and queries are in no grid.
    for kind in () if rule.is_sequential else (IMAGE, VIDEO):
        if len(grids[kind]) or kind in seen:
            mine = runs.of(kind)
            shape, item = _shapes(grids[kind], column, rule)
            found.append((*mine.fill(shape, item), shape, 2 * item + (kind == VIDEO)))
    if not found:
        none = np.zeros(0, dtype=np.int64)
        found = [(none, none, none.reshape(0, 3), none)]
    row, start, shape, label = found[0]
    if len(found) > 1:
        start = np.concatenate((start, found[1][1]))
        order = np.argsort(start, kind="stable")
        start = start[order]
        row, shape, label = (
            np.concatenate((found[0][at], found[1][at]))[order] for at in (0, 2, 3)
        )
    units = Units(
        row_lengths=row_lengths,
        row=row,
        start=start,
        shape=shape,
        clocks=tuple(clocks[one // 2] if one % 2 else None for one in label) if clocks else (),
        label=label,
    )
    return units if threads is None else _rewoven(units, threads)


def _shapes(grids: Array, column: int, rule: Rule) -> tuple[Array, Array]:
    """Return the shape of every unit of one kind, `[units, 3]`, and which grid each is of, `[units]`."""
    item = np.arange(len(grids))
    if column:
        grids = grids + np.array([0, 0, column])
    if rule.video == "frames":
        item = np.repeat(item, grids[:, 0])
        grids = grids[item]
        grids[:, 0] = 1
    return grids, item


def units_of_woven(stream: TokenStream, rule: Rule) -> Units:
    """Return the units of a stream in which sound stands between the cells of clips: one row."""
    grids: dict[int, list[tuple[int, int, int]]] = {IMAGE: [], VIDEO: []}
    clocks: list[Clock] = []
    seen = [run for run in stream.runs if isinstance(run, Cells) and run.modality != AUDIO]
    for (kind, segment, _), group in groupby(
        seen, lambda run: (run.modality, run.segment, run.view)
    ):
        cells = list(group)
        grids[kind].append(shape_of(cells, column=False))
        if kind == VIDEO and rule.counts_seconds:
            clocks.append(clock_of(cells, rule, segment) or Fraction(1))
    types = stream.modality.numpy()[None]
    tables = {kind: np.array(one, dtype=np.int64).reshape(-1, 3) for kind, one in grids.items()}
    return units_of_tokens(types, None, tables, clocks, rule)


def _runs(line: Array, lengths: Array) -> _Runs:
    """Return the runs of equal types in a line of tokens, which never go on into the next row."""
    begins = np.empty(len(line), dtype=bool)
    np.not_equal(line[1:], line[:-1], out=begins[1:])
    ends = lengths.cumsum()
    begins[(ends - lengths)[lengths > 0]] = True
    start = begins.nonzero()[0]
    length = np.empty_like(start)
    length[:-1] = start[1:]
    length[-1:] = len(line)
    length -= start
    return _Runs(None, line[start], start, length, ends.searchsorted(start, side="right"))


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
    """Runs of equal types through all rows.

    Args:
        kind: the type of all of them, or None.
        kinds: `[runs]` type.
        start: `[runs]` first token.
        length: `[runs]` tokens.
        row: `[runs]` row.
    """

    kind: int | None
    kinds: Array
    start: Array
    length: Array
    row: Array

    def of(self, kind: int) -> _Runs:
        """Return the runs of one type."""
        mine = (self.kinds == kind).nonzero()[0]
        return _Runs(kind, self.kinds[mine], self.start[mine], self.length[mine], self.row[mine])

    def fill(self, shape: Array, item: Array) -> tuple[Array, Array]:
        """Return row and start of each unit, laid into the runs in order.

        Two images with nothing between them are one run; it is shared out by their sizes.
        """
        cells = shape.prod(1)
        if len(cells) == len(self.length) and (cells == self.length).all():
            return self.row, self.start
        filled = np.cumsum(cells)  # cells up to and with each unit
        runs = np.cumsum(self.length)  # placeholders up to and with each run
        place = np.searchsorted(filled, runs)  # the unit that ends where the run ends, if they fit
        fits = (place < len(filled)) & (np.append(filled, -1)[place] == runs)
        if not fits.all():
            self._refuse_run(int(np.argmin(fits)), filled, runs, shape, item)
        if len(filled) and (not len(runs) or filled[-1] > runs[-1]):
            self._refuse_grids(item, filled, runs)
        first = filled - cells
        run = np.searchsorted(runs, first, side="right")
        return self.row[run], self.start[run] + first - (runs - self.length)[run]

    @property
    def name(self) -> str:
        """Return what they are runs of."""
        return MODALITY_NAMES[self.kind or TEXT]

    def _refuse_run(self, run: int, filled: Array, runs: Array, shape: Array, item: Array) -> None:
        name = self.name
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
        name = self.name
        unit = int(np.searchsorted(filled, runs[-1] if len(runs) else 0, side="right"))
        raise PositionError(
            f"{name}_grids holds {int(item[-1]) + 1} grids and modality has tokens for {int(item[unit])}; all must be "
            f"used. Drop the grids of {name}s that the tokens lack, or look for truncated placeholders."
        )
