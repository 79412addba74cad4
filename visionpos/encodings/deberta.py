"""DeBERTa: content and relative place told apart; queries meet the places of keys, keys those of queries."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import torch
from torch import nn

from visionpos.encodings.biasing import blank_linear
from visionpos.encodings.doors import Dims, PairBiasing
from visionpos.encodings.sources import filled, required_entry, source_entry, start
from visionpos.errors import PositionError
from visionpos.geometry.fields import check_fields
from visionpos.geometry.grid import check_grid
from visionpos.geometry.line import check_pair, line_offsets
from visionpos.kernels.lookup import Lookup, looked_up

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from visionpos.geometry.grid import Grid

Term = Literal["c2p", "p2c"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DebertaSpec:
    """Settings of disentangled attention.

    Args:
        span: the table has twice as many rows: differences from -span to span - 1 have one each, longer ones share the
            outer ones. 512 in v1, 256 buckets in v2 and v3.
        max_distance: None gives each difference a row (v1); a length gives rows beyond span / 2 to logarithmic buckets
            that reach so far (v2, v3: 512).
        terms: "c2p", a query meets the places of keys; "p2c", a key meets the places of queries.
        norm: whether the table passes a LayerNorm first (v2, v3).
        key_bias: whether the projection that makes keys of places has a bias (v2, v3).
        std: standard deviation of the truncated normal start values.

    Raises:
        PositionError: if a number is out of range, or terms are none, or one twice.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    kind: Literal["deberta"] = "deberta"
    span: int = 512
    max_distance: int | None = None
    terms: tuple[Term, ...] = ("c2p", "p2c")
    norm: bool = False
    key_bias: bool = False
    std: float = 0.02

    def __post_init__(self) -> None:
        check_fields(self)
        if self.span < 2 or (
            self.max_distance is not None and self.max_distance - 1 <= self.span // 2
        ):
            raise PositionError(
                f"span is {self.span} and max_distance {self.max_distance}; a span of at least 2, and a max_distance "
                "that buckets beyond half of it can reach, are required."
            )
        if not self.terms or len(set(self.terms)) < len(self.terms):
            raise PositionError(f"terms are {self.terms}; 'c2p', 'p2c' or both are required.")
        if self.std < 0:
            raise PositionError(f"std is {self.std}; a number of at least 0 is required.")


