"""FIRE on a grid: a small network of log-warped distance, relative to a threshold or to the grid itself."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
from torch import nn

from visionpos.encodings.biasing import blank_linear, through
from visionpos.encodings.doors import Biasing, Dims
from visionpos.encodings.repeated import repeated
from visionpos.encodings.sources import filled, required_entry
from visionpos.errors import PositionError
from visionpos.geometry.fields import check_fields
from visionpos.geometry.grid import check_grid, is_whole
from visionpos.geometry.places import check_points
from visionpos.geometry.relative import Metric, distances, distinct_offsets

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from visionpos.geometry.grid import Grid


@dataclass(frozen=True, slots=True, kw_only=True)
class FireSpec:
    """Settings of FIRE on a grid.

    Args:
        metric: how far apart two cells are: "l1", "l2" or "linf". There is no public vision model to follow.
        reach: what distance is measured against. "extent": the longest distance of the grid, or the threshold if that
            is longer, as a causal query's own index does in the paper; a resized view then keeps its scale.
            "threshold": the threshold alone; the bias is then a function of differences and nothing else.
        threshold: start of the learned threshold, in cells: 512 in the paper, which is longer than any image grid; a
            length near the trained grid lets smaller grids keep their scale.
        warp: start of the learned warping c in log(c d + 1).
        hidden: width of the network.

    Raises:
        PositionError: for an unknown choice, or a number out of range.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    kind: Literal["fire"] = "fire"
    metric: Metric = "l2"
    reach: Literal["extent", "threshold"] = "extent"
    threshold: float = 512.0
    warp: float = 0.1
    hidden: int = 32

    def __post_init__(self) -> None:
        check_fields(self)
        if min(self.threshold, self.warp) <= 0 or self.hidden < 1:
            raise PositionError(
                f"threshold is {self.threshold}, warp {self.warp} and hidden {self.hidden}; finite numbers above 0 and "
                "a width of at least 1 are required."
            )


class Fire(Biasing):
    """A network of warped, normalised distance, shared by all layers; any grid, any axes.

    It keeps every mirror and quarter turn of the square. Under "threshold" it depends on differences only
    (shift-relative); under "extent" also on the size of the grid. The network runs on the distinct differences only, in
    float32 or better; in eval without gradients, on the CPU, again only when a weight or the grid has changed. Prefix
    tokens get 0. Memory of `forward` is `num_heads` n x n numbers.

    Example:
        >>> from visionpos.geometry.grid import Grid
        >>> bias = Fire(FireSpec(), Dims(embed_dim=8, num_heads=2, depth=1))
        >>> bias(Grid(3, 5)).shape
        torch.Size([2, 15, 15])
        >>> bias.inputs(torch.tensor([10.0]), reach=10.0).round(decimals=4)
        tensor([0.1753], grad_fn=<RoundBackward1>)

    Reference:
        FIRE (arXiv 2310.04418); chuanyang-Zheng/DAPE, mcleish7/arithmetic. Deliberate difference: a grid has no causal
        order, so the query's index gives way to the grid's extent.
    """

    spec: FireSpec

    def __init__(
        self, spec: FireSpec, dims: Dims, *, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.spec, self.dims = spec, dims
        self.hidden = blank_linear(1, spec.hidden)
        self.out = blank_linear(spec.hidden, dims.num_heads)
        for layer in (self.hidden, self.out):  # PyTorch's own start, from the passed generator
            edge = layer.in_features**-0.5
            nn.init.uniform_(layer.weight, -edge, edge, generator=generator)
            nn.init.uniform_(layer.bias, -edge, edge, generator=generator)
        self.warp = nn.Parameter(torch.tensor(spec.warp))
        self.threshold = nn.Parameter(torch.tensor(spec.threshold))

    def inputs(self, distance: Tensor, *, reach: float = 0.0) -> Tensor:
        """Return `[...]` in [0, 1], the network's input at distances of at most max(reach, threshold).

        Args:
            distance: `[...]` in cells.
            reach: the longest distance of the grid; the threshold stands in where it is longer.
        """
        dtype = torch.promote_types(torch.float32, self.warp.dtype)
        warp, least = self.warp.to(dtype), self.threshold.to(dtype).abs()
        span = torch.maximum(least, torch.full_like(least, reach))
        warped = (warp * distance.to(dtype)).abs() + 1.0
        return warped.log() / (((warp * span).abs() + 1.0).log() + 1e-6)

    def values(self, offsets: Tensor, *, extent: tuple[int, ...] | None = None) -> Tensor:
        """Return `[num_heads, ...]`, the bias at differences `[..., axes]` in cells.

        Args:
            offsets: query minus key.
            extent: sides of the grid, (t,) y, x: what "extent" measures against.

        Raises:
            PositionError: if "extent" is given no sides of a grid, or (on the CPU) a difference is not finite.
        """
        check_points(offsets, None, "offsets")
        reach = 0.0
        if self.spec.reach == "extent":
            if extent is None:
                raise PositionError(
                    "extent is None; reach 'extent' measures distance against the grid. Pass extent=, its sides, to "
                    "values() or between(), or use reach 'threshold'."
                )
            _check_extent(extent, offsets.shape[-1])
            reach = _longest(extent, self.spec.metric)
        wide = offsets.to(torch.promote_types(torch.float32, self.warp.dtype))
        inputs = self.inputs(distances(wide, self.spec.metric), reach=reach).unsqueeze(-1)
        bias = through(through(inputs, self.hidden).relu(), self.out)
        return bias.movedim(-1, 0).to(self.warp.dtype)

    def distinct(self, grid: Grid, *, device: torch.device | None = None) -> Tensor:
        """Return `[num_heads, distinct]` on the grid, whose sides are the extent."""
        check_grid(grid)
        home = self.home(device)

        def evaluate() -> Tensor:
            offsets = distinct_offsets(grid, device=home)
            return self.values(offsets, extent=grid.shape).contiguous()

        return repeated(self, (self.spec, grid.shape), evaluate)

    @classmethod
    def from_source(cls, state: Mapping[str, Tensor], spec: FireSpec, dims: Dims) -> Self:
        """Return a module with a source's `mlp.0`, `mlp.2`, `c`, and `L_multiplier` times `init_L` as the threshold.

        Raises:
            PositionError: if an entry is missing or of another shape.
        """
        multiplier, length = required_entry(state, "L_multiplier"), required_entry(state, "init_L")
        found = {
            "hidden.weight": required_entry(state, "mlp.0.weight"),
            "hidden.bias": required_entry(state, "mlp.0.bias"),
            "out.weight": required_entry(state, "mlp.2.weight"),
            "out.bias": required_entry(state, "mlp.2.bias"),
            "warp": required_entry(state, "c"),
            "threshold": multiplier * length,
        }
        return filled(cls(spec, dims), found, source="FIRE")


def _check_extent(extent: Any, axes: int) -> None:
    """Refuse what is not the sides of a grid."""
    listed = isinstance(extent, (tuple, list)) and axes <= len(extent) <= 3
    if not listed or not all(map(is_whole, extent)):
        raise PositionError(
            f"extent is {extent!r} for {axes} axes; the sides of the grid, whole numbers of at least 1 ordered (t,) y, "
            "x, are required."
        )


def _longest(extent: tuple[int, ...], metric: Metric) -> float:
    """Return the longest distance of a grid: from corner to corner."""
    spans = [side - 1 for side in extent]
    if metric == "l2":
        return math.sqrt(sum(span * span for span in spans))
    return float(sum(spans) if metric == "l1" else max(spans))
