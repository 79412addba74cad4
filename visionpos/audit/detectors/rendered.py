"""Rendered: what an encoding gives for a grid, as one tensor, whatever its door."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from visionpos.audit.detectors.finding import UnfitError
from visionpos.encodings import (
    Additive,
    Biasing,
    Conditional,
    ConvRelative,
    Extending,
    Gpsa,
    PairBiasing,
    PromptEncoder,
    QueryBiasing,
    Rotary,
    Turning,
)
from visionpos.geometry.grid import Grid


def rendered(encoding: Any, grid: Grid, seed: int = 0) -> Tensor:
    """Return what an encoding gives for a grid; contents, where it reads any, come from the seed.

    Raises:
        UnfitError: if it has none of the doors of `visionpos.encodings`.
        PositionError: if it does not serve the grid.
    """
    given: Tensor
    if isinstance(encoding, Additive):
        given = encoding(grid)
        return given
    if isinstance(encoding, PromptEncoder):
        return encoding.grid_code(grid)
    if isinstance(encoding, Rotary):
        turn = encoding(grid)
        return torch.cat([turn.cos, turn.sin], dim=-1)
    if isinstance(encoding, Biasing):
        given = encoding(grid)
        return given
    return _of_contents(encoding, grid, torch.Generator().manual_seed(seed))


def _of_contents(encoding: Any, grid: Grid, draw: torch.Generator) -> Tensor:
    dims = encoding.dims
    count = dims.prefix + grid.size + dims.suffix
    tokens = torch.randn(1, count, dims.embed_dim, generator=draw)
    heads = torch.randn(3, 1, dims.num_heads, count, dims.channels, generator=draw)
    patches = heads[..., dims.prefix : dims.prefix + grid.size, :]
    given: Tensor
    if isinstance(encoding, Turning):
        given = encoding(grid).apply(patches[0])
    elif isinstance(encoding, Conditional):
        given = encoding(tokens, grid)
    elif isinstance(encoding, PairBiasing):
        given = encoding(patches[0], patches[1], grid)
    elif isinstance(encoding, QueryBiasing):
        given = encoding(patches[0], grid)
    elif isinstance(encoding, ConvRelative):
        given = encoding(heads[0], heads[1], grid)
    elif isinstance(encoding, Gpsa):
        given = encoding.positions(grid)
    elif isinstance(encoding, Extending):
        longer = encoding(heads[0], heads[1], tokens, grid, prefix=dims.prefix)
        given = torch.cat(longer, dim=-1)
    else:
        raise UnfitError(f"{type(encoding).__name__} has no door that is known")
    return given
