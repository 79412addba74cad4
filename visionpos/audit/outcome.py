"""Outcomes: what an intervention may do to a model, and from which size on a number proves it.

A number between the bands proves nothing, and in half precision a small effect drowns in rounding: both have a name
of their own, so that nobody reads them as a pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from visionpos.errors import PositionError

Outcome = Literal["zero", "bounded", "nonzero", "undefined"]
Verdict = Literal["zero", "weak", "nonzero", "unseen", "undefined", "failed"]
Symmetry = Literal["permutation", "shift"]

OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)


@dataclass(frozen=True, slots=True)
class Band:
    """From which size on a number proves something.

    Args:
        zero: at most this is rounding.
        nonzero: at least this is an effect.
        blind: whether the dtype may hide effects below `nonzero`.
    """

    zero: float
    nonzero: float
    blind: bool = False


def band(
    dtype: torch.dtype, symmetry: Symmetry = "permutation", *, largest_angle: float = 0.0
) -> Band:
    """Return the band of a dtype, as measured over attention layers of 64 to 1024 tokens.

    Args:
        dtype: of the forward pass: float64, float32, bfloat16 or float16.
        symmetry: "shift" where the intervention moves coordinates; bfloat16 rounds rotated channels, so more is noise.
        largest_angle: largest angle in radians that the intervention adds to a channel pair (shift x largest
            frequency); float32 angles lose digits with their size.

    Raises:
        PositionError: if the dtype is no float of 16, 32 or 64 bits, or the angle is negative or not finite.

    Example:
        >>> band(torch.float32, "shift", largest_angle=1000.0).zero
        0.000105
    """
    if not (math.isfinite(largest_angle) and largest_angle >= 0):
        raise PositionError(
            f"largest_angle is {largest_angle}; a finite angle of at least 0 radians is required."
        )
    if dtype == torch.float64:
        return Band(1e-11 + 2e-16 * largest_angle, 1e-3)
    if dtype == torch.float32:
        return Band(5e-6 + 1e-7 * largest_angle, 1e-3)
    if dtype in (torch.bfloat16, torch.float16):
        # Half precision rounds alike at any shift, yet the angles behind it are float32's.
        zero = (5e-2 if symmetry == "shift" else 2e-2) + 1e-7 * largest_angle
        return Band(zero, max(zero, 5e-2), blind=True)
    raise PositionError(
        f"dtype is {dtype}; float64, float32, bfloat16 or float16 is required. Audit a model in float32."
    )


def verdict_of(value: float | None, band: Band) -> Verdict:
    """Return what a number proves.

    Args:
        value: the metric; None where the intervention has no meaning for the scheme.
        band: from `band`.

    Returns:
        "zero", "weak" between the bands, "nonzero"; "unseen" for a small number in a dtype that may hide an effect;
        "undefined" for None; "failed" for NaN and infinity.

    Example:
        >>> verdict_of(3e-2, band(torch.bfloat16)), verdict_of(3e-2, band(torch.float32))
        ('unseen', 'nonzero')
    """
    if value is None:
        return "undefined"
    if not math.isfinite(value):
        return "failed"
    if value >= band.nonzero and value > band.zero:
        return "nonzero"
    if band.blind:
        return "unseen"
    # Where angles are so large that rounding reaches past the least effect, a number in both bands proves nothing.
    return "zero" if value <= band.zero and value < band.nonzero else "weak"


def agrees(verdict: Verdict, expected: Outcome) -> bool | None:
    """Return whether a verdict is what was expected; None where it cannot tell.

    "bounded" is a change that saturates; a single number shows the change, and the one who measures it shows the bound.
    """
    if verdict == "failed":
        return False
    if verdict in ("unseen", "weak"):
        return None
    if expected == "bounded":
        return verdict == "nonzero"
    return verdict == expected
