"""The table of an audit: one line an intervention, variant and kind of tokens, notes below it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visionpos.cli.show import show, write_line

if TYPE_CHECKING:
    from visionpos.audit.result import AuditResult, Measured


def show_result(result: AuditResult, target: str, output: Path | None) -> None:
    """Print an audit, surprises first, then what detectors say."""
    from visionpos.audit import INTERVENTIONS
    from visionpos.audit.detectors import did_fail

    where = "" if result.grid is None else f", grid {'x'.join(map(str, result.grid))}"
    groups = _grouped(result.rows)
    groups.sort(key=lambda rows: not any(row.surprise for row in rows))
    kept = [rows for rows in groups if rows[0].where == "end" or any(row.surprise for row in rows)]
    notes = list(dict.fromkeys(row.note for rows in kept for row in rows if row.note))
    lines = [_line(rows, notes) for rows in kept]
    show(_told(lines), as_json=False, title=f"{target}: {result.scheme}{where}")
    write_line(
        "A: change of attention weights, 0 to 2. O: relative change of outputs. Eq: the same, the change undone."
    )
    for name in dict.fromkeys(rows[0].intervention for rows in kept):
        known = INTERVENTIONS.get(name)
        if known is not None:
            write_line(f"{name}: {known.title} ({known.changes})")
    for number, note in enumerate(notes, 1):
        write_line(f"[{number}] {note}")
    for found in result.found:
        word = "ALARM" if found.alarm else "FAILED" if did_fail(found) else "fine"
        write_line(f"{word}  {found.detector}: {found.says} {found.remedy}".rstrip())
    partial = "" if result.complete else ", incomplete: rows marked failed say why"
    write_line(
        f"{len(result.rows)} measurements, {len(result.surprises)} surprises, {len(result.alarms)} alarms{partial}"
    )
    if len(groups) > len(kept):
        write_line(
            f"{len(groups) - len(kept)} lines of single layers are left out; --json and --output have them"
        )
    if output is not None:
        write_line(f"wrote {output}")


def _grouped(rows: Iterable[Measured]) -> list[list[Measured]]:
    """Return rows that differ in metric and seed alone together."""
    groups: dict[tuple[str, ...], list[Measured]] = {}
    for row in rows:
        key = (row.intervention, row.variant, row.where, row.tokens)
        groups.setdefault(key, []).append(row)
    return list(groups.values())


def _told(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows without the columns that say nothing: empty ones, and a place that is the end for all."""
    silent = {"", None, False, "end"}
    kept = [key for key in rows[0] if {row[key] for row in rows} - silent] if rows else []
    return [{key: row[key] for key in kept} for row in rows]


def _line(rows: Sequence[Measured], notes: Sequence[str]) -> dict[str, Any]:
    """Return one line: A, O and Eq over all seeds, and what the intervention measures beside them."""
    first = rows[0]
    told = {metric: _range(rows, metric) for metric in ("A", "O", "Eq")}
    others = dict.fromkeys(row.metric for row in rows if row.metric not in told)
    beside = [f"{metric} {found}" for metric in others if (found := _range(rows, metric))]
    numbers = [notes.index(note) + 1 for note in dict.fromkeys(row.note for row in rows) if note]
    return {
        "id": first.intervention,
        "variant": first.variant,
        "where": first.where,
        "tokens": first.tokens,
        **told,
        "beside": ", ".join(beside),
        "verdict": " or ".join(dict.fromkeys(row.verdict for row in rows)),
        "expected": " or ".join(dict.fromkeys(row.expected for row in rows if row.expected)),
        "surprise": any(row.surprise for row in rows),
        "note": " ".join(f"[{number}]" for number in numbers),
    }


def _range(rows: Sequence[Measured], metric: str) -> str:
    """Return the least and largest value of a metric, empty where it has none."""
    values = [row.value for row in rows if row.metric == metric and row.value is not None]
    if not values:
        return ""
    low, high = f"{min(values):.2g}", f"{max(values):.2g}"
    return low if low == high else f"{low} to {high}"
