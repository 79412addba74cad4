"""Precision: values wide enough to form angles from, and a context in which autocast leaves products alone."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor


def wide(values: Tensor) -> Tensor:
    """Return values in float32, or float64 if they are."""
    return values if values.dtype == torch.float64 else values.to(torch.float32)


def full_precision(device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which autocast does not round products to 16 bits; the meta device knows no autocast.

    Where autocast is off there is nothing to do, but a graph says it in any case: it may run under autocast later.
    """
    if device.type == "meta" or not (
        torch.compiler.is_compiling() or torch.is_autocast_enabled(device.type)
    ):
        return nullcontext()
    off: AbstractContextManager[None] = torch.autocast(device_type=device.type, enabled=False)
    return off
