"""The seam table, level one: for a model class, where its grid, tables, rotary encoding and blocks are.

Whatever attaches, resizes or describes reads these rows; `ports` has those of attention classes, `tables` those of
position modules. The rows are data, configs/retrofit/models.yaml; here are their words and how they are found.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from torch import nn

from visionpos.config import overlay, read_yaml, shipped
from visionpos.errors import PositionError
from visionpos.geometry import Grid
from visionpos.retrofit.paths import find, matches, place, sides_of

__all__ = [
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

# Where a call learns its grid: a hook on the patch module, the shape of an attention's input, an attribute of the
# attention, an argument of the block, the model's own permutation, an enclosing module, patch coordinates.
GridKind = Literal[
    "patch_embed", "input_map", "attribute", "argument", "unrolled", "container", "coords"
]
# What a block takes and gives: `nlc` [b, n, d], `nhwc` and `nchw` maps, `tuple1` and the like where tokens are one item
# of a tuple or list, `_hw` and `_size` where the grid is a further argument.
BlockLayout = Literal[
    "nlc",
    "nhwc",
    "nchw",
    "blocks",
    "tuple1",
    "tuple0_nlc",
    "tuple0_nchw",
    "list_nlc",
    "nlc_unrolled",
    "nlc_hw",
    "nlc_size",
]
# How a model comes to another size: timm's set_input_size, rewriting its parts, nothing to do, squares alone.
ResizeKind = Literal["native", "in_place", "free", "square"]
TableLayout = Literal[
    "nlc",
    "nc",
    "nhwc",
    "nchw",
    "blocks",
    "offsets_heads",
    "heads_map",
    "heads_offsets",
    "axis_h",
    "axis_w",
    "axis_line",
    "hwc",
    "none",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSeams:
    """One parameter that holds positions, or the parameters of one network that makes them.

    Args:
        path: attribute path from the owner of the row; `*` stands for any name.
        kind: "abs", "abs_tiled", "rel_table", "abs_offset", "axis_table", "log_mlp", "offset_feature", "rotary",
            "fourier", "conv", "lambda" or "index_lookup".
        layout: order of its axes.
        grid: where its sides are: "shape" of the table, or an attribute path from the owner.
        prefix: leading rows that belong to no cell: a number, an attribute path, or "embedded" (the model's prefix
            tokens, unless it embeds patches alone).
        extra: trailing rows that belong to no cell: a number, or an attribute path whose value counts thrice.
        recipe: how it is resampled: "checkpoint" looks it up by the model's name, "runtime" leaves it to the model.
        moves: whether another image size needs another table.
        target: how new sides are found where the grid is read from the shape: pixels a cell, "ratio" (in proportion to
            the image), or "patch" (the grid of the patch embedding).
        unless: attribute path; where it holds a true value the table stays as it is.
        axes: how many axes the table has, where one name stands for tables of several layouts.
    """

    path: str
    kind: str = "abs"
    layout: TableLayout = "none"
    grid: str = "shape"
    prefix: int | str = 0
    extra: int | str = 0
    recipe: str = "checkpoint"
    moves: bool = True
    target: int | str | None = None
    unless: str | None = None
    axes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSeams:
    """How attention windows follow the image, where the class has a choice.

    Args:
        default: "keep" the window, clamped to the map, or "scale" it with the map.
        blocks: containers of the blocks that have a window, "" if the policy is the class's own.
        attribute: name of the window on such a block.
        keeps: whether windows can be kept.
    """

    default: str
    blocks: str = ""
    attribute: str = ""
    keeps: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSeams:
    """Where the position parts of one model class are, as attribute paths of the model.

    Args:
        grid: where a call learns its token grid.
        blocks: containers of the blocks; `*` stands for any name, `|` between alternatives. See `blocks_of`.
        layout: what a block takes and gives.
        prefix: tokens without position inside blocks: a number, an attribute path, or "rest" (what is left after
            the grid). See `prefix_of`.
        patch_embed: module whose output begins the tokens.
        entry: module whose output enters the first block, if one does.
        patch_drop: module that drops patches in training, if there is one.
        rope: the model's own rotary module, if it has one.
        tables: the tables that belong to the model itself.
        mixers: containers of larger units, where tokens can be mixed on a map, with their layout.
        resize: how the model comes to another size.
        patches: modules that know the image size, moved to it by themselves.
        repatch: whether the first of them can cut patches of another size.
        multiple: both image sides must be multiples of this: a number, an attribute path, or "blocks".
        coarser: (attribute path, pixels a cell) of blocks of cells that must fit whole, too.
        image: (attribute path of a map, or "table", pixels a cell) that tell the image size.
        sizes: what is to be rewritten at another size, in order; the words are those of `resizing`.
        windows: how windows follow.
        note: what a reader of `describe` should know of the class's tables.
    """

    grid: GridKind
    blocks: str
    layout: BlockLayout
    prefix: int | str = 0
    patch_embed: str = "patch_embed"
    entry: str | None = None
    patch_drop: str | None = None
    rope: str | None = None
    tables: tuple[TableSeams, ...] = ()
    mixers: str | None = None
    mixer_layout: BlockLayout | None = None
    resize: ResizeKind = "in_place"
    patches: tuple[str, ...] = ()
    repatch: bool = False
    multiple: int | str = 1
    coarser: tuple[tuple[str, int], ...] = ()
    image: tuple[str, int | str] | None = None
    sizes: tuple[dict[str, Any], ...] = ()
    windows: WindowSeams | None = None
    note: str = ""

    @property
    def table(self) -> str:
        """Return the path of the model's first table, "" if it has none of its own."""
        return self.tables[0].path if self.tables else ""


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
            "sizes": tuple(data.get("sizes", ())),
            "coarser": tuple((path, int(by)) for path, by in data.get("coarser", ())),
            "image": tuple(data["image"]) if "image" in data else None,
            "windows": WindowSeams(**data["windows"]) if "windows" in data else None,
        }
    )


def class_row(model: Any) -> tuple[str, ModelSeams] | None:
    """Return (class name, row) of the nearest base class that has one, or None.

    Raises:
        PositionError: if model is no module at all.
    """
    if not isinstance(model, nn.Module):
        raise PositionError(
            f"model is {type(model).__name__}; a timm model is required. Create one with timm.create_model, or with "
            "retrofit.create, and pass it."
        )
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
        f"model is a {type(model).__name__}, which has no row in the seam table; {known} and their subclasses have. "
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
