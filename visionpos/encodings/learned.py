"""Learned table: one vector a cell of the training grid, evaluated on any grid by a named recipe. ViT, DeiT, DINOv2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import nn

from visionpos.encodings.doors import Additive, Dims
from visionpos.errors import PositionError
from visionpos.geometry.grid import Grid
from visionpos.geometry.recipes import recipe_of
from visionpos.geometry.resample import resample, sample_table

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedSpec:
    """Settings of a learned table.

    Args:
        grid_hw: rows and columns of the grid the table is trained on; never guessed from a token count.
        recipe: how other grids are served: the recipe of the source that wrote the weights.
        prefix_rows: rows for tokens that belong to no cell (class token, registers).
        std: standard deviation of the truncated normal start values.

    Raises:
        PositionError: if the grid or a count is out of range, or the recipe is unknown.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    kind: Literal["learned"] = "learned"
    grid_hw: tuple[int, int]
    recipe: str = "timm"
    prefix_rows: int = 0
    std: float = 0.02

    def __post_init__(self) -> None:
        Grid(*self.grid_hw)
        recipe_of(self.recipe)
        if self.prefix_rows < 0 or not self.std >= 0:
            raise PositionError(
                f"prefix_rows is {self.prefix_rows} and std {self.std}; numbers of at least 0 are required."
            )


class LearnedTable(Additive):
    """A learned table that travels with its grid.

    Parameter `table [prefix_rows + height * width, embed_dim]`, row-major. Evaluation is linear in the table, so
    gradients reach it at every grid; memory of one evaluation is `[n, embed_dim]` and two small weight matrices.

    Example:
        >>> spec = LearnedSpec(grid_hw=(4, 9), prefix_rows=1)
        >>> table = LearnedTable(spec, Dims(embed_dim=8, num_heads=1, depth=1, prefix=1))
        >>> table(Grid(6, 6)).shape, table.prefix().shape
        (torch.Size([36, 8]), torch.Size([1, 8]))

    Reference:
        ViT (arXiv 2010.11929); recipes: `visionpos.geometry.recipes.RECIPES`.
    """

    table: nn.Parameter

    def __init__(
        self, spec: LearnedSpec, dims: Dims, *, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.spec, self.dims = spec, dims
        rows = spec.prefix_rows + self.grid.size
        self.table = nn.Parameter(torch.empty(rows, dims.embed_dim))
        nn.init.trunc_normal_(self.table, std=spec.std, generator=generator)

    @property
    def grid(self) -> Grid:
        """Return the grid the table is trained on."""
        return Grid(*self.spec.grid_hw)

    def prefix(self) -> Tensor:
        """Return `[prefix_rows, embed_dim]`, the rows that belong to no cell."""
        return self.table[: self.spec.prefix_rows]

    def cells(self) -> Tensor:
        """Return `[height * width, embed_dim]`, the rows of the training grid."""
        return self.table[self.spec.prefix_rows :]

    def forward(self, grid: Grid, *, device: torch.device | None = None) -> Tensor:
        """Return `[n, embed_dim]` on any grid; frames of a clip share their spatial rows.

        Raises:
            PositionError: if a device other than the table's is asked for.
        """
        if device is not None and device != self.table.device:
            raise PositionError(
                f"device is {device} and the table is on {self.table.device}; move the module with .to({device})."
            )
        flat = Grid(grid.height, grid.width)
        rows = resample(self.cells(), source=self.grid, target=flat, recipe=self.spec.recipe)
        return rows.repeat(grid.frames, 1) if grid.frames > 1 else rows

    def at(self, coords_yx: Tensor, extent_hw: tuple[float, float]) -> Tensor:
        """Return the table at any points: dropped tokens, crops, tiles, packed images.

        Args:
            coords_yx: `[..., n, 2]` in cells of a lattice; whole numbers are its cell centres.
            extent_hw: how many of those cells span the whole table.

        Returns:
            `[..., n, embed_dim]`.
        """
        return sample_table(
            self.cells(), coords_yx, source=self.grid, extent_hw=extent_hw, recipe=self.spec.recipe
        )
