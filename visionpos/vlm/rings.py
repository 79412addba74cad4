"""Rings: the cells of an image on a circle across the text axis, as position offsets."""

from __future__ import annotations

import numpy as np
import torch

from visionpos.geometry.circle import circle_coords
from visionpos.vlm.clocks import Array
from visionpos.vlm.rules import Circle


def ring(circle: Circle, height: int, width: int) -> Array:
    """Return `[3, height * width]` float64: t, y, x of every cell less the position at which the image starts.

    Args:
        circle: radius and mix of angles.
        height: rows of the image.
        width: columns of the image.

    Example:
        >>> np.linalg.norm(ring(Circle(radius=10.0), 2, 3), axis=0).round(3).tolist()
        [10.0, 10.0, 10.0, 10.0, 10.0, 10.0]
    """
    rows, cols = torch.arange(height).double(), torch.arange(width).double()
    cells = torch.stack(torch.meshgrid(rows, cols, indexing="ij"), -1).reshape(-1, 2)
    around = circle_coords(cells, radius=circle.radius, alpha=circle.alpha)
    return np.asarray(around.T.numpy(), dtype=np.float64)
