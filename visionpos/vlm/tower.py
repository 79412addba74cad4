"""Towers: where the patches of a vision tower stand, in the tower's own order, and who attends to whom.

Grids of all images and clips of a call enter, in patches; everything that leaves runs over their patches end to end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from visionpos.errors import ConfigError, PositionError
from visionpos.geometry import Grid
from visionpos.geometry.arguments import checked
from visionpos.geometry.order import inverse_order, merge_order, token_order, window_order
from visionpos.vlm.box import check_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerSpec:
    """How a vision tower orders its patches and bounds its attention.

    Args:
        merge: patches stand in blocks of merge x merge, each of which becomes one token; 1 is row by row.
        axes: what each patch's ids count.
        attention: "frame" bounds it to one time step, "clip" to one image or clip.
        window: side of a window in merged cells for the layers that are not in full_layers; None for no windows.
        full_layers: blocks that attend without windows.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    merge: int = 1
    axes: tuple[Literal["time", "row", "col"], ...] = ("row", "col")
    attention: Literal["frame", "clip"] = "frame"
    window: int | None = None
    full_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_spec(self, "tower")
        if self.merge < 1 or not self.axes or (self.window is not None and self.window < 1):
            raise ConfigError(
                f"merge is {self.merge}, axes {self.axes} and window {self.window}; a merge and window of at least 1 "
                "and at least one axis are required. Correct them."
            )


@dataclass(frozen=True, slots=True, eq=False)
class TowerWindows:
    """The order of window attention, and how to leave it.

    Args:
        cells: `[cells]` int64 which merged cell stands at each place; every image's follow those of the one before.
        patches: `[patches]` int64 the same for patches, which move with their cell: order patches and their ids by it.
        inverse: `[cells]` int64 brings merged cells back: apply it after the merger.
        cu_seqlens: `[windows + 1]` int32 where each window begins, in patches.
    """

    cells: Tensor
    patches: Tensor
    inverse: Tensor
    cu_seqlens: Tensor


@checked
def tower_ids(tower: TowerSpec, grids: Sequence[Grid]) -> Tensor:
    """Return the ids of every patch in the tower's order, `[patches, axes]` int64.

    Args:
        tower: of the family.
        grids: of every image and clip, in patches.

    Raises:
        PositionError: if a side is not divisible by merge.

    Example:
        >>> tower_ids(TowerSpec(merge=2), [Grid(2, 4)]).T.tolist()
        [[0, 0, 1, 1, 0, 0, 1, 1], [0, 1, 0, 1, 2, 3, 2, 3]]
    """
    parts = [torch.zeros(0, len(tower.axes), dtype=torch.int64)]
    for grid in grids:
        sides = [torch.arange(side) for side in grid.shape]
        places = torch.meshgrid(*sides, indexing="ij")
        chosen = [places[("time", "row", "col").index(axis)].flatten() for axis in tower.axes]
        parts.append(torch.stack(chosen, -1)[merge_order(grid, tower.merge)])
    return torch.cat(parts)


@checked
def tower_segments(tower: TowerSpec, grids: Sequence[Grid]) -> tuple[Tensor, int]:
    """Return where each stretch of full attention begins, `[stretches + 1]` int32, and the longest of them in patches.

    Example:
        >>> tower_segments(TowerSpec(merge=2), [Grid(2, 4, frames=2), Grid(2, 2)])
        (tensor([ 0,  8, 16, 20], dtype=torch.int32), 8)
    """
    lengths = [
        length
        for grid in grids
        for length in (
            [grid.height * grid.width] * grid.frames if tower.attention == "frame" else [grid.size]
        )
    ]
    ends = F.pad(torch.tensor(lengths, dtype=torch.int64).cumsum(0), (1, 0))
    return ends.int(), max(lengths, default=0)


@checked
def tower_windows(tower: TowerSpec, grids: Sequence[Grid]) -> TowerWindows:
    """Return the windows of a call: the permutation of cells and patches, its inverse, and the boundaries.

    Windows never reach over the border of a frame; those at the right and lower border are cut off.

    Raises:
        PositionError: if the tower has no windows.

    Example:
        >>> tower_windows(TowerSpec(merge=2, window=4), [Grid(12, 10)]).cu_seqlens.tolist()
        [0, 64, 80, 112, 120]

    Reference:
        Qwen2.5-VL (arXiv 2502.13923): windows of 112 px; transformers vision_utils.get_vision_window_index.
    """
    if tower.window is None:
        raise PositionError(
            "the tower has no windows; all its layers attend in full. Use tower_segments, or set tower.window."
        )
    cells, ends = [torch.zeros(0, dtype=torch.int64)], [torch.zeros(1, dtype=torch.int64)]
    area, before = tower.merge**2, 0
    for grid in grids:
        order, bounds = window_order(grid, tower.window, merge=tower.merge)
        cells.append(order + before)
        ends.append(bounds[1:] + before * area)
        before += len(order)
    order = torch.cat(cells)
    return TowerWindows(
        order, token_order(order, area), inverse_order(order), torch.cat(ends).int()
    )
