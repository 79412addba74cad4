"""CoPE: positions counted in what a query finds worth counting; fractions between two learned vectors. Causal only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import nn

from visionpos.encodings.doors import Dims, PairBiasing
from visionpos.encodings.sources import start
from visionpos.errors import PositionError
from visionpos.geometry.fields import check_fields
from visionpos.geometry.grid import check_grid
from visionpos.geometry.line import check_logits, check_pair
from visionpos.geometry.points import check_floats

if TYPE_CHECKING:
    from torch import Tensor

    from visionpos.geometry.grid import Grid


@dataclass(frozen=True, slots=True, kw_only=True)
class CopeSpec:
    """Settings of contextual positions.

    Args:
        positions: rows of the table; counts beyond the last one share it. 64 in the paper's language models.
        std: standard deviation of the truncated normal start values; 0, the sources' habit, starts at zero.

    Raises:
        PositionError: if positions is below 2, or std negative.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    kind: Literal["cope"] = "cope"
    positions: int = 64
    std: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.positions < 2:
            raise PositionError(
                f"positions is {self.positions}; a table of at least 2 rows is required."
            )
        if self.std < 0:
            raise PositionError(f"std is {self.std}; a number of at least 0 is required.")


class Cope(PairBiasing):
    """A bias by counted positions: `p[i, j] = sum of sigmoid(logit[i, t]) for t from j to i`; one layer's own.

    Parameter `table [positions, head_dim]`, shared by the heads. A query counts the keys that its own logits open the
    gate for, from the key on to itself; the bias is the product of the query with the table at that count, read between
    rows. Keys after the query are shut out before the gate: without that they would be counted. Counts are summed in
    float32 or better. The product with the table is taken before pairs read it; memory of `forward` is a few
    `[b, num_heads, n, m]`, which the counting of every pair needs. No score function can count.

    Example:
        >>> from visionpos.geometry.grid import Grid
        >>> cope = Cope(CopeSpec(), Dims(embed_dim=8, num_heads=2, depth=1))
        >>> cope.counts(torch.zeros(3, 3))
        tensor([[0.5000, 0.0000, 0.0000],
                [1.0000, 0.5000, 0.0000],
                [1.5000, 1.0000, 0.5000]])

    Reference:
        CoPE (arXiv 2405.18719), appendix B; x-transformers CoPE, which sums counts in the dtype of the logits.
    """

    spec: CopeSpec

    def __init__(
        self, spec: CopeSpec, dims: Dims, *, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.spec, self.dims = spec, dims
        self.table = nn.Parameter(torch.empty(spec.positions, dims.channels))
        start(self.table, spec.std, generator)

    def counts(self, logits: Tensor) -> Tensor:
        """Return `[..., n, m]`, the position of every key as its query counts, at most positions - 1.

        Args:
            logits: `[..., n, m]`, scaled; queries are the last n of m tokens. Masked ones are minus infinity.
        """
        n, m = logits.shape[-2:]
        wide = logits.to(torch.promote_types(torch.float32, logits.dtype))
        later = torch.ones(n, m, dtype=torch.bool, device=logits.device).triu(m - n + 1)
        gates = wide.masked_fill(later, -math.inf).sigmoid()
        return gates.flip(-1).cumsum(-1).flip(-1).clamp(max=self.spec.positions - 1)

    def of_logits(self, q: Tensor, logits: Tensor) -> Tensor:
        """Return `[b, num_heads, n, m]` from logits that attention has already.

        Args:
            q: `[b, num_heads, n, head_dim]`, unscaled.
            logits: `[b, num_heads, n, m]`, scaled, without this bias.

        Raises:
            PositionError: if logits are not those of such queries.
        """
        check_floats(q, "q")
        check_logits(logits, self.dims.num_heads)
        tokens = (*logits.shape[:3], self.dims.channels)
        if q.shape != tokens:
            raise PositionError(
                f"q has shape {tuple(q.shape)} beside logits {tuple(logits.shape)}; {tokens}, one query a row of "
                "logits, is required. Pass the queries that made them."
            )
        counts = self.counts(logits)
        found = (q @ self.table.to(q.dtype).mT).to(counts.dtype)  # [b, heads, n, positions]
        still = counts.detach()
        last = self.spec.positions - 1
        # NaN has no row: it reads any, and comes back by the fraction.
        lower, upper = (
            found.gather(-1, row.to(torch.int64).clamp(0, last))
            for row in (still.floor(), still.ceil())
        )
        return lower.lerp(upper, counts - still.floor()).to(q.dtype)

    def forward(self, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
        """Return `[b, num_heads, n, m]`, to be added to scaled logits.

        Args:
            q: `[b, num_heads, n, head_dim]`, unscaled: the last n tokens of the line.
            k: `[b, num_heads, m, head_dim]`.
            grid: the line of the m keys, `Grid(1, m)`; another grid is read row after row.

        Raises:
            PositionError: if q or k is no tokens of the grid.
        """
        check_grid(grid)
        sizes = self.dims.num_heads, self.dims.channels
        check_pair(q, k, sizes, grid.size)
        return self.of_logits(q, (q @ k.mT) * self.scale)
