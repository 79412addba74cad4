"""The essay's lab: one query, four keys, four schemes; recorded numbers beside computed ones, and a working gap test.

The essay moves the query alone to make a gap. That adds one constant to all of ALiBi's logits, which the softmax
cancels: its gap test cannot see distance. Here the gap opens between two groups of keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from visionpos.attention import turn
from visionpos.audit.outcome import Outcome, agrees, band, verdict_of
from visionpos.config import read_yaml, shipped
from visionpos.errors import PositionError, one_of
from visionpos.geometry import Rotation, angles, ladder

LabScheme = Literal["none", "sin", "rope", "alibi"]
LAB_SCHEMES: tuple[LabScheme, ...] = get_args(LabScheme)


@dataclass(frozen=True, slots=True, kw_only=True)
class LabRow:
    """One number of the lab.

    Args:
        test: "shift" all positions move; "weight" of one key; "twins" ratio of the weights of two equal keys;
            "query_gap" the query moves away, as in the essay; "key_gap" neutral places open between the keys.
        scheme: "none", "sin", "rope" or "alibi".
        by: places of a shift or gap, or the number of the key; None for "twins".
        computed: the summed change of the weights, the weight, or the ratio.
        recorded: what the essay's own functions gave; None for the gap between keys, which they lack.
        digits: digits behind the point that were recorded.
        expected: what the change must be, where nothing is recorded.
    """

    test: str
    scheme: LabScheme
    by: int | None
    computed: float
    recorded: float | None = None
    digits: int = 0
    expected: Outcome | None = None

    @property
    def agrees(self) -> bool:
        """Return whether the number is the recorded one to its digits, or proves what is expected."""
        if self.recorded is not None:
            return abs(self.computed - self.recorded) <= 0.5000001 * 10.0**-self.digits
        verdict = verdict_of(self.computed, band(torch.float64))
        return self.expected is not None and agrees(verdict, self.expected) is True


def lab_weights(
    scheme: LabScheme, *, shift: float = 0.0, query_gap: float = 0.0, key_gap: float = 0.0
) -> Tensor:
    """Return the attention weights of the lab's query, `[keys]` float64.

    Args:
        scheme: "none", "sin" adds sines and cosines to the tokens, "rope" turns q and k, "alibi" subtracts distance.
        shift: places by which everything moves.
        query_gap: places by which the query moves away from all keys.
        key_gap: places that open between the first keys and the last; the query keeps its distance to the last.

    Raises:
        PositionError: if the scheme is unknown.

    Example:
        >>> lab_weights("none")
        tensor([0.2559, 0.2392, 0.2658, 0.2392], dtype=torch.float64)
    """
    if scheme not in LAB_SCHEMES:
        raise PositionError(f"scheme is {scheme!r}. {one_of(scheme, LAB_SCHEMES)}")
    lab = _lab()
    tokens, places = _table(lab["tokens"]), _table(lab["positions"]) + shift
    places[lab["behind"] :] += key_gap
    places[-1] += query_gap
    turns = angles(places[:, None], ladder(2, theta=lab["theta"], dtype=torch.float64)[None])
    if scheme == "sin":
        tokens = tokens + torch.stack([turns.sin(), turns.cos()], -1).flatten(1)
    q, k = tokens @ _table(lab["queries"]), tokens @ _table(lab["keys"])
    if scheme == "rope":
        q, k = (turn(x[None, None], Rotation.of(turns, "adjacent"))[0, 0] for x in (q, k))
    logits = k[:-1] @ q[-1] / tokens.shape[-1] ** 0.5
    if scheme == "alibi":
        logits = logits - lab["slope"] * (places[-1] - places[:-1])
    weights: Tensor = logits.softmax(-1)
    return weights


def lab() -> tuple[LabRow, ...]:
    """Return every number that the lab recorded beside the computed one, then the gap between keys.

    Example:
        >>> rows = lab()
        >>> (
        ...     all(row.agrees for row in rows),
        ...     [row.computed for row in rows if row.test == "shift"][:1],
        ... )
        (True, [0.0])
    """
    rows = [
        LabRow(
            test=entry["test"],
            scheme=scheme,
            by=entry.get("by", entry.get("of")),
            computed=_measured(entry["test"], scheme, entry.get("by", entry.get("of", 0))),
            recorded=float(entry[scheme]),
            digits=entry["digits"],
        )
        for entry in _lab()["recorded"]
        for scheme in LAB_SCHEMES
        if scheme in entry
    ]
    gaps = [
        LabRow(
            test="key_gap",
            scheme=scheme,
            by=gap,
            computed=_measured("key_gap", scheme, gap),
            expected="zero" if scheme == "none" else "nonzero",
        )
        for gap in _lab()["gaps"]
        for scheme in LAB_SCHEMES
    ]
    return (*rows, *gaps)


def _measured(test: str, scheme: LabScheme, by: int) -> float:
    """Return the number of one test."""
    before = lab_weights(scheme)
    if test == "weight":
        return float(before[by])
    if test == "twins":
        first, second = _lab()["twins"]
        return float(before[first] / before[second])
    moved: Any = {test: float(by)}
    return float((before - lab_weights(scheme, **moved)).abs().sum())


@cache
def _lab() -> dict[str, Any]:
    return read_yaml(shipped("audit")["lab"].read_text(encoding="utf-8"), source="lab.yaml")


def _table(numbers: Any) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)
