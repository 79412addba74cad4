"""`visionpos atlas`: who uses what, as a table, as JSON or as a page."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from visionpos.cli.pages import check_page, write_page
from visionpos.cli.show import show, write_json, write_line

SHOWN = 4  # models, or schemes, in a cell of the table; JSON and the page have all


def atlas(
    family: Annotated[
        str | None, typer.Option("--family", help="Only this chapter or door, such as Rotary.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Only what this published model uses.")
    ] = None,
    scheme: Annotated[
        str | None, typer.Option("--scheme", help="Only this scheme, such as 'Axial 2-D RoPE'.")
    ] = None,
    match: Annotated[
        str | None,
        typer.Option("--match", help="Only what has all these words, its YAML included."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="HTML page to write.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List every scheme, encoding and stream family: who uses it, its YAML, its dialects, its commands."""
    from visionpos.audit.atlas import atlas as entries
    from visionpos.audit.atlas import select

    if output is not None:
        check_page(output)
    found = select(entries(), family=family, model=model, scheme=scheme, match=match)
    if output is not None:
        from visionpos.audit.report import atlas_page

        write_page(output, atlas_page(found))
    if as_json:
        write_json([asdict(entry) for entry in found])
    elif output is None:
        show([_line(entry) for entry in found], as_json=False, title="Atlas")
    else:
        write_line(f"wrote {output}: {len(found)} entries")


def _line(entry: Any) -> dict[str, Any]:
    """Return an entry as the cells of a table."""
    return {
        "sort": entry.sort,
        "name": entry.name,
        "scheme": _few(entry.families if entry.sort == "scheme" else entry.schemes),
        "models": _few(entry.models),
        "command": entry.commands[0] if entry.commands else "",
    }


def _few(words: tuple[str, ...]) -> str:
    more = f" and {len(words) - SHOWN} more" if len(words) > SHOWN else ""
    return ", ".join(words[:SHOWN]) + more
