"""The doors by which position enters a model, as abstract modules, and the sizes of the model they serve.

A final encoding is a frozen Spec and one module that implements one door; the class of a module says where it enters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from visionpos.errors import PositionError
from visionpos.geometry.coords import CoordSpec, augment, coordinates
from visionpos.geometry.freqs import angles
from visionpos.geometry.rotation import Rotation

if TYPE_CHECKING:
    from torch import Tensor

    from visionpos.geometry.grid import Grid
    from visionpos.geometry.rotation import Pairing


@dataclass(frozen=True, slots=True, kw_only=True)
class Dims:
    """The sizes of the transformer that an encoding serves.

    Args:
        embed_dim: width of a token.
        num_heads: attention heads.
        depth: layers.
        prefix: leading tokens without position (class token, registers).
        head_dim: channels of a head; embed_dim / num_heads when None.

    Raises:
        PositionError: if a size is below 1, or embed_dim is not divisible by num_heads.

    Example:
        >>> Dims(embed_dim=384, num_heads=6, depth=12, prefix=1).channels
        64
    """

    embed_dim: int
    num_heads: int
    depth: int
    prefix: int = 0
    head_dim: int | None = None

    def __post_init__(self) -> None:
        sizes = (
            self.embed_dim,
            self.num_heads,
            self.depth,
            1 if self.head_dim is None else self.head_dim,
        )
        if min(sizes) < 1 or self.prefix < 0:
            raise PositionError(
                f"Dims are {sizes} with prefix {self.prefix}; sizes of at least 1 and a prefix of at least 0 are "
                "required."
            )
        if self.head_dim is None and self.embed_dim % self.num_heads:
            raise PositionError(
                f"embed_dim {self.embed_dim} is not divisible by num_heads {self.num_heads}; whole heads are required. "
                "Pass head_dim if the attention has its own."
            )

    @property
    def channels(self) -> int:
        """Return the channels of a head."""
        return self.embed_dim // self.num_heads if self.head_dim is None else self.head_dim


class Additive(nn.Module, ABC):
    """An encoding that gives every token a vector to add."""

    spec: Any
    dims: Dims

    @abstractmethod
    def forward(self, grid: Grid, *, device: torch.device | None = None) -> Tensor:
        """Return `[n, embed_dim]`, row-major over the grid, without prefix rows."""


class Rotary(nn.Module, ABC):
    """An encoding that turns q and k.

    `forward` is three steps that can be called alone: coordinates of the grid, angles of a layer, rotation.
    """

    spec: Any
    dims: Dims

    @property
    @abstractmethod
    def coords(self) -> CoordSpec:
        """Return how tokens are numbered."""

    @property
    @abstractmethod
    def pairing(self) -> Pairing:
        """Return which channels turn together."""

    @property
    @abstractmethod
    def layerwise(self) -> bool:
        """Return whether every layer has frequencies of its own."""

    @abstractmethod
    def freqs(self, layer: int = 0, *, device: torch.device | None = None) -> Tensor:
        """Return the frequencies of a layer, `[axes, pairs]` or `[num_heads, axes, pairs]`."""

    def points(
        self,
        grid: Grid,
        *,
        device: torch.device | None = None,
        generator: torch.Generator | None = None,
        draws: int | None = None,
    ) -> Tensor:
        """Return `[n, axes]` coordinates, perturbed in training mode, or `[draws, n, axes]`; see `augment`."""
        spec = self.coords
        still = coordinates(grid, spec, device=device)
        return augment(still, spec, draws=draws, generator=generator) if self.training else still

    def angles(self, coords: Tensor, layer: int = 0) -> Tensor:
        """Return `[..., n, pairs]` radians at any coordinates; per-head frequencies put num_heads before n."""
        freqs = self.freqs(layer, device=coords.device)
        return angles(coords.unsqueeze(-3), freqs) if freqs.ndim > 2 else angles(coords, freqs)

    def forward(
        self,
        grid: Grid,
        *,
        layer: int = 0,
        device: torch.device | None = None,
        generator: torch.Generator | None = None,
    ) -> Rotation:
        """Return the Rotation of one layer over a grid."""
        coords = self.points(grid, device=device, generator=generator)
        return Rotation.of(self.angles(coords, layer), self.pairing)
