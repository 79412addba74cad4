"""Position ids: where every token of a prompt stands, as pure functions of the prompt and a rule.

A stream, or token tensors with their grids, enter; ids leave. No model object, no state, no loop over tokens, and no
row that depends on its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from visionpos.errors import PositionError
from visionpos.geometry.arguments import checked
from visionpos.vlm.clocks import Array
from visionpos.vlm.increments import index_steps
from visionpos.vlm.inputs import Grids, checked_tokens, clip_clocks, token_grids
from visionpos.vlm.instants import Seconds
from visionpos.vlm.lines import line_ids, pieces_of, stepped, write_rings
from visionpos.vlm.padding import repadded
from visionpos.vlm.rings import ring
from visionpos.vlm.rules import Delta, Rule
from visionpos.vlm.stream import AUDIO, IMAGE, VIDEO, TokenStream
from visionpos.vlm.token_units import units_of_tokens, units_of_woven
from visionpos.vlm.units import Units, units_of_stream
from visionpos.vlm.views_ids import views_ids
from visionpos.vlm.woven import Woven


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


@checked
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
        woven = rule.audio_in_video is not None and bool((stream.modality == AUDIO).any())
        units = (units_of_woven if woven else units_of_stream)(stream, rule)
        ids, following, delta = _placed(units, rule, padded=stream.length)
    batch = (torch.from_numpy(part) for part in (ids[:, None], following, delta))
    return PositionIds(*batch).row(0)


@checked
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
    return placed_tokens(
        input_ids,
        modality,
        image_grids,
        video_grids,
        attention_mask,
        seconds_per_grid,
        rule=rule,
        merge=merge,
    )


def placed_tokens(
    input_ids: Tensor,
    modality: Tensor,
    image_grids: Grids | None,
    video_grids: Grids | None,
    attention_mask: Tensor | None,
    seconds_per_grid: Seconds | Sequence[Seconds] | Tensor | None,
    *,
    rule: Rule,
    merge: int | tuple[int, int],
) -> PositionIds:
    """Return the same, for callers that have looked at their arguments."""
    if rule.place != "unit":
        raise PositionError(
            f"the rule has place {rule.place!r}; token types and grids do not say which tile stands where. "
            "Use stream_ids, or family.position_ids, on the stream."
        )
    types, keep = checked_tokens(input_ids, modality, attention_mask)
    if rule.is_sequential:
        image_grids = video_grids = None
    both = merge if isinstance(merge, tuple) else np.broadcast_to(np.asarray(merge), 2).tolist()
    of_images, of_clips = both
    grids = {
        IMAGE: token_grids(image_grids, "image_grids", merge=of_images),
        VIDEO: token_grids(video_grids, "video_grids", merge=of_clips, frames=rule.temporal_merge),
    }
    timed = rule.counts_seconds and len(grids[VIDEO]) > 0
    clocks = clip_clocks(seconds_per_grid, len(grids[VIDEO])) if timed else ()
    units = units_of_tokens(types, keep, grids, clocks, rule)
    ids, following, delta = _placed(units, rule, padded=types.shape[1])
    if keep is None:
        ids = ids.reshape(len(rule.axes), *types.shape)
    else:
        ids = repadded(ids, keep, rule.pad_id)
    parts = [ids, following, delta]
    if attention_mask is not None:
        parts.append(np.ones(types.shape, dtype=bool) if keep is None else keep)
    tensors = [torch.from_numpy(part) for part in parts]
    if not input_ids.is_cpu:
        tensors = [tensor.to(input_ids.device) for tensor in tensors]
    batch = PositionIds(*tensors)
    return batch.row(0) if input_ids.ndim == 1 else batch


def _placed(units: Units, rule: Rule, *, padded: int) -> tuple[Array, Array, Array]:
    """Return ids `[axes, tokens of all rows]`, and next position and delta, `[b]` each."""
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
    ids = line_ids(pieces_of(units, spans, before + move), start, tau, rule, step)
    if rings is not None:
        write_rings(ids, units, start, tau, rings)
    for unit, woven in units.woven.items():
        stands = start[unit], advance[unit]
        _write_woven(ids, units, unit, woven, stands, tau, rule)
    following = rows.astype(dtype)
    np.add.at(following, units.row, move)
    if rule.origin == "zero" or dtype is not np.int64 or units.woven:
        return ids, following, _delta(ids, following, rows, rule.delta, padded)
    # Text never falls, so what stands highest is the last token or a cell of some unit.
    highest = following.copy()
    np.maximum.at(highest, units.row, start + reach + 1)
    return ids, following, _delta(highest, following, rows, rule.delta, padded)


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


def _delta(highest: Array, following: Array, lengths: Array, delta: Delta, padded: int) -> Array:
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
