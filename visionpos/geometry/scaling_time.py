"""Scaling time: rules of grids that also go by the time of a diffusion: Lumina-Next and DyPE."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, Self

from visionpos.errors import PositionError
from visionpos.geometry.fields import check_fields
from visionpos.geometry.scaling import Ntk
from visionpos.geometry.scaling_axes import GridStretch
from visionpos.geometry.stretch import Stretch
from visionpos.geometry.timed import Rebased, ThreeWay


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStretch(GridStretch):
    """A rule that also goes by the time of a diffusion.

    Args:
        time: where the diffusion is; None until `at_time` says.
    """

    time: float | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.time is not None and not 0 <= self.time <= 1:
            raise PositionError(f"time is {self.time}; a number in [0, 1] is required.")

    def at_time(self, time: float) -> Self:
        """Return the rule at a time of the diffusion, in [0, 1]; which end is noise is the rule's."""
        return replace(self, time=time)

    def told_time(self) -> float:
        """Return the time.

        Raises:
            PositionError: if it was not told.
        """
        if self.time is None:
            raise PositionError(
                f"{type(self).__name__} has no time; a number in [0, 1] is required. Use rule.at_time(time)."
            )
        return self.time


@dataclass(frozen=True, slots=True, kw_only=True)
class Lumina(TimedStretch):
    """Lumina-Next: position interpolation early, a larger base from the watershed on; one factor for both axes.

    The factor is the root of the ratio of areas, and the base grows by it without an exponent, so the slowest pair is
    divided by a little less. Time 0 is noise and 1 the picture: with the watershed of 1 it is interpolation but for
    time 1.

    Args:
        watershed: time from which on the base is raised, at least 0.

    Raises:
        PositionError: if it is below 0, or time not in [0, 1].

    Reference:
        Lumina-Next (arXiv 2406.18583) 2.3; diffusers pipelines/lumina/pipeline_lumina.py, get_1d_rotary_pos_embed.
    """

    watershed: float = 1.0

    def __post_init__(self) -> None:
        TimedStretch.__post_init__(self)
        if self.watershed < 0:
            raise PositionError(
                f"watershed is {self.watershed}; a time of at least 0 is required. 1 is usual."
            )

    def along(self, trained: int, target: int, *, area: float) -> Stretch | None:  # noqa: ARG002 (goes by area)
        """Return the rule of one axis; see `GridStretch`. A smaller area makes it faster, as there."""
        factor = math.sqrt(area)
        if self.told_time() < self.watershed:
            return Rebased(divisor=factor)
        return Rebased(multiplier=factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dype(TimedStretch):
    """DyPE: a stretch that fades with the noise, since the picture's coarse waves are settled first.

    Time 1 is noise and 0 the picture.

    Args:
        method: "yarn" blends interpolation, NTK-aware and trained speeds over pairs, by bounds that fall with time
            squared; "ntk" raises the base by s ** (d / (d - 2)) to the power of 2 time squared.

    Reference:
        DyPE (arXiv 2510.20766), guyyariv/DyPE flux/transformer_flux.py. Deliberate difference: there lower bounds may
        exceed the number of pairs, so late in a diffusion (below time 0.025 for FLUX) pairs jump to interpolation, and
        time 0 fails; here the ladder goes on to the trained one, as the paper means.
    """

    method: Literal["yarn", "ntk"] = "yarn"

    def along(self, trained: int, target: int, *, area: float) -> Stretch | None:  # noqa: ARG002 (the interface's)
        """Return the rule of one axis; see `GridStretch`."""
        kappa = self.told_time() ** 2
        if target <= trained:
            return None
        if self.method == "yarn":
            return ThreeWay(factor=target / trained, original_positions=trained, kappa=kappa)
        return Ntk(factor=(target / trained) ** (2 * kappa))
