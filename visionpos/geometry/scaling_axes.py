"""Scaling axes: ladders of 2-D and 3-D grids stretched for a larger grid, each axis by its own sides and channels.

A rule of a grid gives a rule of `scaling` for one axis; `grid_ladder` puts the axes together. Vision grids are short:
at 14 cells most pairs never complete a turn, so rules made for long contexts leave them out of what training saw. See
`phases` for what each rule does to a grid. Rules that also go by the time of a diffusion are in `scaling_time`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from visionpos.errors import PositionError
from visionpos.geometry.arguments import checked
from visionpos.geometry.fields import check_fields
from visionpos.geometry.freqs import Order, angles, axial_freqs, ladder
from visionpos.geometry.grid import Grid
from visionpos.geometry.ranges import check_counts, check_theta
from visionpos.geometry.rotation import Pairing, Rotation
from visionpos.geometry.scaling import Linear, Ntk
from visionpos.geometry.stretch import Stretch, check_gain
from visionpos.geometry.timed import Rebased
from visionpos.geometry.yarn import Yarn

FULL_TURN = 2 * math.pi


@dataclass(frozen=True, slots=True, kw_only=True)
class GridStretch(ABC):
    """What every rule of a grid gives."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        check_fields(self)

    @abstractmethod
    def along(self, trained: int, target: int, *, area: float) -> Stretch | None:
        """Return the rule of one axis; None where it stays as it was trained.

        Args:
            trained: cells of the axis that the weights were trained on.
            target: cells of the axis at hand.
            area: tokens of the grid at hand over those of the trained one, frames left out.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class GridLinear(GridStretch):
    """Position interpolation: the larger grid keeps the phases of the trained one, neighbours come closer.

    The same as coordinates times trained / target.
    """

    def along(self, trained: int, target: int, *, area: float) -> Stretch | None:  # noqa: ARG002 (the interface's)
        """Return the rule of one axis; see `GridStretch`."""
        return Linear(factor=target / trained) if target > trained else None


@dataclass(frozen=True, slots=True, kw_only=True)
class GridNtk(GridStretch):
    """NTK-aware by the channels of the axis: base * s ** (d / (d - 2)), d those of one axis, not of the head."""

    def along(self, trained: int, target: int, *, area: float) -> Stretch | None:  # noqa: ARG002 (the interface's)
        """Return the rule of one axis; see `GridStretch`."""
        return Ntk(factor=target / trained) if target > trained else None


@dataclass(frozen=True, slots=True, kw_only=True)
class GridTheta(GridStretch):
    """A base that grows with the grid: theta * multiplier * s ** power.

    Args:
        power: of how many times longer the axis is, at least 0; 0 for a fixed multiplier.
        multiplier: of the base at any larger grid, above 0; 20 after tuning in CineScale.

    Raises:
        PositionError: if a number is out of range.

    Reference:
        CineScale (arXiv 2508.15774) for the multiplier.
    """

    power: float = 1.0
    multiplier: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.power < 0 or self.multiplier <= 0:
            raise PositionError(
                f"power is {self.power} and multiplier {self.multiplier}; at least 0 and above 0 are required."
            )

    def along(self, trained: int, target: int, *, area: float) -> Stretch | None:  # noqa: ARG002 (the interface's)
        """Return the rule of one axis; see `GridStretch`."""
        if target <= trained:
            return None
        try:
            return Rebased(multiplier=self.multiplier * (target / trained) ** self.power)
        except OverflowError:
            raise PositionError(
                f"power is {self.power} from {trained} to {target} cells; the base would be too large a number. Use a "
                "smaller power, 1 is usual."
            ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class GridYarn(GridStretch):
    """YaRN over the turns that a pair makes in the trained grid.

    Args:
        beta_fast: turns over the trained axis from which on a pair is kept; None for the turns of a pair of speed 1,
            side / (2 pi), so that the fastest is kept on any grid. 32, made for texts, keeps none on 14 cells.
        beta_slow: turns below which a pair is divided by the whole factor; 1 keeps every pair that never completes a
            turn within the phases it was trained on.
        ramp: "turns" as the paper says, "pairs" as public codes do.
        attention_factor: of cos and sin; None for 0.1 ln(factor) + 1.

    Raises:
        PositionError: if a beta or attention_factor is not above 0, or the betas are out of order.
    """

    beta_fast: float | None = None
    beta_slow: float = 1.0
    ramp: Literal["pairs", "turns"] = "turns"
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_gain(self.attention_factor)
        fast = math.inf if self.beta_fast is None else self.beta_fast
        if not 0 < self.beta_slow < fast:
            raise PositionError(
                f"beta_slow is {self.beta_slow} and beta_fast {self.beta_fast}; 0 < slow < fast is required. Leave "
                "beta_fast out for the grid's own."
            )

    def along(self, trained: int, target: int, *, area: float) -> Stretch | None:  # noqa: ARG002 (the interface's)
        """Return the rule of one axis; see `GridStretch`. Where no pair completes a turn, all are divided."""
        if target <= trained:
            return None
        fast = trained / FULL_TURN if self.beta_fast is None else self.beta_fast
        if fast <= self.beta_slow or trained < 2:
            return Linear(factor=target / trained)
        return Yarn(
            factor=target / trained,
            original_positions=trained,
            beta_fast=fast,
            beta_slow=self.beta_slow,
            ramp=self.ramp,
            attention_factor=self.attention_factor,
        )


@dataclass(frozen=True, slots=True, eq=False)
class GridLadder:
    """The stretched ladders of a grid.

    Args:
        freqs: `[axes, pairs]` radians per cell, zero where an axis does not drive a pair.
        gains: `[pairs]` what cos and sin are multiplied by.
    """

    freqs: Tensor
    gains: Tensor

    def rotation(self, coords: Tensor, pairing: Pairing = "half") -> Rotation:
        """Return the rotation at coordinates `[..., n, axes]`, in cells from 0 on."""
        turns = angles(coords, self.freqs.to(coords.device))
        gains = self.gains.to(turns)
        return Rotation(turns.cos() * gains, turns.sin() * gains, pairing)


@checked
def grid_ladder(
    rule: GridStretch | None,
    head_dim: int,
    *,
    theta: float,
    trained: Grid,
    target: Grid,
    dims: Sequence[int] | None = None,
    order: Order = "contiguous",
) -> GridLadder:
    """Return the ladders of a grid, each axis stretched by a rule.

    Args:
        rule: how; None for not at all.
        head_dim: channels of a head that turn.
        theta: ladder base of every axis.
        trained: the grid the weights were trained on.
        target: the grid at hand. Axes are (t, y, x) where either has frames, else (y, x).
        dims: channels of each axis, even numbers that sum to head_dim (FLUX: 16, 56, 56); equal shares when None.
        order: which axis drives which pair of equal shares, as in `axial_freqs`.

    Returns:
        Float32 ladders.

    Raises:
        PositionError: if channels do not divide, a rule lacks its time, or an axis has too few pairs for its rule.

    Example:
        >>> wide = grid_ladder(GridLinear(), 8, theta=100.0, trained=Grid(2, 2), target=Grid(2, 4))
        >>> wide.freqs
        tensor([[1.0000, 0.1000, 0.0000, 0.0000],
                [0.0000, 0.0000, 0.5000, 0.0500]])
    """
    check_theta(theta)
    if rule is not None and theta <= 1:
        raise PositionError(
            f"theta is {theta}; a ladder base above 1, whose pairs slow down, is required of one to be stretched. Pass "
            "rule=None for one that is not."
        )
    sides = grid_sides(trained, target)
    widths = _widths(head_dim, len(sides), dims, order)
    area = target.height * target.width / (trained.height * trained.width)
    rules = [None if rule is None else rule.along(*pair, area=area) for pair in sides]
    ladders = [
        ladder(width // 2, theta=theta, dtype=torch.float64)
        if one is None
        else one.frequencies(width // 2, theta, torch.float64)
        for one, width in zip(rules, widths, strict=True)
    ]
    gains = torch.tensor([1.0 if one is None else one.gain for one in rules])
    if dims is not None:
        freqs = torch.block_diag(*ladders)
    else:
        # Which axis drives which pair is said once, by axial_freqs: each row takes its ladder, pair after pair.
        # At base 1, where no speed is too small a number to be told from none.
        freqs = axial_freqs(head_dim, theta=1.0, axes=len(sides), order=order).double()
        freqs[freqs > 0] = torch.cat(ladders)
    gained = ((freqs > 0) * gains.unsqueeze(-1)).sum(0)
    return GridLadder(freqs=freqs.float(), gains=gained)


def grid_sides(trained: Grid, target: Grid) -> tuple[tuple[int, int], ...]:
    """Return (trained, target) cells of every axis: (t, y, x) where either grid has frames, else (y, x).

    Example:
        >>> grid_sides(Grid(14, 14), Grid(32, 24))
        ((14, 32), (14, 24))
    """
    pairs = tuple(zip(trained.shape, target.shape, strict=True))
    return pairs if trained.frames > 1 or target.frames > 1 else pairs[1:]


def _widths(head_dim: int, axes: int, dims: Sequence[int] | None, order: Order) -> tuple[int, ...]:
    """Return the channels of every axis."""
    if dims is None:
        share, rest = divmod(head_dim, axes)
        if rest or share % 2 or share < 2:
            raise PositionError(
                f"head_dim is {head_dim} for {axes} axes; a multiple of {2 * axes} is required. Pass dims for unequal "
                "shares."
            )
        return (share,) * axes
    check_counts(**{f"dims[{number}]": width for number, width in enumerate(dims)})
    if len(dims) != axes or sum(dims) != head_dim or any(width % 2 for width in dims):
        raise PositionError(
            f"dims are {tuple(dims)} for {axes} axes and head_dim {head_dim}; one even number an axis, which sum to "
            "head_dim, is required."
        )
    if order != "contiguous":
        raise PositionError(
            f"order is {order!r} with dims; unequal shares are 'contiguous'. Leave order out."
        )
    return tuple(dims)
