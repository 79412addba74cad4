"""The page of an audit: what surprises first, then what was expected beside what was measured."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from visionpos.audit.detectors.finding import did_fail
from visionpos.audit.interventions import INTERVENTIONS
from visionpos.audit.outcome import VERDICTS, agrees
from visionpos.audit.report.charts import layer_charts, layer_number
from visionpos.audit.report.page import number, render

if TYPE_CHECKING:
    from visionpos.audit.result import AuditResult, Found, Measured

# Worst first: one seed that fails or surprises is what the line of all seeds says.
AGREEMENTS = ("failed", "surprise", "cannot tell", "as expected", "not stated")


def audit_page(result: AuditResult) -> str:
    """Return one HTML page about an audit, which needs no network.

    Surprises stand first, then detectors, what was expected beside what was measured, charts layer by layer, all rows
    with filters, and the lineage. An incomplete result says so in its title and at its top.

    Args:
        result: of `audit.run`.
    """
    rows = list(result.rows)
    shown = [_row(row) for row in rows]
    failed = [row for row in shown if row["verdict"] == "failed"]
    counts = Counter(row.verdict for row in rows)
    return render(
        "audit.html",
        target=result.target,
        scheme=result.scheme,
        grid=result.grid,
        complete=result.complete and not failed,
        dtypes=_once(row.dtype for row in rows),
        failed=failed,
        surprises=[row for row in shown if row["agreement"] == "surprise"],
        counts=[(verdict, counts[verdict]) for verdict in VERDICTS if counts[verdict]],
        counts_expected=any(row.expected is not None for row in rows),
        found=[_found(one) for one in sorted(result.found, key=lambda one: not one.alarm)],
        alarms=len(result.alarms),
        overview=_overview(rows),
        meanings=_meanings(rows),
        charts=layer_charts(rows),
        rows=shown,
        filters=_filters(shown),
        lineage=None if result.lineage is None else list(_flat("", result.lineage)),
        facts=_plain(result.facts),
    )


def agreement(row: Measured) -> str:
    """Return in words how a row stands to what was expected of it."""
    if row.verdict == "failed":
        return "failed"
    if row.expected is None:
        return "not stated"
    same = agrees(row.verdict, row.expected)
    return "cannot tell" if same is None else "as expected" if same else "surprise"


def _row(row: Measured) -> dict[str, Any]:
    own = {field.name: getattr(row, field.name) for field in fields(row)}
    return own | {"value": number(row.value), "agreement": agreement(row)}


def _found(one: Found) -> dict[str, Any]:
    return {
        "detector": one.detector,
        "value": number(one.value),
        "applies": one.value is not None,
        "failed": did_fail(one),
        "threshold": number(one.threshold),
        "alarm": one.alarm,
        "says": one.says,
        "remedy": one.remedy,
    }


def _overview(rows: Sequence[Measured]) -> list[dict[str, Any]]:
    """Return one line for all seeds of what was measured end to end."""
    groups: dict[tuple[Any, ...], list[Measured]] = {}
    for row in rows:
        if layer_number(row.where) is None:
            key = (row.intervention, row.variant, row.metric, row.tokens, row.expected)
            groups.setdefault(key, []).append(row)
    return [
        {
            "intervention": intervention,
            "variant": variant,
            "metric": metric,
            "tokens": tokens,
            "expected": expected,
            "value": _range([row.value for row in group]),
            "verdicts": _once(row.verdict for row in group),
            "agreement": min(map(agreement, group), key=AGREEMENTS.index),
        }
        for (intervention, variant, metric, tokens, expected), group in groups.items()
    ]


def _range(values: Sequence[float | None]) -> str:
    numbers = [value for value in values if value is not None]
    if not numbers:
        return number(None)
    odd = [value for value in numbers if not math.isfinite(value)]
    if odd:
        return number(odd[0])
    low, high = number(min(numbers)), number(max(numbers))
    return low if low == high else f"{low} to {high}"


def _once(values: Any) -> list[str]:
    return list(dict.fromkeys(values))


def _filters(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the choices of every filter, in the order in which the rows bring them."""
    names = ("intervention", "verdict", "where", "metric", "tokens", "agreement")
    return {name: _once(row[name] for row in rows) for name in names}


def _meanings(rows: Sequence[Measured]) -> list[tuple[str, str]]:
    """Return what each intervention that was measured holds and changes, where the registry says so."""
    found = []
    for name in _once(row.intervention for row in rows):
        known = INTERVENTIONS.get(name)
        if known is not None:
            found.append((name, f"{known.title}. Held: {known.holds}. Changed: {known.changes}."))
    return found


def _flat(name: str, value: Any) -> Any:
    """Yield (dotted key, text) of nested data."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flat(f"{name}.{key}" if name else str(key), item)
    elif isinstance(value, (list, tuple)) and any(
        isinstance(item, (Mapping, list, tuple)) for item in value
    ):
        for at, item in enumerate(value):
            yield from _flat(f"{name}[{at}]", item)
    else:
        yield name, _text(value)


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_text, value)) or "none"
    if isinstance(value, float):
        return number(value)
    return "none" if value is None or value == {} else str(value)


def _plain(value: Any) -> Any:
    """Return facts with numbers as texts, for the template."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return _text(value)
