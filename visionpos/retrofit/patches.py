"""Patches and channels: another patch size by FlexiViT's resampling, other input channels by timm's own helper."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from timm.layers import resample_patch_embed
from timm.models import adapt_input_conv
from torch import nn

from visionpos.errors import PositionError
from visionpos.geometry import Grid
from visionpos.retrofit.paths import find, sides_of, whole_sides
from visionpos.retrofit.records import (
    Moved,
    TableRecord,
    check_optimizer,
    move_moments,
    record_of,
    records_of,
    refill,
    remember,
)
from visionpos.retrofit.seams import row_of

if TYPE_CHECKING:
    from visionpos.retrofit.paths import Sides
    from visionpos.retrofit.seams import ModelSeams

_RECIPE = "flexivit_pi"


def patch_of(model: Any, row: ModelSeams, patch: int | tuple[int, int] | None) -> Sides | None:
    """Return the new patch (height, width) in pixels, None if it stays.

    Raises:
        PositionError: if the class cuts no patches that can change, or the size is none.
    """
    if patch is None:
        return None
    wanted = whole_sides((patch, patch) if isinstance(patch, int) else patch)
    if wanted is None:
        raise PositionError(
            f"patch is {patch!r}; (height, width) in pixels, or one side, is required."
        )
    module = find(model, row.patches[0]) if row.patches else None
    kernel = getattr(getattr(module, "proj", None), "kernel_size", None)
    if not row.repatch or module is None or kernel is None:
        raise PositionError(
            f"patch is {patch!r}; the patches of a {type(model).__name__} are cut by more than one convolution, or its "
            "later stages count on their size. Leave patch=None."
        )
    return None if wanted == sides_of(module.patch_size) else wanted


class Kernel:
    """The convolution that cuts patches, while its size changes: its Parameters stay the same objects."""

    def __init__(self, model: Any, row: ModelSeams, patch: Sides) -> None:
        self.module: Any = find(model, row.patches[0])
        self.path = f"{row.patches[0]}.proj.weight"
        self.patch = patch
        self.weight: nn.Parameter = self.module.proj.weight
        self.bias: nn.Parameter | None = self.module.proj.bias
        self.record = record_of(model, self.path, self.weight)

    def moved(self) -> Moved:
        """Give the new convolution the old Parameters, and return the kernel that belongs into them."""
        self.module.proj._parameters.update(weight=self.weight, bias=self.bias)  # noqa: SLF001 (timm made others)
        trained, sides = self.weight.detach().clone(), tuple(self.weight.shape[-2:])
        if self.record is not None:
            came = self.record.source_grid
            trained, sides = self.record.source.to(self.weight.device), (came.height, came.width)
        record = TableRecord(
            trained, Grid(*sides), Grid(*self.patch), _RECIPE, self.evaluate(trained).clone()
        )
        before = tuple(self.weight.shape)
        return Moved(self.path, self.weight, before, record, self.evaluate, channels_last=False)

    def evaluate(self, kernel: torch.Tensor) -> torch.Tensor:
        """Return the kernel that gives on resized images what the old one gives on the images before."""
        found: torch.Tensor = resample_patch_embed(kernel, list(self.patch))
        return found


def kernel_record(kernel: Any, source: torch.Tensor) -> TableRecord | None:
    """Return where a kernel that cuts patches came from, None if it cannot have come from there."""
    if (
        not isinstance(kernel, nn.Parameter)
        or kernel.ndim != 4
        or source.shape[:2] != kernel.shape[:2]
    ):
        return None
    grids = Grid(*source.shape[-2:]), Grid(*kernel.shape[-2:])
    return TableRecord(source, *grids, _RECIPE, source)


@torch.inference_mode(mode=False)
@torch.no_grad()
def adapt_channels(
    model: nn.Module, in_chans: int, *, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Let a model take images of other channels, in place, as timm does when it loads weights.

    One channel gets the sum of the kernel over channels (grey pictures, spectrograms), more get it repeated and scaled
    (extra bands); the Parameter object stays the same. From 3 to others and back is not exact.

    Args:
        model: a timm model whose class has a row in the seam table.
        in_chans: channels of the images to come.
        optimizer: holds the kernel's Parameter; its moments follow.

    Raises:
        PositionError: if the model says of no convolution that it is the first, or that is no 2-D convolution.

    Example:
        >>> import timm
        >>> model = timm.create_model("vit_tiny_patch16_224", num_classes=0)
        >>> adapt_channels(model, 1)
        >>> model(torch.zeros(1, 1, 224, 224)).shape
        torch.Size([1, 192])
    """
    whole: Any = model
    channels = whole_sides((in_chans, in_chans))
    if channels is None or in_chans is True:
        raise PositionError(f"in_chans is {in_chans!r}; a whole number above 0 is required.")
    in_chans = channels[0]
    if optimizer is not None:
        check_optimizer(optimizer)
    convs = _first_convs(whole)
    recorded = records_of(whole)
    for moved in [_rechannelled(path, conv, in_chans) for path, conv in convs]:
        refill(moved)
        if (
            moved.path in recorded
        ):  # another patch size than the trained one: what it came from follows
            held = recorded[moved.path]
            source = moved.evaluate(held.source)
            now = replace(held, source=source, resized=moved.record.resized)
            remember(whole, moved.path, now)
        if optimizer is not None:
            move_moments(optimizer, moved)
    for _, conv in convs:
        conv.in_channels = in_chans
    _note_channels(whole, in_chans)


def _note_channels(model: Any, in_chans: int) -> None:
    """Write the number of channels down where the model and timm keep it."""
    for owner in (model, find(model, row_of(model).patch_embed)):
        if hasattr(owner, "in_chans"):
            owner.in_chans = in_chans
    if hasattr(model, "_model_args"):
        model._model_args = {**model._model_args, "in_chans": in_chans}  # noqa: SLF001


def _rechannelled(path: str, conv: nn.Conv2d, new: int) -> Moved:
    """Return the kernel of a convolution for other channels."""
    weight: Any = conv.weight
    old = conv.in_channels

    def evaluate(values: torch.Tensor) -> torch.Tensor:
        return _adapted(values, old, new)

    grid = Grid(*weight.shape[-2:])
    record = TableRecord(weight, grid, grid, "timm", evaluate(weight.detach()).clone())
    return Moved(path, weight, tuple(weight.shape), record, evaluate, channels_last=False)


def _adapted(kernel: torch.Tensor, old: int, new: int) -> torch.Tensor:
    """Return timm's kernel for other channels; before 1.0.31 its helper knew kernels of three channels alone."""
    known = inspect.signature(adapt_input_conv).parameters
    extra = {"base_chans": old} if "base_chans" in known else {}
    found: torch.Tensor = adapt_input_conv(new, kernel, **extra)
    return found


def _first_convs(model: Any) -> list[tuple[str, Any]]:
    """Return (path of the weight, convolution) of every convolution that takes the image."""
    cfg = getattr(model, "pretrained_cfg", None) or {}
    told = (
        getattr(model, "_traits", {}).get("first_conv")
        or cfg.get("first_conv")
        or f"{row_of(model).patch_embed}.proj"
    )
    paths = [told] if isinstance(told, str) else list(told)
    found = [(f"{path}.weight", find(model, path)) for path in paths]
    for path, conv in found:
        if not isinstance(conv, nn.Conv2d) or conv.groups != 1:
            raise PositionError(
                f"{path} is no plain convolution of the image; the channels of a {type(model).__name__} cannot be "
                "adapted in place. Create it with in_chans= and load adapted weights."
            )
    return found
