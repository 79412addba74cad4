"""Augment: how training moves coordinates. A CoordSpec says how far; what it can and cannot change stands here."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from visionpos.errors import PositionError
from visionpos.geometry.grid import is_whole

if TYPE_CHECKING:
    from torch import Tensor

    from visionpos.geometry.coords import CoordSpec


def augment(
    coords: Tensor,
    spec: CoordSpec,
    *,
    draws: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return coordinates perturbed as in training: shift, then jitter, then rescale.

    What each augmentation can change, given rotary logits that see coordinate differences only:

    - shift moves all patches alike. Patch-to-patch logits stay as they are; patches move against prefix and suffix
      tokens, which stand at the origin. Without such tokens it changes nothing.
    - rescale scales all distances by one factor: it is a zoom, and keeps directions and the ratio of distances.
    - jitter scales each axis by its own factor: distances along y and x change against each other, as under another
      aspect ratio; straight lines stay straight.
    - none of the three moves one patch against the order of its neighbours, and none acts in evaluation. An encoding
      that is not strictly relative (LieRE, `adjacent_tiled`) feels shift in every logit.
    - scope "forward" and "sample" keep one geometry through all layers; "block" gives every layer its own, so that a
      score of one layer can no longer be compared with another's.

    Args:
        coords: `[n, axes]`, not changed.
        spec: says how far; without shift, jitter and rescale the coordinates come back as they are.
        draws: how many independent draws to make: layers for scope "block", samples for scope "sample".
            None makes one draw, as scope "forward" asks.
        generator: source of the draws, on its own device; torch's default generator when None.

    Returns:
        `[n, axes]`, or `[draws, n, axes]`, float32 or better.

    Raises:
        PositionError: if draws is given and no whole number of at least 1.

    Reference:
        DINOv3 (arXiv 2508.10104) section 3.2 and its order of draws, one vector of shifts, one of jitters, one
        common rescale; factors are log-uniform, so their median is 1.
    """
    if not hasattr(spec, "augments"):
        raise PositionError(f"spec is {spec!r}; a CoordSpec is required. Write CoordSpec(...).")
    if not spec.augments:
        return repeated(coords, draws)
    check_draws(draws)
    moved = [_perturbed(coords, spec, generator) for _ in range(draws or 1)]
    return moved[0] if draws is None else torch.stack(moved)


def repeated(coords: Tensor, draws: int | None) -> Tensor:
    """Return the coordinates once a draw, all alike, as a view: `[draws, n, axes]`, or `[n, axes]` for None.

    Raises:
        PositionError: if draws is given and no whole number of at least 1.
    """
    check_draws(draws)
    return coords if draws is None else coords.expand(draws, *coords.shape)


def check_draws(draws: int | None) -> None:
    """Refuse a count of draws that is no whole number of at least 1, or None."""
    if draws is not None and not is_whole(draws):
        raise PositionError(
            f"draws is {draws!r}; a whole number of at least 1 is required. Pass None for one draw without a dimension."
        )


def _perturbed(coords: Tensor, spec: CoordSpec, generator: torch.Generator | None) -> Tensor:
    """Return the coordinates after one draw of each wanted perturbation, `[n, axes]`."""
    order = list(range(coords.shape[-1]))
    if spec.first == "x" and len(order) > 1:
        order[-2:] = order[:-3:-1]
    if spec.shift is not None:
        coords = coords + _uniform(len(order), spec.shift, coords, generator)[order]
    if spec.jitter is not None:
        coords = (
            coords * _uniform(len(order), math.log(spec.jitter), coords, generator)[order].exp()
        )
    if spec.rescale is not None:
        coords = coords * _uniform(1, math.log(spec.rescale), coords, generator).exp()
    return coords


def _uniform(count: int, bound: float, like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return `count` draws from [-bound, bound], made on the generator's device and moved to `like`'s."""
    device = like.device if generator is None else generator.device
    draw = torch.empty(count, device=device, dtype=torch.float32).uniform_(
        -bound, bound, generator=generator
    )
    return draw.to(like.device)
