"""Weights: how much every cell of a table counts at each wanted cell, along one axis, by recipe.

Positions, the table's side and a Recipe enter; `[..., source]` weights leave, differentiable and free of token order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from visionpos.errors import PositionError

if TYPE_CHECKING:
    from torch import Tensor

    from visionpos.geometry.recipes import Recipe


def exact_dtype(device: torch.device | None) -> torch.dtype:
    """Return float64 wherever there is one: MPS has none."""
    return torch.float32 if device is not None and device.type == "mps" else torch.float64


def grid_weights(
    source: int,
    target: int,
    recipe: Recipe,
    device: torch.device | None = None,
    *,
    span: int | None = None,
) -> Tensor:
    """Return the `[target, source]` weights of one axis, where the table spans `span` cells (target when None)."""
    cells = torch.arange(target, device=device, dtype=exact_dtype(device))
    return axis_weights(cells, source, target if span is None else span, recipe)


def axis_weights(cells: Tensor, source: int, target: float | Tensor, recipe: Recipe) -> Tensor:
    """Return how much every source cell weighs at each wanted cell, along one axis.

    Args:
        cells: `[...]` positions in wanted cells; whole numbers are cell centres.
        source: cells of the table on this axis.
        target: cells of the wanted lattice on this axis: a number, or a tensor that broadcasts with `cells`.
        recipe: kernel, sampling and antialias.

    Returns:
        `[..., source]` weights that sum to 1 (less where border "zero" drops a tap).

    Raises:
        PositionError: if geometric sampling meets an even number of offsets, or sides that differ between samples.
    """
    if recipe.kernel == "nearest":
        return _at(bucket(cells, source, target, recipe), source, cells.dtype)
    if recipe.sampling == "geometric":
        return _geometric(cells, source, target)
    place = _source_place(cells, source, target, recipe)
    if not recipe.antialias:
        return _tapped(place, source, recipe)
    if isinstance(target, torch.Tensor):
        return _widened(place, source, (source / target).clamp(min=1.0).unsqueeze(-1), recipe)
    width: Any = torch.sym_max(source / target, 1.0)  # exporting passes symbolic sides
    return _widened(place, source, width, recipe)


def bucket(cells: Tensor, source: int, target: float | Tensor, recipe: Recipe) -> Tensor:
    """Return the index of the table's cell that holds the corner of each wanted cell."""
    if recipe.boundaries == "exact":
        place = torch.floor(cells.round() * source / target)
        return place.clamp(0, source - 1).long()
    index = cells.round().to(torch.float32)
    target = target.to(torch.float32) if isinstance(target, torch.Tensor) else target
    if recipe.boundaries == "reciprocal":
        share = (index * (torch.ones_like(index) / target)).clamp(max=1.0 - 1e-6)
    else:
        share = index / target
    steps = torch.arange(1 / source, 1.0, 1 / source, device=cells.device, dtype=torch.float32)
    return torch.bucketize(share.contiguous(), steps, right=True).clamp(0, source - 1)


def _source_place(cells: Tensor, source: int, target: float | Tensor, recipe: Recipe) -> Tensor:
    """Return where each wanted cell lies, in source cells."""
    if recipe.sampling != "align_corners":
        return (cells + 0.5) * (source / (target + recipe.drift)) - 0.5
    if isinstance(target, torch.Tensor):  # a single cell reads the first one, as below
        return cells * torch.where(target > 1, (source - 1) / (target - 1), 0.0)
    return cells * ((source - 1) / (target - 1)) if target > 1 else torch.zeros_like(cells)


def _widened(place: Tensor, source: int, width: float | Tensor, recipe: Recipe) -> Tensor:
    """Return antialiased weights: the kernel stretched by the reduction, normalised over the cells that exist."""
    # A point outside reads the border, as it does without antialias; its own cells would all weigh nothing.
    place = place.clamp(-0.5, source - 0.5)
    cells = torch.arange(source, device=place.device, dtype=place.dtype)
    distance = (cells - place.unsqueeze(-1)).abs() / width
    weight = _kernel(distance, recipe)
    return weight / weight.sum(-1, keepdim=True)


