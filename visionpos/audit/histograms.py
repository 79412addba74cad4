"""Histograms of positions and offsets: one set of bins for all, exact near zero, so that two logs can be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from visionpos.errors import PositionError

Array = NDArray[Any]
Entry = dict[str, Any]

EXACT = 256  # steps from zero that have a bin each
_PER_OCTAVE = 16
_OCTAVES = 24
# Upper edges of the bins from zero on: every step its own, then sixteen an octave.
_EDGES = np.concatenate(
    [
        np.arange(EXACT) + 0.5,
        np.ceil(EXACT * 2 ** (np.arange(1, _PER_OCTAVE * _OCTAVES + 1) / _PER_OCTAVE)) - 0.5,
    ]
)


class Histogram:
    """Counts of signed numbers in fixed bins.

    Args:
        unit: width of the finest bins; 1 for whole positions, 1/16 for ids that count in sixteenths.

    Example:
        >>> found = Histogram()
        >>> found.add(np.array([0, 3, 3, -1]))
        >>> found.entry("w", signed=True)["hist"]
        [1.0, 1.0, 0.0, 0.0, 2.0]
    """

    def __init__(self, unit: float = 1.0) -> None:
        self.unit = unit
        self.least, self.most = np.inf, -np.inf
        self._counts = np.zeros(2 * len(_EDGES) - 1)

    def add(self, values: Array, weights: Array | None = None) -> None:
        """Count numbers, each once, or by weights of the same size."""
        if values.size == 0:
            return
        self.least = min(self.least, float(values.min()))
        self.most = max(self.most, float(values.max()))
        steps = np.rint(np.asarray(values, dtype=np.float64).ravel() / self.unit)
        low = steps.min()
        told: Array | None = (
            None if weights is None else np.asarray(weights, dtype=np.float64).ravel()
        )
        if (
            steps.max() - low < 1 << 20
        ):  # count first, then look for the bin of each distinct number
            counts = np.bincount((steps - low).astype(np.int64), weights=told)
            (seen,) = np.nonzero(counts)
            steps, told = seen + low, counts[seen]
        self._counts += np.bincount(_bins(steps), weights=told, minlength=len(self._counts))

    def merge(self, other: Histogram) -> None:
        """Add what another histogram of the same unit has counted."""
        self.least, self.most = min(self.least, other.least), max(self.most, other.most)
        self._counts += other._counts

    def fill(self, entry: Mapping[str, Any]) -> None:
        """Add what `entry` of a histogram of the same unit returned.

        Raises:
            PositionError: if its bins are not those of this unit.
        """
        edges, counts = (np.asarray(entry[key], dtype=np.float64) for key in ("bins", "hist"))
        upper = np.concatenate([-_EDGES[::-1], _EDGES]) * self.unit
        at = int(np.searchsorted(upper, edges[0] - self.unit / 4)) if len(edges) else 0
        if len(edges) != len(counts) + 1 or not np.array_equal(upper[at : at + len(edges)], edges):
            raise PositionError(
                f"bins of axis {entry.get('axis')!r} are not those of unit {self.unit:g}; what was logged with one "
                "unit goes on with the same. Pass that unit=, or another path."
            )
        self.least, self.most = min(self.least, entry["min"]), max(self.most, entry["max"])
        self._counts[at : at + len(counts)] += counts

    def __bool__(self) -> bool:
        return self.most >= self.least

    def entry(self, axis: str, *, signed: bool) -> Entry:
        """Return the histogram as the lineage schema has it: edges and counts from the first to the last filled bin."""
        (filled,) = np.nonzero(self._counts)
        first, last = int(filled[0]), int(filled[-1])
        upper = np.concatenate([-_EDGES[::-1], _EDGES]) * self.unit  # edges of all bins
        return {
            "axis": axis,
            "min": self.least,
            "max": self.most,
            "bins": upper[first : last + 2].tolist(),
            "hist": self._counts[first : last + 1].tolist(),
            "signed": signed,
        }


def _bins(steps: Array) -> Array:
    """Return the bin of whole numbers, zero in the middle."""
    size = np.minimum(np.searchsorted(_EDGES, np.abs(steps)), len(_EDGES) - 1)
    return np.asarray(len(_EDGES) - 1 + np.sign(steps) * size, dtype=np.int64)


def outside_share(deployed: Mapping[str, Any], trained: Mapping[str, Any]) -> float:
    """Return which share of one histogram lies where another is empty, from 0 to 1.

    Args:
        deployed: an entry of the schema: axis, min, max, bins (edges, one more than hist), hist. Without bins the range
            counts as evenly filled.
        trained: the same.

    Raises:
        PositionError: if edges and counts do not fit each other.
    """
    edges, mass = _pieces(deployed)
    known, filled = _pieces(trained)
    total = mass.sum()
    if total <= 0:
        return 0.0
    inside = 0.0
    for low, high, share in zip(edges[:-1], edges[1:], mass, strict=True):
        if share > 0:
            overlap = np.minimum(known[1:], high) - np.maximum(known[:-1], low)
            inside += share * float(overlap[(overlap > 0) & (filled > 0)].sum()) / (high - low)
    return float(np.clip(1 - inside / total, 0.0, 1.0))


def _pieces(entry: Mapping[str, Any]) -> tuple[Array, Array]:
    """Return edges and counts of an entry; no bin reaches further than half a step beyond what was seen."""
    edges, mass = (np.asarray(entry.get(key, ()), dtype=np.float64) for key in ("bins", "hist"))
    if not len(edges) and not len(mass):
        edges = np.array([entry["min"] - 0.5, entry["max"] + 0.5])
        mass = np.ones(1)
    if len(mass) < 1 or len(edges) != len(mass) + 1 or (np.diff(edges) <= 0).any():
        raise PositionError(
            f"support of axis {entry.get('axis')!r} has {len(edges)} bins and {len(mass)} counts; rising edges, "
            "one more than counts, are required. Write it with PositionLog."
        )
    half = float(np.diff(edges).min()) / 2
    clipped = np.clip(edges, entry["min"] - half, entry["max"] + half)
    kept = np.diff(clipped) > 0
    return np.concatenate([clipped[:-1][kept], clipped[1:][kept][-1:]]), mass[kept]


def support_outside(
    deployed: Mapping[str, Sequence[Any]],
    trained: Mapping[str, Sequence[Any]],
    quantity: str = "offset",
) -> dict[str, float]:
    """Return the share of what a deployment asks for that training never saw, by axis.

    Args:
        deployed: a `train_support` of the lineage schema, logged or planned at deployment (`PositionLog.support()`).
        trained: the one of the weights.
        quantity: "offset", "position" or "attn_distance".

    Returns:
        axis -> share from 0 to 1. An axis that training lacks is wholly outside.

    Raises:
        PositionError: if the quantity is unknown, or one of the two holds nothing of it.

    Example:
        >>> small, large = (
        ...     {
        ...         "offset": [
        ...             {"axis": "w", "min": -n, "max": n, "bins": [], "hist": [], "signed": True}
        ...         ]
        ...     }
        ...     for n in (2, 4)
        ... )
        >>> support_outside(large, small), support_outside(small, large)
        ({'w': 0.444...}, {'w': 0.0})
    """
    if quantity not in ("offset", "position", "attn_distance"):
        raise PositionError(
            f"quantity is {quantity!r}; 'offset', 'position' or 'attn_distance' is required."
        )
    for name, support in (("deployed", deployed), ("trained", trained)):
        if not support.get(quantity):
            raise PositionError(
                f"{name} holds no {quantity}; a logged one is required to compare. Log it with PositionLog."
            )
    known = {entry["axis"]: entry for entry in trained[quantity]}
    return {
        entry["axis"]: outside_share(entry, known[entry["axis"]]) if entry["axis"] in known else 1.0
        for entry in deployed[quantity]
    }
