"""Swin table: one learned number a head and coordinate difference, on any window by recipe. Swin, BEiT, MaxViT."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import torch
from torch import nn

from visionpos.encodings.biasing import check_flat, check_offsets
from visionpos.encodings.doors import Biasing, Dims
from visionpos.encodings.sources import check_index, required_entry, sides, source_entry, start
from visionpos.errors import PositionError
from visionpos.geometry.fields import check_fields
from visionpos.geometry.grid import Grid
from visionpos.geometry.recipes import recipe_of
from visionpos.geometry.resample import resample

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

Windows = Literal["resample", "crop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SwinTableSpec:
    """Settings of a table of coordinate differences.

    Args:
        window_hw: rows and columns of the window the table is trained on; never guessed from a row count.
        windows: what another window means. "resample" evaluates the table on it by `recipe`, as Swin, BEiT and timm do
            on loading; "crop" keeps every difference's own number, so only smaller windows can be served.
        recipe: "swin" (bicubic), "beit" (geometric: short differences keep their place), "hf_beit" (bilinear).
        class_rows: three more rows at the end, as in BEiT: prefix to patch, patch to prefix, prefix to prefix.
        std: standard deviation of the truncated normal start values; 0 starts at zero, as BEiT does.

    Raises:
        PositionError: if the window, the policy, the recipe or std is out of range.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    kind: Literal["swin_table"] = "swin_table"
    window_hw: tuple[int, int]
    windows: Windows = "resample"
    recipe: str = "swin"
    class_rows: bool = False
    std: float = 0.02

    def __post_init__(self) -> None:
        check_fields(self)
        sides("window_hw", self.window_hw)
        recipe_of(self.recipe)
        if self.std < 0:
            raise PositionError(f"std is {self.std}; a number of at least 0 is required.")


