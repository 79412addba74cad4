"""Convolutional relative encoding of CoaT: what surrounds a value, weighed by the query, joins attention's output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import nn

from visionpos.encodings.doors import Dims
from visionpos.encodings.guard import Guarded, check_dtype
from visionpos.encodings.sources import checked_state, filled
from visionpos.errors import PositionError
from visionpos.geometry.fields import check_fields

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from visionpos.geometry.grid import Grid


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvRelativeSpec:
    """Settings of the convolutional relative encoding.

    Args:
        kernels: side of the convolution of each group of heads, odd.
        heads: how many heads each group has, in order; together the model's heads.

    Raises:
        PositionError: if the two differ in length, a kernel is even, or a group is empty.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    kind: Literal["conv_relative"] = "conv_relative"
    kernels: tuple[int, ...] = (3, 5, 7)
    heads: tuple[int, ...] = (2, 3, 3)

    def __post_init__(self) -> None:
        check_fields(self)
        odd = bool(self.kernels) and all(side > 0 and side % 2 for side in self.kernels)
        if not odd or len(self.kernels) != len(self.heads) or min(self.heads) < 1:
            raise PositionError(
                f"kernels are {self.kernels} and heads {self.heads}; one odd kernel and at least one head a group are "
                "required."
            )


class ConvRelative(Guarded):
    """Depthwise convolutions over the map of values, multiplied by the queries.

    What enters attention: a term of its **output**, `[b, heads, n, head_dim]`, added to (scaled) attention times
    values before the output projection; the logits are not touched. Element by element it is
    `q[n] * sum_m w[n - m] * v[m]` over a window, a relative term of finite reach; it costs n x kernel^2, never n x n.
    The bias adds `q[n] * bias`. Prefix and suffix tokens get zeros and are not seen. Frames of a clip are convolved one
    by one.

    Raises:
        PositionError: if the groups do not make up the model's heads.

    Example:
        >>> from visionpos.geometry.grid import Grid
        >>> term = ConvRelative(
        ...     ConvRelativeSpec(), Dims(embed_dim=64, num_heads=8, depth=1, prefix=1)
        ... )
        >>> q = v = torch.zeros(2, 8, 1 + 15, 8)
        >>> term(q, v, Grid(3, 5)).shape
        torch.Size([2, 8, 16, 8])

    Reference:
        CoaT (arXiv 2104.06399), mlpc-ucsd/CoaT, timm coat.ConvRelPosEnc: there one class token always, here
        `dims.prefix`. CoaT's other half, ConvPosEnc, is the conditional encoding `coat_cpe`.
    """

    spec: ConvRelativeSpec

    def __init__(
        self, spec: ConvRelativeSpec, dims: Dims, *, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.spec, self.dims = spec, dims
        if sum(spec.heads) != dims.num_heads:
            raise PositionError(
                f"heads are {spec.heads}, {sum(spec.heads)} together; the model's {dims.num_heads} are required."
            )
        widths = [count * dims.channels for count in spec.heads]
        self.convs = nn.ModuleList(
            nn.Conv2d(width, width, side, padding=side // 2, groups=width)
            for width, side in zip(widths, spec.kernels, strict=True)
        )
        for side, conv in zip(spec.kernels, self.convs, strict=True):
            for weight in conv.parameters():  # torch's own start, drawn from the generator
                nn.init.uniform_(weight, -1.0 / side, 1.0 / side, generator=generator)

    def forward(self, q: Tensor, v: Tensor, grid: Grid) -> Tensor:
        """Return what to add to attention's output, `[b, heads, prefix + n + suffix, head_dim]`.

        Args:
            q: unscaled queries `[b, heads, prefix + n + suffix, head_dim]`.
            v: values of the same shape.
            grid: the lattice of the n tokens.

        Raises:
            PositionError: if q, v and grid disagree.
        """
        dims, heads, width = self.dims, self.dims.num_heads, self.dims.channels
        exempt = dims.prefix + dims.suffix
        if q.shape != v.shape or q.ndim != 4 or q.shape[1:] != (heads, exempt + grid.size, width):
            raise PositionError(
                f"q has shape {tuple(q.shape)} and v {tuple(v.shape)}; both must be [b, {heads}, {exempt} + "
                f"{grid.size}, {width}] for grid {grid.shape}. Pass the grid of these tokens."
            )
        check_dtype(v, self.convs, "v")
        b, cells = v.shape[0], slice(dims.prefix, dims.prefix + grid.size)
        maps = v[:, :, cells].transpose(2, 3).unflatten(3, grid.shape)  # [b, heads, c, t, h, w]
        maps = (
            maps.permute(0, 3, 1, 2, 4, 5).flatten(2, 3).flatten(0, 1)
        )  # [b * t, heads * c, h, w]
        parts = maps.split([count * width for count in self.spec.heads], dim=1)
        seen = torch.cat([c(part) for c, part in zip(self.convs, parts, strict=True)], dim=1)
        cell = grid.height * grid.width  # said, not -1: an empty batch has any number of them
        around = seen.reshape(b, grid.frames, heads, width, cell).permute(0, 2, 1, 4, 3)
        term = q[:, :, cells] * around.reshape(b, heads, grid.size, width)
        return nn.functional.pad(term, (0, 0, dims.prefix, dims.suffix)) if exempt else term

    @classmethod
    def from_timm(
        cls, state: Mapping[str, Tensor], spec: ConvRelativeSpec, dims: Dims
    ) -> ConvRelative:
        """Return the encoding with timm's or the authors' weights.

        Args:
            state: entries `conv_list.i.{weight,bias}` of one stage's `crpeN`; a leading path is dropped.
            spec: the filling.
            dims: sizes of the stage.

        Raises:
            PositionError: if entries are missing, too many or of another shape.
        """
        own = {
            "convs." + key.rpartition("conv_list.")[2]: value
            for key, value in checked_state(state).items()
        }
        return filled(cls(spec, dims), own, source="timm")
