"""The seam table, level one: for a model class, where its grid, tables, rotary encoding and blocks are.

Whatever attaches, resizes or describes reads these rows; `ports` has those of attention classes, `tables` those of
position modules. The rows are data, configs/retrofit/models.yaml; `seam_rows` has their
words, and here is how they are found.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from torch import nn

from visionpos.config import overlay, read_yaml, shipped
from visionpos.errors import PositionError
from visionpos.geometry import Grid
from visionpos.retrofit.kinds import check_model
from visionpos.retrofit.paths import find, matches, place, sides_of
from visionpos.retrofit.seam_rows import DynamicSeams, ModelSeams, TableSeams, WindowSeams

__all__ = [
    "DynamicSeams",
    "ModelSeams",
    "TableSeams",
    "WindowSeams",
    "blocks_of",
    "class_row",
    "find",
    "grid_of",
    "laid",
    "matches",
    "model_rows",
    "place",
    "prefix_of",
    "row_of",
    "sides_of",
    "table_prefix",
]


@lru_cache(maxsize=1)
def model_rows() -> dict[str, ModelSeams]:
    """Return class name (below timm.models) -> row, in the order of the file."""
    text = shipped("retrofit")["models"].read_text(encoding="utf-8")
    rows: dict[str, Any] = read_yaml(text, source="models.yaml")["rows"]
    return {name: _row(laid(rows, data)) for name, data in rows.items()}


def laid(rows: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    """Return the data of a row with the row that it is `like` laid under it."""
    own = {key: value for key, value in data.items() if key != "like"}
    return overlay(laid(rows, rows[data["like"]]), own) if "like" in data else own


def _row(data: dict[str, Any]) -> ModelSeams:
    """Return the row that plain data describes."""
    return ModelSeams(
        **{
            **data,
            "tables": tuple(TableSeams(**entry) for entry in data.get("tables", ())),
            "patches": tuple(data.get("patches", ())),
            "still": tuple(data.get("still", ())),
            "sizes": tuple(data.get("sizes", ())),
            "coarser": _coarser(data),
            "image": tuple(data["image"]) if "image" in data else None,
            "windows": WindowSeams(**data["windows"]) if "windows" in data else None,
            "dynamic": _dynamic(data["dynamic"]) if "dynamic" in data else None,
        }
    )


def _dynamic(data: dict[str, Any]) -> DynamicSeams:
    """Return what plain data says of `make_dynamic`."""
    lists = {name: tuple(data.get(name, ())) for name in ("cells", "fixed")}
    return DynamicSeams(**{**data, **lists, "coarser": _coarser(data)})


def _coarser(data: dict[str, Any]) -> tuple[tuple[str, int], ...]:
    return tuple((path, int(by)) for path, by in data.get("coarser", ()))


def class_row(model: Any) -> tuple[str, ModelSeams] | None:
    """Return (class name, row) of the nearest base class that has one, or None.

    Raises:
        PositionError: if model is no module at all.
    """
    check_model(model)
    rows = model_rows()
    for base in type(model).__mro__:
        name = f"{base.__module__}.{base.__qualname__}".removeprefix("timm.models.")
        if base.__module__.startswith("timm.models.") and name in rows:
            return name, rows[name]
    return None


def row_of(model: nn.Module) -> ModelSeams:
    """Return the row of a model's class.

    Raises:
        PositionError: if the class has no row; the message lists those that have.
    """
    found = class_row(model)
    if found is not None:
        return found[1]
    known = ", ".join(name.rpartition(".")[2] for name in model_rows())
    raise PositionError(
        f"model is a {type(model).__name__}, which is no class that visionpos knows; {known} and their subclasses are. "
        "Unwrap the timm model first (model.model, model.module), or create it without features_only."
    )


def blocks_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (path, block) of every block, in the order in which tokens meet them."""
    return [
        (f"{path}.{name}", block)
        for path, container in matches(model, row_of(model).blocks)
        if isinstance(container, (nn.Sequential, nn.ModuleList))
        for name, block in container.named_children()
    ]


def prefix_of(model: Any) -> int:
    """Return how many tokens without position go through the blocks; 0 where only a block can tell ("rest")."""
    prefix = row_of(model).prefix
    if isinstance(prefix, int):
        return prefix
    return 0 if prefix == "rest" else int(find(model, prefix) or 0)


def grid_of(model: Any) -> Grid:
    """Return the token grid that the model's tables now serve: that of its patch embedding.

    Raises:
        PositionError: if the model was made without an image size, or its class keeps no such grid.
    """
    sides = sides_of(next((part for _, part in matches(model, row_of(model).patch_embed)), None))
    if sides is None:
        raise PositionError(
            "model has no grid: its patch_embed.img_size is None, or its class keeps none; a table cannot be placed "
            "without one. Create the model with img_size=, or read the grids of its parts from describe(model)."
        )
    return Grid(*sides)


def table_prefix(model: Any) -> int:
    """Return how many leading rows of the model's table belong to prefix tokens."""
    return 0 if getattr(model, "no_embed_class", False) else int(model.num_prefix_tokens)
