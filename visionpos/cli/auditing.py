"""`visionpos audit`: what interventions prove about a scheme, a model or a family."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from visionpos import config
from visionpos.cli.audit_table import show_result
from visionpos.cli.inputs import grid_of, model_of
from visionpos.cli.pages import check_page
from visionpos.cli.show import show, write_json, write_line
from visionpos.errors import PositionError

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
_DTYPES = ("float64", "float32", "bfloat16", "float16")


def audit(
    target: Annotated[
        str | None,
        typer.Argument(
            help="A shipped encoding or a YAML file of one; a timm model, or a .safetensors file written by visionpos; "
            "a VLM family; none for the control without position."
        ),
    ] = None,
    lab: Annotated[
        bool,
        typer.Option(
            "--lab",
            help="Print a toy experiment on four schemes instead: recorded beside computed.",
        ),
    ] = False,
    kind: Annotated[
        str | None,
        typer.Option("--as", help="encoding, family or model, where a name is of several kinds."),
    ] = None,
    grid: Annotated[
        str | None,
        typer.Option(help="Token grid of an encoding's audit, [FRAMESx]ROWSxCOLUMNS."),
    ] = None,
    size: Annotated[
        str | None, typer.Option(help="Image size of a model, HEIGHTxWIDTH in pixels.")
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(help="State dict of a model; random weights without it.")
    ] = None,
    dialect: Annotated[str | None, typer.Option(help="Whose rules a family follows.")] = None,
    variant: Annotated[str | None, typer.Option(help="A named variant of a family.")] = None,
    interventions: Annotated[
        str | None, typer.Option(help="Ids, such as P1,S1; all that fit when left out.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="How many draws of contents.")] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="float64, float32, bfloat16 or float16; float32 when left out."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="HTML page to write.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Prove by intervention what a position scheme does: measured beside expected, surprises first."""
    from visionpos.audit import run

    options: dict[str, Any] = {
        "--grid": grid,
        "--size": size,
        "--weights": weights,
        "--dialect": dialect,
    }
    options |= {"--variant": variant, "--output": output, "--interventions": interventions}
    options |= {"--seeds": seeds, "--as": kind, "--dtype": dtype}
    if lab:
        _check_alone("--lab", {"TARGET": target, **options})
        show_lab(as_json=as_json)
        return
    if target is None:
        raise PositionError("Missing argument TARGET. Name an encoding, a model or a family.")
    if output is not None:
        check_page(output)
    chosen = _dtype(dtype)
    sort = _sort(target, kind)
    _check_fits(sort, options)
    with bar() as progress:
        progress("building", 0, 1)
        more: dict[str, Any] = {} if grid is None else {"grid": grid_of(grid)}
        found = _target(target, sort, size, weights, dialect, variant)
        wanted = (
            None if interventions is None else [one.strip() for one in interventions.split(",")]
        )
        result = run(found, wanted, seeds=seeds, dtype=chosen, progress=progress, **more)
    if output is not None:
        result.to_html(output)
    if as_json:
        write_json(result.data())
    else:
        show_result(result, target, output)


def _check_alone(word: str, others: dict[str, Any]) -> None:
    for name, value in others.items():
        if value is not None:
            raise PositionError(f"{name} does not go with {word}; leave one of them out.")


def _check_fits(sort: str, options: dict[str, Any]) -> None:
    """Refuse options that would be ignored for this kind of target."""
    owners = {"--grid": "encoding", "--size": "model", "--weights": "model"}
    owners |= {"--dialect": "family", "--variant": "family"}
    for name, owner in owners.items():
        if options[name] is not None and owner != sort:
            raise PositionError(
                f"{name} is given and the target's kind is {sort}; it goes with kind {owner} alone. Leave it out, or "
                "choose the kind by --as."
            )


def _dtype(name: str | None) -> Any:
    import torch

    if name is None:
        return torch.float32
    if name not in _DTYPES:
        raise PositionError(f"dtype is {name!r}; one of {', '.join(_DTYPES)} is required.")
    return getattr(torch, name)


def _sort(target: str, told: str | None) -> str:
    """Return what kind of thing a target is, by its name."""
    if told is not None:
        if told not in ("encoding", "family", "model"):
            raise PositionError(f"--as is {told!r}; encoding, family or model is required.")
        return told
    from visionpos.vlm import family_names

    path = Path(target)
    if target.endswith(".safetensors"):
        return "model"
    if path.suffix in (".yaml", ".yml") or target == "none":
        return "encoding"
    sorts = [
        sort
        for sort, names in (("encoding", config.shipped("encodings")), ("family", family_names()))
        if target in names
    ]
    if len(sorts) > 1:
        raise PositionError(
            f"target {target} is an encoding and a family; say which by --as encoding or --as family."
        )
    return sorts[0] if sorts else "model"


def _target(
    name: str,
    sort: str,
    size: str | None,
    weights: Path | None,
    dialect: str | None,
    variant: str | None,
) -> Any:
    """Return what a name stands for."""
    if sort == "family":
        from visionpos.vlm import family

        return family(name, dialect=dialect, variant=variant)
    if sort == "encoding":
        return None if name == "none" else config.load_encoding(name)
    try:
        return model_of(name, size, weights)
    except PositionError as error:
        if "is not known to timm" not in str(error):
            raise
        raise PositionError(
            f"target {name!r} is no shipped encoding, family or timm model. `visionpos encodings` and `visionpos "
            f"families` list what there is; {error}"
        ) from None


@contextmanager
def bar() -> Iterator[Callable[[str, int, int], None]]:
    """Show a bar on a terminal while an audit takes its time."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())  # fmt: skip
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not sys.stderr.isatty()
    ) as progress:
        task = progress.add_task("", total=None)
        yield lambda what, done, whole: progress.update(
            task, description=what, completed=done, total=whole
        )


def show_lab(*, as_json: bool) -> None:
    """Print the lab: recorded beside computed, then the gap between keys."""
    from visionpos.audit.lab import lab

    rows = [
        {
            "test": row.test,
            "scheme": row.scheme,
            "by": row.by,
            "recorded": row.recorded,
            "computed": row.computed,
            "expected": row.expected,
            "agrees": row.agrees,
        }
        for row in lab()
    ]
    show(rows, as_json=as_json, title="Lab: query_gap is the recorded test, key_gap the corrected")
    if not as_json:
        wrong = sum(not row["agrees"] for row in rows)
        write_line(f"{len(rows)} numbers, {wrong} of them not as recorded or expected")
