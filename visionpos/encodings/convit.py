"""Gated positional attention of ConViT: a second attention of position alone, mixed in by a gate a head."""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import nn

from visionpos.encodings.doors import Dims
from visionpos.encodings.guard import Guarded
from visionpos.encodings.sources import checked_state, filled
from visionpos.errors import PositionError
from visionpos.geometry.fields import check_fields
from visionpos.geometry.grid import check_grid
from visionpos.geometry.places import check_points
from visionpos.geometry.relative import distinct_offsets, relative_index

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from visionpos.geometry.grid import Grid


@dataclass(frozen=True, slots=True, kw_only=True)
class GpsaSpec:
    """Settings of gated positional self-attention.

    Args:
        locality: sharpness of the start values; head i of a k x k set looks at the i-th of k x k neighbours.
        gate: start value of every head's gate before the sigmoid; 1 gives position a share of .73.

    Raises:
        PositionError: if a number is not finite, or locality not above 0.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    kind: Literal["gpsa"] = "gpsa"
    locality: float = 1.0
    gate: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.locality <= 0:
            raise PositionError(f"locality is {self.locality}; a number above 0 is required.")


class Gpsa(Guarded):
    """Position-only attention `softmax(w . (dx, dy, d^2) + b)` and the gate that mixes it in.

    What enters attention: **probabilities, after the softmax**. With g = sigmoid(gating) a head attends by
    `(1 - g) * softmax(q k^T) + g * softmax(position)`; both parts have rows that sum to 1, so the mix has too. Nothing
    is added to logits. dx and dy are key minus query in cells, so the position part depends on differences only (away
    from the border, whose missing neighbours the softmax shares out). Prefix and suffix tokens take no part in it:
    their rows keep the content attention, and patches look at them with the share 1 - g. Any rectangle; the authors'
    and timm's code takes the square root of the token count.

    The result grows as n x n: `4 * heads * n^2` bytes, 100 MB for 16 heads at 36x36.

    Example:
        >>> from visionpos.geometry.grid import Grid
        >>> gpsa = Gpsa(GpsaSpec(), Dims(embed_dim=16, num_heads=4, depth=1))
        >>> gpsa.positions(Grid(3, 5)).shape
        torch.Size([4, 15, 15])
        >>> gpsa(torch.full((2, 4, 15, 15), 1 / 15), Grid(3, 5)).shape
        torch.Size([2, 4, 15, 15])

    Reference:
        ConViT (arXiv 2103.10697), facebookresearch/convit convit.py, timm convit.GPSA. Deliberate differences: the
        grid is given; the mix, already of sum 1, is not divided by its sum again.
    """

    spec: GpsaSpec
    weight: nn.Parameter
    bias: nn.Parameter
    gating: nn.Parameter

    def __init__(
        self, spec: GpsaSpec, dims: Dims, *, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.spec, self.dims = spec, dims
        self.weight = nn.Parameter(torch.empty(dims.num_heads, 3))  # (dx, dy, d^2)
        self.bias = nn.Parameter(torch.zeros(dims.num_heads))
        self.gating = nn.Parameter(torch.full((dims.num_heads,), float(spec.gate)))
        nn.init.trunc_normal_(self.weight, std=0.02, generator=generator)
        side = isqrt(dims.num_heads)  # heads beyond the k x k set keep their small random start
        ticks = 2.0 * (torch.arange(side) - (side - 1) / 2)
        dx, dy = torch.meshgrid(ticks, ticks, indexing="ij")
        local = torch.stack([dx, dy, torch.full_like(dx, -1.0)], dim=-1).flatten(0, 1)
        with torch.no_grad():
            self.weight[: side * side] = local
            self.weight.mul_(spec.locality)

    def values(self, offsets: Tensor) -> Tensor:
        """Return `[heads, ...]`, the position logits at differences `[..., 2]` (y, x), query minus key, in cells."""
        check_points(offsets, 2, "offsets")
        away = -offsets.to(torch.promote_types(torch.float32, offsets.dtype))  # key minus query
        features = torch.cat([away.flip(-1), away.square().sum(-1, keepdim=True)], dim=-1)
        dtype = torch.promote_types(features.dtype, self.weight.dtype)
        shape = (-1,) + (1,) * (offsets.ndim - 1)
        # Elementwise: autocast would run a product in half precision, where d^2 is no whole number beyond 256.
        terms = features.to(dtype) * self.weight.to(dtype).reshape(*shape, 3)
        return terms.sum(-1) + self.bias.to(dtype).reshape(shape)

    def positions(self, grid: Grid) -> Tensor:
        """Return the position-only attention, `[heads, n, n]` with rows of sum 1, float32 or better.

        Raises:
            PositionError: for a clip: the features are those of one image.
        """
        check_grid(grid)
        if grid.frames > 1:
            raise PositionError(
                f"grid {grid.shape} has {grid.frames} frames; one is required. Fold frames into the batch."
            )
        table = self.values(distinct_offsets(grid, device=self.weight.device))
        index = relative_index(grid, device=self.weight.device)
        logits = table.index_select(-1, index.flatten()).reshape(-1, grid.size, grid.size)
        return torch.softmax(logits, dim=-1)

    def shares(self) -> Tensor:
        """Return `[heads]`, the share of position in each head's attention."""
        return self.gating.sigmoid()

    def forward(self, attention: Tensor, grid: Grid) -> Tensor:
        """Return attention probabilities with position mixed in, `[b, heads, m, m]`, m = prefix + n + suffix.

        Args:
            attention: content attention after its softmax, of the same shape.
            grid: the lattice of the n tokens.

        Raises:
            PositionError: if attention and grid disagree.
        """
        prefix, suffix = self.dims.prefix, self.dims.suffix
        m = prefix + grid.size + suffix
        if attention.ndim != 4 or attention.shape[1:] != (self.dims.num_heads, m, m):
            raise PositionError(
                f"attention has shape {tuple(attention.shape)}; [b, {self.dims.num_heads}, {m}, {m}] is required for "
                f"grid {grid.shape} and {prefix + suffix} tokens beside it. Pass the grid of these tokens."
            )
        share = self.shares().reshape(-1, 1, 1)
        positions = self.positions(grid)
        if prefix or suffix:
            positions = nn.functional.pad(positions, (prefix, suffix, prefix, suffix))
            share = nn.functional.pad(share.expand(-1, grid.size, 1), (0, 0, prefix, suffix))
        share, positions = share.to(attention.dtype), positions.to(attention.dtype)
        return (1.0 - share) * attention + share * positions

    @classmethod
    def from_timm(cls, state: Mapping[str, Tensor], spec: GpsaSpec, dims: Dims) -> Gpsa:
        """Return the encoding with the position weights of one attention module of timm or the authors.

        Args:
            state: entries `pos_proj.weight`, `pos_proj.bias` and `gating_param`; a leading path is dropped.
            spec: the filling.
            dims: sizes of the model.

        Raises:
            PositionError: if entries are missing, too many or of another shape.
        """
        names = {"pos_proj.weight": "weight", "pos_proj.bias": "bias", "gating_param": "gating"}
        own = {
            next((names[tail] for tail in names if key.endswith(tail)), key): value
            for key, value in checked_state(state).items()
        }
        return filled(cls(spec, dims), own, source="timm")
