"""The words of the seam table, level one: what a row of configs/retrofit/models.yaml says; `seams` finds the rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

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
class DynamicSeams:
    """How `make_dynamic` lets every call have its own image size.

    Args:
        by: "visionpos" where its position modules are evaluated here, "timm" where the class resamples by itself.
        cells: rules of the position modules over the whole map: a regular expression of their `path`, and `floor` and
            `ceil`, in the words of `resizing`, that lead from the image to the map; the first that fits is used.
        fixed: patterns of tables that no other size can have.
        windows: whether tables outside `cells` belong to windows, which stay.
        multiple: both image sides must be multiples of this, as in `ModelSeams`.
        coarser: as in `ModelSeams`.
    """

    by: Literal["visionpos", "timm"] = "visionpos"
    cells: tuple[dict[str, Any], ...] = ()
    fixed: tuple[str, ...] = ()
    windows: bool = False
    multiple: int | str = 1
    coarser: tuple[tuple[str, int], ...] = ()


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
        still: rotary modules of its own that nothing here moves, if it has any.
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
        dynamic: how every call can have its own image size, None if timm or nobody sees to it.
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
    still: tuple[str, ...] = ()
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
    dynamic: DynamicSeams | None = None
    note: str = ""

    @property
    def table(self) -> str:
        """Return the path of the model's first table, "" if it has none of its own."""
        return self.tables[0].path if self.tables else ""
