"""`visionpos retrofit --coverage`: what the toolkit does for every model class of the seam table."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from visionpos.cli.inputs import model_of
from visionpos.cli.show import show, write_json, write_line


def show_coverage(model: str | None, *, as_json: bool) -> None:
    """Print what each door can serve of one model; without one a row a model class, and the sums."""
    if model is not None:
        show(_doors_of(model), as_json=as_json, title=model)
        return
    from visionpos.retrofit.coverage import counted_with, coverage, totals

    rows, sums = coverage(), totals()
    if as_json:
        write_json({"timm": counted_with(), "totals": sums, "rows": [asdict(row) for row in rows]})
        return
    show([_line(row) for row in rows], as_json=False, title=f"Coverage of timm {counted_with()}")
    of = sums["models"]
    write_line(
        f"{of} registered models with a position mechanism: all are described, {sums['rectangles']} resize to "
        f"rectangles; attach: add {sums['add']}, rotate {sums['rotate']} ({sums['skipped']} of them in part), bias "
        f"{sums['bias']}, conditional {sums['conditional']}"
    )


def _doors_of(model: str) -> list[dict[str, Any]]:
    """Return one row a door: how many places of a model it serves, and why not all."""
    from visionpos.retrofit import attachable

    found = attachable(model_of(model, None))
    return [
        {"door": door, "places": places, "of": of, "why_not_all": why}
        for door, (places, of, why) in found.items()
    ]


def _line(row: Any) -> dict[str, Any]:
    """Return a row as the cells of a table."""
    parts = ", ".join(f"{kind} {count}" for kind, count in row.parts.items())
    rotate = f"rotate {row.rotate}" + (f" ({row.skipped} in part)" if row.skipped else "")
    bias = f"bias {row.bias}" if row.bias else ""
    doors = [f"add {row.add}", rotate if row.rotate else "", bias, f"conditional {row.conditional}"]
    resize = (
        row.resize
        if row.rectangles == row.models
        else f"{row.resize}, {row.rectangles} to rectangles"
    )
    return {
        "model": row.model,
        "models": row.models,
        "parts": parts,
        "grid": row.grid,
        "resize": resize,
        "attach": ", ".join(filter(None, doors)) + (f"; {row.detail}" if row.detail else ""),
    }
