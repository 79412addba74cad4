"""Factorised tables: one vector a row and one a column, joined for every cell. NaViT, Pix2Struct, Gemma 4, DETR."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import nn

from visionpos.encodings.doors import Additive, Dims, blanked, check_device, check_points
from visionpos.encodings.sources import filled, required_entry, sides, source_entry
from visionpos.errors import PositionError
from visionpos.geometry.fields import check_choice, check_fields
from visionpos.geometry.grid import Grid
from visionpos.geometry.places import check_whole
from visionpos.geometry.points import readable
from visionpos.geometry.recipes import recipe_of
from visionpos.geometry.resample import resample, sample_table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

# What sources call the two tables: timm, vit-pytorch, DETR, transformers' DETR, transformers' Pix2Struct.
_ROWS = (
    "pos_embed_y",
    "pos_embed_height",
    "row_embed.weight",
    "row_embeddings.weight",
    "row_embedder.weight",
)
_COLUMNS = (
    "pos_embed_x",
    "pos_embed_width",
    "col_embed.weight",
    "column_embeddings.weight",
    "column_embedder.weight",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FactorizedSpec:
    """Settings of factorised tables.

    Args:
        table_hw: entries of the row table and of the column table.
        coords: "absolute" looks up the index of a row, up to the last entry; "fractional" spreads the table over the
            grid, whatever its size.
        combine: "add" the two vectors, multiply them ("product"), or "stack" two of half the width.
        axis_order: which half comes first when stacked: (0, 1) rows then columns, (1, 0) columns then rows (DETR).
        recipe: how a fractional position reads a table: "nearest" in whole numbers, its float32 dialects, or linear.
        offset: entry of the first row and column, absolute alone (Pix2Struct keeps entry 0 for padding).
        aspect: what a fractional table spans: each side of the grid ("stretch"), or the longer one ("square").
        start: start values: "normal" of deviation std, or "uniform" on [0, 1] (DETR).
        std: standard deviation of normal start values (0.02 in timm, 1 in vit-pytorch).

    Raises:
        PositionError: if a number or choice is out of range, or choices exclude each other.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    kind: Literal["factorized"] = "factorized"
    table_hw: tuple[int, int]
    coords: Literal["absolute", "fractional"] = "absolute"
    combine: Literal["add", "product", "stack"] = "add"
    axis_order: tuple[int, int] = (0, 1)
    recipe: str = "nearest"
    offset: int = 0
    aspect: Literal["stretch", "square"] = "stretch"
    start: Literal["normal", "uniform"] = "normal"
    std: float = 0.02

    def __post_init__(self) -> None:
        check_fields(self)
        sides("table_hw", self.table_hw)
        recipe_of(self.recipe)
        check_choice("axis_order", self.axis_order, ((0, 1), (1, 0)))
        if self.offset < 0 or self.std < 0:
            raise PositionError(
                f"offset is {self.offset} and std {self.std}; numbers of at least 0 are required."
            )
        if self.coords == "fractional" and self.offset:
            raise PositionError(
                f"offset is {self.offset} with fractional coords, which have no entries to skip; use coords='absolute'."
            )
        if self.coords == "absolute" and self.aspect != "stretch":
            raise PositionError(
                f"aspect is {self.aspect!r} with absolute coords, which do not scale; use coords='fractional'."
            )


