"""Units: the grids of a prompt and where they start, here as read from a stream.

`token_units.py` reads the same arrays from token tensors, so one formula (`ids.py`) places both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from visionpos.errors import PositionError
from visionpos.vlm.clocks import Array, Clock
from visionpos.vlm.instants import checked_gaps
from visionpos.vlm.rules import Rule
from visionpos.vlm.stream import AUDIO, Cells, Marker, Run, TokenStream
from visionpos.vlm.woven import Woven


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Units:
    """Grids laid into rows of tokens; padding is not counted.

    Args:
        row_lengths: `[b]` tokens of each row.
        row: `[units]` row of each unit.
        start: `[units]` place of its first token, counted through all rows.
        shape: `[units, 3]` frames, height, width, with the row-end column where the rule has one.
        clocks: seconds of each unit, where known.
        label: `[units]` differs from one unit to the next where they belong to two images or clips.
        woven: the tokens of units whose cells do not stand side by side, because sound is woven between them.
    """

    row_lengths: Array
    row: Array
    start: Array
    shape: Array
    clocks: tuple[Clock | None, ...]
    label: Array
    woven: Mapping[int, Woven] = field(default_factory=dict)

    @property
    def sizes(self) -> Array:
        """Return `[units]` the number of cells of each."""
        sizes: Array = self.shape.prod(1)
        return sizes

    @property
    def spans(self) -> Array:
        """Return `[units]` the number of tokens from the first of each to its last."""
        spans = self.sizes
        for unit, woven in self.woven.items():
            spans[unit] = woven.span
        return spans

    @property
    def medium(self) -> Array:
        """Return `[units]` which image or clip of the prompt or batch each belongs to, from 0 in reading order."""
        medium: Array = np.cumsum(np.diff(self.label, prepend=self.label[:1]) != 0)
        return medium

    @property
    def first_of_row(self) -> Array:
        """Return `[units]` which unit is the first in the same row."""
        return np.searchsorted(self.row, self.row)

    def alone(self, unit: int) -> Units:
        """Return one unit by itself, its cells side by side from place 0 on."""
        cells = self.shape[unit : unit + 1].prod(1)
        zero = np.zeros(1, dtype=np.int64)
        return Units(
            row_lengths=cells,
            row=zero,
            start=zero,
            shape=self.shape[unit : unit + 1],
            clocks=self.clocks[unit : unit + 1],
            label=zero,
        )


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
        if isinstance(run, Cells) and run.modality != AUDIO:  # sound stands as text does
            return run.segment, run.view, -1 if column else start
        if column and isinstance(run, Marker) and run.edge == "end" and run.view >= 0:
            return run.segment, run.view, -1
        return None

    starts, shapes, clocks, segments = [], [], [], []
    for key, placed in groupby(stream.placed(), raster):
        if key is None:
            continue
        group = list(placed)
        cells = [run for _, run in group if isinstance(run, Cells)]
        shape, clock = shape_of(cells, column=column), clock_of(cells, rule, key[0])
        found = sum(run.count for _, run in group)
        if found != math.prod(shape):
            raise PositionError(
                f"segment {key[0]} holds {found} tokens where its grid {shape} (t, y, x) has {math.prod(shape)} cells; "
                "this rule counts a marker at the end of every row as a cell. Write the stream with family.stream, or "
                "put the markers in."
            )
        starts.append(group[0][0])
        shapes.append(shape)
        clocks.append(clock)
        segments.append(key[0])
    units = Units(
        row_lengths=np.array([stream.length]),
        row=np.zeros(len(starts), dtype=np.int64),
        start=np.array(starts, dtype=np.int64),
        shape=np.array(shapes, dtype=np.int64).reshape(-1, 3),
        clocks=tuple(clocks),
        label=np.array(segments, dtype=np.int64),
    )
    return _by_frame(units) if rule.video == "frames" else units


def shape_of(cells: Sequence[Cells], *, column: bool) -> tuple[int, int, int]:
    """Return (frames, height, width) of the rows of one raster."""
    grid, count = cells[0].grid, sum(run.count for run in cells)
    height = min(count // grid.width, grid.height)
    return count // (height * grid.width), height, grid.width + column


def clock_of(cells: Sequence[Cells], rule: Rule, segment: int) -> Clock | None:
    """Return the seconds from a unit's first time step to each of its time steps, None where they are not known.

    Raises:
        PositionError: if the rule counts seconds and a clip has none.
    """
    steps = [run.elapsed for run in cells if run.row == 0]
    times = [time for step in steps for time in step or ()]
    if not steps or any(step is None for step in steps):
        if rule.counts_seconds and shape_of(cells, column=False)[0] > 1:
            raise PositionError(
                f"Video in segment {segment} has no seconds; this position rule counts them. "
                "Pass Video(size_hw, seconds=[time of every sampled frame])."
            )
        return None
    checked_gaps(times, f"Video in segment {segment}")
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
        label=units.label[unit],
    )
