"""Results of an audit: rows of measurements with verdicts, what detectors found, and the file forms of both."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from visionpos.audit.outcome import Outcome, Verdict, agrees
from visionpos.audit.writing import write_whole

Metric = Literal["A", "O", "Eq", "weights", "entropy", "outside", "bias", "phase"]
Tokens = Literal["patches", "prefix", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One number of an audit.

    Args:
        intervention: its id, such as "S1" (`interventions.INTERVENTIONS`).
        variant: which form of it, such as "17 cells"; empty for the only one.
        metric: "A" change of attention weights (0 to 2), "O" relative change of outputs, "Eq" relative error of
            outputs after the change is undone, or what the intervention measures beside them.
        where: "end", or "layer 3".
        tokens: which tokens it is taken over.
        value: the number; None where the intervention has no meaning for the target.
        verdict: what the number proves.
        expected: what the scheme should do; None where nothing is known of it.
        dtype: of the forward pass, such as "float32".
        seed: of contents and random weights.
        note: why it is undefined or failed, or what to know when reading it.
    """

    intervention: str
    metric: Metric
    value: float | None
    verdict: Verdict
    dtype: str
    variant: str = ""
    where: str = "end"
    tokens: Tokens = "patches"
    expected: Outcome | None = None
    seed: int = 0
    note: str = ""

    @property
    def surprise(self) -> bool:
        """Return whether the number proves something else than was expected."""
        return self.expected is not None and agrees(self.verdict, self.expected) is False


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What one detector says.

    Args:
        detector: its name, such as "stale_cache".
        value: the number it measured; None where it does not apply.
        threshold: the number from which on it raises the alarm.
        alarm: whether it does.
        says: one sentence: what was seen, and where.
        remedy: what to do; empty without an alarm.
    """

    detector: str
    value: float | None
    threshold: float
    alarm: bool
    says: str = ""
    remedy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditResult:
    """What an audit measured.

    Args:
        target: what was audited, such as "vit_small_patch16_224".
        scheme: its position scheme, such as "axial"; several joined by " + ".
        grid: frames, height and width of the token grid; None for a stream.
        rows: the measurements.
        found: what the detectors say.
        complete: False where an intervention failed and its rows are missing or marked.
        lineage: the lineage record of the target, where it has one.
        facts: further numbers and words for the report, JSON data.
    """

    target: str
    scheme: str
    rows: tuple[Measured, ...]
    grid: tuple[int, int, int] | None = None
    found: tuple[Found, ...] = ()
    complete: bool = True
    lineage: Mapping[str, Any] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Measured]:
        """Return the rows in order."""
        return iter(self.rows)

    @property
    def surprises(self) -> tuple[Measured, ...]:
        """Return the rows that prove something else than was expected."""
        return tuple(row for row in self.rows if row.surprise)

    @property
    def alarms(self) -> tuple[Found, ...]:
        """Return what detectors raise an alarm about."""
        return tuple(one for one in self.found if one.alarm)

    def of(self, intervention: str, **fields: Any) -> tuple[Measured, ...]:
        """Return the rows of one intervention, with fields of given values.

        Example:
            >>> AuditResult(target="x", scheme="none", rows=()).of("P1", metric="O")
            ()
        """
        return tuple(
            row
            for row in self.rows
            if row.intervention == intervention
            and all(getattr(row, name) == value for name, value in fields.items())
        )

    def data(self) -> dict[str, Any]:
        """Return plain JSON data, with a `surprise` in every row."""
        rows = [{**asdict(row), "surprise": row.surprise} for row in self.rows]
        whole: dict[str, Any] = {
            "target": self.target,
            "scheme": self.scheme,
            "grid": None if self.grid is None else list(self.grid),
            "complete": self.complete,
            "rows": rows,
            "found": [asdict(one) for one in self.found],
            "lineage": None if self.lineage is None else dict(self.lineage),
            "facts": dict(self.facts),
        }
        return whole

    def to_json(self, path: str | Path) -> None:
        """Write the data as JSON, whole or not at all; NaN and infinity become null, which the verdict explains."""
        write_whole(path, json.dumps(_finite(self.data()), indent=2, allow_nan=False) + "\n")

    def to_html(self, path: str | Path) -> None:
        """Write one page that needs no network, whole or not at all."""
        from visionpos.audit.report import audit_page

        write_whole(path, audit_page(self))


def _finite(data: Any) -> Any:
    """Return JSON data in which numbers that JSON cannot hold are null."""
    if isinstance(data, Mapping):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, Sequence) and not isinstance(data, str):
        return [_finite(value) for value in data]
    is_odd = isinstance(data, float) and not math.isfinite(data)
    return None if is_odd else data
