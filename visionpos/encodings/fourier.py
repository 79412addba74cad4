"""Fourier features: sines and cosines of continuous coordinates. Random Gaussian (Tancik), SAM, NeRF, Perceiver."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import torch
from torch import nn

from visionpos.encodings.doors import Additive, Dims, check_device, check_points
from visionpos.encodings.sources import filled, required_entry
from visionpos.errors import PositionError
from visionpos.geometry.augment import augment, repeated
from visionpos.geometry.coords import CoordSpec, coordinates
from visionpos.geometry.fields import check_fields
from visionpos.geometry.freqs import angles, axial_freqs, gaussian_freqs, on_axis
from visionpos.geometry.lattice import lattice_angles
from visionpos.geometry.ranges import check_sigma
from visionpos.geometry.waves import waves

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from visionpos.geometry.coords import Unit
    from visionpos.geometry.grid import Grid
    from visionpos.geometry.waves import WaveOrder

Dialect = Literal["tancik", "sam", "nerf", "nerf_paper", "perceiver"]


class _Filling(NamedTuple):
    """What sets one dialect apart."""

    unit: Unit  # coordinates of its grids
    waves: WaveOrder
    random: bool = False  # frequencies are drawn once and kept; else a ladder
    by_axis: bool = True  # pairs in blocks of one axis; else band by band
    x_first: bool = False  # in which order the axes come, where that is seen in the channels


_FILLINGS: dict[str, _Filling] = {
    "tancik": _Filling("fractional", "cos_sin", random=True),
    "sam": _Filling("centred", "sin_cos", random=True),
    "nerf": _Filling("centred", "sin_cos", by_axis=False, x_first=True),
    "nerf_paper": _Filling("centred", "interleaved", x_first=True),
    "perceiver": _Filling("endpoint", "sin_cos"),
}
# Bands that double: 2 ** 96 leaves float32 room for pi and any coordinate.
_MOST_BANDS = {"nerf": 96, "nerf_paper": 96}


@dataclass(frozen=True, slots=True, kw_only=True)
class FourierSpec:
    """Settings of Fourier features.

    Args:
        dialect: "tancik" [cos, sin] of 2 pi B v, B normal, v on [0, 1]; "sam" [sin, cos] of the same on [-1, 1], cell
            centres; "nerf" the code, sines and cosines of 2^k p band by band, x first, without pi; "nerf_paper" the
            formula, sin and cos of 2^k pi p coordinate by coordinate; "perceiver" [sines, cosines] of pi f p, f linear
            from 1 to half of max_resolution, p from -1 to 1 at the outer cells.
        axes: 2 (y, x) or 3 (t, y, x).
        bands: frequencies: of each axis on a ladder, in all when random. None fills embed_dim, for random ones alone.
        sigma: standard deviation of random frequencies, in turns a coordinate unit; [-1, 1] doubles its effect.
        learned: let random frequencies train.
        max_resolution: cells of each axis that the fastest band of "perceiver" resolves.
        include_coords: put the coordinates themselves before the features (NeRF's code, Perceiver).
        project: bring the features to embed_dim by a learned linear map; without it their width must be embed_dim.
        coords: numbering of a grid's tokens; None is the dialect's own.

    Raises:
        PositionError: if a number or choice is out of range, or settings do not belong to the dialect.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    kind: Literal["fourier"] = "fourier"
    dialect: Dialect = "tancik"
    axes: Literal[2, 3] = 2
    bands: int | None = None
    sigma: float = 1.0
    learned: bool = False
    max_resolution: tuple[int, ...] | None = None
    include_coords: bool = False
    project: bool = False
    coords: CoordSpec | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.coords is not None and self.coords.axes != self.axes:
            raise PositionError(
                f"axes is {self.axes} and coords {self.coords}; the same axes in both are required."
            )
        check_sigma(self.sigma)
        most = _MOST_BANDS.get(self.dialect)
        if self.bands is not None and (self.bands < 1 or (most and self.bands > most)):
            raise PositionError(
                f"bands is {self.bands} in dialect {self.dialect!r}; at least 1 is required"
                + (f", and at most {most}: more overflow float32." if most else ".")
            )
        random = _FILLINGS[self.dialect].random
        if not random and self.bands is None:
            raise PositionError(
                f"bands is None in dialect {self.dialect!r}; the number of frequencies an axis is required, 10 in NeRF "
                "and 64 in Perceiver. A ladder that filled embed_dim would double far beyond any grid."
            )
        if not random and self.learned:
            raise PositionError(
                f"learned is True in dialect {self.dialect!r}, whose ladder is fixed; use 'tancik' or 'sam'."
            )
        shape = self.max_resolution
        if (self.dialect == "perceiver") != (shape is not None) or (
            shape is not None and (len(shape) != self.axes or min(shape) < 2)
        ):
            raise PositionError(
                f"max_resolution is {shape} in dialect {self.dialect!r} with {self.axes} axes; 'perceiver' needs one "
                "number of at least 2 an axis, (t,) y, x, and no other dialect has one."
            )


class Fourier(Additive):
    """Fourier features of cell coordinates, or of any points.

    Random dialects hold the parameter `frequencies [axes, pairs]`, radians a unit, trained only if the spec says so; a
    cast of the model to bfloat16 rounds it like any weight: keep it in float32. Ladders are rebuilt from the spec.
    Coordinates and angles are float32 whatever the model's dtype. In training the coordinates of a grid are perturbed
    as `coords` says; a shift turns all tokens' pairs alike: every code changes, the product of two codes does not.

    Raises:
        PositionError: if the features' width is not embed_dim and no projection is asked for.

    Example:
        >>> from visionpos.geometry.grid import Grid
        >>> spec = FourierSpec(dialect="nerf_paper", bands=2)
        >>> code = Fourier(spec, Dims(embed_dim=8, num_heads=1, depth=1))
        >>> abs(code.at(torch.tensor([0.0, 0.5])).round(decimals=4))  # y = 0, x = 1/2
        tensor([1., 0., 0., 1., 0., 1., 0., 1.])

    Reference:
        Tancik et al. (arXiv 2006.10739); segment-anything modeling/prompt_encoder.py PositionEmbeddingRandom; NeRF
        (arXiv 2003.08934), bmild/nerf run_nerf_helpers.py; Perceiver (arXiv 2103.03206), transformers
        PerceiverFourierPositionEncoding. transformers' SAM rounds coordinates to the dtype of B: in bfloat16, 642 of
        1024 pixels stay distinct.
    """

    spec: FourierSpec
    frequencies: nn.Parameter | None
    projection: nn.Linear | None

    def __init__(
        self, spec: FourierSpec, dims: Dims, *, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.spec, self.dims = spec, dims
        plain = spec.axes if spec.include_coords else 0
        pairs = self._pairs(plain)
        width = 2 * pairs + plain
        if not spec.project and width != dims.embed_dim:
            raise PositionError(
                f"the features are {width} channels wide and embed_dim is {dims.embed_dim}; without a projection the "
                "two must agree. Change bands, or set project=True."
            )
        self.frequencies = self.projection = None
        if _FILLINGS[spec.dialect].random:
            drawn = gaussian_freqs(pairs, axes=spec.axes, sigma=spec.sigma, generator=generator)
            self.frequencies = nn.Parameter(drawn, requires_grad=spec.learned)
        if spec.project:
            self.projection = nn.Linear(width, dims.embed_dim)
            nn.init.trunc_normal_(self.projection.weight, std=0.02, generator=generator)
            nn.init.zeros_(self.projection.bias)

    @property
    def coords(self) -> CoordSpec:
        """Return how the tokens of a grid are numbered."""
        unit = _FILLINGS[self.spec.dialect].unit
        return self.spec.coords or CoordSpec(unit=unit, axes=self.spec.axes)

    def forward(
        self,
        grid: Grid,
        *,
        device: torch.device | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return `[n, embed_dim]`; with two axes the frames of a clip share their code.

        Raises:
            PositionError: if a device other than that of the parameters is asked for.
        """
        weight = next(self.parameters(), None)
        if weight is not None:
            check_device(weight, device)
            device = weight.device
        points = self.points(grid, device=device, generator=generator)
        return self._code(points, lattice_angles(points, grid, self.freqs(points.device)))

    def points(
        self,
        grid: Grid,
        *,
        device: torch.device | None = None,
        generator: torch.Generator | None = None,
        draws: int | None = None,
    ) -> Tensor:
        """Return `[n, axes]`, where the tokens of a grid are, perturbed in training; `[draws, n, axes]` for `at`."""
        still = coordinates(grid, self.coords, device=device)
        if not self.training:
            return repeated(still, draws)
        return augment(still, self.coords, draws=draws, generator=generator)

    def at(self, points: Tensor) -> Tensor:
        """Return the code at any points, `[..., embed_dim]`.

        Args:
            points: `[..., axes]`, ordered (t,) y, x, in the unit of `coords`: [0, 1] or [-1, 1] over the image.

        Raises:
            PositionError: if points are of another rank or not finite.
        """
        check_points(points, self.spec.axes, "points")
        turns = angles(points.unsqueeze(-2), self.freqs(points.device)).squeeze(-2)
        return self._code(points, turns)

    def freqs(self, device: torch.device | None = None) -> Tensor:
        """Return `[axes, pairs]` radians a coordinate unit, float32."""
        if self.frequencies is not None:
            return self.frequencies
        spec, filling, bands = self.spec, _FILLINGS[self.spec.dialect], self.spec.bands or 0
        if spec.max_resolution is not None:
            rungs = [
                torch.linspace(1.0, cells / 2, bands, device=device, dtype=torch.float32)
                for cells in spec.max_resolution
            ]
            owner = torch.arange(spec.axes, device=device).repeat_interleave(bands)
            return on_axis(torch.cat(rungs) * math.pi, owner, spec.axes)
        doubling = axial_freqs(
            2 * bands * spec.axes,
            theta=2.0**-bands,  # theta ** -(k / bands) is 2 ** k
            axes=spec.axes,
            order="contiguous" if filling.by_axis else "interleaved",
            axis_order=self._axis_order(),
            device=device,
            dtype=torch.float64,
        ).to(torch.float32)
        return doubling * math.pi if spec.dialect == "nerf_paper" else doubling

    def _axis_order(self) -> tuple[int, ...]:
        axes = tuple(range(self.spec.axes))
        return axes[::-1] if _FILLINGS[self.spec.dialect].x_first else axes

    def _pairs(self, plain: int) -> int:
        """Return the number of sine-cosine pairs."""
        spec = self.spec
        if spec.bands is None:
            return max((self.dims.embed_dim - plain) // 2, 1)
        return spec.bands if _FILLINGS[spec.dialect].random else spec.bands * spec.axes

    def _code(self, points: Tensor, turns: Tensor) -> Tensor:
        filling, axes = _FILLINGS[self.spec.dialect], self.spec.axes
        if filling.by_axis:
            code = waves(turns, filling.waves)
        else:
            banded: Tensor = turns.unflatten(-1, (-1, axes))  # [..., bands, axes]
            code = waves(banded, filling.waves).flatten(-2)
        if self.spec.include_coords:
            own = points.flip(-1) if filling.x_first else points
            code = torch.cat([own.to(code.dtype), code], dim=-1)
        if self.projection is None:
            return code
        projected: Tensor = self.projection(code.to(self.projection.weight.dtype))
        return projected

    @classmethod
    def from_segment_anything(
        cls, state: Mapping[str, Tensor], spec: FourierSpec, dims: Dims
    ) -> Fourier:
        """Return the encoding with SAM's random matrix.

        Args:
            state: one entry `positional_encoding_gaussian_matrix (2, pairs)` (segment-anything, SAM 2) or
                `positional_embedding` (transformers), in turns, x first.
            spec: of dialect "sam".
            dims: embed_dim twice the pairs.

        Raises:
            PositionError: if the entry is missing or of another shape.
        """
        turns = required_entry(
            state, "positional_encoding_gaussian_matrix", "positional_embedding", ranks=(2,)
        )
        own = {"frequencies": turns.flip(0) * (2.0 * math.pi)}
        return filled(cls(spec, dims), own, source="segment-anything")
