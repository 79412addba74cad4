"""Ranges: the bounds that the numbers of a spec and the arguments of a filling share, each with one message."""

from __future__ import annotations

import math
import numbers

import torch

from visionpos.errors import PositionError

_LEAST = torch.finfo(torch.float32).tiny  # below, an inverse is infinite


def is_integer(value: object) -> bool:
    """Return whether a value counts something: an int, numpy's too, or a size that exporting leaves open; no bool."""
    return isinstance(value, (numbers.Integral, torch.SymInt)) and not isinstance(value, bool)


def check_exempt(prefix: int, suffix: int = 0) -> None:
    """Refuse counts of leading and trailing tokens that are no whole numbers of at least 0."""
    if not (is_integer(prefix) and is_integer(suffix)) or prefix < 0 or suffix < 0:
        raise PositionError(
            f"prefix is {prefix!r} and suffix {suffix!r}; token counts of at least 0 are required."
        )


def check_counts(**counts: int) -> None:
    """Refuse counts, by their names, that are no whole numbers of at least 1."""
    for name, count in counts.items():
        if not is_integer(count) or count < 1:
            raise PositionError(f"{name} is {count!r}; a whole number of at least 1 is required.")


def check_layer(layer: int, depth: int) -> None:
    """Refuse what numbers no layer of a model; negative numbers count from the end."""
    if not is_integer(layer) or not -depth <= layer < depth:
        raise PositionError(
            f"layer is {layer!r}; the encoding has {depth} layers, counted from 0. Give a whole number below that."
        )


def check_theta(theta: float) -> None:
    """Refuse a ladder base that is not a finite number above 0."""
    if not _LEAST <= theta < math.inf:
        raise PositionError(
            f"theta is {theta}; a finite ladder base above 0 is required (100 or 10000 are usual)."
        )


def check_periods(shortest: float, longest: float) -> None:
    """Refuse periods that are out of order, or not finite and above 0."""
    if not _LEAST <= shortest <= longest < math.inf:
        raise PositionError(
            f"periods are {shortest} and {longest}; 0 < shortest <= longest is required. Swap or correct them."
        )


def check_sigma(sigma: float) -> None:
    """Refuse a spread of random frequencies that is not a finite number above 0."""
    if not 0 < sigma < math.inf:
        raise PositionError(f"sigma is {sigma}; a finite number above 0 is required (1 is usual).")


def check_max_freq(max_freq: float) -> None:
    """Refuse pixel bands that would end before they begin."""
    if not 2 <= max_freq < math.inf:
        raise PositionError(
            f"max_freq is {max_freq}; a finite number of at least 2 is required (the grid's side is usual)."
        )


def check_speeds(slowest: float, fastest: float, still: float) -> None:
    """Refuse speeds that are out of order, or a share of resting pairs that leaves none."""
    if not (_LEAST <= slowest <= fastest < math.inf and 0 <= still < 1):
        raise PositionError(
            f"slowest is {slowest}, fastest {fastest} and still {still}; 0 < slowest <= fastest and a share in [0, 1) "
            "are required."
        )


def check_least(least: float) -> None:
    """Refuse a bound of slow bands below the turns that rounding can keep."""
    if not 0.5 <= least < math.inf:
        raise PositionError(
            f"least is {least}; a finite number of at least 0.5 turns is required (1 is usual)."
        )
