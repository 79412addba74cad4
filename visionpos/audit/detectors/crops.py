"""Crops: images that a model takes, of its own size and of others, and patches with coordinates."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from visionpos.audit.model_watch import tensor_of
from visionpos.errors import PositionError
from visionpos.retrofit.ports import attentions_of
from visionpos.retrofit.seams import class_row, grid_of
from visionpos.retrofit.sizes import image_of

_USUAL = (224, 224)
_SMALL = ((4, 6), (3, 8))  # of as many tokens


def ran(model: nn.Module, image: Tensor) -> Tensor:
    """Return the features of a model, as one tensor."""
    whole: Any = model
    return tensor_of(getattr(whole, "forward_features", whole)(image))


def observed(model: nn.Module, image: Tensor) -> list[Tensor]:
    """Return the features of a model, and its attentions' outputs, which layer scale hides in untrained ones."""
    seen: list[Tensor] = []
    hooks = [
        port.holder.register_forward_hook(lambda _m, _i, out: seen.append(tensor_of(out)))
        for port in attentions_of(model)
    ]
    try:
        end = ran(model, image)
    finally:
        for hook in hooks:
            hook.remove()
    return [end, *seen]


def image_for(model: nn.Module, seed: int, size_hw: tuple[int, int] | None = None) -> Tensor:
    """Return one image of normal noise, `[1, channels, h, w]`, of the model's own size unless another is given."""
    known = image_of(model) if class_row(model) is not None else None
    own = known or (getattr(model, "pretrained_cfg", None) or {}).get("input_size", _USUAL)[-2:]
    first = next((part for part in model.modules() if isinstance(part, nn.Conv2d)), None)
    channels = 3 if first is None else first.in_channels * (first.groups if first.groups > 1 else 1)
    draw = torch.Generator().manual_seed(seed)
    weight = next(model.parameters())
    sides = tuple(own) if size_hw is None else size_hw
    image = torch.randn(1, channels, *sides, generator=draw)
    return image.to(device=weight.device, dtype=weight.dtype)


def crops_of(model: nn.Module, seed: int) -> list[Tensor]:
    """Return images of two grids with as many tokens, where the model takes them; else one of its own size."""
    try:
        grid, sides = grid_of(model), image_of(model)
    except PositionError:
        grid, sides = None, None
    step = 16 if grid is None or sides is None else max(1, sides[0] // grid.height)
    found = []
    for rows, columns in _SMALL:
        image = image_for(model, seed, (rows * step, columns * step))
        try:
            with torch.no_grad():
                ran(model, image)
        except (AssertionError, RuntimeError, ValueError):
            continue
        found.append(image)
    return found if len(found) == len(_SMALL) else [image_for(model, seed)]


def patched(model: nn.Module, seed: int) -> tuple[Tensor, Tensor]:
    """Return patches `[1, n, width]` and their (y, x) `[1, n, 2]` for a model that takes them, of 3 x 5 cells.

    Raises:
        PositionError: if its first layer is not linear.
    """
    linear = next((part for part in model.modules() if isinstance(part, nn.Linear)), None)
    rows, columns = 3, 5
    if linear is None or math.isqrt(linear.in_features // 3) ** 2 * 3 != linear.in_features:
        raise PositionError("model has no linear layer that takes flat patches of three channels.")
    draw = torch.Generator().manual_seed(seed)
    patches = torch.randn(1, rows * columns, linear.in_features, generator=draw)
    y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    return patches, torch.stack([y.flatten(), x.flatten()], dim=-1).unsqueeze(0)
