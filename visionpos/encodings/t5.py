"""T5 buckets: one learned number a head, axis and bucket of differences, summed over axes. T5, LayoutLM."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import torch
from torch import nn

from visionpos.encodings.doors import Biasing, Dims
from visionpos.encodings.sources import filled, required_entry, start
from visionpos.errors import PositionError
from visionpos.geometry.fields import check_fields
from visionpos.geometry.line import line_offsets
from visionpos.geometry.places import check_points
from visionpos.geometry.relative import distinct_offsets

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from visionpos.geometry.grid import Grid


@dataclass(frozen=True, slots=True, kw_only=True)
class T5BiasSpec:
    """Settings of bucketed differences.

    Args:
        buckets: rows of each axis's table, ordered (t,) y, x: a multiple of 4, or of 2 under "causal". One axis is a
            line, and reads a grid row after row. 32 in T5; 64 in LayoutLM's y and x.
        max_distance: from here on every difference shares the last bucket of its sign; 128 in T5, 256 in LayoutLM.
        direction: "both" gives half of the rows to each sign (encoders); "causal" gives all to keys at or before the
            query, and later keys share the row of difference 0 (decoders).
        scale: "none" adds the bias as it is (T5, LayoutLM 2); "sqrt_head_dim" divides it first (LayoutLM 3).
        std: standard deviation of the truncated normal start values.

    Raises:
        PositionError: if the axes disagree, or a number is out of range.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    kind: Literal["t5_bias"] = "t5_bias"
    buckets: tuple[int, ...] = (32, 32)
    max_distance: tuple[int, ...] = (128, 128)
    direction: Literal["both", "causal"] = "both"
    scale: Literal["none", "sqrt_head_dim"] = "none"
    std: float = 0.02

    def __post_init__(self) -> None:
        check_fields(self)
        good = len(self.buckets) == len(self.max_distance) and 1 <= len(self.buckets) <= 3
        pairs = zip(self.buckets, self.max_distance, strict=False)
        unit, share = (4, "a quarter") if self.direction == "both" else (2, "half")
        if not good or any(
            rows < unit or rows % unit or reach <= rows // unit for rows, reach in pairs
        ):
            raise PositionError(
                f"buckets are {self.buckets} and max_distance {self.max_distance}; 1 to 3 axes with a multiple of "
                f"{unit} buckets each and a max_distance above {share} of them are required."
            )
        if self.std < 0:
            raise PositionError(f"std is {self.std}; a number of at least 0 is required.")


