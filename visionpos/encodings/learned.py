"""Learned table: one vector a cell of the trained grid, evaluated on any grid by a named recipe. ViT, DINOv2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import nn

from visionpos.encodings.doors import Additive, Dims, blanked, check_device, check_points
from visionpos.encodings.sources import filled, required_entry, start
from visionpos.errors import PositionError
from visionpos.geometry.fields import check_fields
from visionpos.geometry.grid import Grid
from visionpos.geometry.recipes import recipe_of
from visionpos.geometry.resample import resample, same_grid, sample_table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

Aspect = Literal["stretch", "square"]
# What sources call one table: timm, transformers' ViT and DINOv2, SigLIP and Idefics, big_vision and vit-pytorch; then
# timm's models of several tables (CrossViT, Visformer, TNT), of which the caller passes one.
_NAMES = (
    "pos_embed",
    "position_embeddings",
    "position_embedding.weight",
    "pos_embedding",
    "pos_embed.weight",
    "pos_embed_0",
    "pos_embed_1",
    "pos_embed1",
    "pos_embed2",
    "pos_embed3",
    "patch_pos",
    "pixel_pos",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedSpec:
    """Settings of a learned table.

    Args:
        grid_hw: rows and columns of the grid the table is trained on; never guessed from a token count.
        recipe: how other grids are served: the recipe of the source that wrote the weights.
        prefix_rows: rows for tokens that belong to no cell (class token, registers).
        std: standard deviation of the truncated normal start values.
        aspect: what the table spans on a grid of other proportions: the grid itself, each axis by its own scale
            ("stretch"), or the "square" over its longer side, of which the grid is the top left part (timm's
            ar_preserving NaFlexVit, RADIO).

    Raises:
        PositionError: if the grid or a count is out of range, or the recipe is unknown.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    kind: Literal["learned"] = "learned"
    grid_hw: tuple[int, int]
    recipe: str = "timm"
    prefix_rows: int = 0
    std: float = 0.02
    aspect: Aspect = "stretch"

    def __post_init__(self) -> None:
        check_fields(self)
        Grid(*self.grid_hw)
        recipe_of(self.recipe)
        if self.prefix_rows < 0 or self.std < 0:
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
        ViT (arXiv 2010.11929); recipes: `visionpos.geometry.recipes.RECIPES`. SigLIP 2 NaFlex (arXiv 2502.14786) and
        NaViT read a grid's size off the largest patch coordinate, so that dropped or reordered patches change every
        code, and big_vision gives NaN beyond 64 cells a side; here the grid is an argument, and any size is served.
    """

    table: nn.Parameter

    def __init__(
        self, spec: LearnedSpec, dims: Dims, *, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.spec, self.dims = spec, dims
        rows = spec.prefix_rows + self.grid.size
        self.table = nn.Parameter(torch.empty(rows, dims.embed_dim))
        start(self.table, spec.std, generator)

    @property
    def grid(self) -> Grid:
        """Return the grid the table is trained on."""
        return Grid(*self.spec.grid_hw)

    def prefix(self) -> Tensor:
        """Return `[prefix_rows, embed_dim]`, the rows that belong to no cell."""
        return self.table[: self.spec.prefix_rows].clone()

    def cells(self) -> Tensor:
        """Return `[height * width, embed_dim]`, the rows of the training grid: a view of the parameter."""
        return self.table[self.spec.prefix_rows :]

    def forward(self, grid: Grid, *, device: torch.device | None = None) -> Tensor:
        """Return `[n, embed_dim]` on any grid; frames of a clip share their spatial rows.

        Raises:
            PositionError: if a device other than the table's is asked for.
        """
        check_device(self.table, device)
        flat = Grid(grid.height, grid.width)
        own = same_grid(self.grid, flat)  # served as it is, whatever the aspect
        extent_hw = None
        if self.spec.aspect == "square" and not own:
            extent_hw = (max(grid.height, grid.width),) * 2
        elif recipe_of(self.spec.recipe).boundaries != "exact":
            extent_hw = (grid.height, grid.width)  # the source misplaces cells of its own grid too
        rows = resample(
            self.cells(),
            source=self.grid,
            target=flat,
            recipe=self.spec.recipe,
            extent_hw=extent_hw,
        )
        if grid.frames > 1:
            return rows.repeat(grid.frames, 1)
        return rows.clone() if own else rows  # an edit of the result must not reach the parameter

    def at(
        self,
        coords_yx: Tensor,
        extent_hw: tuple[float, float] | Tensor,
        *,
        valid: Tensor | None = None,
    ) -> Tensor:
        """Return the table at any points: dropped tokens, crops, tiles, packed images, batches of several sizes.

        The order of the points is free, and no point changes another's code.

        Args:
            coords_yx: `[..., n, 2]` in cells of a lattice; whole numbers are its cell centres.
            extent_hw: how many of those cells span the whole table, under "square" those of its grid, as in `forward`;
                a tensor `[..., 2]` gives every sample its own.
            valid: `[..., n]`, True where there is a token; the others get zeros, whatever their coordinates.

        Returns:
            `[..., n, embed_dim]`.

        Raises:
            PositionError: if shapes do not match, the extent is not two sides above 0, or (on the CPU, where the check
                costs no wait) a point is not finite or outside the lattice.
        """
        points = coords_yx if valid is None else blanked(coords_yx, valid)
        check_points(points, 2, "coords_yx", extent=extent_hw, rank=2)
        if self.spec.aspect == "square":
            extent_hw = _squared(extent_hw, self.spec.grid_hw)
        rows = sample_table(
            self.cells(), points, source=self.grid, extent_hw=extent_hw, recipe=self.spec.recipe
        )
        return rows if valid is None else blanked(rows, valid)

    @classmethod
    def from_source(
        cls,
        state: Mapping[str, Tensor],
        spec: LearnedSpec,
        dims: Dims,
        *,
        channels: Literal["last", "first"] = "last",
    ) -> LearnedTable:
        """Return the encoding with the table of a source's state dict.

        Args:
            state: one entry named `pos_embed` (timm), `position_embeddings` (transformers), `position_embedding.weight`
                (SigLIP, Idefics) or `pos_embedding` (big_vision, vit-pytorch), under any path; of a model with several
                (CrossViT, Visformer, TNT) one entry, `pos_embed_0`, `pos_embed1`, `patch_pos` and the like.
            spec: its grid, its prefix rows and its recipe.
            dims: sizes of the model.
            channels: "last" for rows `(1, n, d)`, `(n, d)`, `(1, h, w, d)`; "first" for maps `(1, d, h, w)` (PiT).

        Raises:
            PositionError: if the entry is missing, ambiguous, or has other rows than the spec says.
        """
        ranks = (2, 3, 4) if channels == "last" else (3, 4)
        table = required_entry(state, *_NAMES, ranks=ranks)
        rows = (table if channels == "last" else table.movedim(-3, -1)).flatten(0, -2)
        return filled(cls(spec, dims), {"table": rows}, source="the state dict")


def _squared(
    extent_hw: tuple[float, float] | Tensor, own_hw: tuple[int, int]
) -> tuple[float, float] | Tensor:
    """Return the extent of the square over the longer side; the trained grid's own is kept."""
    if isinstance(extent_hw, torch.Tensor):
        own = (extent_hw == extent_hw.new_tensor(own_hw)).all(-1, keepdim=True)
        return torch.where(own, extent_hw, extent_hw.amax(-1, keepdim=True))
    return extent_hw if tuple(extent_hw) == tuple(own_hw) else (max(extent_hw), max(extent_hw))
