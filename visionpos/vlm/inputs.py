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

Grids = (
    Tensor | Sequence[Sequence[float]] | Sequence[float]
)  # [items, 3] whole numbers, checked with its own words
LARGEST_SIDE = 2**31 - 1  # in patches; beyond it, no file holds a picture
MANY_CELLS = (
    2**24
)  # beyond it, grids are held against the tokens before anything is made of their size


def checked_tokens(
    input_ids: Tensor, modality: Tensor, attention_mask: Tensor | None
) -> tuple[Array, Array | None]:
    """Return types and which tokens are no padding, `[b, n]` each, None for all, after checking that they agree.

    What the types are is checked with their runs, of which there are fewer (`check_types`).

    Args:
        input_ids: `[n]` or `[b, n]`; only its shape is read.
        modality: like input_ids.
        attention_mask: like input_ids, 0 or 1; None if nothing is padded.

    Raises:
        PositionError: if shapes differ, the mask holds something else, or padding is typed as a placeholder.
    """
    given = (input_ids, modality, *([] if attention_mask is None else [attention_mask]))
    if not all(isinstance(part, Tensor) for part in given):
        kinds = ", ".join(type(part).__name__ for part in given)
        raise PositionError(
            f"input_ids, modality and attention_mask are {kinds}; tensors are required. Use torch.as_tensor."
        )
    if input_ids.ndim not in (1, 2) or len({part.shape for part in given}) != 1:
        shapes = ", ".join(str(tuple(part.shape)) for part in given)
        raise PositionError(
            f"input_ids, modality and attention_mask have shapes {shapes}; one shape, [n] or [b, n], is required. Pad "
            "all of them on the same side to the same length."
        )
    types = _rows_of(modality, "modality")
    keep = None if attention_mask is None else _rows_of(attention_mask, "attention_mask")
    if keep is None or (keep.size and keep.min() == keep.max() == 1):
        return types, None
    if _largest(keep) > 1:
        row, at = np.argwhere((keep != 0) & (keep != 1))[0]
        raise PositionError(
            f"attention_mask is {keep[row, at]} at row {row}, token {at}; 0 or 1 is required. "
            "Split packed documents into rows first: ids restart with each."
        )
    keep = keep.astype(bool)
    wrong = types.astype(bool) & ~keep
    if wrong.any():
        row, at = np.argwhere(wrong)[0]
        raise PositionError(
            f"modality is {types[row, at]} at row {row}, token {at}, which attention_mask calls padding; padding must "
            "be 0. Pad modality on the same side as input_ids."
        )
    return types, keep


def check_types(kinds: Array, types: Array, rule: Rule) -> None:
    """Refuse types that are none, and sound where the rule takes none.

    Args:
        kinds: `[runs]` every type there is.
        types: `[b, n]` of all tokens, for the message.
        rule: says whether there may be sound.
    """
    largest = _largest(kinds)
    if largest >= len(MODALITY_NAMES):
        row, at = np.argwhere(~np.isin(types, range(len(MODALITY_NAMES))))[0]
        raise PositionError(
            f"modality is {types[row, at]} at row {row}, token {at}; 0 text, 1 image, 2 video or 3 audio is required. "
            "Pass mm_token_type_ids, not token ids."
        )
    if rule.audio == "none" and largest == AUDIO:
        raise PositionError(
            f"modality is {AUDIO} (audio) in row {np.argwhere(types == AUDIO)[0][0]}; this family takes no audio. "
            "Type those tokens 0 if they are text."
        )


def _rows_of(part: Tensor, name: str) -> Array:
    """Return a tensor `[n]` or `[b, n]` as an array `[b, n]`.

    Raises:
        PositionError: if its numbers cannot be read, or are complex.
    """
    try:
        held = part.detach().cpu()
        # numpy has no bfloat16.
        array: Array = (held.double() if held.is_floating_point() else held).numpy()
    except (NotImplementedError, RuntimeError, TypeError) as error:  # meta, fake and sparse tensors
        raise PositionError(
            f"{name} is a {type(part).__name__} on {part.device} that cannot be read: {str(error).rstrip('.!')}. A "
            "dense tensor that holds numbers is required. Place tokens before a graph is traced, on any device."
        ) from error
    if array.dtype.kind == "c":
        raise PositionError(f"{name} is {part.dtype}; whole numbers are required. Convert it.")
    return array if array.ndim == 2 else array[None]


def _largest(values: Array) -> float:
    """Return the largest value; a negative whole number counts as larger than all others, and so does NaN."""
    if not values.size:
        return 0
    if values.dtype.kind in "iu" and values.flags.c_contiguous:
        return int(values.view(f"u{values.itemsize}").max())  # one pass over the tokens
    largest = float(values.max())
    whole = values.min() >= 0 and largest < np.inf and (values % 1 == 0).all()
    return largest if whole else np.inf


