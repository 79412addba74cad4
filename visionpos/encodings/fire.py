"""FIRE: a small network of log-warped distance, relative to a threshold, to the query's own place or to the grid."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
from torch import nn

from visionpos.encodings.biasing import blank_linear, check_prefix, through
from visionpos.encodings.doors import Biasing, Dims
from visionpos.encodings.repeated import repeated
from visionpos.encodings.sources import filled, required_entry
from visionpos.errors import PositionError
from visionpos.geometry.fields import check_fields
from visionpos.geometry.grid import check_grid, is_whole
from visionpos.geometry.line import check_line
from visionpos.geometry.places import check_points
from visionpos.geometry.relative import Metric, distances, distinct_offsets
from visionpos.kernels.pieces import Pieces

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from visionpos.geometry.grid import Grid
    from visionpos.kernels.lookup import ScoreMod


@dataclass(frozen=True, slots=True, kw_only=True)
class FireSpec:
    """Settings of FIRE.

    Args:
        metric: how far apart two cells are: "l1", "l2" or "linf". There is no public vision model to follow.
        reach: what distance is measured against. "query": the query's own place in a line, or the threshold if that is
            longer: the paper's form, for causal attention. "extent": the longest distance of the grid, or the
            threshold; a resized view then keeps its scale, and so does a line seen in both directions. "threshold": the
            threshold alone; the bias is then a function of differences and nothing else.
        threshold: start of the threshold, in cells: 512 in the paper, which is longer than any image grid; a length
            near the trained grid lets smaller grids keep their scale.
        learn_threshold: whether the threshold learns, as the paper's multiplier of it does.
        warp: start of the learned warping c in log(c d + 1).
        hidden: width of the network.

    Raises:
        PositionError: for an unknown choice, or a number out of range.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    kind: Literal["fire"] = "fire"
    metric: Metric = "l2"
    reach: Literal["extent", "threshold", "query"] = "extent"
    threshold: float = 512.0
    learn_threshold: bool = True
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
    (shift-relative); under "extent" also on the size of the grid; under "query" also on the place of a query beyond the
    threshold, so that shifted ids give another bias there. The network runs on the distinct differences only, in
    float32 or better; in eval without gradients, on the CPU, again only when a weight or the grid has changed. Under
    "query" it is broken into its straight pieces, which serve every pair by one look-up; keys after the query are given
    the bias of their distance, and belong behind a mask. Prefix tokens get 0. Memory of `forward` is `num_heads` n x n
    numbers.

    Example:
        >>> from visionpos.geometry.grid import Grid
        >>> bias = Fire(FireSpec(), Dims(embed_dim=8, num_heads=2, depth=1))
        >>> bias(Grid(3, 5)).shape
        torch.Size([2, 15, 15])
        >>> bias.inputs(torch.tensor([10.0]), reach=10.0).round(decimals=4)
        tensor([0.1753], grad_fn=<RoundBackward1>)

    Reference:
        FIRE (arXiv 2310.04418); chuanyang-Zheng/DAPE, mcleish7/arithmetic. Deliberate differences: a grid has no causal
        order, so the query's index gives way to the grid's extent; the threshold itself learns, where the source learns
        a factor on a fixed one.
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
        start = torch.tensor(spec.threshold)
        self.threshold = nn.Parameter(start, requires_grad=spec.learn_threshold)

    @property
    def axes(self) -> int | None:
        """Return 1 under "query", whose tokens are a line; None elsewhere."""
        return 1 if self.spec.reach == "query" else None

    def inputs(self, distance: Tensor, *, reach: float | Tensor = 0.0) -> Tensor:
        """Return `[...]` in [0, 1], the network's input at distances of at most max(reach, threshold).

        Args:
            distance: `[...]` in cells.
            reach: the longest distance of the grid, or `[...]` of each query; the threshold stands in where it is
                longer.
        """
        return self._warped(distance) / self._span(reach)

    def _warped(self, distance: Tensor) -> Tensor:
        """Return `[...]`, log-warped distance, in float32 or better."""
        dtype = torch.promote_types(torch.float32, self.warp.dtype)
        return ((self.warp.to(dtype) * distance.to(dtype)).abs() + 1.0).log()

    def _span(self, reach: float | Tensor) -> Tensor:
        """Return what warped distances are divided by."""
        least = self.threshold.to(torch.promote_types(torch.float32, self.warp.dtype)).abs()
        far = reach if isinstance(reach, torch.Tensor) else torch.full_like(least, reach)
        return self._warped(torch.maximum(least, far.to(least.dtype))) + 1e-6

    def values(
        self,
        offsets: Tensor,
        *,
        extent: tuple[int, ...] | None = None,
        places: Tensor | None = None,
    ) -> Tensor:
        """Return `[num_heads, ...]`, the bias at differences `[..., axes]` in cells.

        Args:
            offsets: query minus key.
            extent: sides of the grid, (t,) y, x: what "extent" measures against.
            places: `[...]`, those of the queries in their line: what "query" measures against.

        Raises:
            PositionError: if "extent" is given no sides of a grid, "query" no places, or (on the CPU) a difference is
                not finite.
        """
        check_points(offsets, self.axes, "offsets")
        reach: float | Tensor = 0.0
        if self.spec.reach == "query":
            inputs = self.inputs(offsets[..., 0].abs(), reach=_check_places(places).abs())
            return self.pieces().at(inputs).to(self.warp.dtype)
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

    def between(self, queries: Tensor, keys: Tensor, **where: Any) -> Tensor:
        """Return `[num_heads, ..., n, m]` as every bias does; under "query" ids count from their document's start."""
        if self.spec.reach == "query":
            check_points(queries, 1, "queries", rank=2)
            where = {"places": queries, **where}  # [..., n, 1], the same for every key
        return super().between(queries, keys, **where)

    def along(
        self,
        queries: int,
        keys: int | None = None,
        *,
        device: torch.device | None = None,
        **where: Any,
    ) -> Tensor:
        """Return `[num_heads, queries, keys]` for tokens in a line, whose last ones are the queries."""
        keys = queries if keys is None else keys
        if self.spec.reach == "extent":
            where = {"extent": (keys,), **where}
        if self.spec.reach != "query":
            return super().along(queries, keys, device=device, **where)
        check_line(queries, keys)
        ids = torch.arange(keys, device=self.home(device)).unsqueeze(-1)
        return self.between(ids[keys - queries :], ids)

    def forward(self, grid: Grid, *, prefix: int = 0, device: torch.device | None = None) -> Tensor:
        """Return the bias of every pair of tokens, `[num_heads, prefix + n, prefix + n]`: it grows as n x n."""
        if self.spec.reach != "query":
            return super().forward(grid, prefix=prefix, device=device)
        check_prefix(prefix)
        return nn.functional.pad(self.along(grid.size, device=device), (prefix, 0, prefix, 0))

    def pieces(self) -> Pieces:
        """Return the network as the straight pieces that it is."""
        dtype = torch.promote_types(torch.float32, self.warp.dtype)
        first, last = self.hidden, self.out
        parts = first.weight[:, 0], first.bias, last.weight, last.bias
        return Pieces.of(*(part.to(dtype) for part in parts))

    def score(self, grid: Grid, *, device: torch.device | None = None) -> ScoreMod | None:
        """Return under "query" a score function of 2 n numbers and the network's pieces; None elsewhere."""
        if self.spec.reach != "query":
            return None
        count = grid.size
        ids = torch.arange(count, device=self.home(device), dtype=torch.float32)
        # An input is a quotient: the distance's own number over the query's.
        far, near = self._warped(ids), 1.0 / self._span(ids)
        read = self.pieces().reader()

        def score(score: Tensor, b: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:  # noqa: ARG001 (flex's)
            return score + read(head, far[(q - k).abs()] * near[q]).to(score.dtype)

        return score

    def distinct(self, grid: Grid, *, device: torch.device | None = None) -> Tensor:
        """Return `[num_heads, distinct]` on the grid, whose sides are the extent.

        Raises:
            PositionError: under "query", which is no function of differences.
        """
        check_grid(grid)
        if self.spec.reach == "query":
            raise PositionError(
                "reach is 'query', whose bias also depends on the query's own place; it has no table of differences. "
                "Call the module, along() or score_mod(), or use reach 'threshold'."
            )
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


def _check_places(places: Tensor | None) -> Tensor:
    """Refuse missing places of queries."""
    if places is None:
        raise PositionError(
            "places is None; reach 'query' measures distance against the query's own place. Pass places= to values(), "
            "or call between() or along(), which know it."
        )
    return places


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
