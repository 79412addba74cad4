"""Size rules: from the size of a picture to the size a model sees, as a list of small steps.

Sizes enter and sizes leave, no pixels. A family's `size:` is a list of the kinds named here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import get_args

from visionpos.errors import PositionError
from visionpos.geometry.arguments import checked
from visionpos.vlm.box import Arithmetic, Box
from visionpos.vlm.budgets import Area, Clamp, Edges, Pixels
from visionpos.vlm.canvas import Canvas, Stretch
from visionpos.vlm.fitting import Enlarge, Fit, Multiple, Refuse
from visionpos.vlm.largest import AlignedPixels, PatchBudget, Patches, RowBudget

Step = (
    Refuse
    | Enlarge
    | Pixels
    | Fit
    | Stretch
    | Canvas
    | Multiple
    | Area
    | Edges
    | Patches
    | PatchBudget
    | AlignedPixels
    | RowBudget
)

STEPS: dict[str, type[Step]] = {
    str(next(field.default for field in fields(step) if field.name == "kind")): step
    for step in get_args(Step)
}


def boxed(
    steps: Sequence[Step],
    size_hw: tuple[int, int],
    *,
    frames: int = 1,
    default_hw: tuple[int, int] | None = None,
) -> Box:
    """Return the picture and the canvas around it after all steps, in order.

    Args:
        steps: the size rule of a family.
        size_hw: (height, width) in pixels, each at least 1.
        frames: sampled frames of the clip, 1 for an image.
        default_hw: (height, width) of the box that steps take which name none.

    Raises:
        PositionError: if a step refuses the picture, or leaves a side of 0 pixels.
    """
    box = Box(*size_hw, frames=frames, default_hw=default_hw)
    for step in steps:
        before = box.height, box.width
        try:
            box = step.apply(box)
        except PositionError as refusal:
            if before == tuple(size_hw):
                raise
            raise type(refusal)(
                f"size_hw {tuple(size_hw)} is resized, and then {refusal}"
            ) from None
        sides = box.height, box.width
        sides = sides if min(sides) < 1 else box.size_hw
        if min(sides) < 1:
            raise PositionError(
                f"size_hw {tuple(size_hw)} becomes {sides} by step {step.kind!r}; a side of 0 "
                "pixels has no tokens. Pad the picture to a smaller ratio, or raise max_px."
            )
    return box


def resized(steps: Sequence[Step], size_hw: tuple[int, int], *, frames: int = 1) -> tuple[int, int]:
    """Return the size after all steps, in order.

    Args:
        steps: the size rule of a family.
        size_hw: (height, width) in pixels, each at least 1.
        frames: sampled frames of the clip, 1 for an image.

    Returns:
        (height, width) in pixels.

    Raises:
        PositionError: if a step refuses the picture, or leaves a side of 0 pixels.

    Example:
        >>> resized([Pixels(multiple=28, min_px=3136, max_px=1003520)], (480, 640))
        (476, 644)
    """
    return boxed(steps, size_hw, frames=frames).size_hw


@checked
def smart_resize(
    size_hw: tuple[int, int],
    factor: int,
    min_px: int,
    max_px: int,
    *,
    ratio_over: int = 200,
    clamp: tuple[Clamp, ...] = ("floor",),
    arithmetic: Arithmetic = "float64",
) -> tuple[int, int]:
    """Return the size that the Qwen-VL line gives an image.

    Args:
        size_hw: (height, width) in pixels.
        factor: unit of both sides in pixels, patch * merge (28 for Qwen2-VL, 32 for Qwen3-VL).
        min_px: smallest number of pixels.
        max_px: largest number of pixels.
        ratio_over: largest ratio of the sides that is accepted.
        clamp: `("floor",)` as transformers does, `("round",)` as qwen-vl-utils does.
        arithmetic: "float64" as both do, or "exact".

    Returns:
        (height, width) in pixels, multiples of `factor`.

    Raises:
        PositionError: if the ratio is too large, or a side becomes 0.

    Example:
        >>> smart_resize((1080, 1920), 28, 3136, 1003520)
        (728, 1316)

    Reference:
        QwenLM/Qwen2-VL qwen-vl-utils vision_process.py; transformers image_processing_qwen2_vl.py.
    """
    budget = Pixels(
        multiple=factor, min_px=min_px, max_px=max_px, clamp=clamp, arithmetic=arithmetic
    )
    return resized([Refuse(ratio_over=ratio_over), budget], size_hw)
