"""Relative positions: the distinct coordinate differences of a grid, and which of them every pair of tokens has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from visionpos.errors import PositionError
from visionpos.geometry.grid import check_grid

if TYPE_CHECKING:
    from torch import Tensor

    from visionpos.geometry.grid import Grid

Metric = Literal["l1", "l2", "linf"]


def distinct_offsets(grid: Grid, *, device: torch.device | None = None) -> Tensor:
    """Return every difference that two tokens of a grid can have, query minus key.

    Args:
        grid: h rows and w columns; t frames add a leading axis.
        device: where to build.

    Returns:
        `[(2h - 1)(2w - 1), 2]` float32 (y, x) for one frame, `[(2t - 1)(2h - 1)(2w - 1), 3]` (t, y, x) for more,
        row-major from the most negative difference on.

    Example:
        >>> from visionpos.geometry.grid import Grid
        >>> distinct_offsets(Grid(1, 2)).tolist()
        [[0.0, -1.0], [0.0, 0.0], [0.0, 1.0]]
    """
    check_grid(grid)
    sides = grid.shape if grid.frames > 1 else grid.shape[1:]
    ticks = [torch.arange(1 - side, side, device=device, dtype=torch.float32) for side in sides]
    return torch.stack(torch.meshgrid(*ticks, indexing="ij"), dim=-1).flatten(0, -2)


def relative_index(grid: Grid, *, device: torch.device | None = None) -> Tensor:
    """Return which row of `distinct_offsets` every pair of tokens has.

    Args:
        grid: the lattice.
        device: where to build.

    Returns:
        `[n, n]` int64, query by key: it grows as n x n.

    Example:
        >>> from visionpos.geometry.grid import Grid
        >>> relative_index(Grid(2, 2)).tolist()
        [[4, 3, 1, 0], [5, 4, 2, 1], [7, 6, 4, 3], [8, 7, 5, 4]]

    Reference:
        Swin Transformer (arXiv 2103.14030), microsoft/Swin-Transformer: its relative_position_index.
    """
    rows, columns = linear_index(grid, device=device)
    return rows.unsqueeze(1) - columns


def linear_index(grid: Grid, *, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """Return two numbers a token whose difference, query minus key, is the pair's row of `distinct_offsets`.

    Args:
        grid: the lattice.
        device: where to build.

    Returns:
        `[n]` int64 for queries and for keys.

    Example:
        >>> from visionpos.geometry.grid import Grid
        >>> [numbers.tolist() for numbers in linear_index(Grid(2, 2))]
        [[4, 5, 7, 8], [0, 1, 3, 4]]
    """
    check_grid(grid)
    sides = grid.shape if grid.frames > 1 else grid.shape[1:]
    linear = torch.arange(sides[-1], device=device)
    middle, stride = sides[-1] - 1, 2 * sides[-1] - 1
    for side in reversed(sides[:-1]):
        linear = ((torch.arange(side, device=device) * stride).unsqueeze(1) + linear).flatten()
        middle, stride = middle + (side - 1) * stride, (2 * side - 1) * stride
    # A difference of linear numbers is the linear number of the difference, moved so that it starts at 0.
    return linear + middle, linear


def distances(offsets: Tensor, metric: Metric) -> Tensor:
    """Return how long coordinate differences are.

    Args:
        offsets: `[..., axes]`, in cells.
        metric: "l1" adds the axes (steps along the lattice), "l2" is Euclid's, "linf" takes the longest axis.

    Returns:
        `[...]`, in cells, at least 0; its gradient at difference 0 is 0.

    Raises:
        PositionError: for another metric.

    Example:
        >>> [distances(torch.tensor([3.0, -4.0]), metric).item() for metric in ("l1", "l2", "linf")]
        [7.0, 5.0, 4.0]
    """
    if metric == "l1":
        return offsets.abs().sum(-1)
    if metric == "l2":
        square = offsets.square().sum(-1)
        still = square == 0  # the root has no slope there: its gradient would be NaN, and is 0
        return torch.where(still, 0.0, torch.where(still, 1.0, square).sqrt())
    if metric == "linf":
        return offsets.abs().amax(-1)
    raise PositionError(f"metric is {metric!r}; it must be 'l1', 'l2' or 'linf'.")
