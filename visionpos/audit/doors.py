"""Doors of built encodings: each brings explicit places into an encoding by the methods that it has for them.

An encoding that takes grids alone gets its places from the whole cells of a grid.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import Tensor

from visionpos.audit.layer import Door, Placed, cells_of, index_of, seen_axes
from visionpos.audit.maps import Convolving, Pairing, Querying, Surrounding
from visionpos.audit.readings import Reading, near, readings
from visionpos.encodings import (
    Additive,
    Biasing,
    Conditional,
    ConvRelative,
    Extending,
    Gpsa,
    PairBiasing,
    PromptEncoder,
    QueryBiasing,
    Rotary,
    Turning,
)
from visionpos.errors import PositionError
from visionpos.geometry.grid import Grid

_FEW_PAIRS = 4096


def door_of(encoding: Any, *, layer: int = 0) -> Door:
    """Return the door through which an encoding's position enters a layer.

    Args:
        encoding: a built encoding; None for no position.
        layer: which layer of the model it serves, where layers differ.

    Raises:
        PositionError: if it has none of the doors of `visionpos.encodings`.
    """
    if encoding is None:
        return Door()
    for kind, door in _DOORS:
        if isinstance(encoding, kind):
            found: Door = door(encoding, layer)
            return found
    raise PositionError(
        f"encoding is {type(encoding).__name__}, which has no door that an audit knows; a module of "
        "visionpos.encodings, such as an Additive or a Rotary, is required."
    )


class _Encoded(Door):
    """A door that holds an encoding."""

    def __init__(self, encoding: Any, layer: int) -> None:
        self.encoding, self.layer = encoding, layer
        self._readings: dict[tuple[int, int, int], Reading | None] = {}
        self._shares: bool | None = None

    def reading(self, grid: Grid) -> Reading | None:
        """Return how the encoding reads cells when told this grid; None if it takes whole cells alone."""
        if grid.shape not in self._readings:
            self._readings[grid.shape] = self._found(grid)
        return self._readings[grid.shape]

    def _found(self, grid: Grid) -> Reading | None:
        cells, wanted = cells_of(grid), self.rendered(grid)
        for reading in readings(self.encoding, grid):
            try:
                given = self.at(reading(cells), grid)
            except PositionError:
                continue
            if given.shape == wanted.shape and near(given, wanted):
                return reading
        return None

    def rendered(self, grid: Grid) -> Tensor:
        """Return what the encoding gives for the cells of a grid."""
        raise NotImplementedError

    def at(self, places: Tensor, grid: Grid) -> Tensor:
        """Return the same for explicit places."""
        raise NotImplementedError

    def given(self, placed: Placed) -> Tensor:
        """Return what the encoding gives for explicit places, in their order; the first dimension is tokens."""
        reading = self.reading(placed.grid)
        if reading is None:
            return self.rendered(placed.grid)[index_of(placed.cells, placed.grid)]
        return self.at(reading(placed.cells), placed.grid)

    def native(self, placed: Placed) -> Tensor:
        """Return places in the units that the encoding reads: shares, if the sides it is told change what it gives."""
        reading = self.reading(placed.grid)
        if reading is None:
            return seen_axes(placed.cells, placed.grid)
        places = reading(placed.cells)
        if self._shares is None:
            self._shares = self._scales(reading, placed.grid)
        if not self._shares:
            return places
        return places / places.new_tensor(placed.grid.shape)[3 - places.shape[-1] :]

    def _scales(self, reading: Reading, grid: Grid) -> bool:
        """Return whether the same places give something else when larger sides are told."""
        places = reading(cells_of(grid))
        larger = Grid(2 * grid.height, 2 * grid.width, grid.frames)
        try:
            return not near(self.at(places, larger), self.at(places, grid))
        except PositionError:
            return False


class _Adding(_Encoded):
    """Vectors that are added to tokens."""

    def rendered(self, grid: Grid) -> Tensor:
        code: Tensor = self.encoding(grid)
        return code

    def at(self, places: Tensor, grid: Grid) -> Tensor:
        method = getattr(self.encoding, "at", None)
        if method is None:
            raise PositionError("this scheme takes grids alone.")
        told = len(signature(method).parameters) > 1 and "extent_hw" in signature(method).parameters
        code: Tensor = method(places, (grid.height, grid.width)) if told else method(places)
        return code

    def tokens(self, tokens: Tensor, placed: Placed) -> Tensor:
        code = self.given(placed).to(torch.promote_types(tokens.dtype, torch.float32))
        return tokens + torch.nn.functional.pad(code, (0, 0, placed.exempt, 0)).to(tokens.dtype)


class _Prompting(_Adding):
    """The code of image cells that a prompt encoder gives."""

    def rendered(self, grid: Grid) -> Tensor:
        code: Tensor = self.encoding.grid_code(grid)
        return code

    def at(self, places: Tensor, grid: Grid) -> Tensor:  # noqa: ARG002 (shares say all)
        if places.shape[-1] != 2:
            raise PositionError("this scheme reads two axes.")
        code: Tensor = self.encoding.code(places)
        return code


class _Rotating(_Encoded):
    """A turn of q and k."""

    def _turn(self, places: Tensor) -> Any:
        encoding = self.encoding
        if isinstance(encoding, Rotary):
            return encoding.rotation(encoding.angles(places, self.layer))
        return encoding.turns(places, self.layer)

    def _probe(self, turn: Any) -> Tensor:
        """Return what a turn does to every channel, `[n, heads, head_dim, head_dim]`."""
        channels, heads = self.encoding.dims.channels, self.encoding.dims.num_heads
        eye = torch.eye(channels, dtype=torch.float64).view(channels, 1, 1, channels)
        moved: Tensor = turn.apply(eye.expand(channels, heads, turn.n, channels))
        return moved.permute(2, 1, 0, 3)

    def rendered(self, grid: Grid) -> Tensor:
        return self._probe(self.encoding(grid, layer=self.layer))

    def at(self, places: Tensor, grid: Grid) -> Tensor:  # noqa: ARG002 (the reading knows it)
        return self._probe(self._turn(places))

    def turned(self, q: Tensor, k: Tensor, placed: Placed) -> tuple[Tensor, Tensor]:
        reading = self.reading(placed.grid)
        if reading is None:
            whole = self.encoding(placed.grid, layer=self.layer)
            turn = whole.select(index_of(placed.cells, placed.grid))
        else:
            exact = torch.float64 if q.dtype == torch.float64 else torch.float32
            turn = self._turn(reading(placed.cells).to(exact))
        turn = turn.padded(placed.exempt)
        return turn.apply(q.unsqueeze(0))[0], turn.apply(k.unsqueeze(0))[0]

    def angles(self, placed: Placed) -> Tensor | None:
        reading = self.reading(placed.grid)
        if reading is None or not isinstance(self.encoding, Rotary):
            return None
        return self.encoding.angles(reading(placed.cells), self.layer)

    def speeds(self, grid: Grid) -> tuple[float, ...]:
        reading = self.reading(grid)
        if reading is None:
            return (0.0, 0.0, 0.0)
        step, start = 1e-4, torch.zeros(1, 3, dtype=torch.float64)
        still = self._probe(self._turn(reading(start)))
        found = []
        for axis in range(3):
            ahead = start.clone()
            ahead[0, axis] = step
            change = self._probe(self._turn(reading(ahead))) - still
            found.append(float(torch.linalg.matrix_norm(change, ord=2).max()) / step)
        return tuple(found)


class _Biasing(_Encoded):
    """A function of differences, added to logits."""

    def rendered(self, grid: Grid) -> Tensor:
        layered = "layer" in signature(self.encoding.forward).parameters
        dense: Tensor = self.encoding(grid, layer=self.layer) if layered else self.encoding(grid)
        return dense

    def at(self, places: Tensor, grid: Grid) -> Tensor:
        names = signature(self.encoding.values).parameters
        told: dict[str, Any] = {
            "window_hw": (grid.height, grid.width),
            "extent": grid.shape,
            "layer": self.layer,
        }
        where = {name: value for name, value in told.items() if name in names}
        count = places.shape[0]
        if count * count <= _FEW_PAIRS or self.encoding.score(grid) is not None:
            dense: Tensor = self.encoding.between(places, places, **where)
            return dense
        # Networks of differences are slow: each difference once.
        apart = (places.unsqueeze(1) - places.unsqueeze(0)).flatten(0, 1)
        distinct, which = torch.unique(apart, dim=0, return_inverse=True)
        values: Tensor = self.encoding.values(distinct, **where)
        spread: Tensor = values.index_select(-1, which).unflatten(-1, (count, count))
        return spread

    def spread(self, placed: Placed) -> Tensor:
        reading = self.reading(placed.grid)
        if reading is not None:
            return self.at(reading(placed.cells), placed.grid)
        cells = index_of(placed.cells, placed.grid)
        return self.rendered(placed.grid)[:, cells][:, :, cells]

    def bias(self, q: Tensor, tokens: Tensor, placed: Placed) -> Tensor:  # noqa: ARG002
        dense = self.spread(placed)
        if not placed.exempt:
            return dense
        padded = torch.nn.functional.pad(dense, (placed.exempt, 0, placed.exempt, 0))
        own = self.encoding.prefix_values()
        if own is not None:
            p = placed.exempt
            outward, inward, among = own.to(padded.dtype)[:, :, None, None].unbind(1)
            padded[:, :p, p:], padded[:, p:, :p], padded[:, :p, :p] = outward, inward, among
        return padded


class _Extending(_Encoded):
    """A function of the query token and differences, which a longer q and k hold."""

    def bias(self, q: Tensor, tokens: Tensor, placed: Placed) -> Tensor:
        # Cells are numbered from 1, and tokens without a place stand at 0.
        places = self.native(placed) + 1.0
        places = torch.nn.functional.pad(places, (0, 0, placed.exempt, 0))
        exact = torch.float64 if q.dtype == torch.float64 else torch.float32
        apart = (places.unsqueeze(1) - places.unsqueeze(0)).to(exact)
        values: Tensor = self.encoding.values(tokens.unsqueeze(0).to(exact), apart)
        scaled: Tensor = values[0] * self.encoding.scale
        return scaled

    def native(self, placed: Placed) -> Tensor:
        axes: int = self.encoding.spec.axes
        return placed.cells[:, 3 - axes :]


class _Gating(_Encoded):
    """Attention of position alone, mixed in after the softmax."""

    def mixed(self, weights: Tensor, placed: Placed) -> Tensor:
        logits = self.spread(placed)
        exempt = placed.exempt
        positions = torch.nn.functional.pad(torch.softmax(logits, -1), (exempt, 0, exempt, 0))
        share = self.encoding.shares().view(-1, 1, 1).expand(-1, placed.cells.shape[0], 1)
        share = torch.nn.functional.pad(share, (0, 0, exempt, 0))
        share, positions = share.to(weights.dtype), positions.to(weights.dtype)
        mixed: Tensor = (1.0 - share) * weights + share * positions
        return mixed

    def spread(self, placed: Placed) -> Tensor:
        places = self.native(placed)
        logits: Tensor = self.encoding.values(places.unsqueeze(1) - places.unsqueeze(0))
        return logits

    def native(self, placed: Placed) -> Tensor:
        return placed.cells[:, 1:]


_DOORS: tuple[tuple[Any, Any], ...] = (
    (Additive, _Adding),
    (PromptEncoder, _Prompting),
    ((Rotary, Turning), _Rotating),
    (Biasing, _Biasing),
    (QueryBiasing, Querying),
    (PairBiasing, Pairing),
    (Extending, _Extending),
    (Gpsa, _Gating),
    (Conditional, Convolving),
    (ConvRelative, Surrounding),
)
