"""A network of one number with a single hidden layer of ReLUs, as the straight pieces that it is.

Evaluated so, an input costs one search and one product a head instead of a product a hidden unit and head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from visionpos.geometry.precision import full_precision

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Straight pieces of a function of one number, for every head.

    Args:
        knots: `[k]`, in rising order, where one piece ends and the next begins; infinity where none does.
        slope: `[heads, k + 1]`.
        height: `[heads, k + 1]`, what a piece would give at 0.
    """

    knots: Tensor
    slope: Tensor
    height: Tensor

    @classmethod
    def of(cls, weight: Tensor, shift: Tensor, out: Tensor, floor: Tensor) -> Pieces:
        """Return the pieces of `out @ relu(weight * x + shift) + floor`.

        Args:
            weight: `[k]`.
            shift: `[k]`.
            out: `[heads, k]`.
            floor: `[heads]`.

        Returns:
            Pieces whose gradient is the network's.
        """
        with torch.no_grad():
            # A unit without slope never turns: its knot lies beyond every input.
            knots, order = torch.where(weight == 0, torch.inf, -shift / weight).sort()
            units = torch.arange(len(knots), device=knots.device)
            passed = units < torch.arange(len(knots) + 1, device=knots.device).unsqueeze(1)
            rises = weight[order]
            active = torch.where(rises == 0, shift[order] > 0, passed == (rises > 0))
        each = out[:, order]
        with full_precision(knots.device):
            slope = (each * weight[order]) @ active.to(out.dtype).mT
            height = (each * shift[order]) @ active.to(out.dtype).mT + floor.unsqueeze(-1)
        return cls(knots, slope, height)

    def at(self, x: Tensor) -> Tensor:
        """Return `[heads, ...]` at inputs `[...]`."""
        piece = torch.searchsorted(self.knots, x.detach(), right=True).flatten()
        slope, height = (
            part.index_select(1, piece).reshape(part.shape[0], *x.shape)
            for part in (self.slope, self.height)
        )
        found: Tensor = slope * x + height
        return found

    def reader(self) -> Callable[[Tensor, Tensor], Tensor]:
        """Return a function of head and input that reads single numbers, for a score function."""
        slope, height = self.slope, self.height
        levels = len(self.knots).bit_length()
        room = pad(self.knots, (0, 2**levels - 1 - len(self.knots)), value=torch.inf)

        def read(head: Tensor, x: Tensor) -> Tensor:
            piece = torch.zeros_like(head)
            for level in reversed(range(levels)):  # a binary search
                step = 2**level
                piece = piece + torch.where(x >= room[piece + (step - 1)], step, 0)
            return slope[head, piece] * x + height[head, piece]

        return read
