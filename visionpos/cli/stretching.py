"""`visionpos stretch`: what rules that stretch a rotary ladder do to a grid, and which to take."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from visionpos.cli.inputs import grid_of
from visionpos.cli.show import show, write_json, write_line

AXIS_CHANNELS = 32  # of one axis where none are given: 64 channels of a head on a picture


def stretch(
    source: Annotated[
        str, typer.Option("--from", help="Trained token grid, [FRAMESx]ROWSxCOLUMNS.")
    ],
    to: Annotated[str, typer.Option("--to", help="Token grid at hand, [FRAMESx]ROWSxCOLUMNS.")],
    theta: Annotated[float, typer.Option("--theta", help="Ladder base of every axis.")] = 100.0,
    head_dim: Annotated[
        int | None,
        typer.Option("--head-dim", help="Channels of a head that turn; 32 an axis when absent."),
    ] = None,
    time: Annotated[
        float | None,
        typer.Option("--time", help="Time of a diffusion in [0, 1]; adds Lumina-Next and DyPE."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Compare the rules that stretch a rotary ladder for a larger grid, and recommend one with the reason."""
    from visionpos.geometry.phases import ABOUT, compare_stretches
    from visionpos.geometry.scaling_axes import grid_sides

    trained, target = grid_of(source), grid_of(to)
    sides = grid_sides(trained, target)
    width = AXIS_CHANNELS * len(sides) if head_dim is None else head_dim
    advice = compare_stretches(theta, trained, target, head_dim=width, time=time)
    if as_json:
        rows = [{**asdict(row), "about": ABOUT[row.rule]} for row in advice.rows]
        write_json({"recommended": advice.rule, "reason": advice.reason, "rows": rows})
        return
    lines = [
        {
            "rule": row.rule + (" *" if row.rule == advice.rule else ""),
            "outside": " ".join(f"{axis.outside}/{axis.unturned}" for axis in row.axes),
            "max_excess": " ".join(f"{axis.excess:.2f}" for axis in row.axes),
            "adjacent_kept": " ".join(f"{axis.adjacent:.2f}" for axis in row.axes),
            "about": ABOUT[row.rule],
        }
        for row in advice.rows
    ]
    axes = ", ".join("tyx"[-len(sides) :])
    show(lines, as_json=False, title=f"theta {theta:g}, {source} to {to}, by axis ({axes})")
    write_line(advice.reason)
