"""NaFlex: a batch of ragged images, one a row, padded; the true grid of each travels with it.

Patches enter; the inputs of timm's NaFlexVit and of transformers' Siglip2 leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from visionpos.errors import PositionError
from visionpos.geometry.grid import Grid, is_whole
from visionpos.vlm.runs import checked_grids, flat_tokens, grid_sides, image_tokens, kept_cells

if TYPE_CHECKING:
    from visionpos.vlm.packed import Located


@dataclass(frozen=True, slots=True, eq=False)
class NaflexBatch:
    """One image a row.

    Args:
        patches: `[b, n, ...]`, zeros in padding.
        patch_coord: `[b, n, 2]` int64, (y, x) of every patch in its grid, zeros in padding.
        patch_valid: `[b, n]` bool, False for padding.
        grids: the whole grid of every image, also where tokens were dropped.
    """

    patches: Tensor
    patch_coord: Tensor
    patch_valid: Tensor
    grids: tuple[Grid, ...]

    @property
    def spatial_shapes(self) -> Tensor:
        """Return `[b, 2]` int64: height and width of every grid, never read off a coordinate."""
        return grid_sides(self.grids, self.patch_valid.device)[:, 1:]

    def codes(self, encoding: Located) -> Tensor:
        """Return `[b, n, d]`: the code of a learned or factorised table at every patch, zeros in padding.

        Args:
            encoding: what has `at(coords_yx, extent_hw, valid=)`; it is given the true grids.
        """
        points, extents = self.patch_coord.float(), self.spatial_shapes.float()
        return encoding.at(points, extents, valid=self.patch_valid)

    def for_timm(self) -> dict[str, Tensor]:
        """Return the dict input of timm's NaFlexVit: patches, patch_coord, patch_valid.

        Raises:
            PositionError: if tokens were dropped: NaFlexVit reads the grid off the largest coordinate and adds position
                codes in order of the patches, so both would be wrong without a word.
        """
        self._check_whole("timm's NaFlexVit")
        return {
            "patches": self.patches,
            "patch_coord": self.patch_coord,
            "patch_valid": self.patch_valid,
        }

    def for_transformers(self) -> dict[str, Tensor]:
        """Return the input of transformers' Siglip2: pixel_values, pixel_attention_mask (int32), spatial_shapes.

        Raises:
            PositionError: if tokens were dropped: Siglip2 adds position codes in order of the patches.
        """
        self._check_whole("transformers' Siglip2")
        return {
            "pixel_values": self.patches.flatten(2),
            "pixel_attention_mask": self.patch_valid.to(torch.int32),
            "spatial_shapes": self.spatial_shapes,
        }

    def _check_whole(self, reader: str) -> None:
        partial = self.patch_valid.sum(-1) != self.spatial_shapes.prod(-1)
        if bool(partial.any()):
            image = int(partial.nonzero()[0])
            raise PositionError(
                f"image {image} holds {int(self.patch_valid[image].sum())} patches of grid {self.grids[image].shape}; "
                f"{reader} requires all of them, in order. Drop tokens after its embedding, or embed here with codes."
            )


def naflex_batch(
    patches: Tensor | Sequence[Tensor],
    grids: Sequence[Grid],
    *,
    length: int | None = None,
    keep: Tensor | None = None,
) -> NaflexBatch:
    """Return a padded batch, one image a row, every patch with its (y, x).

    Args:
        patches: flat or unflattened patches of every whole grid, row-major: `[size, ...]` an image, or all of them in
            one tensor `[sum of sizes, ...]`.
        grids: the grid of every image, without time.
        length: patches of a row, padded to; the longest image when None. Nothing is ever cut off.
        keep: `[sum of sizes]` bool from `keep_tokens`.

    Raises:
        PositionError: if a count does not match its grid, a grid has frames, or an image is longer than `length`.

    Example:
        >>> batch = naflex_batch([torch.ones(6, 4), torch.ones(2, 4)], [Grid(2, 3), Grid(1, 2)])
        >>> batch.patch_valid.int().tolist(), batch.spatial_shapes.tolist()
        ([[1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0]], [[2, 3], [1, 2]])

    Reference:
        timm data/naflex_dataset.py NaFlexCollator, which cuts longer images silently; transformers
        image_processing_siglip2.py; SigLIP 2 (arXiv 2502.14786).
    """
    grids = checked_grids(grids)
    for number, grid in enumerate(grids):
        if grid.frames != 1:
            raise PositionError(
                f"grids[{number}] has {grid.frames} frames; one is required. Pass every frame as an image."
            )
    if length is not None and not is_whole(length):
        raise PositionError(
            f"length is {length!r}; a whole number of patches, at least 1, is required."
        )
    cells, kept_counts = kept_cells(grids, keep)
    counts = kept_counts.tolist()
    longest = max(counts, default=1)
    if length is not None and longest > length:
        raise PositionError(
            f"length is {length} and image {counts.index(longest)} has {longest} patches; all of them must fit. Resize "
            "the image, drop tokens of it with keep=, or raise length."
        )
    parts = image_tokens(patches, grids)
    if keep is not None:
        kept = flat_tokens(patches, grids)
        parts = (
            list(kept[torch.as_tensor(keep, device=kept.device)].split(counts)) if counts else parts
        )
    padded = _padded(parts, patches, length or longest)
    coords, valid = _places(grids, kept_counts, cells, length or longest)
    return NaflexBatch(padded, coords.to(padded.device), valid.to(padded.device), grids)


def _padded(parts: Sequence[Tensor], patches: Tensor | Sequence[Tensor], length: int) -> Tensor:
    """Return `[b, length, ...]`: every byte is written once, patches and padding alike."""
    like = patches if isinstance(patches, Tensor) else parts[0]
    zero = like.new_zeros(()).expand(length, *like.shape[1:])  # padding that takes no memory
    rows = [piece for part in parts for piece in (part, zero[len(part) :])]
    line = torch.cat(rows) if rows else zero[:0]
    return line.view(len(parts), length, *like.shape[1:])


def _places(
    grids: Sequence[Grid], counts: Tensor, cells: Tensor | None, length: int
) -> tuple[Tensor, Tensor]:
    """Return `[b, length, 2]` int64 (y, x) of every patch, zeros in padding, and `[b, length]` which are no padding.

    Args:
        grids: of the images.
        counts: `[b]` patches that each image keeps.
        cells: `[kept]` which cells they are, row-major; None for all.
        length: of a row.
    """
    place = torch.arange(length)
    valid = place < counts.unsqueeze(-1)
    if cells is None:
        cell = place.where(valid, 0)
    else:
        cell = torch.zeros(valid.shape, dtype=torch.int64)
        cell[valid] = cells  # images, and the cells of each, stand in one order here and there
    width = grid_sides(grids)[:, 2:]
    row = cell // width
    return torch.stack([row, cell - row * width], dim=-1), valid
