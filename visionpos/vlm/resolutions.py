"""Resolutions: how large an image enters training, drawn anew each time, aspect kept (NaViT)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from visionpos.errors import PositionError
from visionpos.geometry.arguments import checked, shown
from visionpos.geometry.fields import check_choice
from visionpos.geometry.grid import is_whole
from visionpos.vlm.runs import counted

WIDEST_STD = 1e6  # beyond it float64 cannot tell the two ends of the law apart
LARGEST_PX = 2**31 - 1


@checked
def sample_sides(
    images: int,
    low_px: float,
    high_px: float,
    *,
    law: Literal["uniform", "normal"] = "uniform",
    mean: float = 0.0,
    std: float = 1.0,
    generator: torch.Generator,
) -> Tensor:
    """Return the side that each image is resampled to: that of the square of its area.

    Args:
        images: how many sides.
        low_px: shortest side, above 0.
        high_px: longest side.
        law: "uniform" on [low_px, high_px], or "normal", truncated to it.
        mean: of the normal law, where -1 stands for low_px and 1 for high_px; below 0 favours small images.
        std: of the normal law, in halves of the range, above 0 and at most 1e6.
        generator: source of the draws; the same state gives the same sides.

    Returns:
        `[images]` float64 in pixels.

    Raises:
        PositionError: if the range is empty, or the law has no such parameters.

    Example:
        >>> sides = sample_sides(1000, 64, 256, generator=torch.Generator().manual_seed(0))
        >>> bool((sides >= 64).all() and (sides <= 256).all())
        True

    Reference:
        NaViT (arXiv 2307.06304), resolution sampling: sides uniform, or by a truncated normal biased to small ones.
    """
    images = counted(images)
    check_choice("law", law, ("uniform", "normal"))
    if not 0 < low_px <= high_px < math.inf:
        raise PositionError(
            f"low_px is {low_px} and high_px {high_px}; 0 < low_px <= high_px is required. Swap or correct them."
        )
    if not (0 < std <= WIDEST_STD and abs(mean) <= 1):
        raise PositionError(
            f"mean is {mean} and std {std}; a mean in [-1, 1] and a std above 0, at most {WIDEST_STD:g}, are required: "
            "-1 is low_px, 1 high_px. A wider law is uniform."
        )
    draws = torch.rand(images, dtype=torch.float64, generator=generator, device=generator.device)
    place = 2 * draws - 1
    if law == "normal":
        ends = torch.tensor([(-1 - mean) / std, (1 - mean) / std], dtype=torch.float64)
        low, high = torch.special.ndtr(ends).tolist()
        # Inverse of the truncated distribution: one draw an image, whatever its parameters.
        place = (torch.special.ndtri(low + (high - low) * draws) * std + mean).clamp(-1, 1)
    return (low_px + (high_px - low_px) * (place + 1) / 2).cpu()


def resampled(
    sizes_hw: Sequence[tuple[int, int]] | Tensor, sides_px: float | Tensor, patch: int
) -> Tensor:
    """Return image sizes of a given area with the aspect of the sources, in whole patches.

    Args:
        sizes_hw: `[images, 2]` height and width of the source images in pixels, at least 1.
        sides_px: side of the square of equal area, in pixels: one number, or `[images]`.
        patch: side of a patch in pixels; every side is the nearest multiple of it (halves to even), at least one.

    Returns:
        `[images, 2]` int64, height and width in pixels. `Grid.of_image(size, patch)` is exact.

    Raises:
        PositionError: if a size, a side or the patch is below 1, or a side comes out over 2**31 - 1.

    Example:
        >>> resampled([(600, 800), (20, 3000)], 224, patch=16).tolist()
        [[192, 256], [16, 2736]]
    """
    sizes = _numbers("sizes_hw", sizes_hw, "(height, width), two numbers an image, are required.")
    if sizes.numel() and (sizes.ndim != 2 or sizes.shape[1] != 2):
        raise PositionError(
            f"sizes_hw is {shown(sizes_hw)}; (height, width), two numbers an image, are required."
        )
    sizes = sizes.reshape(-1, 2)
    sides = _numbers("sides_px", sides_px, "one number, or one an image, is required.")
    sides = sides.to(sizes.device)
    if not is_whole(patch):
        raise PositionError(
            f"patch is {patch!r}; a whole number of pixels, at least 1, is required."
        )
    if sides.ndim and tuple(sides.shape) != (len(sizes),):
        raise PositionError(
            f"sides_px have shape {tuple(sides.shape)} for {len(sizes)} images; one number, or one an image, is "
            "required."
        )
    if not len(sizes):
        return sizes.long()
    finite = sizes.isfinite().all() and sides.isfinite().all()
    if not bool((sizes >= 1).all() and (sides >= 1).all() and finite):
        raise PositionError(
            f"sizes_hw reach down to {sizes.min().item():g} and up to {sizes.max().item():g}, sides_px down to "
            f"{sides.min().item():g} and up to {sides.max().item():g}; finite pixels of at least 1 are required."
        )
    scale = (sides / sizes.prod(-1).sqrt()).unsqueeze(-1)
    patches = (sizes * scale / patch).round().clamp(min=1)
    if not bool((patches * patch <= LARGEST_PX).all()):
        raise PositionError(
            f"sides_px reach {sides.max().item():g} and the longest side of an image would be "
            f"{patches.max().item() * patch:g} pixels; at most {LARGEST_PX} are possible. Lower sides_px."
        )
    return patches.long() * patch


def _numbers(name: str, values: Any, wanted: str) -> Tensor:
    """Return values as float64, never through float32, in which torch keeps plain Python floats."""
    try:
        return torch.as_tensor(values, dtype=torch.float64)
    except (
        TypeError,
        ValueError,
        RuntimeError,
        OverflowError,
    ):  # text, None, rows of unequal length
        raise PositionError(f"{name} is {shown(values)}; {wanted}") from None
