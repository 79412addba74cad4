"""The door `rotate` as abstract modules: position that turns q and k. `doors` shows them with the others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from visionpos.encodings.guard import Guarded, check_home
from visionpos.geometry.augment import augment, repeated
from visionpos.geometry.coords import CoordSpec, coordinates
from visionpos.geometry.freqs import angles
from visionpos.geometry.rotation import Rotation
from visionpos.geometry.separable import is_lattice, lattice_turns

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from visionpos.encodings.doors import Dims
    from visionpos.geometry.blocks import BasisTurn, BlockTurn
    from visionpos.geometry.grid import Grid
    from visionpos.geometry.rotation import Pairing


class Rotary(Guarded, ABC):
    """An encoding that turns q and k.

    `forward` is three steps that can be called alone: coordinates of the grid, angles of a layer, rotation.
    """

    spec: Any
    dims: Dims

    @property
    def coords(self) -> CoordSpec:
        """Return how the cells of a grid are numbered, before a scheme moves them (`points`)."""
        coords: CoordSpec = self.spec.coords
        return coords

    @property
    def pairing(self) -> Pairing:
        """Return which channels turn together."""
        pairing: Pairing = self.spec.pairing
        return pairing

    @property
    def layerwise(self) -> bool:
        """Return whether layers differ; False where all share the frequencies."""
        return False

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
        """Return coordinates `[n, axes]`, or `[draws, n, axes]`, in training mode perturbed: see `augment`."""
        return _points(self, grid, device=device, generator=generator, draws=draws)

    def angles(self, coords: Tensor, layer: int = 0) -> Tensor:
        """Return radians at coordinates `[n, axes]`: `[n, pairs]`, or `[num_heads, n, pairs]` for frequencies a head.

        Coordinates of their own for every sample, `[b, n, axes]`, give `[b, 1 or num_heads, n, pairs]`.
        """
        freqs = self.freqs(layer, device=coords.device)
        heads = freqs.ndim > 2 or coords.ndim > 2
        return angles(coords.unsqueeze(-3), freqs) if heads else angles(coords, freqs)

    def forward(
        self,
        grid: Grid,
        *,
        layer: int = 0,
        device: torch.device | None = None,
        generator: torch.Generator | None = None,
    ) -> Rotation:
        """Return the Rotation of one layer over a grid.

        In training every call draws anew, as the original DINOv3 does block by block; for one draw a forward pass or a
        sample, hold `points` and call `angles` and `rotation`.
        """
        return self.over(self.points(grid, device=device, generator=generator), grid, layer)

    def over(self, coords: Tensor, grid: Grid, layer: int = 0, *, prefix: int = 0) -> Rotation:
        """Return the Rotation of one layer at the `points` of a grid, behind tokens that do not turn.

        Frequencies a head, on rows and columns in eager mode on the CPU, take one product a cell in place of a cosine
        and a sine, which is faster and off by half as much against float64: see `geometry.separable`.
        """
        freqs = self.freqs(layer, device=coords.device)
        if freqs.ndim == 3 and freqs.shape[1] == 2 and is_lattice(coords, grid):
            turns = lattice_turns(coords, grid, freqs, prefix=prefix)
            return Rotation(*turns, self.pairing, self.coords.axes)
        return self.rotation(self.angles(coords, layer)).padded(prefix)

    def rotation(self, turns: Tensor) -> Rotation:
        """Return the Rotation by angles `[..., n, pairs]`, in this encoding's pairing."""
        return Rotation.of(turns, self.pairing, axes=self.coords.axes)


class Turning(Guarded, ABC):
    """An encoding that turns q and k by more than pairs of channels: whole blocks, or planes of a learned basis.

    Its `forward` gives what a `Rotary`'s gives: an object whose `apply` turns q or k.
    """

    spec: Any
    dims: Dims

    @property
    def coords(self) -> CoordSpec:
        """Return how the cells of a grid are numbered."""
        coords: CoordSpec = self.spec.coords
        return coords

    @property
    @abstractmethod
    def layerwise(self) -> bool:
        """Return whether every layer turns its own way."""

    @abstractmethod
    def turns(self, coords: Tensor, layer: int = 0) -> BlockTurn | BasisTurn:
        """Return the turn of a layer at coordinates `[..., n, axes]`."""

    def points(
        self,
        grid: Grid,
        *,
        device: torch.device | None = None,
        generator: torch.Generator | None = None,
        draws: int | None = None,
    ) -> Tensor:
        """Return coordinates `[n, axes]`, or `[draws, n, axes]`, in training mode perturbed: see `augment`."""
        return _points(self, grid, device=device, generator=generator, draws=draws)

    def turn(
        self, x: Tensor, coords: Tensor, layer: int = 0, *, prefix: int = 0, suffix: int = 0
    ) -> Tensor:
        """Return q or k `[b, heads, n, head_dim]` turned; prefix and suffix tokens stand at the origin."""
        return self.turns(coords, layer).apply(x, prefix=prefix, suffix=suffix)

    def forward(
        self,
        grid: Grid,
        *,
        layer: int = 0,
        device: torch.device | None = None,
        generator: torch.Generator | None = None,
    ) -> BlockTurn | BasisTurn:
        """Return the turn of one layer over a grid; in training every call draws anew.

        Raises:
            PositionError: if a device other than that of the generators is asked for.
        """
        weight = next(self.parameters(), None)
        if weight is not None:
            check_home(weight, device, "the generators are")
        return self.turns(self.points(grid, device=device, generator=generator), layer)


def _points(
    encoding: Rotary | Turning,
    grid: Grid,
    *,
    device: torch.device | None,
    generator: torch.Generator | None,
    draws: int | None,
) -> Tensor:
    spec = encoding.coords
    if device is None:  # learned frequencies stay where they are
        device = next((weight.device for weight in encoding.parameters()), None)
    still = coordinates(grid, spec, device=device)
    if not encoding.training:
        return repeated(still, draws)
    return augment(still, spec, draws=draws, generator=generator)
