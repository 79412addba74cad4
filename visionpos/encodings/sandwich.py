"""Sandwich: the product of two sine codes as a bias that falls with distance, head by head; no parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch

from visionpos.encodings.doors import Biasing, Dims
from visionpos.errors import PositionError
from visionpos.geometry.fields import check_fields
from visionpos.geometry.freqs import angles, ladder
from visionpos.geometry.places import check_points
from visionpos.geometry.ranges import check_theta

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SandwichSpec:
    """Settings of Sandwich.

    Args:
        width: channels of the sine code whose product is taken, even; 128 in the paper.
        theta: ladder base of the code.

    Raises:
        PositionError: if width is odd or below 2, or theta is not above 0.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    kind: Literal["sandwich"] = "sandwich"
    width: int = 128
    theta: float = 10000.0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.width < 2 or self.width % 2:
            raise PositionError(
                f"width is {self.width}; an even number of channels, at least 2, is required."
            )
        check_theta(self.theta)


class Sandwich(Biasing):
    """`(sum_k cos(distance * theta ** (-2k / width)) - width / 2) * num_heads / (8 h)`, shared by all layers.

    Head h counts from 1: the last one falls 1/8 of a unit where the first of 8 falls 1. Pair k counts from 1 too, so no
    pair turns a radian a token. Tokens are a line; another grid is read row after row. It depends on differences only
    (shift-relative) and is the same in both directions. float32. Memory of `forward` is `num_heads` n x n numbers.

    Example:
        >>> bias = Sandwich(SandwichSpec(), Dims(embed_dim=64, num_heads=8, depth=1))
        >>> bias.values(torch.tensor([[0.0], [1.0], [8.0]]))[0].round(decimals=3)
        tensor([  0.0000,  -1.4470, -17.1340])

    Reference:
        Sandwich (arXiv 2212.10356); NVIDIA/NeMo sandwich_relative_position_embedding.py.
    """

    spec: SandwichSpec

    def __init__(self, spec: SandwichSpec, dims: Dims) -> None:
        super().__init__()
        self.spec, self.dims = spec, dims

    @property
    def axes(self) -> int:
        """Return 1: tokens are a line."""
        return 1

    def values(self, offsets: Tensor) -> Tensor:
        """Return `[num_heads, ...]`, the bias at differences `[..., 1]` in tokens; float32, or float64 in float64."""
        check_points(offsets, 1, "offsets")
        dtype = torch.promote_types(torch.float32, offsets.dtype)
        # Whole numbers may be far ones, whose turns float32 loses.
        wide = offsets.to(dtype if offsets.is_floating_point() else torch.float64)
        pairs, theta = self.spec.width // 2, self.spec.theta
        freqs = ladder(pairs, theta=theta, device=wide.device, dtype=torch.float64)
        freqs = freqs * theta ** (-1 / pairs)  # k counts from 1
        # Each term less 1, so that what falls is summed and not what stays.
        fall = (angles(wide, freqs.to(wide.dtype).unsqueeze(0)).cos() - 1.0).sum(-1)
        fall = fall.reshape(offsets.shape[:-1]).to(dtype)
        heads = torch.arange(1, self.dims.num_heads + 1, device=wide.device, dtype=dtype)
        return fall * (self.dims.num_heads / (8 * heads)).view(-1, *[1] * fall.ndim)
