"""Circle-RoPE: image tokens on a circle across the text axis, in all layers or in every other one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch.nn import functional as F

from visionpos.encodings.doors import Dims, Rotary
from visionpos.errors import PositionError
from visionpos.geometry.circle import check_circle, circle_coords
from visionpos.geometry.coords import CoordSpec
from visionpos.geometry.fields import check_choice, check_fields
from visionpos.geometry.freqs import Order, angles
from visionpos.geometry.grid import check_grid
from visionpos.geometry.ranges import check_layer, check_theta
from visionpos.geometry.rotation import PAIRINGS, PER_AXIS, Pairing
from visionpos.geometry.sections import section_freqs

if TYPE_CHECKING:
    from torch import Tensor

    from visionpos.geometry.grid import Grid

Layers = Literal["all", "even", "first_half", "second_half"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CircleRopeSpec:
    """Settings of Circle-RoPE.

    Args:
        sections: pairs of t, y and x.
        theta: ladder base over all pairs.
        order: "contiguous" (Qwen2.5-VL) or "interleaved" sections.
        radius: of the circle; None is the largest centred coordinate times `radius_scale`.
        radius_scale: see radius.
        alpha: weight of the angle a cell is seen at against its raster number.
        layers: which layers use the circle; the others use (0, y, x) as M-RoPE does. "even" is the source's strategy 4
            (layers 0, 2, ...), "first_half" its strategy 2, "second_half" its strategy 3.
        coords: numbering of the cells; two axes.
        pairing: which channels turn together.

    Raises:
        PositionError: if there are not three sections, or a value is out of range.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    kind: Literal["circle_rope"] = "circle_rope"
    sections: tuple[int, ...]
    theta: float = 1000000.0
    order: Order = "contiguous"
    radius: float | None = 10.0
    radius_scale: float = 1.0
    alpha: float = 0.5
    layers: Layers = "even"
    coords: CoordSpec = field(default_factory=CoordSpec)
    pairing: Pairing = "half"

    def __post_init__(self) -> None:
        check_fields(self)
        check_choice("pairing", self.pairing, tuple(p for p in PAIRINGS if p not in PER_AXIS))
        if len(self.sections) != 3 or min(self.sections) < 1 or self.coords.axes != 2:
            raise PositionError(
                f"sections are {self.sections} and coords have {self.coords.axes} axes; sections of t, y and x of at "
                "least 1 pair, and two axes are required."
            )
        check_theta(self.theta)
        check_circle(self.radius, self.radius_scale, self.alpha)


class CircleRope(Rotary):
    """Rotary encoding of an image whose cells lie on a circle; no parameters and no buffers.

    Every cell is equally far from a text token at (s, s, s). Between cells it is **not** relative: the circle depends
    on the whole image, so shifting two cells changes their score, and shift of the coordinates changes nothing at all.

    Raises:
        PositionError: if the sections do not fit the head, or a clip of several frames is asked for.

    Example:
        >>> from visionpos.geometry.grid import Grid
        >>> spec = CircleRopeSpec(sections=(8, 12, 12))
        >>> rope = CircleRope(spec, Dims(embed_dim=384, num_heads=6, depth=12))
        >>> rope(Grid(3, 5), layer=0).cos.shape
        torch.Size([15, 32])

    Reference:
        Circle-RoPE (arXiv 2505.16416), lose4578/CircleRoPE: radius 10, alpha .5, even layers, images only. There the
        ids are then moved to follow the text before them; that shift is the language model's business.
    """

    spec: CircleRopeSpec

    def __init__(self, spec: CircleRopeSpec, dims: Dims) -> None:
        super().__init__()
        self.spec, self.dims = spec, dims
        if 2 * sum(spec.sections) > dims.channels:
            raise PositionError(
                f"sections {spec.sections} turn {2 * sum(spec.sections)} channels and a head has {dims.channels}; at "
                "most head_dim can turn. Read the sections from the checkpoint."
            )
        self.freqs()

    @property
    def layerwise(self) -> bool:
        """Return whether layers differ: some use the circle and some the grid."""
        return self.spec.layers != "all"

    def freqs(self, layer: int = 0, *, device: torch.device | None = None) -> Tensor:  # noqa: ARG002 (all layers alike)
        """Return `[3, pairs]` float32: t, y, x."""
        spec = self.spec
        return section_freqs(
            2 * sum(spec.sections), spec.sections, theta=spec.theta, order=spec.order, device=device
        )

    def uses_circle(self, layer: int) -> bool:
        """Return whether a layer, counted from 0, puts the cells on the circle."""
        depth = self.dims.depth
        check_layer(layer, depth)
        place = layer % depth
        first = place < (depth + 1) // 2
        return {
            "all": True,
            "even": place % 2 == 0,
            "first_half": first,
            "second_half": not first,
        }[self.spec.layers]

    def points(
        self,
        grid: Grid,
        *,
        device: torch.device | None = None,
        generator: torch.Generator | None = None,
        draws: int | None = None,
    ) -> Tensor:
        """Return `[n, 2]` coordinates of the cells, as `Rotary.points` does.

        Raises:
            PositionError: if the grid has several frames.
        """
        check_grid(grid)
        if grid.frames > 1:
            raise PositionError(
                f"grid has {grid.frames} frames; Circle-RoPE is made for images. Pass one frame at a time."
            )
        return super().points(grid, device=device, generator=generator, draws=draws)

    def angles(self, coords: Tensor, layer: int = 0) -> Tensor:
        """Return `[..., n, pairs]` radians for **all** cells of an image at once, `[..., n, 2]`."""
        spec = self.spec
        if self.uses_circle(layer):
            ids = circle_coords(
                coords, radius=spec.radius, scale=spec.radius_scale, alpha=spec.alpha
            )
        else:
            ids = F.pad(coords, (1, 0))
        return angles(ids, self.freqs(device=coords.device))
