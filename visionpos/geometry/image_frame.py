"""Image frame: what the numbers of a click, a box or a mask refer to, and where they land in a model's input.

Points, boxes and masks in a declared frame enter; pixels (x, y) of the model's input leave.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch.nn import functional as F

from visionpos.errors import PositionError
from visionpos.geometry.fields import check_fields
from visionpos.geometry.precision import wide

if TYPE_CHECKING:
    from torch import Tensor

Resize = Literal["pad", "stretch"]
Unit = Literal["pixels", "normalised"]
PointOrder = Literal["xy", "rc"]
BoxForm = Literal["xyxy", "xywh", "cxcywh"]
Centre = Literal["reference", "geometric"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFrame:
    """The frame in which coordinates are given, and the resize that brings the image into a model's input.

    Args:
        source_hw: height and width in pixels of the image that the coordinates refer to.
        input_hw: height and width in pixels of the model's input, padding included.
        resize: "pad": the longest side fills the input, the rest is padded right and bottom (SAM); "stretch": both
            sides fill it, aspect is not kept (SAM 2).
        unit: "pixels" of the source, pixel 0 being the first; or "normalised", fractions of its sides in [0, 1].
        order: "xy", or "rc" for (row, column).
        box_form: "xyxy" corners, "xywh" first corner and size, "cxcywh" centre and size; under order "rc" each pair is
            (row, column).
        centre: "reference" multiplies pixel numbers by the scale, as SAM and SAM 2 do; "geometric" keeps the centre of
            a pixel on the same image point, (x + .5) * scale - .5.
        quantise: floor clicks to whole source pixels first, as annotation tools that store integers do.

    Raises:
        PositionError: if a size is below 1 pixel, a choice is unknown, or a long strip leaves no pixel of its short
            side.

    Example:
        >>> click = torch.tensor([[960.0, 300.0]])
        >>> ImageFrame(source_hw=(1200, 1920), input_hw=(1024, 1024), resize="pad").points(click)
        tensor([[512., 160.]])
        >>> ImageFrame(source_hw=(1200, 1920), input_hw=(1024, 1024), resize="stretch").points(
        ...     click
        ... )
        tensor([[512., 256.]])

    Reference:
        facebookresearch/segment-anything utils/transforms.py (ResizeLongestSide); facebookresearch/sam2
        utils/transforms.py. Neither checks ranges.
    """

    source_hw: tuple[int, int]
    input_hw: tuple[int, int]
    resize: Resize
    unit: Unit = "pixels"
    order: PointOrder = "xy"
    box_form: BoxForm = "xyxy"
    centre: Centre = "reference"
    quantise: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("source_hw", "input_hw"):
            size_hw = getattr(self, name)
            if min(size_hw) < 1:
                raise PositionError(
                    f"{name} is {size_hw!r}; two whole numbers (height, width) of at least 1 pixel are required."
                )
        if min(self.scaled_hw) < 1:
            raise PositionError(
                f"source_hw {self.source_hw} becomes {self.scaled_hw} pixels in an input of {self.input_hw}; at least "
                "1 pixel a side is required. Crop the strip, or use resize='stretch'."
            )

    @property
    def scaled_hw(self) -> tuple[int, int]:
        """Return height and width in pixels of the image inside the input, padding excluded."""
        return self._scaled_into(self.input_hw)

    def _scaled_into(self, room_hw: tuple[int, int]) -> tuple[int, int]:
        """Return the size of the image inside a room of this size, rounded half up as the sources do."""
        if self.resize == "stretch":
            return room_hw
        factor = min(room / side for room, side in zip(room_hw, self.source_hw, strict=True))
        height, width = (int(side * factor + 0.5) for side in self.source_hw)
        return height, width

    def points(self, points: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return points as (x, y) pixels of the input.

        Args:
            points: `[..., 2]` in this frame.
            labels: `[...]`; a row whose label is negative is filler, it is not checked and comes back as zeros.

        Returns:
            `[..., 2]` float32 (float64 if given), not yet moved to pixel centres: an encoder adds its own .5.

        Raises:
            PositionError: naming the first point that is not finite or lies outside the source image, or the shapes
                if they disagree.
        """
        if points.shape[-1:] != (2,) or (labels is not None and labels.shape != points.shape[:-1]):
            shape = None if labels is None else tuple(labels.shape)
            raise PositionError(
                f"points have shape {tuple(points.shape)} and labels {shape}; [..., 2] and [...] are required, one "
                "label a point."
            )
        points = wide(points)
        filler = None if labels is None else (labels < 0).unsqueeze(-1)
        if filler is not None:
            points = torch.where(filler, torch.zeros_like(points), points)
        placed = points.flip(-1) if self.order == "rc" else points
        placed = self._scale(self._pixels(placed, points, "point", whole=self.quantise))
        return placed if filler is None else torch.where(filler, torch.zeros_like(placed), placed)

    def boxes(self, boxes: Tensor) -> Tensor:
        """Return boxes as corners (x, y, x, y) in pixels of the input.

        Args:
            boxes: `[..., 4]` in this frame and its box form.

        Returns:
            `[..., 4]` float32 (float64 if given): top left, bottom right.

        Raises:
            PositionError: naming the first box that is not finite, lies outside the source image, has its corners
                the wrong way round, or, declared in pixels, spans no more than one of them.
        """
        if boxes.shape[-1:] != (4,):
            raise PositionError(f"boxes have shape {tuple(boxes.shape)}; [..., 4] is required.")
        pairs = wide(boxes).unflatten(-1, (2, 2))
        first, second = (pairs.flip(-1) if self.order == "rc" else pairs).unbind(-2)
        if self.box_form == "cxcywh":
            first, second = first - second / 2, first + second / 2
        elif self.box_form == "xywh":
            second = first + second
        corners = torch.stack([first, second], dim=-2)  # [..., 2, 2]
        size = second - first
        wrong = (size <= 0).any(-1) | ((size <= 1).all(-1) if self.unit == "pixels" else False)
        if wrong.any():
            box = [round(v, 4) for v in boxes[wrong][0].tolist()]
            raise PositionError(
                f"box {box} is empty, turned round or no larger than a pixel as {self.box_form!r} in {self.unit}; a "
                "first corner above and left of the second is required. Set box_form and unit to what the numbers are."
            )
        placed = self._pixels(corners, boxes.unsqueeze(-2).expand(*corners.shape[:-1], 4), "box")
        return self._scale(placed).flatten(-2)

    def mask(self, mask: Tensor, room_hw: tuple[int, int], *, fill: float = 0.0) -> Tensor:
        """Return a mask of the source image, brought into the input frame by the image's own resize.

        Args:
            mask: `[..., height, width]` logits or 0 and 1, of size `source_hw`.
            room_hw: height and width of the result, the whole input frame included its padding (SAM: 256, 256).
            fill: value of the padding, which shows no image.

        Returns:
            `[..., *room_hw]`, bilinear with antialias.

        Raises:
            PositionError: if the mask has another size than the source image.
        """
        if tuple(mask.shape[-2:]) != tuple(self.source_hw):
            raise PositionError(
                f"mask has size {tuple(mask.shape[-2:])}; the source image's {tuple(self.source_hw)} is required. A "
                "mask that is already in the input frame needs no call."
            )
        flat = wide(mask).reshape(-1, 1, *mask.shape[-2:])
        size_hw = tuple(max(side, 1) for side in self._scaled_into(room_hw))
        small = F.interpolate(flat, size_hw, mode="bilinear", align_corners=False, antialias=True)
        below, right = (room - side for room, side in zip(room_hw, size_hw, strict=True))
        return F.pad(small, (0, right, 0, below), value=fill).reshape(*mask.shape[:-2], *room_hw)

    def _sides(self, like: Tensor) -> Tensor:
        """Return (width, height) of the source, on the device of `like`."""
        return like.new_tensor([self.source_hw[1], self.source_hw[0]])

    def _pixels(self, placed: Tensor, given: Tensor, noun: str, *, whole: bool = False) -> Tensor:
        """Return (x, y) in source pixels, after checking that every one lies in the source image."""
        limit = self._sides(placed) if self.unit == "pixels" else torch.ones_like(placed[..., :1])
        outside = ~((placed >= 0) & (placed <= limit)).all(-1)  # NaN compares false
        if outside.any():
            where = [round(v, 4) for v in given[outside][0].tolist()]
            height, width = self.source_hw if self.unit == "pixels" else (1, 1)
            form = self.order if noun == "point" else self.box_form
            raise PositionError(
                f"{noun} {where} does not lie inside x 0..{width}, y 0..{height}, the source image in {self.unit} read "
                f"as {form!r}; finite coordinates inside it are required. Set source_hw, unit, order and box_form to "
                "what the numbers are."
            )
        if self.unit == "normalised":
            placed = placed * self._sides(placed)
        if whole:  # the pixel that a place lies in has a number, not a centre
            return torch.minimum(placed.floor(), self._sides(placed) - 1)
        half = self.unit == "normalised" and self.centre == "geometric"
        return placed - 0.5 if half else placed

    def _scale(self, placed: Tensor) -> Tensor:
        """Return source pixels in pixels of the input."""
        height, width = self.scaled_hw
        half = 0.5 if self.centre == "geometric" else 0.0
        # Multiplied first: whole pixels stay exact, which a rounded ratio would not keep.
        return (placed + half) * placed.new_tensor([width, height]) / self._sides(placed) - half
