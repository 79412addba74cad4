"""Detectors on built encodings: each is fed by what the encoding gives, never by its name.

All run on a copy in eval mode, in float32.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from visionpos.audit.detectors import encoding_states
from visionpos.audit.detectors.finding import UnfitError
from visionpos.audit.detectors.served import UNEQUAL, copied, first_served
from visionpos.audit.detectors.shares import (
    axis_visibility,
    bias_collapse,
    is_linear,
    section_shares,
    unused_buckets,
)
from visionpos.audit.detectors.tables import axis_order, class_token_offset, missing_antialias
from visionpos.audit.detectors.turning import (
    PLACES,
    REACH,
    Turn,
    Wanted,
    pairing_mismatch,
    precision,
)
from visionpos.audit.result import Found
from visionpos.encodings import Additive, Biasing, Rotary, Turning
from visionpos.geometry.grid import Grid
from visionpos.geometry.recipes import recipe_of

_FASTEST = 3.2  # radians a unit; faster ladders belong to coordinates of a short span
_FAR = 32768
_PLAIN = 1e30  # entries beyond hide keys


def _rotary(encoding: Any) -> Rotary:
    if not isinstance(encoding, Rotary):
        raise UnfitError("it turns no pairs of channels")
    if encoding.pairing == "adjacent_tiled":
        raise UnfitError("its pairing, adjacent_tiled, is declared to be no rotation")
    return encoding


def turn_of(encoding: Any, layer: int = 0) -> Turn:
    """Return the rotation of one head of an encoding as a function of vectors and places."""

    def turned(x: Tensor, places: Tensor) -> Tensor:
        if isinstance(encoding, Rotary):
            turns = encoding.angles(places, layer)
            found = encoding.rotation(turns if turns.ndim == 2 else turns[0])
            return found.apply(x[None, None])[0, 0]
        heads = x.expand(1, encoding.dims.num_heads, *x.shape)
        moved: Tensor = encoding.turns(places, layer).apply(heads)
        return moved[0, 0]

    return turned


def _freqs_of(encoding: Rotary) -> Tensor:
    """Return `[axes, pairs]` of the first layer and head."""
    freqs = encoding.freqs(0).detach()
    return freqs[0] if freqs.ndim == 3 else freqs


def pairing_of(encoding: Any, seed: int) -> Found:
    """Look at the pairing of a rotation."""
    own = copied(encoding)
    with torch.no_grad():
        if isinstance(own, Turning):
            # Learned planes need not commute, so scores may depend on more than differences.
            points = own.points(first_served(own, UNEQUAL))
            return pairing_mismatch(
                turn_of(own),
                own.dims.channels,
                axes=points.shape[-1],
                relative=False,
                reach=float(points.abs().max()),
                seed=seed,
            )
        rope = _rotary(own)
        freqs = _freqs_of(rope)
        return pairing_mismatch(
            turn_of(rope),
            rope.dims.channels,
            wanted=Wanted(pairing=rope.pairing, freqs=freqs),
            axes=freqs.shape[-2],
            reach=REACH / max(1.0, float(freqs.abs().max())),
            seed=seed,
        )


def precision_of(encoding: Any, seed: int) -> Found:  # noqa: ARG001 (nothing is drawn)
    """Look at a copy that was cast to bfloat16, as whole models are."""
    rope = _rotary(copied(encoding))
    cast = copy.deepcopy(rope).to(torch.bfloat16)
    # Learned frequencies are rounded with all weights; fixed ones must not be.
    freqs = _freqs_of(cast if any(True for _ in rope.parameters()) else rope)
    grid = first_served(rope, UNEQUAL)
    index = rope.coords.unit == "index" and float(freqs.abs().max()) < _FASTEST
    places = PLACES if index else (1,)
    with torch.no_grad():
        return precision(
            turn_of(cast),
            rope.dims.channels,
            Wanted(pairing=rope.pairing, freqs=freqs),
            places=places,
            positions=cast.points(grid),
        )


def offset_of(encoding: Any, seed: int) -> Found:  # noqa: ARG001
    """Look at the rows of a learned table with a grid of its own."""
    table, sides = getattr(encoding, "table", None), getattr(encoding.spec, "grid_hw", None)
    rows = getattr(encoding.spec, "prefix_rows", None)
    if not isinstance(table, Tensor) or sides is None or rows is None:
        raise UnfitError("it has no table with one row a cell")
    return class_token_offset(table, Grid(*sides), prefix=rows)


def order_of(encoding: Any, seed: int) -> Found:  # noqa: ARG001
    """Look at the code of a grid with unequal sides, or at the angles of a rotation on it."""
    own = copied(encoding)
    with torch.no_grad():
        if isinstance(own, Additive):
            grid = first_served(own, UNEQUAL)
            return axis_order(own(grid)[: grid.height * grid.width], Grid(grid.height, grid.width))
        if not isinstance(own, Rotary):
            raise UnfitError("it has no channels that belong to axes")
        grid = first_served(own, UNEQUAL)
        turns = own.angles(own.points(grid))
        turns = turns if turns.ndim == 2 else turns[0]
        return axis_order(turns[: grid.height * grid.width], Grid(grid.height, grid.width))


def sections_of(encoding: Any, seed: int) -> Found:  # noqa: ARG001
    """Count the pairs that each axis of a sectioned ladder drives."""
    asked = getattr(encoding.spec, "sections", None)
    if asked is None or not isinstance(encoding, Rotary):
        raise UnfitError("it has no sections")
    if getattr(encoding.spec, "clamp", False):
        raise UnfitError("its sections are declared to be clamped to the pairs there are")
    own = copied(encoding)
    axes, pairs = own.freqs().shape[-2:]
    with torch.no_grad():
        return section_shares(asked, int(pairs), own.angles, axes=int(axes))


def antialias_of(encoding: Any, seed: int) -> Found:  # noqa: ARG001
    """Put a checkerboard into a table of the same spec, and ask for a smaller grid."""
    spec = encoding.spec
    resized = isinstance(encoding, Additive) and hasattr(spec, "grid_hw")
    if not resized or not isinstance(getattr(spec, "recipe", None), str):
        raise UnfitError("it resizes no table by a recipe")

    def resize(table: Tensor, sides: tuple[int, int], wanted: tuple[int, int]) -> Tensor:
        own = type(encoding)(replace(spec, grid_hw=sides, prefix_rows=0), encoding.dims)
        with torch.no_grad():
            own.table.copy_(table.expand(-1, own.table.shape[-1]))
            code: Tensor = own(Grid(*wanted))
        return code[:, :1]

    recipe = recipe_of(spec.recipe)
    return missing_antialias(resize, declared=recipe.antialias)


def collapse_of(encoding: Any, seed: int) -> Found:  # noqa: ARG001
    """Look at the bias of the last keys of a long line, rounded to bfloat16."""
    if not isinstance(encoding, Biasing):
        raise UnfitError("it adds no bias")
    own = copied(encoding)
    axes = 2
    keys = torch.zeros(64, axes)
    keys[:, -1] = torch.arange(_FAR - 64, _FAR)
    with torch.no_grad():
        bias = own.between(keys[-1:], keys)[:, 0]  # [heads, 64]
    bias = bias[(bias.abs() < _PLAIN).all(-1)]
    if not bias.shape[0] or not is_linear(bias):
        raise UnfitError("its bias is not linear in distance: far keys may share one")
    return bias_collapse(bias.to(torch.bfloat16))


def visibility_of(encoding: Any, seed: int) -> Found:  # noqa: ARG001
    """Look at the radians that each axis turns over 14 x 14 cells."""
    if not isinstance(encoding, Rotary):
        raise UnfitError("it turns no channels")
    own = copied(encoding)
    grid = first_served(own, (Grid(14, 14), Grid(14, 14, frames=2)))
    with torch.no_grad():
        points = own.points(grid)
        span = (points.amax(0) - points.amin(0)).tolist()
        freqs = own.freqs(0)
        if freqs.shape[-2] != len(span):
            raise UnfitError("it moves cells to other places before they turn")
        return axis_visibility(freqs, span)


def buckets_of(encoding: Any, seed: int) -> Found:  # noqa: ARG001
    """Look up differences of all sizes, axis by axis."""
    look, reach = getattr(encoding, "buckets", None), getattr(encoding.spec, "max_distance", None)
    counts = getattr(encoding.spec, "buckets", None)
    if look is None or reach is None or counts is None:
        raise UnfitError("it has no buckets")
    far = 2 * max(reach)
    steps = torch.arange(-far, far + 1).unsqueeze(-1).expand(-1, len(counts))
    hit = look(steps)
    # The published scheme leaves row count / 2 unused.
    said = [
        unused_buckets(hit[:, axis], count, known=(count // 2,))
        for axis, count in enumerate(counts)
    ]
    return max(said, key=lambda one: (one.alarm, one.value or 0.0))


LOOKS: dict[str, Callable[[Any, int], Found]] = {
    "pairing_mismatch": pairing_of,
    "precision": precision_of,
    "tile_restart": encoding_states.tiles_of,
    "class_token_offset": offset_of,
    "axis_order": order_of,
    "section_shares": sections_of,
    "missing_antialias": antialias_of,
    "stale_cache": encoding_states.cache_of,
    "bias_collapse": collapse_of,
    "dead_scheme": encoding_states.dead_of,
    "axis_visibility": visibility_of,
    "unused_buckets": buckets_of,
    "masked_leak": encoding_states.leak_of,
    "frozen_copy": encoding_states.copy_of,
    "shared_state": encoding_states.shared_of,
}
