"""docs/dialects.md, printed from the registry by `make docs`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from visionpos.dialects.registry import dialect_rows

if TYPE_CHECKING:
    from visionpos.dialects.registry import Row


def markdown() -> str:
    """Return docs/dialects.md."""
    lines = [
        "# Dialects",
        "",
        (
            "Places where two sources that go by one name differ: a small input that shows it, what each makes of it, "
            "and who uses which. Printed from `configs/dialects/` by `make docs`; a test computes every number; words "
            "are pinned by the test that is named."
        ),
    ]
    rows = dialect_rows()
    for topic in dict.fromkeys(row.topic for row in rows):
        lines += ["", f"## {topic}"]
        for row in rows:
            lines += _lines(row) if row.topic == topic else []
    return "\n".join(lines) + "\n"


def _lines(row: Row) -> list[str]:
    """Return one row: what differs, a table of its readings, and where it is discussed."""
    lines = [
        "",
        f"**{row.what}** Input: {row.input}.",
        "",
        "| dialect | value | used by |",
        "|---|---|---|",
    ]
    for reading in row.readings:
        words = isinstance(reading.value, str)
        value = reading.value if words else " ".join(f"{number:.6g}" for number in reading.value)
        fault = " (a fault, pinned so that it is seen)" if reading.known_fault else ""
        lines.append(f"| {', '.join(reading.names)} | {value} | {reading.used_by}{fault} |")
    pinned = f"Pinned by `{row.at['test']}`." if row.probe == "stated" else ""
    source = f"Source: {row.source}." if row.source else ""
    notes = " ".join(part for part in (source, pinned) if part)
    return [*lines, "", notes] if notes else lines
