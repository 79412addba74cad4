"""ComRoPE: learned generators of block rotations that commute, so that scores stay strictly relative."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import nn

from visionpos.encodings.doors import Dims, Turning, check_points
from visionpos.encodings.sources import check_form, required_entry, source_entry
from visionpos.errors import PositionError
from visionpos.geometry.blocks import BlockTurn, exponential, skew
from visionpos.geometry.coords import CoordSpec
from visionpos.geometry.fields import check_fields
from visionpos.geometry.precision import wide
from visionpos.geometry.ranges import check_layer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ComropeSpec:
    """Settings of ComRoPE.

    Args:
        variant: "axial" partition (AP): axis a owns the blocks a, a + axes, ...; "linear" dependence (LD): one
            generator a block, scaled for every axis.
        block: channels that turn together, at least 2.
        std: standard deviation of the start values of the matrices whose skew part is the generator.
        coords: numbering of tokens. The source puts cell centres on [0, 1] and its class token on 0.5, and turns it;
            centred coordinates on [-.5, .5] with a class token that does not turn give the same scores.

    Raises:
        PositionError: if a value is out of range.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    kind: Literal["comrope"] = "comrope"
    variant: Literal["axial", "linear"] = "linear"
    block: int = 8
    std: float = 1.0
    coords: CoordSpec = field(default_factory=lambda: CoordSpec(unit="centred", scale=(0.5, 0.5)))

    def __post_init__(self) -> None:
        check_fields(self)
        if self.block < 2 or self.std < 0:
            raise PositionError(
                f"block is {self.block} and std {self.std}; a block of at least 2 channels and a finite std of at "
                "least 0 are required."
            )


class Comrope(Turning):
    """Rotation `expm(sum_a coords[a] * generator[a])` of every block, with generators that commute.

    Strictly relative: `R(p)^T R(q) = R(q - p)` up to rounding. Parameters `generators [depth, heads, blocks, block
    (block - 1) / 2]`, the entries above the diagonal, and for variant "linear" `multiplier [depth, axes, blocks]`; keep
    them out of weight decay. Memory of a turn is `heads * n * head_dim * block` float32 numbers a layer.

    Raises:
        PositionError: if blocks do not divide a head ("axial": the share of an axis).

    Example:
        >>> from visionpos.geometry.grid import Grid
        >>> rope = Comrope(ComropeSpec(), Dims(embed_dim=48, num_heads=3, depth=2, prefix=1))
        >>> rope(Grid(3, 5)).apply(torch.ones(1, 3, 16, 16), prefix=1).shape
        torch.Size([1, 3, 16, 16])

    Reference:
        ComRoPE (arXiv 2506.03737), Longin-Yu/ComRoPE model.py. Its per-token perturbation of positions is not one of
        the augmentations here, and its "vanilla" baseline uses a ladder of its own.
    """

    spec: ComropeSpec
    generators: nn.Parameter
    multiplier: nn.Parameter | None

    def __init__(
        self, spec: ComropeSpec, dims: Dims, *, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.spec, self.dims = spec, dims
        parts = spec.coords.axes if spec.variant == "axial" else 1
        if dims.channels % (spec.block * parts):
            raise PositionError(
                f"a head has {dims.channels} channels; a multiple of {spec.block * parts} is required for block "
                f"{spec.block} and {parts} shares. Change block or num_heads."
            )
        blocks = dims.channels // spec.block
        shape = (dims.depth, dims.num_heads, blocks, spec.block * (spec.block - 1) // 2)
        self.generators = nn.Parameter(torch.empty(shape))
        # The difference of two entries of a matrix with this std.
        nn.init.normal_(self.generators, std=spec.std * math.sqrt(2), generator=generator)
        self.multiplier = None
        if spec.variant == "linear":
            self.multiplier = nn.Parameter(torch.empty(dims.depth, spec.coords.axes, blocks))
            nn.init.normal_(self.multiplier, generator=generator)

    @property
    def layerwise(self) -> bool:
        """Return True: every layer learns its own generators."""
        return True

    def turns(self, coords: Tensor, layer: int = 0) -> BlockTurn:
        """Return the turn of a layer, matrices `[..., heads, n, blocks, block, block]`."""
        check_layer(layer, self.dims.depth)
        check_points(coords, self.spec.coords.axes, "coords", rank=2)
        bases = skew(self.generators[layer], self.spec.block).unsqueeze(1)
        # How far along its generator every block is: [..., n, blocks].
        reach = (wide(coords).unsqueeze(-1) * self._shares(layer, coords)).sum(-2)
        return BlockTurn(exponential(reach.unsqueeze(-3)[..., None, None] * bases))

    def _shares(self, layer: int, coords: Tensor) -> Tensor:
        """Return `[axes, blocks]`, how much of a block's generator one unit of an axis is."""
        if self.multiplier is not None:
            return self.multiplier[layer]
        axes, blocks = self.spec.coords.axes, self.generators.shape[2]
        owner = torch.arange(blocks, device=coords.device) % axes
        return (torch.arange(axes, device=coords.device).unsqueeze(-1) == owner).to(coords.dtype)

    @staticmethod
    def from_comrope(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return one layer of the source's state, `freqs` and for LD `multiplier`, as this module names and shapes it.

        Args:
            state: `freqs [heads, 1, blocks, block, block]`, and `multiplier [1, axes, blocks, 1, 1]` if there.

        Returns:
            `generators [heads, blocks, entries]` and `multiplier [axes, blocks]`; stack the layers.

        Raises:
            PositionError: if an entry is missing, ambiguous or of another shape.
        """
        raw = required_entry(state, "freqs")
        check_form(raw, "freqs", ("heads", 1, "blocks", "block", "block"))
        size = raw.shape[-1]
        rows, columns = torch.triu_indices(size, size, offset=1, device=raw.device)
        own = {"generators": (raw - raw.mT)[:, 0, ..., rows, columns]}
        multiplier = source_entry(state, "multiplier")
        if multiplier is not None:
            check_form(multiplier, "multiplier", (1, "axes", raw.shape[2], 1, 1))
            own["multiplier"] = multiplier[0, :, :, 0, 0]
        return own
