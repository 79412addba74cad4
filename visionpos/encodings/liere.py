"""LieRE: learned generators of rotations of whole blocks of channels, which do not commute."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import nn

from visionpos.encodings.doors import Dims, Turning, check_points
from visionpos.encodings.sources import check_form
from visionpos.errors import PositionError
from visionpos.geometry.blocks import BlockTurn, exponential, skew
from visionpos.geometry.coords import CoordSpec
from visionpos.geometry.fields import check_fields
from visionpos.geometry.precision import wide
from visionpos.geometry.ranges import check_layer

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LiereSpec:
    """Settings of LieRE.

    Args:
        block: channels that turn together, at least 2; the whole head when None (dense). 2 is RoPE-Mixed.
        per_layer: every layer learns its own generators.
        per_head: every head learns its own generators.
        start: generators start uniform in [0, start].
        coords: numbering of tokens. The source puts the first cell on 0 and the last on 1 at the trained size, and on
            side / trained beyond it.

    Raises:
        PositionError: if block or start is out of range.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    kind: Literal["liere"] = "liere"
    block: int | None = None
    per_layer: bool = True
    per_head: bool = True
    start: float = 2 * math.pi
    coords: CoordSpec = field(default_factory=lambda: CoordSpec(unit="span"))

    def __post_init__(self) -> None:
        check_fields(self)
        if (self.block is not None and self.block < 2) or self.start < 0:
            raise PositionError(
                f"block is {self.block} and start {self.start}; a block of at least 2 channels, or None, and a finite "
                "start of at least 0 are required."
            )


class Liere(Turning):
    """Rotation `expm(sum_a coords[a] * generator[a])` of every block of every head.

    **Not strictly relative**: generators of different axes do not commute, so `R(p)^T R(q)` is not `R(q - p)`, scores
    drift with absolute position, and training shift is felt in every logit. Each block is still a rotation: norms are
    kept.

    Parameter `generators [layers or 1, heads or 1, axes, blocks, block (block - 1) / 2]`: the entries above the
    diagonal; keep it out of weight decay. Memory of a turn is `heads * n * head_dim * block` float32 numbers a layer,
    at the cost of a matrix exponential a token, head and block: dense heads are slow beyond some hundred tokens.

    Raises:
        PositionError: if a block is larger than a head.

    Example:
        >>> from visionpos.geometry.grid import Grid
        >>> rope = Liere(LiereSpec(block=8), Dims(embed_dim=48, num_heads=3, depth=2))
        >>> rope(Grid(3, 5)).apply(torch.ones(1, 3, 15, 16)).shape
        torch.Size([1, 3, 15, 16])

    Reference:
        LieRE (arXiv 2406.10322), StanfordMIMI/LieRE models/rope_vit.py, LierePositionEncoder: the same matrices, of
        which only the entries above the diagonal ever acted; they alone are parameters here.
    """

    spec: LiereSpec
    generators: nn.Parameter

    def __init__(
        self, spec: LiereSpec, dims: Dims, *, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.spec, self.dims = spec, dims
        if self.block > dims.channels:
            raise PositionError(
                f"block is {self.block} and a head has {dims.channels} channels; at most head_dim is required."
            )
        shape = (
            dims.depth if spec.per_layer else 1,
            dims.num_heads if spec.per_head else 1,
            spec.coords.axes,
            dims.channels // self.block,
            self.block * (self.block - 1) // 2,
        )
        self.generators = nn.Parameter(torch.empty(shape))
        nn.init.uniform_(self.generators, 0.0, spec.start, generator=generator)

    @property
    def block(self) -> int:
        """Return the channels of a block."""
        return self.dims.channels if self.spec.block is None else self.spec.block

    @property
    def layerwise(self) -> bool:
        """Return whether every layer learns its own generators."""
        return self.spec.per_layer

    def turns(self, coords: Tensor, layer: int = 0) -> BlockTurn:
        """Return the turn of a layer, matrices `[..., heads or 1, n, blocks, block, block]`."""
        check_layer(layer, self.dims.depth)
        check_points(coords, self.spec.coords.axes, "coords", rank=2)
        bases = skew(self.generators[layer if self.layerwise else 0], self.block)
        weights = wide(coords).unsqueeze(-3)[..., None, None, None]  # [..., 1, n, axes, 1, 1, 1]
        return BlockTurn(exponential((weights * bases.unsqueeze(1)).sum(-4)))

    @staticmethod
    def from_liere(raw: Tensor, *, heads: int = 1) -> Tensor:
        """Return the source's `generator_raw_params` in the order of `generators`.

        Args:
            raw: `[axes, layers, heads * blocks, block, block]`; heads outside, blocks inside.
            heads: heads that have generators of their own; 1 if the heads share them.

        Raises:
            PositionError: if raw has another shape, or no whole number of blocks a head.
        """
        check_form(raw, "raw", ("axes", "layers", "heads * blocks", "block", "block"))
        if heads < 1 or raw.shape[2] % heads:
            raise PositionError(
                f"heads is {heads} and raw has {raw.shape[2]} generators a layer; whole blocks a head are required. "
                "Pass the heads of the model that wrote it, or 1 if they share."
            )
        size = raw.shape[-1]
        rows, columns = torch.triu_indices(size, size, offset=1, device=raw.device)
        entries: Tensor = raw[..., rows, columns].unflatten(2, (heads, -1))
        return entries.permute(1, 2, 0, 3, 4).contiguous()
