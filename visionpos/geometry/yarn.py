"""YaRN: fast pairs kept, slow ones divided by a factor, a ramp between; in the form of the code and of the paper."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from visionpos.errors import ConfigError, PositionError
from visionpos.geometry.freqs import ladder
from visionpos.geometry.stretch import Stretch, check_gain, check_stretch, slowness

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Yarn(Stretch):
    """Slow pairs divided by a factor, fast ones kept, a ramp between; cos and sin grow by the attention factor.

    In M-RoPE the ramp goes by pair: contiguous sections stretch their last axes alone, interleaved ones all alike.

    Args:
        kind: "yarn".
        factor: how many times longer the context is, at least 1.
        original_positions: positions the checkpoint was trained on.
        beta_fast: turns over the original context above which a pair is kept.
        beta_slow: turns below which it is divided by the whole factor.
        ramp: "pairs" runs evenly over the number of the pair, as every public code does; "turns" evenly over the
            turns a pair makes, as the paper says.
        truncate: whether the ends of a ramp over pairs are widened to whole pairs.
        attention_factor: of cos and sin alike, so q . k gets its square; None for 0.1 ln(factor) + 1, or for what
            mscale and mscale_all_dim say.
        mscale: with mscale_all_dim, cos and sin grow by the ratio of the two (DeepSeek): 1 when they are equal.
        mscale_all_dim: also multiplies the scale of attention, see `softmax_gain`.

    Raises:
        ConfigError: if a number is out of range.

    Example:
        >>> Yarn(factor=4.0, original_positions=2048).frequencies(4, 1e4, torch.float32)
        tensor([1.0000e+00, 1.0000e-01, 6.2500e-03, 2.5000e-04])

    Reference:
        YaRN (arXiv 2309.00071), jquesnelle/yarn, whose issues 60 and 65 ask why its code ramps over pairs;
        transformers modeling_rope_utils "yarn"; deepseek-ai/DeepSeek-V3 for mscale.
    """

    kind: Literal["yarn"] = "yarn"
    factor: float
    original_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    ramp: Literal["pairs", "turns"] = "pairs"
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None

    def __post_init__(self) -> None:
        check_stretch(self, "factor", original=self.original_positions)
        if not 0 < self.beta_slow < self.beta_fast:
            raise ConfigError(
                f"beta_slow is {self.beta_slow} and beta_fast {self.beta_fast}; 0 < slow < fast turns are required. "
                "Read both from the checkpoint's rope parameters."
            )
        check_gain(self.attention_factor)
        if min(self.mscale or 0.0, self.mscale_all_dim or 0.0) < 0:
            raise ConfigError(
                f"mscale is {self.mscale} and mscale_all_dim {self.mscale_all_dim}; at least 0 is required. Read both "
                "from the checkpoint's rope parameters."
            )

    def frequencies(self, pairs: int, theta: float, dtype: torch.dtype) -> Tensor:
        """Return `[pairs]` radians per position; see `Stretch`."""
        slow = slowness(pairs, theta, dtype)
        if theta <= 1:
            raise PositionError(
                f"theta is {theta}; YaRN's ramp needs a ladder that slows down, a base above 1. Read rope_theta from "
                "the checkpoint."
            )
        keep = self._kept(pairs, theta, dtype)
        return 1.0 / (self.factor * slow) * (1 - keep) + 1.0 / slow * keep

    def _kept(self, pairs: int, theta: float, dtype: torch.dtype) -> Tensor:
        """Return `[pairs]` the share of its own speed that each pair keeps, 1 for fast ones and 0 for slow."""
        if self.ramp == "turns":
            turns = (
                self.original_positions * ladder(pairs, theta=theta, dtype=dtype) / (2 * math.pi)
            )
            return ((turns - self.beta_slow) / (self.beta_fast - self.beta_slow)).clamp(0, 1)
        low, high = (self._pair(turns, pairs, theta) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * pairs - 1)
        width = 0.001 if low == high else high - low
        return 1 - ((torch.arange(pairs, dtype=dtype) - low) / width).clamp(0, 1)

    def _pair(self, turns: float, pairs: int, theta: float) -> float:
        """Return the pair, as a fraction, that makes so many turns over the original context."""
        return pairs * math.log(self.original_positions / (turns * 2 * math.pi)) / math.log(theta)

    @property
    def gain(self) -> float:
        """Return what cos and sin are multiplied by."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._scale(self.mscale) / self._scale(self.mscale_all_dim)
        return self._scale(1.0)

    @property
    def softmax_gain(self) -> float:
        """Return what the scale of attention is multiplied by beside: 1 without mscale_all_dim (DeepSeek)."""
        return self._scale(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def _scale(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0
