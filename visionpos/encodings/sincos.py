"""Fixed sin-cos: sines and cosines of each axis in their own channels. MAE, timm, big_vision, V-JEPA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import torch

from visionpos.encodings.doors import Additive, Dims
from visionpos.errors import PositionError
from visionpos.geometry.coords import CoordSpec, coordinates
from visionpos.geometry.freqs import angles, axial_freqs, ladder

if TYPE_CHECKING:
    from torch import Tensor

    from visionpos.geometry.grid import Grid

Dialect = Literal["mae", "timm", "big_vision", "vjepa"]


class _Order(NamedTuple):
    """What sets one dialect apart."""

    axis_order: tuple[int, int]  # which axis fills the first channels: (1, 0) is x first
    per_axis: bool  # [sin, cos] of one axis, then of the next; else all sines, then all cosines
    inclusive: bool  # the last frequency is exactly 1 / theta
    dtype: torch.dtype  # in which the source computes


_ORDERS: dict[str, _Order] = {
    "mae": _Order((1, 0), per_axis=True, inclusive=False, dtype=torch.float64),
    "timm": _Order((0, 1), per_axis=False, inclusive=False, dtype=torch.float32),
    "big_vision": _Order((1, 0), per_axis=True, inclusive=True, dtype=torch.float32),
    "vjepa": _Order((0, 1), per_axis=True, inclusive=False, dtype=torch.float64),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SinCosSpec:
    """Settings of fixed sin-cos features.

    Args:
        dialect: channel order and frequency ladder of one source: "mae" x first; "timm" [sin y, sin x, cos y, cos x];
            "big_vision" x first, last frequency exactly 1/theta; "vjepa" y first.
        theta: ladder base.

    Raises:
        PositionError: for an unknown dialect.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    kind: Literal["sincos"] = "sincos"
    dialect: Dialect = "mae"
    theta: float = 10000.0

    def __post_init__(self) -> None:
        if self.dialect not in _ORDERS:
            raise PositionError(
                f"dialect is {self.dialect!r}; it must be one of {', '.join(_ORDERS)}."
            )


class SinCos(Additive):
    """Fixed 2-D sin-cos features on integer cell indices; no parameters, any grid.

    A larger grid runs the indices on (same frequency a patch). Frames of a clip share their spatial code.

    Raises:
        PositionError: if embed_dim is no multiple of 4 (at least 8 for big_vision, which divides by D/4 - 1).

    Example:
        >>> from visionpos.geometry.grid import Grid
        >>> table = SinCos(SinCosSpec(), Dims(embed_dim=8, num_heads=1, depth=1))(Grid(2, 3))
        >>> table[1].round(decimals=4)
        tensor([0.8415, 0.0100, 0.5403, 0.9999, 0.0000, 0.0000, 1.0000, 1.0000])

    Reference:
        facebookresearch/mae util/pos_embed.py (x first although its variables say h), timm
        build_sincos2d_pos_embed, google-research/big_vision models/vit.py, facebookresearch/jepa.
    """

    def __init__(self, spec: SinCosSpec, dims: Dims) -> None:
        super().__init__()
        self.spec, self.dims = spec, dims
        least = 8 if _ORDERS[spec.dialect].inclusive else 4
        if dims.embed_dim % 4 or dims.embed_dim < least:
            raise PositionError(
                f"embed_dim is {dims.embed_dim}; sin-cos {spec.dialect!r} needs a multiple of 4, at least {least}."
            )
        self._freqs(None)

    def forward(self, grid: Grid, *, device: torch.device | None = None) -> Tensor:
        """Return `[n, embed_dim]` float32."""
        order = _ORDERS[self.spec.dialect]
        coords = coordinates(grid, CoordSpec(), device=device).to(order.dtype)
        turns = angles(coords, self._freqs(device)).unflatten(-1, (2, -1))  # [n, axes, D/4]
        waves = torch.stack([turns.sin(), turns.cos()], dim=-2 if order.per_axis else -3)
        return waves.flatten(1).to(torch.float32)

    def _freqs(self, device: torch.device | None) -> Tensor:
        """Return `[2, D/2]` frequencies in the dialect's axis order and dtype."""
        order, width = _ORDERS[self.spec.dialect], self.dims.embed_dim
        if not order.inclusive:
            return axial_freqs(
                width,
                theta=self.spec.theta,
                axis_order=order.axis_order,
                device=device,
                dtype=order.dtype,
            )
        # theta ** -(k / (D/4 - 1)) is the usual ladder of a larger base.
        steps = width // 4
        stretched = self.spec.theta ** (steps / (steps - 1))
        rows = ladder(steps, theta=stretched, device=device, dtype=order.dtype)
        blank = torch.zeros_like(rows)
        return torch.stack([torch.cat([blank, rows]), torch.cat([rows, blank])])
