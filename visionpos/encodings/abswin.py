"""Absolute-window tables: a global table stretched over the image plus a window table tiled over it. Hiera, SAM 2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import nn

from visionpos.encodings.doors import Additive, Dims, blanked, check_device, check_points
from visionpos.encodings.sources import filled, required_entry, sides, start
from visionpos.errors import PositionError
from visionpos.geometry.fields import check_fields
from visionpos.geometry.grid import Grid
from visionpos.geometry.places import check_extent, check_whole
from visionpos.geometry.points import readable
from visionpos.geometry.recipes import recipe_of
from visionpos.geometry.resample import resample, sample_table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AbsWinSpec:
    """Settings of an absolute-window table.

    Args:
        global_hw: rows and columns of the global table.
        window_hw: rows and columns of the window table, the window of the first attention stage.
        recipe: how the global table is stretched: "hiera" antialiases, "sam2" does not. The window is never resized.
        fit: a grid that is no multiple of the window is refused ("exact"), or tiled beyond its edge and cut ("crop").
        std: standard deviation of the truncated normal start values.

    Raises:
        PositionError: if a side is below 1, or a choice is unknown.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    kind: Literal["abswin"] = "abswin"
    global_hw: tuple[int, int] = (14, 14)
    window_hw: tuple[int, int] = (8, 8)
    recipe: str = "hiera"
    fit: Literal["exact", "crop"] = "exact"
    std: float = 0.02

    def __post_init__(self) -> None:
        check_fields(self)
        sides("global_hw", self.global_hw)
        sides("window_hw", self.window_hw)
        recipe_of(self.recipe)
        if self.std < 0:
            raise PositionError(f"std is {self.std}; a number of at least 0 is required.")


class AbsWin(Additive):
    """A global table and a window table, parameters `whole [gh * gw, d]` and `window [wh * ww, d]`, row-major.

    Stretching one table over windows would give neighbouring windows different codes for the same place, and break
    window attention at another size: hence the tiled part, which is the same in every window.

    Example:
        >>> table = AbsWin(AbsWinSpec(window_hw=(2, 3)), Dims(embed_dim=8, num_heads=1, depth=1))
        >>> table(Grid(4, 9)).shape
        torch.Size([36, 8])

    Reference:
        Window Attention is Bugged (arXiv 2311.05613); timm Hiera (antialiased) and HieraDet, facebookresearch/sam2
        (not antialiased). Both fail on a grid that is no multiple of the window; "crop" is ours.
    """

    spec: AbsWinSpec
    whole: nn.Parameter
    window: nn.Parameter

    def __init__(
        self, spec: AbsWinSpec, dims: Dims, *, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.spec, self.dims = spec, dims
        tables = [
            torch.empty(Grid(*side).size, dims.embed_dim)
            for side in (spec.global_hw, spec.window_hw)
        ]
        for table in tables:
            start(table, spec.std, generator)
        self.whole, self.window = (nn.Parameter(table) for table in tables)

    def forward(self, grid: Grid, *, device: torch.device | None = None) -> Tensor:
        """Return `[n, embed_dim]`; frames of a clip share their code.

        Raises:
            PositionError: if fit is "exact" and the grid no multiple of the window, or another device is asked for.
        """
        check_device(self.whole, device)
        (high, wide), flat = self.spec.window_hw, Grid(grid.height, grid.width)
        self._check_windows((grid.height, grid.width))
        whole = resample(
            self.whole, source=Grid(*self.spec.global_hw), target=flat, recipe=self.spec.recipe
        )
        rows = torch.arange(grid.height, device=whole.device) % high
        columns = torch.arange(grid.width, device=whole.device) % wide
        cells = (rows.unsqueeze(-1) * wide + columns).flatten()  # [n] rows of the window table
        code = whole + self.window[cells]
        return code.repeat(grid.frames, 1) if grid.frames > 1 else code

    def at(
        self,
        coords_yx: Tensor,
        extent_hw: tuple[float, float] | Tensor,
        *,
        valid: Tensor | None = None,
    ) -> Tensor:
        """Return the code at any cells, in any order: masked mask units, unrolled tokens, batches of several sizes.

        Args:
            coords_yx: `[..., n, 2]` whole numbers, row and column of each token.
            extent_hw: sides of the grid; a tensor `[..., 2]` gives every sample its own.
            valid: `[..., n]`, True where there is a token; the others get zeros, whatever their coordinates.

        Raises:
            PositionError: if shapes do not match, the extent is not two sides above 0, or no multiple of the window
                when fit is "exact", or (on the CPU) a cell is not finite, not whole or outside the grid.
        """
        points = coords_yx if valid is None else blanked(coords_yx, valid)
        check_points(points, 2, "coords_yx", extent=extent_hw, rank=2)
        check_extent(extent_hw, points)
        check_whole(points, "coords_yx")
        self._check_windows(extent_hw)
        whole = sample_table(
            self.whole,
            points,
            source=Grid(*self.spec.global_hw),
            extent_hw=extent_hw,
            recipe=self.spec.recipe,
        )
        cells, (high, wide) = points.round().long(), self.spec.window_hw
        code = whole + self.window[(cells[..., 0] % high) * wide + cells[..., 1] % wide]
        return code if valid is None else blanked(code, valid)

    def _check_windows(self, extent_hw: tuple[float, float] | Tensor) -> None:
        """Refuse grids that are no multiple of the window, if fit is "exact"; sides of samples on the CPU alone."""
        (high, wide), rest = self.spec.window_hw, False
        if self.spec.fit != "exact":
            return
        if not isinstance(extent_hw, torch.Tensor):
            rest, given = bool(extent_hw[0] % high or extent_hw[1] % wide), [extent_hw]
        elif readable(extent_hw):
            odd = (extent_hw % extent_hw.new_tensor(self.spec.window_hw)).any(-1)
            rest, given = bool(odd.any()), extent_hw[odd].tolist()
        if rest:
            raise PositionError(
                f"grid {given[0][0]}x{given[0][1]} is no multiple of window {high}x{wide}; whole windows are required. "
                "Pad the image to whole windows, or set fit='crop'."
            )

    @classmethod
    def from_source(cls, state: Mapping[str, Tensor], spec: AbsWinSpec, dims: Dims) -> AbsWin:
        """Return the encoding with the tables of Hiera or SAM 2.

        Args:
            state: entries `pos_embed` or `pos_embed_abs (1, d, gh, gw)`, and `pos_embed_win` (Hiera) or
                `pos_embed_window (1, d, wh, ww)` (SAM 2, its trunk, transformers).
            spec: the filling.
            dims: sizes of the model.

        Raises:
            PositionError: if an entry is missing or of another shape.
        """
        maps = {
            "whole": (
                required_entry(state, "pos_embed", "pos_embed_abs", ranks=(3, 4)),
                spec.global_hw,
            ),
            "window": (
                required_entry(state, "pos_embed_win", "pos_embed_window", ranks=(3, 4)),
                spec.window_hw,
            ),
        }
        own = {}
        for name, (table, shape) in maps.items():
            if tuple(table.shape[-2:]) != tuple(shape):
                raise PositionError(
                    f"the {name} table of the state dict is {tuple(table.shape)}; (1, d, {shape[0]}, {shape[1]}) is "
                    "required. Set global_hw and window_hw to the source's."
                )
            own[name] = table.movedim(-3, -1).flatten(0, -2)
        return filled(cls(spec, dims), own, source="the state dict")
