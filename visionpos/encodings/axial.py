"""Axial RoPE: every channel pair is turned by one axis. EVA-02, DINOv3, RoPE-ViT axial, Pixtral, Qwen-VL, V-JEPA 2."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from visionpos.encodings.doors import Dims, Rotary
from visionpos.errors import PositionError
from visionpos.geometry.bands import Spacing
from visionpos.geometry.coords import CoordSpec, coordinates
from visionpos.geometry.fields import check_fields
from visionpos.geometry.freqs import Bands, Order
from visionpos.geometry.lattice import owned_waves
from visionpos.geometry.layout import AngleUnit, Layout
from visionpos.geometry.ranges import check_max_freq, check_periods, check_theta
from visionpos.geometry.rotation import Pairing, Rotation

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from visionpos.geometry.grid import Grid

_FULL_TURN = 6.283185307179586


@dataclass(frozen=True, slots=True, kw_only=True)
class AxialRopeSpec:
    """Settings of axial RoPE.

    Args:
        theta: ladder base; unused when periods or max_freq are given.
        coords: numbering of tokens, extent and training jitter.
        pairing: "half" or "adjacent" channels, or "half_per_axis" (Gemma 4); see `Rotation`.
        order: "contiguous" or "interleaved" share of pairs between the axes.
        bands: "shared" ladder on every axis or one "dealt" to them (Pixtral).
        axis_order: axis that owns the first, second, ... share; None is (t,) y, x.
        unit: "radians": freqs multiply coordinates directly; "turns": times 2 pi (DINOv3).
        periods: shortest and longest period in coordinate units instead of theta (DINOv3 min_period, max_period).
        rotary_dim: channels of a head that turn; all when None; "most" is the largest multiple of 2 * axes that a head
            holds (V-JEPA 2, MiniMax M3), the rest keep their place at the end.
        max_freq: pixel bands up to pi * max_freq / 2 instead of theta (rotary-embedding-torch, timm in_pixels).
        spacing: of pixel bands, "linear" or "log".
        legacy_tiling: V-JEPA 2 as released: cosines and sines tiled over adjacent pairs. That is **no rotation**: norms
            change, and scores drift with absolute position; the released weights were trained with it.

    Raises:
        PositionError: if a word is unknown, or a choice is given together with another that it excludes.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    kind: Literal["axial_rope"] = "axial_rope"
    theta: float = 100.0
    coords: CoordSpec = field(default_factory=CoordSpec)
    pairing: Pairing = "adjacent"
    order: Order = "contiguous"
    bands: Bands = "shared"
    axis_order: tuple[int, ...] | None = None
    unit: AngleUnit = "radians"
    periods: tuple[float, float] | None = None
    rotary_dim: int | Literal["most"] | None = None
    max_freq: float | None = None
    spacing: Spacing = "linear"
    legacy_tiling: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        self._check_values()
        self._check_company()

    def _check_values(self) -> None:
        """Refuse values that are wrong by themselves."""
        check_theta(self.theta)
        if self.periods is not None:
            check_periods(*self.periods)
        if self.max_freq is not None:
            check_max_freq(self.max_freq)
        if self.pairing == "adjacent_tiled":
            raise PositionError(
                "pairing is 'adjacent_tiled', which is no rotation; it must be 'half', 'adjacent' or 'half_per_axis'. "
                "For V-JEPA 2's released weights say legacy_tiling=True."
            )
        axes = tuple(range(self.coords.axes))
        if self.axis_order is not None and tuple(sorted(self.axis_order)) != axes:
            raise PositionError(
                f"axis_order is {self.axis_order}; a permutation of {axes} is required."
            )

    def _check_company(self) -> None:
        """Refuse settings that exclude each other."""
        other = (self.order, self.bands, self.axis_order, self.unit)
        for name in ("periods", "max_freq"):
            value = getattr(self, name)
            if value is not None and other != ("contiguous", "shared", None, "radians"):
                raise PositionError(
                    f"{name} {value} cannot be combined with order, bands, axis_order or unit {other}; leave those at "
                    f"their defaults, or drop {name}."
                )
        if self.periods is not None and self.max_freq is not None:
            raise PositionError(
                f"periods {self.periods} cannot be combined with max_freq {self.max_freq}; drop one of them."
            )
        if self.legacy_tiling and self.pairing != "adjacent":
            raise PositionError(
                f"legacy_tiling cannot be combined with pairing {self.pairing!r}; it tiles adjacent pairs. Use "
                "pairing='adjacent', or drop it."
            )


