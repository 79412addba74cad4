"""Prompts: what the labels of clicks mean, and whether clicks, boxes, masks and their frame belong together.

Tensors and a frame enter; nothing leaves, or a refusal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from visionpos.errors import PositionError

if TYPE_CHECKING:
    from torch import Tensor

    from visionpos.geometry.image_frame import ImageFrame

IGNORED, NOT_A_POINT, TOP_LEFT, BOTTOM_RIGHT = -10, -1, 2, 3


def check_frame(frame: ImageFrame, spec: Any, names: tuple[str, ...]) -> None:
    """Refuse a frame whose settings are not those of the encoder's spec.

    Raises:
        PositionError: naming every setting that differs, in both.
    """
    if not all(hasattr(frame, name) for name in names):
        raise PositionError(
            f"frame is {frame!r}; an ImageFrame is required. Make it with this encoder's frame(source_hw)."
        )
    parts = {name: (getattr(frame, name), getattr(spec, name)) for name in names}
    differ = [
        f"{name} is {one!r} in the frame and {other!r} in the spec"
        for name, (one, other) in parts.items()
        if one != other
    ]
    if differ:
        raise PositionError(
            f"frame is another model's: {'; '.join(differ)}; they must agree. Make it with this encoder's frame()."
        )


def check_labels(labels: Tensor, *, corners: bool) -> None:
    """Refuse labels that mean nothing.

    Args:
        labels: `[..., k]` whole numbers.
        corners: whether points may be corners of a box.

    Raises:
        PositionError: naming the first label that is unknown, or the dtype that cannot hold one.
    """
    if labels.dtype == torch.bool:
        raise PositionError(
            "labels are torch.bool; whole numbers are required, for -1 and -10 are labels too. Pass labels.long() if "
            "True means positive."
        )
    known = [IGNORED, NOT_A_POINT, 0, 1] + ([TOP_LEFT, BOTTOM_RIGHT] if corners else [])
    wrong = ~torch.isin(labels, torch.tensor(known, device=labels.device))
    if wrong.any():
        raise PositionError(
            f"label {labels[wrong][0].item()} is unknown; one of {known} is required (1 positive, 0 negative, -1 "
            "not a point, -10 ignored). Pass box corners as boxes."
        )


def check_lead(points: Tensor | None, boxes: Tensor | None, masks: Tensor | None) -> None:
    """Refuse prompts that are not for the same sets.

    Args:
        points: `[..., k, 2]`.
        boxes: `[..., 4]`, one for each set of points.
        masks: `[..., height, width]`, one for each set, or one for several: the first of their leading sizes.

    Raises:
        PositionError: naming the leading sizes, if they differ.
    """
    parts = {"points": (points, -2), "boxes": (boxes, -1), "masks": (masks, -2)}
    leads = {
        name: tuple(part.shape[:end]) for name, (part, end) in parts.items() if part is not None
    }
    lead = leads.get("points", leads.get("boxes"))
    masked = leads.get("masks", ())
    if lead is not None and (leads.get("boxes", lead) != lead or masked != lead[: len(masked)]):
        raise PositionError(
            f"the leading sizes are {leads}; one box for each set of points, and one mask for each or for several, are "
            "required. Expand them to the same sizes."
        )
