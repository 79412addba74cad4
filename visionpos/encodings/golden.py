"""Golden-gate RoPE: oblique directions spread by the golden ratio over all pairs of all heads, nothing learned."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

import torch

from visionpos.encodings.doors import Dims, Rotary
from visionpos.geometry.bands import Directions, golden_freqs
from visionpos.geometry.coords import CoordSpec
from visionpos.geometry.fields import check_choice, check_fields
from visionpos.geometry.ranges import check_speeds
from visionpos.geometry.rotation import PAIRINGS, PER_AXIS, Pairing

if TYPE_CHECKING:
    from torch import Tensor

    from visionpos.geometry.grid import Grid


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenRopeSpec:
    """Settings of golden-gate RoPE.

    Args:
        slowest: radians per coordinate unit of the slowest pair that turns.
        fastest: radians per coordinate unit of the fastest pair.
        still: share of pairs, the first ones, that do not turn.
        directions: "angle" (two axes) or "quasirandom" (any number of axes).
        aspect: "keep" widens the coordinates of a wide image by sqrt(width / height) and narrows its heights alike, so
            that a cell is as wide as it is high; "stretch" leaves each axis on its own [-1, 1].
        coords: numbering of tokens, extent and training jitter.
        pairing: "half" as in the source, or "adjacent".

    Raises:
        PositionError: if a word is unknown.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    kind: Literal["golden_rope"] = "golden_rope"
    slowest: float = 0.2
    fastest: float = 20.0
    still: float = 0.0
    directions: Directions = "angle"
    aspect: Literal["keep", "stretch"] = "keep"
    coords: CoordSpec = field(default_factory=lambda: CoordSpec(unit="endpoint"))
    pairing: Pairing = "half"

    def __post_init__(self) -> None:
        check_fields(self)
        check_choice("pairing", self.pairing, tuple(p for p in PAIRINGS if p not in PER_AXIS))
        check_speeds(self.slowest, self.fastest, self.still)


class GoldenRope(Rotary):
    """Rotary encoding along fixed oblique directions, other ones in every head; no parameters and no buffers.

    Strictly relative, as every Rotation is. Memory of a rotation is `2 * heads * n * pairs` float32 numbers, shared by
    all layers. A whole turn of the image mixes the axes, so row and column are no longer told apart by channels.

    Raises:
        PositionError: if a size or a bound is out of range, or directions "angle" meet other than two axes.

    Example:
        >>> from visionpos.geometry.grid import Grid
        >>> rope = GoldenRope(
        ...     GoldenRopeSpec(), Dims(embed_dim=384, num_heads=6, depth=12, prefix=1)
        ... )
        >>> rope(Grid(3, 5)).cos.shape
        torch.Size([6, 15, 32])

    Reference:
        Jerry Xiong, jerryxio.ng/posts/nd-rope (2025); lucidrains/vit-pytorch vit_nd_rotary.py for "quasirandom". Ports
        that build the grid in the model's dtype lose whole turns in bfloat16; here it is float32.
    """

    spec: GoldenRopeSpec

    def __init__(self, spec: GoldenRopeSpec, dims: Dims) -> None:
        super().__init__()
        self.spec, self.dims = spec, dims
        self.freqs()

    def points(
        self,
        grid: Grid,
        *,
        device: torch.device | None = None,
        generator: torch.Generator | None = None,
        draws: int | None = None,
    ) -> Tensor:
        """Return coordinates as `Rotary.points` does, in the aspect of the grid."""
        points = super().points(grid, device=device, generator=generator, draws=draws)
        if self.spec.aspect == "stretch" or points.shape[-1] < 2:
            return points
        wide = math.sqrt(grid.width / grid.height)
        *time, y, x = points.unbind(-1)
        return torch.stack([*time, y / wide, x * wide], dim=-1)

    def freqs(self, layer: int = 0, *, device: torch.device | None = None) -> Tensor:  # noqa: ARG002 (all layers alike)
        """Return `[num_heads, axes, pairs]` float32."""
        return golden_freqs(
            self.dims.channels,
            num_heads=self.dims.num_heads,
            slowest=self.spec.slowest,
            fastest=self.spec.fastest,
            still=self.spec.still,
            directions=self.spec.directions,
            axes=self.spec.coords.axes,
            device=device,
        )
