"""Offset table: one learned number a head and absolute difference (|dy|, |dx|). LeViT, TinyViT, EfficientFormer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import torch
from torch import nn

from visionpos.encodings.biasing import check_flat, check_offsets
from visionpos.encodings.doors import Biasing, Dims
from visionpos.encodings.sources import required_entry, sides, source_entry, start
from visionpos.errors import PositionError
from visionpos.geometry.fields import check_fields
from visionpos.geometry.grid import Grid
from visionpos.geometry.recipes import recipe_of
from visionpos.geometry.relative import distinct_offsets
from visionpos.geometry.resample import resample

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

Resize = Literal["mirrored", "direct"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OffsetTableSpec:
    """Settings of a table of absolute differences.

    Args:
        window_hw: rows and columns of the grid the table is trained on.
        resize: how another grid is served. "mirrored" resamples the two-sided table that the one-sided one stands
            for, so difference 0 stays difference 0; "direct" resamples the one-sided table as if it were an image, as
            TinyViT and timm do, which moves it by half a cell of the scale.
        recipe: kernel of the resampling; "timm" is bicubic with antialias.
        std: standard deviation of the truncated normal start values; 0, the sources' habit, starts at zero.

    Raises:
        PositionError: if the window, the choice, the recipe or std is out of range.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    kind: Literal["offset_table"] = "offset_table"
    window_hw: tuple[int, int]
    resize: Resize = "mirrored"
    recipe: str = "timm"
    std: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        sides("window_hw", self.window_hw)
        recipe_of(self.recipe)
        if self.std < 0:
            raise PositionError(f"std is {self.std}; a number of at least 0 is required.")


