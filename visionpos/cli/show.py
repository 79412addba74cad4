"""How the command line answers: tables, JSON, token streams and a progress line."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from dataclasses import asdict
from itertools import groupby
from math import isfinite
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from visionpos import config

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from visionpos.vlm import PositionIds, TokenStream


def show_stream(
    tokens: TokenStream,
    pos: PositionIds | None,
    plan: Sequence[dict[str, Any]],
    *,
    as_json: bool,
    title: str,
) -> None:
    """Print the plan, then runs of equal tokens with the ids of their first and last token."""
    ids = [[]] * tokens.length if pos is None else pos.ids.T.tolist()
    rows, start = [], 0
    for name, run in groupby(tokens.names):
        stop = start + len(list(run))
        rows.append(
            {
                "token": name,
                "start": start,
                "count": stop - start,
                "first ids": ids[start],
                "last ids": ids[stop - 1],
            }
        )
        start = stop
    summary: dict[str, Any] = {"length": tokens.length, "features": int(tokens.is_feature.sum())}
    if pos is not None:
        summary |= {"next_position": pos.next_position.item(), "delta": pos.delta.item()}
    if as_json:
        spans = [_plain_span(span) for span in tokens.spans]
        write_json(
            {
                **summary,
                "plan": list(plan),
                "spans": spans,
                "ids": None if pos is None else pos.ids.tolist(),
                "names": list(tokens.names),
            }
        )
        return
    if plan:
        show(plan, as_json=False, title=f"{title}: plan")
    show(rows, as_json=False, title=title)
    write_line("  ".join(f"{key} {value}" for key, value in summary.items()))


def _plain_span(span: Any) -> dict[str, Any]:
    return {
        key: (asdict(value) if hasattr(value, "__dataclass_fields__") else value)
        for key, value in config.plain(span).items()
    }


def _cell(value: Any) -> str:
    """Return a value as the text of a table cell."""
    if value is None or value == ():
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (tuple, list)):
        return "x".join(map(str, value)) if isinstance(value, tuple) else " ".join(map(str, value))
    return str(value)


def show(rows: Sequence[dict[str, Any]], *, as_json: bool, title: str) -> None:
    """Print rows as JSON or as a table."""
    if as_json:
        write_json(list(rows))
        return
    table = Table(title=title, title_justify="left", highlight=False)
    for key in rows[0] if rows else ():
        table.add_column(key.replace("_", " "), overflow="fold")
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    Console(markup=False, highlight=False).print(table)


def write_json(data: Any) -> None:
    """Write data as one line of JSON, which has no word for NaN and infinity: they become null."""
    write_line(json.dumps(_spelled(data), allow_nan=False))


def _spelled(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _spelled(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_spelled(item) for item in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def write_line(text: str) -> None:
    """Write one line to standard output, unwrapped."""
    sys.stdout.write(text + "\n")


@contextmanager
def steps() -> Iterator[Callable[[str], None]]:
    """Show a progress line on a terminal while something takes its time."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("", total=None)
        yield lambda text: progress.update(task, description=text)
