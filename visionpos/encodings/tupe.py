"""TUPE: places multiply places, by projections of their own, beside content; the class token's place is untied."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import torch
from torch import nn

from visionpos.encodings.biasing import blank_linear, check_prefix, through
from visionpos.encodings.doors import Dims, PairBiasing
from visionpos.encodings.sources import filled, required_entry, start
from visionpos.errors import PositionError
from visionpos.geometry.fields import check_fields
from visionpos.geometry.grid import check_grid
from visionpos.geometry.line import check_pair, laid, line_steps

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from visionpos.geometry.grid import Grid


@dataclass(frozen=True, slots=True, kw_only=True)
class TupeSpec:
    """Settings of untied places.

    Args:
        extent: what the table has a row for: (n,) tokens of a line, or the sides (y, x) or (t, y, x) of a grid.
        buckets: rows of T5's bucket bias on top (TUPE-R, 32), a multiple of 4; 0 for none (TUPE-A).
        max_distance: from here on every difference shares the last bucket of its sign; 128.
        std: standard deviation of the truncated normal start values.

    Raises:
        PositionError: if a number is out of range.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    kind: Literal["tupe"] = "tupe"
    extent: tuple[int, ...]
    buckets: int = 0
    max_distance: int = 128
    std: float = 0.02

    def __post_init__(self) -> None:
        check_fields(self)
        if not 1 <= len(self.extent) <= 3 or min(self.extent) < 1:
            raise PositionError(
                f"extent is {self.extent}; the tokens of a line, or the sides of a grid, each at least 1, are required."
            )
        if self.buckets < 0 or self.buckets % 4 or self.max_distance <= self.buckets // 4:
            raise PositionError(
                f"buckets is {self.buckets} and max_distance {self.max_distance}; a multiple of 4 buckets, or 0, and a "
                "max_distance above a quarter of them are required."
            )
        if self.std < 0:
            raise PositionError(f"std is {self.std}; a number of at least 0 is required.")


