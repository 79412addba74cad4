"""Ids along lines: what the formula of a rule gives on every line, spread over its tokens.

On the CPU numpy spreads them; for another device they stay a plan that the device spreads by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from visionpos.kernels.ids import LinePlan
from visionpos.vlm.clocks import Array
from visionpos.vlm.lines import Pieces
from visionpos.vlm.rules import Rule, times
from visionpos.vlm.units import Units


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
    writer = _Writer(pieces, start, tau, rule, step)
    ids: Array = writer.base().repeat(writer.lines.length, axis=1)
    for out, axis in zip(ids, rule.axes, strict=True):
        np.add(out, writer.grown(axis), out=out)
    return ids


def line_plan(
    pieces: Pieces, start: Array, tau: Array, rule: Rule, step: tuple[Array, Array] | None
) -> tuple[LinePlan, tuple[Array, Array]]:
    """Return the same ids as lines yet to be spread on a device, and the tokens and largest id of each, `[lines]`.

    Where a line has no tokens, its largest id means nothing. Arguments as in `line_ids`.
    """
    writer = _Writer(pieces, start, tau, rule, step)
    lines = writer.lines
    runs = np.stack([writer.run(axis) for axis in rule.axes], axis=1)
    runs[:, :, lines.text] = np.array([0, 1, 1]).reshape(3, 1, 1)
    (origin, above, below), base = runs, writer.base()
    grown = (lines.length.cumsum() - 1 - origin) * above
    last = base + (grown if writer.whole else grown / below)
    plan = LinePlan(
        torch.from_numpy(lines.length),
        torch.from_numpy(base),
        torch.from_numpy(origin),
        torch.from_numpy(above),
        None if writer.whole else torch.from_numpy(below),
        writer.tokens,
    )
    return plan, (lines.length, last.max(0))


class _Writer:
    """What the formula of a rule gives on every line: where its first cell stands, and how ids grow along it."""

    def __init__(
        self,
        pieces: Pieces,
        start: Array,
        tau: Array,
        rule: Rule,
        step: tuple[Array, Array] | None,
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
        self.tokens = int(pieces.units.row_lengths.sum())
        self.place = np.arange(self.tokens)
        self._still: Array | None = None

    def base(self) -> Array:
        """Return `[axes, lines]` where each line starts, less what grows along it."""
        base = np.empty((len(self.rule.axes), len(self.lines.length)), dtype=self.start.dtype)
        for out, axis in zip(base, self.rule.axes, strict=True):
            out[:] = getattr(self, axis)()
        base[:, self.lines.text] = self.pieces.off
        return base

    def run(self, axis: str) -> Array:
        """Return `[3, lines]`: the place from which an axis counts along cells, and its step, above and below."""
        run = np.zeros((3, len(self.lines.length)), dtype=np.int64)
        run[2] = 1
        if axis in ("time", "row", "ordinal"):
            return run
        if self._is_counted(axis):
            run[1] = 1
        elif axis == "col":
            run[0], step = self.lines.first, self.rule.col_step
            run[1:] = [[step.numerator], [step.denominator]]
        else:
            run[0] = self.lines.of_units(self.pieces.units.start) - 1
            run[1:] = [self.lines.of_units(part) for part in self.step or ()]
        return run

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
