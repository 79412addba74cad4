"""STRING: rotations in a basis that is learned (Cayley) or made of waves (circulant); all of them commute."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import nn

from visionpos.encodings.doors import Dims, Turning
from visionpos.errors import PositionError
from visionpos.geometry.blocks import BasisTurn, cayley, real_fourier_basis, skew
from visionpos.geometry.coords import CoordSpec
from visionpos.geometry.fields import check_fields
from visionpos.geometry.freqs import angles, axial_freqs
from visionpos.geometry.precision import wide
from visionpos.geometry.ranges import check_layer, check_theta
from visionpos.geometry.rotation import Rotation

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StringRopeSpec:
    """Settings of STRING.

    Args:
        variant: "cayley": axial RoPE in a learned orthogonal basis of every head; "circulant": generators that are
            antisymmetric circulant blocks, one learned row an axis.
        theta: ladder base of the start frequencies ("cayley").
        block: channels of a circulant block, at least 3.
        std: standard deviation of the start values of the circulant rows.
        learn_frequencies: whether "cayley" learns its frequencies too; else they are rebuilt from theta.
        coords: numbering of tokens.

    Raises:
        PositionError: if a value is out of range.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    kind: Literal["string_rope"] = "string_rope"
    variant: Literal["cayley", "circulant"] = "cayley"
    theta: float = 100.0
    block: int = 16
    std: float = 0.1
    learn_frequencies: bool = False
    coords: CoordSpec = field(default_factory=CoordSpec)

    def __post_init__(self) -> None:
        check_fields(self)
        check_theta(self.theta)
        if self.block < 3 or self.std < 0:
            raise PositionError(
                f"block is {self.block} and std {self.std}; a block of at least 3 channels and a finite std of at "
                "least 0 are required."
            )


class StringRope(Turning):
    """Rotation `basis R(coords) basis^T` of every head: strictly relative, since all its rotations share one basis.

    "cayley": parameter `skew [depth, heads, head_dim (head_dim - 1) / 2]`, zero at first, when the basis is the
    identity and the encoding is axial RoPE (y then x, adjacent pairs); and, if learned, `frequencies [depth, heads,
    axes, pairs]`. "circulant": parameter `rows [depth, heads, axes, blocks, (block - 1) // 2]`, the first row of each
    generator from its second entry on; its basis is fixed, and the constant wave of a block, with the alternating one
    of an even block, does not turn. Keep all of them out of weight decay. Memory of a turn is that of a Rotation a
    head, and one `[head_dim, head_dim]` basis.

    Raises:
        PositionError: if the channels of a head do not fit the variant.

    Example:
        >>> from visionpos.geometry.grid import Grid
        >>> rope = StringRope(StringRopeSpec(), Dims(embed_dim=48, num_heads=3, depth=2, prefix=1))
        >>> rope(Grid(3, 5)).apply(torch.ones(1, 3, 16, 16), prefix=1).shape
        torch.Size([1, 3, 16, 16])

    Reference:
        STRING (arXiv 2502.02562), written from the paper: no public code was at hand. The outer factor of the basis
        cancels between q and k; it is kept here, so that tokens at the origin stay what they are.
    """

    spec: StringRopeSpec
    skew: nn.Parameter | None
    rows: nn.Parameter | None
    frequencies: nn.Parameter | None

    def __init__(
        self, spec: StringRopeSpec, dims: Dims, *, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.spec, self.dims = spec, dims
        self.skew = self.rows = self.frequencies = None
        channels, heads = dims.channels, (dims.depth, dims.num_heads)
        if spec.variant == "circulant":
            if channels % spec.block:
                raise PositionError(
                    f"a head has {channels} channels; a multiple of block {spec.block} is required. Change block."
                )
            shape = (*heads, spec.coords.axes, channels // spec.block, (spec.block - 1) // 2)
            self.rows = nn.Parameter(torch.empty(shape))
            nn.init.normal_(self.rows, std=spec.std, generator=generator)
            return
        start = axial_freqs(channels, theta=spec.theta, axes=spec.coords.axes)
        self.skew = nn.Parameter(torch.zeros(*heads, channels * (channels - 1) // 2))
        if spec.learn_frequencies:
            self.frequencies = nn.Parameter(start.expand(*heads, -1, -1).clone())

    @property
    def layerwise(self) -> bool:
        """Return True: every layer learns its own basis or generators."""
        return True

    def turns(self, coords: Tensor, layer: int = 0) -> BasisTurn:
        """Return the turn of a layer: a Rotation `[..., heads, n, pairs]` and its basis."""
        check_layer(layer, self.dims.depth)
        if self.rows is not None:
            return self._circulant(coords, self.rows[layer])
        assert self.skew is not None  # noqa: S101 (one of the two is there)
        channels = self.dims.channels
        if self.frequencies is not None:
            freqs = self.frequencies[layer]
        else:
            axes, heads = self.spec.coords.axes, self.dims.num_heads
            freqs = axial_freqs(channels, theta=self.spec.theta, axes=axes, device=coords.device)
            freqs = freqs.expand(heads, -1, -1)
        rotation = Rotation.of(angles(coords.unsqueeze(-3), freqs), "adjacent")
        return BasisTurn(rotation, cayley(skew(self.skew[layer], channels)))

    def _circulant(self, coords: Tensor, rows: Tensor) -> BasisTurn:
        """Return the turn of circulant generators: a wave of m cycles turns by minus twice the sine sum of the row."""
        block, rows = self.spec.block, wide(rows)
        waves = rows.shape[-1]
        m = torch.arange(1, waves + 1, device=rows.device, dtype=torch.float64)
        sines = (2 * math.pi / block * (m.unsqueeze(1) * m)).sin().to(rows.dtype)
        freqs = -2 * (rows.unsqueeze(-1) * sines).sum(-2)  # [heads, axes, blocks, waves]
        turns = angles(coords.unsqueeze(-3), freqs.flatten(-2))
        basis = real_fourier_basis(block, self.dims.channels // block).to(rows)
        return BasisTurn(Rotation.of(turns, "adjacent"), basis)
