"""save and load: a model's weights with its position lineage in one safetensors file."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

from visionpos import checkpoint
from visionpos.errors import PositionError
from visionpos.geometry import Grid
from visionpos.geometry.recipes import recipe_of
from visionpos.retrofit.attach import attachments
from visionpos.retrofit.describe import lineage
from visionpos.retrofit.resize import TableRecord, remember, table_record
from visionpos.retrofit.seams import grid_of, row_of

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

_SOURCE = "visionpos_source.table"


def save(model: nn.Module, path: str | Path, *, source: str = "") -> None:
    """Write a model's state dict and lineage to a safetensors file, whole or not at all.

    Args:
        model: a timm VisionTransformer or Eva, attached and resized as it may be.
        path: file to write.
        source: free text for the lineage: the checkpoint these weights started from.

    Raises:
        PositionError: if the file cannot be written.
    """
    tensors = dict(model.state_dict())
    record = table_record(model)
    if record is not None:
        tensors[_SOURCE] = record.source
    checkpoint.save(path, tensors, lineage(model, source=source))


def load(model: nn.Module, path: str | Path) -> checkpoint.Lineage:
    """Read a file written by `save` into a model of the same lineage, and return the lineage.

    Constant strengths are set to the file's. A table that was resized brings the table it was resized from, so that the
    next resize starts from there.

    Args:
        model: with the same encodings attached and the same image size.
        path: file to read.

    Raises:
        PositionError: if the lineages differ (naming every field), or tensors are missing, unknown or of another
            shape; the model is then unchanged.
    """
    tensors, found = checkpoint.load(path)
    source = tensors.pop(_SOURCE, None)
    checkpoint.check(found, lineage(model), path=path)
    strengths = _strengths(model, found)
    faults = _misfits(tensors, model.state_dict())
    faults += [
        f"strength of {name} is {value!r}"
        for name, value in strengths.items()
        if not _finite(value)
    ]
    if source is not None and not _fits(source, found.tables.get(row_of(model).table, {})):
        faults.append(
            f"source_grid_hw of the table does not fit the {source.shape[-2:]} it was resized from"
        )
    if faults:
        raise PositionError(
            f"path {path} does not fit this model: {'; '.join(faults)}. Build the model that wrote it."
        )
    model.load_state_dict(tensors)
    for name, value in strengths.items():
        attachments(model)[name].set_strength(value)
    if source is not None:
        _recall(model, source, found)
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


def _fits(source: Tensor, entry: dict[str, Any]) -> bool:
    """Return whether a table can be the one that the lineage says it was resized from."""
    try:
        height, width = (operator.index(side) for side in entry["source_grid_hw"])
        recipe_of(entry["recipe"])
        return source.shape[-2] == Grid(height, width).size + int(entry["prefix"])
    except (KeyError, TypeError, ValueError):
        return False


def _recall(model: Any, source: Tensor, found: checkpoint.Lineage) -> None:
    """Remember the table that the loaded one was resized from."""
    name = row_of(model).table
    table, entry = getattr(model, name), found.tables[name]
    record = TableRecord(
        source=source,
        source_grid=Grid(*entry["source_grid_hw"]),
        grid=grid_of(model),
        recipe=entry["recipe"],
        resized=table.detach().clone(),
    )
    remember(model, record)
