"""The release card: task quality against resolution, under position interventions and without position."""

from __future__ import annotations

import copy
import inspect
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from visionpos.audit.card_points import CONTROL, Curve, Point, State
from visionpos.audit.changes import SHIFTS, flipped, shifted, transposed
from visionpos.audit.interventions import Progress
from visionpos.audit.layer import cells_of
from visionpos.audit.model_bench import grid_order, ordered
from visionpos.audit.model_codes import CodeMove
from visionpos.audit.model_moves import Change
from visionpos.audit.model_parts import moves_of, take_out
from visionpos.audit.model_subject import Subject
from visionpos.audit.model_tables import TableMove
from visionpos.errors import PositionError, did_you_mean
from visionpos.geometry import Grid
from visionpos.geometry.ranges import is_integer
from visionpos.retrofit.kinds import check_kinds, check_model
from visionpos.retrofit.resize import resize
from visionpos.retrofit.seams import grid_of, row_of
from visionpos.retrofit.sizes import image_of


def curve(
    model: nn.Module,
    evaluate: Callable[..., Any],
    grids: Sequence[Grid | tuple[int, int]],
    *,
    interventions: Sequence[str] | None = None,
    control: nn.Module | bool = True,
    seed: int = 0,
    progress: Progress | None = None,
) -> Curve:
    """Return task quality against resolution, under position interventions and without position.

    Every evaluation gets a copy of the model in eval mode that serves the grid, so that it may do with it what it
    likes; the model itself is never written to. An evaluation that raises or gives NaN is a marked point, and the
    others go on.

    Args:
        model: a timm model whose class has a row in the seam table.
        evaluate: `evaluate(model)` or `evaluate(model, grid)`, returns a number; higher need not be better.
        grids: token grids, as Grid or (rows, columns).
        interventions: of "none" (each part by its habit), "zoom" (the same view with more tokens), "extend" (a wider
            view at the same scale), "S1" (all places moved by 17 cells), "R1" (flipped), "R2" (transposed), "shuffled"
            (every token on the place of another); "none", "zoom", "extend" and "shuffled" when None.
        control: a model without position, trained alike; True takes the position parts out of copies of this one,
            False leaves the line away.
        seed: of shuffled places.
        progress: called with what is done, how many evaluations are done and how many there are.

    Raises:
        PositionError: if the model has no row, evaluate cannot be called, or grids or interventions are none.
    """
    check_model(model)
    row_of(model)
    check_kinds("control", control, nn.Module, bool)
    if not callable(evaluate):
        raise PositionError(
            f"evaluate is {evaluate!r:.60}; a function of a model, or of a model and a grid, is required."
        )
    sides, names, served = _grids(grids), _names(interventions), _served(model)
    lines: list[tuple[str, nn.Module, _Served, _Bring]] = [
        (name, model, served, partial(_bring, name=name, seed=seed)) for name in names
    ]
    if isinstance(control, nn.Module):
        lines.append((CONTROL, control, _served(control), partial(_resized, extent=None)))
    elif control:
        lines.append((CONTROL, model, served, _without))
    points: list[Point] = []
    for name, own, scale, bring in lines:
        for grid in sides:
            if progress is not None:
                progress(
                    f"{name}, {grid.height}x{grid.width}", len(points), len(lines) * len(sides)
                )
            points.append(_point(name, own, scale, bring, grid, evaluate))
    if progress is not None:
        progress("done", len(points), len(points))
    config = getattr(model, "pretrained_cfg", None) or {}
    return Curve(
        target=str(config.get("architecture") or type(model).__name__),
        trained_hw=(served.grid.height, served.grid.width),
        points=tuple(points),
        complete=all(point.state != "failed" for point in points),
    )


def _grids(grids: Any) -> list[Grid]:
    """Return grids, or refuse."""
    found: list[Grid] = []
    for given in grids if isinstance(grids, (list, tuple)) else ():
        pair = isinstance(given, (list, tuple)) and len(given) == 2 and all(map(is_integer, given))
        found += [given] if isinstance(given, Grid) else [Grid(*given)] if pair else []
    if not found or len(found) != len(grids) or any(grid.frames != 1 for grid in found):
        raise PositionError(
            f"grids is {grids!r:.80}; a list of token grids of images is required: Grid(14, 14), or (rows, columns)."
        )
    return found


def _names(interventions: Any) -> tuple[str, ...]:
    """Return names of lines, or refuse."""
    if interventions is None:
        return ("none", "zoom", "extend", "shuffled")
    wanted = [interventions] if isinstance(interventions, str) else list(interventions)
    for name in wanted:
        if name not in _KNOWN:
            raise PositionError(
                f"interventions holds {name!r}; one of {', '.join(_KNOWN)} is required."
                f"{did_you_mean(name, _KNOWN)}"
            )
    if not wanted:
        raise PositionError("interventions is empty; name at least one, or leave it out.")
    return tuple(dict.fromkeys(wanted))


