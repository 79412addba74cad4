"""Sine codes of detectors: cells counted on a padded image, normalised, sine and cosine side by side. DETR, XCiT."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import nn

from visionpos.encodings.doors import Additive, Dims, check_device, check_points
from visionpos.encodings.sources import filled, required_entry
from visionpos.errors import PositionError
from visionpos.geometry.coords import CoordSpec, coordinates
from visionpos.geometry.fields import check_fields
from visionpos.geometry.freqs import angles, ladder
from visionpos.geometry.grid import Grid
from visionpos.geometry.points import readable
from visionpos.geometry.ranges import check_theta
from visionpos.geometry.waves import waves

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

Dialect = Literal["detr", "deformable_detr"]
_HALF_CELL = {"detr": 0.0, "deformable_detr": 0.5}  # taken off the 1-based count before dividing
_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class SineSpec:
    """Settings of a detector's sine code.

    Args:
        dialect: where cell i of N stands, counted from 1: "detr" at i / N, so that the last cell is exactly a whole
            turn and none is at 0 (DETR, Conditional DETR, DAB-DETR, SAM 2, XCiT, EdgeNeXt); "deformable_detr" at
            (i - 1/2) / N, the cell centres, whose mean is 1/2 (Deformable DETR, DINO).
        theta: ladder base (10000; 20 in DAB-DETR and DN-DETR).
        normalize: divide by the count; without it both dialects use the bare count 1, 2, ...
        scale: what the normalised position 1 becomes, in radians of the fastest pair.
        hidden_dim: channels of each axis before a learned projection to embed_dim (XCiT and EdgeNeXt: 32); None for no
            projection, half of embed_dim an axis.

    Raises:
        PositionError: for an unknown dialect, or a number out of range.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    kind: Literal["sine"] = "sine"
    dialect: Dialect = "detr"
    theta: float = 10000.0
    normalize: bool = True
    scale: float = 2.0 * math.pi
    hidden_dim: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_theta(self.theta)
        if self.scale <= 0:
            raise PositionError(f"scale is {self.scale}; a finite angle above 0 is required.")
        if self.hidden_dim is not None and (self.hidden_dim < 2 or self.hidden_dim % 2):
            raise PositionError(
                f"hidden_dim is {self.hidden_dim}; an even number of at least 2 is required, sine and cosine of each "
                "frequency."
            )


