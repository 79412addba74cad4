"""ALiBi in two dimensions: a bias that falls with distance, one slope a head. CROMA, data2vec 2.0; no parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch

from visionpos.encodings.doors import Biasing, Dims
from visionpos.errors import PositionError
from visionpos.geometry.fields import check_fields
from visionpos.geometry.places import check_points
from visionpos.geometry.relative import Metric, distances

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AlibiSpec:
    """Settings of ALiBi on a grid.

    Args:
        metric: how far apart two cells are: "l2" Euclid (CROMA), "l1" steps along the lattice (data2vec 2.0), "linf"
            the longest axis.
        max_bias: the exponents of the slopes run down to 2 ** -max_bias; 8 in the paper.

    Raises:
        PositionError: if the metric is unknown, or max_bias is not above 0.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    kind: Literal["alibi"] = "alibi"
    metric: Metric = "l2"
    max_bias: float = 8.0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.max_bias <= 0:
            raise PositionError(
                f"max_bias is {self.max_bias}; a finite number above 0 is required."
            )


class Alibi(Biasing):
    """`-slope * distance`, one slope a head, shared by all layers; no parameters, any grid, any number of axes.

    It depends on differences only (shift-relative) and keeps every mirror and quarter turn of the square. float32.
    Prefix tokens get 0. Memory of `forward` is `num_heads` n x n numbers.

    Example:
        >>> from visionpos.geometry.grid import Grid
        >>> bias = Alibi(AlibiSpec(), Dims(embed_dim=8, num_heads=2, depth=1))
        >>> bias(Grid(1, 3))[0, 2], bias.slopes()
        (tensor([-0.1250, -0.0625, -0.0000]), [0.0625, 0.00390625])

    Reference:
        ALiBi (arXiv 2108.12409); CROMA (arXiv 2311.00566), antofuller/CROMA pretrain_croma.py; data2vec 2.0 (arXiv
        2212.07525), fairseq examples/data2vec. Both build square grids only; this one takes any.
    """

    spec: AlibiSpec

    def __init__(self, spec: AlibiSpec, dims: Dims) -> None:
        super().__init__()
        self.spec, self.dims = spec, dims

    def slopes(self) -> list[float]:
        """Return one slope a head: a geometric series; off powers of two, every second of the next finer series too."""
        heads = self.dims.num_heads
        whole = 2 ** (heads.bit_length() - 1)
        coarse = [2.0 ** (-self.spec.max_bias * step / whole) for step in range(1, whole + 1)]
        fine = [
            2.0 ** (-self.spec.max_bias * (step + 0.5) / whole) for step in range(heads - whole)
        ]
        return coarse + fine

    def values(self, offsets: Tensor) -> Tensor:
        """Return `[num_heads, ...]`, the bias at differences `[..., axes]` in cells; float32, or float64 in float64."""
        check_points(offsets, None, "offsets")
        far = distances(
            offsets.to(torch.promote_types(torch.float32, offsets.dtype)), self.spec.metric
        )
        slopes = far.new_tensor(self.slopes())
        return -slopes.view(-1, *[1] * far.ndim) * far
