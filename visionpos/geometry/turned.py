"""Turned: whether queries or keys fit the turn they are given, the same for every kind of turn.

A tensor and the sizes of a turn enter; nothing leaves, or a refusal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from visionpos.errors import PositionError

if TYPE_CHECKING:
    import torch


def check_turned(x: Tensor, lead: torch.Size, device: torch.device) -> None:
    """Refuse what would be rounded to whole numbers, grow by broadcasting, or meet a turn on another device.

    Args:
        x: `[..., n, head_dim]`, queries or keys.
        lead: leading sizes of the turn, which broadcast against those of x.
        device: where the turn is.

    Raises:
        PositionError: naming what x is.
    """
    if not isinstance(x, Tensor):
        raise PositionError(
            f"x is {type(x).__name__}; a float tensor [b, heads, n, head_dim] of queries or keys is required. Pass "
            "them as torch gives them."
        )
    if not x.dtype.is_floating_point:
        raise PositionError(f"x has dtype {x.dtype}; a float tensor is required. Cast it first.")
    if x.ndim < 2:
        raise PositionError(
            f"x has shape {tuple(x.shape)}; [b, heads, n, head_dim] is required. Use unsqueeze for what is missing."
        )
    if x.device != device:
        raise PositionError(
            f"x is on {x.device} and the rotation on {device}; one device is required. Build the rotation with "
            "device=, or move the encoding."
        )
    room = x.shape[:-2]
    fits = len(lead) <= len(room) and all(
        size in (1, have) for size, have in zip(reversed(lead), reversed(room), strict=False)
    )
    if not fits:
        raise PositionError(
            f"the rotation has leading sizes {tuple(lead)} and x {tuple(room)}; each must be 1 or equal. "
            "Frequencies a head cannot turn keys of fewer heads: repeat them first."
        )


def check_tables(cos: object, sin: object) -> None:
    """Refuse cosines and sines that are no tensors of floats, or lie on two devices.

    Raises:
        PositionError: naming which, and what it is.
    """
    for name, table in (("cos", cos), ("sin", sin)):
        if not (isinstance(table, Tensor) and table.is_floating_point()):
            what = table.dtype if isinstance(table, Tensor) else type(table).__name__
            raise PositionError(
                f"{name} is {what}; a tensor of floats is required. Build it with Rotation.of(angles)."
            )
    if isinstance(cos, Tensor) and isinstance(sin, Tensor) and cos.device != sin.device:
        raise PositionError(
            f"cos is on {cos.device} and sin on {sin.device}; one device is required. Move one of them."
        )
