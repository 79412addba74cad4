"""Stretch: what every rule that stretches a ladder gives, and the checks they share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from visionpos.errors import ConfigError, PositionError
from visionpos.geometry.arguments import shown
from visionpos.geometry.fields import check_fields
from visionpos.geometry.grid import is_whole
from visionpos.geometry.ranges import check_theta

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch(ABC):
    """What every rule gives."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    @abstractmethod
    def frequencies(self, pairs: int, theta: float, dtype: torch.dtype) -> Tensor:
        """Return `[pairs]` radians per position, at the trained length where the rule depends on it.

        Args:
            pairs: channel pairs that turn.
            theta: ladder base.
            dtype: float32 or float64.

        Raises:
            PositionError: if the rule does not serve so many pairs.
        """

    def at_length(self, length: int) -> Stretch:
        """Return the rule for a document of so many tokens: itself, where it does not depend on the length.

        Args:
            length: largest position + 1 of the document.

        Raises:
            PositionError: if it is no whole number of at least 1.
        """
        checked_length(length)
        return self

    @property
    def gain(self) -> float:
        """Return what cos and sin are multiplied by, so that q . k gets its square."""
        return 1.0


def slowness(pairs: int, theta: float, dtype: torch.dtype) -> Tensor:
    """Return `[pairs]` positions per radian, `theta ** (k / pairs)`: what divisors multiply before the one division."""
    check_theta(theta)
    exponent = torch.arange(pairs, dtype=torch.int64).to(dtype) / pairs
    return torch.as_tensor(theta**exponent)


def raised(theta: float, factor: float, pairs: int) -> float:
    """Return the base with which the slowest of the pairs turns slower by a factor, and the fastest as before.

    Raises:
        PositionError: if there is one pair only, which cannot be both, or the base is too large a number.

    Example:
        >>> round(raised(10000.0, 4.0, 4), 2)
        63496.04
    """
    if pairs < 2:
        raise PositionError(
            f"pairs is {pairs}; an NTK-aware base needs at least 2 channel pairs, the fastest and the slowest. "
            "Use linear scaling, or a larger head_dim."
        )
    dim = 2 * pairs
    try:
        return float(theta * factor ** (dim / (dim - 2)))
    except OverflowError:
        raise PositionError(
            f"factor is {factor} for {pairs} pairs of base {theta}; their base would be too large a number. Use a "
            "smaller factor."
        ) from None


def checked_length(length: int) -> int:
    """Return the length of a document.

    Raises:
        PositionError: if it is no whole number of at least 1, or beyond those that ids can count.
    """
    if not is_whole(length) or length > 2**63 - 1:
        raise PositionError(
            f"length is {shown(length)}; a whole number of tokens, at least 1 and below 2**63, is required. Pass the "
            "largest position + 1 of the document."
        )
    return int(length)


def check_stretch(rule: Any, *factors: str, original: int = 2) -> None:
    """Refuse fields of another kind, factors below 1 and trained lengths below 2.

    Args:
        rule: the rule, while it is being made.
        factors: names of the fields that say how many times longer.
        original: positions the checkpoint was trained on.

    Raises:
        ConfigError: naming field, value and what is required.
    """
    try:
        check_fields(rule)
    except PositionError as error:
        raise ConfigError(str(error)) from None
    for name in factors:
        if getattr(rule, name) < 1:
            raise ConfigError(
                f"{name} is {getattr(rule, name)}; at least 1 is required: a context grows. Leave scaling out for none."
            )
    if original < 2:
        raise ConfigError(
            f"original_positions is {original}; at least 2 trained positions are required. Read "
            "original_max_position_embeddings from the checkpoint."
        )


def check_gain(gain: float | None) -> None:
    """Refuse a gain of cos and sin that is not above 0.

    Raises:
        ConfigError: naming it.
    """
    if gain is not None and not 0 < gain < math.inf:
        raise ConfigError(
            f"attention_factor is {gain}; a finite number above 0 is required. Leave it out for the published one."
        )
