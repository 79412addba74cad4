"""Axial RoPE: every channel pair is turned by one axis. EVA-02, DINOv3, RoPE-ViT axial, Pixtral, Qwen-VL towers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from visionpos.encodings.doors import Dims, Rotary
from visionpos.errors import PositionError
from visionpos.geometry.coords import CoordSpec
from visionpos.geometry.freqs import Bands, Order, axial_freqs, period_freqs
from visionpos.geometry.rotation import Pairing

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_FULL_TURN = 6.283185307179586


@dataclass(frozen=True, slots=True, kw_only=True)
class AxialRopeSpec:
    """Settings of axial RoPE.

    Args:
        theta: ladder base; unused when periods are given.
        coords: numbering of tokens, extent and training jitter.
        pairing: "half" or "adjacent" channels.
        order: "contiguous" or "interleaved" share of pairs between the axes.
        bands: "shared" ladder on every axis or one "dealt" to them (Pixtral).
        axis_order: axis that owns the first, second, ... share; None is (t,) y, x.
        unit: "radians": freqs multiply coordinates directly; "turns": times 2 pi (DINOv3).
        periods: shortest and longest period in coordinate units instead of theta (DINOv3 min_period, max_period).
        rotary_dim: channels of a head that turn; all when None.

    Raises:
        PositionError: if periods are given together with another choice they exclude.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    kind: Literal["axial_rope"] = "axial_rope"
    theta: float = 100.0
    coords: CoordSpec = field(default_factory=CoordSpec)
    pairing: Pairing = "adjacent"
    order: Order = "contiguous"
    bands: Bands = "shared"
    axis_order: tuple[int, ...] | None = None
    unit: Literal["radians", "turns"] = "radians"
    periods: tuple[float, float] | None = None
    rotary_dim: int | None = None

    def __post_init__(self) -> None:
        other = (self.order, self.bands, self.axis_order, self.unit)
        if self.periods is not None and other != ("contiguous", "shared", None, "radians"):
            raise PositionError(
                f"periods {self.periods} cannot be combined with order, bands, axis_order or unit {other}; leave "
                "those at "
                "their defaults, or drop periods."
            )


class AxialRope(Rotary):
    """Axial rotary encoding; it has no parameters and no buffers, so no cast can touch its frequencies.

    Memory of a rotation is `2 * n * pairs` float32 numbers, shared by all layers and heads.

    Raises:
        PositionError: if the rotated channels are no multiple of 2 * axes.

    Example:
        >>> from visionpos.geometry.grid import Grid
        >>> rope = AxialRope(AxialRopeSpec(), Dims(embed_dim=384, num_heads=6, depth=12, prefix=1))
        >>> rope(Grid(3, 5)).cos.shape
        torch.Size([15, 32])

    Reference:
        RoPE-ViT (arXiv 2403.13298) theta 100, x first; EVA-02 (arXiv 2303.11331) theta 10000, y first; DINOv3
        (arXiv 2508.10104) centred coordinates in turns, half pairing.
    """

    spec: AxialRopeSpec

    def __init__(self, spec: AxialRopeSpec, dims: Dims) -> None:
        super().__init__()
        self.spec, self.dims = spec, dims
        if spec.rotary_dim is not None and spec.rotary_dim > dims.channels:
            raise PositionError(
                f"rotary_dim is {spec.rotary_dim} and a head has {dims.channels} channels; at most head_dim can turn."
            )
        self.freqs()  # refuse impossible sizes now, not in the first forward

    @property
    def coords(self) -> CoordSpec:
        """Return how tokens are numbered."""
        return self.spec.coords

    @property
    def pairing(self) -> Pairing:
        """Return which channels turn together."""
        return self.spec.pairing

    @property
    def layerwise(self) -> bool:
        """Return False: all layers share the frequencies."""
        return False

    def freqs(self, layer: int = 0, *, device: torch.device | None = None) -> Tensor:  # noqa: ARG002 (all layers alike)
        """Return `[axes, pairs]` float32, rebuilt from the spec."""
        spec, axes = self.spec, self.spec.coords.axes
        head_dim = self.dims.channels if spec.rotary_dim is None else spec.rotary_dim
        if spec.periods is not None:
            shortest, longest = spec.periods
            return period_freqs(
                head_dim, shortest=shortest, longest=longest, axes=axes, device=device
            )
        freqs = axial_freqs(
            head_dim,
            theta=spec.theta,
            axes=axes,
            order=spec.order,
            bands=spec.bands,
            axis_order=spec.axis_order,
            device=device,
        )
        return freqs * _FULL_TURN if spec.unit == "turns" else freqs
