"""How a model's images and tokens lie: channels, patches, rows and maps."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from visionpos.retrofit.places import Place
from visionpos.retrofit.seams import class_row
from visionpos.retrofit.sizes import multiple_of


def channels_of(model: nn.Module) -> int:
    """Return the channels of a model's images."""
    row = class_row(model)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            return int(module.in_channels)
        if isinstance(module, nn.Linear) and row is not None and row[1].grid == "coords":
            step = multiple_of(model, row[1])
            return int(module.in_features) // math.prod(step)
    return 3


def layout_of(place: Place, maps: Tensor) -> str:
    """Return how patch tokens lie; rows may come as a map where the model takes any size."""
    if maps.ndim == 3:
        return "nlc"
    return place.layout if place.layout in ("nchw", "nhwc") else "nhwc"


def as_rows(maps: Tensor, layout: str) -> Tensor:
    """Return `[b, n, d]`."""
    if layout == "nchw":
        return maps.flatten(2).mT
    return maps.flatten(1, 2) if layout == "nhwc" else maps


def unfolded(image: Tensor, step: tuple[int, int]) -> Tensor:
    """Return the patches of an image, `[b, n, channels * height * width]`."""
    return nn.functional.unfold(image, step, stride=step).mT


def folded(patches: Tensor, size: Any, step: tuple[int, int]) -> Tensor:
    """Return the image that patches make."""
    return nn.functional.fold(patches.mT, tuple(size), step, stride=step)
