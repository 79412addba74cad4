"""Photos: a path, PIL image, array or tensor enters, an upright RGB uint8 tensor leaves."""

from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch
from PIL import ExifTags, Image, ImageOps, TiffImagePlugin, UnidentifiedImageError
from torch import Tensor

from visionpos.errors import PositionError
from visionpos.vlm.pixels.files import readable_file

SIDEWAYS = frozenset({5, 6, 7, 8})  # EXIF orientations that exchange height and width
PNG_TAGS = (b"eXIf", b"Raw profile type exif", b"XML:com.adobe.xmp")  # where a PNG can keep one


def photo(image: str | PathLike[str] | Image.Image | np.ndarray[Any, Any] | Tensor) -> Tensor:
    """Return a photo as upright RGB pixels, in memory of its own.

    The EXIF orientation is applied. Transparent pixels are laid over white. Of 16 bits the high
    byte stays (65535 -> 255), as in Pillow for 16-bit colour. Of an animation the first frame is taken.

    Args:
        image: a path or PIL image; or uint8 or uint16 values of 1 (grey), 2 (grey, alpha), 3 (RGB)
            or 4 (RGB, alpha) channels: a tensor `[channels, height, width]` on any device, or an
            array `[height, width, channels]` or `[height, width]`.

    Returns:
        `[3, height, width]` uint8, on the device of a tensor given, else on the CPU.

    Raises:
        PositionError: if the file is missing, empty, cut off, no image or a decompression bomb, or
            the range of the values is not known (float, 32-bit integers).

    Example:
        >>> photo(np.zeros((2, 5, 4), dtype=np.uint8))[:, 0, 0]  # alpha 0 everywhere
        tensor([255, 255, 255], dtype=torch.uint8)
    """
    if isinstance(image, Tensor):
        return _rgb(image)
    if isinstance(image, np.ndarray):
        return _rgb(_channels_first(image))
    if isinstance(image, Image.Image):
        name = f"image (PIL, {image.width} x {image.height})"
        with _decoding(name):
            return _rgb(_decode(image, name))
    with _opened(image) as opened:
        return _rgb(_decode(opened, f"path {str(image)!r}"))


def photo_size_hw(path: str | PathLike[str]) -> tuple[int, int]:
    """Return the height and width in pixels of an upright photo, reading its header alone.

    Equals `photo(path).shape[-2:]`. Only a PNG that carries EXIF or XMP is decoded, because these
    may stand behind its pixels.

    Raises:
        PositionError: as `photo`, for what a header can show.
    """
    with _opened(path) as image:
        width, height = image.size
        if isinstance(
            image, TiffImagePlugin.TiffImageFile
        ):  # Pillow 11 turns its size, 10 does not
            tags = image.tag_v2
            width, height = tags[ExifTags.Base.ImageWidth], tags[ExifTags.Base.ImageLength]
        return (width, height) if _orientation(image, Path(path)) in SIDEWAYS else (height, width)


@contextmanager
def _opened(path: str | PathLike[str]) -> Iterator[Image.Image]:
    file = readable_file(path, "photo")
    with _decoding(f"path {str(path)!r}"), Image.open(file) as image:
        yield image


@contextmanager
def _decoding(name: str) -> Iterator[None]:
    """Turn whatever a decoder raises inside into a PositionError about `name`."""
    try:
        yield
    except PositionError:
        raise
    except Image.DecompressionBombError as error:
        raise PositionError(
            f"{name} is too large to decode safely ({error}); at most twice "
            "PIL.Image.MAX_IMAGE_PIXELS is required. Scale it down, or raise that limit if you trust it."
        ) from error
    except UnidentifiedImageError as error:
        raise PositionError(
            f"{name} is not an image that Pillow {PIL.__version__} can read; JPEG, PNG, WebP, GIF, "
            "TIFF, BMP or the like is required. Check the content, or convert it to PNG."
        ) from error
    except Exception as error:  # hostile bytes make Pillow raise almost any type
        raise PositionError(
            f"{name} cannot be decoded ({type(error).__name__}: {error}); a complete image is required. "
            "Download or export it again."
        ) from error


def _orientation(image: Image.Image, file: Path) -> int:
    if image.format == "PNG":
        content = file.read_bytes()
        if not any(tag in content for tag in PNG_TAGS):
            return 1
    return int(image.getexif().get(ExifTags.Base.Orientation, 1))


def _decode(image: Image.Image, name: str) -> Tensor:
    """Return `[channels, height, width]`, uint8 or (16-bit grey) uint16, upright."""
    upright = ImageOps.exif_transpose(image)
    if upright.mode in {"I", "F"}:
        raise PositionError(
            f"{name} has mode {upright.mode!r} (32 bits, range unknown); 8 or 16 bits a channel are "
            "required. Scale the values to 0..255 and pass them as a uint8 array."
        )
    if upright.mode.startswith("I;16"):
        return _channels_first(np.asarray(upright).astype(np.uint16))  # native byte order
    mode = "RGBA" if upright.has_transparency_data else "RGB"
    return _channels_first(np.asarray(upright.convert(mode)))


def _channels_first(array: np.ndarray[Any, Any]) -> Tensor:
    if array.dtype.kind not in "ui" or array.ndim not in {2, 3}:
        raise PositionError(
            f"image is an array {list(array.shape)} of {array.dtype}; uint8 or uint16 "
            "[height, width, channels] or [height, width] is required. Scale floats to 0..255."
        )
    # A flip such as bgr[..., ::-1] has strides that torch does not take.
    whole = np.ascontiguousarray(array if array.ndim == 3 else array[..., None])
    return torch.tensor(whole).movedim(-1, 0)


def _rgb(pixels: Tensor) -> Tensor:
    """Return `[3, height, width]` uint8 from 1 to 4 channels of 8 or 16 bits."""
    if pixels.ndim != 3 or pixels.shape[0] not in {1, 2, 3, 4} or not pixels.numel():
        raise PositionError(
            f"image has shape {list(pixels.shape)}, channels first; 1 to 4 channels of at least one "
            "pixel are required. Pass a tensor as [channels, height, width], an array as [height, "
            "width, channels]."
        )
    if pixels.dtype == torch.uint16:
        pixels = pixels.to(torch.int32) >> 8
    elif pixels.dtype != torch.uint8:
        raise PositionError(
            f"image has dtype {pixels.dtype}; uint8 or uint16 is required. Scale it to 0..255."
        )
    count = pixels.shape[0]
    colour = pixels[:1].expand(3, -1, -1) if count < 3 else pixels[:3]
    if count in {2, 4}:
        alpha = pixels[-1:].to(torch.int32)
        colour = (colour * alpha + 255 * (255 - alpha) + 127) // 255  # rounded to nearest
    return colour.to(torch.uint8).clone(memory_format=torch.contiguous_format)
