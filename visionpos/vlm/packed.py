"""Packed: ragged images in rows of one token budget, and every view of them that a model needs.

Made by `pack_images`. Tokens of images enter and leave in arrival order, as one tensor `[tokens, ...]` or one a image;
inside they lie in rows `[rows, budget, ...]`. Nothing is cached: the caller holds what it asks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from visionpos.errors import PositionError
from visionpos.geometry.coords import CoordSpec, coordinates
from visionpos.geometry.fields import check_choice
from visionpos.geometry.grid import Grid, is_whole
from visionpos.vlm.documents import cumulative_lengths, document_blocks, document_mask
from visionpos.vlm.runs import flat_tokens, grid_sides, run

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


class Located(Protocol):
    """An additive encoding that gives the code of any cells of lattices of any sides."""

    def at(self, coords_yx: Tensor, extent_hw: Tensor, *, valid: Tensor) -> Tensor:
        """Return `[..., n, d]`, zeros where not valid."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Images packed into rows: one document an image, its prefix tokens first, then its patches, row-major.

    Args:
        grids: the whole grid of every image, also of those that dropped tokens.
        prefix: tokens before the patches of every image, without position (a class token, registers).
        rows: `[images]` int64, the row of each image.
        starts: `[images]` int64, its first place there.
        counts: `[images]` int64, its patches, without those dropped.
        documents: `[rows, budget]` int64, the image of every place, -1 for padding.
        cells: `[rows, budget]` int64, the cell of its grid, y * width + x; -1 for padding and prefix tokens.
    """

    grids: tuple[Grid, ...]
    prefix: int
    rows: Tensor
    starts: Tensor
    counts: Tensor
    documents: Tensor
    cells: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """Return the number of rows and the budget, in tokens."""
        return (self.documents.shape[0], self.documents.shape[1])

    @property
    def valid(self) -> Tensor:
        """Return `[rows, budget]` bool, False for padding."""
        return self.documents >= 0

    @property
    def is_patch(self) -> Tensor:
        """Return `[rows, budget]` bool, True for patches: neither padding nor prefix tokens."""
        return self.cells >= 0

    @property
    def cu_seqlens(self) -> Tensor:
        """Return `[images + 1]` int32: where documents begin among the tokens of `flatten`, which skips padding."""
        return cumulative_lengths(self.documents[self.valid].unsqueeze(0))[0]

    @property
    def max_seqlen(self) -> int:
        """Return the tokens of the longest document, prefix included; 0 without images."""
        return int((self.counts + self.prefix).max()) if self.grids else 0

    @property
    def slots(self) -> Tensor:
        """Return `[images]` int64: how many images stand before each in its row."""
        order = (self.rows * self.shape[1] + self.starts).argsort()
        ordered = self.rows[order]
        place = torch.arange(len(order), device=order.device)
        return torch.empty_like(order).index_copy(
            0, order, place - torch.searchsorted(ordered, ordered)
        )

    def padded_seqlens(self) -> tuple[Tensor, int]:
        """Return cumulative lengths int32 over all rows x budget places, the tail of a row a piece; and the longest."""
        return cumulative_lengths(self.documents)

    def mask(self) -> Tensor:
        """Return `[rows, 1, budget, budget]` bool for SDPA, True within a document; padding sees padding."""
        return document_mask(self.documents)

    def block_mask(self, block: int = 128) -> BlockMask:
        """Return the same mask for `flex_attention`: see `documents.document_blocks`."""
        return document_blocks(self.documents, block)

    def pool_mask(self, slots: int | None = None) -> Tensor:
        """Return `[rows, 1, slots, budget]` bool: one pooling query a slot sees the patches of the image in it.

        Take the answers `[rows, slots, d]` of the images as `answers[packed.rows, packed.slots]`. A slot without an
        image sees every place, so that it is no NaN; nothing reads it.

        Args:
            slots: queries a row, as `max_images` of `pack_images`; as many as the fullest row needs when None.

        Raises:
            PositionError: if a row holds more images.
        """
        number = self.slots
        needed = int(number.max()) + 1 if self.grids else 0
        if slots is not None and not (is_whole(slots) and slots >= needed):
            raise PositionError(
                f"slots is {slots!r} and a row holds {needed} images; one slot an image is required. Pass max_images= "
                "to pack_images."
            )
        image = number.new_full((self.shape[0], needed if slots is None else slots), -1)
        image[self.rows, number] = torch.arange(len(number), device=number.device)
        seen = (image.unsqueeze(-1) == self.documents.unsqueeze(-2)) & self.is_patch.unsqueeze(-2)
        return (seen | (image < 0).unsqueeze(-1)).unsqueeze(1)

    def coords(self, spec: CoordSpec | None = None) -> Tensor:
        """Return `[rows, budget, axes]` float32: what `coordinates` gives every patch in its own grid.

        Prefix tokens and padding get zeros, where no angle turns.

        Args:
            spec: numbering and extent; plain indices (y, x) when None. Training augmentation is not applied.
        """
        spec = spec or CoordSpec()
        device = self.cells.device
        tables, firsts, rows = [torch.zeros(1, spec.axes, device=device)], {}, 1
        for grid in dict.fromkeys(self.grids):  # one lattice a distinct grid, below a row of zeros
            tables.append(coordinates(grid, spec, device=device))
            firsts[grid], rows = rows, rows + grid.size
        first = torch.tensor([*(firsts[grid] for grid in self.grids), 0], device=device)
        index = (first[self.documents] + self.cells).masked_fill_(self.cells < 0, 0)
        return torch.cat(tables)[index]

    def extents_hw(self) -> Tensor:
        """Return `[rows, budget, 2]` float32: height and width of the grid of every place, 1 for padding."""
        sides = grid_sides(self.grids, self.cells.device)[:, 1:].float()
        sides = torch.cat([sides, sides.new_ones(1, 2)])
        return sides[self.documents]  # -1, padding, reads the last

    def codes(self, encoding: Located) -> Tensor:
        """Return `[rows, budget, d]`: the code of a learned or factorised table at every patch, zeros elsewhere.

        Args:
            encoding: what has `at(coords_yx, extent_hw, valid=)`. It is given the true grid of every image, so dropped
                tokens change no code.
        """
        points = self.coords().unsqueeze(
            -2
        )  # every place is a sample of its own: [rows, budget, 1, 2]
        return encoding.at(points, self.extents_hw(), valid=self.is_patch.unsqueeze(-1)).squeeze(-2)

    def fill(self, tokens: Tensor | Sequence[Tensor]) -> Tensor:
        """Return the tokens of the images in their rows, zeros in padding and prefix places.

        Args:
            tokens: all tokens of every whole grid: `[sum of sizes, ...]` in arrival order, or `[size, ...]` an image.
                Dropped ones are left out here.

        Returns:
            `[rows, budget, ...]`, differentiable.

        Raises:
            PositionError: if tokens do not match the grids.
        """
        flat = flat_tokens(tokens, self.grids)
        if not len(flat):
            return flat.new_zeros(*self.shape, *flat.shape[1:])
        sizes = grid_sides(self.grids, self.cells.device).prod(-1)
        firsts = F.pad(sizes.cumsum(0) - sizes, (0, 1))  # -1, padding, reads the last
        sources = (firsts[self.documents] + self.cells).clamp_(min=0).flatten()
        others = (self.cells < 0).flatten().nonzero().flatten()
        picked = flat.index_select(0, sources).index_fill_(0, others, 0)
        return picked.view(*self.shape, *flat.shape[1:])

    def with_prefix(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Return x with the prefix tokens written in their places.

        Args:
            x: `[rows, budget, ...]`, not changed.
            tokens: `[prefix, ...]` for all images alike, or `[images, prefix, ...]`.

        Raises:
            PositionError: if shapes do not fit.
        """
        self._check_rows(x)
        own = (len(self.grids), self.prefix, *x.shape[2:])
        if tuple(tokens.shape) not in (own, own[1:]):
            raise PositionError(
                f"prefix tokens have shape {tuple(tokens.shape)}; {own[1:]} for all images alike, or {own}, is "
                "required. Pass prefix= to pack_images."
            )
        values = tokens.expand(own).flatten(0, 1).to(x.dtype)
        return x.flatten(0, 1).index_copy(0, self._prefix_places(), values).view_as(x)

    def zeroed(self, x: Tensor) -> Tensor:
        """Return x `[rows, budget, ...]` with zeros in padding, whatever stood there."""
        self._check_rows(x)
        return x.masked_fill(~self.valid.view(*self.shape, *(1,) * (x.ndim - 2)), 0)

    def flatten(self, x: Tensor) -> Tensor:
        """Return `[tokens, ...]`: the rows in one line without padding, as varlen kernels take them (`cu_seqlens`)."""
        self._check_rows(x)
        return x[self.valid]

    def unflatten(self, tokens: Tensor) -> Tensor:
        """Return `[rows, budget, ...]`, the inverse of `flatten`, with zeros in padding."""
        places = self.valid.flatten().nonzero().flatten()
        if tokens.shape[0] != len(places):
            raise PositionError(
                f"tokens have shape {tuple(tokens.shape)} and the rows hold {len(places)} tokens; one entry a token is "
                "required. Pass what flatten gave; for tokens in arrival order, use fill."
            )
        rows, budget = self.shape
        empty = tokens.new_zeros(rows * budget, *tokens.shape[1:])
        return empty.index_copy(0, places, tokens).view(rows, budget, *tokens.shape[1:])

    def unpack(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the patches of every image, `[count, ...]` each, in arrival order; prefix and padding left out."""
        self._check_rows(x)
        return x.flatten(0, 1)[self._places()].split(self.counts.tolist()) if self.grids else ()

    def prefix_of(self, x: Tensor) -> Tensor:
        """Return the prefix tokens of every image, `[images, prefix, ...]`."""
        self._check_rows(x)
        picked = x.flatten(0, 1)[self._prefix_places()]
        return picked.view(len(self.grids), self.prefix, *x.shape[2:])

    def pool(self, x: Tensor, how: Literal["mean", "max"] = "mean") -> Tensor:
        """Return one vector an image, `[images, d]`, over its patches alone; sums are float32 or better.

        Args:
            x: `[rows, budget, d]`.
            how: "mean", or "max".
        """
        self._check_rows(x)
        check_choice("how", how, ("mean", "max"))
        if x.ndim != 3 or not x.is_floating_point():
            raise PositionError(
                f"x is {x.dtype} of shape {tuple(x.shape)}; floats [rows, budget, d] are required. Flatten other axes "
                "into d first."
            )
        patch = self.is_patch
        image, wide = self.documents[patch], torch.promote_types(torch.float32, x.dtype)
        out = torch.zeros(len(self.grids), x.shape[-1], dtype=wide, device=x.device)
        if how == "mean":
            pooled = out.index_add(0, image, x[patch].to(wide)) / self.counts.unsqueeze(-1)
        else:
            where = image.unsqueeze(-1).expand(-1, x.shape[-1])
            pooled = out.scatter_reduce(0, where, x[patch].to(wide), "amax", include_self=False)
        return pooled.to(x.dtype)

    def to(self, device: torch.device | str) -> Packed:
        """Return the same rows with every tensor on a device."""
        tensors = (self.rows, self.starts, self.counts, self.documents, self.cells)
        return Packed(self.grids, self.prefix, *(one.to(device) for one in tensors))

    def _places(self) -> Tensor:
        """Return the place, row * budget + column, of every patch in arrival order."""
        return run(self.rows * self.shape[1] + self.starts + self.prefix, self.counts)

    def _prefix_places(self) -> Tensor:
        first = self.rows * self.shape[1] + self.starts
        return (first.unsqueeze(-1) + torch.arange(self.prefix, device=first.device)).flatten()

    def _check_rows(self, x: Tensor) -> None:
        if tuple(x.shape[:2]) != self.shape:
            raise PositionError(
                f"x has shape {tuple(x.shape)} and the packed rows {self.shape}; [rows, budget, ...] is required. "
                "Bring tokens of images into rows with fill."
            )
