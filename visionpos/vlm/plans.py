"""Plan: the views of a picture, their grids, and where on the picture every token looks."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from visionpos.vlm.views import Raster, View


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a family makes of an image or a clip.

    Args:
        size_hw: (height, width) of the original picture in pixels.
        views: the pictures that the encoder sees, in stream order. A clip is one view with several time steps.
        group: frames a time step.
        frames: frames that were sampled, 1 for an image.
        elapsed: exact seconds from the start of the clip to each time step, where known.
        instants: the time in seconds that text names for each time step, where known.
        tiles_rc: rows and columns of tiles; None if the picture is not cut.
        joins: whether the stream reads all tiles as one raster.
        raster: that raster; None where a family drops it because no cell is left.
        order: the parts of an image in stream order.
    """

    size_hw: tuple[int, int]
    views: tuple[View, ...]
    group: int = 1
    frames: int = 1
    elapsed: tuple[Fraction, ...] | None = None
    instants: tuple[float, ...] | None = None
    tiles_rc: tuple[int, int] | None = None
    joins: bool = False
    raster: Raster | None = None
    order: tuple[str, ...] = ("global", "tiles")

    @property
    def parts(self) -> tuple[View | Raster, ...]:
        """Return what the stream reads cells from, in its order: views, or one raster for all tiles."""
        if self.tiles_rc is None or not self.joins:
            return self.views
        whole = [view for view in self.views if view.node == "global"]
        tiles = [] if self.raster is None else [self.raster]
        by_node: dict[str, list[View] | list[Raster]] = {"global": whole, "tiles": tiles}
        return tuple(part for node in self.order for part in by_node[node])

    @property
    def cells(self) -> int:
        """Return the number of placeholder tokens, which is the number of features of the encoder."""
        return sum(part.tokens.size for part in self.parts)

    @property
    def repeated_frames(self) -> int:
        """Return how often the last frame is repeated to fill the last time step."""
        return self.views[0].patches.frames * self.group - self.frames

    @property
    def grid_thw(self) -> tuple[tuple[int, int, int], ...]:
        """Return (frames, height, width) in patches of every view, as `position_ids_from_tokens` takes them."""
        return tuple(view.patches.shape for view in self.views)

    def token_rects(self) -> Tensor:
        """Return `[cells, 4]` float64: top, left, bottom, right of every placeholder on the original picture.

        In pixels, in stream order: a token can be drawn on the photo, and a click can be mapped to a token.
        """
        return torch.cat([part.token_rects() for part in self.parts])
