"""Scaling: how a language model's ladder of frequencies is stretched for longer contexts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from visionpos.errors import ConfigError
from visionpos.geometry import ladder


@dataclass(frozen=True, slots=True, kw_only=True)
class Yarn:
    """Slow pairs divided by a factor, fast ones kept, a ramp between; cos and sin grow by the attention factor.

    The ramp goes by pair, so contiguous sections stretch their last axes alone and interleaved ones all alike.

    Args:
        kind: "yarn".
        factor: how many times longer the context is, at least 1.
        original_positions: positions the checkpoint was trained on.
        beta_fast: turns over the original context above which a pair is kept.
        beta_slow: turns below which it is divided by the whole factor.
        attention_factor: of cos and sin alike, so q . k gets its square; None for 0.1 ln(factor) + 1.

    Reference:
        YaRN (arXiv 2309.00071); transformers modeling_rope_utils _compute_yarn_parameters.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    kind: Literal["yarn"]
    factor: float
    original_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        sized = 1 <= self.factor < math.inf and self.original_positions >= 1
        if not sized or not 0 < self.beta_slow < self.beta_fast < math.inf:
            raise ConfigError(
                f"factor is {self.factor}, original_positions {self.original_positions}, beta_slow {self.beta_slow} "
                f"and beta_fast {self.beta_fast}; a factor and positions of at least 1 and 0 < beta_slow < beta_fast "
                "are required. Read them from the checkpoint's rope parameters."
            )

    def frequencies(self, pairs: int, theta: float, dtype: torch.dtype) -> Tensor:
        """Return `[pairs]` radians per position."""
        kept = ladder(pairs, theta=theta, dtype=dtype)
        low, high = (self._pair(turns, pairs, theta) for turns in (self.beta_fast, self.beta_slow))
        low, high = max(math.floor(low), 0), min(math.ceil(high), 2 * pairs - 1)
        ramp = (torch.arange(pairs, dtype=dtype) - low) / max(high - low, 1e-3)
        keep = 1 - ramp.clamp(0, 1)
        return kept / self.factor * (1 - keep) + kept * keep

    def _pair(self, turns: float, pairs: int, theta: float) -> float:
        """Return the pair, as a fraction, that makes so many turns over the original context."""
        return pairs * math.log(self.original_positions / (turns * 2 * math.pi)) / math.log(theta)

    @property
    def gain(self) -> float:
        """Return what cos and sin are multiplied by."""
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class NtkAlpha:
    """A larger ladder base: theta * alpha^(d / (d - 2)) (HunYuan).

    Args:
        kind: "ntk_alpha".
        alpha: above 0.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    kind: Literal["ntk_alpha"]
    alpha: float

    def __post_init__(self) -> None:
        if not 0 < self.alpha < math.inf:
            raise ConfigError(
                f"alpha is {self.alpha}; a finite number above 0 is required. Leave scaling out for none."
            )

    def frequencies(self, pairs: int, theta: float, dtype: torch.dtype) -> Tensor:
        """Return `[pairs]` radians per position."""
        dim = 2 * pairs
        return ladder(pairs, theta=theta * self.alpha ** (dim / (dim - 2)), dtype=dtype)

    @property
    def gain(self) -> float:
        """Return what cos and sin are multiplied by: 1."""
        return 1.0


Scaling = Yarn | NtkAlpha