def token_grids(grids: Grids | None, name: str, *, merge: int, frames: int = 1) -> Array:
    """Return `[items, 3]` frames, height, width in tokens, from grids in patches.

    Args:
        grids: `[items, 3]` frames, height, width in patches, or None for no items.
        name: the argument, for the message.
        merge: patches a token and side.
        frames: frames of the grid that are one time step; a rest is left out, and a single frame is a step.

    Raises:
        PositionError: if the shape is not `[items, 3]`, a side is below 1, no multiple of merge or beyond all sense,
            or an image has several frames.
    """
    table = np.zeros((0, 3), dtype=np.int64) if grids is None else _table(grids, name)
    if not len(table):
        return table
    unit = np.array([1, merge, merge])
    cells = table // unit
    whole = cells * unit == table
    if not whole.all() or table.min() < 1:
        item = int(np.argmax(((table < 1) | ~whole).any(1)))
        raise PositionError(
            f"{name}[{item}] is {tuple(table[item].astype(float).tolist())}; at least one whole frame, and sides that "
            f"are multiples of merge {merge}, are required. Pass patch grids, not merged ones."
        )
    if name == "image_grids" and table[:, 0].max() != 1:
        item = int(np.argmax(table[:, 0] != 1))
        raise PositionError(
            f"image_grids[{item}] has {int(table[item, 0])} frames; an image has one. Pass clips as video_grids."
        )
    if frames > 1:
        cells[:, 0] = np.maximum(cells[:, 0] // frames, 1)
    counted: Array = cells.astype(np.int64, copy=False)
    return counted


def _table(grids: Grids, name: str) -> Array:
    """Return grids in patches as an array `[items, 3]` of numbers that an int64 holds."""
    try:
        given = grids if isinstance(grids, Tensor) else torch.as_tensor(grids)
        table: Array = given.detach().cpu().numpy()
    except (TypeError, ValueError, RuntimeError):
        raise PositionError(
            f"{name} is {grids!r}; [items, 3] with frames, height, width in patches is required. Pass the processor's "
            "grid_thw."
        ) from None
    if table.size == 0:
        return np.zeros((0, 3), dtype=np.int64)
    if table.ndim != 2 or table.shape[1] != 3:
        raise PositionError(
            f"{name} has shape {table.shape}; [items, 3] with frames, height, width in patches is required. "
            "Pass the processor's grid_thw."
        )
    if table.dtype.kind == "f":
        table = table.astype(np.float64)  # half precision would round the limit
    if table.dtype.kind == "c" or table.max() > LARGEST_SIDE:
        raise PositionError(
            f"{name} holds {table.max()}; real frames, heights and widths of at most {LARGEST_SIDE} patches are "
            "required. Pass the processor's grid_thw."
        )
    return table


def check_cells(grids: Array, tokens: int, name: str) -> None:
    """Refuse grids that no prompt of this length holds, before their cells are counted in int64 or laid out.

    Args:
        grids: `[items, 3]` in tokens.
        tokens: of the whole batch.
        name: what they are grids of, for the message.
    """
    if not len(grids):
        return
    cells = grids.astype(np.float64).prod(1)
    if cells.sum() > max(tokens, MANY_CELLS):
        item = int(cells.argmax())
        raise PositionError(
            f"{name}_grids[{item}] is {tuple(grids[item].tolist())} in tokens and all {name}_grids have "
            f"{cells.sum():g} cells for a batch of {tokens} tokens; one token a cell is required. Look for a table of "
            "another kind under this name."
        )


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
    given: list[Seconds | Tensor]
    if isinstance(seconds, Iterable) and not (isinstance(seconds, Tensor) and seconds.ndim == 0):
        given = list(seconds)
    else:
        given = [seconds] * clips
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
    try:
        item = torch.as_tensor(seconds)
    except (TypeError, ValueError, RuntimeError):
        item = torch.empty(0)
    if item.numel() != 1:
        raise PositionError(
            f"{name} is {seconds!r}; a number of seconds is required. Pass temporal_patch / sampled_fps."
        )
    if item.dtype == torch.bool or item.is_complex():
        raise PositionError(
            f"{name} is {item.dtype}; a number of seconds is required. Pass temporal_patch / sampled_fps."
        )
    if item.dtype in (torch.float16, torch.bfloat16):
        raise PositionError(
            f"{name} is {item.dtype}; half precision loses time steps. Pass float32 or plain numbers."
        )
    return exact(checked_step(item.item(), name), single=item.dtype == torch.float32)
