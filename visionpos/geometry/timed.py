"""Timed: rules of one axis for grids of diffusion models: a changed base, and DyPE's blend of three ladders."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from visionpos.errors import ConfigError
from visionpos.geometry.freqs import ladder
from visionpos.geometry.ranges import check_counts
from visionpos.geometry.scaling import Linear, Ntk
from visionpos.geometry.stretch import Stretch, check_stretch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebased(Stretch):
    """A ladder of another base, or slower by one factor; either way may go, since grids shrink too.

    Args:
        kind: "rebased".
        multiplier: of the base, above 0.
        divisor: of all speeds, above 0.

    Raises:
        ConfigError: if a number is not above 0.
    """

    kind: Literal["rebased"] = "rebased"
    multiplier: float = 1.0
    divisor: float = 1.0

    def __post_init__(self) -> None:
        check_stretch(self)
        if self.multiplier <= 0 or self.divisor <= 0:
            raise ConfigError(
                f"multiplier is {self.multiplier} and divisor {self.divisor}; numbers above 0 are required."
            )

    def frequencies(self, pairs: int, theta: float, dtype: torch.dtype) -> Tensor:
        """Return `[pairs]` radians per position; see `Stretch`."""
        return ladder(pairs, theta=theta * self.multiplier, dtype=dtype) / self.divisor


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreeWay(Stretch):
    """Slow pairs interpolated, faster ones NTK-aware, the fastest kept, with two ramps over pairs between (DyPE).

    Args:
        kind: "three_way".
        factor: how many times longer the axis is, at least 1.
        original_positions: cells of the trained axis.
        kappa: multiplies all four bounds, in [0, 1]; 0 keeps every pair.
        interpolated: turns over the trained axis from which a pair is fully NTK-aware, and below which interpolated.
        kept: turns from which a pair is kept, and below which it is not.

    Raises:
        ConfigError: if a number is out of range.

    Reference:
        DyPE (arXiv 2510.20766), guyyariv/DyPE flux/transformer_flux.py; see `scaling_time.Dype`.
    """

    kind: Literal["three_way"] = "three_way"
    factor: float
    original_positions: int
    kappa: float = 1.0
    interpolated: tuple[float, float] = (1.25, 0.75)
    kept: tuple[float, float] = (16.0, 2.0)

    def __post_init__(self) -> None:
        check_stretch(self, "factor")
        check_counts(original_positions=self.original_positions)
        ordered = all(0 < slow < fast for fast, slow in (self.interpolated, self.kept))
        if not ordered or not 0 <= self.kappa <= 1:
            raise ConfigError(
                f"interpolated is {self.interpolated}, kept {self.kept} and kappa {self.kappa}; two falling numbers "
                "above 0 each and a kappa in [0, 1] are required."
            )

    def frequencies(self, pairs: int, theta: float, dtype: torch.dtype) -> Tensor:
        """Return `[pairs]` radians per position; see `Stretch`."""
        own = ladder(pairs, theta=theta, dtype=dtype)
        if self.kappa == 0:
            return own
        slow, raised = (
            rule.frequencies(pairs, theta, dtype)
            for rule in (Linear(factor=self.factor), Ntk(factor=self.factor))
        )
        share = self._fast(self.interpolated, pairs, theta, dtype)
        blended = slow * (1 - share) + raised * share
        share = self._fast(self.kept, pairs, theta, dtype)
        return blended * (1 - share) + own * share

    def _fast(
        self, turns: tuple[float, float], pairs: int, theta: float, dtype: torch.dtype
    ) -> Tensor:
        """Return `[pairs]` how far each pair is on the fast side of a ramp, 1 for fast ones and 0 for slow."""
        first, last = (
            pairs
            * math.log(self.original_positions / (bound * self.kappa * 2 * math.pi))
            / math.log(theta)
            for bound in turns
        )
        low = math.floor(min(max(first, 0), pairs))
        high = math.ceil(min(max(last, 0), pairs))
        width = high - low if high != low else 0.001
        return 1 - ((torch.arange(pairs, dtype=dtype) - low) / width).clamp(0, 1)

    @property
    def gain(self) -> float:
        """Return what cos and sin are multiplied by, at any time."""
        return 0.1 * math.log(self.factor) + 1.0
