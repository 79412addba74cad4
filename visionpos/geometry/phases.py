"""Phases: what stretching a grid's ladders does to the phases its pairs turn through, rule by rule, and which to take.

A pair that completes a turn in training has seen every phase. One that does not has seen those up to its speed times
the last cell; what lies beyond is new to the weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from visionpos.geometry.arguments import checked
from visionpos.geometry.freqs import ladder
from visionpos.geometry.grid import Grid
from visionpos.geometry.scaling_axes import (
    GridLinear,
    GridNtk,
    GridStretch,
    GridTheta,
    GridYarn,
    grid_ladder,
    grid_sides,
)
from visionpos.geometry.scaling_time import Dype, Lumina

FULL_TURN = 2 * math.pi
BEYOND = 1.1  # times the trained phase, from which on a pair counts as outside: a cell of about a dozen is let pass

RULES: dict[str, GridStretch | None] = {
    "none": None,
    "pi": GridLinear(),
    "ntk": GridNtk(),
    "theta": GridTheta(),
    "yarn": GridYarn(beta_fast=32.0, ramp="pairs"),
    "yarn_paper": GridYarn(beta_fast=32.0),
    "yarn_grid": GridYarn(),
}
ABOUT = {
    "none": "indices run on",
    "pi": "position interpolation",
    "ntk": "NTK-aware, by the channels of an axis",
    "theta": "base times the factor",
    "yarn": "YaRN over pairs, bounds 32 and 1 turns",
    "yarn_paper": "YaRN over turns, bounds 32 and 1",
    "yarn_grid": "YaRN over turns, bounds of the grid",
    "lumina": "Lumina-Next at this time",
    "dype": "DyPE at this time",
}


@dataclass(frozen=True, slots=True)
class AxisPhases:
    """What a stretched ladder does on one axis.

    Args:
        outside: pairs that never complete a turn in training and turn more than 1.1 times as far on the new grid, or
            on a short axis more than its last cell's width further, which no interpolation leaves out.
        unturned: pairs that never complete a turn in training.
        excess: the largest ratio of new to trained phase among those; 0 if there is none, infinite if the trained axis
            has one cell.
        adjacent: share of the phase between neighbouring cells that the fastest pair keeps.
        speed: share of its speed that a pair keeps, on average over pairs.
    """

    outside: int
    unturned: int
    excess: float
    adjacent: float
    speed: float


@dataclass(frozen=True, slots=True)
class RuleRow:
    """What one rule does on every axis of a grid.

    Args:
        rule: its name.
        axes: one an axis, ordered as in `grid_sides`.
    """

    rule: str
    axes: tuple[AxisPhases, ...]

    @property
    def outside(self) -> int:
        """Return the pairs outside their trained phases, on all axes."""
        return sum(axis.outside for axis in self.axes)

    @property
    def unturned(self) -> int:
        """Return the pairs that never complete a turn in training, on all axes."""
        return sum(axis.unturned for axis in self.axes)

    @property
    def excess(self) -> float:
        """Return the largest excess of all axes."""
        return max(axis.excess for axis in self.axes)

    @property
    def adjacent(self) -> float:
        """Return the smallest kept share of the phase between neighbours of all axes."""
        return min(axis.adjacent for axis in self.axes)

    @property
    def speed(self) -> float:
        """Return the kept share of speed, on average over axes."""
        return sum(axis.speed for axis in self.axes) / len(self.axes)


@dataclass(frozen=True, slots=True)
class Advice:
    """The rules compared, and one of them.

    Args:
        rows: one a rule.
        rule: the name of the one to take.
        reason: why.
    """

    rows: tuple[RuleRow, ...]
    rule: str
    reason: str


def axis_phases(own: Tensor, stretched: Tensor, trained: int, target: int) -> AxisPhases:
    """Return what a stretched ladder does on one axis.

    Args:
        own: `[pairs]` radians per cell of the training.
        stretched: `[pairs]` radians per cell now.
        trained: cells of the axis in training.
        target: cells of the axis now.

    Example:
        >>> own = ladder(16, theta=100.0)
        >>> seen = axis_phases(own, own, 14, 28)
        >>> seen.outside, seen.unturned, round(seen.excess, 2)
        (13, 13, 2.08)
    """
    own, stretched = own.double(), stretched.double()
    before, after = own * float(trained - 1), stretched * float(target - 1)
    unturned = before < FULL_TURN
    ratio = torch.where(after > 0, after / before, torch.zeros_like(after))[unturned]  # 1 cell: inf
    return AxisPhases(
        outside=int((ratio > max(BEYOND, trained / max(trained - 1, 1))).sum()),
        unturned=int(unturned.sum()),
        excess=float(ratio.max()) if len(ratio) else 0.0,
        adjacent=float(stretched[0] / own[0]),
        speed=float((stretched / own).mean()),
    )


@checked
def compare_stretches(
    theta: float, trained: Grid, target: Grid, *, head_dim: int, time: float | None = None
) -> Advice:
    """Return what the rules do to a grid's phases, and which of them to take.

    The fewest pairs outside the trained phases come first, then the phase kept between neighbours, then the speed kept.

    Args:
        theta: ladder base of every axis.
        trained: the grid the weights were trained on.
        target: the grid at hand.
        head_dim: channels of a head that turn, in equal shares an axis.
        time: where a diffusion is, for Lumina-Next (0 is noise) and DyPE (1 is noise); both left out when None.

    Raises:
        PositionError: if head_dim does not divide, or a number is out of range.

    Example:
        >>> compare_stretches(100.0, Grid(14, 14), Grid(28, 28), head_dim=64).rule
        'yarn'
    """
    rules = dict(RULES)
    if time is not None:
        rules |= {"lumina": Lumina(time=time), "dype": Dype(time=time)}
    sides = grid_sides(trained, target)
    rows = []
    for name, rule in rules.items():
        built = grid_ladder(rule, head_dim, theta=theta, trained=trained, target=target)
        ladders = built.freqs.unflatten(-1, (len(sides), -1)).diagonal().T  # [axes, pairs of one]
        own = ladder(ladders.shape[-1], theta=theta)
        axes = (axis_phases(own, one, *pair) for one, pair in zip(ladders, sides, strict=True))
        rows.append(RuleRow(name, tuple(axes)))
    stock = [row for row in rows if row.rule in RULES]
    best = min(stock, key=lambda row: (row.outside, -round(row.adjacent, 6), -round(row.speed, 6)))
    return Advice(tuple(rows), best.rule, _reason(best, stock))


def _reason(best: RuleRow, rows: list[RuleRow]) -> str:
    """Return why a rule is the one to take."""
    none = rows[0]
    if best is none and not none.outside:
        return (
            f"none: no pair leaves the phases it was trained on (largest excess {none.excess:.2f})."
        )
    if best is none:  # an axis of one trained cell
        return (
            f"none: no rule keeps more than {none.unturned - none.outside} of the {none.unturned} pairs that never "
            "complete a turn in training within their phases. Train on more cells."
        )
    others = [row for row in rows if row.rule in ("pi", "ntk") and row is not best]
    against = ", ".join(
        f"{row.rule} leaves {row.outside} of {row.unturned} outside and keeps {row.adjacent:.2f}"
        for row in others
    )
    return (
        f"{best.rule}: {best.outside} of the {best.unturned} pairs that never complete a turn in training leave their "
        f"phases (largest excess {best.excess:.2f}), and {best.adjacent:.2f} of the phase between neighbours is kept; "
        f"{against}."
    )
