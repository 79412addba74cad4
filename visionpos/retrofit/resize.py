"""resize: move a timm model to a new image size; every position part of it follows.

Everything is computed and checked first and assigned last, so a refusal leaves the model as it was.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from visionpos.encodings import Rotary
from visionpos.errors import PositionError
from visionpos.geometry import CoordSpec, Grid, resample
from visionpos.geometry.recipes import recipe_of
from visionpos.retrofit.attach import attachments
from visionpos.retrofit.recipes import recipe_for
from visionpos.retrofit.rope import give_rope, spec_at_extent, with_extent
from visionpos.retrofit.seams import grid_of, row_of, table_prefix

if TYPE_CHECKING:
    from torch import Tensor

    from visionpos.geometry.coords import Extent

_RECORD = "visionpos_table"
_LARGEST = 1 << 24  # pixels a side


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TableRecord:
    """What the table was before it was resized, so that a chain of resizes never loses information.

    Args:
        source: `[1, rows, d]` the table as it was trained.
        source_grid: its grid.
        grid: grid it was resized to.
        recipe: recipe used.
        resized: the result; a table that has changed since is its own source.
    """

    source: Tensor
    source_grid: Grid
    grid: Grid
    recipe: str
    resized: Tensor


@torch.no_grad()
def resize(
    model: nn.Module,
    size_hw: tuple[int, int],
    *,
    recipe: str | None = None,
    extent: Extent | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Move a model to a new image size, in place.

    The learned table is evaluated on the new grid by the checkpoint's recipe, always from the table that was trained:
    there and back is exact. Its Parameter object stays the same. The model's own rotary encoding, and every attached
    encoding, serve the new grid.

    Args:
        model: a timm VisionTransformer or Eva, or a subclass.
        size_hw: new image (height, width) in pixels, multiples of the patch.
        recipe: how the table is resampled; the recipe of the source that wrote the weights when None (see
            `recipe_for`).
        extent: what the new size means to rotary encodings: "trained" is the same view with more tokens (coordinates
            keep their span), "index" a wider view at the same scale (coordinates run on); None keeps each encoding's
            habit.
        optimizer: holds the table's Parameter; its moments are resampled like the table (and kept above 0 where they
            were).

    Raises:
        PositionError: if the size is not divisible, the table does not belong to the model's grid, an extent cannot be
            given, or optimizer is none. Resize before wrapping in DDP, which keeps the old table's gradient.

    Example:
        >>> import timm
        >>> model = timm.create_model("vit_tiny_patch16_224", num_classes=0)
        >>> resize(model, (320, 448))
        >>> model(torch.zeros(1, 3, 320, 448)).shape
        torch.Size([1, 192])
    """
    whole: Any = model
    row = row_of(whole)
    source = grid_of(whole)
    target = target_grid(getattr(whole, row.patch_embed), size_hw)
    if extent not in (None, "trained", "index"):
        raise PositionError(f"extent is {extent!r}; it must be 'trained', 'index' or None.")
    rope_spec = None if extent is None else spec_at_extent(whole, extent, source)
    specs = {} if extent is None else _specs_at_extent(whole, extent, source)
    table: nn.Parameter | None = getattr(whole, row.table)
    name = recipe_for(whole)[0] if recipe is None else recipe
    recipe_of(name)
    if optimizer is not None:
        _check_optimizer(optimizer)
    record = None if table is None else _moved(whole, table, source, target, name)
    if table is not None and record is not None:
        _refill(table, record)
        setattr(whole, row.table, None)  # timm would resample it once more
    _set_size(whole, size_hw)
    if table is not None and record is not None:
        setattr(whole, row.table, table)
        remember(whole, record)
        if optimizer is not None:
            _move_moments(optimizer, table, source, target, name, table_prefix(whole))
    if rope_spec is not None:
        give_rope(whole, rope_spec, target)
    for name, spec in specs.items():
        attachments(whole)[name].encoding.spec = spec


def table_record(model: nn.Module) -> TableRecord | None:
    """Return how the model's table was resized, or None if it never was or has been trained or loaded since."""
    whole: Any = model
    record: TableRecord | None = getattr(whole, _RECORD, None)
    table: Tensor | None = getattr(whole, row_of(whole).table)
    if record is None or table is None or record.resized.shape != table.shape:
        return None
    return record if torch.equal(record.resized.to(table), table) else None


