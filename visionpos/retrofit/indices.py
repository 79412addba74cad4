"""Index tensors: which pair of tokens reads which entry of a table, for grids that need not be square."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from visionpos.retrofit.paths import Sides

NOTED = "visionpos_sides"


def absolute_differences(grid: Sides, step: int, device: torch.device) -> Tensor:
    """Return `[queries, keys]`: |dy| * width + |dx| of every pair of tokens.

    Args:
        grid: (rows, columns) of keys.
        step: queries lie so many cells apart, beginning with the first.
        device: where the result lies.
    """
    height, width = grid
    y, x = (torch.arange(side, device=device) for side in grid)
    rows = (y[::step, None] - y[None, :]).abs()  # [query y, key y]
    columns = (x[::step, None] - x[None, :]).abs()
    both = (
        rows[:, None, :, None] * width + columns[None, :, None, :]
    )  # [query y, query x, key y, key x]
    return both.reshape(-1, height * width)


def window_index(grid: Sides, device: torch.device, *, cls: bool) -> Tensor:
    """Return `[n, n]`: the row of a table `[(2h - 1)(2w - 1) (+ 3)]` that every pair of tokens reads, query minus key.

    Args:
        grid: (rows, columns) of tokens.
        device: where the result lies.
        cls: whether a class token stands in front, whose three rows are the last.
    """
    height, width = grid
    y, x = _places(grid, device)
    dy, dx = (place[:, None] - place[None, :] for place in (y, x))
    index = (dy + height - 1) * (2 * width - 1) + dx + width - 1
    if not cls:
        return index
    count = (2 * height - 1) * (2 * width - 1)
    top = torch.full_like(index[:1], count)  # class token to tokens
    side = torch.cat(
        [torch.full_like(index[:1, :1], count + 2), torch.full_like(index[:, :1], count + 1)]
    )
    return torch.cat([side, torch.cat([top, index])], dim=1)


def displacements(grid: Sides, device: torch.device) -> Tensor:
    """Return `[2, n, n]`: key minus query (y, x) of every pair of tokens, counted from 0."""
    y, x = _places(grid, device)
    dy, dx = (place[None, :] - place[:, None] for place in (y, x))
    return torch.stack([dy + grid[0] - 1, dx + grid[1] - 1])


def signed_differences(grid: Sides, like: Tensor) -> Tensor:
    """Return `[1, n, n, 3]`: x, y and squared distance from every token to every other."""
    y, x = (place.to(like.dtype) for place in _places(grid, like.device))
    dy, dx = (place[None, :] - place[:, None] for place in (y, x))
    return torch.stack([dx, dy, dx**2 + dy**2], dim=-1).unsqueeze(0)


def _places(grid: Sides, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the row and the column `[n]` of every token, row-major."""
    y = torch.arange(grid[0], device=device).repeat_interleave(grid[1])
    x = torch.arange(grid[1], device=device).repeat(grid[0])
    return y, x


def sides_of_index(index: Tensor) -> Sides | None:
    """Return the sides of the grid whose absolute differences an index [n, n] numbers, row-major; None without data.

    Token 0 and token j differ by j as long as both are in one row; the first token of the next row is at distance
    `width`, too, so the width is where token 1 sees a jump.
    """
    count = int(index.shape[0])
    if index.is_meta:
        return None
    if count == 1:
        return 1, 1
    step = index[1].tolist()
    width = next((j for j in range(2, count) if step[j] != j - 1), count)
    return count // width, width


def note_sides(module: Any, name: str) -> Sides | None:
    """Note with a module the sides that its index tells, for graphs, which cannot look into it; return them."""
    sides = sides_of_index(getattr(module, name))
    object.__setattr__(module, NOTED, sides)
    return sides
