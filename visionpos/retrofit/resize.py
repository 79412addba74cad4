"""resize: move a timm model to a new image size; every position part of it follows.

Everything is computed and checked first and assigned last, so a refusal leaves the model as it was.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from visionpos.errors import PositionError
from visionpos.geometry import Grid
from visionpos.geometry.recipes import recipe_of
from visionpos.retrofit.checks import check_movable
from visionpos.retrofit.layouts import check_rows, moved_table
from visionpos.retrofit.patches import Kernel, patch_of
from visionpos.retrofit.records import (
    Moved,
    TableRecord,
    check_optimizer,
    move_moments,
    recipe_of_table,
    record_of,
    refill,
    remember,
    table_record,
)
from visionpos.retrofit.resizing import Move, move_patch, rewrite, scale
from visionpos.retrofit.rope import attached_at_extent, give_rope, spec_at_extent
from visionpos.retrofit.seams import ModelSeams, find, grid_of, matches, row_of, sides_of
from visionpos.retrofit.sizes import (
    check_thawed,
    checked_size,
    image_of,
    remember_image,
    target_grid,
)
from visionpos.retrofit.tables import Table, position_modules, tables_of
from visionpos.retrofit.undo import undoing
from visionpos.retrofit.windows import (
    policy_of,
    remember_policy,
    remembered_windows,
    window_arguments,
)

if TYPE_CHECKING:
    from visionpos.geometry.coords import Extent
    from visionpos.retrofit.paths import Sides
    from visionpos.retrofit.windows import Windows

__all__ = ["TableRecord", "remember", "resize", "table_record", "target_grid"]


@torch.inference_mode(mode=False)  # buffers made in inference mode could never train
@torch.no_grad()
def resize(
    model: nn.Module,
    size_hw: tuple[int, int],
    *,
    recipe: str | None = None,
    patch: int | tuple[int, int] | None = None,
    windows: Windows | None = None,
    extent: Extent | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Move a model to a new image size, in place.

    Every learned table is evaluated on its new grid or window by its recipe, always from the table that was trained:
    there and back is exact. Parameter objects stay the same. The model's own rotary encoding, and every attached
    encoding, serve the new grid.

    Args:
        model: a timm model whose class has a row in the seam table.
        size_hw: new image (height, width) in pixels, multiples of what the class cuts maps by.
        recipe: how tables are resampled; that of the source that wrote the weights when None (see `recipe_for`).
        patch: new patch (height, width) in pixels, or one side of it; the kernel is resampled as FlexiViT does, so that
            images resized with it give the same tokens. None keeps it.
        windows: "keep" the windows of attention, clamped to small maps, "scale" them with the map, or (rows, columns)
            in cells; None is "keep" for Swin and Swin-V2, as creating one at a size does, and "scale" for the others.
        extent: what the new size means to rotary encodings: "trained" is the same view with more tokens (coordinates
            keep their span), "index" a wider view at the same scale (coordinates run on); None keeps each encoding's
            habit.
        optimizer: holds the tables' Parameters; its moments are resampled like the tables (and kept above 0 where they
            were).

    Raises:
        PositionError: if the class has no row or cannot serve the size, a table does not belong to its grid, an extent
            or policy cannot be given, or optimizer is none. Resize before wrapping in DDP, which keeps the old table's
            gradient.

    Example:
        >>> import timm
        >>> model = timm.create_model("vit_tiny_patch16_224", num_classes=0)
        >>> resize(model, (320, 448))
        >>> model(torch.zeros(1, 3, 320, 448)).shape
        torch.Size([1, 192])
    """
    whole: Any = model
    row = row_of(whole)
    check_thawed(whole, "resized")
    check_movable(whole, row)
    source = grid_of(whole) if row.patches or extent is not None else None
    cut = patch_of(whole, row, patch)
    size = checked_size(whole, row, size_hw, cut)
    _check_choices(extent, recipe, optimizer)
    policy = policy_of(row, whole, windows)
    specs: list[tuple[Any, Any]] = []
    rope_spec = None
    if extent is not None and source is not None:
        rope_spec = spec_at_extent(whole, extent, source)
        specs = attached_at_extent(whole, extent, source)
    with undoing(whole):
        arguments = window_arguments(row, whole, policy, size)
        arguments |= {} if cut is None else {"patch_size": cut}
        moved = _moved(whole, row, size, recipe, arguments)
        remember_image(whole, size)
        remember_policy(whole, policy)
    for table in moved:
        refill(table)
        remember(whole, table.path, table.record)
        if optimizer is not None:
            move_moments(optimizer, table)
    if rope_spec is not None:
        give_rope(whole, rope_spec, grid_of(whole))
    for encoding, spec in specs:
        encoding.spec = spec


def _check_choices(extent: Any, recipe: Any, optimizer: Any) -> None:
    """Refuse words that mean nothing, and what is no optimizer."""
    if extent not in (None, "trained", "index"):
        raise PositionError(f"extent is {extent!r}; it must be 'trained', 'index' or None.")
    if recipe is not None:
        recipe_of(recipe.removeprefix("direct:") if isinstance(recipe, str) else repr(recipe))
    if optimizer is not None:
        check_optimizer(optimizer)


