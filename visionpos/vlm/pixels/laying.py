"""Laying: the size steps of a family carried out on pixels; a picture and its plan enter, the views leave as pixels.

The steps are those that made the plan, so a view shows what the plan says it shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from visionpos.errors import PositionError
from visionpos.vlm.box import Box
from visionpos.vlm.canvas import Stretch
from visionpos.vlm.pixels.resampling import resampled

if TYPE_CHECKING:
    from visionpos.vlm.grammar import FamilySpec
    from visionpos.vlm.pixel_spec import PixelSpec, ResampleSpec
    from visionpos.vlm.resize import Step
    from visionpos.vlm.tiling import Plan, View


def pixel_spec(spec: FamilySpec) -> PixelSpec:
    """Return what a family's data says of pixels.

    Raises:
        PositionError: if it says nothing.
    """
    if spec.pixels is None:
        raise PositionError(
            "the family has no pixel rule in its data. Add `pixels:` by overlay, such as "
            "{mean: [0.5, 0.5, 0.5], std: [0.5, 0.5, 0.5]}."
        )
    return spec.pixels


def view_pixels(pixels: Tensor, plan: Plan, spec: FamilySpec) -> tuple[Tensor, ...]:
    """Return the pixels of every view of a plan, before normalisation.

    Args:
        pixels: the upright picture `[3, height, width]` or the sampled frames `[frames, 3, height, width]`, uint8.
        plan: what the family makes of that size.
        spec: the family's data.

    Returns:
        A tensor `[..., 3, *view.size_hw]` a view, in the plan's order; uint8, or float32 of 0..255 where the family
        does not round.

    Raises:
        PositionError: if the pixels are not those that were planned, or the family has no pixel rule.
    """
    if tuple(pixels.shape[-2:]) != tuple(plan.size_hw):
        raise PositionError(
            f"pixels are {tuple(pixels.shape[-2:])} (height, width) and the plan is for {tuple(plan.size_hw)}; they "
            "must agree. Plan the upright picture: photo_size_hw() or photo(...).shape[-2:]."
        )
    how = pixel_spec(spec)
    if plan.views[0].node == "clip":
        assert spec.video is not None  # noqa: S101 (the clip was planned)
        return (laid(pixels, spec.video.size, how.resample, how.pad, frames=plan.frames),)
    if plan.tiles_rc is None and spec.untiled is not None:
        spec = spec.untiled
        how = pixel_spec(spec)
    base = pixels
    if spec.views.size:
        base = laid(pixels, spec.views.size, how.resample, how.pad, stepwise=how.stepwise)
    tiles = [view for view in plan.views if view.node == "tile"]
    canvas = _canvas(base, tiles[0], plan.tiles_rc, spec) if plan.tiles_rc and tiles else base
    views = []
    for view in plan.views:
        if view.node == "global":
            shown = _whole({"picture": pixels, "resized": base, "canvas": canvas}, spec)
        else:
            shown = _tile(canvas, view, spec)
        assert shown.shape[-2:] == view.size_hw  # noqa: S101 (the same steps made the plan)
        views.append(shown)
    return tuple(views)


def laid(
    pixels: Tensor,
    steps: Sequence[Step],
    resample: ResampleSpec,
    pad: tuple[int, int, int],
    *,
    frames: int = 1,
    default_hw: tuple[int, int] | None = None,
    stepwise: bool = False,
) -> Tensor:
    """Return the picture, and the canvas around it, after all steps: resampled once, and again after each canvas.

    Args:
        pixels: `[..., 3, height, width]`.
        steps: the size rule.
        resample: how pixels are resized.
        pad: colour of what the picture does not cover, in 8-bit steps.
        frames: sampled frames of the clip, 1 for an image.
        default_hw: (height, width) of the box that steps take which name none.
        stepwise: resample at every step.
    """
    box = Box(pixels.shape[-2], pixels.shape[-1], frames=frames, default_hw=default_hw)
    for step in steps:
        after = step.apply(box)
        if after.canvas_hw is None:
            pixels = _sized(pixels, after, resample) if stepwise else pixels
        elif box.canvas_hw is None:
            pixels = _on_canvas(_sized(pixels, after, resample), after, pad)
        else:
            pixels = resampled(pixels, after.canvas_hw, resample)
        box = after
    return _sized(pixels, box, resample) if box.canvas_hw is None else pixels


def _sized(pixels: Tensor, box: Box, resample: ResampleSpec) -> Tensor:
    return resampled(pixels, (box.height, box.width), resample)


def _on_canvas(pixels: Tensor, box: Box, pad: tuple[int, int, int]) -> Tensor:
    """Return the canvas with the picture on it, padded where it is larger and cropped where it is smaller."""
    height, width = box.size_hw
    colour = torch.tensor(pad, dtype=pixels.dtype, device=pixels.device).view(3, 1, 1)
    canvas = colour.expand(*pixels.shape[:-2], height, width).clone()
    (top, left), (below, right) = box.corner_yx, (box.height, box.width)
    rows = slice(max(top, 0), min(top + below, height))
    cols = slice(max(left, 0), min(left + right, width))
    canvas[..., rows, cols] = pixels[
        ..., rows.start - top : rows.stop - top, cols.start - left : cols.stop - left
    ]
    return canvas


def _whole(sources: Mapping[str, Tensor], spec: FamilySpec) -> Tensor:
    """Return the view of the whole image."""
    how, rule = pixel_spec(spec), spec.views.global_
    assert rule is not None  # noqa: S101 (the plan has such a view)
    return laid(sources[rule.of], rule.size, how.whole or how.resample, how.pad)


def _canvas(base: Tensor, tile: View, tiles_rc: tuple[int, int], spec: FamilySpec) -> Tensor:
    """Return what tiles are cut from: the canvas of all; or the picture, where pieces are resized one by one."""
    how, rule = pixel_spec(spec), spec.views.tile
    assert rule is not None  # noqa: S101 (the image is cut)
    if rule.cut != "even":
        return base
    canvas_hw = tuple(
        count * (side - rule.margin_px) + rule.margin_px
        for count, side in zip(tiles_rc, tile.size_hw, strict=True)
    )
    steps = (Stretch(),) if rule.size is not None or spec.views.fill is None else spec.views.fill
    return laid(base, steps, how.resample, how.pad, default_hw=(canvas_hw[0], canvas_hw[1]))


def _tile(canvas: Tensor, view: View, spec: FamilySpec) -> Tensor:
    """Return one tile: a window of the canvas; or a piece of the picture, resized by its own steps."""
    how, rule = pixel_spec(spec), spec.views.tile
    assert rule is not None  # noqa: S101 (the image is cut)
    assert view.tile_rc is not None  # noqa: S101 (the view is a tile)
    if rule.cut != "even":
        top, left, bottom, right = (int(edge) for edge in view.source_yxyx)
        steps = rule.size if rule.size is not None else (Stretch(box=rule.px),)
        return laid(canvas[..., top:bottom, left:right], steps, how.resample, how.pad)
    top, left = (
        at * (side - rule.margin_px) for at, side in zip(view.tile_rc, view.size_hw, strict=True)
    )
    return canvas[..., top : top + view.size_hw[0], left : left + view.size_hw[1]]