class Deberta(PairBiasing):
    """`q_i . Kr[d(i, j)] + k_j . Qr[d(i, j)]`, over the square root of head_dim times the number of terms.

    `table [2 * span, embed_dim]` is shared by all layers; `key_proj` and `query_proj` make rows of it keys (Kr) and
    queries (Qr), in each layer anew. v2 and v3 share them with content: set `key_proj` to attention's own layer, and
    the table to that of the first layer. Attention must scale q.k by `scale`, which counts content as a term.

    Differences alone matter (shift-relative); beyond the span all are alike. Products with the table are taken before
    pairs read them: memory of `forward` is `[b, num_heads, n, m]` a term, and 2 * span numbers a token and head.

    Example:
        >>> from visionpos.geometry.grid import Grid
        >>> spec = DebertaSpec(span=256, max_distance=512, norm=True, key_bias=True)
        >>> bias = Deberta(spec, Dims(embed_dim=8, num_heads=2, depth=1))
        >>> bias.buckets(torch.tensor([127.0, 132.0, 200.0, -512.0])).tolist()
        [127, 131, 169, -256]

    Reference:
        DeBERTa (arXiv 2006.03654), DeBERTa v3 (arXiv 2111.09543); transformers deberta and deberta_v2, whose buckets
        are float32's. The paper writes d(j, i) in the second term; the published code, which trained the weights, reads
        d(i, j) there too, and so does this module. With fewer queries than keys transformers swaps the bucket count and
        the longest distance; here one rule serves both. Absolute places enter DeBERTa once more, in the head that
        predicts masked words.
    """

    spec: DebertaSpec
    norm: nn.LayerNorm | None

    def __init__(
        self, spec: DebertaSpec, dims: Dims, *, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.spec, self.dims = spec, dims
        width = dims.num_heads * dims.channels
        self.table = nn.Parameter(torch.empty(2 * spec.span, dims.embed_dim))
        start(self.table, spec.std, generator)
        self.norm = nn.LayerNorm(dims.embed_dim, eps=1e-7) if spec.norm else None
        self.key_proj = self.query_proj = None
        if "c2p" in spec.terms:
            self.key_proj = blank_linear(dims.embed_dim, width, bias=spec.key_bias)
        if "p2c" in spec.terms:
            self.query_proj = blank_linear(dims.embed_dim, width)
        for layer in (self.key_proj, self.query_proj):
            if layer is not None:
                start(layer.weight, spec.std, generator)
                if layer.bias is not None:
                    start(layer.bias, 0.0, generator)

    @property
    def scale(self) -> float:
        """Return the factor on q.k that attention must be given: content and every term share it."""
        return float((self.dims.channels * (1 + len(self.spec.terms))) ** -0.5)

    def buckets(self, offsets: Tensor) -> Tensor:
        """Return `[...]` int64 from -span to span, the signed bucket of differences `[...]`, query minus key."""
        steps = offsets.to(torch.promote_types(torch.float32, offsets.dtype))
        if self.spec.max_distance is None:
            return steps.clamp(-self.spec.span, self.spec.span).round().to(torch.int64)
        half = self.spec.span // 2
        far = steps.abs().clamp(min=half)
        unit = math.log((self.spec.max_distance - 1) / half)
        log = ((far / half).log() / torch.tensor(unit, dtype=far.dtype) * (half - 1)).ceil() + half
        found = torch.where(steps.abs() <= half, steps, log * steps.sign())
        return found.round().to(torch.int64)

    def rows(self, offsets: Tensor) -> Tensor:
        """Return `[...]` int64, the row of the table for differences `[...]`."""
        return (self.buckets(offsets) + self.spec.span).clamp(0, 2 * self.spec.span - 1)

    def forward(self, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
        """Return `[b, num_heads, n, m]`, to be added to logits scaled by `scale`.

        Args:
            q: `[b, num_heads, n, head_dim]`, unscaled: the last n tokens of the line.
            k: `[b, num_heads, m, head_dim]`.
            grid: the line of the m keys, `Grid(1, m)`; another grid is read row after row.

        Raises:
            PositionError: if q or k is no tokens of the grid.
        """
        return looked_up(self.lookups(q, k, grid), grid, q.shape[-2])

    def lookups(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Lookup, ...]:
        """Return the bias as one product a term with the table of differences."""
        check_grid(grid)
        sizes = self.dims.num_heads, self.dims.channels
        check_pair(q, k, sizes, grid.size)
        rows = self.rows(line_offsets(grid, device=q.device)[:, 0])
        table = self.table if self.norm is None else self.norm(self.table)
        found = []
        if self.key_proj is not None:
            found.append(Lookup(q * self.scale @ self._split(table, self.key_proj, q), rows))
        if self.query_proj is not None:
            places = self._split(table, self.query_proj, k)
            found.append(Lookup(k * self.scale @ places, rows, of_key=True))
        return tuple(found)

    def _split(self, table: Tensor, layer: nn.Linear, like: Tensor) -> Tensor:
        """Return `[num_heads, head_dim, 2 * span]`, the projected table in the dtype of tokens."""
        split: Tensor = layer(table).unflatten(-1, (self.dims.num_heads, -1))
        return split.permute(1, 2, 0).to(like.dtype)

    @classmethod
    def from_source(cls, state: Mapping[str, Tensor], spec: DebertaSpec, dims: Dims) -> Self:
        """Return a module with a source's table and one layer's projections.

        Args:
            state: `rel_embeddings.weight` (and `LayerNorm` of v2 and v3) of transformers' encoder, with one layer's
                `pos_proj` and `pos_q_proj` (v1), `pos_key_proj` and `pos_query_proj`, or, where content shares them,
                `key_proj` and `query_proj`.
            spec: as in the model's configuration.
            dims: sizes of the model.

        Raises:
            PositionError: if an entry is missing or of another shape.
        """
        found = {"table": required_entry(state, "rel_embeddings.weight")}
        names = {
            "key_proj": ("pos_proj", "pos_key_proj"),
            "query_proj": ("pos_q_proj", "pos_query_proj"),
        }
        module = cls(spec, dims)
        for key in module.state_dict():
            owner, part = key.rpartition(".")[::2]
            if owner == "norm":
                found[key] = required_entry(state, f"rel_norm.{part}", f"LayerNorm.{part}")
            elif owner:
                ends = [f"{name}.{part}" for name in names[owner]]
                own = source_entry(state, *ends)
                found[key] = required_entry(state, f"{owner}.{part}") if own is None else own
        return filled(module, found, source="DeBERTa")
