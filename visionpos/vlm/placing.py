"""Placing: where the cells of units stand, by the one formula of a rule, and where text goes on behind them."""

from __future__ import annotations

import numpy as np
import torch

from visionpos.kernels.ids import LinePlan
from visionpos.vlm.clocks import Array
from visionpos.vlm.increments import index_steps
from visionpos.vlm.line_ids import line_ids, line_plan, stepped, write_rings
from visionpos.vlm.lines import pieces_of
from visionpos.vlm.rings import ring
from visionpos.vlm.rules import Delta, Rule
from visionpos.vlm.units import Units
from visionpos.vlm.woven import Woven


def placed(
    units: Units, rule: Rule, *, padded: int, device: torch.device
) -> tuple[Array | LinePlan, Array, Array]:
    """Return ids `[axes, tokens of all rows]`, and next position and delta, `[b]` each.

    Ids for another device than the CPU are a plan of lines, except where cells lie on circles or sound is woven in.
    """
    shape, rows, sizes = units.shape, units.row_lengths, units.sizes
    frames, height, width = shape.T
    dtype = rule.dtype
    tau = rule.frame_offsets(frames, np.maximum(height, width), units.clocks)
    last_tau = tau if len(tau) == len(frames) else tau[frames.cumsum() - 1]
    step = index_steps(units, rule) if "index" in rule.axes else None
    reach = rule.reach(shape, last_tau, sizes if step is None else stepped(sizes, *step))
    advance = rule.advance(shape, last_tau, reach).astype(dtype, copy=False)
    rings = None
    if rule.circle is not None:
        rings = [ring(rule.circle, *side) for side in shape[:, 1:].tolist()]
        advance = np.array([one.max() for one in rings]) + last_tau + 1
    for unit, woven in units.woven.items():
        if woven.ends_in_audio:
            advance[unit] = len(woven.audio)
    # A unit moves what follows it by advance - tokens from its place in the row: one cumulative sum gives every start.
    spans, first = units.spans if units.woven else sizes, units.first_of_row
    move = advance - spans
    before: Array = np.zeros_like(move)
    move[:-1].cumsum(out=before[1:])
    before = before - before[first]
    start = before - (rows.cumsum() - rows)[units.row] + units.start
    lines = pieces_of(units, spans, before + move), start, tau, rule, step
    ids: Array | LinePlan
    tops: tuple[Array, Array] = rows, rows
    if not _is_host(device) and rings is None and not units.woven:
        ids, tops = line_plan(*lines)
    else:
        ids = line_ids(*lines)
        if rings is not None:
            write_rings(ids, units, start, tau, rings)
        for unit, woven in units.woven.items():
            stands = start[unit], advance[unit]
            _write_woven(ids, units, unit, woven, stands, tau, rule)
    following = rows.astype(dtype)
    np.add.at(following, units.row, move)
    if rule.origin == "zero" or dtype is not np.int64 or units.woven:
        seen = _highest(*tops, rows, following) if isinstance(ids, LinePlan) else ids
        return ids, following, delta_of(seen, following, rows, rule.delta, padded)
    # Text never falls, so what stands highest is the last token or a cell of some unit.
    highest = following.copy()
    np.maximum.at(highest, units.row, start + reach + 1)
    return ids, following, delta_of(highest, following, rows, rule.delta, padded)


def _is_host(device: torch.device) -> bool:
    """Return whether ids are to be spread by numpy."""
    return device.type == "cpu"


def _highest(lengths: Array, tops: Array, rows: Array, following: Array) -> Array:
    """Return `[b]` one past the largest id of each row, from lengths and largest ids of lines."""
    ends = lengths.cumsum()
    filled, highest = lengths > 0, np.zeros_like(following)
    row = rows.cumsum().searchsorted((ends - lengths)[filled], side="right")
    np.maximum.at(highest, row, tops[filled] + 1)
    return highest


def _write_woven(
    ids: Array,
    units: Units,
    unit: int,
    woven: Woven,
    stands: tuple[float, float],
    tau: Array,
    rule: Rule,
) -> None:
    """Write the ids of a clip with sound: its cells as if they stood side by side, then what stands between them.

    Args:
        ids: `[axes, tokens]`, written in place.
        units: grids and rows.
        unit: which of them.
        woven: its tokens.
        stands: position s of the clip, and by how much it moves what follows.
        tau: `[sum of frames]` time offset of every frame of every unit.
        rule: the position rule.
    """
    position, advance = stands
    alone = units.alone(unit)
    frames = np.cumsum(units.shape[:, 0])
    mine = tau[frames[unit] - units.shape[unit, 0] : frames[unit]]
    start = np.array([position], dtype=ids.dtype)
    pieces = pieces_of(alone, alone.sizes, np.zeros_like(start))
    inside = line_ids(pieces, start, mine, rule, None)  # a rule that weaves counts no index
    ids[:, units.start[unit] + woven.cells] = inside
    woven.write(ids, units.start[unit], position, position + advance)


def delta_of(highest: Array, following: Array, lengths: Array, delta: Delta, padded: int) -> Array:
    """Return `[b]` what decoding adds to a token count.

    Args:
        highest: `[b]` one past the largest id of each row; or the ids themselves, `[axes, tokens]`.
        following: `[b]` next position.
        lengths: `[b]` tokens of each row.
        delta: the convention.
        padded: length of the padded row.
    """
    if delta.from_ == "none":
        return np.zeros_like(following)
    base = following
    if delta.from_ == "max" and highest.ndim == 2:
        base, filled = np.zeros_like(following), lengths > 0
        if filled.any():
            row_start = (np.cumsum(lengths) - lengths)[filled]
            base[filled] = np.maximum.reduceat(highest, row_start, axis=1).max(0) + 1
    elif delta.from_ == "max":
        base = highest
    taken: Array = np.full_like(lengths, padded) if delta.minus == "padded" else lengths
    return base - taken
