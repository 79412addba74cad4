"""Tables with time: one vector a cell of a clip, or a spatial and a temporal table that are added. Hiera video."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import nn

from visionpos.encodings.doors import Additive, Dims, check_device
from visionpos.encodings.sources import filled, required_entry, sides, start
from visionpos.errors import PositionError
from visionpos.geometry.fields import check_fields
from visionpos.geometry.grid import Grid
from visionpos.geometry.recipes import recipe_of
from visionpos.geometry.resample import resample

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SpatioTemporalSpec:
    """Settings of a table with time.

    Args:
        grid_thw: frames, rows and columns that the table is trained on.
        separable: True for a spatial table plus a temporal one, False for one vector a cell of the clip.
        recipe: how other heights and widths are served.
        time_recipe: how other frame counts are served ("nearest" in TimeSformer, "sam" for linear); None refuses them.
        prefix_rows: rows for tokens that belong to no cell.
        std: standard deviation of the truncated normal start values.

    Raises:
        PositionError: if a side or count is out of range, or a recipe is unknown.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    kind: Literal["spatiotemporal"] = "spatiotemporal"
    grid_thw: tuple[int, int, int]
    separable: bool = True
    recipe: str = "timm"
    time_recipe: str | None = None
    prefix_rows: int = 0
    std: float = 0.02

    def __post_init__(self) -> None:
        check_fields(self)
        sides("grid_thw", self.grid_thw, axes=3)
        recipe_of(self.recipe)
        if self.time_recipe is not None:
            recipe_of(self.time_recipe)
        if self.prefix_rows < 0 or self.std < 0:
            raise PositionError(
                f"prefix_rows is {self.prefix_rows} and std {self.std}; numbers of at least 0 are required."
            )


class SpatioTemporal(Additive):
    """A learned code of clips, tokens frame by frame, row-major in each.

    Parameters: separable `spatial [prefix_rows + h * w, d]` and `temporal [t, d]`; joint one table alone, `spatial
    [prefix_rows + t * h * w, d]`. Prefix rows get no temporal part.

    Example:
        >>> spec = SpatioTemporalSpec(grid_thw=(8, 14, 14))
        >>> SpatioTemporal(spec, Dims(embed_dim=8, num_heads=1, depth=1))(
        ...     Grid(7, 9, frames=8)
        ... ).shape
        torch.Size([504, 8])

    Reference:
        Hiera video (arXiv 2306.00989), facebookresearch/hiera: pos_embed_spatial + pos_embed_temporal, no resizing;
        TimeSformer (arXiv 2102.05095), which resizes its time table to the nearest frame.
    """

    spec: SpatioTemporalSpec
    spatial: nn.Parameter
    temporal: nn.Parameter | None

    def __init__(
        self, spec: SpatioTemporalSpec, dims: Dims, *, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.spec, self.dims = spec, dims
        source = self.grid
        cells = source.height * source.width if spec.separable else source.size
        self.spatial = nn.Parameter(torch.empty(spec.prefix_rows + cells, dims.embed_dim))
        start(self.spatial, spec.std, generator)
        self.temporal = None
        if spec.separable:
            self.temporal = nn.Parameter(torch.empty(source.frames, dims.embed_dim))
            start(self.temporal, spec.std, generator)

    @property
    def grid(self) -> Grid:
        """Return the grid the table is trained on."""
        frames, height, width = self.spec.grid_thw
        return Grid(height, width, frames)

    def prefix(self) -> Tensor:
        """Return `[prefix_rows, embed_dim]`, the rows that belong to no cell."""
        return self.spatial[: self.spec.prefix_rows].clone()

    def forward(self, grid: Grid, *, device: torch.device | None = None) -> Tensor:
        """Return `[frames * h * w, embed_dim]`.

        Raises:
            PositionError: if the frames are not the trained ones and no time_recipe is set, or another device is asked
                for.
        """
        check_device(self.spatial, device)
        source, frames = self.grid, 1 if self.spec.separable else self.spec.grid_thw[0]
        space = resample(
            self.spatial[self.spec.prefix_rows :],
            source=Grid(source.height, source.width, frames),
            target=Grid(grid.height, grid.width, frames),
            recipe=self.spec.recipe,
        )
        if self.temporal is None:
            clip = self._in_time(space.reshape(frames, -1), grid.frames)  # [frames, h * w * d]
            # Cloned on the trained grid: an edit of the result must not reach the parameter.
            clip = clip.clone() if grid == source else clip
            return clip.reshape(grid.size, self.dims.embed_dim)
        time = self._in_time(self.temporal, grid.frames)
        return (time.unsqueeze(1) + space.unsqueeze(0)).flatten(0, 1)

    def _in_time(self, table: Tensor, frames: int) -> Tensor:
        """Return `[frames, k]` of a table `[t, k]`."""
        if frames == table.shape[0]:
            return table
        if self.spec.time_recipe is None:
            raise PositionError(
                f"grid has {frames} frames and the table {table.shape[0]}; equal counts are required without a "
                "time_recipe. Sample the trained number of frames, or set time_recipe='nearest' or 'sam'."
            )
        return resample(
            table,
            source=Grid(table.shape[0], 1),
            target=Grid(frames, 1),
            recipe=self.spec.time_recipe,
        )

    @classmethod
    def from_source(
        cls, state: Mapping[str, Tensor], spec: SpatioTemporalSpec, dims: Dims
    ) -> SpatioTemporal:
        """Return the encoding with the tables of a source's state dict.

        Args:
            state: entries `pos_embed_spatial` and `pos_embed_temporal` (Hiera), or `pos_embed` and `time_embed`
                (TimeSformer), each `(1, n, d)`; a joint table is `pos_embed` or `pos_embedding` alone.
            spec: the filling.
            dims: sizes of the model.

        Raises:
            PositionError: if an entry is missing or of another shape.
        """
        spatial = required_entry(
            state, "pos_embed_spatial", "pos_embed", "pos_embedding", ranks=(2, 3)
        )
        own = {"spatial": spatial.flatten(0, -2)}
        if spec.separable:
            time = required_entry(state, "pos_embed_temporal", "time_embed", ranks=(2, 3))
            own["temporal"] = time.flatten(0, -2)
        return filled(cls(spec, dims), own, source="the state dict")
