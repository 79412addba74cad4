"""Ids at memory speed on any device: lines of tokens, planned on the host, are spread where the ids will be read.

A line is a stretch of tokens along which every id runs evenly: a row of cells, a frame, a stretch of text. Its plan is
a few numbers, whatever its length, and one copy takes them to the device; nothing waits for the device after that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from visionpos.errors import PositionError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LinePlan:
    """Lines in reading order. At place p, counted through all tokens, an id is `base + (p - origin) * above / below`.

    Args:
        length: `[lines]` int64 tokens of each; some may have none.
        base: `[axes, lines]` int64, or float64 where ids are fractions.
        origin: `[axes, lines]` int64, the place from which an axis counts.
        above: `[axes, lines]` int64, numerator of the step from one token to the next; 0 where ids stand still.
        below: `[axes, lines]` int64, its denominator; None if all steps are whole.
        tokens: the sum of the lengths, known to the host.
    """

    length: Tensor
    base: Tensor
    origin: Tensor
    above: Tensor
    below: Tensor | None
    tokens: int

    def __post_init__(self) -> None:
        shapes = {
            tuple(part.shape) for part in (self.base, self.origin, self.above, self.below) if part is not None
        }  # fmt: skip
        if len(shapes) != 1 or self.base.ndim != 2 or self.length.shape != self.base.shape[1:]:
            raise PositionError(
                f"length is {tuple(self.length.shape)} and what the axes have {sorted(shapes)}; [lines] and one shape "
                "[axes, lines] are required. Give every axis a number a line."
            )
        if self.below is not None and self.base.dtype != torch.float64:
            raise PositionError(
                f"base is {self.base.dtype} with steps that are fractions; float64 is required. Convert it."
            )
        if self.base.dtype not in (torch.int64, torch.float64):
            raise PositionError(
                f"base is {self.base.dtype}; int64, or float64 where ids are fractions, is required. Convert it."
            )

    def to(self, device: torch.device | str) -> LinePlan:
        """Return the same plan on a device, by one copy that the host does not wait for."""
        if torch.device(device) == self.length.device:
            return self
        whole = [self.length[None], self.origin, self.above, self.base.view(torch.int64)]
        whole += [] if self.below is None else [self.below]
        sizes = [len(part) for part in whole]
        length, origin, above, base, *below = (
            torch.cat(whole).to(device, non_blocking=True).split(sizes)
        )
        return LinePlan(
            length[0], base.view(self.base.dtype), origin, above, below[0] if below else None, self.tokens
        )  # fmt: skip

    def ids(self) -> Tensor:
        """Return the ids `[axes, tokens]` on the device of the plan, int64 or float64 as base is."""
        device = self.length.device
        number = torch.arange(len(self.length), device=device)
        # With its size given, the device is not asked for the sum of the lengths.
        line = number.repeat_interleave(self.length, output_size=self.tokens)
        place = torch.arange(self.tokens, device=device)
        if self.below is None and not self.base.is_floating_point():
            # The product is one of lines, so that a token costs two look-ups an axis.
            base = self.base - self.origin * self.above
            return torch.addcmul(_at(base, line), _at(self.above, line), place)
        steps = ((place - _at(self.origin, line)) * _at(self.above, line)).to(self.base.dtype)
        if self.below is not None:
            steps = steps / _at(self.below, line).to(self.base.dtype)
        return _at(self.base, line) + steps


def _at(values: Tensor, line: Tensor) -> Tensor:
    """Return values of lines, `[axes, lines]`, at every token."""
    return values.index_select(1, line)


def repadded(ids: Tensor, keep: Tensor, fill: int) -> Tensor:
    """Return `[axes, b, n]`: a line of ids in rows again, with padding between them.

    Args:
        ids: `[axes, tokens]`, rows one after another.
        keep: `[b, n]` bool on the device of ids, False for padding; as many True as there are tokens.
        fill: what padding gets.

    Example:
        >>> keep = torch.tensor([[False, True, True], [True, False, False]])
        >>> repadded(torch.tensor([[5, 6, 7]]), keep, 0).tolist()
        [[[0, 5, 6], [7, 0, 0]]]
    """
    # A mask as an index would ask the device how many tokens it keeps.
    out = ids.new_full((len(ids), *keep.shape), fill)
    return out.masked_scatter_(keep.expand(out.shape), ids)
