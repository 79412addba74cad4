"""Moves: the position parts of a model brought to other places, on a copy that may be written to.

One class a kind of the seam table. A part that has nothing to say about such places refuses, by a PositionError.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from visionpos.audit.bench import HIDDEN
from visionpos.audit.doors import door_of
from visionpos.audit.layer import Placed, cells_of, index_of
from visionpos.audit.readings import readings
from visionpos.encodings import Additive, Biasing, Rotary
from visionpos.errors import PositionError
from visionpos.geometry import Grid
from visionpos.retrofit.attachment import TURNS


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """Where tokens stand after an intervention.

    Args:
        cells: from a grid to `[n, 3]` float64 (t, y, x): the new place of the token on every cell, row-major.
        told: from a grid to that whose sides a scheme is told.
        mirrors: whether it maps a picture of any grid onto itself, as a flip does.
    """

    cells: Callable[[Grid], Tensor]
    told: Callable[[Grid], Grid] = lambda grid: grid
    mirrors: bool = False

    def placed(self, grid: Grid) -> Placed:
        """Return the new places of a grid's tokens."""
        return Placed(self.cells(grid), self.told(grid))

    def order(self, grid: Grid) -> Tensor:
        """Return `[n]`, the cell on which every token stands now.

        Raises:
            PositionError: if tokens leave the cells of the grid.
        """
        if self.told(grid) != grid:
            raise PositionError("the sides that are told change, and this part has one grid alone.")
        return index_of(self.cells(grid), grid)


class Move:
    """A part of a model that can be brought to other places.

    Args:
        path: of the part in the model.
        spec: what it is like, for what is expected of it; None where nothing is known.
    """

    inside = False
    """Whether it acts inside attention."""

    def __init__(self, path: str, spec: Any) -> None:
        self.path, self.spec = path, spec

    @property
    def like(self) -> Any:
        """Return the Spec whose outcomes are expected of the part."""
        return self.spec

    def __call__(self, change: Change) -> None:
        """Bring the part to new places.

        Raises:
            PositionError: if it knows nothing of them.
        """
        raise NotImplementedError

    def angle(self, change: Change) -> float:  # noqa: ARG002 (most turn nothing)
        """Return the radians that the change adds at most to a pair of channels."""
        return 0.0

    def native(self, grid: Grid) -> Tensor | None:  # noqa: ARG002
        """Return `[n, axes]`, the places of a grid in the units that the part reads; None where it reads none."""
        return None

    def angles(self, grid: Grid) -> Tensor | None:  # noqa: ARG002
        """Return radians `[..., n, pairs]` on a grid, where the part turns pairs of channels; None elsewhere."""
        return None

    def largest(self, grid: Grid) -> float | None:  # noqa: ARG002
        """Return the largest size of a bias on a grid; None where the part adds none to logits."""
        return None


class NoMove(Move):
    """A part that has no places that could be changed."""

    def __init__(self, path: str, spec: Any, why: str) -> None:
        super().__init__(path, spec)
        self.why = why

    def __call__(self, change: Change) -> None:  # noqa: ARG002
        """Refuse."""
        raise PositionError(f"{self.path} {self.why}")


class AttachedMove(Move):
    """One encoding of an attachment."""

    def __init__(self, path: str, encoding: Any, grid: Grid, dtype: torch.dtype) -> None:
        super().__init__(path, encoding.spec)
        self.encoding, self.grid, self.dtype = encoding, grid, dtype
        self.inside = not isinstance(encoding, Additive)

    def __call__(self, change: Change) -> None:
        """Let the encoding answer for other places."""
        encoding = self.encoding
        if isinstance(encoding, TURNS):
            change.placed(self.grid)
            vars(encoding)["points"] = self._points(change)
        elif isinstance(encoding, Biasing):
            vars(encoding)["forward"] = self._bias(change)
        elif isinstance(encoding, Additive):
            door: Any = door_of(encoding)
            door.given(change.placed(self.grid))  # refuses before anything runs
            vars(encoding)["forward"] = self._answer(
                lambda grid, _: door.given(change.placed(grid))
            )
        else:
            raise PositionError(
                f"{self.path} works on the map of tokens; it has no coordinates that could be moved."
            )

    def _points(self, change: Change) -> Callable[..., Tensor]:
        encoding = self.encoding

        def points(grid: Grid, *, device: Any = None, **_: Any) -> Tensor:
            del encoding.points  # readings ask the encoding itself
            native = next(readings(encoding, change.told(grid)))(change.cells(grid))
            encoding.points = points
            return native.to(device, torch.promote_types(self.dtype, torch.float32))

        return points

    def _answer(self, give: Callable[[Grid, dict[str, Any]], Tensor]) -> Callable[..., Tensor]:
        """Return a forward that lets the encoding itself answer what `give` asks it for."""
        encoding = self.encoding

        def forward(grid: Grid, **told: Any) -> Tensor:
            del encoding.forward
            given = give(grid, told)
            encoding.forward = forward
            return given.to(device=told.get("device"))

        return forward

    def _bias(self, change: Change) -> Callable[..., Tensor]:
        def give(grid: Grid, told: dict[str, Any]) -> Tensor:
            placed = change.placed(grid)
            door = door_of(self.encoding, layer=told.get("layer", 0))
            own = Placed(placed.cells, placed.grid, told.get("prefix", 0))
            given = door.bias(torch.empty(0), torch.empty(0), own)
            assert given is not None  # noqa: S101 (a Biasing gives one)
            return given.to(next(self.encoding.parameters(), given).dtype)

        return self._answer(give)

    def turns(self, placed: Placed, layer: int) -> Tensor:
        """Return radians of a rotation at places, `[(heads,) n, pairs]`."""
        coords = next(readings(self.encoding, placed.grid))(placed.cells).float()
        turns: Tensor = self.encoding.angles(coords, layer)
        return turns

    def angle(self, change: Change) -> float:
        """Return the radians that the change adds at most."""
        if not isinstance(self.encoding, Rotary):
            return 0.0
        still, moved = self.angles(self.grid), self.turns(change.placed(self.grid), 0)
        return 0.0 if still is None else float((moved - still).abs().max())

    def native(self, grid: Grid) -> Tensor | None:
        """Return the coordinates of a grid, of what turns."""
        if not isinstance(self.encoding, TURNS):
            return None
        points: Tensor = self.encoding.points(grid)
        return points.double()

    def angles(self, grid: Grid) -> Tensor | None:
        """Return radians on a grid."""
        if not isinstance(self.encoding, Rotary):
            return None
        return self.encoding.angles(self.encoding.points(grid)).detach()

    def largest(self, grid: Grid) -> float | None:
        """Return the largest size of a bias on a grid; entries that hide keys do not count."""
        if not isinstance(self.encoding, Biasing):
            return None
        spread = door_of(self.encoding).spread(Placed(cells_of(grid), grid))
        plain = None if spread is None else spread[spread.abs() < HIDDEN]
        return None if plain is None or not plain.numel() else float(plain.abs().max())
