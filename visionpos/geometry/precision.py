"""Precision: values wide enough to form angles from, kept from casts, and a context that keeps products so."""

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


def bits_of(values: Tensor) -> Tensor:
    """Return float32 values as bytes that neither a cast of floats nor a moving average changes.

    An average weighs a number with itself and cuts the sum to a whole number, which moves it: here every bit is a byte,
    0 or 255, and is read as whichever is nearer.

    Returns:
        `[..., 32]` uint8, the lowest bit first.

    Example:
        >>> values = torch.tensor([0.1, -3.0])
        >>> torch.equal(floats_of(bits_of(values) // 2 + 30), values)
        True
    """
    places = torch.arange(32, dtype=torch.int32, device=values.device)
    words = values.to(torch.float32).contiguous().view(torch.int32).unsqueeze(-1)
    return ((words >> places) & 1).to(torch.uint8) * 255


def floats_of(bits: Tensor) -> Tensor:
    """Return `[...]` float32 from `bits_of` it, `[..., 32]`."""
    places = torch.arange(32, dtype=torch.int32, device=bits.device)
    words = ((bits > 127).to(torch.int32) << places).sum(-1, dtype=torch.int32)
    return words.view(torch.float32)
