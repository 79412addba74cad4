"""Decomposed bias: the query times a learned vector of each axis's difference. MViTv2, ViTDet, SAM, BoTNet, HaloNet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import torch
from torch import nn

from visionpos.encodings.biasing import check_prefix
from visionpos.encodings.doors import Dims, QueryBiasing
from visionpos.encodings.sources import required_entry, sides, start
from visionpos.errors import PositionError
from visionpos.geometry.fields import check_fields
from visionpos.geometry.grid import Grid
from visionpos.geometry.recipes import recipe_of
from visionpos.geometry.resample import resample

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

_KEYS = ("rel_pos_t", "rel_pos_h", "rel_pos_w")  # MViTv2, ViTDet, SAM: query minus key
_TURNED = ("frames_rel", "height_rel", "width_rel")  # BoTNet, HaloNet: key minus query


@dataclass(frozen=True, slots=True, kw_only=True)
class DecomposedBiasSpec:
    """Settings of a decomposed, query-dependent bias.

    Args:
        extent: sides of the grid the tables are trained on, (t,) y, x: of queries or keys, whichever is longer.
        keys: what another key grid is. "pooled": the same view at another stride (MViTv2, SAM): distances are measured
            on the finer lattice. "around": a window of the same stride that surrounds the queries (HaloNet).
        scaled: multiply by head_dim ** -0.5, as BoTNet does with scale_pos_embed; MViTv2 and SAM use q unscaled.
        recipe: how the 1-D tables serve another length: "sam" is linear.
        std: standard deviation of the truncated normal start values; 0 starts at zero, as SAM does.

    Raises:
        PositionError: if a field is out of range.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    kind: Literal["decomposed_bias"] = "decomposed_bias"
    extent: tuple[int, ...]
    keys: Literal["pooled", "around"] = "pooled"
    scaled: bool = False
    recipe: str = "sam"
    std: float = 0.02

    def __post_init__(self) -> None:
        check_fields(self)
        sides("extent", self.extent, axes=3 if len(self.extent) == 3 else 2)
        recipe_of(self.recipe)
        if self.std < 0:
            raise PositionError(f"std is {self.std}; a number of at least 0 is required.")