class Factorized(Additive):
    """A row table and a column table.

    Parameters `rows [table_hw[0], d]` and `columns [table_hw[1], d]`, d the embed_dim, or half of it when stacked.

    Raises:
        PositionError: if embed_dim is odd and halves are stacked.

    Example:
        >>> spec = FactorizedSpec(
        ...     table_hw=(50, 50), combine="stack", axis_order=(1, 0), start="uniform"
        ... )
        >>> table = Factorized(spec, Dims(embed_dim=8, num_heads=1, depth=1))
        >>> table(Grid(3, 5)).shape
        torch.Size([15, 8])

    Reference:
        NaViT (arXiv 2307.06304), whose paper adds, stacks or multiplies and finds adding best; DETR's
        PositionEmbeddingLearned (columns first, 50 entries, an index past them is a CUDA assert there and an error
        here); Pix2Struct and Gemma 4 in transformers; timm's NaFlexVit, whose NaFlex batches read the grid off the
        largest patch coordinate and depend on the order of patches.
    """

    spec: FactorizedSpec
    rows: nn.Parameter
    columns: nn.Parameter

    def __init__(
        self, spec: FactorizedSpec, dims: Dims, *, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.spec, self.dims = spec, dims
        halves = 2 if spec.combine == "stack" else 1
        if dims.embed_dim % halves:
            raise PositionError(
                f"embed_dim is {dims.embed_dim}; an even number is required to stack two halves. Use combine='add'."
            )
        tables = [torch.empty(side, dims.embed_dim // halves) for side in spec.table_hw]
        for table in tables:
            if spec.start == "uniform":
                nn.init.uniform_(table, generator=generator)
            else:
                nn.init.normal_(table, std=spec.std, generator=generator)
        self.rows, self.columns = (nn.Parameter(table) for table in tables)

    def forward(self, grid: Grid, *, device: torch.device | None = None) -> Tensor:
        """Return `[n, embed_dim]`; frames of a clip share their code.

        Raises:
            PositionError: if absolute tables are too short for the grid, or another device is asked for.
        """
        check_device(self.rows, device)
        longer = max(grid.height, grid.width)
        y = self._line("rows", self.rows, grid.height, longer).unsqueeze(1)  # [h, 1, d]
        x = self._line("columns", self.columns, grid.width, longer).unsqueeze(0)  # [1, w, d]
        lattice = self._joined(y.expand(-1, grid.width, -1), x.expand(grid.height, -1, -1)).flatten(
            0, 1
        )
        return lattice.repeat(grid.frames, 1) if grid.frames > 1 else lattice

    def at(
        self,
        coords_yx: Tensor,
        extent_hw: tuple[float, float] | Tensor | None = None,
        *,
        valid: Tensor | None = None,
    ) -> Tensor:
        """Return the code at any cells, in any order: dropped tokens, packed images, batches of several sizes.

        Args:
            coords_yx: `[..., n, 2]` row and column of each token, whole numbers from 0 when absolute.
            extent_hw: sides of the grid, needed when fractional; a tensor `[..., 2]` gives every sample its own.
            valid: `[..., n]`, True where there is a token; the others get zeros, whatever their coordinates.

        Raises:
            PositionError: if shapes do not match, the extent is missing, or (on the CPU) a coordinate is not finite or
                past the tables, or between entries when absolute. On an accelerator an index past the tables is a
                device assert.
        """
        points = coords_yx if valid is None else blanked(coords_yx, valid)
        check_points(points, 2, "coords_yx", extent=extent_hw, rank=2)
        if self.spec.coords == "absolute":
            check_whole(points, "coords_yx")
            y, x = (self._looked_up(points[..., axis], axis) for axis in (0, 1))
        else:
            y, x = self._sampled(points, extent_hw)
        code = self._joined(y, x)
        return code if valid is None else blanked(code, valid)

    def _line(self, name: str, table: Tensor, side: int, longer: int) -> Tensor:
        """Return the vectors of one axis of a grid, `[side, d]`."""
        spec = self.spec
        if spec.coords == "absolute":
            if spec.offset + side > table.shape[0]:
                raise PositionError(
                    f"grid has {side} {name} and the table {table.shape[0]} entries, {spec.offset} of them skipped; "
                    "absolute tables end there. Use a smaller image, longer tables, or coords='fractional'."
                )
            return table[spec.offset : spec.offset + side]
        extent_hw = (longer, 1) if spec.aspect == "square" else None
        if recipe_of(spec.recipe).boundaries != "exact" and extent_hw is None:
            extent_hw = (side, 1)  # the source misplaces entries of a table's own length too
        return resample(
            table,
            source=Grid(table.shape[0], 1),
            target=Grid(side, 1),
            recipe=spec.recipe,
            extent_hw=extent_hw,
        )

    def _looked_up(self, index: Tensor, axis: int) -> Tensor:
        table, entry = (self.rows, self.columns)[axis], index.round().long() + self.spec.offset
        if readable(entry) and bool(((entry < 0) | (entry >= table.shape[0])).any()):
            raise PositionError(
                f"coords_yx reach from entry {int(entry.min())} to {int(entry.max())} of axis {axis} and the table has "
                f"{table.shape[0]}; cells inside it are required. Mask padding out with valid=."
            )
        return F.embedding(entry, table)

    def _sampled(
        self, points: Tensor, extent_hw: tuple[float, float] | Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if extent_hw is None:
            raise PositionError(
                "extent_hw is None with fractional coords; the sides of the grid are required. They are never read off "
                "the largest coordinate: pass them."
            )
        sizes = torch.as_tensor(extent_hw, device=points.device)
        if self.spec.aspect == "square":
            sizes = sizes.amax(-1, keepdim=True).expand_as(sizes)
        lines = []
        for axis, table in enumerate((self.rows, self.columns)):
            flat = torch.stack([points[..., axis], torch.zeros_like(points[..., axis])], dim=-1)
            extent = torch.stack([sizes[..., axis], torch.ones_like(sizes[..., axis])], dim=-1)
            lines.append(
                sample_table(
                    table,
                    flat,
                    source=Grid(table.shape[0], 1),
                    extent_hw=extent,
                    recipe=self.spec.recipe,
                )
            )
        return lines[0], lines[1]

    def _joined(self, y: Tensor, x: Tensor) -> Tensor:
        if self.spec.combine == "add":
            return y + x
        if self.spec.combine == "product":
            return y * x
        return torch.cat([(y, x)[axis] for axis in self.spec.axis_order], dim=-1)

    @classmethod
    def from_source(
        cls, state: Mapping[str, Tensor], spec: FactorizedSpec, dims: Dims
    ) -> Factorized:
        """Return the encoding with the tables of a source's state dict.

        Args:
            state: two entries, as timm's `pos_embed_y` and `pos_embed_x`, vit-pytorch's `pos_embed_height` and
                `pos_embed_width`, DETR's `row_embed.weight` and `col_embed.weight` (or transformers' names of them),
                Pix2Struct's `row_embedder.weight` and `column_embedder.weight`; or one entry
                `position_embedding_table (2, n, d)`, columns first (Gemma 4).
            spec: the filling.
            dims: sizes of the model.

        Raises:
            PositionError: if an entry is missing or of another shape.
        """
        if source_entry(state, "position_embedding_table") is not None:
            both = required_entry(state, "position_embedding_table", ranks=(3,))
            if both.shape[0] != 2:
                raise PositionError(
                    f"state holds position_embedding_table of shape {tuple(both.shape)}; (2, n, d), columns first, is "
                    "required. Pass the entry as its source wrote it."
                )
            own = {"rows": both[1], "columns": both[0]}
        else:
            own = {
                "rows": required_entry(state, *_ROWS, ranks=(2, 3)).flatten(0, -2),
                "columns": required_entry(state, *_COLUMNS, ranks=(2, 3)).flatten(0, -2),
            }
        return filled(cls(spec, dims), own, source="the state dict")
