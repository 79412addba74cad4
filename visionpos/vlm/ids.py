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
from visionpos.kernels import ids as on_device
from visionpos.kernels.ids import LinePlan
from visionpos.vlm.clocks import Array
from visionpos.vlm.inputs import Grids, checked_tokens, clip_clocks, token_grids
from visionpos.vlm.instants import Seconds
from visionpos.vlm.padding import repadded
from visionpos.vlm.placing import delta_of, placed
from visionpos.vlm.rules import Rule
from visionpos.vlm.stream import AUDIO, IMAGE, VIDEO, TokenStream
from visionpos.vlm.token_units import units_of_tokens, units_of_woven
from visionpos.vlm.units import units_of_stream
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


@checked
def stream_ids(
    stream: TokenStream, rule: Rule, *, device: torch.device | None = None
) -> PositionIds:
    """Return the position ids of a stream.

    Args:
        stream: from `family.stream`.
        rule: the position rule.
        device: where ids are wanted: all that runs evenly along lines is spread there. The CPU when None.

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
    ids: Array | LinePlan
    target = torch.device("cpu" if device is None else device)
    if rule.place != "unit":
        ids, following = views_ids(stream, rule)
        lengths = np.array([stream.length])
        delta = delta_of(ids, following, lengths, rule.delta, stream.length)
    else:
        woven = rule.audio_in_video is not None and bool((stream.modality == AUDIO).any())
        units = (units_of_woven if woven else units_of_stream)(stream, rule)
        ids, following, delta = placed(units, rule, padded=stream.length, device=target)
    batch = [_sent(part, target) for part in (ids, following, delta)]
    return PositionIds(batch[0][:, None], *batch[1:]).row(0)


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
    device = input_ids.device
    ids, following, delta = placed(units, rule, padded=types.shape[1], device=device)
    mask = None
    if attention_mask is not None:
        mask = _sent(np.ones(types.shape, dtype=bool) if keep is None else keep, device)
    if not isinstance(ids, LinePlan):
        ids = (
            ids.reshape(len(rule.axes), *types.shape)
            if keep is None
            else repadded(ids, keep, rule.pad_id)
        )
        found = _sent(ids, device)
    elif keep is None:
        found = _sent(ids, device).view(len(rule.axes), *types.shape)
    else:
        found = on_device.repadded(_sent(ids, device), _sent(keep, device), rule.pad_id)
    batch = PositionIds(found, _sent(following, device), _sent(delta, device), mask)
    return batch.row(0) if input_ids.ndim == 1 else batch


def _sent(part: Array | LinePlan, device: torch.device) -> Tensor:
    """Return what was built on the host as a tensor on a device, without waiting for it."""
    if isinstance(part, LinePlan):
        return part.to(device).ids()
    tensor = torch.from_numpy(part)
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)
