"""Moves: the position parts of a model brought to other places, on a copy that may be written to.

One class a kind of the seam table. A part that has nothing to say about such places refuses, by a PositionError.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from visionpos.audit.doors import door_of
from visionpos.audit.layer import Placed, cells_of, index_of
from visionpos.audit.readings import readings
from visionpos.encodings import Additive, Biasing, Dims, LearnedSpec, MixedRope, Rotary, build
from visionpos.errors import PositionError
from visionpos.geometry import Grid, Rotation, angles
from visionpos.retrofit.attachment import TURNS
from visionpos.retrofit.records import recipe_of_table
from visionpos.retrofit.rope import GridRope, spec_of_rope

_SAME = 1e-4
"""Readings of a part that are this near to what it gives are right."""


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


class NoMove(Move):
    """A part that has no places that could be changed."""

    def __init__(self, path: str, spec: Any, why: str) -> None:
        super().__init__(path, spec)
        self.why = why

    def __call__(self, change: Change) -> None:  # noqa: ARG002
        """Refuse."""
        raise PositionError(f"{self.path} {self.why}")


class TableMove(Move):
    """An absolute table."""

    def __init__(self, table: Any, grid: Grid) -> None:
        self.table, self.grid = table, grid
        sides = table.sides
        if sides is None:
            raise PositionError(
                f"{table.path} has no grid: the model was made without an image size."
            )
        self.own = Grid(*sides)
        recipe = recipe_of_table(table.model, table)
        recipe = "timm" if recipe in ("runtime", "checkpoint") else recipe.removeprefix("direct:")
        super().__init__(table.path, LearnedSpec(grid_hw=sides, recipe=recipe))

    def __call__(self, change: Change) -> None:
        """Put other rows into the table."""
        table, layout = self.table, self.table.seams.layout
        same = (self.own.height, self.own.width) == (self.grid.height, self.grid.width)
        if not (same or change.mirrors or table.moves):
            raise PositionError(
                f"{self.path} is a table of {self.own.height}x{self.own.width} cells that the model resamples; its "
                "tokens have no rows of their own."
            )
        value = table.value.detach()
        if layout == "nchw":
            rows = value.flatten(2).mT[0]
        elif layout in ("nlc", "nhwc", "nc"):
            rows = value.reshape(-1, value.shape[-1])
        else:
            raise PositionError(
                f"{self.path} is laid out as {layout}; only whole maps can be moved."
            )
        front = rows[: table.prefix]
        moved = self._rows(rows[table.prefix :], change)
        joined = torch.cat([front, moved.to(rows.dtype)])
        shaped = joined.mT.reshape(value.shape) if layout == "nchw" else joined.reshape(value.shape)
        table.owner._parameters[table.name] = nn.Parameter(shaped, requires_grad=False)  # noqa: SLF001

    def _rows(self, rows: Tensor, change: Change) -> Tensor:
        placed = change.placed(self.own)
        if placed.grid == self.own and bool((placed.cells == placed.cells.round()).all()):
            return rows[index_of(placed.cells, self.own).to(rows.device)]
        # A new table is drawn, and then filled: the user's generator must not move on.
        with torch.random.fork_rng(devices=[]):
            encoding: Any = build(self.spec, Dims(embed_dim=rows.shape[-1], num_heads=1, depth=1))
        encoding.table = nn.Parameter(rows.float().cpu(), requires_grad=False)
        return door_of(encoding).given(placed).to(rows.device)  # type: ignore[attr-defined]


class RopeMove(Move):
    """The model's own rotary module; one whose bands no Spec says can change rows alone."""

    inside = True

    def __init__(self, path: str, rope: Any, dims: Dims, grid: Grid, dtype: torch.dtype) -> None:
        spec = spec_of_rope(rope)
        super().__init__(path, spec)
        self.rope, self.dims, self.grid, self.dtype = rope, dims, grid, dtype
        self.table: Tensor = rope.get_embed(shape=(grid.height, grid.width)).detach()
        self.reader = None if spec is None else GridRope(rope, spec, dims, grid)
        if self.reader is not None and not self._reads():
            self.reader = None

    def _reads(self) -> bool:
        made = self._of(self._turns(Placed(cells_of(self.grid), self.grid)))
        same = made.shape == self.table.shape
        return same and float((made - self.table).abs().max()) <= _SAME

    def _turns(self, placed: Placed) -> Tensor:
        reader: Any = self.reader
        numbered = SimpleNamespace(spec=self.spec, coords=self.spec.coords)
        coords = next(readings(numbered, placed.grid))(placed.cells).to(self.table.device)
        if reader.freqs is not None:
            return angles(coords, MixedRope.from_timm(reader.freqs.detach()))
        turns: Tensor = reader.axial.angles(coords)
        return turns

    def _of(self, turns: Tensor) -> Tensor:
        cos, sin = Rotation.of(turns, self.spec.pairing).full_width()
        return torch.cat([sin, cos], dim=-1)

    def __call__(self, change: Change) -> None:
        """Let the module give the rows of other places."""
        if self.reader is None:
            moved = self.table[..., change.order(self.grid).to(self.table.device), :]
        else:
            exact = torch.float64 if self.dtype == torch.float64 else self.table.dtype
            moved = self._of(self._turns(change.placed(self.grid))).to(exact)
        fix_rope(self.rope, moved)

    def turns(self, placed: Placed) -> Tensor:
        """Return radians at places, `[n, pairs]` or `[layers, heads, n, pairs]`.

        Raises:
            PositionError: if no Spec says the bands.
        """
        if self.reader is None:
            raise PositionError(f"{self.path} has bands of timm's own that no Spec says.")
        return self._turns(placed)

    def angle(self, change: Change) -> float:
        """Return the radians that the change adds at most."""
        if self.reader is None:
            return 0.0
        still = self._turns(Placed(cells_of(self.grid), self.grid))
        return float((self._turns(change.placed(self.grid)) - still).abs().max())

    def native(self, grid: Grid) -> Tensor | None:
        """Return the coordinates of a grid."""
        if self.reader is None:
            return None
        numbered = SimpleNamespace(spec=self.spec, coords=self.spec.coords)
        return next(readings(numbered, grid))(cells_of(grid))

    def angles(self, grid: Grid) -> Tensor | None:
        """Return radians on a grid."""
        return None if self.reader is None else self._turns(Placed(cells_of(grid), grid))


def fix_rope(rope: Any, table: Tensor) -> None:
    """Let a rotary module give one table, whatever shape it is asked for."""

    def get_embed(*_: Any, dtype: torch.dtype | None = None, **__: Any) -> Tensor:
        return table if dtype is None else table.to(dtype)

    rope.get_embed = get_embed


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
            encoding.points = self._points(change)
        elif isinstance(encoding, Biasing):
            encoding.forward = self._bias(change)
        elif isinstance(encoding, Additive):
            door: Any = door_of(encoding)
            door.given(change.placed(self.grid))  # refuses before anything runs
            encoding.forward = self._answer(lambda grid, _: door.given(change.placed(grid)))
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