def remember(model: Any, record: TableRecord) -> None:
    """Keep with the model where its table came from; the record follows deepcopy and pickle, not the state dict."""
    object.__setattr__(model, _RECORD, record)


def target_grid(patch: Any, size_hw: tuple[int, int]) -> Grid:
    """Return the grid of the new size, refusing sides that the patch embedding would silently crop."""
    step_hw = tuple(int(step) for step in patch.feat_ratio(as_scalar=False))
    try:
        # Whole numbers of any kind; int() would cut 64.5 to 64 without a word.
        height, width = (operator.index(side) for side in size_hw)
        if max(height, width) <= _LARGEST:
            return Grid.of_image((height, width), (step_hw[0], step_hw[1]))
    except (PositionError, TypeError, ValueError):
        pass
    raise PositionError(
        f"size_hw {size_hw!r} is not divisible into patches of {step_hw} pixels; (height, width) must be positive "
        f"multiples of the patch, {_LARGEST} at most. timm would crop the rest in silence: resize or pad the images "
        "instead."
    )


def _specs_at_extent(model: Any, extent: Extent, source: Grid) -> dict[str, Any]:
    """Return name -> Spec with which attached rotary encodings keep an extent."""
    specs: dict[str, Any] = {}
    for name, part in attachments(model).items():
        spec: Any = part.encoding.spec
        if not isinstance(part.encoding, Rotary):
            continue
        if not isinstance(getattr(spec, "coords", None), CoordSpec):
            raise PositionError(
                f"extent {extent!r} cannot be given to the attached {name!r}; {type(spec).__name__} numbers its tokens "
                "in its own way. Leave extent=None, or detach it first."
            )
        specs[name] = dataclasses.replace(spec, coords=with_extent(spec.coords, extent, source))
    return specs


def _moved(model: Any, table: Tensor, source: Grid, target: Grid, recipe: str) -> TableRecord:
    """Return the table on the target grid, evaluated from the table that was last trained."""
    prefix = table_prefix(model)
    record = table_record(model)
    trained, grid = table.detach().clone(), source
    if record is not None:
        trained, grid = record.source.to(table.device), record.source_grid
    resized = resample(trained, source=grid, target=target, recipe=recipe, prefix=prefix)
    return TableRecord(trained, grid, target, recipe, resized.clone())


def _set_size(model: Any, size_hw: tuple[int, int]) -> None:
    """Let timm move its own bookkeeping."""
    patch = getattr(model, row_of(model).patch_embed)
    free = patch.img_size is None
    model.set_input_size(img_size=(int(size_hw[0]), int(size_hw[1])))
    if free:
        patch.img_size = None  # one graph for all sizes stays one


def _refill(table: nn.Parameter, record: TableRecord) -> None:
    """Put the resized values into the Parameter object that the model has, with an autograd history of its own."""
    fresh = nn.Parameter(record.resized.to(table.dtype).clone(), requires_grad=table.requires_grad)
    try:
        # A graph of the old size may still be alive: it keeps the old tensor, the Parameter object gets the new one.
        torch.utils.swap_tensors(table, fresh)
    except (
        RuntimeError
    ):  # something holds a weak reference: a compiled graph, or a fake tensor's mode
        table.data = fresh.data
    table.grad = None


def _check_optimizer(optimizer: Any) -> None:
    """Refuse what is no optimizer, before anything changes; one that does not hold the table has nothing to move."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise PositionError(
            f"optimizer is a {type(optimizer).__name__}; a torch.optim.Optimizer is required. Pass the one that trains "
            "this model, or leave it out."
        )


def _move_moments(
    optimizer: torch.optim.Optimizer,
    table: nn.Parameter,
    source: Grid,
    target: Grid,
    recipe: str,
    prefix: int,
) -> None:
    """Resample what the optimizer remembers of the table, cell by cell."""
    rows = source.size + prefix
    for key, value in optimizer.state.get(table, {}).items():
        if isinstance(value, torch.Tensor) and value.ndim == table.ndim and value.shape[-2] == rows:
            moved = resample(value, source=source, target=target, recipe=recipe, prefix=prefix)
            # A cubic overshoots; a second moment must not become negative.
            moved = moved.clamp(min=0.0) if bool((value >= 0).all()) else moved
            optimizer.state[table][key] = moved.clone()
