"""Lines: a prompt cut into stretches of text and of cells, along which every id runs evenly.

What is the same along a line is computed once and repeated: ids cost a few passes over the tokens, whatever they hold.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from visionpos.vlm.clocks import Array
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
