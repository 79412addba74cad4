"""Paired timing: two functions alternated in one process, compared by thread CPU time.

Wall clocks lie on shared cores.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def ratio(
    candidate: Callable[[], object], base: Callable[[], object], *, rounds: int = 15
) -> float:
    """Return the median of candidate time / base time, each measured over at least 4 ms a round."""
    return ratios(candidate, base, rounds=rounds)[0]


def ratios(
    candidate: Callable[[], object], base: Callable[[], object], *, rounds: int = 9
) -> tuple[float, float]:
    """Return the median and the lower quartile of candidate time / base time."""
    for function in (candidate, base):
        function()
    repeats = [_repeats(function) for function in (candidate, base)]
    pairs = []
    for _ in range(rounds):
        spent = [
            _spent(function, count)
            for function, count in zip((candidate, base), repeats, strict=True)
        ]
        pairs.append(spent[0] / spent[1])
    return statistics.median(pairs), statistics.quantiles(pairs, n=4)[0]


def seconds(function: Callable[[], object], *, rounds: int = 9) -> float:
    """Return the median thread CPU time of a call, each round over at least 4 ms."""
    function()
    count = _repeats(function)
    return statistics.median(_spent(function, count) for _ in range(rounds))


def _spent(function: Callable[[], object], count: int) -> float:
    start = time.thread_time()
    for _ in range(count):
        function()
    return (time.thread_time() - start) / count


def _repeats(function: Callable[[], object]) -> int:
    return max(1, int(0.004 / max(_spent(function, 3), 1e-7)))


def copy_of(*tensors: torch.Tensor) -> Callable[[], object]:
    """Return a function that copies the same bytes into memory that is already there: the physical limit."""
    targets = [torch.empty_like(tensor) for tensor in tensors]

    def copy() -> None:
        for target, tensor in zip(targets, tensors, strict=True):
            target.copy_(tensor)

    return copy