_KNOWN = ("none", "zoom", "extend", "S1", "R1", "R2", "shuffled")


@dataclass(frozen=True, slots=True)
class _Served:
    """The grid of patch tokens that a model serves as it is given, and the image."""

    grid: Grid
    size_hw: tuple[int, int] | None

    def pixels(self, grid: Grid) -> tuple[int, int]:
        """Return the image of another grid."""
        if self.size_hw is None:
            raise PositionError(
                "nothing tells which images the model serves; create it with img_size=."
            )
        height, width = self.size_hw
        return height // self.grid.height * grid.height, width // self.grid.width * grid.width


_Bring = Callable[[Any, _Served, Grid], None]


def _served(model: Any) -> _Served:
    """Return what a model serves; where no part of it keeps a grid, as a pass shows it.

    Raises:
        PositionError: if nothing tells which images the model serves.
    """
    try:
        return _Served(grid_of(model), image_of(model))
    except PositionError:
        subject = Subject(model)
        return _Served(subject.grid, subject.size)


def _resized(made: Any, served: _Served, grid: Grid, extent: Any) -> None:
    """Bring a copy to a grid."""
    if (served.grid.height, served.grid.width) != (grid.height, grid.width):
        resize(made, served.pixels(grid), extent=extent)


def _bring(made: Any, served: _Served, grid: Grid, name: str, seed: int) -> None:
    """Bring a copy to a grid, and its position parts to other places there."""
    own = served.grid
    parts = moves_of(made, own, served.size_hw)
    table = next((part for part in parts if isinstance(part, (TableMove, CodeMove))), None)
    if name == "extend" and table is not None and grid != own:
        raise PositionError(
            f"{table.path} is a table, which is resampled to the view; it has no entries beyond it."
        )
    turns = any(part.angles(own) is not None for part in parts)
    extent = {"zoom": "trained", "extend": "index"}.get(name) if turns else None
    _resized(made, served, grid, extent)
    changes: dict[str, Change] = {
        "S1": _in_plane(lambda c: shifted(c, SHIFTS[1])),
        "R1": _in_plane(flipped),
        "R2": Change(
            lambda own: _of(own, transposed), lambda own: Grid(own.width, own.height), mirrors=True
        ),
        "shuffled": ordered(grid_order(seed)),
    }
    if name in changes:
        for part in moves_of(made, grid, served.pixels(grid)):
            part(changes[name])


def _in_plane(change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return Change(lambda grid: _of(grid, change), mirrors=True)


def _of(grid: Grid, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    cells = cells_of(grid)
    return torch.cat([cells[:, :1], change(cells[:, 1:])], dim=-1)


def _without(made: Any, served: _Served, grid: Grid) -> None:
    """Bring a copy to a grid, and take its position parts out."""
    _resized(made, served, grid, None)
    take_out(made)


def _point(
    line: str,
    model: nn.Module,
    served: _Served,
    bring: _Bring,
    grid: Grid,
    evaluate: Callable[..., Any],
) -> Point:
    sides = grid.height, grid.width

    def point(value: float | None, state: State, note: str = "", began: float = 0.0) -> Point:
        took = time.perf_counter() - began if began else 0.0
        return Point(
            line=line,
            grid_hw=sides,
            size_hw=size,
            value=value,
            state=state,
            note=note,
            seconds=took,
        )

    size = (0, 0)
    try:
        size = served.pixels(grid)
        made: Any = copy.deepcopy(model).eval()
        bring(made, served, grid)
    except PositionError as error:
        return point(None, "undefined", str(error))
    began = time.perf_counter()
    try:
        given = evaluate(made, grid) if _takes_grid(evaluate) else evaluate(made)
        value = float(given)
    except Exception as error:
        said = " ".join(str(error).split())[:200]
        return point(None, "failed", f"evaluate raised {type(error).__name__}: {said}", began)
    if not math.isfinite(value):
        return point(None, "failed", f"evaluate returned {value}", began)
    return point(value, "measured", "", began)


def _takes_grid(evaluate: Callable[..., Any]) -> bool:
    """Return whether an evaluation asks for the grid: a second argument without a default."""
    try:
        names = inspect.signature(evaluate).parameters.values()
    except (TypeError, ValueError):  # some builtins tell nothing
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(one.kind in kinds and one.default is one.empty for one in names) > 1
