"""Moves of tables of one axis' differences, and of tables inside lambda layers, which are read through an index."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from visionpos.audit.layer import cells_of
from visionpos.audit.model_biases import buffers_of, differences
from visionpos.audit.model_joined import strided
from visionpos.audit.model_moves import Change, Move
from visionpos.errors import PositionError
from visionpos.geometry import Grid

_AXES = {"axis_h": 0, "axis_w": 1}


class AxisMove(Move):
    """A table of differences along one axis, whose product with the query is added to logits.

    The array's order says which entry is read, so that places can change where every new difference follows from an
    old one: shifts, flips, and axes that change roles.
    """

    inside = True

    def __init__(self, table: Any, spec: Any, other: Any) -> None:
        super().__init__(table.path, spec)
        self.table, self.axis = table, _AXES[table.seams.layout]
        self.owners = [table, other] if self.axis == 0 else [other, table]
        self.value: Tensor = table.value.detach().clone()
        self.grid = Grid(*((one.value.shape[0] + 1) // 2 for one in self.owners))

    @property
    def like(self) -> Any:
        """Return a Spec of tables of differences: in a model they end with the table, and say nothing beyond."""
        return SimpleNamespace(kind="swin_table")

    def __call__(self, change: Change) -> None:
        """Put the entry of every new difference where its old one is read."""
        if not self.table.seams.moves or strided(self.table.owner):
            raise PositionError(
                f"{self.path} has entries between queries and keys of different grids; a changed difference has none."
            )
        axis, read = self._read(differences(change, self.grid))
        held = self.owners[axis]
        moved = self.value[read.to(self.value.device)]
        held.owner._parameters[held.name] = nn.Parameter(moved, requires_grad=False)  # noqa: SLF001

    def _read(self, moved: Tensor) -> tuple[int, Tensor]:
        """Return (axis, entries): which axis' old differences lead to this table's new ones, and to which.

        Raises:
            PositionError: if none does, or a new difference has no entry.
        """
        still = differences(Change(cells_of), self.grid)
        new = moved[..., self.axis].flatten()
        for axis in (self.axis, 1 - self.axis):
            side = (self.grid.height, self.grid.width)[axis]
            old = still[..., axis].flatten().long() + side - 1
            led = torch.zeros(2 * side - 1, dtype=new.dtype).scatter_(0, old, new)
            if torch.equal(led[old], new):
                break
        else:
            raise PositionError(
                f"{self.path} is read by the array's own differences; places that do not follow from them cannot be "
                "told."
            )
        reach = (len(self.value) - 1) // 2
        if bool((led != led.round()).any()) or float(led.abs().max()) > reach:
            raise PositionError(
                f"{self.path} has entries for whole differences within {reach + 1} cells alone."
            )
        return axis, led.long() + reach


class LambdaMove(Move):
    """A table of differences inside a lambda layer, read through an index of all pairs, one row an axis."""

    inside = True

    def __init__(self, table: Any, spec: Any) -> None:
        super().__init__(table.path, spec)
        self.table, self.grid = table, Grid(*table.sides)

    def __call__(self, change: Change) -> None:
        """Let every pair of tokens read the entry of its new difference."""
        still = self._entries(differences(Change(cells_of), self.grid))
        moved = self._entries(differences(change, self.grid))
        for name, index in buffers_of(self.table.base, whole=True).items():
            for sign in (1, -1):  # query minus key, or key minus query
                read = still if sign > 0 else still.mT
                if index.shape == read.shape and torch.equal(index.cpu().long(), read):
                    fresh = moved if sign > 0 else moved.mT
                    setattr(self.table.base, name, fresh.to(index))
                    return
        raise PositionError(
            f"{self.path} is read through no index that is known; it cannot be moved."
        )

    def _entries(self, apart: Tensor) -> Tensor:
        """Return `[2, n, n]`, the entries of every difference.

        Raises:
            PositionError: if a difference is not whole, or beyond the table.
        """
        reach = apart.new_tensor([self.grid.height - 1, self.grid.width - 1])
        if bool((apart != apart.round()).any()) or bool((apart.abs() > reach).any()):
            raise PositionError(
                f"{self.path} has entries for whole differences within {self.grid.height}x{self.grid.width} cells "
                "alone."
            )
        return (apart + reach).long().permute(2, 0, 1)
