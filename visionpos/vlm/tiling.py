"""Plans: the views of a picture, their grids, and where on the picture every token looks.

A size and a spec enter; rectangles leave, no pixels and no tensors until they are asked for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from visionpos.errors import PositionError
from visionpos.geometry import Grid
from visionpos.vlm.grammar import FamilySpec, GridSpec, VideoSpec
from visionpos.vlm.instants import elapsed_steps, exact, named_instants
from visionpos.vlm.resize import resized
from visionpos.vlm.segments import Image, Video

Rect = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One picture that the encoder sees.

    Args:
        size_hw: (height, width) in pixels after resizing and padding: what the encoder is given.
        source_yxyx: the part of the original picture it shows: top, left, bottom, right in pixels.
        content_yxyx: where in `size_hw` that part lies; the rest is padding.
        patches: grid of patches.
        tokens: grid of tokens, after merging.
    """

    size_hw: tuple[int, int]
    source_yxyx: Rect
    content_yxyx: Rect
    patches: Grid
    tokens: Grid

    @property
    def padding_px(self) -> Rect:
        """Return the padding in pixels: top, left, bottom, right."""
        top, left, bottom, right = self.content_yxyx
        return top, left, self.size_hw[0] - bottom, self.size_hw[1] - right

    def token_rects(self) -> Tensor:
        """Return `[n, 4]` float64: top, left, bottom, right of every token on the original picture, in pixels.

        Every time step of a clip repeats the rectangles of its grid. Tokens of nothing but padding have no area.
        """
        bands = [
            _bands(cells, side, source, content)
            for cells, side, source, content in zip(
                self.tokens.shape[1:],
                self.size_hw,
                (self.source_yxyx[0::2], self.source_yxyx[1::2]),
                (self.content_yxyx[0::2], self.content_yxyx[1::2]),
                strict=True,
            )
        ]
        (top, bottom), (left, right) = bands
        corners = [(top, 1), (left, 0), (bottom, 1), (right, 0)]
        rect = torch.stack(
            [
                edge.unsqueeze(axis).expand(self.tokens.height, self.tokens.width)
                for edge, axis in corners
            ],
            dim=-1,
        )
        return rect.reshape(-1, 4).repeat(self.tokens.frames, 1)  # [n, 4]


def _bands(
    cells: int, side: int, source: tuple[int, ...], content: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Return where each row (or column) of cells starts and stops on the original picture."""
    edge = torch.arange(cells + 1, dtype=torch.float64) * side / cells
    inside = (edge.clamp(*content) - content[0]) / (content[1] - content[0])
    edge = source[0] + inside * (source[1] - source[0])
    return edge[:-1], edge[1:]


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
    """

    size_hw: tuple[int, int]
    views: tuple[View, ...]
    group: int = 1
    frames: int = 1
    elapsed: tuple[Fraction, ...] | None = None
    instants: tuple[float, ...] | None = None

    @property
    def cells(self) -> int:
        """Return the number of placeholder tokens, which is the number of features of the encoder."""
        return sum(view.tokens.size for view in self.views)

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
        return torch.cat([view.token_rects() for view in self.views])


def image_plan(image: Image, spec: FamilySpec) -> Plan:
    """Return the plan of an image.

    Args:
        image: its size before any resizing.
        spec: the family's size rule and grid.

    Raises:
        PositionError: if the family refuses the size.
    """
    size_hw = resized(spec.views.global_.size, image.size_hw)
    return Plan(size_hw=image.size_hw, views=(_whole(image.size_hw, size_hw, spec.grid, 1),))


def video_plan(video: Video, spec: VideoSpec) -> Plan:
    """Return the plan of a clip.

    Args:
        video: frame size, and times or number of the sampled frames.
        spec: the family's rule for clips.

    Raises:
        PositionError: if the family refuses the size or the number of frames.
    """
    size_hw = resized(spec.size, video.size_hw, frames=video.num_frames)
    steps = -(-video.num_frames // spec.group)
    seconds = None if video.seconds is None else tuple(video.seconds)
    if video.sampled_fps is not None:
        step = Fraction(spec.group) / exact(video.sampled_fps)
        elapsed: tuple[Fraction, ...] | None = tuple(at * step for at in range(steps))
    else:
        elapsed = None if seconds is None else elapsed_steps(seconds, spec.group)
    return Plan(
        size_hw=video.size_hw,
        views=(_whole(video.size_hw, size_hw, spec.grid, steps),),
        group=spec.group,
        frames=video.num_frames,
        elapsed=elapsed,
        instants=None if seconds is None else named_instants(seconds, spec.group, spec.instant),
    )


def sampled_frames(spec: VideoSpec, total_frames: int, source_fps: float) -> int:
    """Return how many frames of a clip are sampled.

    Args:
        spec: the family's rule for clips.
        total_frames: frames of the clip, at least 1.
        source_fps: its frames per second, above 0.

    Raises:
        PositionError: if the clip is too short, or a value is out of range.
    """
    sample = spec.sample
    if sample is None:
        raise PositionError("no rule for sampling frames is known. Choose the frames yourself.")
    if total_frames < sample.multiple or not 0 < source_fps < math.inf:
        raise PositionError(
            f"total_frames is {total_frames} and source_fps {source_fps}; at least {sample.multiple} frames and a "
            "finite fps above 0 are required. Pass a single frame as an Image."
        )
    least = -(-sample.at_least // sample.multiple) * sample.multiple
    most = min(sample.at_most, total_frames) // sample.multiple * sample.multiple
    wanted = min(max(total_frames / source_fps * sample.fps, least), most)
    return math.floor(wanted / sample.multiple) * sample.multiple


def _whole(
    original_hw: tuple[int, int], size_hw: tuple[int, int], grid: GridSpec, frames: int
) -> View:
    """Return the view that shows the whole picture without padding."""
    patches = Grid.of_image(size_hw, grid.patch, frames=frames, fit="floor")
    return View(
        size_hw=size_hw,
        source_yxyx=(0, 0, *original_hw),
        content_yxyx=(0, 0, *size_hw),
        patches=patches,
        tokens=patches.merged(grid.merge),
    )
