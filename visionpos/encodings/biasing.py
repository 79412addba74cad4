"""The door `bias` as abstract modules: position that is added to attention logits. `doors` shows them with the others.

Biases are functions of coordinate differences first; the dense `[heads, n, m]` tensor is one rendering of them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from visionpos.encodings.guard import Guarded, check_home
from visionpos.errors import PositionError
from visionpos.geometry.grid import check_grid
from visionpos.geometry.line import check_line, differences, laid, line_offsets, line_steps
from visionpos.geometry.places import check_points
from visionpos.geometry.points import check_floats, known
from visionpos.geometry.precision import full_precision
from visionpos.geometry.ranges import check_layer, is_integer
from visionpos.geometry.relative import distinct_offsets
from visionpos.kernels.bias import expand

if TYPE_CHECKING:
    from torch import Tensor

    from visionpos.encodings.doors import Dims
    from visionpos.geometry.grid import Grid
    from visionpos.kernels.lookup import ScoreMod


class Biasing(Guarded, ABC):
    """An encoding that adds a function of coordinate differences to attention logits.

    `values` is that function; `forward` is its dense rendering, evaluated once for each distinct difference of a grid.
    """

    spec: Any
    dims: Dims

    @abstractmethod
    def values(self, offsets: Tensor) -> Tensor:
        """Return `[num_heads, ...]`, the bias at differences `[..., axes]`, query minus key, in cells."""

    @property
    def axes(self) -> int | None:
        """Return how many axes a difference has; None for those of the grid, 1 for a line, row after row."""
        return None

    def prefix_values(self) -> Tensor | None:
        """Return `[num_heads, 3]`: prefix to patch, patch to prefix, prefix to prefix; None for zeros."""
        return None

    def distinct(self, grid: Grid, *, device: torch.device | None = None) -> Tensor:
        """Return `[num_heads, (2h - 1)(2w - 1)]`, the bias at every difference of a grid, in `distinct_offsets` order.

        This small table is all that a kernel needs; encodings whose bias depends on the grid's size override it.
        """
        differing = line_offsets if self.axes == 1 else distinct_offsets
        return self.values(differing(grid, device=self.home(device)))

    def score(self, grid: Grid, *, device: torch.device | None = None) -> ScoreMod | None:  # noqa: ARG002
        """Return a score function of its own, where no table of differences holds the bias; None elsewhere."""
        return None

    def along(
        self,
        queries: int,
        keys: int | None = None,
        *,
        device: torch.device | None = None,
        **where: Any,
    ) -> Tensor:
        """Return `[num_heads, queries, keys]` for tokens in a line, whose last ones are the queries.

        The bias is evaluated at the queries + keys - 1 differences alone.

        Args:
            queries: how many.
            keys: how many, cached ones too; as many as queries when None.
            device: where to build; with the parameters when None.
            where: what `values` of this encoding takes beside differences.

        Raises:
            PositionError: if there are fewer keys than queries.
        """
        keys = queries if keys is None else keys
        check_line(queries, keys)
        steps = line_steps(queries, keys, device=self.home(device)).unsqueeze(-1)
        values: Any = self.values
        return laid(values(steps, **where), queries, keys)

    def of_layer(self, grid: Grid, layer: int = 0, *, device: torch.device | None = None) -> Tensor:
        """Return `distinct` of one layer: the same for all, where layers share the bias.

        Raises:
            PositionError: if there is no such layer.
        """
        check_layer(layer, self.dims.depth)
        return self.distinct(grid, device=device)

    def between(self, queries: Tensor, keys: Tensor, **where: Any) -> Tensor:
        """Return `[num_heads, ..., n, m]` at any coordinates: dropped tokens, strided queries, packed images.

        Args:
            queries: `[..., n, axes]` coordinates in cells.
            keys: `[..., m, axes]`.
            where: what `values` of this encoding takes beside differences: a window_hw, an extent, a layer.

        Raises:
            PositionError: if the two have other axes, or (on the CPU) hold NaN, infinity, or ids that their dtype
                cannot count.
        """
        check_points(queries, None, "queries")
        check_points(keys, queries.shape[-1], "keys")
        if min(queries.ndim, keys.ndim) < 2:
            raise PositionError(
                f"queries have shape {tuple(queries.shape)} and keys {tuple(keys.shape)}; [..., n, axes] and [..., m, "
                "axes] are required. Use unsqueeze(0) for a single token."
            )
        values: Any = self.values
        found: Tensor = values(differences(queries, keys), **where)
        return found

    def forward(self, grid: Grid, *, prefix: int = 0, device: torch.device | None = None) -> Tensor:
        """Return the bias of every pair of tokens, `[num_heads, prefix + n, prefix + n]`: it grows as n x n.

        Args:
            grid: tokens, row-major.
            prefix: leading tokens without position; their rows and columns come from `prefix_values`.
            device: where to build; with the parameters when None.

        Raises:
            PositionError: if prefix is negative, or the parameters lie on another device.
        """
        return self.dense(self.distinct(grid, device=device), grid, prefix=prefix)

    def dense(self, table: Tensor, grid: Grid, *, prefix: int = 0) -> Tensor:
        """Return `[num_heads, prefix + n, prefix + n]` from the `distinct` values of a grid."""
        check_prefix(prefix)
        check_grid(grid)
        _check_table(table, grid)
        own = self.prefix_values() if prefix else None
        return expand(table, None if own is None else own.to(table.dtype), grid, prefix)

    def home(self, device: torch.device | None = None) -> torch.device | None:
        """Return where to build: with the parameters, or on `device` if there are none.

        Raises:
            PositionError: if a device other than the parameters' is asked for.
        """
        weight = next(self.parameters(), None)
        if weight is None:
            return device
        check_home(weight, device, "the parameters are")
        return weight.device


class QueryBiasing(Guarded, ABC):
    """An encoding that adds to attention logits what a query and a coordinate difference say together."""

    spec: Any
    dims: Dims

    @abstractmethod
    def forward(self, q: Tensor, grid: Grid, *, keys: Grid | None = None) -> Tensor:
        """Return `[b, num_heads, n, m]` for queries `[b, num_heads, n, head_dim]`; keys share the grid when None."""


class Extending(Guarded, ABC):
    """An encoding whose bias, a function of the query token and a coordinate difference, becomes channels of q and k.

    A plain dot product of the longer q and k then holds it, so no n x n tensor is ever built.
    """

    spec: Any
    dims: Dims

    @property
    def scale(self) -> float:
        """Return the factor on q.k that attention must be given: the longer head must not change it."""
        return float(self.dims.channels**-0.5)

    @abstractmethod
    def forward(
        self, q: Tensor, k: Tensor, tokens: Tensor, grid: Grid, *, prefix: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Return longer q and k for `[b, num_heads, prefix + n, head_dim]` made from `[b, prefix + n, embed_dim]`."""


