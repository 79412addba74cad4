"""Layouts: where heads and tokens stand in q and k, and what may be done to a tensor where it lies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from visionpos.errors import PositionError
from visionpos.geometry.points import known
from visionpos.geometry.rotation import Rotation

if TYPE_CHECKING:
    from torch import Tensor

Layout = Literal["bhnd", "bnhd", "thd"]
_FAST = ("half", "adjacent", "half_per_axis")


def checked_tensor(x: Tensor, name: str) -> Tensor:
    """Return x, which is looked into but not turned, after refusing what is no tensor."""
    if not isinstance(x, torch.Tensor):
        raise PositionError(f"{name} is {type(x).__name__}; a float tensor is required.")
    return x.detach()


def checked_rotation(rotation: object) -> Rotation:
    """Return the rotation, after refusing what is none."""
    if not isinstance(rotation, Rotation):
        raise PositionError(
            f"rotation is {type(rotation).__name__}; a Rotation is required, as Rotation.of(angles) or an encoding's "
            "call gives it. Use rotate for the turns of other schemes."
        )
    return rotation


def swapped(x: Tensor, layout: Layout, name: str) -> Tensor:
    """Return x as `[..., heads, n, head_dim]`, or back: the change is its own inverse."""
    if layout == "bhnd":
        return x
    given: object = layout  # a list has no hash
    dims = {"bnhd": 4, "thd": 3}.get(given) if isinstance(given, str) else None
    if dims is None:
        raise PositionError(f"layout is {layout!r}; it must be 'bhnd', 'bnhd' or 'thd'.")
    if checked_tensor(x, name).ndim != dims:
        raise PositionError(
            f"{name} has shape {tuple(x.shape)}; layout {layout!r} has {dims} dimensions. Name the layout that it has."
        )
    other: Tensor = x.transpose(-3, -2)
    return other


def tables_of(dtype: torch.dtype, rotation: Rotation) -> tuple[Tensor, Tensor]:
    """Return cosines and sines in the dtype of the arithmetic, as numbers that lie in memory.

    The sines of a conjugate are a view that negates what lies there, and kernels read what lies there.
    """
    wide = torch.promote_types(torch.float32, torch.promote_types(dtype, rotation.cos.dtype))
    return rotation.cos.to(wide).resolve_neg(), rotation.sin.to(wide).resolve_neg()


def is_fast(x: Tensor, rotation: Rotation) -> bool:
    """Return whether views as complex numbers and writes into fresh memory are safe here."""
    traced = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    plain = known(x) and not traced and x.device.type in ("cpu", "cuda")
    return plain and rotation.pairing in _FAST
