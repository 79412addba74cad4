"""Position modules whose grid is that of the call: timm's, with their tables and networks evaluated for it.

`dynamic` swaps them in. Their parameters, names and home sizes are those of the class below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from timm.layers.pos_embed_rel import (
    RelPosBias,
    RelPosMlp,
    gen_relative_log_coords,
)
from timm.models import beit, hiera, levit
from torch import nn

from visionpos.errors import PositionError
from visionpos.retrofit.indices import absolute_differences, window_index
from visionpos.retrofit.layouts import moved_table
from visionpos.retrofit.passes import graph_task
from visionpos.retrofit.paths import divided, sides_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from visionpos.retrofit.passes import Recall
    from visionpos.retrofit.paths import Sides
    from visionpos.retrofit.seam_rows import TableLayout


class OfCall:
    """A position module whose grid is that of the call."""

    visionpos_relay: Recall
    visionpos_steps: tuple[Sides, Sides]
    visionpos_recipe: str

    def call_sides(self) -> Sides:
        """Return (rows, columns) of the map that this module sees in the present call."""
        relay = self.visionpos_relay
        image = relay.get() if graph_task() == -1 else relay.recalled()
        if image is None and graph_task() != -1:
            raise PositionError(
                f"a {type(self).__name__} is recomputed in a backward pass on a copy of its input, so its image size "
                "is unknown. Recompute on the input itself: checkpoint(block, x, use_reentrant=False)."
            )
        if image is None:
            raise PositionError(
                "a position module ran before the module that takes the image; its grid is not known. Call the whole "
                "model, or its forward_features."
            )
        return divided(image, *self.visionpos_steps)

    def of_call(self, table: Tensor, layout: TableLayout, home: Sides, extra: int = 0) -> Tensor:
        """Return a table of this module evaluated for the present call.

        Args:
            table: parameter in `layout`.
            layout: order of its axes.
            home: (rows, columns) that it belongs to.
            extra: trailing rows without a cell.
        """
        return moved_table(
            table,
            layout=layout,
            source=home,
            target=self.call_sides(),
            recipe=self.visionpos_recipe,
            extra=extra,
        )


def _gathered(table: Tensor, sides: Sides, *, cls: bool) -> Tensor:
    """Return `[1, heads, n, n]` of a table `[(2h - 1)(2w - 1) + extra, heads]`."""
    index = window_index(sides, table.device, cls=cls)
    return table[index].permute(2, 0, 1).contiguous().unsqueeze(0)


class DynamicBeitAttention(OfCall, beit.Attention):  # type: ignore[misc]
    """BEiT's attention with its table evaluated for the call."""

    def _get_rel_pos_bias(self) -> Tensor:
        weight = self.relative_position_bias_table
        table = self.of_call(weight, "offsets_heads", self.window_size, extra=3)
        return _gathered(table, self.call_sides(), cls=True)


class DynamicRelPosBias(OfCall, RelPosBias):  # type: ignore[misc]
    """A table of differences over the whole map, evaluated for the call."""

    def get_bias(self) -> Tensor:
        """Return `[1, heads, n, n]`."""
        weight, prefix = self.relative_position_bias_table, int(self.prefix_tokens)
        table = self.of_call(weight, "offsets_heads", self.window_size, extra=3 * prefix)
        return _gathered(table, self.call_sides(), cls=prefix > 0)


class DynamicRelPosMlp(OfCall, RelPosMlp):  # type: ignore[misc]
    """A network of log coordinates over the whole map, evaluated for the call; its unit stays the trained window."""

    def get_bias(self) -> Tensor:
        """Return `[1, heads, n, n]`, zero at prefix tokens."""
        sides = self.call_sides()
        recorded = getattr(self, "pretrained_window_size", (0, 0))
        unit = recorded if min(recorded) > 0 else self.window_size
        mode = "swin" if self.mode == "swin" else "cr"
        coords = gen_relative_log_coords(sides, unit, mode=mode).to(next(self.mlp.parameters()))
        table = self.bias_act(self.mlp(coords).flatten(0, 1))
        bias = _gathered(table, sides, cls=False)
        bias = bias if self.bias_gain is None else self.bias_gain * bias
        prefix = int(self.prefix_tokens)
        return nn.functional.pad(bias, [prefix, 0, prefix, 0]) if prefix else bias


class _Offsets(OfCall):
    """LeViT's numbers a head and absolute difference, evaluated for the call."""

    attention_biases: nn.Parameter
    resolution: Sides

    def get_attention_biases(self, device: torch.device) -> Tensor:
        """Return `[heads, queries, keys]`."""
        table = self.of_call(self.attention_biases, "heads_offsets", self.resolution)
        stride = int(getattr(self, "stride", 1))
        return table[:, absolute_differences(self.call_sides(), stride, device)]


class DynamicLevitAttention(_Offsets, levit.Attention):  # type: ignore[misc]
    """LeViT's attention."""


class DynamicLevitDownsample(_Offsets, levit.AttentionDownsample):  # type: ignore[misc]
    """LeViT's attention between two stages."""


class DynamicSubsample(OfCall, levit.Downsample):  # type: ignore[misc]
    """The queries that LeViT picks between two stages."""

    def forward(self, x: Tensor) -> Tensor:
        """Return every stride-th token of the map."""
        x = x.unflatten(1, self.call_sides())
        if self.pool is not None:
            x = self.pool(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        else:
            x = x[:, :: self.stride, :: self.stride]
        return x.flatten(1, 2)


class DynamicUnroll(OfCall, hiera.Unroll):  # type: ignore[misc]
    """Hiera's permutation on the map of the call."""

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens in the order that pooling wants."""
        self_size = list(self.call_sides())
        batch, cells = x.shape[0], self_size
        x = x.unflatten(1, cells)
        for strides in self.schedule:
            cells = [side // step for side, step in zip(cells, strides, strict=True)]
            x = x.unflatten(2, (cells[1], strides[1])).unflatten(1, (cells[0], strides[0]))
            x = x.permute(0, 2, 4, 1, 3, 5).flatten(0, 2)
        return x.reshape(batch, -1, x.shape[-1])


class DynamicReroll(OfCall, hiera.Reroll):  # type: ignore[misc]
    """Hiera's way back, on the map of the call."""

    @property
    def schedule(self) -> dict[int, Any]:
        """Return what every block has to undo, and its map."""
        home: dict[int, Any] = self.__dict__["schedule"]
        if self.visionpos_relay.get() is None:
            return home
        first, now = home[min(home)][1], self.call_sides()
        return {
            block: (
                steps,
                [side * new // old for side, new, old in zip(size, now, first, strict=True)],
            )
            for block, (steps, size) in home.items()
        }

    @schedule.setter
    def schedule(self, value: dict[int, Any]) -> None:
        self.__dict__["schedule"] = value


class DynamicHiera(OfCall, hiera.Hiera):  # type: ignore[misc]
    """Hiera with its absolute table evaluated for the call."""

    def _pos_embed(self, x: Tensor) -> Tensor:
        sides = self.call_sides()
        if self.pos_embed_win is None:
            home = sides_of(self.tokens_spatial_shape) or sides
            moved: Tensor = x + self.of_call(self.pos_embed, "nlc", home)
            return moved
        tiles = [side // unit for side, unit in zip(sides, self.mask_unit_size, strict=True)]
        window = self.pos_embed_win.tile(tiles)
        table = self.of_call(self.pos_embed, "nchw", tuple(self.pos_embed.shape[-2:]))
        added: Tensor = x + (table + window).flatten(2).mT
        return added
