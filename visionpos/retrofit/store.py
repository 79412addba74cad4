"""save and load: a model's weights with its position lineage in one safetensors file."""

from __future__ import annotations

import operator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visionpos import checkpoint
from visionpos.errors import PositionError
from visionpos.geometry import Grid
from visionpos.geometry.recipes import recipe_of
from visionpos.retrofit.attach import attachments
from visionpos.retrofit.kinds import check_kinds, check_model
from visionpos.retrofit.layouts import check_rows
from visionpos.retrofit.lineage import lineage
from visionpos.retrofit.lineage_record import (
    keep_record,
    lineage_record,
    read_record,
    record_of_tensors,
)
from visionpos.retrofit.patches import kernel_record
from visionpos.retrofit.paths import find
from visionpos.retrofit.records import TableRecord, records_of, remember
from visionpos.retrofit.seams import row_of
from visionpos.retrofit.sizes import check_thawed
from visionpos.retrofit.tables import Table, tables_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

_SOURCE = "visionpos_source."
_FIRST = f"{_SOURCE}table"  # what the first version called the source of the model's only table


def save(
    model: nn.Module,
    path: str | Path,
    *,
    source: str = "",
    record: Mapping[str, Any] | None = None,
) -> None:
    """Write a model's state dict and lineage to a safetensors file, whole or not at all.

    Args:
        model: a timm model whose class has a row in the seam table, attached and resized as it may be.
        path: file to write.
        source: free text for the lineage: the checkpoint these weights started from.
        record: laid on the lineage record: phase and step of the run, what it was trained on, rows of an audit; see
            `lineage_record`. The record of the file that the model came from is carried on.

    Raises:
        PositionError: if the file cannot be written, or the record breaks its schema.
    """
    check_kinds("path", path, str, Path)
    check_thawed(model, "saved with a lineage")
    found, told = lineage(model, source=source), lineage_record(model, record)
    tensors = dict(model.state_dict())
    tensors |= {f"{_SOURCE}{path}": record.source for path, record in records_of(model).items()}
    checkpoint.save(path, tensors, found, record_of_tensors(told, tensors))


def load(model: nn.Module, path: str | Path) -> checkpoint.Lineage:
    """Read a file written by `save` into a model of the same lineage, and return the lineage.

    Constant strengths are set to the file's. Tables that were resized bring the tables they were resized from, so that
    the next resize starts from there.

    Args:
        model: with the same encodings attached and the same image size.
        path: file to read.

    Raises:
        PositionError: if the lineages differ (naming every field), or tensors are missing, unknown or of another
            shape; the model is then unchanged.
    """
    check_model(model)
    check_kinds("path", path, str, Path)
    tensors, found = checkpoint.load(path)
    told = read_record(path)
    sources = _sources(model, tensors)
    checkpoint.check(found, lineage(model), path=path)
    strengths = _strengths(model, found)
    faults = _misfits(tensors, model.state_dict())
    faults += [
        f"strength of {name} is {value!r}"
        for name, value in strengths.items()
        if not _finite(value)
    ]
    tables = {table.path: table for table in tables_of(model)}
    recalled = {
        path: _record(model, tables.get(path), path, source, found)
        for path, source in sources.items()
    }
    faults += [
        f"source_grid_hw of {path} does not fit the {tuple(sources[path].shape)} it was resized from"
        for path, record in recalled.items()
        if record is None
    ]
    if faults:
        raise PositionError(
            f"path {path} does not fit this model: {'; '.join(faults)}. Build the model that wrote it."
        )
    model.load_state_dict(tensors)
    for name, value in strengths.items():
        attachments(model)[name].set_strength(value)
    for at, record in recalled.items():
        assert record is not None  # noqa: S101 (a file with a fault was refused above)
        remember(model, at, replace(record, resized=find(model, at).detach().clone()))
    keep_record(model, told)
    return found


def _strengths(model: nn.Module, found: checkpoint.Lineage) -> dict[str, Any]:
    """Return name -> strength in the file of every attachment whose strength is no parameter."""
    return {
        name: found.encodings[name]["strength"]
        for name, part in attachments(model).items()
        if part.learned_strength is None and "strength" in found.encodings[name]
    }


def _finite(value: Any) -> bool:
    # Strengths are float32 where they are learned: 1e300 is no finite one.
    return isinstance(value, (int, float)) and abs(value) < 3e38


def _misfits(tensors: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[str]:
    """Return one line for every tensor that is missing, unknown or of another shape."""
    faults = [f"{name} is missing" for name in wanted if name not in tensors]
    faults += [f"{name} is unknown to the model" for name in tensors if name not in wanted]
    return faults + [
        f"{name} has shape {tuple(tensors[name].shape)}, the model {tuple(wanted[name].shape)}"
        for name in wanted
        if name in tensors and tensors[name].shape != wanted[name].shape
    ]


def _sources(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Take the tables that others were resized from out of a file's tensors, and return them by path."""
    names = [name for name in tensors if name.startswith(_SOURCE)]
    paths = {
        name: row_of(model).table if name == _FIRST else name.removeprefix(_SOURCE)
        for name in names
    }
    return {paths[name]: tensors.pop(name) for name in names}


def _record(
    model: Any, table: Table | None, path: str, source: Tensor, found: checkpoint.Lineage
) -> TableRecord | None:
    """Return where a table came from, as the file tells it; None if the two do not fit each other."""
    entry = found.tables.get(path, {})
    try:
        if table is None:
            return kernel_record(find(model, path), source)
        height, width = (operator.index(side) for side in entry["source_grid_hw"])
        recipe_of(entry["recipe"].removeprefix("direct:"))
        if height < 1 or width < 1 or source.ndim != len(table.shape):
            return None
        check_rows(source, table.seams.layout, (height, width), int(entry["prefix"]), table.extra)
        grid = Grid(*entry["grid_hw"])
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
        return None
    return TableRecord(source, Grid(height, width), grid, entry["recipe"], source)