class Tupe(PairBiasing):
    """`(LN(p_i) U_q) . (LN(p_j) U_k) / sqrt(2 head_dim)`, plus a bucket's scalar in TUPE-R; shared by all layers.

    `table [2 + places, embed_dim]`, then `norm`, then `proj` to queries and keys of places. Its first two rows are no
    places: the product of row 0 with itself is what prefix tokens give every other in their row, that of row 1 what the
    others give them in their column. `bias(grid, prefix=)` makes the whole of it once for all layers and samples;
    `forward` returns it for given tokens. Attention must scale q.k by `scale`, half of its variance.

    Places are absolute: a shift changes everything, and nothing lies beyond the table. A line is `Grid(1, n)` of at
    most the extent's tokens; with sides the grid must have them. The bucket bias counts the prefix as tokens before
    the first, and its row `buckets // 2`, which no difference reaches, and one more row serve the prefix.

    Example:
        >>> from visionpos.geometry.grid import Grid
        >>> tupe = Tupe(TupeSpec(extent=(16,)), Dims(embed_dim=8, num_heads=2, depth=1))
        >>> tupe.bias(Grid(1, 5), prefix=1).shape
        torch.Size([2, 6, 6])

    Reference:
        TUPE (arXiv 2006.15595), guolinke/TUPE fairseq/modules/transformer_sentence_encoder.py: `pos`, `pos_ln`,
        `pos_proj`, `relative_attention_bias`.
    """

    spec: TupeSpec

    def __init__(
        self, spec: TupeSpec, dims: Dims, *, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.spec, self.dims = spec, dims
        self.table = nn.Parameter(torch.empty(2 + math.prod(spec.extent), dims.embed_dim))
        self.norm = nn.LayerNorm(dims.embed_dim)
        self.proj = blank_linear(dims.embed_dim, 2 * dims.num_heads * dims.channels)
        start(self.table, spec.std, generator)
        start(self.proj.weight, spec.std, generator)
        start(self.proj.bias, 0.0, generator)
        self.relative: nn.Parameter | None = None
        if spec.buckets:
            self.relative = nn.Parameter(torch.empty(spec.buckets + 1, dims.num_heads))
            start(self.relative, spec.std, generator)

    @property
    def scale(self) -> float:
        """Return the factor on q.k that attention must be given: content is one of two terms."""
        return float((2 * self.dims.channels) ** -0.5)

    def bias(self, grid: Grid, *, prefix: int = 0) -> Tensor:
        """Return `[num_heads, prefix + n, prefix + n]`, to be added to logits scaled by `scale`.

        Args:
            grid: the tokens; `Grid(1, n)` for a line.
            prefix: leading tokens whose place is untied (the class token).

        Raises:
            PositionError: if the grid has cells that the table has no row for, or prefix is negative.
        """
        check_grid(grid)
        check_prefix(prefix)
        self._check_fits(grid)
        rows = self.table[: 2 + grid.size]
        wide = rows.to(torch.promote_types(torch.float32, rows.dtype))
        norm = self.norm
        normed = nn.functional.layer_norm(
            wide,
            norm.normalized_shape,
            norm.weight.to(wide.dtype),
            norm.bias.to(wide.dtype),
            norm.eps,
        )
        split = through(normed, self.proj).unflatten(-1, (2, self.dims.num_heads, -1))
        q, k = split.permute(1, 2, 0, 3)  # [heads, 2 + n, head_dim]
        places = (q[:, 2:] * self.scale) @ k[:, 2:].mT
        if prefix:
            row, column = ((q[:, :2] * k[:, :2]).sum(-1) * self.scale).unbind(-1)
            places = nn.functional.pad(places, (prefix, 0, prefix, 0))
            first = torch.arange(prefix + grid.size, device=places.device) < prefix
            places = torch.where(first, column.view(-1, 1, 1), places)
            places = torch.where(first.unsqueeze(-1), row.view(-1, 1, 1), places)
        found: Tensor = places + self._bucketed(grid.size, prefix) if self.spec.buckets else places
        return found.to(rows.dtype)

    def _check_fits(self, grid: Grid) -> None:
        extent = self.spec.extent
        fits = grid.size <= extent[0] if len(extent) == 1 else grid.shape[-len(extent) :] == extent
        if not fits or (len(extent) == 2 and grid.frames > 1):
            raise PositionError(
                f"grid {grid.shape} (t, y, x) has places that a table of extent {extent} has no rows for; places are "
                "absolute here. Build the encoding with the extent of the longest input."
            )

    def _bucketed(self, n: int, prefix: int) -> Tensor:
        """Return `[num_heads, prefix + n, prefix + n]`, the bucket's scalar; evaluated once a difference."""
        assert self.relative is not None  # noqa: S101 (buckets are above 0)
        rows, count = self.spec.buckets, prefix + n
        buckets = _bucket(
            line_steps(count, count, device=self.relative.device), rows, self.spec.max_distance
        )
        pairs = laid(buckets, count, count)
        first = torch.arange(count, device=pairs.device) < prefix
        pairs = torch.where(first, rows, pairs)  # others to prefix
        pairs = torch.where(first.unsqueeze(-1), rows // 2, pairs)  # prefix to others
        return self.relative[pairs].movedim(-1, 0)

    def forward(self, q: Tensor, k: Tensor, grid: Grid, *, prefix: int = 0) -> Tensor:
        """Return `[1, num_heads, n, m]` of the last n of m tokens, prefix and grid: one for all samples.

        Args:
            q: `[b, num_heads, n, head_dim]`; its numbers do not matter.
            k: `[b, num_heads, m, head_dim]`; nor do these.
            grid: the tokens behind the prefix.
            prefix: leading tokens whose place is untied.

        Raises:
            PositionError: if q or k is no such tokens, or `bias` refuses the grid.
        """
        whole = self.bias(grid, prefix=prefix)
        sizes, count = (self.dims.num_heads, self.dims.channels), prefix + grid.size
        check_pair(q, k, sizes, count)
        return whole[:, k.shape[-2] - q.shape[-2] :].unsqueeze(0)

    @classmethod
    def from_source(cls, state: Mapping[str, Tensor], spec: TupeSpec, dims: Dims) -> Self:
        """Return a module with a source's `pos`, `pos_ln`, `pos_proj` and, in TUPE-R, `relative_attention_bias`.

        Raises:
            PositionError: if an entry is missing or of another shape: extent is max_seq_len - 1, the class token apart.
        """
        found = {
            "table": required_entry(state, "pos.weight"),
            "norm.weight": required_entry(state, "pos_ln.weight"),
            "norm.bias": required_entry(state, "pos_ln.bias"),
            "proj.weight": required_entry(state, "pos_proj.weight"),
            "proj.bias": required_entry(state, "pos_proj.bias"),
        }
        if spec.buckets:
            found["relative"] = required_entry(state, "relative_attention_bias.weight")
        return filled(cls(spec, dims), found, source="TUPE")


def _bucket(offsets: Tensor, rows: int, max_distance: int) -> Tensor:
    """Return T5's two-sided bucket of query minus key; row `rows // 2` is never one."""
    half = rows // 2
    exact, near = half // 2, offsets.abs()
    log = (near.clamp(min=exact) / exact).log() / math.log(max_distance / exact) * (half - exact)
    steps = torch.where(near < exact, near, (exact + log.trunc()).clamp(max=half - 1))
    return steps.to(torch.int64) + (offsets < 0).to(torch.int64) * half
