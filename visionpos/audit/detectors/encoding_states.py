"""Detectors on encodings that run them: in a layer, call after call, with weights moved, checkpointed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from visionpos.audit.detectors.effects import dead_scheme, masked_leak
from visionpos.audit.detectors.finding import UnfitError
from visionpos.audit.detectors.packing import tile_swap
from visionpos.audit.detectors.rendered import rendered
from visionpos.audit.detectors.served import (
    ALIKE,
    EVEN,
    UNEQUAL,
    copied,
    first_of,
    first_served,
    is_line,
    taking_part,
    untaught,
)
from visionpos.audit.detectors.states import frozen_copy, shared_state, stale_cache, stale_weights
from visionpos.audit.doors import door_of
from visionpos.audit.layer import Door, Layer, Placed, cells_of
from visionpos.audit.result import Found
from visionpos.encodings import Conditional
from visionpos.geometry.grid import Grid


def tiles_of(encoding: Any, seed: int) -> Found:
    """Swap the contents of the left and the right half of a grid."""
    own, grid, layer, tokens = _layered(encoding, seed)
    door, placed = door_of(own), Placed(cells_of(grid), grid)
    columns = (torch.arange(grid.width) + grid.width // 2) % grid.width
    order = torch.arange(grid.size).unflatten(0, (-1, grid.width))[:, columns].flatten()
    with torch.no_grad():
        return tile_swap(lambda content: layer(door, content, placed).outputs, tokens, order)


def dead_of(encoding: Any, seed: int) -> Found:
    """Take the scheme out of one attention layer of random weights."""
    own, grid, layer, tokens = _layered(encoding, seed)
    placed = Placed(cells_of(grid), grid)
    with torch.no_grad():
        outputs = [layer(door, tokens, placed).outputs for door in (door_of(own), Door())]
    return dead_scheme(*outputs)


def _layered(encoding: Any, seed: int) -> tuple[Any, Grid, Layer, Tensor]:
    """Return a copy, a grid that it serves, a layer of random weights around it, and tokens."""
    own = copied(encoding)
    if untaught(own):
        raise UnfitError("its weights are all zero: nothing is learned yet")
    grid = first_served(own, EVEN)
    draw = torch.Generator().manual_seed(seed)
    dims = own.dims
    layer = Layer(
        embed_dim=dims.embed_dim,
        num_heads=dims.num_heads,
        head_dim=dims.channels,
        generator=draw,
        dtype=torch.float32,
    )
    return own, grid, layer, torch.randn(grid.size, dims.embed_dim, generator=draw)


def cache_of(encoding: Any, seed: int) -> Found:
    """Ask for two grids of as many tokens in turn, and again after weights were edited."""
    own = copied(encoding)
    pair = first_of(lambda grids: [rendered(own, grid, seed) for grid in grids], ALIKE)

    def make() -> Callable[[Any], Tensor]:
        fresh = copy.deepcopy(own)
        return lambda grid: rendered(fresh, grid, seed)

    names = taking_part(own, pair[0], seed)
    distinct = not untaught(own) and not is_line(own, pair[0], seed)
    with torch.no_grad():
        also = (
            [stale_weights(own, lambda one: rendered(one, pair[0], seed), names)] if names else []
        )
        return stale_cache(make, pair, distinct=distinct, also=also)


def leak_of(encoding: Any, seed: int) -> Found:
    """Scramble the content of masked tokens before a convolution."""
    if not isinstance(encoding, Conditional):
        raise UnfitError("it makes no position out of contents")
    own = copied(encoding)
    grid = first_served(own, UNEQUAL)
    dims = own.dims
    draw = torch.Generator().manual_seed(seed)
    count = dims.prefix + grid.size + dims.suffix
    tokens = torch.randn(1, count, dims.embed_dim, generator=draw)
    masked = torch.zeros(1, count, dtype=torch.bool)
    masked[:, dims.prefix + grid.size // 2] = True
    takes = "masked" in signature(own.forward).parameters

    def mix(content: Tensor, hidden: Tensor) -> Tensor:
        flags = hidden[:, dims.prefix : dims.prefix + grid.size]
        mixed: Tensor = own(content, grid, masked=flags) if takes else own(content, grid)
        return mixed

    with torch.no_grad():
        return masked_leak(mix, tokens, masked, seed=seed)


def copy_of(encoding: Any, seed: int) -> Found:
    """Move the weights of the encoding and of its copy in turn."""
    own = copied(encoding)
    grid = first_served(own, UNEQUAL)
    names = taking_part(own, grid, seed)
    return frozen_copy(own, lambda one: rendered(one, grid, seed), names)


def shared_of(encoding: Any, seed: int) -> Found:
    """Let two grids of as many tokens go forward before one backward."""
    own = copied(encoding)
    pair = first_of(lambda grids: [rendered(own, grid, seed) for grid in grids], ALIKE)
    learned = dict(own.requires_grad_().named_parameters())
    weights = [learned[name] for name in taking_part(own, pair[0], seed)]
    if not weights:
        raise UnfitError("no weights take part in what it gives for a grid")

    def forward(grid: Grid, *, checkpointed: bool) -> Tensor:
        if not checkpointed:
            return rendered(own, grid, seed)
        kept: Tensor = checkpoint(rendered, own, grid, seed, use_reentrant=False)
        return kept

    return shared_state(forward, pair, weights)
