"""Pixels to encoder input: `[..., channels, height, width]` enters, patches leave."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode, functional

from visionpos.errors import PositionError

Kernel = Literal["bilinear", "bicubic"]
KERNELS = {"bilinear": InterpolationMode.BILINEAR, "bicubic": InterpolationMode.BICUBIC}


def resize(
    pixels: Tensor,
    size_hw: tuple[int, int],
    *,
    kernel: Kernel = "bicubic",
    antialias: bool = True,
) -> Tensor:
    """Return pixels at a new size, by torchvision's kernels.

    uint8 is rounded and clamped to 0..255; bicubic on floats may overshoot their range.

    Args:
        pixels: `[..., channels, height, width]`, uint8 or float.
        size_hw: new (height, width) in pixels, each at least 1.
        kernel: "bilinear" or "bicubic".
        antialias: widen the kernel when shrinking, as the published processors do.

    Returns:
        `[..., channels, *size_hw]`, dtype and device of the input; may be the input at equal size.

    Raises:
        PositionError: if a size, the shape, the dtype or the kernel is not as above.

    Example:
        >>> resize(torch.zeros(2, 3, 30, 40, dtype=torch.uint8), (28, 56)).shape
        torch.Size([2, 3, 28, 56])
    """
    _check_pixels(pixels)
    if min(size_hw) < 1:
        raise PositionError(
            f"size_hw is {size_hw}; (height, width) of at least 1 pixel each is required. "
            "Take it from the family's plan."
        )
    if kernel not in KERNELS:
        raise PositionError(
            f"kernel is {kernel!r}; one of {sorted(KERNELS)} is required. Pass one of them."
        )
    if size_hw[1] == 1 and antialias:
        return _one_column(pixels, size_hw[0], kernel)
    resized: Tensor = functional.resize(
        pixels, list(size_hw), interpolation=KERNELS[kernel], antialias=antialias
    )
    return resized


def patches(
    pixels: Tensor,
    patch: int,
    merge: int = 1,
    temporal: int = 1,
    *,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Tensor:
    """Return flattened patches in the order of the Qwen vision encoders.

    Rows run over time, then over blocks of merge x merge patches, then inside the block, each
    row-major: the patches that merge into one token are neighbours, and merge 1 is plain row-major.
    Columns run over channel, frame in the group, y, x. Frames missing in the last group repeat the
    last frame; an image is a video of one frame.

    Args:
        pixels: `[channels, height, width]` or `[frames, channels, height, width]`; height and width
            are multiples of `patch * merge`.
        patch: side of a patch in pixels.
        merge: side of a merge block in patches.
        temporal: frames in a group.
        mean: a value for each channel, with white = 1; needs `std`, and pixels in 0..255.
        std: likewise.

    Returns:
        `[t * y * x, channels * temporal * patch * patch]`: `(pixels / 255 - mean) / std` in float32,
        or, without mean and std, the values of `pixels` in their dtype.

    Raises:
        PositionError: if sizes do not divide, or mean and std do not fit the channels.

    Example:
        >>> patches(torch.zeros(3, 3, 28, 56, dtype=torch.uint8), 14, merge=2, temporal=2).shape
        torch.Size([16, 1176])

    Reference: transformers 5.24 Qwen2VLImageProcessor.patchify, Qwen2VLVideoProcessor.patchify.
    """
    _check_pixels(pixels)
    video = pixels.unsqueeze(0) if pixels.ndim == 3 else pixels  # [frames, channels, height, width]
    _check_patching(video, patch, merge, temporal)
    if mean is not None or std is not None:
        video = _normalised(video, mean or (), std or ())
    if missing := -len(video) % temporal:
        video = torch.cat([video, video[-1:].expand(missing, -1, -1, -1)])
    frames, channels, height, width = video.shape
    rows, columns = height // (patch * merge), width // (patch * merge)  # in merge blocks
    blocks = video.reshape(
        frames // temporal, temporal, channels, rows, merge, patch, columns, merge, patch
    )
    order = (0, 3, 6, 4, 7, 2, 1, 5, 8)  # t, block row, block column, row, column | c, frame, y, x
    return blocks.permute(order).reshape(-1, channels * temporal * patch * patch)


def _one_column(pixels: Tensor, height: int, kernel: str) -> Tensor:
    """Resize to a width of 1, lying on the side.

    torch 2.14 on CPUs repeats the first row there (floats), and crashes at 1 x 1 (uint8).
    """
    row = pixels.mT if pixels.dtype.is_floating_point else pixels.mT.float()
    row = functional.resize(row, [1, height], interpolation=KERNELS[kernel], antialias=True)
    column: Tensor = row.mT.contiguous()
    return (
        column if pixels.dtype.is_floating_point else column.round().clamp(0, 255).to(torch.uint8)
    )


def _normalised(video: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    channels = video.shape[1]
    if not len(mean) == len(std) == channels or min(std) <= 0:
        raise PositionError(
            f"mean is {list(mean)} and std {list(std)}; {channels} values each, one a channel, are "
            "required, std above 0. Take both from the family's preprocessor."
        )
    # Scaled by 255 first, as transformers fuses it: bit-equal to its processors.
    centre, spread = (
        torch.tensor(list(values), dtype=torch.float32, device=video.device).mul(255).view(-1, 1, 1)
        for values in (mean, std)
    )
    return (video.to(torch.float32) - centre) / spread


def _check_pixels(pixels: Tensor) -> None:
    if pixels.ndim < 3 or not pixels.numel():
        raise PositionError(
            f"pixels have shape {list(pixels.shape)}; [..., channels, height, width], none of them 0, "
            "is required. Read them with photo() or frames()."
        )
    if pixels.dtype != torch.uint8 and not pixels.dtype.is_floating_point:
        raise PositionError(
            f"pixels have dtype {pixels.dtype}; uint8 or float is required. Convert them to uint8."
        )


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
