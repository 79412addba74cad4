"""Shaw: a learned vector a clipped difference, added to keys and values; also for each axis of a grid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import nn

from visionpos.encodings.doors import Dims, QueryBiasing
from visionpos.encodings.sources import start
from visionpos.errors import PositionError
from visionpos.geometry.fields import check_fields
from visionpos.geometry.grid import check_grid
from visionpos.geometry.line import check_rows, line_offsets
from visionpos.geometry.places import check_points
from visionpos.geometry.points import check_floats
from visionpos.geometry.relative import distinct_offsets
from visionpos.kernels.lookup import Lookup, looked_up, spent

if TYPE_CHECKING:
    from torch import Tensor

    from visionpos.geometry.grid import Grid


@dataclass(frozen=True, slots=True, kw_only=True)
class ShawSpec:
    """Settings of learned relative vectors.

    Args:
        reach: the longest difference with a vector of its own, one an axis, ordered (t,) y, x; longer ones share it.
            One axis is a line, and reads a grid row after row. 16 in the paper.
        values: whether values get vectors too; they add little.
        std: standard deviation of the truncated normal start values.

    Raises:
        PositionError: if a reach is below 1, or there are not 1 to 3, or std is negative.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    kind: Literal["shaw"] = "shaw"
    reach: tuple[int, ...] = (16,)
    values: bool = True
    std: float = 0.02

    def __post_init__(self) -> None:
        check_fields(self)
        if not 1 <= len(self.reach) <= 3 or min(self.reach) < 1:
            raise PositionError(
                f"reach is {self.reach}; 1 to 3 axes with a longest difference of at least 1 token each are required."
            )
        if self.std < 0:
            raise PositionError(f"std is {self.std}; a number of at least 0 is required.")


class Shaw(QueryBiasing):
    """`q . K[j - i] / sqrt(head_dim)` in the logits and `sum_j a[i, j] V[j - i]` in the output; one layer's own.

    One parameter an axis, `keys[axis] [2 * reach + 1, head_dim]`, and `values[axis]` likewise, shared by the heads; row
    0 is a key `reach` before the query. Differences alone matter (shift-relative), seen by each query in its own way;
    beyond the reach all are alike. The product with the table is taken before pairs read it: memory of `forward` is the
    bias, `[b, num_heads, n, m]`, and n rows of the table a head; never a vector a pair.

    Example:
        >>> from visionpos.geometry.grid import Grid
        >>> shaw = Shaw(ShawSpec(reach=(2,)), Dims(embed_dim=8, num_heads=2, depth=1))
        >>> shaw(torch.ones(1, 2, 5, 4), Grid(1, 5)).shape, shaw.rows(torch.tensor([[0.0], [-3.0]]))
        (torch.Size([1, 2, 5, 5]), tensor([[2],
                [4]]))

    Reference:
        Shaw et al. (arXiv 1803.02155). On a grid one table an axis is summed; no public vision model is
        there to follow.
    """

    spec: ShawSpec

    def __init__(
        self, spec: ShawSpec, dims: Dims, *, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.spec, self.dims = spec, dims
        self.keys = nn.ParameterList(self._tables(generator))
        self.values = nn.ParameterList(self._tables(generator) if spec.values else [])

    def _tables(self, generator: torch.Generator | None) -> list[nn.Parameter]:
        tables = [torch.empty(2 * reach + 1, self.dims.channels) for reach in self.spec.reach]
        for table in tables:
            start(table, self.spec.std, generator)
        return [nn.Parameter(table) for table in tables]

    def rows(self, offsets: Tensor) -> Tensor:
        """Return `[..., axes]` int64, the row of each axis's table, for differences `[..., axes]`, query minus key.

        Raises:
            PositionError: if there are more or fewer axes than tables, or (on the CPU) a difference is not finite.
        """
        check_points(offsets, len(self.spec.reach), "offsets")
        wide = offsets.to(torch.promote_types(torch.float32, offsets.dtype))
        reach = wide.new_tensor(self.spec.reach)  # clamped first: int64 does not hold all floats
        return (reach - wide.clamp(-reach, reach).round()).to(torch.int64)

    def forward(self, q: Tensor, grid: Grid, *, keys: Grid | None = None) -> Tensor:
        """Return `[b, num_heads, n, m]`, to be added to scaled logits.

        Args:
            q: `[b, num_heads, n, head_dim]`, unscaled: the last n tokens of the grid of keys.
            grid: lattice of the keys.
            keys: that lattice again, or None.

        Raises:
            PositionError: if q is no tokens of the grid, or the grid has other axes than the tables.
        """
        if keys is not None and keys != grid:
            raise PositionError(
                f"keys is {keys.shape} and grid {grid.shape} (t, y, x); one lattice is required, since differences are "
                "whole tokens. Pass the grid of all keys, and its last tokens as q."
            )
        return looked_up(self.lookups(q, grid), grid, q.shape[-2])

    def lookups(self, q: Tensor, grid: Grid) -> tuple[Lookup, ...]:
        """Return the bias as one product an axis with a table of differences."""
        check_floats(q, "q")
        check_grid(grid)
        check_rows(q, "q", (self.dims.num_heads, self.dims.channels), grid.size, whole=False)
        scaled = q * self.dims.channels**-0.5
        places = self._places(grid, q.device)
        return tuple(
            Lookup(scaled @ table.to(q.dtype).mT, rows)
            for table, rows in zip(self.keys, places, strict=True)
        )

    def term(self, attention: Tensor, grid: Grid) -> Tensor:
        """Return `[b, num_heads, n, head_dim]`, to be added to attention's output.

        Args:
            attention: `[b, num_heads, n, m]` after the softmax.
            grid: lattice of the keys.

        Raises:
            PositionError: if the spec has no vectors for values, or attention is none of the grid.
        """
        check_floats(attention, "attention")
        if not self.spec.values:
            raise PositionError(
                "values is False; this encoding has no vectors for values. Build it with ShawSpec(values=True)."
            )
        check_grid(grid)
        check_rows(attention, "attention", (self.dims.num_heads, grid.size), grid.size, whole=False)
        total: Tensor | None = None
        for table, rows in zip(self.values, self._places(grid, attention.device), strict=True):
            part = spent(attention, rows, len(table), grid) @ table.to(attention.dtype)
            total = part if total is None else total + part
        assert total is not None  # noqa: S101 (there is at least one axis)
        return total

    def _places(self, grid: Grid, device: torch.device) -> tuple[Tensor, ...]:
        """Return the row of every difference of a grid, one tensor an axis."""
        axes = len(self.spec.reach)
        offsets = line_offsets(grid, device=device)
        if axes > 1:
            offsets = distinct_offsets(grid, device=device)
            if offsets.shape[-1] > axes:
                raise PositionError(
                    f"grid {grid.shape} (t, y, x) has frames and reach {self.spec.reach} {axes} axes; one reach an "
                    "axis is required. Give reach a number for t."
                )
            offsets = nn.functional.pad(offsets, (axes - offsets.shape[-1], 0))
        return self.rows(offsets).unbind(-1)
