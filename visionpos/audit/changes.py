"""Changes that interventions make, as pure functions.

Each takes coordinates `[..., n, axes]`, axes ordered (t,) y, x, or an order of tokens, and gives new ones.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from visionpos.errors import PositionError

SHIFTS = (1, 17, 1000)
GAP = 4
_TRIES = 64
STRETCH = 2
PREFIXES = ("removed", "rotated at origin", "rotated at centre", "unrotated")


def generator_of(seed: int) -> torch.Generator:
    """Return a generator on the CPU that draws what an audit's seed says."""
    return torch.Generator().manual_seed(seed)


def reordered(count: int, generator: torch.Generator) -> Tensor:
    """Return a random order of `count` things, `[count]`, that is not the one they had if there are two or more."""
    order = torch.randperm(count, generator=generator)
    return order.roll(1) if bool((order == torch.arange(count)).all()) else order


def replaced(cells: Tensor, generator: torch.Generator) -> Tensor:
    """Return a random order of cells `[n, axes]` in which some are another distance apart, if there is such an order.

    A mirror image or a turn of a small grid is a random order like any other, and schemes of distance do not see it.
    """
    apart = torch.cdist(cells, cells)
    for _ in range(_TRIES):
        order = reordered(cells.shape[0], generator)
        if bool((apart[order][:, order] - apart).abs().max() > 1e-6):
            break
    return order


def undone(order: Tensor) -> Tensor:
    """Return the order that takes things back to where they were.

    Example:
        >>> undone(torch.tensor([2, 0, 1]))
        tensor([1, 2, 0])
    """
    return torch.argsort(order)


def shifted(coords: Tensor, by: float) -> Tensor:
    """Return coordinates moved alike along every axis."""
    return coords + by


def stretched(coords: Tensor, factor: float = STRETCH) -> Tensor:
    """Return coordinates times a factor."""
    return coords * factor


def gapped(coords: Tensor, gap: float = GAP, *, axis: int = -1) -> Tensor:
    """Return coordinates with the far half along an axis moved further by `gap`.

    Differences between keys change: moving a query alone would add one constant to all its logits in a linear bias,
    which the softmax cancels.

    Example:
        >>> gapped(torch.tensor([[0.0], [1.0], [2.0], [3.0]]), 10.0).flatten()
        tensor([ 0.,  1., 12., 13.])
    """
    along = coords[..., axis]
    middle = (along.amin(-1, keepdim=True) + along.amax(-1, keepdim=True)) / 2
    moved = coords.clone()
    moved[..., axis] = torch.where(along > middle, along + gap, along)
    return moved


def flipped(coords: Tensor, *, axis: int = -1) -> Tensor:
    """Return coordinates mirrored along an axis within the span they have.

    Example:
        >>> flipped(torch.tensor([[0.0], [1.0], [5.0]])).flatten()
        tensor([5., 4., 0.])
    """
    along = coords[..., axis]
    mirrored = coords.clone()
    mirrored[..., axis] = along.amin(-1, keepdim=True) + along.amax(-1, keepdim=True) - along
    return mirrored


def transposed(coords: Tensor) -> Tensor:
    """Return coordinates with y and x swapped.

    Raises:
        PositionError: if there is one axis alone.
    """
    if coords.shape[-1] < 2:
        raise PositionError(
            f"coords have shape {tuple(coords.shape)}; two axes or more are required to swap y and x."
        )
    return torch.cat([coords[..., :-2], coords[..., -2:].flip(-1)], dim=-1)


def outside_share(trained: Tensor, deployed: Tensor) -> float:
    """Return the share of differences between tokens that are wider than the trained view.

    Args:
        trained: `[n, axes]` of the grid that weights were trained on.
        deployed: `[m, axes]`.

    Returns:
        From 0 to 1; a difference counts as outside if along any axis it is wider than the trained view from outer edge
        to outer edge, so that finer cells within the same view are inside.

    Example:
        >>> outside_share(torch.tensor([[0.0], [1.0]]), torch.tensor([[0.0], [1.0], [2.0], [3.0]]))
        0.125
    """
    reach = trained.amax(0) - trained.amin(0)
    sides = torch.tensor([float(line.unique().numel()) for line in trained.unbind(-1)])
    reach = reach * sides / (sides - 1.0).clamp(min=1.0)
    slack = 1e-6 * reach + 1e-9  # differences of float32 coordinates are off by their last bits
    apart = (deployed.unsqueeze(-2) - deployed.unsqueeze(-3)).abs()
    beyond = (apart > reach + slack).any(-1)
    return float(beyond.double().mean()) if math.prod(beyond.shape) else 0.0
