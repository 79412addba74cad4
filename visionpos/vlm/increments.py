"""Increments: how far one visual token moves a position that counts tokens (V2PE)."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import torch

from visionpos.errors import PositionError
from visionpos.geometry.arguments import checked
from visionpos.vlm.clocks import Array
from visionpos.vlm.rules import Rule
from visionpos.vlm.units import Units

V2PE_STEPS = tuple(Fraction(1, 2**power) for power in range(9))  # 1, 1/2, ... 1/256


def index_steps(units: Units, rule: Rule) -> tuple[Array, Array]:
    """Return what one cell of each unit adds to `index`: numerators and denominators, `[units]` int64 each.

    Args:
        units: grids and rows.
        rule: gives one step for all, one an image or clip, or one span a unit.

    Raises:
        PositionError: if the rule has one step an image, and not as many as there are images and clips.
    """
    count = len(units.row)
    if isinstance(rule.cell_step, tuple):
        medium = units.medium
        media = int(medium[-1]) + 1 if count else 0
        if len(rule.cell_step) != media:
            raise PositionError(
                f"cell_step holds {len(rule.cell_step)} steps for {media} images and clips; one each is required. "
                "Draw them with drawn_steps."
            )
        steps = [rule.cell_step[one] for one in medium]
    elif rule.cell_span is not None:
        steps = [rule.cell_span / int(cells) for cells in units.sizes]
    else:
        numerator, denominator = rule.cell_step.as_integer_ratio()
        return np.full(count, numerator), np.full(count, denominator)
    above = np.array([step.numerator for step in steps], dtype=np.int64)
    return above, np.array([step.denominator for step in steps], dtype=np.int64)


@checked
def drawn_steps(
    count: int, generator: torch.Generator, choices: Sequence[Fraction] = V2PE_STEPS
) -> tuple[Fraction, ...]:
    """Return one increment an image, drawn evenly from the choices, as V2PE training does.

    Args:
        count: number of images.
        generator: source of the draws.
        choices: increments to draw from.

    Example:
        >>> [str(step) for step in drawn_steps(3, torch.Generator().manual_seed(0))]
        ['1/256', '1', '1/4']

    Reference:
        V2PE (arXiv 2412.09616): 1, 1/2, ... 1/256, one an image (v2pe_rnd).
    """
    if count < 0 or not choices:
        raise PositionError(
            f"count is {count} and choices hold {len(choices)} increments; at least 0 and 1 are required. Correct them."
        )
    at = torch.randint(len(choices), (count,), generator=generator)
    return tuple(choices[one] for one in at.tolist())
