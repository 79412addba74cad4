"""Bins: which row of a token budget every document goes to, and where it starts there.

Lengths enter; row numbers and first places leave. Plain whole numbers, no tensors: n documents cost n log n steps.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from typing import Literal

from visionpos.errors import PositionError
from visionpos.geometry.arguments import checked
from visionpos.geometry.fields import check_choice
from visionpos.geometry.grid import is_whole

Method = Literal["first_fit", "best_fit"]
Choose = Callable[[Sequence[int], int, int], list[int]]


@checked
def bin_lengths(
    lengths: Sequence[int],
    budget: int,
    *,
    method: Method = "best_fit",
    largest_first: bool = True,
    most: int | None = None,
) -> list[list[int]]:
    """Return which documents go into each row of `budget` tokens, in the order they lie there.

    Args:
        lengths: tokens of every document; those of `stream.length`, rounded up where each is padded.
        budget: tokens of a row, at least the longest document.
        method: "best_fit", the fullest row with room, or "first_fit", the first row with room.
        largest_first: place long documents first (best-fit decreasing), which wastes least.
        most: documents a row may hold; any number when None.

    Raises:
        PositionError: if a number is no whole number of at least 1, or a document is longer than the budget.

    Example:
        >>> bin_lengths([3, 7, 6, 4], 10)
        [[1, 0], [2, 3]]

    Reference:
        Best-fit packing of training documents (arXiv 2404.10830).
    """
    for name, value in (("budget", budget), ("most", most)):
        if not is_whole(value) and (value is not None or name == "budget"):
            raise PositionError(f"{name} is {value!r}; a whole number of at least 1 is required.")
    for number, length in enumerate(lengths):
        if not is_whole(length) or length > budget:
            raise PositionError(
                f"lengths[{number}] is {length!r} and budget {budget}; 1 to the budget is required. Shorten the "
                "document with truncate_stream, or raise budget."
            )
    rows, starts, count = placed(
        lengths, budget, method=method, largest_first=largest_first, most=most
    )
    held: list[list[int]] = [[] for _ in range(count)]
    for one in sorted(range(len(lengths)), key=starts.__getitem__):
        held[rows[one]].append(one)
    return held


def placed(
    lengths: Sequence[int],
    budget: int,
    *,
    method: Method = "first_fit",
    largest_first: bool = False,
    most: int | None = None,
) -> tuple[list[int], list[int], int]:
    """Return the row of every document, its first place in the row, and the number of rows.

    Args:
        lengths: tokens of every document, each from 1 to `budget`, in arrival order.
        budget: tokens of a row.
        method: "first_fit", the first row with room (greedy, NaViT), or "best_fit", the fullest row with room.
        largest_first: place long documents first, whatever their arrival; documents of one length keep their order.
        most: documents a row may hold; any number when None.

    Example:
        >>> placed([6, 5, 4, 3], 10)
        ([0, 1, 0, 1], [0, 0, 6, 5], 2)
        >>> placed([6, 7, 3], 10)[0], placed([6, 7, 3], 10, method="best_fit")[0]
        ([0, 1, 0], [0, 1, 1])
    """
    choices: dict[str, Choose] = {"first_fit": _first_fit, "best_fit": _best_fit}
    check_choice("method", method, tuple(choices))
    order = range(len(lengths))
    arrivals = sorted(order, key=lambda one: -lengths[one]) if largest_first else order
    chosen = choices[method]([lengths[one] for one in arrivals], budget, most or len(lengths))
    used = [0] * (max(chosen, default=-1) + 1)
    rows, starts = [0] * len(lengths), [0] * len(lengths)
    for one, row in zip(arrivals, chosen, strict=True):
        rows[one], starts[one] = row, used[row]
        used[row] += lengths[one]
    return rows, starts, len(used)


def _first_fit(lengths: Sequence[int], budget: int, most: int) -> list[int]:
    """Return the first row with room for each; a tree holds the largest room under every node."""
    leaves = 1 << max(len(lengths) - 1, 0).bit_length()
    room, held, chosen = [budget] * (2 * leaves), [0] * leaves, []
    for length in lengths:
        node = 1
        while node < leaves:
            node = 2 * node + (room[2 * node] < length)
        row = node - leaves
        chosen.append(row)
        held[row] += 1
        room[node] = room[node] - length if held[row] < most else 0
        while node > 1:
            node //= 2
            left = max(room[2 * node], room[2 * node + 1])
            if room[node] == left:
                break
            room[node] = left
    return chosen


def _best_fit(lengths: Sequence[int], budget: int, most: int) -> list[int]:
    """Return the open row with the least room for each, the first of equals, or a new one."""
    rooms: list[int] = []  # distinct rooms of open rows, rising
    waiting: dict[int, list[int]] = {}  # the rows that have each of them, as heaps
    held: list[int] = []
    chosen = []
    for length in lengths:
        at = bisect_left(rooms, length)
        if at == len(rooms):
            row, room = len(held), budget
            held.append(0)
        else:
            room = rooms[at]
            row = heapq.heappop(waiting[room])
            if not waiting[room]:
                del waiting[room], rooms[at]
        chosen.append(row)
        held[row] += 1
        if room > length and held[row] < most:
            if room - length not in waiting:
                insort(rooms, room - length)
                waiting[room - length] = []
            heapq.heappush(waiting[room - length], row)
    return chosen