def _tapped(place: Tensor, source: int, recipe: Recipe) -> Tensor:
    """Return weights of the 2 or 4 nearest cells; the border cell stands in for those outside, or nothing does."""
    if recipe.kernel == "bilinear" and recipe.border == "edge":
        place = place.clamp(0, source - 1)
    first = torch.floor(place)
    steps = (0, 1) if recipe.kernel == "bilinear" else (-1, 0, 1, 2)
    total = place.new_zeros(*place.shape, source)
    for step in steps:
        cell = first + step
        weight = _kernel((cell - place).abs(), recipe)
        if recipe.border == "zero":
            weight = torch.where((cell >= 0) & (cell < source), weight, 0.0)
        total = total + weight.unsqueeze(-1) * _at(
            cell.clamp(0, source - 1).long(), source, place.dtype
        )
    return total


def _kernel(distance: Tensor, recipe: Recipe) -> Tensor:
    """Return the triangle, or Keys' cubic with coefficient a, at distances of at least 0."""
    if recipe.kernel == "bilinear":
        return (1.0 - distance).clamp(min=0.0)
    a = recipe.coefficient
    near = ((a + 2.0) * distance - (a + 3.0)) * distance * distance + 1.0
    far = ((a * distance - 5.0 * a) * distance + 8.0 * a) * distance - 4.0 * a
    return torch.where(
        distance <= 1.0, near, torch.where(distance < 2.0, far, torch.zeros_like(far))
    )


def _at(index: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """Return `[..., size]`, one at the index and zero elsewhere."""
    return (index.unsqueeze(-1) == torch.arange(size, device=index.device)).to(dtype)


def _geometric(cells: Tensor, source: int, target: float | Tensor) -> Tensor:
    """Return BEiT's weights: source samples spaced by a geometric series, read linearly.

    Short offsets keep their place and long ones are squeezed. Reference: microsoft/unilm beit (its run_class_finetuning
    resizes relative tables so); the ratio is searched by bisection in [1.01, 1.5].
    """
    if isinstance(target, torch.Tensor):
        raise PositionError(
            f"extent_hw is a tensor of shape {tuple(target.shape)}; geometric sampling needs one pair of numbers. "
            "Evaluate the samples one by one."
        )
    if source % 2 == 0 or target % 2 == 0:
        raise PositionError(
            f"geometric sampling got {source} and {target} offsets; relative tables have an odd number, 2 * "
            "window - 1. "
            "Use another recipe for tables of absolute positions."
        )
    if source == 1:
        return torch.ones_like(cells).unsqueeze(-1)
    half, reach = source // 2, target // 2
    ratio = _series_ratio(half, reach)
    steps = [sum(ratio**power for power in range(count)) for count in range(1, half + 1)]
    places = [-step for step in reversed(steps)] + [0.0, *steps]
    knots = torch.tensor(places, dtype=cells.dtype, device=cells.device)
    place = (cells - reach).clamp(knots[0], knots[-1])
    right = torch.searchsorted(knots, place.contiguous()).clamp(1, source - 1)
    share = ((place - knots[right - 1]) / (knots[right] - knots[right - 1])).unsqueeze(-1)
    return (
        _at(right - 1, source, cells.dtype) * (1 - share) + _at(right, source, cells.dtype) * share
    )


def _series_ratio(count: int, reach: float) -> float:
    """Return the ratio whose series of `count` steps sums to `reach`, within BEiT's search range."""
    low, high, ratio = 1.01, 1.5, 1.5
    while high - low > 1e-6:
        ratio = (low + high) / 2.0
        total = (1.0 - ratio**count) / (1.0 - ratio)
        low, high = (low, ratio) if total > reach else (ratio, high)
    return ratio
