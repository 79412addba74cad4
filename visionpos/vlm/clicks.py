"""Clicks: from a place on the original picture to the tokens that look at it; the way back is `Plan.token_rects`."""

from __future__ import annotations

import torch
from torch import Tensor

from visionpos.errors import PositionError
from visionpos.geometry.fields import check_kind
from visionpos.vlm.plans import Plan


def tokens_at(plan: Plan, point_yx: tuple[float, float]) -> Tensor:
    """Return which placeholders look at a point of the picture, in stream order: one a view, where views overlap.

    A view that cuts the picture's edge off, or whose last patches are not whole, may have none there. All queries of a
    view without rows and columns look at all of it.

    Args:
        plan: of an image or a clip; a clip's point is looked at in every time step.
        point_yx: (y, x) on the original picture in pixels, from 0 to its height and width; (0.5, 0.5) is the middle of
            the first pixel.

    Returns:
        `[k]` int64, indices in `plan.token_rects()` and among the True of `TokenStream.is_feature`.

    Raises:
        PositionError: if the point is not on the picture.

    Example:
        >>> from visionpos.vlm import Image, family
        >>> plan = family("qwen2_vl").plan(Image((56, 84)))
        >>> tokens_at(plan, (30.0, 10.0)).tolist()
        [3]
    """
    check_kind("plan", plan, Plan)
    size = torch.tensor(plan.size_hw, dtype=torch.float64)
    try:
        point = torch.as_tensor(point_yx, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # no numbers
        point = torch.empty(0)
    if point.shape != (2,) or not bool(((point >= 0) & (point <= size)).all()):
        raise PositionError(
            f"point_yx is {point_yx!r}; (y, x) in pixels from (0, 0) to {tuple(plan.size_hw)} is required. Divide what "
            "was clicked by the scale at which the picture was shown."
        )
    rects = plan.token_rects()  # [n, 4]
    low, high = rects[:, :2], rects[:, 2:]
    # Half open, but for the picture's own far edges.
    inside = (low <= point) & ((point < high) | ((point == size) & (high == size) & (low < high)))
    return inside.all(-1).nonzero().flatten()
