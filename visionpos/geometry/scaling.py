"""Scaling: how a ladder of frequencies is stretched for longer contexts, one small class a rule.

Each is data: it gives `frequencies` for a number of pairs and a ladder base, and the `gain` of cos and sin. A rule that
depends on the length of a document gives another rule `at_length`, and keeps nothing: one call never changes the next.
`scaling_params.py` reads and writes transformers' rope parameters, `scaling_axes.py` serves short grids.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch

from visionpos.errors import ConfigError
from visionpos.geometry.fields import check_fields
from visionpos.geometry.freqs import ladder
from visionpos.geometry.stretch import (
    Stretch,
    check_gain,
    check_stretch,
    checked_length,
    raised,
    slowness,
)
from visionpos.geometry.yarn import Yarn

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear(Stretch):
    """Position interpolation: all pairs turn slower by one factor.

    Args:
        kind: "linear".
        factor: how many times longer the context is, at least 1.

    Reference:
        Position Interpolation (arXiv 2306.15595); transformers modeling_rope_utils "linear".
    """

    kind: Literal["linear"] = "linear"
    factor: float

    def __post_init__(self) -> None:
        check_stretch(self, "factor")

    def frequencies(self, pairs: int, theta: float, dtype: torch.dtype) -> Tensor:
        """Return `[pairs]` radians per position; see `Stretch`."""
        return ladder(pairs, theta=theta, dtype=dtype) / self.factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Ntk(Stretch):
    """NTK-aware: a larger base, with which the slowest pair turns slower by the factor and the fastest as before.

    Args:
        kind: "ntk".
        factor: how many times longer the context is, at least 1.

    Reference:
        bloc97, NTK-aware scaled RoPE (2023): theta * factor^(d / (d - 2)).
    """

    kind: Literal["ntk"] = "ntk"
    factor: float

    def __post_init__(self) -> None:
        check_stretch(self, "factor")

    def frequencies(self, pairs: int, theta: float, dtype: torch.dtype) -> Tensor:
        """Return `[pairs]` radians per position; see `Stretch`."""
        return ladder(pairs, theta=raised(theta, self.factor, pairs), dtype=dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class NtkAlpha(Stretch):
    """NTK-aware with a factor that may be any number above 0 (HunYuan).

    Args:
        kind: "ntk_alpha".
        alpha: above 0.
    """

    kind: Literal["ntk_alpha"] = "ntk_alpha"
    alpha: float

    def __post_init__(self) -> None:
        check_fields(self)
        if self.alpha <= 0:
            raise ConfigError(
                f"alpha is {self.alpha}; a finite number above 0 is required. Leave scaling out for none."
            )

    def frequencies(self, pairs: int, theta: float, dtype: torch.dtype) -> Tensor:
        """Return `[pairs]` radians per position; see `Stretch`."""
        return ladder(pairs, theta=raised(theta, self.alpha, pairs), dtype=dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicNtk(Stretch):
    """NTK-aware by the length at hand: as trained up to the trained length, stretched beyond it.

    Args:
        kind: "dynamic".
        factor: at least 1; the base grows with factor * length / original_positions - (factor - 1).
        original_positions: positions the checkpoint was trained on.

    Reference:
        emozilla, dynamic NTK (2023), in the form of transformers modeling_rope_utils "dynamic". There one long call
        stretches the calls after it; here every call stands alone.
    """

    kind: Literal["dynamic"] = "dynamic"
    factor: float
    original_positions: int

    def __post_init__(self) -> None:
        check_stretch(self, "factor", original=self.original_positions)

    def frequencies(self, pairs: int, theta: float, dtype: torch.dtype) -> Tensor:
        """Return `[pairs]` radians per position; see `Stretch`."""
        return Ntk(factor=1.0).frequencies(pairs, theta, dtype)

    def at_length(self, length: int) -> Ntk:
        """Return the rule for a document of so many tokens; see `Stretch`.

        Example:
            >>> DynamicNtk(factor=4.0, original_positions=2048).at_length(8192).factor
            13.0
        """
        reach = max(checked_length(length), self.original_positions)
        grown = self.factor * reach / self.original_positions - (self.factor - 1)
        return Ntk(factor=max(grown, 1.0))  # rounding may leave a little less at the trained length


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3(Stretch):
    """Waves longer than the trained context are divided by the factor, short ones kept, those between blended.

    Args:
        kind: "llama3".
        factor: at least 1.
        low_freq_factor: waves longer than original_positions / this are divided by the whole factor.
        high_freq_factor: waves shorter than original_positions / this are kept; at low_freq_factor nothing is blended.
        original_positions: positions the checkpoint was trained on.

    Reference:
        Llama 3.1, meta-llama/llama-models apply_scaling; transformers modeling_rope_utils "llama3".
    """

    kind: Literal["llama3"] = "llama3"
    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192

    def __post_init__(self) -> None:
        check_stretch(self, "factor", original=self.original_positions)
        if not 0 < self.low_freq_factor <= self.high_freq_factor:
            raise ConfigError(
                f"low_freq_factor is {self.low_freq_factor} and high_freq_factor {self.high_freq_factor}; 0 < low <= "
                "high is required. Read both from the checkpoint's rope parameters."
            )

    def frequencies(self, pairs: int, theta: float, dtype: torch.dtype) -> Tensor:
        """Return `[pairs]` radians per position; see `Stretch`."""
        kept = ladder(pairs, theta=theta, dtype=dtype)
        waves = self.original_positions / (2 * math.pi / kept)  # turns over the trained context
        low, high = self.low_freq_factor, self.high_freq_factor
        if low == high:
            smooth = (waves > low).to(dtype)
        else:
            smooth = ((waves - low) / (high - low)).clamp(0, 1)
        return (1 - smooth) * kept / self.factor + smooth * kept


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRope(Stretch):
    """A divisor of its own for every pair: one list up to the trained length, another beyond; the gain always applies.

    Args:
        kind: "longrope".
        short_factor: `pairs` divisors up to the trained length, each above 0.
        long_factor: `pairs` divisors beyond it, as a factor search puts them out.
        original_positions: positions the checkpoint was trained on.
        factor: how many times longer the context is, at least 1; gives the gain.
        attention_factor: of cos and sin; None for sqrt(1 + ln factor / ln original_positions).

    Reference:
        LongRoPE (arXiv 2402.13753), microsoft/LongRoPE; transformers modeling_rope_utils "longrope", which picks the
        list by the largest position in the whole batch: pass the length of each document to have it by document.
    """

    kind: Literal["longrope"] = "longrope"
    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_positions: int
    factor: float = 1.0
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        check_stretch(self, "factor", original=self.original_positions)
        for name in ("short_factor", "long_factor"):
            divisors = getattr(self, name)
            if not divisors or min(divisors) <= 0:
                raise ConfigError(
                    f"{name} is {divisors}; one divisor above 0 a channel pair is required. Read it from the "
                    "checkpoint's rope parameters."
                )
        if len(self.short_factor) != len(self.long_factor):
            raise ConfigError(
                f"short_factor holds {len(self.short_factor)} divisors and long_factor {len(self.long_factor)}; one a "
                "channel pair in each is required. Read both from the same checkpoint."
            )
        check_gain(self.attention_factor)

    def frequencies(self, pairs: int, theta: float, dtype: torch.dtype) -> Tensor:
        """Return `[pairs]` radians per position; see `Stretch`."""
        if len(self.short_factor) != pairs:
            raise ConfigError(
                f"short_factor and long_factor hold {len(self.short_factor)} divisors for {pairs} channel pairs; one "
                "each is required. Read them from the same checkpoint as rotary_dim."
            )
        divisors = torch.tensor(self.short_factor, dtype=dtype)
        return 1.0 / (divisors * slowness(pairs, theta, dtype))

    def at_length(self, length: int) -> LongRope:
        """Return the rule for a document of so many tokens; see `Stretch`."""
        is_long = checked_length(length) > self.original_positions
        return replace(self, short_factor=self.long_factor) if is_long else self

    @property
    def gain(self) -> float:
        """Return what cos and sin are multiplied by."""
        if self.attention_factor is not None:
            return self.attention_factor
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_positions))


@dataclass(frozen=True, slots=True, kw_only=True)
class Proportional(Stretch):
    """The slow pairs of the whole ladder stand still; the fast ones keep their speed (p-RoPE).

    Partial rotary makes a shorter ladder of fewer channels instead: the two differ at the same share.

    Args:
        kind: "proportional".
        share: share of pairs that turn, above 0 and at most 1.
        factor: at least 1; those that turn do so slower by it.

    Reference:
        p-RoPE (arXiv 2410.06205), Gemma 4; transformers modeling_rope_utils "proportional".
    """

    kind: Literal["proportional"] = "proportional"
    share: float
    factor: float = 1.0

    def __post_init__(self) -> None:
        check_stretch(self, "factor")
        if not 0 < self.share <= 1:
            raise ConfigError(
                f"share is {self.share}; a share of pairs above 0 and at most 1 is required. Use 1 to turn all."
            )

    def frequencies(self, pairs: int, theta: float, dtype: torch.dtype) -> Tensor:
        """Return `[pairs]` radians per position; see `Stretch`."""
        freqs = ladder(pairs, theta=theta, dtype=dtype) / self.factor
        freqs[int(self.share * 2 * pairs // 2) :] = 0
        return freqs


FixedScaling = Linear | Ntk | NtkAlpha | Yarn | Llama3 | Proportional  # the same at every length
Scaling = FixedScaling | DynamicNtk | LongRope