def _moved(
    model: Any, row: ModelSeams, size: Sides, recipe: str | None, arguments: dict[str, Any]
) -> list[Moved]:
    """Write the new size into the model, and return every table evaluated for it; nothing is put into tables yet."""
    move = Move(model=model, base=model, old=image_of(model), new=size)
    tables = [table for table in tables_of(model) if table.moves]
    before = {table.path: _before(model, table, recipe) for table in tables}
    kernel = Kernel(model, row, arguments["patch_size"]) if "patch_size" in arguments else None
    with remembered_windows(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of timm's own resampling, whose result is not used
        if row.resize == "native":
            _native(
                model, row, size, [table for table in tables if table.module is None], arguments
            )
        else:
            _in_place(move, row, arguments.get("patch_size"))
    moved: list[Moved] = [] if kernel is None else [kernel.moved()]
    for table in tables:
        held = before[table.path]
        table.owner._parameters[table.name] = held.parameter  # noqa: SLF001 (timm put another object there)
        sides = _sides(table, move, held.sides)
        if sides != held.sides:
            moved.append(_evaluated(table, held, sides))
            _follow(table, move, sides)
    return moved


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """What a table was before the model changed its size."""

    parameter: nn.Parameter
    sides: Sides
    prefix: int
    extra: int
    recipe: str
    record: TableRecord | None


def _before(model: Any, table: Table, recipe: str | None) -> _Held:
    """Return what a table is now, refusing one that does not fit its grid."""
    sides = table.sides
    if sides is None:
        raise PositionError(
            f"{table.path} is on the meta device, where the index that tells its grid holds nothing. Give the model "
            "real tensors first."
            if table.value.is_meta
            else f"{table.path} has no grid: the model was made without an image size. Create it with img_size=."
        )
    name = recipe_of_table(model, table) if recipe is None else recipe
    check_rows(table.value, table.seams.layout, sides, table.prefix, table.extra)
    return _Held(
        table.value,
        sides,
        table.prefix,
        table.extra,
        name,
        record_of(model, table.path, table.value),
    )


def _evaluated(table: Table, held: _Held, sides: Sides) -> Moved:
    """Return a table on its new sides, evaluated from the one that was last trained."""
    trained, source = held.parameter.detach().clone(), held.sides
    if held.record is not None:
        came = held.record.source_grid
        trained, source = held.record.source.to(held.parameter.device), (came.height, came.width)

    def evaluate(values: torch.Tensor, start: Sides) -> torch.Tensor:
        return moved_table(
            values,
            layout=table.seams.layout,
            source=start,
            target=sides,
            recipe=held.recipe,
            prefix=held.prefix,
            extra=held.extra,
        )

    record = TableRecord(
        source=trained,
        source_grid=Grid(*source),
        grid=Grid(*sides),
        recipe=held.recipe,
        resized=evaluate(trained, source).clone(),
    )
    return Moved(
        path=table.path,
        parameter=held.parameter,
        before=tuple(held.parameter.shape),
        record=record,
        evaluate=lambda values: evaluate(values, held.sides),
        channels_last=table.seams.layout not in ("nchw", "heads_map", "heads_offsets"),
    )


def _sides(table: Table, move: Move, old: Sides) -> Sides:
    """Return the sides that a table has to serve now; an axis that it does not have stays as it is."""
    target = table.seams.target
    if target is None:
        return table.sides or old
    if isinstance(target, int):
        return move.new[0] // target, move.new[1] // target
    axes = {"axis_h": (0,), "axis_w": (1,)}.get(table.seams.layout, (0, 1))
    if target == "patch":
        found = sides_of(find(move.model, row_of(move.model).patch_embed)) or old
    else:
        found = scale(move, old, axes)
    return (found[0] if 0 in axes else old[0], found[1] if 1 in axes else old[1])


def _native(
    model: Any, row: ModelSeams, size: Sides, own: list[Table], arguments: dict[str, Any]
) -> None:
    """Let timm move its own bookkeeping, the model's own tables out of its sight: it would resample them once more."""
    if not hasattr(model, "set_input_size"):
        raise PositionError(
            f"this timm cannot move a {type(model).__name__} to another size; 1.0.31 can. Update timm."
        )
    patch = find(model, row.patches[0]) if row.patches else None
    free = patch is not None and getattr(patch, "img_size", None) is None
    for table in own:
        table.owner._parameters[table.name] = None  # noqa: SLF001
    try:
        model.set_input_size(img_size=size, **arguments)
    except (AssertionError, RuntimeError, ValueError, TypeError) as error:
        raise PositionError(
            f"size {size} cannot be given to this {type(model).__name__}: {' '.join(str(error).split())[:200]}"
        ) from error
    if patch is not None and free:
        patch.img_size = None  # one graph for all sizes stays one


def _in_place(move: Move, row: ModelSeams, cut: Sides | None) -> None:
    """Rewrite what the model and its position modules keep of the size."""
    for path in row.patches:
        for _, patch in matches(move.model, path):
            move_patch(patch, move.new, cut)
    for rule in row.sizes:
        rewrite(move, rule)
    for _, module, found in position_modules(move.model):
        for rule in found.sizes:
            rewrite(dataclasses.replace(move, base=module), rule)


def _follow(table: Table, move: Move, sides: Sides) -> None:
    """Rebuild the buffers of a position module whose table has other sides now, and empty its caches."""
    if table.module is None:
        return
    for rule in table.module.follow:
        inside = dataclasses.replace(move, base=table.base)
        rewrite(inside, {**rule, "path": rule["buffer"], "sides": sides})
    for name in table.module.clear:
        setattr(table.base, name, {})
