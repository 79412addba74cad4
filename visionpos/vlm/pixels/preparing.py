"""Preparing: a family's plan applied to real pixels; photos and clips enter, what its vision encoder takes leaves."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image as Picture
from torch import Tensor

from visionpos.errors import PositionError
from visionpos.vlm.pixel_spec import PatchSpec
from visionpos.vlm.pixels.laying import pixel_spec, view_pixels
from visionpos.vlm.pixels.patching import normalised, patches
from visionpos.vlm.pixels.photos import photo
from visionpos.vlm.pixels.reading import VideoFrames
from visionpos.vlm.segments import Image

if TYPE_CHECKING:
    from visionpos.vlm.families import Family
    from visionpos.vlm.grammar import GridSpec
    from visionpos.vlm.tiling import Plan

Source = str | PathLike[str] | Picture.Image | np.ndarray[Any, Any] | Tensor | VideoFrames


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncoderInput:
    """The views of a batch of images and clips, normalised, and what an encoder makes of them.

    Args:
        views: every view `[3, height, width]`, a clip `[frames, 3, height, width]`, float32: image after image, inside
            one in stream order (`Plan.views`). A published processor may stack the views of an image in another order
            (Phi-4: the whole image first); `nodes` tells them apart.
        plans: the plan of every image or clip.
        grids: from pixels to tokens, of every image or clip.
        layout: how views are flattened; None where the encoder is given pictures.
    """

    views: tuple[Tensor, ...]
    plans: tuple[Plan, ...]
    grids: tuple[GridSpec, ...]
    layout: PatchSpec | None

    @property
    def counts(self) -> tuple[int, ...]:
        """Return the number of views of every image: split by these, never by position in the batch."""
        return tuple(len(plan.views) for plan in self.plans)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Return what every view is: "global", "tile" or "clip"."""
        return tuple(view.node for plan in self.plans for view in plan.views)

    @property
    def grid_thw(self) -> Tensor:
        """Return `[views, 3]` int64: frames, height and width in patches of every view."""
        return torch.tensor([grid for plan in self.plans for grid in plan.grid_thw])

    @property
    def values(self) -> Tensor:
        """Return what the encoder is given: patches where the family flattens its views, else `padded()[0]`."""
        return self.padded()[0] if self.layout is None else self.patches()

    def padded(self) -> tuple[Tensor, Tensor]:
        """Return `[views, 3, height, width]` and the mask `[views, height, width]` bool, True on pixels of a view.

        Views of several sizes are padded below and on the right with zeros, that is with the family's mean colour. The
        frames of a clip count as views.
        """
        flat = [one for view in self.views for one in (view if view.ndim == 4 else view[None])]
        height, width = (max(one.shape[axis] for one in flat) for axis in (-2, -1))
        values = flat[0].new_zeros((len(flat), 3, height, width))
        mask = torch.zeros((len(flat), height, width), dtype=torch.bool, device=values.device)
        for number, one in enumerate(flat):
            values[number, :, : one.shape[-2], : one.shape[-1]] = one
            mask[number, : one.shape[-2], : one.shape[-1]] = True
        return values, mask

    def patch_rows(self) -> tuple[Tensor, ...]:
        """Return the flattened patches of every view, `[patches, values]`, in the family's order.

        A family that takes pictures gives them row by row, channels first. Pixels below and on the right that fill no
        patch are left out, as the encoder's convolution does.
        """
        layout = self.layout or PatchSpec()
        grids = (
            grid for grid, count in zip(self.grids, self.counts, strict=True) for _ in range(count)
        )
        rows = []
        for view, grid in zip(self.views, grids, strict=True):
            height, width = (side // grid.patch * grid.patch for side in view.shape[-2:])
            merge = grid.merge if layout.order == "blocks" else 1
            cut = view[..., :height, :width]
            rows.append(patches(cut, grid.patch, merge, layout.temporal, vector=layout.vector))
        return tuple(rows)

    def patches(self) -> Tensor:
        """Return the patches of all views in one tensor, in the family's form.

        `[n, values]`; `[n, 3, patch, patch]` (Kimi); or `[1, 3, patch, n * patch]` (MiniCPM).
        """
        rows = torch.cat(self.patch_rows())  # [n, values]
        if self.layout is None or self.layout.form == "rows":
            return rows
        patch = self.grids[0].patch
        squares = rows.reshape(-1, 3, patch, patch)
        if self.layout.form == "patches":
            return squares
        return squares.permute(1, 2, 0, 3).reshape(1, 3, patch, -1)


def prepare(sources: Source | list[Source] | tuple[Source, ...], fam: Family) -> EncoderInput:
    """Return photos and clips as a family's vision encoder is given them.

    Every source is read by `photo` (EXIF orientation applied, transparency over white, 16 bits to 8, first frame of an
    animation; floats are refused), planned by the family, resampled, padded, cut and normalised as its data says.

    Args:
        sources: one or several paths, PIL images, arrays `[height, width, channels]`, tensors `[channels, height,
            width]`, or `VideoFrames` for clips. Several images count as one prompt: some families cut an image only
            where it is alone.
        fam: the family; dialect and variant decide as everywhere. Its data says whose code resizes; with the overlay
            `{"pixels": {"resample": {"engine": "pillow"}}}` it is that of training code and slow processors.

    Raises:
        PositionError: as `photo` and `Family.plan`, naming the source by its number.

    Example:
        >>> from visionpos.vlm import family
        >>> ready = prepare(torch.zeros(3, 480, 640, dtype=torch.uint8), family("qwen2_5_vl"))
        >>> ready.values.shape, ready.grid_thw.tolist()
        (torch.Size([1564, 1176]), [[1, 34, 46]])
    """
    listed = list(sources) if isinstance(sources, list | tuple) else [sources]
    if not listed:
        raise PositionError("sources is empty; at least one photo or clip is required. Add one.")
    images = sum(not isinstance(one, VideoFrames) for one in listed)
    plans: list[Plan] = []
    views: list[Tensor] = []
    for number, source in enumerate(listed):
        try:
            plan, shown = _prepared(source, fam, images)
        except PositionError as error:
            raise type(error)(f"source {number}: {error}") from error
        plans.append(plan)
        views += shown
    still, clip = fam.spec.grid, (fam.spec.video or fam.spec).grid
    return EncoderInput(
        views=tuple(views),
        plans=tuple(plans),
        grids=tuple(clip if plan.views[0].node == "clip" else still for plan in plans),
        layout=pixel_spec(fam.spec).patches,
    )


def _prepared(source: Source, fam: Family, images: int) -> tuple[Plan, list[Tensor]]:
    """Return the plan of one photo or clip and its normalised views."""
    if isinstance(source, VideoFrames):
        pixels, plan = source.pixels, fam.plan(source.video())
    else:
        pixels = photo(source)
        plan = fam.plan(Image(size_hw=(pixels.shape[-2], pixels.shape[-1])), images)
    how = pixel_spec(fam.spec)
    shown = view_pixels(pixels, plan, fam.spec)
    return plan, [normalised(view, how.mean, how.std) for view in shown]
