"""ALiBi: a bias that falls with distance on a line or a grid, one slope a head; no parameters. Bloom, MPT, CROMA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch

from visionpos.encodings.doors import Biasing, Dims
from visionpos.errors import PositionError
from visionpos.geometry.fields import check_fields
from visionpos.geometry.line import check_counted
from visionpos.geometry.places import check_points
from visionpos.geometry.points import readable
from visionpos.geometry.relative import Metric, distances

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AlibiSpec:
    """Settings of ALiBi.

    Args:
        metric: how far apart two cells are: "l2" Euclid (CROMA), "l1" steps along the lattice (data2vec 2.0), "linf"
            the longest axis.
        max_bias: the exponents of the slopes run down to 2 ** -max_bias; 8 in the paper.
        slopes: one a head, above 0, in place of the series.

    Raises:
        PositionError: if the metric is unknown, or max_bias or a slope is not above 0.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    kind: Literal["alibi"] = "alibi"
    metric: Metric = "l2"
    max_bias: float = 8.0
    slopes: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.max_bias <= 0:
            raise PositionError(
                f"max_bias is {self.max_bias}; a finite number above 0 is required."
            )
        if self.slopes is not None and not all(slope > 0 for slope in self.slopes):
            raise PositionError(
                f"slopes are {self.slopes}; numbers above 0 are required, since a slope is how fast the bias falls. "
                "Drop the signs."
            )


class Alibi(Biasing):
    """`-slope * distance`, one slope a head, shared by all layers; no parameters, any grid, any number of axes.

    It depends on differences only (shift-relative) and keeps every mirror and quarter turn of the square. float32. A
    line is `Grid(1, n)`, `along(n, m)`, or ids of one axis; `key_only` is the row that serves causal attention alone.
    Prefix tokens get 0. Memory of `forward` is `num_heads` n x n numbers.

    Example:
        >>> from visionpos.geometry.grid import Grid
        >>> bias = Alibi(AlibiSpec(), Dims(embed_dim=8, num_heads=2, depth=1))
        >>> bias(Grid(1, 3))[0, 2], bias.slopes()
        (tensor([-0.1250, -0.0625, -0.0000]), [0.0625, 0.00390625])

    Reference:
        ALiBi (arXiv 2108.12409), transformers bloom and mpt; CROMA (arXiv 2311.00566), antofuller/CROMA
        pretrain_croma.py; data2vec 2.0 (arXiv 2212.07525), fairseq examples/data2vec. The last two build square grids
        only; this one takes any.
    """

    spec: AlibiSpec

    def __init__(self, spec: AlibiSpec, dims: Dims) -> None:
        super().__init__()
        self.spec, self.dims = spec, dims
        if spec.slopes is not None and len(spec.slopes) != dims.num_heads:
            raise PositionError(
                f"slopes are {len(spec.slopes)} for {dims.num_heads} heads; one a head is required. Leave them out for "
                "the paper's series."
            )

    def slopes(self) -> list[float]:
        """Return one slope a head: a geometric series; off powers of two, every second of the next finer series too."""
        if self.spec.slopes is not None:
            return list(self.spec.slopes)
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

    def key_only(self, keys: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return `[num_heads, ..., 1, m]`, `slope * key`: what softmax leaves of the bias for a query.

        It equals the distance form under a causal mask alone: to a later key distance would turn round. Numbers grow
        with the key's own place, so that 16 bits cannot tell neighbours apart: bfloat16 has 9 values for the last 64
        of 2048 keys. The distance form has no such end.

        Args:
            keys: `[..., m]` whole places of the keys in their document.
            dtype: float32 or float64.

        Raises:
            PositionError: for a dtype of 16 bits or fewer, or (on the CPU) ids that it or their own cannot count.

        Example:
            >>> bias = Alibi(AlibiSpec(), Dims(embed_dim=8, num_heads=2, depth=1))
            >>> bias.key_only(torch.arange(3))[0]
            tensor([[0.0000, 0.0625, 0.1250]])

        Reference:
            transformers' build_alibi_tensor of Bloom, which takes any dtype; MPT.
        """
        if dtype not in (torch.float32, torch.float64):
            raise PositionError(
                f"dtype is {dtype}; the key-only form needs float32 or float64, since 16 bits round the places of far "
                "keys together. Use the distance form, along() or attend(), which is exact near the query."
            )
        check_points(keys, None, "keys")
        check_counted(keys, "keys")
        if dtype == torch.float32:
            _check_reach(keys)
        row = keys.to(torch.float64).unsqueeze(-2)
        slopes = row.new_tensor(self.slopes()).view(-1, *[1] * row.ndim)
        return (slopes * row).to(dtype)


def _check_reach(keys: Tensor) -> None:
    """Refuse keys so far on that float32 gives neighbours one number, where that costs no wait for a device."""
    if readable(keys) and keys.numel() and int(keys.abs().max()) >= 2**24:
        raise PositionError(
            f"keys reach {int(keys.abs().max())} and dtype is torch.float32; it tells whole places below 16777216 "
            "apart. Pass dtype=torch.float64, or take the distance form, along() or attend()."
        )