class T5Bias(Biasing):
    """A learned bias of bucketed differences, summed over axes, shared by all layers.

    One parameter an axis, `tables[axis] [buckets, num_heads]`, axes (t,) y, x; with one axis tokens are a line. Short
    differences have a bucket each, long ones share logarithmic buckets, so any grid is served. It depends on
    differences only (shift-relative) and has no mirror symmetry. Differences are whole cells (fractions are cut towards
    0), or LayoutLM's page units. Boundaries are found in float32 or better. Prefix tokens get 0. Memory of `forward` is
    `num_heads` n x n numbers.

    With both directions row `buckets // 2` of every axis is dead: no difference reaches it, nor do most of the others
    on a small grid; see `unused`.

    Example:
        >>> from visionpos.geometry.grid import Grid
        >>> bias = T5Bias(T5BiasSpec(), Dims(embed_dim=8, num_heads=2, depth=1))
        >>> bias(Grid(3, 5)).shape, bias.buckets(torch.tensor([[9.0, -1.0]]))
        (torch.Size([2, 15, 15]), tensor([[ 8, 17]]))

    Reference:
        T5 (arXiv 1910.10683), LayoutLMv2 (arXiv 2012.14740), LayoutLMv3 (arXiv 2204.08387); transformers t5 and
        layoutlmv3. T5 itself leaves q.k unscaled, which is the attention module's matter. transformers looks
        LayoutLMv3's bias up without gradients, so its tables never learn; here they do.
    """

    spec: T5BiasSpec

    def __init__(
        self, spec: T5BiasSpec, dims: Dims, *, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.spec, self.dims = spec, dims
        tables = [torch.empty(rows, dims.num_heads) for rows in spec.buckets]
        for table in tables:
            start(table, spec.std, generator)
        self.tables = nn.ParameterList([nn.Parameter(table) for table in tables])

    @property
    def axes(self) -> int:
        """Return how many axes a difference has."""
        return len(self.spec.buckets)

    def buckets(self, offsets: Tensor) -> Tensor:
        """Return `[..., axes]` int64, the row of each axis's table, for differences `[..., axes]`, query minus key.

        Raises:
            PositionError: if there are more or fewer axes than tables.
        """
        axes = self.axes
        check_points(offsets, None, "offsets")
        if offsets.shape[-1] != axes:
            raise PositionError(
                f"offsets have {offsets.shape[-1]} axes and the spec {axes} tables; they must agree. A grid has (y, "
                "x), with frames (t, y, x)."
            )
        wide = offsets.to(torch.promote_types(torch.float32, offsets.dtype))
        bucket = _bucket if self.spec.direction == "both" else _causal_bucket
        rows = [
            bucket(wide[..., axis], self.spec.buckets[axis], self.spec.max_distance[axis])
            for axis in range(axes)
        ]
        return torch.stack(rows, dim=-1)

    def values(self, offsets: Tensor) -> Tensor:
        """Return `[num_heads, ...]`, the bias at differences `[..., axes]`, query minus key."""
        rows = self.buckets(offsets).unbind(-1)
        looked = [
            table.index_select(0, row.flatten())
            for table, row in zip(self.tables, rows, strict=True)
        ]
        bias = torch.stack(looked).sum(0) if len(looked) > 1 else looked[0]
        if self.spec.scale == "sqrt_head_dim":
            bias = bias / math.sqrt(self.dims.channels)
        return bias.mT.unflatten(-1, offsets.shape[:-1]) if offsets.ndim > 1 else bias[0]

    def unused(self, grid: Grid | None = None) -> list[list[int]]:
        """Return the dead rows of each axis's table: on a grid, or on any grid when None."""
        reach = max(self.spec.max_distance)
        steps = torch.arange(-reach, reach + 1).unsqueeze(-1).expand(-1, len(self.tables))
        differing = line_offsets if self.axes == 1 else distinct_offsets
        hit = self.buckets(steps if grid is None else differing(grid))
        return [
            sorted(set(range(rows)) - set(hit[:, axis].tolist()))
            for axis, rows in enumerate(self.spec.buckets)
        ]

    @classmethod
    def from_source(cls, state: Mapping[str, Tensor], spec: T5BiasSpec, dims: Dims) -> Self:
        """Return a module with a source's tables.

        Args:
            state: state dict of a LayoutLM 2 or 3 encoder as transformers writes it: `rel_pos_y_bias.weight` and
                `rel_pos_x_bias.weight`, `[num_heads, buckets]`; for three axes also `rel_pos_bias.weight`, the token
                index. Their y is the lower and their x the left edge of a word. For one axis that of T5's first layer,
                `relative_attention_bias.weight [buckets, num_heads]`.
            spec: axes (index), (y, x) or (index, y, x); LayoutLM 3 divides, so scale is "sqrt_head_dim".
            dims: sizes of the model.

        Raises:
            PositionError: if a table is missing or of another shape.
        """
        names = ("rel_pos_bias", "rel_pos_y_bias", "rel_pos_x_bias")[-len(spec.buckets) :]
        module = cls(spec, dims)
        if len(spec.buckets) == 1:
            entry = required_entry(state, "relative_attention_bias.weight", ranks=(2,))
            return filled(module, {"tables.0": entry}, source="T5")
        for axis, name in enumerate(names):
            table = required_entry(state, f"{name}.weight", ranks=(2,)).mT
            if table.shape != module.tables[axis].shape:
                raise PositionError(
                    f"state holds {name}.weight of shape {tuple(table.mT.shape)}; {spec.buckets[axis]} buckets and "
                    f"{dims.num_heads} heads need {tuple(module.tables[axis].mT.shape)}. Describe the source in the "
                    "spec."
                )
            module.tables[axis] = nn.Parameter(table.detach().clone())
        return module


def _bucket(offsets: Tensor, rows: int, max_distance: int) -> Tensor:
    """Return T5's two-sided bucket of key minus query: half of the rows a sign, half of those exact."""
    half = rows // 2
    return _steps(offsets.abs(), half, max_distance) + (offsets.trunc() < 0).to(torch.int64) * half


def _causal_bucket(offsets: Tensor, rows: int, max_distance: int) -> Tensor:
    """Return T5's bucket of keys at or before the query; later ones have that of the query itself."""
    return _steps(offsets.clamp(min=0), rows, max_distance)


def _steps(far: Tensor, rows: int, max_distance: int) -> Tensor:
    """Return the bucket of a distance: half of the rows exact, the others logarithmic."""
    exact, near = rows // 2, far.trunc()
    # The clamp keeps log away from 0; those buckets are not picked.
    log = (near.clamp(min=exact) / exact).log() / math.log(max_distance / exact) * (rows - exact)
    steps = torch.where(near < exact, near, (exact + log.trunc()).clamp(max=rows - 1))
    return steps.to(torch.int64)