class OffsetTable(Biasing):
    """A learned bias of absolute differences, for one layer or for all that share it.

    Parameter `table [height * width, num_heads]`, row |dy|, column |dx|, row-major. It depends on differences only
    (shift-relative) and looks the same in both directions of each axis; rows and columns need not be alike. Prefix
    tokens get 0. Strided queries (LeViT's downsampling) are `between(coords * stride, coords_of_keys)`. Memory of
    `forward` is `num_heads` n x n numbers; nothing is cached, so an edited table shows at once.

    Example:
        >>> bias = OffsetTable(
        ...     OffsetTableSpec(window_hw=(3, 5)), Dims(embed_dim=8, num_heads=2, depth=1)
        ... )
        >>> bias(Grid(3, 5)).shape, bias(Grid(7, 4)).shape
        (torch.Size([2, 15, 15]), torch.Size([2, 28, 28]))

    Reference:
        LeViT (arXiv 2104.01136), facebookresearch/LeViT; TinyViT (arXiv 2207.10666), microsoft/Cream; timm levit,
        tiny_vit, efficientvit_msra, efficientformer. timm keeps an eval-mode cache of the bias; this module does not.
    """

    spec: OffsetTableSpec
    table: nn.Parameter

    def __init__(
        self, spec: OffsetTableSpec, dims: Dims, *, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.spec, self.dims = spec, dims
        self.table = nn.Parameter(torch.empty(self.window.size, dims.num_heads))
        start(self.table, spec.std, generator)

    @property
    def window(self) -> Grid:
        """Return the grid the table is trained on."""
        return Grid(*self.spec.window_hw)

    def values(self, offsets: Tensor, *, window_hw: tuple[int, int] | None = None) -> Tensor:
        """Return `[num_heads, ...]`, the bias at whole differences `[..., 2]` (y, x), of either sign.

        Args:
            offsets: differences inside a window; not checked while compiling.
            window_hw: the window they belong to: the trained one when None.

        Raises:
            PositionError: if a difference lies outside the table, or between its cells.
        """
        window = self.window if window_hw is None else Grid(*sides("window_hw", window_hw))
        check_offsets(offsets, window)
        picked = self._rows(window).index_select(0, _place(offsets, window).flatten())
        return picked.mT.unflatten(-1, offsets.shape[:-1]) if offsets.ndim > 1 else picked[0]

    def distinct(self, grid: Grid, *, device: torch.device | None = None) -> Tensor:
        """Return `[num_heads, (2h - 1)(2w - 1)]` on the window that the grid is.

        Raises:
            PositionError: if the grid has frames.
        """
        check_flat(grid)
        places = _place(distinct_offsets(grid, device=self.home(device)), grid)
        return self._rows(grid).index_select(0, places).mT.contiguous()

    def resized(self, window_hw: tuple[int, int]) -> OffsetTable:
        """Return a module whose table is trained on from this one's values on another window; keep the source."""
        window = Grid(*sides("window_hw", window_hw))
        moved = OffsetTable(replace(self.spec, window_hw=window_hw), self.dims)
        rows = self._rows(window).detach().clone()
        moved.table = nn.Parameter(rows, requires_grad=self.table.requires_grad)
        return moved.train(self.training)

    @classmethod
    def from_source(cls, state: Mapping[str, Tensor], spec: OffsetTableSpec, dims: Dims) -> Self:
        """Return a module with a source's table.

        Args:
            state: state dict of one attention module: `attention_biases [num_heads, height * width]` (LeViT, TinyViT,
                EfficientViT-MSRA, EfficientFormer). A stored `attention_bias_idxs` is compared and left behind.
            spec: with the grid the table was trained on.
            dims: sizes of the model.

        Raises:
            PositionError: if the table does not fit the window, or the index reads it in another order.
        """
        table = required_entry(state, "attention_biases", ranks=(2,)).mT
        module = cls(spec, dims)
        if table.shape != module.table.shape:
            raise PositionError(
                f"state holds attention_biases of shape {tuple(table.mT.shape)}; window {spec.window_hw} and "
                f"{dims.num_heads} heads need {tuple(module.table.mT.shape)}. Give the grid the table was trained on, "
                "and move it afterwards with resized()."
            )
        _check_index(source_entry(state, "attention_bias_idxs"), module.window)
        module.table = nn.Parameter(table.detach().clone())
        return module

    def _rows(self, window: Grid) -> Tensor:
        """Return `[height * width, num_heads]` on a window, by the spec's choice."""
        recipe = self.spec.recipe
        if window.shape[1:] == self.window.shape[1:]:
            return self.table
        if self.spec.resize == "direct":
            return resample(self.table, source=self.window, target=window, recipe=recipe)
        source, target = (
            Grid(2 * grid.height - 1, 2 * grid.width - 1) for grid in (self.window, window)
        )
        places = _place(distinct_offsets(self.window, device=self.table.device), self.window)
        wide = resample(
            self.table.index_select(0, places), source=source, target=target, recipe=recipe
        )
        lattice = wide.unflatten(0, (target.height, target.width))
        quarter: Tensor = lattice[window.height - 1 :, window.width - 1 :]
        return quarter.flatten(0, 1)


def _place(offsets: Tensor, window: Grid) -> Tensor:
    """Return `[...]`, the row of each difference."""
    places = offsets.abs().to(torch.int64)
    return places[..., 0] * window.width + places[..., 1]


def _check_index(index: Tensor | None, window: Grid) -> None:
    """Refuse a stored index of this window that reads the table in another order."""
    if index is None or index.is_meta or index.numel() != window.size**2:
        return
    cells = torch.arange(window.size)
    dy = (cells // window.width).unsqueeze(1) - cells // window.width
    dx = (cells % window.width).unsqueeze(1) - cells % window.width
    expected = dy.abs() * window.width + dx.abs()
    if not torch.equal(index.reshape(expected.shape).cpu().to(torch.int64), expected):
        raise PositionError(
            f"state holds attention_bias_idxs that do not read window {window.shape[1:]} as |dy| * width + |dx|; the "
            "table's rows would be misread. Check the order of the window's sides."
        )
