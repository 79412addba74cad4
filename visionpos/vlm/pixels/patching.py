"""Pixels to encoder input: `[..., channels, height, width]` enters, patches leave."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from visionpos.errors import PositionError
from visionpos.vlm.pixels.resampling import check_pixels

# Patches: t, block row, block column, row, column | what stands inside a patch, the last fastest.
INSIDE = {"cyx": (2, 1, 5, 8), "yxc": (1, 5, 8, 2)}


def patches(
    pixels: Tensor,
    patch: int,
    merge: int = 1,
    temporal: int = 1,
    *,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    vector: Literal["cyx", "yxc"] = "cyx",
) -> Tensor:
    """Return flattened patches in the order of the Qwen vision encoders, or of SigLIP 2 and Fuyu (vector "yxc").

    Rows run over time, then over blocks of merge x merge patches, then inside the block, each
    row-major: the patches that merge into one token are neighbours, and merge 1 is plain row-major.
    Columns run over channel, frame in the group, y, x ("cyx"); or over frame, y, x, channel ("yxc").
    Frames missing in the last group repeat the last frame; an image is a video of one frame.

    Args:
        pixels: `[channels, height, width]` or `[frames, channels, height, width]`; height and width
            are multiples of `patch * merge`.
        patch: side of a patch in pixels.
        merge: side of a merge block in patches.
        temporal: frames in a group.
        mean: a value for each channel, with white = 1; needs `std`, and pixels in 0..255.
        std: likewise.
        vector: order of the values inside a patch, the last axis fastest.

    Returns:
        `[t * y * x, channels * temporal * patch * patch]`: `(pixels / 255 - mean) / std` in float32,
        or, without mean and std, the values of `pixels` in their dtype.

    Raises:
        PositionError: if sizes do not divide, mean and std do not fit the channels, or the vector is unknown.

    Example:
        >>> patches(torch.zeros(3, 3, 28, 56, dtype=torch.uint8), 14, merge=2, temporal=2).shape
        torch.Size([16, 1176])

    Reference: transformers 5.24 Qwen2VLImageProcessor.patchify, Qwen2VLVideoProcessor.patchify;
    convert_image_to_patches of Siglip2ImageProcessor.
    """
    check_pixels(pixels)
    video = pixels.unsqueeze(0) if pixels.ndim == 3 else pixels  # [frames, channels, height, width]
    _check_patching(video, patch, merge, temporal)
    if vector not in INSIDE:
        raise PositionError(
            f"vector is {vector!r}; 'cyx' or 'yxc' is required. Take it from the family's pixels.patches."
        )
    if mean is not None or std is not None:
        video = normalised(video, mean or (), std or ())
    if missing := -len(video) % temporal:
        video = torch.cat([video, video[-1:].expand(missing, -1, -1, -1)])
    frames, channels, height, width = video.shape
    rows, columns = height // (patch * merge), width // (patch * merge)  # in merge blocks
    blocks = video.reshape(
        frames // temporal, temporal, channels, rows, merge, patch, columns, merge, patch
    )
    order = (0, 3, 6, 4, 7, *INSIDE[vector])
    return blocks.permute(order).reshape(-1, channels * temporal * patch * patch)


def normalised(pixels: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Return `(pixels / 255 - mean) / std` in float32.

    Args:
        pixels: `[..., channels, height, width]`, values in 0..255.
        mean: a value for each channel, with white = 1.
        std: likewise, above 0.

    Raises:
        PositionError: if mean and std do not fit the channels.
    """
    channels = pixels.shape[-3]
    if not len(mean) == len(std) == channels or min(std) <= 0:
        raise PositionError(
            f"mean is {list(mean)} and std {list(std)}; {channels} values each, one a channel, are "
            "required, std above 0. Take both from the family's preprocessor."
        )
    # Scaled by 255 first, as transformers fuses it: bit-equal to its processors.
    centre, spread = (
        torch.tensor(list(values), dtype=torch.float32, device=pixels.device)
        .mul(255)
        .view(-1, 1, 1)
        for values in (mean, std)
    )
    return (pixels.to(torch.float32) - centre) / spread


def _check_patching(video: Tensor, patch: int, merge: int, temporal: int) -> None:
    if min(patch, merge, temporal) < 1:
        raise PositionError(
            f"patch, merge and temporal are {patch}, {merge}, {temporal}; each must be at least 1. "
            "Take them from the family's grid."
        )
    if video.ndim != 4:
        raise PositionError(
            f"pixels have {video.ndim} axes; [channels, height, width] or [frames, channels, height, "
            "width] is required. Pass one image or video at a time."
        )
    height, width = video.shape[-2:]
    if height % (patch * merge) or width % (patch * merge):
        raise PositionError(
            f"pixels are {height} high and {width} wide; multiples of patch * merge = {patch * merge} "
            "are required. Resize to the plan's size first."
        )