def check_flat(grid: Grid) -> None:
    """Refuse a grid with frames, for tables of (y, x) differences.

    Raises:
        PositionError: if the grid has more than one frame.
    """
    check_grid(grid)
    if grid.frames > 1:
        raise PositionError(
            f"grid {grid.shape} (t, y, x) has {grid.frames} frames; a bias of (y, x) differences serves one frame. "
            "Call it with Grid(height, width)."
        )


def check_prefix(prefix: int) -> None:
    """Refuse what is no count of tokens without position.

    Raises:
        PositionError: naming it.
    """
    if not is_integer(prefix) or prefix < 0:
        raise PositionError(f"prefix is {prefix!r}; a token count of at least 0 is required.")


def powered(far: Tensor, exponent: float | Tensor) -> Tensor:
    """Return distances to a power above 0; the gradient at distance 0 is 0, where that of a root has no number."""
    still = far == 0
    return torch.where(still, 0.0, torch.where(still, 1.0, far) ** exponent)


def check_offsets(offsets: Tensor, window: Grid) -> None:
    """Refuse differences that a table of a window has no row for; values are not checked while compiling or in vmap.

    Raises:
        PositionError: if offsets have not two axes, or one is not whole or reaches a side of the window.
    """
    check_points(offsets, None, "offsets")
    if offsets.shape[-1] != 2:
        raise PositionError(
            f"offsets have {offsets.shape[-1]} axes; a table of differences needs 2: y, x."
        )
    if not known(offsets) or not offsets.numel():
        return
    reach = offsets.new_tensor([window.height, window.width])
    if bool(((offsets.abs() >= reach) | (offsets != offsets.round())).any()):
        raise PositionError(
            f"offsets reach {float(offsets.abs().max())}; a table of window {window.shape[1:]} has whole differences "
            "below its sides only. Pass window_hw with the larger window, or round the coordinates."
        )


def _check_table(table: Tensor, grid: Grid) -> None:
    """Refuse a table that has not one column a difference of the grid."""
    if torch.compiler.is_compiling():
        return  # sizes may be symbols there, and a table inside a graph is made by our own code
    check_floats(table, "table")
    sides = grid.shape if grid.frames > 1 else grid.shape[1:]
    columns = math.prod(2 * side - 1 for side in sides)
    if table.ndim != 2 or table.shape[-1] != columns:
        raise PositionError(
            f"table has shape {tuple(table.shape)}; [num_heads, {columns}], one number a difference of grid "
            f"{grid.shape}, is required. Make it with distinct(grid)."
        )


def blank_linear(inputs: int, outputs: int, *, bias: bool = True) -> nn.Linear:
    """Return a linear layer whose start values are left to the caller, so that no global draw is made."""
    layer = nn.Linear(inputs, outputs, bias=bias, device="meta")
    return layer.to_empty(device=torch.get_default_device())


def through(x: Tensor, layer: nn.Linear) -> Tensor:
    """Return a layer's output in the dtype of x, under autocast too: biases are formed in float32 or better."""
    bias: Tensor | None = layer.bias
    with full_precision(x.device):
        return nn.functional.linear(
            x, layer.weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
        )
