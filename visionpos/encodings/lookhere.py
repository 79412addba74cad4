"""LookHere: every head looks in one direction, sees the rest of the image not at all, and fades with distance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import torch

from visionpos.encodings.biasing import check_flat, powered
from visionpos.encodings.doors import Biasing, Dims
from visionpos.errors import PositionError
from visionpos.geometry.fields import check_choice, check_fields
from visionpos.geometry.places import check_points
from visionpos.geometry.ranges import check_layer
from visionpos.geometry.relative import distances, distinct_offsets

if TYPE_CHECKING:
    from torch import Tensor

    from visionpos.geometry.grid import Grid


class _Normal(NamedTuple):
    """A half plane: every key with y * down + x * right >= 0, seen from the query, lies in it."""

    down: int
    right: int


_HALVES = (_Normal(-1, 0), _Normal(1, 0), _Normal(0, -1), _Normal(0, 1))  # up, down, left, right
_UP, _DOWN, _LEFT, _RIGHT = _HALVES
_WEDGES = (  # |x| <= -y, |x| <= y, |y| <= -x, |y| <= x
    (_Normal(-1, -1), _Normal(-1, 1)),
    (_Normal(1, -1), _Normal(1, 1)),
    (_Normal(-1, -1), _Normal(1, -1)),
    (_Normal(-1, 1), _Normal(1, 1)),
)
# What the four heads of a view see: the meeting of half planes. "none" and "zero" see everything.
_VIEWS: dict[str, tuple[tuple[_Normal, ...], ...]] = {
    "halves": tuple((half,) for half in _HALVES),
    "corners": ((_UP, _LEFT), (_UP, _RIGHT), (_DOWN, _LEFT), (_DOWN, _RIGHT)),
    "triangles": _WEDGES,
    "eighths1": tuple(
        (*wedge, side) for wedge, side in zip(_WEDGES, (_LEFT, _LEFT, _UP, _UP), strict=True)
    ),
    "eighths2": tuple(
        (*wedge, side) for wedge, side in zip(_WEDGES, (_RIGHT, _RIGHT, _DOWN, _DOWN), strict=True)
    ),
    "none": ((), (), (), ()),
    "zero": ((), (), (), ()),
}
_FREE = ("none", "zero")
_FREE_SLOPES = (1 / 4, 1 / 16, 1 / 64, 1 / 256)
_POWERS = {"linear": 1.0, "sqrt": 0.5, "square": 2.0}
# What the source puts in place of minus infinity: a row that sees nothing would still be no NaN.
_HIDDEN = float(torch.finfo(torch.bfloat16).min)


@dataclass(frozen=True, slots=True, kw_only=True)
class LookHereSpec:
    """Settings of LookHere.

    Args:
        views: (name, heads) in the order of the heads: "halves" 180 degrees (up, down, left, right), "corners" and
            "triangles" 90, "eighths1" and "eighths2" 45 degrees, "none" everything, "zero" everything without a slope.
            A multiple of 4 heads each; 2 heads as well for "none" and "zero".
        global_slope: multiplies every slope: the knob for new resolutions.
        layer_slopes: factor of the first and of the last layer, linear in between.
        distance: "linear", "sqrt" or "square" of Euclid's distance in cells.
        rounding: "bfloat16" stores the bias so, as the source does; "none" keeps float32.

    Raises:
        PositionError: if a view, a count, a slope or a choice is out of range.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    kind: Literal["lookhere"] = "lookhere"
    views: tuple[tuple[str, int], ...] = (("corners", 4), ("triangles", 4), ("none", 4))
    global_slope: float = 2.0
    layer_slopes: tuple[float, float] = (1.5, 0.5)
    distance: Literal["linear", "sqrt", "square"] = "linear"
    rounding: Literal["bfloat16", "none"] = "bfloat16"

    def __post_init__(self) -> None:
        check_fields(self)
        for name, heads in self.views:
            check_choice("views", name, tuple(_VIEWS))
            if heads < 1 or (heads % 4 and not (name in _FREE and heads == 2)):
                raise PositionError(
                    f"views give {heads} heads to {name!r}; a multiple of 4 is required (or 2 for 'none' and 'zero')."
                )
        slopes: tuple[float, ...] = (self.global_slope, *self.layer_slopes)
        if min(slopes) <= 0:
            raise PositionError(
                f"global_slope is {self.global_slope} and layer_slopes {self.layer_slopes}; three finite numbers above "
                "0 are required: one for all, one for the first and one for the last layer."
            )


