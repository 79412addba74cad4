"""Order: the token orders of vision towers that do not go row by row, as indices into the row-major order.

A Grid enters; a permutation leaves. `coords[order]` and `rotation.select(order)` follow it; `inverse_order` undoes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from visionpos.errors import PositionError
from visionpos.geometry.grid import is_whole

if TYPE_CHECKING:
    from torch import Tensor

    from visionpos.geometry.grid import Grid


def merge_order(grid: Grid, merge: int = 2, *, device: torch.device | None = None) -> Tensor:
    """Return the order of a tower whose tokens stand in blocks of merge x merge patches.

    Args:
        grid: patches before merging; every frame is ordered alike.
        merge: side of a block; 1 is row-major.
        device: where to build.

    Returns:
        `[n]` int64: which row-major token stands at each place of the tower. Blocks are row-major among themselves and
        inside, so each run of merge * merge tokens becomes one merged cell.

    Raises:
        PositionError: if a side is not divisible by merge.

    Example:
        >>> from visionpos.geometry.grid import Grid
        >>> merge_order(Grid(2, 4)).tolist()
        [0, 1, 4, 5, 2, 3, 6, 7]

    Reference:
        Qwen2-VL (arXiv 2409.12191); transformers vision_utils.get_vision_position_ids. Also GLM-4V, Ernie, MiniMax-M3.
    """
    cells = grid.merged(merge)
    index = torch.arange(grid.size, device=device)
    blocks = index.view(grid.frames, cells.height, merge, cells.width, merge)
    return blocks.transpose(2, 3).flatten()


def window_order(
    grid: Grid, window: int, *, merge: int = 1, device: torch.device | None = None
) -> tuple[Tensor, Tensor]:
    """Return the order in which window attention takes the merged cells, and where its windows end.

    Args:
        grid: patches before merging.
        window: side of a window in merged cells; windows at the right and lower border are cut off, not padded.
        merge: side of a merge block in patches.
        device: where to build.

    Returns:
        `[cells]` int64, which row-major merged cell stands at each place: frame by frame, window by window, row by
        row; and `[windows + 1]` int64 boundaries counted in patches, from 0 on (`cu_seqlens`).

    Raises:
        PositionError: if window is below 1 or a side is not divisible by merge.

    Example:
        >>> from visionpos.geometry.grid import Grid
        >>> order, ends = window_order(Grid(4, 10, frames=2), 4, merge=2)
        >>> order.tolist()
        [0, 1, 2, 3, 5, 6, 7, 8, 4, 9, 10, 11, 12, 13, 15, 16, 17, 18, 14, 19]
        >>> ends.tolist()
        [0, 32, 40, 72, 80]

    Reference:
        Qwen2.5-VL (arXiv 2502.13923): window 112 px = 4 x 4 merged cells; transformers vision_utils
        .get_vision_window_index, which pads with empty windows and drops them again.
    """
    if not is_whole(window):
        raise PositionError(
            f"window is {window!r}; a whole side of at least 1 merged cell is required."
        )
    cells = grid.merged(merge)
    t, y, x = torch.meshgrid(
        *(torch.arange(side, device=device) for side in cells.shape), indexing="ij"
    )
    down, across = -(-cells.height // window), -(-cells.width // window)
    which = (t * down + y // window) * across + x // window
    place = (which * window + y % window) * window + x % window
    order = place.flatten().argsort()
    heights = _cut(cells.height, down, window, device)
    widths = _cut(cells.width, across, window, device)
    sizes = (heights.unsqueeze(1) * widths).flatten().repeat(cells.frames) * (merge * merge)
    ends = sizes.cumsum(0)
    return order, torch.cat([ends.new_zeros(1), ends])


def token_order(cells: Tensor, unit: int) -> Tensor:
    """Return the order of tokens that move with their cells, each a run of `unit` tokens.

    Args:
        cells: `[cells]` int64, an order of merged cells.
        unit: tokens of a cell, merge * merge.

    Returns:
        `[cells * unit]` int64.

    Example:
        >>> token_order(torch.tensor([1, 0]), 4).tolist()
        [4, 5, 6, 7, 0, 1, 2, 3]
    """
    if not is_whole(unit):
        raise PositionError(
            f"unit is {unit!r}; a whole number of at least 1 token a cell is required."
        )
    return (cells.unsqueeze(-1) * unit + torch.arange(unit, device=cells.device)).flatten()


def inverse_order(order: Tensor) -> Tensor:
    """Return the permutation that undoes one: `x[order][inverse_order(order)]` is x.

    Args:
        order: `[n]` int64, each of 0 ... n - 1 once.

    Example:
        >>> inverse_order(torch.tensor([2, 0, 1])).tolist()
        [1, 2, 0]
    """
    return order.argsort()


def _cut(side: int, windows: int, window: int, device: torch.device | None) -> Tensor:
    """Return how long each window of a side is, `[windows]`: the last one what is left."""
    starts = torch.arange(windows, device=device) * window
    return (side - starts).clamp(max=window)
