"""Records: where every resized table came from, so that a chain of resizes loses nothing; and its Parameter's life."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from visionpos.errors import PositionError
from visionpos.retrofit.paths import find
from visionpos.retrofit.recipes import recipe_for
from visionpos.retrofit.tables import tables_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from visionpos.geometry import Grid
    from visionpos.retrofit.tables import Table

_RECORDS = "visionpos_tables"


@dataclass(frozen=True, slots=True, eq=False)
class TableRecord:
    """What a table was before it was resized.

    Args:
        source: the table as it was trained, in its own layout.
        source_grid: grid or window that it served.
        grid: grid or window it was resized to.
        recipe: recipe used.
        resized: the result; a table that has changed since is its own source.
    """

    source: Tensor
    source_grid: Grid
    grid: Grid
    recipe: str
    resized: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Moved:
    """A table evaluated for another size, not yet put into the model.

    Args:
        path: its path in the model.
        parameter: the object that keeps its identity.
        before: the shape it had.
        record: where it came from and what it became.
        evaluate: does the same to anything shaped like the table before.
        channels_last: whether its last axis is no axis of places.
    """

    path: str
    parameter: nn.Parameter
    before: tuple[int, ...]
    record: TableRecord
    evaluate: Callable[[Tensor], Tensor]
    channels_last: bool


def records_of(model: Any) -> dict[str, TableRecord]:
    """Return path -> record of everything that was resized and has not changed since."""
    found: dict[str, TableRecord] = {}
    for path in getattr(model, _RECORDS, {}):
        value = find(model, path)
        record = None if value is None else record_of(model, path, value)
        if record is not None:
            found[path] = record
    return found


def record_of(model: Any, path: str, table: Tensor) -> TableRecord | None:
    """Return how a table was resized, or None if it never was or has been trained or loaded since."""
    record: TableRecord | None = getattr(model, _RECORDS, {}).get(path)
    if record is None or record.resized.shape != table.shape:
        return None
    if table.is_meta or record.resized.is_meta:  # nothing to compare
        return None
    return record if torch.equal(record.resized.to(table), table) else None


def table_record(model: nn.Module) -> TableRecord | None:
    """Return how the model's first table was resized, or None if it never was or has been trained or loaded since."""
    first = next(
        (table for table in tables_of(model) if isinstance(table.value, nn.Parameter)), None
    )
    return None if first is None else record_of(model, first.path, first.value)


def remember(model: Any, path: str, record: TableRecord) -> None:
    """Keep with the model where a table came from; records follow deepcopy and pickle, not the state dict."""
    kept = {**getattr(model, _RECORDS, {}), path: record}
    object.__setattr__(model, _RECORDS, kept)


def recipe_of_table(model: Any, table: Table) -> str:
    """Return the recipe that resamples a table: the checkpoint's, by its name, or the one of the class."""
    chosen = table.seams.recipe
    return recipe_for(model)[0] if chosen == "checkpoint" else chosen


def refill(moved: Moved) -> None:
    """Put resized values into the Parameter object that the model has, with an autograd history of its own."""
    table = moved.parameter
    values = moved.record.resized.to(table.dtype).clone()
    fresh = nn.Parameter(values, requires_grad=table.requires_grad)
    try:
        # A graph of the old size may still be alive: it keeps the old tensor, the Parameter object gets the new one.
        torch.utils.swap_tensors(table, fresh)
    except (
        RuntimeError
    ):  # something holds a weak reference: a compiled graph, or a fake tensor's mode
        table.data = fresh.data
    table.grad = None


def check_optimizer(optimizer: Any) -> None:
    """Refuse what is no optimizer, before anything changes; one that does not hold a table has nothing to move."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise PositionError(
            f"optimizer is a {type(optimizer).__name__}; a torch.optim.Optimizer is required. Pass the one that trains "
            "this model, or leave it out."
        )


def move_moments(optimizer: torch.optim.Optimizer, moved: Moved) -> None:
    """Resample what an optimizer remembers of a table, cell by cell; what cannot be is forgotten."""
    state = optimizer.state.get(moved.parameter, {})
    after = tuple(moved.record.resized.shape)
    changed = [
        axis for axis, (old, new) in enumerate(zip(moved.before, after, strict=True)) if old != new
    ]
    for key, value in list(state.items()):
        if not isinstance(value, torch.Tensor) or value.ndim != len(moved.before):
            continue
        rows = (
            moved.channels_last and value.shape[:-1] == moved.before[:-1]
        )  # factored: a mean over channels
        if value.shape == moved.before or rows:
            found = moved.evaluate(value)
            # A cubic overshoots; a second moment must not become negative.
            state[key] = (found.clamp(min=0.0) if bool((value >= 0).all()) else found).clone()
        elif any(value.shape[axis] != 1 for axis in changed):
            optimizer.state.pop(moved.parameter)
            return
