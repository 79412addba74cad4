"""`visionpos lineage diff`: two files compared field by field."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from visionpos.cli.show import show, write_json, write_line

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
_LONGEST = 60  # characters of a value in a table; JSON has all

lineage_app = typer.Typer(help="Look at the lineage of files.", no_args_is_help=True)


@lineage_app.command("diff")
def lineage_diff_command(
    one: Annotated[Path, typer.Argument(help="A .safetensors file written by visionpos.")],
    other: Annotated[Path, typer.Argument(help="Another one.")],
    as_json: Json = False,
) -> None:
    """Compare the lineages of two files field by field; what changes outputs at inference stands first."""
    from visionpos.audit.histograms import support_outside
    from visionpos.audit.lineage import lineage_diff, lineage_of_file

    found = lineage_diff(one, other)
    records = [lineage_of_file(path).get("train_support", {}) for path in (one, other)]
    outside = support_outside(*records) if all(one.get("offset") for one in records) else None
    if as_json:
        fields = [{**asdict(item), "matters": item.matters} for item in found]
        write_json({"differences": fields, "offsets_outside": outside})
        return
    if not found:
        write_line(f"{one} and {other} have one lineage")
        return
    rows = [
        {
            "field": item.field,
            one.name: _short(item.one),
            other.name if other.name != one.name else str(other): _short(item.other),
            "at inference": item.why,
        }
        for item in found
    ]
    show(rows, as_json=False, title=f"{one} | {other}")
    matter = sum(item.matters for item in found)
    write_line(f"{len(found)} fields differ, {matter} of them matter at inference")
    for axis, share in (outside or {}).items():
        write_line(
            f"{100 * share:.1f} % of the offsets of {one.name} along {axis} lie outside those of {other.name}"
        )


@lineage_app.callback()
def lineage() -> None:
    """Look at the lineage of files."""


def _short(value: Any) -> str:
    """Return a value as a table shows it."""
    text = "" if value is None else str(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
