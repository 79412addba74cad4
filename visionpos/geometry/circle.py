"""Circle: the cells of an image laid on a circle across the text axis, so that all are equally far from any text."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from visionpos.errors import PositionError
from visionpos.geometry.places import check_points
from visionpos.geometry.precision import wide


def circle_coords(
    coords: Tensor, *, radius: float | None = 10.0, scale: float = 1.0, alpha: float = 0.5
) -> Tensor:
    """Return the cells of one image on a circle in the plane that is orthogonal to the text axis (1, 1, 1).

    A cell's place on the circle mixes two angles: the angle at which it is seen from the middle of the image,
    stretched to a full turn, and its raster number as a share of a full turn. The middle of the circle is the origin.

    Args:
        coords: `[..., n, 2]` (y, x) of all cells of the image, row-major.
        radius: of the circle; None takes the largest centred coordinate times `scale`.
        scale: see radius.
        alpha: weight in [0, 1] of the seen angle against the raster angle.

    Returns:
        `[..., n, 3]`, axes ordered t, y, x. Every cell has the same distance to any point (s, s, s), where text stands.

    Raises:
        PositionError: if alpha, radius or scale is out of range, there are no cells or other axes, or, on the CPU, a
            coordinate is not finite.

    Example:
        >>> around = circle_coords(torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]]))
        >>> (around - torch.tensor([7.0, 7.0, 7.0])).norm(dim=-1)
        tensor([15.7162, 15.7162, 15.7162, 15.7162])

    Reference:
        Circle-RoPE (arXiv 2505.16416), lose4578/CircleRoPE code/circle_rope.py with move_to_origin.
    """
    check_circle(radius, scale, alpha)
    check_points(coords, None, "coords")
    if coords.ndim < 2 or coords.shape[-1] != 2 or coords.shape[-2] == 0:
        raise PositionError(
            f"coords has shape {tuple(coords.shape)}; [..., n, 2] with n of at least 1 is required. Pass all cells of "
            "one image."
        )
    coords = wide(coords)
    middle = (coords.amax(-2, keepdim=True) + coords.amin(-2, keepdim=True)) / 2
    centred = coords - middle
    # The middle row lies on the cut of atan2: rounding noise must not throw a cell to the other end of the turn.
    noise = 1e-5 * (coords.amax(-2, keepdim=True) - coords.amin(-2, keepdim=True))
    centred = torch.where(centred.abs() <= noise, torch.zeros_like(centred), centred)
    y, x = centred.unbind(-1)
    seen = torch.atan2(y, x)
    low, high = seen.amin(-1, keepdim=True), seen.amax(-1, keepdim=True)
    spread = (high - low).clamp(min=torch.finfo(seen.dtype).tiny)
    seen = torch.where(high > low, (seen - low) / spread * (2 * math.pi), seen)
    n = coords.shape[-2]
    raster = torch.arange(n, device=coords.device, dtype=coords.dtype) / n * (2 * math.pi)
    turn = alpha * seen + (1 - alpha) * raster
    if radius is None:
        reach = centred.amax((-1, -2)).unsqueeze(-1) * scale
    else:
        reach = torch.full_like(seen[..., :1], radius)
    across, along = reach * turn.cos(), reach * turn.sin()
    # An orthonormal basis of the plane: (x, y, t) = (-1, 1, 0) / sqrt 2 and (-1, -1, 2) / sqrt 6.
    half, sixth = 1 / math.sqrt(2), 1 / math.sqrt(6)
    t, y, x = 2 * sixth * along, half * across - sixth * along, -half * across - sixth * along
    return torch.stack([t, y, x], dim=-1)


def check_circle(radius: float | None, scale: float, alpha: float) -> None:
    """Refuse a circle without a size, or a weight outside [0, 1]."""
    sized = 0 < scale < math.inf and (radius is None or 0 < radius < math.inf)
    if not sized or not 0 <= alpha <= 1:
        raise PositionError(
            f"radius is {radius}, its scale {scale} and alpha {alpha}; finite numbers above 0 (radius may be None), "
            "and alpha in [0, 1], are required."
        )
