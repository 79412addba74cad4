"""Rope parameters: the ladder of a language model and how it is stretched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from visionpos.errors import ConfigError
from visionpos.geometry.fields import check_choice, check_fields
from visionpos.geometry.freqs import ladder
from visionpos.geometry.grid import is_whole
from visionpos.geometry.ranges import check_theta
from visionpos.geometry.scaling import Proportional, Scaling
from visionpos.geometry.stretch import checked_length

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeParams:
    """A ladder and how it is stretched.

    Args:
        theta: ladder base.
        share: share of a head's channels that turn, by a ladder of their own (partial_rotary_factor); 1 with
            proportional scaling, which has a share of its own.
        scaling: how the ladder is stretched; None for not at all.

    Raises:
        ConfigError: if theta is not above 0, or share not above 0 and at most 1, or not 1 with proportional scaling.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    theta: float
    share: float = 1.0
    scaling: Scaling | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_theta(self.theta)
        if not 0 < self.share <= 1:
            raise ConfigError(
                f"share is {self.share}; a share of channels above 0 and at most 1 is required. Read "
                "partial_rotary_factor from the config."
            )
        if self.share != 1 and isinstance(self.scaling, Proportional):
            raise ConfigError(
                f"share is {self.share} with proportional scaling, whose own share is {self.scaling.share}; 1 is "
                "required. Write the share of pairs into the scaling alone."
            )

    def frequencies(
        self,
        head_dim: int,
        *,
        length: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Return `[1, pairs]` radians per position: freqs of one axis.

        Args:
            head_dim: channels of a head.
            length: tokens of the document, largest position + 1; None for the trained length.
            dtype: float32, or float64 for positions beyond 2**17.

        Raises:
            PositionError: if an odd number of channels would turn, lists of divisors have another length, or length or
                dtype is none.

        Example:
            >>> from visionpos.geometry.scaling import Linear
            >>> RopeParams(theta=1e4, share=0.5, scaling=Linear(factor=2.0)).frequencies(8)
            tensor([[0.5000, 0.0050]])
        """
        check_choice("dtype", dtype, (torch.float32, torch.float64))
        if length is not None:
            checked_length(length)
        turning = int(head_dim * self.share) if is_whole(head_dim) else 0
        if turning < 2 or turning % 2:
            raise ConfigError(
                f"head_dim is {head_dim!r} and share {self.share}, so {turning} channels turn; an even number, at "
                "least 2, is required. Read both from the checkpoint."
            )
        if self.scaling is None:
            return ladder(turning // 2, theta=self.theta, dtype=dtype).unsqueeze(0)
        rule = self.scaling if length is None else self.scaling.at_length(length)
        return rule.frequencies(turning // 2, self.theta, dtype).unsqueeze(0)

    @property
    def gain(self) -> float:
        """Return what cos and sin are multiplied by, so that q . k gets its square."""
        return 1.0 if self.scaling is None else self.scaling.gain