class SwinTable(Biasing):
    """A learned bias of coordinate differences, for one layer or for all that share it.

    Parameter `table [(2h - 1)(2w - 1) + 3 if class_rows, num_heads]`, row-major from the most negative query-minus-key
    difference on. It depends on differences only (shift-relative) and has no mirror symmetry. Layers with tables of
    their own take a module each. Memory of `forward` is `num_heads` n x n numbers and one n x n index.

    Example:
        >>> spec = SwinTableSpec(window_hw=(3, 5))
        >>> bias = SwinTable(spec, Dims(embed_dim=8, num_heads=2, depth=1))
        >>> bias(Grid(3, 5)).shape, bias(Grid(4, 6)).shape, bias.resized((4, 6)).table.shape
        (torch.Size([2, 15, 15]), torch.Size([2, 24, 24]), torch.Size([77, 2]))

    Reference:
        Swin (arXiv 2103.14030), BEiT (arXiv 2106.08254): microsoft/Swin-Transformer, microsoft/unilm beit, timm
        layers/pos_embed_rel.py. unilm reads its geometric samples by a cubic spline, timm and this module linearly.
        transformers reshapes BEiT's table as width by height, so its rectangular windows are scrambled; not copied.
    """

    spec: SwinTableSpec
    table: nn.Parameter

    def __init__(
        self, spec: SwinTableSpec, dims: Dims, *, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.spec, self.dims = spec, dims
        rows = _differences(self.window).size + 3 * spec.class_rows
        self.table = nn.Parameter(torch.empty(rows, dims.num_heads))
        start(self.table, spec.std, generator)

    @property
    def window(self) -> Grid:
        """Return the window the table is trained on."""
        return Grid(*self.spec.window_hw)

    def cells(self) -> Tensor:
        """Return `[(2h - 1)(2w - 1), num_heads]`, the rows of differences between patches."""
        return self.table[: _differences(self.window).size]

    def values(self, offsets: Tensor, *, window_hw: tuple[int, int] | None = None) -> Tensor:
        """Return `[num_heads, ...]`, the bias at whole differences `[..., 2]` (y, x), query minus key.

        Args:
            offsets: differences inside a window; not checked while compiling.
            window_hw: the window they belong to: the trained one when None.

        Raises:
            PositionError: if a difference lies outside the table, or between its cells.
        """
        window = self.window if window_hw is None else Grid(*sides("window_hw", window_hw))
        check_offsets(offsets, window)
        places = offsets.to(torch.int64)
        row = (places[..., 0] + window.height - 1) * (2 * window.width - 1) + places[..., 1]
        picked = self._rows(window).index_select(0, (row + window.width - 1).flatten())
        return picked.mT.unflatten(-1, offsets.shape[:-1]) if offsets.ndim > 1 else picked[0]

    def distinct(self, grid: Grid, *, device: torch.device | None = None) -> Tensor:
        """Return `[num_heads, (2h - 1)(2w - 1)]`: the table on the window that the grid is.

        Raises:
            PositionError: if the grid has frames, or under "crop" is larger than the trained window.
        """
        self.home(device)
        check_flat(grid)
        # Always a copy: an edit of the result must not reach the parameter.
        return self._rows(grid).mT.clone(memory_format=torch.contiguous_format)

    def prefix_values(self) -> Tensor | None:
        """Return `[num_heads, 3]` from the class rows; None without them: zeros."""
        return self.table[-3:].mT.clone() if self.spec.class_rows else None

    def resized(self, window_hw: tuple[int, int]) -> SwinTable:
        """Return a module whose table is trained on from this one's values on another window.

        Keep the source: a table resampled there and back is another table.
        """
        window = Grid(*sides("window_hw", window_hw))
        moved = SwinTable(replace(self.spec, window_hw=window_hw), self.dims)
        rows = torch.cat([self._rows(window), self.table[self.cells().shape[0] :]])
        moved.table = nn.Parameter(rows.detach(), requires_grad=self.table.requires_grad)
        return moved.train(self.training)

    @classmethod
    def from_source(cls, state: Mapping[str, Tensor], spec: SwinTableSpec, dims: Dims) -> Self:
        """Return a module with a source's table.

        Args:
            state: state dict of one attention module of Swin, BEiT or MaxViT as timm, transformers, torchvision or
                Microsoft write it. A `[num_heads, 2h - 1, 2w - 1]` table (TensorFlow's MaxViT, key minus query) is
                turned round. A stored index is compared and left behind.
            spec: with the window the table was trained on.
            dims: sizes of the model.

        Raises:
            PositionError: if the table does not fit the window, or the index numbers pairs in another order.
        """
        table = required_entry(state, "relative_position_bias_table")
        index = source_entry(state, "relative_position_index")
        check_index(index, Grid(*spec.window_hw), class_rows=spec.class_rows)
        if table.ndim == 3:
            table = _from_map(table, spec)
        module = cls(spec, dims)
        if table.shape != module.table.shape:
            raise PositionError(
                f"state holds a table of shape {tuple(table.shape)}; window {spec.window_hw} with class_rows "
                f"{spec.class_rows} and {dims.num_heads} heads needs {tuple(module.table.shape)}. Give the window the "
                "table was trained on, and move it afterwards with resized()."
            )
        module.table = nn.Parameter(table.detach().clone())
        return module

    def _rows(self, window: Grid) -> Tensor:
        """Return `[(2h - 1)(2w - 1), num_heads]` on a window, by the spec's policy."""
        source, target = _differences(self.window), _differences(window)
        if self.spec.windows == "resample":
            return resample(self.cells(), source=source, target=target, recipe=self.spec.recipe)
        if window.height > self.window.height or window.width > self.window.width:
            raise PositionError(
                f"window {window.shape[1:]} is larger than the trained {self.spec.window_hw}; windows='crop' has no "
                "number for its differences. Use windows='resample'."
            )
        table = self.cells().unflatten(0, (source.height, source.width))
        top, left = self.window.height - window.height, self.window.width - window.width
        inner: Tensor = table[top : top + target.height, left : left + target.width]
        return inner.flatten(0, 1)


def _differences(window: Grid) -> Grid:
    """Return the grid of the differences of a window."""
    return Grid(2 * window.height - 1, 2 * window.width - 1)


def _from_map(table: Tensor, spec: SwinTableSpec) -> Tensor:
    """Return `[rows, num_heads]` from `[num_heads, 2h - 1, 2w - 1]`, which counts key minus query."""
    expected = _differences(Grid(*spec.window_hw)).shape[1:]
    if tuple(table.shape[1:]) != expected or spec.class_rows:
        raise PositionError(
            f"state holds a map of shape {tuple(table.shape)}; window {spec.window_hw} needs [num_heads, "
            f"{expected[0]}, {expected[1]}] and no class rows. Give the window the table was trained on."
        )
    return table.flip(1, 2).flatten(1).mT
