"""How the command line answers: tables, JSON, token streams and a progress line."""

from __future__ import annotations

import json
import os
import sys
from contextlib import contextmanager
from dataclasses import asdict
from math import isfinite
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from visionpos import config
from visionpos.cli.drawing import drawn_line
from visionpos.cli.folding import folded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from visionpos.vlm import PositionIds, TokenStream

LONGEST_WORD = 24  # of a table: longer ones are broken


def show_stream(
    tokens: TokenStream,
    pos: PositionIds | None,
    plan: Sequence[dict[str, Any]],
    drawing: dict[str, Any] | None,
    *,
    as_json: bool,
    title: str,
) -> None:
    """Print the plan, then runs of equal tokens with the ids of their first and last token."""
    ids = [[]] * tokens.length if pos is None else pos.ids.T.tolist()
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
                **({} if drawing is None else {"drawing": drawing}),
            }
        )
        return
    if plan:
        show(plan, as_json=False, title=f"{title}: plan")
    rows = [
        {
            "token": token,
            "start": start,
            "count": count,
            "first ids": ids[start],
            "last ids": ids[start + count - 1],
        }
        for token, start, count in folded(tokens.names)
    ]
    show(rows, as_json=False, title=title)
    write_line("  ".join(f"{key} {value}" for key, value in summary.items()))
    if drawing is not None:
        write_line(drawn_line(drawing))


def _plain_span(span: Any) -> dict[str, Any]:
    return {
        key: (asdict(value) if hasattr(value, "__dataclass_fields__") else value)
        for key, value in config.plain(span).items()
    }


def _cell(value: Any) -> str:
    """Return a value as the text of a table cell."""
    if value is None or value == ():
        return ""
    if isinstance(value, bool):
        return "yes" if value else ""
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
    cells = [[_cell(value) for value in row.values()] for row in rows]
    for key, column in zip(rows[0] if rows else (), zip(*cells, strict=True), strict=False):
        longest = max(len(word) for cell in column for word in (cell.split() or [""]))
        # No word is broken that a narrow terminal has room for.
        width = min(longest, LONGEST_WORD)
        table.add_column(key.replace("_", " "), overflow="fold", min_width=width)
    for row in cells:
        table.add_row(*row)
    console = Console(markup=False, highlight=False)
    # Rich crops what does not fit without a word. A terminal narrower than the words wraps lines; a file has no width.
    least = console.measure(table, options=console.options.update(max_width=10_000)).minimum
    console.width = max(console.width, least)
    console.print(table)


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
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    shown = sys.stderr.isatty()
    # A descriptor of its own: decoders are kept off the usual one while they read.
    target = os.dup(2) if shown else os.open(os.devnull, os.O_WRONLY)
    with os.fdopen(target, "w") as out:
        console = Console(file=out)
        with Progress(*columns, console=console, transient=True, disable=not shown) as progress:
            task = progress.add_task("", total=None)
            yield lambda text: progress.update(task, description=text)
