"""Units: the grids of a prompt and where they start, read from a stream or from token tensors.

Both readings give the same arrays, so one formula (`ids.py`) places both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from visionpos.errors import PositionError
from visionpos.vlm.rules import Array, Clock, Rule
from visionpos.vlm.stream import IMAGE, MODALITY_NAMES, VIDEO, Cells, Marker, Run, TokenStream


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Units:
    """Grids laid into rows of tokens; padding is not counted.

    Args:
        row_lengths: `[b]` tokens of each row.
        row: `[units]` row of each unit.
        start: `[units]` place of its first token, counted through all rows.
        shape: `[units, 3]` frames, height, width, with the row-end column where the rule has one.
        clocks: seconds of each unit, where known.
    """

    row_lengths: Array
    row: Array
    start: Array
    shape: Array
    clocks: tuple[Clock | None, ...]

    @property
    def sizes(self) -> Array:
        """Return `[units]` the number of cells of each."""
        sizes: Array = self.shape.prod(1)
        return sizes

    @property
    def first_of_row(self) -> Array:
        """Return `[units]` which unit is the first in the same row."""
        return np.searchsorted(self.row, self.row)


def ranges(lengths: Array) -> tuple[Array, Array]:
    """Return, for stretches laid end to end, which stretch each place belongs to and its place inside it.

    Example:
        >>> [part.tolist() for part in ranges(np.array([2, 3]))]
        [[0, 0, 1, 1, 1], [0, 1, 0, 1, 2]]
    """
    stretch = np.repeat(np.arange(len(lengths)), lengths)
    return stretch, np.arange(len(stretch)) - (np.cumsum(lengths) - lengths)[stretch]


def units_of_stream(stream: TokenStream, rule: Rule) -> Units:
    """Return the units of a stream: one row.

    Args:
        stream: from `family.stream`.
        rule: says whether clips are blocks or frames, and whether row ends are cells.

    Raises:
        PositionError: if the rule counts seconds and a clip has none.
    """
    column = rule.row_ends == "column"

    def raster(placed: tuple[int, Run]) -> tuple[int, int, int] | None:
        """Return what the runs of one unit have in common; None outside units."""
        start, run = placed
        if isinstance(run, Cells):
            return run.segment, run.view, -1 if column else start
        if column and isinstance(run, Marker) and run.edge == "end" and run.view >= 0:
            return run.segment, run.view, -1
        return None

    starts, shapes, clocks = [], [], []
    for key, placed in groupby(stream.placed(), raster):
        if key is None:
            continue
        group = list(placed)
        cells = [run for _, run in group if isinstance(run, Cells)]
        shape, clock = _shape(cells, column=column), _clock(cells)
        if rule.counts_seconds and shape[0] > 1 and clock is None:
            raise PositionError(
                f"Video in segment {key[0]} has no seconds; this position rule counts them. "
                "Pass Video(size_hw, seconds=[time of every sampled frame])."
            )
        starts.append(group[0][0])
        shapes.append(shape)
        clocks.append(clock)
    units = Units(
        row_lengths=np.array([stream.length]),
        row=np.zeros(len(starts), dtype=np.int64),
        start=np.array(starts, dtype=np.int64),
        shape=np.array(shapes, dtype=np.int64).reshape(-1, 3),
        clocks=tuple(clocks),
    )
    return _by_frame(units) if rule.video == "frames" else units


def _shape(cells: Sequence[Cells], *, column: bool) -> tuple[int, int, int]:
    """Return (frames, height, width) of the rows of one raster."""
    grid, count = cells[0].grid, sum(run.count for run in cells)
    height = min(count // grid.width, grid.height)
    return count // (height * grid.width), height, grid.width + column


def _clock(cells: Sequence[Cells]) -> Clock | None:
    """Return the seconds from a unit's first time step to each of its time steps."""
    steps = [run.elapsed for run in cells if run.row == 0]
    if not steps or any(step is None for step in steps):
        return None
    times = [time for step in steps if step is not None for time in step]
    return tuple(time - times[0] for time in times)


def _by_frame(units: Units) -> Units:
    """Return the units with every frame of a clip a unit of its own."""
    unit, frame = ranges(units.shape[:, 0])
    shape = units.shape[unit]
    shape[:, 0] = 1
    return Units(
        row_lengths=units.row_lengths,
        row=units.row[unit],
        start=units.start[unit] + frame * shape[:, 1] * shape[:, 2],
        shape=shape,
        clocks=(None,) * len(unit),
    )


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
    row_lengths = keep.sum(1)
    flat = types[keep]
    row_of = np.repeat(np.arange(len(row_lengths)), row_lengths)
    new_run = np.ones(len(flat), dtype=bool)
    new_run[1:] = (flat[1:] != flat[:-1]) | (row_of[1:] != row_of[:-1])
    run_start = np.flatnonzero(new_run)
    run_length = np.diff(np.append(run_start, len(flat)))
    rows, starts, shapes = [], [], []
    timed: list[Clock | None] = []
    for kind in (IMAGE, VIDEO):
        shape, item = grids[kind] + [0, 0, rule.row_ends == "column"], np.arange(len(grids[kind]))
        if rule.video == "frames":
            item = np.repeat(item, shape[:, 0])
            shape = shape[item]
            shape[:, 0] = 1
        runs = flat[run_start] == kind
        lay = _Runs(kind, run_start[runs], run_length[runs], row_of[run_start[runs]])
        row, start = lay.fill(shape, item)
        rows.append(row)
        starts.append(start)
        shapes.append(shape)
        timed += list(clocks) if kind == VIDEO and clocks else [None] * len(shape)
    order = np.argsort(np.concatenate(starts), kind="stable")
    return Units(
        row_lengths=row_lengths,
        row=np.concatenate(rows)[order],
        start=np.concatenate(starts)[order],
        shape=np.concatenate(shapes)[order],
        clocks=tuple(timed[unit] for unit in order),
    )


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