class AxialRope(Rotary):
    """Axial rotary encoding; it has no parameters and no buffers, so no cast can touch its frequencies.

    Memory of a rotation is `2 * n * pairs` float32 numbers, shared by all layers and heads. Weights of another source
    need no mapping but their channel order: `convert(weight, rope.layout, other.layout)`.

    Raises:
        PositionError: if the rotated channels are no multiple of 2 * axes.

    Example:
        >>> from visionpos.geometry.grid import Grid
        >>> rope = AxialRope(AxialRopeSpec(), Dims(embed_dim=384, num_heads=6, depth=12, prefix=1))
        >>> rope(Grid(3, 5)).cos.shape
        torch.Size([15, 32])

    Reference:
        RoPE-ViT (arXiv 2403.13298) theta 100, x first; EVA-02 (arXiv 2303.11331) theta 10000, y first; DINOv3
        (arXiv 2508.10104) centred coordinates in turns, half pairing; facebookresearch/vjepa2 for legacy_tiling.
    """

    spec: AxialRopeSpec

    def __init__(self, spec: AxialRopeSpec, dims: Dims) -> None:
        super().__init__()
        self.spec, self.dims = spec, dims
        if isinstance(spec.rotary_dim, int) and spec.rotary_dim > dims.channels:
            raise PositionError(
                f"rotary_dim is {spec.rotary_dim} and a head has {dims.channels} channels; at most head_dim can turn."
            )
        self.freqs()  # refuse impossible sizes now, not in the first forward

    @property
    def pairing(self) -> Pairing:
        """Return which channels turn together."""
        return "adjacent_tiled" if self.spec.legacy_tiling else self.spec.pairing

    @property
    def layout(self) -> Layout:
        """Return the whole descriptor: channel order, speeds, coordinates and exempt tokens."""
        spec, axes, channels = self.spec, self.spec.coords.axes, self.dims.channels
        turned = spec.rotary_dim
        return Layout(
            head_dim=channels,
            pairing=self.pairing,
            axis_order=tuple(range(axes)) if spec.axis_order is None else spec.axis_order,
            order=spec.order,
            bands=spec.bands,
            rotary_dim=channels - channels % (2 * axes) if turned == "most" else turned,
            theta=spec.theta,
            unit=spec.unit,
            periods=spec.periods,
            max_freq=spec.max_freq,
            spacing=spec.spacing,
            coords=spec.coords,
            prefix=self.dims.prefix,
            suffix=self.dims.suffix,
        )

    def freqs(self, layer: int = 0, *, device: torch.device | None = None) -> Tensor:  # noqa: ARG002 (all layers alike)
        """Return `[axes, pairs]` float32, rebuilt from the spec."""
        return self.layout.freqs(device=device)

    def forward(
        self,
        grid: Grid,
        *,
        layer: int = 0,
        device: torch.device | None = None,
        generator: torch.Generator | None = None,
    ) -> Rotation:
        """Return the Rotation of a grid; see `Rotary`. Unperturbed, the waves of its sides are enough."""
        if self.training and self.coords.augments:
            return super().forward(grid, layer=layer, device=device, generator=generator)
        cells = coordinates(grid, self.coords, device=device)
        cos, sin = owned_waves(cells, grid, self.freqs(device=cells.device))
        return Rotation(cos, sin, self.pairing, self.coords.axes)

    def check_periods(self, periods: Tensor) -> float:
        """Return how far the periods stored in a checkpoint lie from this encoding's, as a share of them.

        Nothing is loaded: frequencies are rebuilt from the spec in float32, as timm and transformers do.

        Args:
            periods: `[share]` in coordinate units: DINOv3's `rope_embed.periods`. Released weights hold them rounded to
                bfloat16, up to .002 off, which moves cosines and sines by up to .0084 at 64 channels.

        Raises:
            PositionError: if there are more or fewer than an axis has, or one is off by more than 1 %.
        """
        layout = self.layout
        first = layout.freqs()[layout.axis_order[0]]
        own = _FULL_TURN / first[first != 0]
        if layout.order != "contiguous" or periods.shape != own.shape:
            raise PositionError(
                f"periods have shape {tuple(periods.shape)} and an axis has {own.numel()} pairs in order "
                f"{layout.order!r}; one period a pair of one axis is required. Check head_dim and the spec."
            )
        error = float((periods.detach().float().cpu() / own - 1).abs().max())
        if not error <= 0.01:
            raise PositionError(
                f"periods differ from the spec's by {error:.3g} of themselves; at most 0.01 is required. Set theta or "
                "periods of the spec to those the checkpoint was trained with."
            )
        return error
