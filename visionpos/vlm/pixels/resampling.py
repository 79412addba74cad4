"""Resampling: pixels `[..., channels, height, width]` at another size, by a family's own kernel and code."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode, functional

from visionpos.errors import PositionError
from visionpos.vlm.pixels.opencv import opencv

if TYPE_CHECKING:
    from visionpos.vlm.pixel_spec import Engine, Kernel, ResampleSpec

KERNELS = {
    "bilinear": InterpolationMode.BILINEAR,
    "bicubic": InterpolationMode.BICUBIC,
    "lanczos": InterpolationMode.LANCZOS,
}
PILLOW = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}


def resize(
    pixels: Tensor,
    size_hw: tuple[int, int],
    *,
    kernel: Kernel = "bicubic",
    antialias: bool = True,
    engine: Engine = "torchvision",
) -> Tensor:
    """Return pixels at a new size.

    uint8 is rounded and clamped to 0..255; bicubic on floats may overshoot their range. "torchvision" is what published
    fast processors use and stays on the device. "pillow" takes uint8 and always antialiases.
    "opencv" makes float32 of anything, never antialiases and never rounds (mistral_common). Both work on the CPU and
    return to the device.

    Args:
        pixels: `[..., channels, height, width]`, uint8 or float.
        size_hw: new (height, width) in pixels, each at least 1.
        kernel: "bilinear", "bicubic" or "lanczos".
        antialias: widen the kernel when shrinking, as most published processors do.
        engine: whose code.

    Returns:
        `[..., channels, *size_hw]`, dtype (but for "opencv") and device of the input; may be the input at equal size.

    Raises:
        PositionError: if a size, the shape, the dtype, the kernel or the engine is not as above.
        ImportError: if OpenCV is asked for and cannot be loaded.

    Example:
        >>> resize(torch.zeros(2, 3, 30, 40, dtype=torch.uint8), (28, 56)).shape
        torch.Size([2, 3, 28, 56])
    """
    check_pixels(pixels)
    if min(size_hw) < 1:
        raise PositionError(
            f"size_hw is {size_hw}; (height, width) of at least 1 pixel each is required. "
            "Take it from the family's plan."
        )
    if kernel not in PILLOW or engine not in ("torchvision", "pillow", "opencv"):
        raise PositionError(
            f"kernel is {kernel!r} and engine {engine!r}; a kernel of {sorted(PILLOW)} and an engine of "
            "['opencv', 'pillow', 'torchvision'] are required. Pass one of them."
        )
    if engine == "opencv":
        return _opencv(pixels, size_hw, kernel)
    if tuple(size_hw) == pixels.shape[-2:]:
        return pixels
    if engine == "pillow":
        return _pillow(pixels, size_hw, kernel)
    return _torchvision(pixels, size_hw, kernel, antialias=antialias)


def resampled(pixels: Tensor, size_hw: tuple[int, int], spec: ResampleSpec) -> Tensor:
    """Return pixels at a new size, as a family's data says."""
    given = pixels.float() if spec.floats else pixels
    return resize(given, size_hw, kernel=spec.kernel, antialias=spec.antialias, engine=spec.engine)


def check_pixels(pixels: Tensor) -> None:
    """Refuse what is no picture: too few axes, an empty one, a dtype of unknown range."""
    if pixels.ndim < 3 or not pixels.numel():
        raise PositionError(
            f"pixels have shape {list(pixels.shape)}; [..., channels, height, width], none of them 0, "
            "is required. Read them with photo() or frames()."
        )
    if pixels.dtype != torch.uint8 and not pixels.dtype.is_floating_point:
        raise PositionError(
            f"pixels have dtype {pixels.dtype}; uint8 or float is required. Convert them to uint8."
        )


def _torchvision(
    pixels: Tensor, size_hw: tuple[int, int], kernel: str, *, antialias: bool
) -> Tensor:
    if size_hw[1] == 1 and antialias:
        return _one_column(pixels, size_hw[0], kernel)
    # Without antialiasing the uint8 kernel of torchvision rounds weights too; Molmo2 resizes floats and rounds once.
    rounds = not antialias and not pixels.dtype.is_floating_point
    resized: Tensor = functional.resize(
        pixels.float() if rounds else pixels,
        list(size_hw),
        interpolation=KERNELS[kernel],
        antialias=antialias,
    )
    return _eight_bits(resized) if rounds else resized


def _one_column(pixels: Tensor, height: int, kernel: str) -> Tensor:
    """Resize to a width of 1, lying on the side.

    torch 2.14 on CPUs repeats the first row there (floats), and crashes at 1 x 1 (uint8).
    """
    row = pixels.mT if pixels.dtype.is_floating_point else pixels.mT.float()
    row = functional.resize(row, [1, height], interpolation=KERNELS[kernel], antialias=True)
    column: Tensor = row.mT.contiguous()
    return column if pixels.dtype.is_floating_point else _eight_bits(column)


def _eight_bits(pixels: Tensor) -> Tensor:
    return pixels.round().clamp(0, 255).to(torch.uint8)


def _pillow(pixels: Tensor, size_hw: tuple[int, int], kernel: str) -> Tensor:
    """Resize every channel by itself; Pillow's filters do not mix channels."""
    if pixels.dtype != torch.uint8:
        raise PositionError(
            f"pixels have dtype {pixels.dtype}; Pillow resizes uint8. Convert them, or use engine 'torchvision'."
        )
    planes = pixels.cpu().reshape(-1, *pixels.shape[-2:]).numpy()
    resized = [
        np.asarray(Image.fromarray(plane).resize(size_hw[::-1], PILLOW[kernel])) for plane in planes
    ]
    return torch.tensor(np.stack(resized)).reshape(*pixels.shape[:-2], *size_hw).to(pixels.device)


def _opencv(pixels: Tensor, size_hw: tuple[int, int], kernel: str) -> Tensor:
    cv2 = opencv()
    flags = {
        "bilinear": cv2.INTER_LINEAR,
        "bicubic": cv2.INTER_CUBIC,
        "lanczos": cv2.INTER_LANCZOS4,
    }
    planes = pixels.cpu().float().reshape(-1, *pixels.shape[-2:]).numpy()
    resized = [cv2.resize(plane, size_hw[::-1], interpolation=flags[kernel]) for plane in planes]
    shape = *pixels.shape[:-2], *size_hw
    return torch.tensor(np.stack(resized)).reshape(shape).to(pixels.device)
