"""Layout: which channels of a head turn together and by which axis, and how to move weights between layouts.

Two checkpoints with the same frequencies may differ only in the order of q and k channels. A Layout names that order;
`convert` permutes the rows of q and k weights so that scores stay the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from visionpos.errors import PositionError

if TYPE_CHECKING:
    from torch import Tensor

    from visionpos.geometry.freqs import Bands, Order
    from visionpos.geometry.rotation import Pairing


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The channel order of a rotary head.

    Args:
        head_dim: channels of a head.
        pairing: "half" or "adjacent".
        axis_order: axis that owns the first, second, ... share of pairs: (0, 1) is y then x, (1, 0) x then y.
        order: "contiguous" blocks of pairs an axis, or pairs "interleaved" between the axes.
        bands: "shared" ladder on every axis, or one ladder "dealt" to the axes.
        rotary_dim: channels that turn, all when None; the rest keep their place at the end.

    Raises:
        PositionError: if the channels cannot be shared out.
    """

    head_dim: int
    pairing: Pairing = "half"
    axis_order: tuple[int, ...] = (0, 1)
    order: Order = "contiguous"
    bands: Bands = "shared"
    rotary_dim: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.turned <= self.head_dim or self.turned % (2 * len(self.axis_order)):
            raise PositionError(
                f"rotary_dim is {self.turned} of head_dim {self.head_dim} for {len(self.axis_order)} axes; a positive "
                f"multiple of {2 * len(self.axis_order)}, at most head_dim, is required."
            )
        if sorted(self.axis_order) != list(range(len(self.axis_order))):
            raise PositionError(
                f"axis_order is {self.axis_order}; a permutation of the axes is required."
            )

    @property
    def turned(self) -> int:
        """Return the number of channels that turn."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    def pair_names(self) -> list[tuple[int, int]]:
        """Return (axis, step on that axis) of every pair, in pair order."""
        axes, pairs = len(self.axis_order), self.turned // 2
        share = pairs // axes
        if self.order == "contiguous":
            return [(self.axis_order[pair // share], pair % share) for pair in range(pairs)]
        return [(self.axis_order[pair % axes], pair // axes) for pair in range(pairs)]

    def channel_names(self) -> list[tuple[int, int, int]]:
        """Return (axis, step, member of the pair) of every channel that turns, in channel order."""
        pairs = self.pair_names()
        if self.pairing == "half":
            return [(*pair, member) for member in (0, 1) for pair in pairs]
        return [(*pair, member) for pair in pairs for member in (0, 1)]


def channel_permutation(source: Layout, target: Layout) -> Tensor:
    """Return `[head_dim]` indices such that `old[indices]` stands in the target's channel order.

    Raises:
        PositionError: if no permutation joins the two: other sizes, axes, or ladders.

    Example:
        >>> channel_permutation(Layout(head_dim=8, pairing="adjacent"), Layout(head_dim=8)).tolist()
        [0, 2, 4, 6, 1, 3, 5, 7]
    """
    if (source.head_dim, source.turned) != (target.head_dim, target.turned):
        raise PositionError(
            f"source turns {source.turned} of {source.head_dim} channels and target {target.turned} of "
            f"{target.head_dim}; the two must agree. Convert between layouts of one head size."
        )
    if source.bands != target.bands or len(source.axis_order) != len(target.axis_order):
        raise PositionError(
            f"source has bands {source.bands!r} over {len(source.axis_order)} axes and target {target.bands!r} over "
            f"{len(target.axis_order)}; other frequencies cannot be reached by reordering channels. Retrain, or keep "
            "the source's frequencies."
        )
    where = {name: channel for channel, name in enumerate(source.channel_names())}
    indices = [where[name] for name in target.channel_names()]
    return torch.tensor(indices + list(range(source.turned, source.head_dim)))


def convert(weight: Tensor, source: Layout, target: Layout) -> Tensor:
    """Return q or k rows in the target's channel order; convert q and k alike and scores stay the same.

    Args:
        weight: `[heads * head_dim, ...]`: a projection weight, its bias, or `[head_dim]` of a q/k norm.
        source: layout the weight was trained with.
        target: layout of the attention that will use it.

    Returns:
        A new tensor of the same shape.

    Raises:
        PositionError: if the rows are no whole number of heads or the layouts cannot be joined.

    Reference:
        transformers' checkpoint converters permute q and k rows this way; skipping it gives no shape error and scores
        that are wrong by several units.
    """
    if weight.shape[0] % source.head_dim:
        raise PositionError(
            f"weight has {weight.shape[0]} rows and head_dim is {source.head_dim}; whole heads are required. "
            "Split q, k and v before converting."
        )
    order = channel_permutation(source, target).to(weight.device)
    heads: Tensor = weight.unflatten(0, (-1, source.head_dim))
    return heads.index_select(1, order).flatten(0, 1)
