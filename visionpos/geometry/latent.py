"""Latent: multi-head latent attention, in which a part of every head turns beside a latent that cannot.

A rotation between the two projections of a latent does not commute with them, so DeepSeek adds channels that turn: one
per head on the side of queries, one for all heads on the side of keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from visionpos.errors import PositionError
from visionpos.geometry.arguments import checked
from visionpos.geometry.fields import check_fields
from visionpos.geometry.ranges import check_counts
from visionpos.geometry.rotation import Rotation


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """The sizes of latent attention.

    Args:
        still_dim: channels of a head that come of the latent and do not turn.
        rope_dim: channels of a head that turn, an even number.
        value_dim: channels of a value.
        kv_rank: channels of the latent of keys and values, which is cached.
        q_rank: channels of the latent of queries; None where they have none.

    Raises:
        PositionError: if a count is below 1, or rope_dim odd.

    Example:
        >>> sizes = Latent(still_dim=128, rope_dim=64, value_dim=128, kv_rank=512, q_rank=1536)
        >>> sizes.width, sizes.cached
        (192, 576)

    Reference:
        DeepSeek-V2 (arXiv 2405.04434), deepseek-ai/DeepSeek-V3 inference/model.py.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    still_dim: int
    rope_dim: int
    value_dim: int
    kv_rank: int
    q_rank: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        counts = {
            name: getattr(self, name) for name in ("still_dim", "rope_dim", "value_dim", "kv_rank")
        }
        check_counts(**counts)
        if self.q_rank is not None:
            check_counts(q_rank=self.q_rank)
        if self.rope_dim % 2:
            raise PositionError(
                f"rope_dim is {self.rope_dim}; an even number is required: channels turn in pairs. Read "
                "qk_rope_head_dim from the config."
            )

    @property
    def width(self) -> int:
        """Return the channels of a head that are held against each other."""
        return self.still_dim + self.rope_dim

    @property
    def cached(self) -> int:
        """Return the numbers a token that a cache holds: the latent, and one turned key for all heads."""
        return self.kv_rank + self.rope_dim


@checked
def turn_latent(
    q: Tensor, k_still: Tensor, k_rope: Tensor, rotation: Rotation, *, sizes: Latent
) -> tuple[Tensor, Tensor]:
    """Return queries and keys of latent attention, their last channels turned.

    Args:
        q: `[b, heads, n, still_dim + rope_dim]`, the channels that turn last.
        k_still: `[b, heads, n, still_dim]`, of the latent.
        k_rope: `[b, 1, n, rope_dim]`, one for all heads.
        rotation: of all rope_dim channels; "adjacent" pairs in DeepSeek's weights.
        sizes: of latent attention.

    Returns:
        Two tensors `[b, heads, n, still_dim + rope_dim]`. The order of channels is that of the weights; transformers
        puts turned ones into halves, on both sides alike, which q . k does not see.

    Raises:
        PositionError: if widths or heads do not fit.

    Example:
        >>> sizes = Latent(still_dim=6, rope_dim=4, value_dim=6, kv_rank=8)
        >>> q, k, shared = torch.ones(1, 2, 3, 10), torch.ones(1, 2, 3, 6), torch.ones(1, 1, 3, 4)
        >>> [
        ...     x.shape[-1]
        ...     for x in turn_latent(q, k, shared, Rotation.of(torch.ones(3, 2)), sizes=sizes)
        ... ]
        [10, 10]
    """
    shapes = [tuple(x.shape) for x in (q, k_still, k_rope)]
    lead = {(*shape[:1], *shape[2:-1]) for shape in shapes}  # batch and tokens
    if any(len(shape) != 4 for shape in shapes) or len(lead) > 1 or shapes[0][1] != shapes[1][1]:
        raise PositionError(
            f"q, k_still and k_rope have shapes {shapes[0]}, {shapes[1]} and {shapes[2]}; [b, heads, n, channels] of "
            "one batch and n, with one number of heads of q and k_still, are required. Split the projections by sizes."
        )
    widths = (q.shape[-1], k_still.shape[-1], k_rope.shape[-1], 2 * rotation.pairs)
    wanted = (sizes.width, sizes.still_dim, sizes.rope_dim, sizes.rope_dim)
    if widths != wanted or k_rope.shape[1] != 1:
        raise PositionError(
            f"q, k_still, k_rope and rotation have {widths} channels and k_rope {k_rope.shape[1]} heads; {wanted} and "
            "one head are required. Split the projections as the sizes say."
        )
    still, moving = q.split((sizes.still_dim, sizes.rope_dim), dim=-1)
    shared = rotation.apply(k_rope).expand(*k_still.shape[:-1], -1)
    return torch.cat([still, rotation.apply(moving)], -1), torch.cat([k_still, shared], -1)
