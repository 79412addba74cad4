"""Decoding: where generated tokens stand, from the ids of the prompt alone.

Generated text stands at `next_position`, `next_position + 1`, ... on every axis, whatever the prompt ended on and
however it was padded. Lengths of tokens and positions are two numbers: rollback goes by token, never by position.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from visionpos.errors import PositionError
from visionpos.vlm.ids import PositionIds
from visionpos.vlm.rules import Rule


def next_ids(pos: PositionIds, tokens: int = 1, *, skip: int = 0) -> Tensor:
    """Return the ids of the next generated tokens, `[axes, tokens]` or `[axes, b, tokens]`.

    Args:
        pos: of the prompt.
        tokens: how many, at least 0; a speculative window asks for several.
        skip: tokens generated since the prompt.

    Example:
        >>> pos = PositionIds(torch.zeros(3, 5), torch.tensor(8), torch.tensor(-2))
        >>> next_ids(pos, 3)[0].tolist()
        [8, 9, 10]
    """
    _check_count(tokens, "tokens")
    _check_count(skip, "skip")
    ahead = torch.arange(skip, skip + tokens, device=pos.next_position.device)
    return (pos.next_position.unsqueeze(-1) + ahead).expand(len(pos.ids), *([-1] * pos.ids[0].ndim))


def ids_by_delta(delta: Tensor, counted: int | Tensor, tokens: int, axes: int) -> Tensor:
    """Return ids `[axes, b, tokens]` that stand at token count + delta, as caches of transformers reckon.

    Args:
        delta: `[b]`, of the rule's convention.
        counted: tokens so far: of the padded row where the convention takes off "padded", else of the mask, `[b]`.
        tokens: how many.
        axes: of the rule.

    Example:
        >>> ids_by_delta(torch.tensor([-2]), 10, 2, 3)[:, 0].tolist()
        [[8, 9], [8, 9], [8, 9]]
    """
    _check_count(tokens, "tokens")
    first = (delta + counted).unsqueeze(-1)
    return (first + torch.arange(tokens, device=delta.device)).expand(axes, -1, -1)


def continued(pos: PositionIds, tokens: int) -> PositionIds:
    """Return the ids of the prompt and so many text tokens behind it; delta stays.

    Args:
        pos: of one prompt or of a batch without padding on the right.
        tokens: generated, at least 0.

    Raises:
        PositionError: if a row is padded on the right, where generated tokens do not follow it.
    """
    mask = pos.mask
    if mask is not None:
        if tokens and not bool(mask[..., -1].all()):
            raise PositionError(
                "pos has padding on the right; tokens cannot be appended there. Pad on the left, or take pos.row()."
            )
        mask = torch.cat([mask, mask.new_ones(*mask.shape[:-1], tokens)], -1)
    ids = torch.cat([pos.ids, next_ids(pos, tokens).to(pos.ids)], -1)
    return PositionIds(ids, pos.next_position + tokens, pos.delta, mask)


def rolled_back(pos: PositionIds, tokens: int) -> PositionIds:
    """Return ids without the last tokens, text that a speculative window had guessed wrong.

    Args:
        pos: of one prompt `[axes, n]`.
        tokens: how many to drop, 0 to n; all of them text.

    Raises:
        PositionError: if there are fewer, or the first of them lies inside an image.

    Example:
        >>> pos = PositionIds(torch.arange(5).expand(3, -1), torch.tensor(5), torch.tensor(0))
        >>> rolled_back(pos, 2).next_position.item()
        3
    """
    length = pos.ids.shape[-1]
    if pos.ids.ndim != 2 or not 0 <= tokens <= length:
        raise PositionError(
            f"tokens is {tokens} and ids have shape {tuple(pos.ids.shape)}; 0 to n tokens of one row [axes, n] are "
            "required. Take pos.row()."
        )
    if not tokens:
        return pos
    first = pos.ids[:, length - tokens]
    if bool((first != first[0]).any()):
        raise PositionError(
            f"token {length - tokens} stands at {first.tolist()}, inside an image; only text can be rolled back. Drop "
            "the whole image, or ask for the ids of the shorter stream."
        )
    mask = None if pos.mask is None else pos.mask[: length - tokens]
    return PositionIds(pos.ids[:, : length - tokens], first[0], pos.delta, mask)


def chunk(pos: PositionIds, start: int, stop: int | None = None) -> Tensor:
    """Return the ids of tokens start to stop - 1, `[axes, k]` or `[axes, b, k]`: a slice of prefill.

    Args:
        pos: of the whole prompt; a resumed turn asks for the ids of the whole conversation and takes what is new.
        start: first token, 0 to n.
        stop: one past the last; the end where None.

    Raises:
        PositionError: if the slice is not inside the prompt.
    """
    length = pos.ids.shape[-1]
    stop = length if stop is None else stop
    if not 0 <= start <= stop <= length:
        raise PositionError(
            f"start is {start} and stop {stop} of {length} tokens; 0 <= start <= stop <= {length} is required. "
            "Count in tokens, not in positions."
        )
    return pos.ids[..., start:stop]


def pending_ids(pos: PositionIds, grids_hw: Sequence[tuple[int, int]], rule: Rule) -> Tensor:
    """Return the ids of images that the model is going to generate, and of the one token that closes them.

    Args:
        pos: of one prompt, which ends on the start token of the first of them.
        grids_hw: rows and columns of each, in tokens, in the order of generation.
        rule: with axes time, row, col.

    Returns:
        `[3, cells of all + 1]`.

    Example:
        >>> pos = PositionIds(torch.arange(9).expand(3, -1), torch.tensor(9), torch.tensor(0))
        >>> pending_ids(pos, [(2, 2)], Rule(axes=("time", "row", "col")))[0].tolist()
        [9, 9, 9, 9, 11]

    Reference:
        GLM-Image; transformers glm_image get_rope_index, which generates the last grid of its list first.
    """
    if rule.axes != ("time", "row", "col") or pos.ids.ndim != 2:
        raise PositionError(
            f"axes are {rule.axes} and ids have shape {tuple(pos.ids.shape)}; time, row, col and one row are required. "
            "Take pos.row() of a family such as glm_image."
        )
    at, parts = pos.next_position, []
    for height, width in grids_hw:
        rows, cols = torch.arange(height), torch.arange(width)
        cells = torch.stack(torch.meshgrid(rows, cols, indexing="ij")).reshape(2, -1).to(at)
        parts.append(torch.cat([torch.zeros_like(cells[:1]), cells]) + at)
        at = at + max(height, width)
    return torch.cat([*parts, at.expand(3, 1)], -1)


def _check_count(count: int, name: str) -> None:
    if count < 0:
        raise PositionError(f"{name} is {count}; at least 0 is required. Count generated tokens.")
