"""Inputs: what a processor returns, checked before any id is computed.

Tensors enter; small arrays leave that agree with each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from visionpos.errors import PositionError
from visionpos.vlm.clocks import Array, Clock
from visionpos.vlm.instants import Seconds, checked_step, exact
from visionpos.vlm.pieces import AUDIO, MODALITY_NAMES
from visionpos.vlm.rules import Rule

Grids = Tensor | Sequence[Sequence[int]]


def checked_tokens(
    input_ids: Tensor, modality: Tensor, attention_mask: Tensor | None, rule: Rule
) -> tuple[Array, Array]:
    """Return types and which tokens are no padding, `[b, n]` each, after checking that they agree.

    Args:
        input_ids: `[n]` or `[b, n]`; only its shape is read.
        modality: like input_ids, 0 to 3.
        attention_mask: like input_ids, 0 or 1; None if nothing is padded.
        rule: says whether there may be sound.

    Raises:
        PositionError: if shapes differ, a value is out of range, padding is typed as a placeholder, or there is sound
            and the rule takes none.
    """
    mask = torch.ones_like(modality) if attention_mask is None else attention_mask
    shapes = [tuple(part.shape) for part in (input_ids, modality, mask)]
    if input_ids.ndim not in (1, 2) or len(set(shapes)) != 1:
        raise PositionError(
            f"input_ids, modality and attention_mask have shapes {shapes[0]}, {shapes[1]} and {shapes[2]}; one shape, "
            "[n] or [b, n], is required. Pad all of them on the same side to the same length."
        )
    types, keep = (torch.atleast_2d(part).cpu().numpy() for part in (modality, mask))
    if types.size and not 0 <= types.min() <= types.max() < len(MODALITY_NAMES):
        row, at = np.argwhere((types < 0) | (types >= len(MODALITY_NAMES)))[0]
        raise PositionError(
            f"modality is {types[row, at]} at row {row}, token {at}; 0 text, 1 image, 2 video or 3 audio is required. "
            "Pass mm_token_type_ids, not token ids."
        )
    if keep.size and not 0 <= keep.min() <= keep.max() <= 1:
        row, at = np.argwhere((keep != 0) & (keep != 1))[0]
        raise PositionError(
            f"attention_mask is {keep[row, at]} at row {row}, token {at}; 0 or 1 is required. "
            "Split packed documents into rows first: ids restart with each."
        )
    keep = keep.astype(bool)
    wrong = (types != 0) > keep if attention_mask is not None else keep[:0]
    if wrong.any():
        row, at = np.argwhere(wrong)[0]
        raise PositionError(
            f"modality is {types[row, at]} at row {row}, token {at}, which attention_mask calls padding; padding must "
            "be 0. Pad modality on the same side as input_ids."
        )
    if rule.audio == "none" and types.size and types.max() == AUDIO:
        wrong = types == AUDIO
        raise PositionError(
            f"modality is {AUDIO} (audio) in row {np.argwhere(wrong)[0][0]}; this family takes no audio. "
            "Type those tokens 0 if they are text."
        )
    return types, keep


def token_grids(grids: Grids | None, name: str, *, merge: int, frames: int = 1) -> Array:
    """Return `[items, 3]` frames, height, width in tokens, from grids in patches.

    Args:
        grids: `[items, 3]` frames, height, width in patches, or None for no items.
        name: the argument, for the message.
        merge: patches a token and side.
        frames: frames of the grid that are one time step; a rest is left out, and a single frame is a step.

    Raises:
        PositionError: if the shape is not `[items, 3]`, a side is below 1 or no multiple of merge, or an image has
            several frames.
    """
    table = np.asarray(torch.as_tensor(grids if grids is not None else []).cpu(), dtype=np.float64)
    if table.size == 0:
        return np.zeros((0, 3), dtype=np.int64)
    if table.ndim != 2 or table.shape[1] != 3:
        raise PositionError(
            f"{name} has shape {table.shape}; [items, 3] with frames, height, width in patches is required. "
            "Pass the processor's grid_thw."
        )
    wrong = (table < 1) | (table % [1, merge, merge] != 0)
    if wrong.any():
        item = int(np.argmax(wrong.any(1)))
        raise PositionError(
            f"{name}[{item}] is {tuple(table[item].tolist())}; at least one whole frame, and sides that are multiples "
            f"of merge {merge}, are required. Pass patch grids, not merged ones."
        )
    if name == "image_grids" and (table[:, 0] != 1).any():
        item = int(np.argmax(table[:, 0] != 1))
        raise PositionError(
            f"image_grids[{item}] has {int(table[item, 0])} frames; an image has one. Pass clips as video_grids."
        )
    return np.maximum(table // [frames, merge, merge], 1).astype(np.int64)


def clip_clocks(
    seconds: Seconds | Sequence[Seconds] | Tensor | None, clips: int
) -> tuple[Clock, ...]:
    """Return the exact seconds of one grid step of each clip.

    Args:
        seconds: temporal patch / sampled fps: one number for all clips, or one a clip in reading order over the batch.
        clips: number of clips.

    Raises:
        PositionError: if it is missing, the count is wrong, or a value is NaN, not above 0 or beyond a day.
    """
    if seconds is None:
        raise PositionError(
            f"seconds_per_grid is None for {clips} videos; this position rule counts seconds. "
            "Pass temporal_patch / sampled_fps of each (transformers silently takes 1.0)."
        )
    given = list(seconds) if isinstance(seconds, Iterable) else [seconds] * clips
    if len(given) != clips:
        raise PositionError(
            f"seconds_per_grid holds {len(given)} values for {clips} videos; one a video is required. "
            "Pass them in reading order over the batch."
        )
    return tuple(_step(value, f"seconds_per_grid[{at}]") for at, value in enumerate(given))


def _step(seconds: Seconds | Tensor, name: str) -> Fraction:
    """Return the exact seconds of one grid step, from a number or an item of a tensor or array."""
    if isinstance(seconds, int | float | Fraction):
        return exact(checked_step(seconds, name))
    item = torch.as_tensor(seconds)
    if item.dtype in (torch.float16, torch.bfloat16):
        raise PositionError(
            f"{name} is {item.dtype}; half precision loses time steps. Pass float32 or plain numbers."
        )
    return exact(checked_step(item.item(), name), single=item.dtype == torch.float32)