class Sine(Additive):
    """DETR's sine code, `[y, x]` halves, sine and cosine of each frequency side by side.

    Positions are computed in float32 whatever the model's dtype: cast the result last. DETR adds it at every attention,
    to what q and k are projected from and not to v: see `added`. The learned counterpart is a `Factorized` table.

    Raises:
        PositionError: if embed_dim is no multiple of 4.

    Example:
        >>> from visionpos.geometry.grid import Grid
        >>> sine = Sine(SineSpec(), Dims(embed_dim=4, num_heads=1, depth=1))
        >>> abs(sine(Grid(1, 2))[1].round(decimals=4))  # the last cell: a whole turn
        tensor([0., 1., 0., 1.])

    Reference:
        DETR (arXiv 2005.12872), facebookresearch/detr models/position_encoding.py; Deformable DETR (arXiv 2010.04159);
        XCiT (arXiv 2106.09681). transformers computes positions in the model's dtype (off by .024 on 25x25 cells in
        bfloat16). Deliberate difference: a column without any valid cell is at position 0; Deformable DETR takes the
        sine of -3e6 there.
    """

    spec: SineSpec
    projection: nn.Linear | None

    def __init__(
        self, spec: SineSpec, dims: Dims, *, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.spec, self.dims = spec, dims
        if spec.hidden_dim is None and dims.embed_dim % 4:
            raise PositionError(
                f"embed_dim is {dims.embed_dim}; a multiple of 4 is required, sine and cosine of two axes. Set "
                "hidden_dim to project to any width."
            )
        self.projection = None
        if spec.hidden_dim is not None:
            self.projection = nn.Linear(2 * spec.hidden_dim, dims.embed_dim)
            nn.init.trunc_normal_(self.projection.weight, std=0.02, generator=generator)
            nn.init.zeros_(self.projection.bias)
        self._ladder(None)

    def forward(self, grid: Grid, *, device: torch.device | None = None) -> Tensor:
        """Return `[n, embed_dim]` float32 of an image without padding; frames of a clip share their code.

        Raises:
            PositionError: if a device other than the projection's is asked for.
        """
        if self.projection is not None:
            check_device(self.projection.weight, device)
            device = self.projection.weight.device
        lines = [
            coordinates(Grid(1, side), CoordSpec(axes=1, offset=1.0), device=device).squeeze(-1)
            for side in (grid.height, grid.width)
        ]
        y = self._position(lines[0], grid.height).unsqueeze(-1)  # [h, 1]
        x = self._position(lines[1], grid.width).unsqueeze(0)  # [1, w]
        code = self._code(y, x).flatten(0, 1)
        return code.repeat(grid.frames, 1) if grid.frames > 1 else code

    def masked(self, *, valid: Tensor | None = None, padding: Tensor | None = None) -> Tensor:
        """Return the codes of images padded to one size: each counts and divides by its own valid cells.

        Args:
            valid: `[b, h, w]`, True or 1 on the image (transformers' pixel mask). Exactly one of the two is given.
            padding: `[b, h, w]`, True or 1 on padding (DETR's mask).

        Returns:
            `[b, h * w, embed_dim]` float32, row-major. Padded cells get some code; mask them out of attention.

        Raises:
            PositionError: if not exactly one mask is given, it has another rank, or (on the CPU) other values.
        """
        if (valid is None) == (padding is None):
            raise PositionError(
                f"valid is {'None' if valid is None else 'given'} and padding likewise; exactly one mask is required. "
                "Say which cells are image (valid=) or which are not (padding=)."
            )
        keep = _flags(valid, "valid") if valid is not None else ~_flags(padding, "padding")
        if keep.ndim != 3 or 0 in keep.shape[1:]:
            raise PositionError(
                f"the mask has shape {tuple(keep.shape)}; [b, h, w], sides of at least 1, is required. Reduce it to "
                "the grid of tokens."
            )
        whole = keep.to(torch.float32)
        lanes = []
        for axis in (1, 2):
            count = whole.cumsum(axis)
            total = count.narrow(axis, -1, 1)
            place = self._position(count, total)
            lanes.append(torch.where(total > 0, place, torch.zeros_like(place)))
        return self._code(lanes[0], lanes[1]).flatten(1, 2)

    def at(self, shares_yx: Tensor) -> Tensor:
        """Return the code at any places of the image, as for box centres: `[..., n, embed_dim]`.

        Args:
            shares_yx: `[..., n, 2]`, 0 at the top left edge and 1 at the bottom right.

        Raises:
            PositionError: if the points are of another rank or not finite, or positions are not normalised.
        """
        if not self.spec.normalize:
            raise PositionError(
                "normalize is False; a share of the image has no place among bare counts. Set normalize=True."
            )
        check_points(shares_yx, 2, "shares_yx", rank=2)
        dtype = torch.promote_types(torch.float32, shares_yx.dtype)
        y, x = (shares_yx.to(dtype) * self.spec.scale).unbind(-1)
        return self._code(y, x)

    def _position(self, count: Tensor, total: float | Tensor) -> Tensor:
        """Return the place of a cell counted from 1, in radians of the fastest pair."""
        if not self.spec.normalize:
            return count
        share: Tensor = (count - _HALF_CELL[self.spec.dialect]) / (total + _EPS)
        return share * self.spec.scale

    def _ladder(self, device: torch.device | None) -> Tensor:
        """Return the `[1, pairs]` frequencies of each axis."""
        hidden = self.spec.hidden_dim
        pairs = self.dims.embed_dim // 4 if hidden is None else hidden // 2
        return ladder(pairs, theta=self.spec.theta, device=device).unsqueeze(0)

    def _code(self, y: Tensor, x: Tensor) -> Tensor:
        """Return the code at places y and x, which broadcast, projected if the spec says so."""
        freqs = self._ladder(y.device)
        halves = [waves(angles(place.unsqueeze(-1), freqs), "interleaved") for place in (y, x)]
        shape = torch.broadcast_shapes(y.shape, x.shape)
        code = torch.cat([half.expand(*shape, -1) for half in halves], dim=-1)
        if self.projection is None:
            return code
        projected: Tensor = self.projection(code.to(self.projection.weight.dtype))
        return projected

    @classmethod
    def from_timm(cls, state: Mapping[str, Tensor], spec: SineSpec, dims: Dims) -> Sine:
        """Return the encoding with the projection of timm's or the authors' PositionalEncodingFourier.

        Args:
            state: entries `token_projection.weight (d, 2 * hidden_dim, 1, 1)` and `token_projection.bias`.
            spec: with hidden_dim.
            dims: sizes of the model.

        Raises:
            PositionError: if an entry is missing or of another shape.
        """
        own = {
            "projection.weight": required_entry(
                state, "token_projection.weight", ranks=(2, 4)
            ).flatten(1),
            "projection.bias": required_entry(state, "token_projection.bias"),
        }
        return filled(cls(spec, dims), own, source="timm")


def _flags(mask: Any, name: str) -> Tensor:
    """Return a mask of booleans, or of ones and zeros, as booleans; values are looked at on the CPU alone."""
    if not isinstance(mask, torch.Tensor):
        raise PositionError(
            f"{name} is {mask!r}; a tensor [b, h, w] is required. Make it with torch.tensor."
        )
    flags = mask.bool()
    if mask.dtype != torch.bool and readable(mask) and not bool((flags == mask).all()):
        raise PositionError(
            f"{name} holds {mask[flags != mask][0].item()}; True and False, or 1 and 0, are required. Turn a mask that "
            "is added to logits into one with mask == 0."
        )
    return flags


def doubled_sine(positions: Tensor, channels: int, *, theta: float = 10000.0) -> Tensor:
    """Return SAM 2's code of points in time: all sines, then all cosines, every frequency twice.

    Args:
        positions: `[n]`, a share of the longest time apart.
        channels: a multiple of 4; `channels / 4` different frequencies.
        theta: ladder base.

    Returns:
        `[n, channels]` float32 or better.

    Raises:
        PositionError: if channels is no multiple of 4.

    Example:
        >>> doubled_sine(torch.tensor([1.0]), 8).round(decimals=4)
        tensor([[0.8415, 0.8415, 0.0100, 0.0100, 0.5403, 0.5403, 0.9999, 0.9999]])

    Reference:
        facebookresearch/sam2 sam2/modeling/sam2_utils.py get_1d_sine_pe, whose exponents use i // 2 on a ladder that is
        not interleaved. The released weights depend on it.
    """
    if channels < 4 or channels % 4:
        raise PositionError(f"channels is {channels}; a positive multiple of 4 is required.")
    freqs = ladder(channels // 4, theta=theta, device=positions.device).repeat_interleave(2)
    return waves(angles(positions.unsqueeze(-1), freqs.unsqueeze(0)), "sin_cos")
