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
from visionpos.geometry.relative import distinct_offsets, relative_index
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


class Biasing(nn.Module, ABC):
    """An encoding that adds a function of coordinate differences to attention logits.

    `values` is that function; `forward` is its dense rendering, evaluated once for each distinct difference of a grid.
    """

    spec: Any
    dims: Dims

    @abstractmethod
    def values(self, offsets: Tensor) -> Tensor:
        """Return `[num_heads, ...]`, the bias at differences `[..., axes]`, query minus key, in cells."""

    def prefix_values(self) -> Tensor | None:
        """Return `[num_heads, 3]`: prefix to patch, patch to prefix, prefix to prefix; None for zeros."""
        return None

    def forward(self, grid: Grid, *, prefix: int = 0, device: torch.device | None = None) -> Tensor:
        """Return the bias of every pair of tokens, `[num_heads, prefix + n, prefix + n]`: it grows as n x n.

        Args:
            grid: tokens, row-major.
            prefix: leading tokens without position; their rows and columns come from `prefix_values`.
            device: where to build.
        """
        table = self.values(distinct_offsets(grid, device=device))  # [heads, distinct]
        index = relative_index(grid, device=table.device)
        patches = table.index_select(-1, index.flatten()).unflatten(-1, tuple(index.shape))
        return patches if not prefix else self._framed(patches, prefix)

    def _framed(self, patches: Tensor, prefix: int) -> Tensor:
        """Return the patch bias with rows and columns for prefix tokens."""
        out = torch.nn.functional.pad(patches, (prefix, 0, prefix, 0))
        own = self.prefix_values()
        if own is None:
            return out
        first = torch.arange(out.shape[-1], device=out.device) < prefix
        rows, columns = first.unsqueeze(-1), first.unsqueeze(-2)
        to_patch, from_patch, inside = (
            own.unsqueeze(-1).unsqueeze(-1).unbind(1)
        )  # each [heads, 1, 1]
        edge = torch.where(rows & columns, inside, torch.where(rows, to_patch, from_patch))
        return torch.where(rows | columns, edge, out)


class QueryBiasing(nn.Module, ABC):
    """An encoding that adds to attention logits what a query and a coordinate difference say together."""

    spec: Any
    dims: Dims

    @abstractmethod
    def forward(self, q: Tensor, grid: Grid, *, keys: Grid | None = None) -> Tensor:
        """Return `[b, num_heads, n, m]` for queries `[b, num_heads, n, head_dim]`; keys share the grid when None."""


class Conditional(nn.Module, ABC):
    """An encoding that makes position out of the tokens themselves, between blocks."""

    spec: Any
    dims: Dims

    @abstractmethod
    def forward(self, tokens: Tensor, grid: Grid) -> Tensor:
        """Return tokens `[b, prefix + n, embed_dim]` with position mixed in; prefix tokens pass unchanged."""
