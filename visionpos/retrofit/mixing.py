"""Doors add and conditional at a model's seams: vectors added to patches, tokens mixed after blocks.

One word of the table says how tokens lie: `nlc` rows, `nhwc` or `nchw` maps, an item of a tuple or list.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from visionpos.errors import PositionError
from visionpos.geometry import Grid, coordinates
from visionpos.retrofit.hooks import grid_seen
from visionpos.retrofit.lattice import Sites, stated_sides
from visionpos.retrofit.paths import counted
from visionpos.retrofit.seams import find, sides_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from visionpos.retrofit.attachment import Attachment
    from visionpos.retrofit.lattice import Reader


class AddHook:
    """After a patch embedding: adds what an additive encoding gives."""

    def __init__(
        self, owner: Attachment, group: int, layout: str, prefix: int, sides: Any, name: str
    ) -> None:
        self.owner, self.group, self.layout, self.prefix = owner, group, layout, prefix
        # A module that states the sides, where the output does not.
        self.sides, self.name = sides, name

    def __call__(
        self,
        module: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> Any:
        """Return the patch tokens with the encoding added, or None to leave them."""
        if self.owner.idle:
            return None
        if self.layout in ("nchw", "nhwc"):
            return _on_map(output, self.layout, self._added)
        if self.sides is not None:
            stated = stated_sides(self.sides, self.name) if self.name else sides_of(self.sides)
            assert stated is not None  # noqa: S101 (rows name modules that state their sides)
            return self._added(Grid(*stated), output)
        grid = grid_seen(module, args, kwargs, output)
        if not isinstance(output, tuple):
            return self._added(grid, output)
        tokens, front = output[0], output[0][:, : self.prefix]
        moved = self._added(grid, tokens[:, self.prefix :])
        return torch.cat([front, moved], dim=1) if self.prefix else moved, *output[1:]

    def _added(self, grid: Grid, tokens: Tensor) -> Tensor:
        if self.group:
            return self.owner.added(grid, tokens, self.group)
        return self.owner.added(grid, tokens)


class MixHook:
    """After a block: mixes its tokens by a conditional encoding.

    Args:
        within: the BlockHooks of a block whose grid is the call's, or None.
        reader: tells the grid of tokens in rows, or None.
        holder: the attention that the reader reads.
        item: which item of the block's output, None for the output itself.
        layout: the block's word.
        prefix: tokens in front of the grid.
        slot: which of the encoding's convolutions.
    """

    def __init__(  # noqa: PLR0913 (one argument a fact of the place)
        self,
        owner: Attachment,
        group: int,
        slot: int,
        *,
        layout: str,
        item: int | None = None,
        prefix: int = 0,
        within: Any = None,
        reader: Reader | None = None,
        holder: Any = None,
    ) -> None:
        self.owner, self.group, self.slot = owner, group, slot
        self.layout, self.item, self.prefix = layout, item, prefix
        self.within, self.reader, self.holder = within, reader, holder

    def __call__(
        self,
        module: Any,  # noqa: ARG002 (torch's signature)
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> Any:
        """Return the block's output with its tokens mixed, or None to leave it."""
        if self.owner.idle:
            return None
        if self.item is None or not isinstance(output, (tuple, list)):
            return self._mixed(output, args, kwargs, output)
        items = list(output)
        items[self.item] = self._mixed(items[self.item], args, kwargs, output)
        return type(output)(items)

    def _mixed(
        self, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Tensor:
        if x.ndim == 4:
            return _on_map(x, self.layout, self._cells).contiguous()
        sites = self._sites(x, args, kwargs, output)
        if sites.unroll is None:
            return self._rows(x, sites.grid)
        place, grid = _raster(sites, x.device)
        return self._rows(x[:, place.argsort()], grid)[:, place]

    def _sites(
        self, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Sites:
        """Return where tokens in rows stand."""
        if self.within is not None:
            call = self.within.handed()
            if call.kept is not None:
                raise PositionError(
                    "patch dropout has left holes in the map; a conditional encoding needs all of it. Set "
                    "patch_drop_rate=0, or mask tokens instead."
                )
            return Sites(call.grid)
        if self.layout == "nlc_hw":
            return Sites(Grid(int(args[1]), int(args[2])))
        if self.layout == "nlc_size":
            return Sites(Grid(*(kwargs["size"] if "size" in kwargs else args[1])))
        if self.layout == "tuple0_nlc":
            return Sites(Grid(*(int(side) for side in output[1])))
        assert self.reader is not None  # noqa: S101 (attach gives one to every other layout)
        return self.reader.sites(self.holder, (x,), {})

    def _cells(self, grid: Grid, x: Tensor) -> Tensor:
        """Return `[b, y, x, d]` mixed."""
        return self._rows(x.flatten(1, 2), grid).reshape(x.shape)

    def _rows(self, x: Tensor, grid: Grid) -> Tensor:
        """Return `[b, prefix + n, d]` mixed, as strongly as the attachment is."""
        encoding = self.owner.encodings[self.group]
        front = x.shape[1] - grid.size - encoding.dims.prefix
        rows = x[:, front:] if front > 0 else x
        moved = encoding(rows, grid, slot=self.slot)
        strength = self.owner.present
        if not isinstance(strength, float) or strength != 1.0:
            moved = rows + strength * (moved - rows)
        moved = moved.to(x.dtype)
        return torch.cat([x[:, :front], moved], dim=1) if front > 0 else moved


def _on_map(x: Tensor, layout: str, change: Callable[[Grid, Tensor], Tensor]) -> Tensor:
    """Return a map with its cells changed: `change` gets its grid and `[b, y, x, d]`.

    Args:
        x: `[b, y, x, d]` where the layout ends with "nhwc", else `[b, d, y, x]`.
        layout: the block's word.
        change: what becomes of the cells.
    """
    last = layout.endswith("nhwc")
    cells = x if last else x.movedim(1, -1)
    moved = change(Grid(*counted(cells.shape[1:3])), cells)
    return moved if last else moved.movedim(-1, 1)


def _raster(sites: Sites, device: torch.device) -> tuple[Tensor, Grid]:
    """Return (row-major place of every token, grid) of tokens in a model's own order, after pooling."""
    assert sites.unroll is not None  # noqa: S101 (asked for unrolled tokens only)
    cells = sites.queries(coordinates(sites.grid, device=device))
    step = round((sites.grid.size / sites.unroll[1]) ** 0.5)
    grid = Grid(sites.grid.height // step, sites.grid.width // step)
    rows = torch.div(cells, step, rounding_mode="floor").long()
    return rows[:, 0] * grid.width + rows[:, 1], grid


def width_of(module: nn.Module) -> int:
    """Return the channels that a module hands out: those of its last layer that has some.

    Raises:
        PositionError: if no layer tells.
    """
    for part in reversed(list(module.modules())):
        for name in ("out_features", "out_channels", "num_features"):
            if isinstance(getattr(part, name, None), int):
                return int(getattr(part, name))
        shape = getattr(part, "normalized_shape", None)
        if shape:
            return int(shape[-1])
    raise PositionError(
        f"module {type(module).__name__} does not tell its width; a layer with channels is required. Use another door."
    )


def sides_at(model: nn.Module, path: str) -> tuple[Any, str]:
    """Return (module, attribute) that state the sides at an attribute path."""
    stem, _, name = path.rpartition(".")
    value = find(model, path)
    return (value, "") if hasattr(value, "forward") else (find(model, stem), name)