class LookHere(Biasing):
    """Directed attention: masks and distance slopes, another scale in every layer; no parameters, any grid.

    It depends on differences only (shift-relative); a mirror or quarter turn of the grid exchanges heads. Keys on the
    border of a view are seen, the query itself always. Hidden keys get the most negative bfloat16. Prefix tokens get 0:
    they see and are seen. Memory of `forward` is `num_heads` n x n numbers a layer.

    Raises:
        PositionError: if the views do not name every head.

    Example:
        >>> from visionpos.geometry.grid import Grid
        >>> spec = LookHereSpec(views=(("halves", 4), ("none", 2)), layer_slopes=(1.0, 0.5))
        >>> bias = LookHere(spec, Dims(embed_dim=12, num_heads=6, depth=2))
        >>> bias(Grid(2, 1), layer=1)[:2, 0, 1]  # the upper cell looks up, then down
        tensor([-3.3895e+38, -5.0000e-01])

    Reference:
        LookHere (arXiv 2405.13985), GreenCUBIC/lookhere lookhere.py. Left out: the ablations "center" and "diagonals"
        and the fillings "zero" and "max" of hidden keys.
    """

    spec: LookHereSpec

    def __init__(self, spec: LookHereSpec, dims: Dims) -> None:
        super().__init__()
        self.spec, self.dims = spec, dims
        named = sum(heads for _, heads in spec.views)
        if named != dims.num_heads:
            raise PositionError(
                f"views name {named} heads and the model has {dims.num_heads}; they must agree. Give every head a view."
            )

    def slopes(self, layer: int = 0) -> list[float]:
        """Return the slope of every head of a layer.

        Raises:
            PositionError: if there is no such layer.
        """
        depth = self.dims.depth
        check_layer(layer, depth)
        first, last = self.spec.layer_slopes
        share = (layer % depth) / (depth - 1) if depth > 1 else 0.0
        scale = self.spec.global_slope * (first + (last - first) * share)
        return [scale * slope for name, heads in self.spec.views for slope in _own(name, heads)]

    def values(self, offsets: Tensor, *, layer: int = 0) -> Tensor:
        """Return `[num_heads, ...]`, the bias of a layer at differences `[..., 2]` (y, x), query minus key."""
        check_points(offsets, None, "offsets")
        if offsets.shape[-1] != 2:
            raise PositionError(f"offsets have {offsets.shape[-1]} axes; directions need (y, x).")
        # The source rounds products of float64; MPS has none.
        exact = torch.float32 if offsets.device.type == "mps" else torch.float64
        far = powered(distances(offsets.to(exact), "l2"), _POWERS[self.spec.distance])
        slopes = far.new_tensor(self.slopes(layer)).view(-1, *[1] * far.ndim)
        bias = -slopes * far
        if self.spec.rounding == "bfloat16":
            bias = bias.to(torch.bfloat16)
        return bias.to(torch.float32).masked_fill(~self._seen(offsets), _HIDDEN)

    def forward(
        self, grid: Grid, *, prefix: int = 0, layer: int = 0, device: torch.device | None = None
    ) -> Tensor:
        """Return the bias of a layer, `[num_heads, prefix + n, prefix + n]`: it grows as n x n."""
        return self.dense(self.of_layer(grid, layer, device=device), grid, prefix=prefix)

    def of_layer(self, grid: Grid, layer: int = 0, *, device: torch.device | None = None) -> Tensor:
        """Return `[num_heads, (2h - 1)(2w - 1)]`, the bias of a layer at every difference of a grid."""
        check_flat(grid)
        return self.values(distinct_offsets(grid, device=device), layer=layer)

    def _seen(self, offsets: Tensor) -> Tensor:
        """Return `[num_heads, ...]`, whether each head sees a key at this difference."""
        y, x = (-offsets).unbind(-1)  # where the key is, seen from the query
        heads = []
        for name, count in self.spec.views:
            for planes in _VIEWS[name] * (count // 4) if count % 4 == 0 else _VIEWS[name][:count]:
                seen = torch.ones_like(y, dtype=torch.bool)
                for down, right in planes:
                    seen = seen & (y * down + x * right >= 0)
                heads.append(seen)
        return torch.stack(heads)


def _own(name: str, heads: int) -> list[float]:
    """Return the slopes of the heads of one view: halved every four heads where they are directed."""
    if name == "zero":
        return [0.0] * heads
    if name in _FREE:
        return [_FREE_SLOPES[head // max(heads // 4, 1)] for head in range(heads)]
    return [2.0 ** -(1 + head // 4) for head in range(heads)]
