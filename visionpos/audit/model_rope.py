"""The move of a model's own rotary module."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from visionpos.audit.layer import Placed, cells_of
from visionpos.audit.model_moves import Change, Move
from visionpos.audit.readings import readings
from visionpos.encodings import Dims, MixedRope
from visionpos.errors import PositionError
from visionpos.geometry import Grid, Rotation, angles
from visionpos.retrofit.rope import GridRope, spec_of_rope

_SAME = 1e-4
"""Readings of a part that are this near to what it gives are right."""


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
