"""Image sizes: which one a model serves, which ones it can serve, and where it writes them down."""

from __future__ import annotations

import inspect
import math
from typing import TYPE_CHECKING, Any

import torch

from visionpos.errors import PositionError
from visionpos.geometry import Grid
from visionpos.retrofit.paths import LARGEST, whole_sides
from visionpos.retrofit.seams import find, matches, row_of, sides_of
from visionpos.retrofit.tables import tables_of

if TYPE_CHECKING:
    from visionpos.retrofit.paths import Sides
    from visionpos.retrofit.seams import DynamicSeams, ModelSeams

_RECORD = "visionpos_image"
FROZEN = "visionpos_frozen"


def image_of(model: Any) -> Sides | None:
    """Return the image (height, width) in pixels that a model now serves, None if nothing says so.

    In this order: what the model itself keeps, what `resize` wrote down, what timm did, the pretrained configuration.
    """
    row = row_of(model)
    own = getattr(model, "img_size", None)
    if isinstance(own, (tuple, list)):
        return sides_of(own)
    for path in (*row.patches, row.patch_embed):
        for _, patch in matches(model, path):
            if sides_of(getattr(patch, "img_size", None)):
                return sides_of(patch.img_size)
    if row.image is not None:
        path, stride = row.image
        held: Any = next((value for _, value in matches(model, path)), None)
        if path == "table":  # the first that moves
            held = next((table.sides for table in tables_of(model) if table.moves), None)
        held = held.shape[-3:-1] if isinstance(held, torch.Tensor) else held  # a table [1, y, x, d]
        sides, step = (
            sides_of(held),
            sides_of(find(model, stride) if isinstance(stride, str) else stride),
        )
        if sides is not None and step is not None:
            return sides[0] * step[0], sides[1] * step[1]
    told = getattr(model, _RECORD, None) or getattr(model, "_traits", {}).get("img_size")
    cfg = getattr(model, "pretrained_cfg", None) or {}
    return sides_of(told or (cfg.get("input_size") or None))


def remember_image(model: Any, size_hw: Sides) -> None:
    """Write an image size down, where timm would: a model rebuilt from its arguments then has it."""
    object.__setattr__(model, _RECORD, size_hw)
    if not hasattr(model, "_traits"):  # before timm 1.0.31
        return
    model._traits = {**model._traits, "img_size": size_hw}  # noqa: SLF001 (timm's update_model_input_size does this)
    # A class may hand its arguments on to its base unnamed, as LeViT's with two heads does.
    if any("img_size" in inspect.signature(base).parameters for base in type(model).__mro__):
        model._model_args = {**getattr(model, "_model_args", {}), "img_size": size_hw}  # noqa: SLF001


def check_thawed(model: Any, what: str) -> None:
    """Refuse a copy that `freeze` has made for one image size.

    Raises:
        PositionError: naming the size, and what cannot be done.
    """
    size = getattr(model, FROZEN, None)
    if size is not None:
        raise PositionError(
            f"model is frozen for images of {size[0]}x{size[1]}, and cannot be {what}; its tables are constants. Take "
            "the model that was given to freeze."
        )


def checked_size(model: Any, row: ModelSeams, size_hw: Any, patch: Sides | None = None) -> Sides:
    """Return (height, width) that the model can serve, with patches of another size if they are given.

    Raises:
        PositionError: if they are no whole numbers above 0, no multiples of what the class cuts maps by, or unequal
            where the class needs a square.
    """
    if row.patches and row.multiple == 1:
        target_grid(find(model, row.patches[0]), size_hw, patch)
        return int(size_hw[0]), int(size_hw[1])
    step = multiple_of(model, row)
    size = whole_sides(size_hw)
    if size is None:
        raise PositionError(
            f"size_hw {size_hw!r} is no image size; (height, width) must be positive multiples of {step} pixels, "
            f"{LARGEST} at most."
        )
    if row.resize == "square" and size[0] != size[1]:
        raise PositionError(
            f"size {size} is not square; {type(model).__name__} rebuilds its map from a square number of square "
            f"blocks. Use a square size divisible by {step[0]}."
        )
    check_steps(model, size, step)
    return size


def check_steps(model: Any, size: tuple[Any, ...], step: Sides) -> None:
    """Refuse an image whose sides are no multiples of a step.

    Raises:
        PositionError: naming the size, the step, and the sizes beside it.
    """
    if size[0] % step[0] or size[1] % step[1]:
        below, above = (
            tuple(max(1, rounding(side / by)) * by for side, by in zip(size, step, strict=True))
            for rounding in (math.floor, math.ceil)
        )
        raise PositionError(
            f"size {size} is not a multiple of {step[0] if step[0] == step[1] else step}; {type(model).__name__} "
            f"cuts its maps by whole steps. Use {below if below == above else f'{below} or {above}'}."
        )


def multiple_of(model: Any, row: ModelSeams | DynamicSeams) -> Sides:
    """Return what both image sides must be multiples of."""
    wanted = row.multiple
    if wanted == "blocks":  # a square number of blocks, four times fewer at every level
        side = model.patch_size * math.isqrt(model.num_blocks[0])
        return side, side
    steps = sides_of(find(model, wanted) if isinstance(wanted, str) else wanted)
    if steps is None:
        raise PositionError(
            f"model has no {wanted}, which timm's class has; no size can be checked. Create it with timm.create_model."
        )
    for path, by in row.coarser:
        for _, value in matches(model, path):
            side = sides_of(value)
            steps = (
                steps
                if side is None
                else (math.lcm(steps[0], by * side[0]), math.lcm(steps[1], by * side[1]))
            )
    return steps


def target_grid(patch: Any, size_hw: tuple[int, int], cut: Sides | None = None) -> Grid:
    """Return the grid of the new size, refusing sides that the patch embedding would silently crop.

    Args:
        patch: the module that cuts patches.
        size_hw: image (height, width) in pixels.
        cut: patches that it will cut, those of now when None.
    """
    step_hw = _step(patch)
    if cut is not None:
        now = sides_of(patch.patch_size) or (1, 1)
        step_hw = (step_hw[0] // now[0] * cut[0], step_hw[1] // now[1] * cut[1])
    size = whole_sides(size_hw)
    if size is not None and not (size[0] % step_hw[0] or size[1] % step_hw[1]):
        return Grid(size[0] // step_hw[0], size[1] // step_hw[1])
    wrong = (
        "no image size (height, width)"
        if size is None
        else f"not divisible into patches of {step_hw} pixels"
    )
    raise PositionError(
        f"size_hw {size_hw!r} is {wrong}; height and width must be positive multiples of the patch, {LARGEST} at most. "
        "timm would crop the rest in silence: resize or pad the images instead."
    )


def _step(patch: Any) -> Sides:
    """Return (height, width) of the pixels a patch module turns into one token."""
    ratio = getattr(patch, "feat_ratio", None)
    step = ratio(as_scalar=False) if ratio is not None else sides_of(patch.patch_size) or (1, 1)
    return int(step[0]), int(step[1])
