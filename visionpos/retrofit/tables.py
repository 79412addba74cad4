"""The seam table, level two: the position modules of a model, and every table in it with its sides.

Rows of position modules are data, configs/retrofit/modules.yaml; they are found by class in any model.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from visionpos.config import read_yaml, shipped
from visionpos.retrofit.indices import sides_of_index
from visionpos.retrofit.layouts import sides_of_shape
from visionpos.retrofit.seams import (
    TableSeams,
    class_row,
    find,
    laid,
    matches,
    sides_of,
    table_prefix,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from visionpos.retrofit.paths import Sides


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSeams:
    """Where the position parts of one module class are, as attribute paths of the module.

    Args:
        tables: its tables and networks; the first names the part.
        sizes: what is rewritten at another image size, in the words of `resizing`.
        follow: buffers rebuilt when the sides of the tables have changed.
        clear: dictionaries emptied then.
        reference: the attribute that says which window coordinates are measured in, for `windows`.
    """

    tables: tuple[TableSeams, ...]
    sizes: tuple[dict[str, Any], ...] = ()
    follow: tuple[dict[str, Any], ...] = ()
    clear: tuple[str, ...] = ()
    reference: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """One table of a model.

    Args:
        path: its attribute path from the model.
        owner: module that holds it.
        name: its name there.
        seams: its row.
        base: what paths in the row start from: the model, or the position module.
        model: the model.
        module: row of the position module, None for a table of the model itself.
    """

    path: str
    owner: Any
    name: str
    seams: TableSeams
    base: Any
    model: Any
    module: ModuleSeams | None = None

    @property
    def value(self) -> Any:
        """Return the parameter, or the network."""
        return getattr(self.owner, self.name) if self.name else self.owner

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the size of the parameter, or of the first one of the network, () if there is none."""
        value = self.value
        first = value if isinstance(value, torch.Tensor) else next(value.parameters(), None)
        return () if first is None else tuple(first.shape)

    @property
    def prefix(self) -> int:
        """Return the leading rows that belong to no cell."""
        rows = self.seams.prefix
        if isinstance(rows, int):
            return rows
        return table_prefix(self.model) if rows == "embedded" else int(find(self.base, rows) or 0)

    @property
    def extra(self) -> int:
        """Return the trailing rows that belong to no cell: three a prefix token, or as many as the row says."""
        rows = self.seams.extra
        return rows if isinstance(rows, int) else 3 * int(find(self.base, rows) or 0)

    @property
    def sides(self) -> Sides | None:
        """Return (rows, columns) of the grid or window that the table now serves, None if it has no such thing."""
        grid = self.seams.grid
        if grid == "shape":
            return sides_of_shape(self.seams.layout, self.shape)
        if grid == "offsets_of_index":
            return sides_of_index(self.owner.attention_bias_idxs)
        return sides_of(find(self.base, self.inner(grid)))

    def inner(self, path: str) -> str:
        """Return a path with `*` replaced by the number in the table's own path."""
        number = re.search(r"\d+", self.path)
        return path.replace("*", number[0]) if number else path

    @property
    def moves(self) -> bool:
        """Return whether another image size needs another table."""
        if not self.seams.moves or not isinstance(self.value, nn.Parameter):
            return False
        unless = self.seams.unless
        return unless is None or not find(self.base, self.inner(unless))


@lru_cache(maxsize=1)
def module_rows() -> dict[str, ModuleSeams]:
    """Return class name (below timm) -> row, in the order of the file."""
    text = shipped("retrofit")["modules"].read_text(encoding="utf-8")
    rows: dict[str, Any] = read_yaml(text, source="modules.yaml")["rows"]
    return {name: _row(laid(rows, data)) for name, data in rows.items()}


def _row(data: dict[str, Any]) -> ModuleSeams:
    """Return the row that plain data describes."""
    lists = {name: tuple(data.get(name, ())) for name in ("sizes", "follow", "clear")}
    tables = tuple(TableSeams(**entry) for entry in data["tables"])
    return ModuleSeams(tables=tables, reference=data.get("reference"), **lists)


def module_row(module: nn.Module) -> ModuleSeams | None:
    """Return the row of the nearest base class that has one, or None."""
    rows = module_rows()
    for base in type(module).__mro__:
        if base.__module__.startswith("timm."):
            name = f"{base.__module__}.{base.__qualname__}".removeprefix("timm.")
            if name in rows:
                return rows[name]
    return None


def position_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module, ModuleSeams]]:
    """Yield (path, module, row) of every position module, in the order of the model."""
    for path, module in model.named_modules():
        row = None if path.startswith("visionpos.") else module_row(module)
        if row is not None:
            yield path, module, row


def tables_of(model: nn.Module) -> list[Table]:
    """Return every table and position network of a model: its own, then those of its position modules."""
    found = class_row(model)
    own = [
        Table(path, *_holder(model, path), seams, model, model)
        for seams in (() if found is None else found[1].tables)
        for path, value in matches(model, seams.path)
        if seams.axes is None or value.ndim == seams.axes
    ]
    known = {table.path for table in own}
    for path, module, row in position_modules(model):
        for seams in row.tables:
            inside = f"{path}.{seams.path}".strip(".")
            if inside not in known and (not seams.path or find(module, seams.path) is not None):
                holder, name = _holder(module, seams.path) if seams.path else (module, "")
                own.append(Table(inside, holder, name, seams, module, model, row))
    return own


def _holder(model: nn.Module, path: str) -> tuple[Any, str]:
    """Return (module that holds the last name of a path, that name)."""
    parent, _, name = path.rpartition(".")
    return (find(model, parent) if parent else model), name