class DecomposedBias(QueryBiasing):
    """`q . R_y[dy] + q . R_x[dx]` (`+ q . R_t[dt]`), added to the scaled q.k: one vector an axis and difference.

    One parameter an axis, `tables[axis] [2 * side - 1, head_dim]`, axes (t,) y, x, shared by the heads; row 0 is the
    most negative query-minus-key difference. Differences alone matter (shift-relative), seen by each query in its own
    way. q is the query after its norms, before the factor head_dim ** -0.5. Prefix tokens get 0 in rows and columns.
    Memory of `forward` is `[b, num_heads, n, m]`: it grows as n x m.

    Example:
        >>> bias = DecomposedBias(
        ...     DecomposedBiasSpec(extent=(3, 5)), Dims(embed_dim=8, num_heads=2, depth=1)
        ... )
        >>> bias(torch.ones(1, 2, 15, 4), Grid(3, 5)).shape
        torch.Size([1, 2, 15, 15])
        >>> bias(torch.ones(1, 2, 16, 4), Grid(3, 5), keys=Grid(2, 3), prefix=1).shape
        torch.Size([1, 2, 16, 7])

    Reference:
        MViTv2 (arXiv 2112.01526), facebookresearch/mvit; ViTDet (arXiv 2203.16527), SAM (arXiv 2304.02643),
        facebookresearch/segment-anything image_encoder.py; BoTNet (arXiv 2101.11605), HaloNet (arXiv 2103.12731) as in
        timm. Where strides do not divide, differences are cut to whole rows in float32, as the sources do.
    """

    spec: DecomposedBiasSpec

    def __init__(
        self, spec: DecomposedBiasSpec, dims: Dims, *, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.spec, self.dims = spec, dims
        tables = [torch.empty(2 * side - 1, dims.channels) for side in spec.extent]
        for table in tables:
            start(table, spec.std, generator)
        self.tables = nn.ParameterList([nn.Parameter(table) for table in tables])

    def vectors(self, axis: int, queries: int, keys: int) -> Tensor:
        """Return `[queries, keys, head_dim]`, the vector of every pair of rows (or columns, or frames).

        Args:
            axis: index into `extent`.
            queries: side of the query grid on this axis.
            keys: side of the key grid.
        """
        table = self.tables[axis]
        source, target = Grid(table.shape[0], 1), Grid(2 * max(queries, keys) - 1, 1)
        rows = resample(table, source=source, target=target, recipe=self.spec.recipe)
        index = _rows(queries, keys, pooled=self.spec.keys == "pooled", device=table.device)
        vectors: Tensor = rows.index_select(0, index.flatten()).unflatten(0, (queries, keys))
        return vectors

    def forward(
        self, q: Tensor, grid: Grid, *, keys: Grid | None = None, prefix: int = 0
    ) -> Tensor:
        """Return `[b, num_heads, prefix + n, prefix + m]`.

        Args:
            q: `[b, num_heads, prefix + n, head_dim]`, unscaled.
            grid: lattice of the queries.
            keys: lattice of the keys; that of the queries when None.
            prefix: leading tokens without position, in q and in k.

        Raises:
            PositionError: if q is no batch of the grid's tokens, prefix is negative, or a grid has other axes than the
                tables.
        """
        check_prefix(prefix)
        axes = len(self.tables)
        keys = grid if keys is None else keys
        for name, lattice in (("grid", grid), ("keys", keys)):
            if axes == 2 and lattice.frames > 1:
                raise PositionError(
                    f"{name} {lattice.shape} (t, y, x) has frames and the tables are (y, x); one table an axis is "
                    "required. Give extent a side for t."
                )
        if q.ndim != 4:
            raise PositionError(
                f"q has shape {tuple(q.shape)}; [b, num_heads, tokens, head_dim] is required. Use unsqueeze(0) for one "
                "sample."
            )
        if q.shape[-2] != prefix + grid.size or q.shape[-1] != self.dims.channels:
            raise PositionError(
                f"q has {q.shape[-2]} tokens of {q.shape[-1]} channels; prefix {prefix} + grid {grid.shape} and "
                f"head_dim {self.dims.channels} are required. Pass the grid of these queries."
            )
        patches = q[..., prefix:, :].unflatten(-2, grid.shape[-axes:])
        parts = [self._along(patches, axis, keys) for axis in range(axes)]
        bias = parts[0]
        for part in parts[1:]:
            bias = bias + part  # [b, heads, *grid, *keys]
        bias = bias.flatten(-axes).flatten(2, -2)
        if self.spec.scaled:
            bias = bias * self.dims.channels**-0.5
        return nn.functional.pad(bias, (prefix, 0, prefix, 0)) if prefix else bias

    def _along(self, patches: Tensor, axis: int, keys: Grid) -> Tensor:
        """Return `[b, heads, *grid, *keys]` of one axis, 1 along the key axes of the others."""
        axes = len(self.tables)
        side, span = patches.shape[2 + axis], keys.shape[axis - axes]
        # The axis goes first, to be one batch of the product; the queries' other axes are its rows.
        turned = patches.movedim(2 + axis, 0).flatten(1, -2)  # [side, b * heads * others, head_dim]
        products = turned @ self.vectors(axis, side, span).to(turned.dtype).mT
        others = patches.movedim(2 + axis, 0).shape[1:-1]
        # [b, heads, *grid, span]; laid out so while it is small, or the sum of the axes would be copied as a whole.
        spread = products.unflatten(1, others).movedim(0, 2 + axis).contiguous()
        shape = [1] * axes
        shape[axis] = span
        along: Tensor = spread.unflatten(-1, shape)
        return along

    @classmethod
    def from_source(cls, state: Mapping[str, Tensor], spec: DecomposedBiasSpec, dims: Dims) -> Self:
        """Return a module with a source's tables.

        Args:
            state: state dict of one attention module: `rel_pos_h`, `rel_pos_w` (and `rel_pos_t`) of MViTv2, ViTDet and
                SAM, in segment-anything, timm or transformers; or `height_rel`, `width_rel` of timm's BoTNet and
                HaloNet, which count key minus query and are turned round.
            spec: with the extent the tables were trained on.
            dims: sizes of the model.

        Raises:
            PositionError: if a table is missing, or does not fit the extent.
        """
        module = cls(spec, dims)
        for axis, side in enumerate(spec.extent):
            place = axis - len(spec.extent)
            table = required_entry(state, _KEYS[place], _TURNED[place])
            if table.shape != module.tables[axis].shape:
                raise PositionError(
                    f"state holds {_KEYS[place]} of shape {tuple(table.shape)}; side {side} of extent {spec.extent} "
                    f"and head_dim {dims.channels} need {(2 * side - 1, dims.channels)}. Give the extent the tables "
                    "were trained on; other grids are served from it."
                )
            turned = any(key.split(".")[-1] == _TURNED[place] for key in state)
            rows = table.flip(0) if turned else table
            module.tables[axis] = nn.Parameter(rows.detach().clone())
        return module


def _rows(queries: int, keys: int, *, pooled: bool, device: torch.device) -> Tensor:
    """Return `[queries, keys]` int64, the table's row of every pair.

    Pooled lattices are counted on the finer one, in float32 and cut to whole numbers: the sources' own arithmetic.
    """
    finer_q, finer_k = (
        (max(keys / queries, 1.0), max(queries / keys, 1.0)) if pooled else (1.0, 1.0)
    )
    q = torch.arange(queries, device=device, dtype=torch.float32).unsqueeze(1) * finer_q
    k = torch.arange(keys, device=device, dtype=torch.float32).unsqueeze(0) * finer_k
    return (q - k + (keys - 1) * finer_k).to(torch.int64)
