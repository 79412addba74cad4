"""Runs: the tokens of many images in one line, and what belongs to an image spread over its tokens."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from visionpos.errors import PositionError
from visionpos.geometry.grid import Grid, check_grid, is_whole


def checked_grids(grids: Any) -> tuple[Grid, ...]:
    """Return the grids as a tuple.

    Raises:
        PositionError: naming the first that is none.
    """
    if not isinstance(grids, Sequence):
        raise PositionError(
            f"grids is {grids!r}; a sequence of grids, one an image, is required. Pass a list."
        )
    for number, grid in enumerate(grids):
        if not isinstance(grid, Grid):
            check_grid(grid, f"grids[{number}]")
    return tuple(grids)


def is_array(value: Any) -> bool:
    """Return whether a value is a tensor, or what becomes one: an array, or a list of numbers."""
    return isinstance(value, (Tensor, np.ndarray)) or (
        isinstance(value, (list, tuple)) and all(isinstance(one, numbers.Real) for one in value)
    )


def counted(images: Any) -> int:
    """Return a number of images.

    Raises:
        PositionError: if it is no whole number of at least 0.
    """
    if not (is_whole(images) or (isinstance(images, numbers.Integral) and images == 0)):
        raise PositionError(
            f"images is {images!r}; a whole number of images, at least 0, is required."
        )
    return int(images)


def grid_sides(grids: Sequence[Grid], device: torch.device | None = None) -> Tensor:
    """Return `[images, 3]` int64: frames, height and width of every grid, in tokens."""
    return torch.tensor([grid.shape for grid in grids], dtype=torch.int64, device=device).view(
        -1, 3
    )


def spread(values: Tensor, counts: Tensor) -> Tensor:
    """Return `[tokens]`: the value of its image at every token.

    Example:
        >>> spread(torch.tensor([7, 8]), torch.tensor([1, 3])).tolist()
        [7, 8, 8, 8]
    """
    return values.repeat_interleave(counts)


def run(first: Tensor, counts: Tensor) -> Tensor:
    """Return `[tokens]`: first, first + 1, ... of every image.

    Example:
        >>> run(torch.tensor([7, 2]), torch.tensor([1, 3])).tolist()
        [7, 2, 3, 4]
    """
    places = spread(first - counts.cumsum(0) + counts, counts)
    return places.add_(torch.arange(len(places), device=places.device))


def kept_cells(grids: Sequence[Grid], keep: Tensor | None) -> tuple[Tensor | None, Tensor]:
    """Return the kept cells of every image in arrival order, `[kept]` or None, and how many each keeps, `[images]`.

    Args:
        grids: the whole grid of every image.
        keep: `[sum of sizes]` bool, images one after another, each row-major; all tokens when None.

    Raises:
        PositionError: if keep has another shape or dtype, or an image keeps no token.
    """
    sizes = grid_sides(grids).prod(-1)
    if keep is None:
        return None, sizes
    total, given = int(sizes.sum()), torch.as_tensor(keep) if is_array(keep) else None
    if given is None or given.dtype != torch.bool or tuple(given.shape) != (total,):
        is_what = f"of type {type(keep).__name__}"
        is_what = is_what if given is None else f"{given.dtype} of shape {tuple(given.shape)}"
        raise PositionError(
            f"keep is {is_what}; bool ({total},), one entry a token of every grid, is "
            "required. Make it with keep_tokens."
        )
    keep = given.cpu()
    image = spread(torch.arange(len(sizes)), sizes)
    counts = torch.bincount(image[keep], minlength=len(sizes))
    if not bool((counts > 0).all()):
        raise PositionError(
            f"keep leaves no token of image {int((counts == 0).nonzero()[0])}; at least one an image is required. "
            "Leave the image out of the batch, or keep a token of it."
        )
    return run(torch.zeros_like(sizes), sizes)[keep], counts


def flat_tokens(tokens: Tensor | Sequence[Tensor], grids: Sequence[Grid]) -> Tensor:
    """Return `[sum of sizes, ...]`, all tokens of all images in a line.

    Raises:
        PositionError: if a tensor does not hold one entry a cell.
    """
    if not isinstance(tokens, Tensor):
        return torch.cat(image_tokens(tokens, grids))
    total = sum(grid.size for grid in grids)
    if not tokens.ndim or tokens.shape[0] != total:
        raise PositionError(
            f"tokens have shape {tuple(tokens.shape)} and the grids {total} cells; one entry a cell of every whole "
            "grid is required. Pass all tokens, also those that are dropped."
        )
    return tokens


def image_tokens(tokens: Tensor | Sequence[Tensor], grids: Sequence[Grid]) -> list[Tensor]:
    """Return `[size, ...]` of every image.

    Raises:
        PositionError: if a tensor does not hold one entry a cell, or a list is empty.
    """
    if isinstance(tokens, Tensor):
        sizes = [grid.size for grid in grids]
        return list(flat_tokens(tokens, grids).split(sizes)) if sizes else []
    if not isinstance(tokens, (list, tuple)) or not all(isinstance(one, Tensor) for one in tokens):
        raise PositionError(
            f"tokens are a {type(tokens).__name__}; a tensor of all tokens, or a list of one tensor an image, is "
            "required. Turn arrays into tensors with torch.from_numpy."
        )
    if len(tokens) != len(grids):
        raise PositionError(
            f"tokens are of {len(tokens)} images and grids of {len(grids)}; one tensor an image is required."
        )
    for number, (one, grid) in enumerate(zip(tokens, grids, strict=True)):
        if not one.ndim or one.shape[0] != grid.size:
            raise PositionError(
                f"tokens[{number}] has shape {tuple(one.shape)} and its grid {grid.size} cells, {grid.shape}; one "
                "entry a cell of the whole grid is required. Pass all tokens, also those that are dropped."
            )
        if one.shape[1:] != tokens[0].shape[1:] or one.device != tokens[0].device:
            raise PositionError(
                f"tokens[{number}] has shape {tuple(one.shape)} on {one.device} and tokens[0] {tuple(tokens[0].shape)} "
                f"on {tokens[0].device}; one width and one device are required."
            )
    if not len(tokens):
        raise PositionError(
            "tokens is an empty list, which has no width; without images, pass a tensor [0, ...]."
        )
    return list(tokens)
