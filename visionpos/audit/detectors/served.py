"""Served: which grids an encoding serves, and on which of its weights what it gives depends."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from visionpos.audit.detectors.finding import UnfitError
from visionpos.audit.detectors.rendered import rendered
from visionpos.errors import PositionError
from visionpos.geometry.grid import Grid

# Grids of as many tokens; the first group that an encoding serves is taken.
ALIKE = (
    (Grid(4, 6), Grid(3, 8), Grid(6, 4)),
    (Grid(3, 4), Grid(2, 6)),
    (Grid(16, 16), Grid(8, 32)),
    (Grid(4, 6, frames=2), Grid(3, 8, frames=2)),
    (Grid(4, 6, frames=8), Grid(3, 8, frames=8)),
)
UNEQUAL = (Grid(3, 5), Grid(16, 24), Grid(3, 5, frames=2), Grid(3, 5, frames=8))
EVEN = (Grid(4, 6), Grid(16, 16), Grid(4, 6, frames=2), Grid(4, 6, frames=8))


def copied(encoding: Any) -> Any:
    """Return a copy in eval mode and float32, which may be changed."""
    return copy.deepcopy(encoding).eval().float()


def untaught(encoding: Any) -> bool:
    """Return whether all weights are zero, as tables of some sources start."""
    weights = list(encoding.parameters())
    return bool(weights) and not any(bool(weight.any()) for weight in weights)


def taking_part(encoding: Any, grid: Grid, seed: int) -> list[str]:
    """Return the names of the weights on which what is rendered depends."""
    own = copy.deepcopy(encoding).requires_grad_()
    with torch.enable_grad():
        given = rendered(own, grid, seed)
        if not given.requires_grad:
            return []
        named = dict(own.named_parameters())
        found: Sequence[Any] = torch.autograd.grad(
            given.sum(), list(named.values()), allow_unused=True
        )
    return [name for name, one in zip(named, found, strict=True) if one is not None]


def is_line(encoding: Any, grid: Grid, seed: int) -> bool:
    """Return whether an encoding takes the tokens of a grid as a line, row after row, as schemes of text do.

    Something that looks at no grid at all gives as many tokens for a shorter line, which a line does not.
    """
    line, shorter = Grid(1, grid.height * grid.width, grid.frames), Grid(1, 5, grid.frames)
    try:
        with torch.no_grad():
            whole, own, less = (
                rendered(copy.deepcopy(encoding), one, seed) for one in (grid, line, shorter)
            )
    except PositionError:
        return False
    return torch.equal(whole, own) and less.shape != whole.shape


def first_served(encoding: Any, grids: Sequence[Grid]) -> Grid:
    """Return the first grid that an encoding serves.

    Raises:
        UnfitError: if it serves none.
    """
    found: Grid = first_of(lambda grid: rendered(encoding, grid), grids)
    return found


def first_of(look: Callable[[Any], object], candidates: Sequence[Any]) -> Any:
    """Return the first thing that an encoding can be asked for.

    Raises:
        UnfitError: if it can be asked for none.
    """
    refusal = ""
    for one in candidates:
        try:
            with torch.no_grad():
                look(one)
        except PositionError as error:
            refusal = str(error)
        else:
            return one
    raise UnfitError(f"it serves none of the grids tried: {refusal}")
