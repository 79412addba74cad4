"""Transformer-XL: a query times a projected sine code of its distance to a key, and two learned biases of content."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import nn

from visionpos.encodings.biasing import blank_linear, through
from visionpos.encodings.doors import Dims, PairBiasing
from visionpos.encodings.sources import start
from visionpos.errors import PositionError
from visionpos.geometry.fields import check_fields
from visionpos.geometry.freqs import angles, ladder
from visionpos.geometry.grid import check_grid
from visionpos.geometry.line import check_pair, line_steps, shifted
from visionpos.geometry.ranges import check_theta

if TYPE_CHECKING:
    from torch import Tensor

    from visionpos.geometry.grid import Grid


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerXlSpec:
    """Settings of Transformer-XL's relative attention.

    Args:
        direction: "causal" codes the m distances of keys at or before a query; "both" all n + m - 1 differences.
        clamp: longer distances share the code of this one; None codes each.
        theta: ladder base of the code.
        std: standard deviation of the normal start values.

    Raises:
        PositionError: if clamp is below 1, or another number out of range.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    kind: Literal["transformer_xl"] = "transformer_xl"
    direction: Literal["causal", "both"] = "causal"
    clamp: int | None = None
    theta: float = 10000.0
    std: float = 0.02

    def __post_init__(self) -> None:
        check_fields(self)
        check_theta(self.theta)
        if self.clamp is not None and self.clamp < 1:
            raise PositionError(
                f"clamp is {self.clamp}; a distance of at least 1 token is required, or None for no end."
            )
        if self.std < 0:
            raise PositionError(f"std is {self.std}; a number of at least 0 is required.")


class TransformerXl(PairBiasing):
    """`(u . k_j + (q_i + v) . W R[i - j]) / sqrt(head_dim)`, added to scaled logits; one layer's own.

    Parameters `content` (u) and `place` (v) `[num_heads, head_dim]`, and `code [num_heads * head_dim, embed_dim]` (W);
    R is the sine code, sines first, of width embed_dim. Layers that share u and v are given the same parameters.
    Differences alone matter (shift-relative). The product is taken with one code a difference and moved into place by a
    view: memory of `forward` is `[b, num_heads, n, m]` twice. Under "causal" later keys get 0 from the code, and belong
    behind a mask.

    Example:
        >>> from visionpos.geometry.grid import Grid
        >>> bias = TransformerXl(TransformerXlSpec(), Dims(embed_dim=8, num_heads=2, depth=1))
        >>> bias(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 5, 4), Grid(1, 5)).shape
        torch.Size([1, 2, 3, 5])

    Reference:
        Transformer-XL (arXiv 1901.02860), kimiyoung/transformer-xl pytorch/mem_transformer.py: r_w_bias is `content`,
        r_r_bias `place`, r_net `code`. Its shift leaves numbers of other pairs above the diagonal; here they are 0.
    """

    spec: TransformerXlSpec

    def __init__(
        self, spec: TransformerXlSpec, dims: Dims, *, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.spec, self.dims = spec, dims
        if dims.embed_dim % 2:
            raise PositionError(
                f"embed_dim is {dims.embed_dim}; an even width is required for a code of sines and cosines."
            )
        self.content = nn.Parameter(torch.empty(dims.num_heads, dims.channels))
        self.place = nn.Parameter(torch.empty(dims.num_heads, dims.channels))
        self.code = blank_linear(dims.embed_dim, dims.num_heads * dims.channels, bias=False)
        for weight in (self.content, self.place, self.code.weight):
            start(weight, spec.std, generator)

    def codes(self, distances: Tensor) -> Tensor:
        """Return `[num_heads, ..., head_dim]`, the projected code of distances `[...]`, query minus key."""
        wide = distances.to(torch.promote_types(torch.float32, distances.dtype))
        if self.spec.clamp is not None:
            wide = wide.clamp(-self.spec.clamp, self.spec.clamp)
        pairs, exact = self.dims.embed_dim // 2, torch.float64
        freqs = ladder(pairs, theta=self.spec.theta, device=wide.device, dtype=exact).to(wide.dtype)
        turns = angles(wide.unsqueeze(-1), freqs.unsqueeze(0))
        code = torch.cat([turns.sin(), turns.cos()], dim=-1)
        split: Tensor = through(code, self.code).unflatten(-1, (self.dims.num_heads, -1))
        return split.movedim(-2, 0)

    def forward(self, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
        """Return `[b, num_heads, n, m]`.

        Args:
            q: `[b, num_heads, n, head_dim]`, unscaled: the last n tokens of the line.
            k: `[b, num_heads, m, head_dim]`, cached keys first.
            grid: the line of the m keys, `Grid(1, m)`; another grid is read row after row.

        Raises:
            PositionError: if q or k is no tokens of the grid.
        """
        check_grid(grid)
        sizes = self.dims.num_heads, self.dims.channels
        check_pair(q, k, sizes, grid.size)
        n, m = q.shape[-2], k.shape[-2]
        causal = self.spec.direction == "causal"
        steps = line_steps(1 if causal else n, m, device=q.device)
        steps = steps.to(torch.promote_types(torch.float32, q.dtype))
        codes = self.codes(steps).to(q.dtype)
        found = shifted((q + self.place.to(q.dtype).unsqueeze(1)) @ codes.mT, m)
        if causal:
            found = found.tril(m - n)
        of_key = k @ self.content.to(k.dtype).unsqueeze(-1)  # [b, heads, m, 1]
        bias: Tensor = (found + of_key.mT) * self.scale
        return bias
