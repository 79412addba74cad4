"""How the command line shortens a stream: runs of equal tokens, and runs that come again and again, in one row each."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

Run = tuple[str, int]  # a name, and how many tokens in a row have it

LONGEST = 64  # runs that a repeated stretch is looked for in: a row of tiles with its separators


def folded(names: Sequence[str]) -> list[tuple[str, int, int]]:
    """Return (what stands there, first token, number of tokens) of every row of a table.

    Example:
        >>> folded(["<s>", *["cell", "cell", "newline"] * 3, "."])
        [('<s>', 0, 1), ('3 x (2 cell, newline)', 1, 9), ('.', 10, 1)]
    """
    runs = [(name, len(list(equal))) for name, equal in groupby(names)]
    rows, start, at = [], 0, 0
    while at < len(runs):
        length, times = _repeated(runs, at)
        stretch = runs[at : at + length]
        count = times * sum(tokens for _, tokens in stretch)
        rows.append((_in_words(stretch, times), start, count))
        start, at = start + count, at + length * times
    return rows


def _repeated(runs: Sequence[Run], at: int) -> tuple[int, int]:
    """Return how long a stretch comes again and again from here on, and how often; the one that covers most."""
    best = (1, 1)
    for length in range(2, min(LONGEST, (len(runs) - at) // 2) + 1):
        stretch, times = runs[at : at + length], 1
        while runs[at + times * length : at + (times + 1) * length] == stretch:
            times += 1
        if times > 1 and times * length > best[0] * best[1]:
            best = (length, times)
    return best


def _in_words(stretch: Sequence[Run], times: int) -> str:
    """Return a stretch of runs as one cell of a table."""
    if times == 1:
        return _spelled(stretch[0][0])
    parts = (
        f"{count} {_spelled(name)}" if count > 1 else _spelled(name) for name, count in stretch
    )
    return f"{times} x ({', '.join(parts)})"


def _spelled(name: str) -> str:
    """Return a name as it stands, or quoted where blanks and line ends would not be seen."""
    return name if name.isprintable() and name.strip() else repr(name)
