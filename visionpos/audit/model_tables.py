"""The move of an absolute table: other rows, or rows evaluated between its cells."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from visionpos.audit.doors import door_of
from visionpos.audit.layer import index_of
from visionpos.audit.model_moves import Change, Move
from visionpos.encodings import Dims, LearnedSpec, build
from visionpos.errors import PositionError
from visionpos.geometry import Grid
from visionpos.retrofit.records import recipe_of_table


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
        door: Any = door_of(encoding)
        moved: Tensor = door.given(placed).to(rows.device)
        return moved
