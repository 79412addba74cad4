"""Bounds: how large a ladder base a context asks for, by the rules of Liu et al. and of Men et al.; a calculator.

Both say that a ladder too fast for its context cannot tell far from near. The second is a scan: the bases that satisfy
it are no interval.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from visionpos.errors import PositionError
from visionpos.geometry.arguments import checked
from visionpos.geometry.points import check_finite
from visionpos.geometry.ranges import check_counts, check_theta

FULL_TURN = 2 * math.pi
SCANNED = 2**22  # cosines that are held at once


@checked
def critical_dim(trained: int, theta: float, head_dim: int) -> int:
    """Return the channels whose pairs turn at least once over the trained context: those that extrapolate.

    Args:
        trained: positions of the training context, more than a turn of the fastest pair (7 at least).
        theta: ladder base, above 1.
        head_dim: channels that turn, an even number.

    Raises:
        PositionError: if a number is out of range.

    Example:
        >>> critical_dim(4096, 1e4, 128)
        92

    Reference:
        Liu et al., Scaling Laws of RoPE-based Extrapolation (arXiv 2310.05209).
    """
    check_counts(trained=trained, head_dim=head_dim)
    turns = _log_turns(trained, "trained")
    check_theta(theta)
    if theta <= 1 or head_dim % 2:
        raise PositionError(
            f"theta is {theta} and head_dim {head_dim}; a base above 1 and an even number of channels are required."
        )
    return min(2 * math.ceil(head_dim / 2 * turns / math.log(theta)), head_dim)


@checked
def critical_base(context: int, trained: int, theta: float = 1e4) -> float:
    """Return the base with which a context turns as many pairs as the trained context does with theta.

    Args:
        context: positions to be served.
        trained: positions of the training context, 7 at least.
        theta: base of the training, above 0.

    Raises:
        PositionError: if a number is out of range.

    Example:
        >>> round(critical_base(16384, 4096))
        71738

    Reference:
        Liu et al. (arXiv 2310.05209).
    """
    check_counts(context=context, trained=trained)
    check_theta(theta)
    power = _log_turns(context, "context") / _log_turns(trained, "trained")
    if power * math.log(theta) > math.log(sys.float_info.max):
        raise PositionError(
            f"context is {context} for {trained} trained positions and theta {theta}; the base would be too large a "
            "number. Use a smaller context."
        )
    return float(theta**power)


@checked
def fitted_base(context: int) -> float:
    """Return the lower bound that Men et al. fitted to their scan, 0.0424 * context ** 1.628.

    Example:
        >>> round(fitted_base(4096))
        32232

    Reference:
        Men et al., Base of RoPE Bounds Context Length (arXiv 2405.14591).
    """
    check_counts(context=context)
    return float(0.0424 * context**1.628)


@checked
def cosine_sum(distances: Tensor, theta: float, pairs: int) -> Tensor:
    """Return by how much keys like the query outdo others on average, up to a factor: the sum of the pairs' cosines.

    Args:
        distances: `[...]` numbers of positions.
        theta: ladder base.
        pairs: channel pairs that turn.

    Returns:
        Shape of distances, float64; pairs at distance 0.

    Raises:
        PositionError: if pairs or theta is out of range, or distances hold no numbers.

    Example:
        >>> cosine_sum(torch.tensor([0, 29]), 100.0, 16).round(decimals=2)
        tensor([16.0000, -0.1400], dtype=torch.float64)

    Reference:
        Men et al. (arXiv 2405.14591): it must not fall below 0 within the context.
    """
    check_counts(pairs=pairs)
    check_theta(theta)
    check_finite(distances, "distances")
    steps = torch.arange(pairs, dtype=torch.float64, device=distances.device) / pairs
    return torch.cos(distances.double().unsqueeze(-1) * theta**-steps).sum(-1)


@checked
def first_failure(context: int, theta: float, pairs: int) -> int | None:
    """Return the least distance within a context at which `cosine_sum` is below 0; None if there is none.

    Args:
        context: the largest distance.
        theta: ladder base.
        pairs: channel pairs that turn.

    Example:
        >>> first_failure(14, 100.0, 16), first_failure(32, 100.0, 16)
        (None, 28)
    """
    check_counts(context=context, pairs=pairs)
    step = max(SCANNED // pairs, 1)
    for at in range(0, context + 1, step):
        fails = cosine_sum(torch.arange(at, min(at + step, context + 1)), theta, pairs) < 0
        if bool(fails.any()):
            return at + int(fails.to(torch.uint8).argmax())
    return None


@dataclass(frozen=True, slots=True)
class BaseScan:
    """Which bases of a scan keep `cosine_sum` at 0 or above over a context.

    Args:
        first: the least that does; None if none does.
        last_failing: the largest that does not; None if all do. Between the two both occur.
    """

    first: float | None
    last_failing: float | None


@checked
def scan_bases(
    context: int, pairs: int, *, low: float, high: float, step: float = 1.01
) -> BaseScan:
    """Return the least base that satisfies the bound of Men et al., and the largest that does not.

    Args:
        context: the largest distance.
        pairs: channel pairs that turn.
        low: first base, above 0.
        high: last base, above low.
        step: factor from one base to the next, above 1. Islands of good bases narrower than it are missed.

    Raises:
        PositionError: if the range is none.

    Example:
        >>> scan = scan_bases(100, 16, low=100.0, high=1000.0)
        >>> scan.first < scan.last_failing
        True
    """
    check_theta(low)
    if not low < high < math.inf or not 1 < step < math.inf:
        raise PositionError(
            f"low is {low}, high {high} and step {step}; low < high and a step above 1 are required."
        )
    first = last = None
    for number in range(int((math.log(high) - math.log(low)) / math.log(step)) + 1):
        base = low * step**number
        if first_failure(context, base, pairs) is not None:
            last = base
        elif first is None:
            first = base
    return BaseScan(first, last)


def _log_turns(positions: int, name: str) -> float:
    """Return the logarithm of how often a pair of speed 1 turns over a context."""
    if positions <= FULL_TURN:
        raise PositionError(
            f"{name} is {positions}; more positions than a turn of the fastest pair, at least 7, are required."
        )
    return math.log(positions / FULL_TURN)
