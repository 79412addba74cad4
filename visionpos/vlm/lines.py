"""Lines: a prompt cut into stretches of text and of cells, along which every id runs evenly.

What is the same along a line is computed once and repeated: ids cost a few passes over the tokens, whatever they hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from visionpos.vlm.clocks import Array
from visionpos.vlm.rules import Rule, times
from visionpos.vlm.units import Units


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pieces:
    """Units and rows in reading order: each is its cells (none for a row), then the text behind them.

    Args:
        units: the grids, in reading order.
        shape: `[units, 3]` frames, height, width; (1, 1, tokens) of a unit whose cells do not stand side by side.
        order: `[pieces]` number of each unit, or of a row behind all units.
        text: `[pieces]` tokens of text behind each.
        off: `[pieces]` what its place adds up to where a token of that text stands.
    """

    units: Units
    shape: Array
    order: Array
    text: Array
    off: Array

    def lines(self, count: Array, length: Array) -> Lines:
        """Return so many lines of each unit, of so many tokens, and a line of the text behind it."""
        pieces, units = len(self.order), len(count)
        counts = np.zeros(pieces, dtype=np.int64)  # a row has no cells
        counts[:units] = count
        counts = counts[self.order]
        spread = counts + 1
        text = spread.cumsum()
        text -= 1
        unit = np.minimum(self.order, units - 1).repeat(spread)  # any unit will do for text
        lengths = self.text if units == 0 else length[unit]
        lengths[text] = self.text
        return Lines(unit=unit, count=counts, text=text, length=lengths)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lines:
    """Pieces cut into lines: those of a unit's cells, then one of text.

    Args:
        unit: `[lines]` whose cells each holds; of text, any unit's.
        count: `[pieces]` lines of cells of each.
        text: `[pieces]` which line is its text.
        length: `[lines]` tokens of each; text may have none.
    """

    unit: Array
    count: Array
    text: Array
    length: Array

    @property
    def number(self) -> Array:
        """Return `[lines]` which line of its unit each is; 0 for text."""
        number = np.arange(len(self.length))
        number -= (self.text - self.count).repeat(self.count + 1)
        number[self.text] = 0
        return number

    @property
    def first(self) -> Array:
        """Return `[lines]` place of the first token of each."""
        first: Array = self.length.cumsum()
        first -= self.length
        return first

    def of_units(self, values: Array) -> Array:
        """Return values of units, `[lines]`; text gets what is written over."""
        return values[self.unit] if len(values) else np.zeros_like(self.unit, values.dtype)

    def spread(self, values: Array, text: int) -> Array:
        """Return values of lines at every token, `[tokens]`, with one value for all text."""
        values[self.text] = text
        spread: Array = values.repeat(self.length)
        return spread


def pieces_of(units: Units, spans: Array, moved: Array) -> Pieces:
    """Return units and the text between them.

    Args:
        units: grids and rows.
        spans: `[units]` tokens of each.
        moved: `[units]` by how much the units of the row, up to and with this one, moved what follows.
    """
    ends = units.row_lengths.cumsum()
    begins = ends - units.row_lengths
    shape = units.shape
    if units.woven:
        shape = shape.copy()
        for unit, woven in units.woven.items():
            shape[unit] = 1, 1, woven.span
    cut = np.concatenate((units.start + spans, begins))
    # Stable: where a unit ends its row, the next row comes behind it.
    order = cut.argsort(kind="stable")
    start = np.concatenate((units.start, begins))[order]
    text = np.concatenate((start[1:], ends[-1:])) - cut[order]
    off = np.concatenate((moved - begins[units.row], -begins))[order]
    return Pieces(units=units, shape=shape, order=order, text=text, off=off)


def line_ids(
    pieces: Pieces, start: Array, tau: Array, rule: Rule, step: tuple[Array, Array] | None
) -> Array:
    """Return the ids of text and cells, `[axes, tokens]`.

    A unit whose cells do not stand side by side gets ids that mean nothing.

    Args:
        pieces: grids, rows and the text between them.
        start: `[units]` position s of each unit, in the dtype of the ids.
        tau: `[sum of frames]` time offset of every frame of every unit.
        rule: the position rule.
        step: what one cell of each unit adds to `index`, as numerators and denominators, `[units]` each; None where
            the rule has no such axis.
    """
    tokens = int(pieces.units.row_lengths.sum())
    writer = _Writer(pieces, start, tau, rule, step, tokens)
    lines = writer.lines
    base = np.empty((len(rule.axes), len(lines.length)), dtype=start.dtype)
    for out, axis in zip(base, rule.axes, strict=True):
        out[:] = getattr(writer, axis)()
    base[:, lines.text] = pieces.off
    ids: Array = base.repeat(lines.length, axis=1)
    for out, axis in zip(ids, rule.axes, strict=True):
        np.add(out, writer.grown(axis), out=out)
    return ids


class _Writer:
    """What the formula of a rule gives on every line: where its first cell stands, and how ids grow along it."""

    def __init__(
        self,
        pieces: Pieces,
        start: Array,
        tau: Array,
        rule: Rule,
        step: tuple[Array, Array] | None,
        tokens: int,
    ) -> None:
        self.pieces, self.rule, self.step = pieces, rule, step
        self.tau = tau if tau.any() else None
        self.frames, self.height, self.width = pieces.shape.T
        self.single = len(tau) == len(self.frames)  # no unit has a second frame
        if "row" in rule.axes or "col" in rule.axes:
            self.lines = pieces.lines(self.frames * self.height, self.width)
        else:
            self.lines = pieces.lines(self.frames, self.height * self.width)
            self.height = np.ones_like(self.frames)
        self.start = self.lines.of_units(start)
        # Whole numbers are counted from the first token of all: what a line lacks goes into where it starts.
        self.whole = start.dtype == np.int64
        self.place = np.arange(tokens)
        self._still: Array | None = None

    @property
    def still(self) -> Array:
        """Return `[tokens]` the place of every token of text, and zero along cells."""
        if self._still is None:
            text = self.lines.spread(np.zeros_like(self.lines.length), -1)
            self._still = np.bitwise_and(text, self.place, out=text)
        return self._still

    def time(self) -> Array:
        """Return s + tau."""
        if self.tau is None:
            return self.start
        frame = self.lines.number // self.lines.of_units(self.height).clip(1)
        frames = self.pieces.units.shape[
            :, 0
        ]  # tau has all frames, also of units that are one line here
        first = self.lines.of_units(frames.cumsum() - frames)
        return np.asarray(self.start + self.tau[first + frame])

    def row(self) -> Array:
        """Return o + i * row_step - ci."""
        row = self.lines.number
        if not self.single:
            row = row % self.lines.of_units(self.height).clip(1)
        return self._centred(self._origin() + times(row, self.rule.row_step), self.height)

    def col(self) -> Array:
        """Return o - cj."""
        value = self._centred(self._origin(), self.width)
        return value - self.lines.first if self._is_counted("col") else value

    def index(self) -> Array:
        """Return s - 1."""
        if self._is_counted("index"):
            return self.start - self.lines.of_units(self.pieces.units.start)
        return self.start - 1

    def ordinal(self) -> Array:
        """Return the number of the unit in its row."""
        first = self.pieces.units.first_of_row
        return self.lines.of_units(np.arange(len(first)) - first)

    def grown(self, axis: str) -> Array:
        """Return `[tokens]` what grows along an axis; along text it is the place."""
        if axis in ("time", "row", "ordinal"):
            return self.still
        if self._is_counted(axis):
            return self.place
        lines, units = self.lines, self.pieces.units
        if axis == "col":
            along = times(self.place - lines.spread(lines.first, 0), self.rule.col_step)
        else:
            cell = self.place + 1 - lines.spread(lines.of_units(units.start), 0)
            above, below = (lines.spread(lines.of_units(part), 1) for part in self.step or ())
            along = stepped(cell, above, below)
        return np.where(lines.spread(np.zeros(len(lines.length), dtype=bool), 1), self.place, along)

    def _is_counted(self, axis: str) -> bool:
        """Return whether the ids of an axis grow by one a cell, in whole numbers."""
        if axis == "index":
            return self.whole and self.step is not None and bool((self.step[0] == 1).all())
        return self.whole and self.rule.col_step == 1

    def _centred(self, value: Array, side: Array) -> Array:
        """Return values of lines less ci or cj."""
        return value - self.lines.of_units((side - 1) // 2) if self.rule.centre else value

    def _origin(self) -> Array:
        """Return o, `[lines]`."""
        if self.rule.origin == "time":
            return self.time()
        return np.zeros_like(self.start) if self.rule.origin == "zero" else self.start


def stepped(values: Array, above: Array, below: Array) -> Array:
    """Return values * above / below, int64 where every step is whole, else float64 rounded once."""
    return np.asarray(values * above if (below == 1).all() else values * above / below)


def write_rings(ids: Array, units: Units, start: Array, tau: Array, rings: Sequence[Array]) -> None:
    """Write the ids of cells that lie on circles into `ids [3, tokens]`: s + tau + where each lies.

    Args:
        ids: written in place at the cells.
        units: grids and rows.
        start: `[units]` position s of each unit.
        tau: `[sum of frames]` time offset of every frame of every unit.
        rings: `[3, cells of a frame]` of each unit.
    """
    seen = 0
    for unit, around in enumerate(rings):
        frames, cells = int(units.shape[unit, 0]), around.shape[1]
        at = start[unit] + np.repeat(tau[seen : seen + frames], cells)
        ids[:, units.start[unit] :][:, : frames * cells] = at + np.tile(around, frames)
        seen += frames
