"""Position ids: where every token of a prompt stands, as pure functions of the prompt and a rule.

A stream, or token tensors with their grids, enter; ids leave. No model object, no state, no loop over tokens, and no
row that depends on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from visionpos.errors import PositionError
from visionpos.vlm.clocks import Array
from visionpos.vlm.increments import index_steps
from visionpos.vlm.inputs import Grids, checked_tokens, clip_clocks, token_grids
from visionpos.vlm.instants import Seconds
from visionpos.vlm.rings import ring
from visionpos.vlm.rules import Delta, Rule, times
from visionpos.vlm.stream import IMAGE, VIDEO, TokenStream
from visionpos.vlm.token_units import units_of_tokens
from visionpos.vlm.units import Units, ranges, units_of_stream
from visionpos.vlm.views_ids import views_ids


@dataclass(frozen=True, slots=True, eq=False)
class PositionIds:
    """Where tokens stand, and where the next one does.

    Args:
        ids: `[axes, n]`, or `[axes, b, n]` for a batch; int64, or float64 where a rule counts in fractions.
        next_position: `[]` or `[b]`: the next text token stands here on every axis.
        delta: `[]` or `[b]`: what decoding adds to its token count (rope_deltas of transformers), by the convention of
            the rule.
        mask: `[n]` or `[b, n]` bool, False for padding; None where no mask was given.
    """

    ids: Tensor
    next_position: Tensor
    delta: Tensor
    mask: Tensor | None = None

    def row(self, number: int) -> PositionIds:
        """Return one row of a batch: ids `[axes, n]`, next_position `[]`, delta `[]`."""
        mask = None if self.mask is None else self.mask[number]
        return PositionIds(
            self.ids[:, number], self.next_position[number], self.delta[number], mask
        )


def stream_ids(stream: TokenStream, rule: Rule) -> PositionIds:
    """Return the position ids of a stream.

    Args:
        stream: from `family.stream`.
        rule: the position rule.

    Returns:
        ids `[axes, n]`, next_position `[]`, delta `[]`.

    Raises:
        PositionError: if the rule counts seconds and a clip has none.

    Example:
        >>> from visionpos.vlm.stream import Words
        >>> text = TokenStream((Words(segment=0, text="", count=3),))
        >>> stream_ids(text, Rule(axes=("time", "row", "col"))).ids.tolist()
        [[0, 1, 2], [0, 1, 2], [0, 1, 2]]
    """
    if rule.place != "unit":
        ids, following = views_ids(stream, rule)
        lengths = np.array([stream.length])
        delta = _delta(ids, following, lengths, rule.delta, stream.length)
    else:
        units = units_of_stream(stream, rule)
        ids, following, delta = _placed(units, rule, padded=stream.length)
    batch = (torch.from_numpy(part) for part in (ids[:, None], following, delta))
    return PositionIds(*batch).row(0)


def ids_from_tokens(
    input_ids: Tensor,
    modality: Tensor,
    image_grids: Grids | None = None,
    video_grids: Grids | None = None,
    attention_mask: Tensor | None = None,
    seconds_per_grid: Seconds | Sequence[Seconds] | Tensor | None = None,
    *,
    rule: Rule,
    merge: int | tuple[int, int] = 1,
) -> PositionIds:
    """Return the position ids of token tensors.

    Args:
        input_ids: `[n]` or `[b, n]`; only its shape and device are read.
        modality: like input_ids: 0 text, 1 image, 2 video, 3 audio (transformers' mm_token_type_ids). Only placeholders
            are not 0; a placeholder that a model generated is text.
        image_grids: `[images, 3]` frames, height, width in patches, in reading order over the batch.
        video_grids: `[videos, 3]` the same for clips.
        attention_mask: like input_ids, 0 for padding on either side; None if nothing is padded.
        seconds_per_grid: seconds of one grid step, temporal patch / sampled fps: one number, or one a clip. Read only
            by rules that count seconds.
        rule: the position rule.
        merge: patches a token and side; (of images, of clips) where they differ.

    Returns:
        ids `[axes, n]` or `[axes, b, n]` on the device of input_ids, padding at `rule.pad_id`; int64 even where the
        tokens are int32.

    Raises:
        PositionError: naming row, item, expected and found, if types, mask, grids and times do not fit together.

    Example:
        >>> rule = Rule(axes=("time", "row", "col"))
        >>> types = torch.tensor([0, 1, 1, 1, 1, 1, 1, 0])
        >>> ids_from_tokens(types, types, [[1, 4, 6]], rule=rule, merge=2).ids[1].tolist()
        [0, 1, 1, 1, 2, 2, 2, 4]
    """
    if rule.place != "unit":
        raise PositionError(
            f"the rule has place {rule.place!r}; token types and grids do not say which tile stands where. "
            "Use stream_ids, or family.position_ids, on the stream."
        )
    types, keep = checked_tokens(input_ids, modality, attention_mask, rule)
    if rule.is_sequential:  # placeholders of newlines and queries are in no grid
        types, image_grids, video_grids = np.zeros_like(types), None, None
    of_images, of_clips = (merge, merge) if isinstance(merge, int) else merge
    grids = {
        IMAGE: token_grids(image_grids, "image_grids", merge=of_images),
        VIDEO: token_grids(video_grids, "video_grids", merge=of_clips, frames=rule.temporal_merge),
    }
    timed = rule.counts_seconds and len(grids[VIDEO]) > 0
    clocks = clip_clocks(seconds_per_grid, len(grids[VIDEO])) if timed else ()
    units = units_of_tokens(types, keep, grids, clocks, rule)
    placed, following, delta = _placed(units, rule, padded=types.shape[1])
    ids = placed
    if not keep.all():
        ids = np.full((len(rule.axes), types.size), rule.pad_id, dtype=rule.dtype)
        ids[:, keep.ravel()] = placed
    ids = ids.reshape(len(rule.axes), *types.shape)
    device = input_ids.device
    batch = PositionIds(
        torch.from_numpy(ids).to(device),
        torch.from_numpy(following).to(device),
        torch.from_numpy(delta).to(device),
        None if attention_mask is None else torch.from_numpy(keep).to(device),
    )
    return batch.row(0) if input_ids.ndim == 1 else batch


def _placed(units: Units, rule: Rule, *, padded: int) -> tuple[Array, Array, Array]:
    """Return ids `[axes, tokens of all rows]`, and next position and delta, `[b]` each."""
    frames, height, width = units.shape.T
    tau = rule.frame_offsets(frames, np.maximum(height, width), units.clocks)
    last_tau = tau[np.cumsum(frames) - 1]
    step = index_steps(units, rule)
    advance = rule.advance(units.shape, last_tau, _stepped(units.sizes, *step)).astype(rule.dtype)
    rings = None
    if rule.circle is not None:
        rings = [ring(rule.circle, *side) for side in units.shape[:, 1:].tolist()]
        reach = np.array([one.max() for one in rings])
        advance = reach + last_tau + 1
    for unit, woven in units.woven.items():
        if woven.ends_in_audio:
            advance[unit] = len(woven.audio)
    # A unit moves what follows it by advance - tokens from its place in the row: one cumulative sum gives every start.
    move = advance - units.spans
    moved: Array = np.cumsum(move)
    moved = moved - (moved - move)[units.first_of_row]
    text = _text_positions(units, moved)
    ids: Array = np.empty((len(rule.axes), len(text)), dtype=rule.dtype)
    ids[:] = text
    start = text[units.start]
    _write_cells(ids, units, start, tau, rule, step, rings)
    for unit, woven in units.woven.items():
        woven.write(ids, units.start[unit], start[unit], start[unit] + advance[unit])
    following = units.row_lengths.astype(rule.dtype)
    np.add.at(following, units.row, move)
    return ids, following, _delta(ids, following, units.row_lengths, rule.delta, padded)


def _stepped(values: Array, above: Array, below: Array) -> Array:
    """Return values * above / below, int64 where every step is whole, else float64 rounded once."""
    return np.asarray(values * above if (below == 1).all() else values * above / below)


def _text_positions(units: Units, moved: Array) -> Array:
    """Return `[tokens]`: where each token would stand if it were text.

    Args:
        units: grids and rows.
        moved: `[units]` by how much the units of the row, up to and with this one, moved what follows.
    """
    row_start = np.cumsum(units.row_lengths) - units.row_lengths
    cut = np.concatenate([units.start + units.spans, row_start])
    value = np.concatenate([moved, np.zeros(len(row_start), dtype=moved.dtype)])
    # Stable: where a unit ends its row, the 0 of the next row comes last and holds.
    order = np.argsort(cut, kind="stable")
    total = int(units.row_lengths.sum())
    row = np.concatenate([units.row, np.arange(len(row_start))])
    off = (value - row_start[row])[order]
    text: Array = np.repeat(off, np.diff(np.append(cut[order], total)))
    text += np.arange(total)
    return text


def _write_cells(
    ids: Array,
    units: Units,
    start: Array,
    tau: Array,
    rule: Rule,
    step: tuple[Array, Array],
    rings: Sequence[Array] | None,
) -> None:
    """Write the ids of every cell into `ids [axes, tokens]`.

    Args:
        ids: written in place at the cells.
        units: grids and rows.
        start: `[units]` position s of each unit.
        tau: `[sum of frames]` time offset of every frame of every unit.
        rule: the position rule.
        step: what one cell of each unit adds to `index`, as numerators and denominators, `[units]` each.
        rings: `[3, cells of a frame]` of each unit, where the rule lays cells on a circle.
    """
    frames, height, width = units.shape.T
    # A line is a row of cells: what is the same along it is computed once and repeated.
    unit, line = ranges(frames * height)
    frame, row = np.divmod(line, height[unit])
    offset, s, cells = tau[(np.cumsum(frames) - frames)[unit] + frame], start[unit], width[unit]
    count = np.arange(int(cells.sum()))
    first = np.cumsum(cells) - cells
    origin = {"start": s, "time": s + offset, "zero": np.zeros_like(s)}[rule.origin]
    centre = [(side - 1) // 2 if rule.centre else 0 for side in (height[unit], cells)]
    values: dict[str, Callable[[], Array]] = {
        "index": lambda: _index_of_cells(units, start, step),
        "time": lambda: np.repeat(s + offset, cells),
        "row": lambda: np.repeat(origin + times(row, rule.row_step) - centre[0], cells),
        "col": lambda: (
            np.repeat(origin - centre[1], cells)
            + times(count - np.repeat(first, cells), rule.col_step)
        ),
        "ordinal": lambda: np.repeat(np.arange(len(start)) - units.first_of_row, units.sizes),
    }
    at = count + np.repeat(units.start - (np.cumsum(units.sizes) - units.sizes), units.sizes)
    for one, woven in units.woven.items():
        begin = int(units.sizes[:one].sum())
        at[begin : begin + len(woven.cells)] = units.start[one] + woven.cells
    if rings is not None:
        stacked = [np.tile(one, many) for one, many in zip(rings, frames, strict=True)]
        around = np.concatenate([np.zeros((3, 0)), *stacked], axis=1)
        ids[:, at] = np.repeat(s + offset, cells) + around
        return
    for out, axis in zip(ids, rule.axes, strict=True):
        out[at] = values[axis]()


def _index_of_cells(units: Units, start: Array, step: tuple[Array, Array]) -> Array:
    """Return `[cells]`: s - 1 + n * step of every cell, n counting from 1."""
    unit, cell = ranges(units.sizes)
    return start[unit] - 1 + _stepped(cell + 1, *(part[unit] for part in step))


def _delta(ids: Array, following: Array, lengths: Array, delta: Delta, padded: int) -> Array:
    """Return `[b]` what decoding adds to a token count."""
    if delta.from_ == "none":
        return np.zeros_like(following)
    base = following
    if delta.from_ == "max":
        base, filled = np.zeros_like(following), lengths > 0
        if filled.any():
            row_start = (np.cumsum(lengths) - lengths)[filled]
            base[filled] = np.maximum.reduceat(ids, row_start, axis=1).max(0) + 1
    taken: Array = np.full_like(lengths, padded) if delta.minus == "padded" else lengths
    return base - taken
