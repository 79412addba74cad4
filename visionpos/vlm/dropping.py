"""Dropping: which tokens of an image stay in training, each with its own cell; a rate an image (NaViT)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from visionpos.errors import PositionError
from visionpos.geometry.arguments import checked
from visionpos.geometry.grid import Grid
from visionpos.vlm.runs import checked_grids, counted, grid_sides, is_array, run, spread


@checked
def drop_rates(
    images: int, *, mean: float, std: float, most: float = 1.0, generator: torch.Generator
) -> Tensor:
    """Return the share of tokens that each image drops, Beta distributed.

    Args:
        images: how many rates.
        mean: mean rate, above 0 and below `most`.
        std: standard deviation of the rate; 0 gives every image the mean. It must be below
            sqrt(mean * (most - mean)), the spread of a coin that shows 0 or `most`.
        most: upper end of the rates, at most 1.
        generator: source of the draws; the same state gives the same rates.

    Returns:
        `[images]` float64 in [0, most].

    Raises:
        PositionError: if no Beta distribution on [0, most] has this mean and deviation.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> drop_rates(3, mean=0.5, std=0.0, generator=generator)
        tensor([0.5000, 0.5000, 0.5000], dtype=torch.float64)

    Reference:
        NaViT (arXiv 2307.06304), continuous token dropping.
    """
    images = counted(images)
    if not (0 < most <= 1 and 0 < mean < most and std >= 0 and std**2 < mean * (most - mean)):
        raise PositionError(
            f"mean is {mean}, std {std} and most {most}; 0 < mean < most <= 1 and std below sqrt(mean * (most - mean)) "
            "are required. Lower std, or take a mean between 0 and most."
        )
    if std == 0:
        return torch.full((images,), mean, dtype=torch.float64)
    share = mean / most
    weight = mean * (most - mean) / std**2 - 1
    seed = torch.randint(2**62, (), generator=generator, device=generator.device)
    # torch's own Beta distribution draws from the global generator alone.
    drawn = np.random.default_rng(int(seed)).beta(share * weight, (1 - share) * weight, size=images)
    return torch.from_numpy(drawn) * most


@checked
def keep_tokens(
    grids: Sequence[Grid], rates: float | Tensor, *, generator: torch.Generator
) -> Tensor:
    """Return which tokens stay, drawn without replacement, a fixed number an image.

    An image of n tokens keeps max(1, floor(n * (1 - rate))), as timm's PatchDropout and vit-pytorch do.

    Args:
        grids: the grid of every image.
        rates: share to drop, at least 0 and below 1: one number, or `[images]`.
        generator: source of the draws, on its own device.

    Returns:
        `[sum of grid sizes]` bool, images one after another, each row-major: `keep=` of `pack_images`.

    Raises:
        PositionError: if a rate is out of range or there is not one an image.

    Example:
        >>> keep_tokens(
        ...     [Grid(2, 2), Grid(1, 3)], 0.5, generator=torch.Generator().manual_seed(0)
        ... ).sum()
        tensor(3)
    """
    sizes = grid_sides(checked_grids(grids)).prod(-1)
    if not is_array([rates]) and not is_array(rates):
        raise PositionError(
            f"rates is {rates!r}; one number, or a tensor of one an image, is required. Use 0 to keep all."
        )
    shares = torch.as_tensor(rates, dtype=torch.float64).cpu()
    if shares.ndim and tuple(shares.shape) != (len(sizes),):
        raise PositionError(
            f"rates have shape {tuple(shares.shape)} for {len(sizes)} images; one number, or one an image, is required."
        )
    bad = ~((shares >= 0) & (shares < 1))
    if bool(bad.any()):
        raise PositionError(
            f"rates hold {float(shares[bad][0])}; shares of at least 0 and below 1 are required. Use 0 to keep all."
        )
    kept = (sizes * (1 - shares)).floor().long().clamp(min=1)
    total, device = int(sizes.sum()), generator.device
    image = spread(torch.arange(len(sizes)), sizes)
    draws = torch.randint(2**31, (total,), generator=generator, device=device).cpu()
    order = ((image << 31) | draws).argsort(
        stable=True
    )  # images stay in order, their tokens are shuffled
    rank = run(torch.zeros_like(sizes), sizes)
    return torch.zeros(total, dtype=torch.bool).index_copy(0, order, rank < kept[image])
