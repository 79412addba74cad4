"""Decoding: where generated tokens stand, from the ids of the prompt alone.

Generated text stands at `next_position`, `next_position + 1`, ... on every axis, whatever the prompt ended on and
however it was padded. Lengths of tokens and positions are two numbers: rollback goes by token, never by position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from visionpos.errors import PositionError
from visionpos.geometry.arguments import checked
from visionpos.vlm.ids import PositionIds
from visionpos.vlm.rules import Rule


@checked
def next_ids(pos: PositionIds, tokens: int = 1, *, skip: int | Tensor = 0) -> Tensor:
    """Return the ids of the next generated tokens, `[axes, tokens]` or `[axes, b, tokens]`.

    Args:
        pos: of the prompt, or of a batch padded on either side.
        tokens: how many, at least 0; a speculative window asks for several.
        skip: tokens generated since the prompt and kept: one number, or `[b]` where rows accepted unequal numbers.
            Rolling a window back is a smaller number here.

    Raises:
        PositionError: if a count is below 0, or skip is not one a row.

    Example:
        >>> pos = PositionIds(torch.zeros(3, 5), torch.tensor(8), torch.tensor(-2))
        >>> next_ids(pos, 3)[0].tolist()
        [8, 9, 10]
    """
    _check_count(tokens, "tokens")
    first = pos.next_position + _by_row(skip, pos, "skip")
    ahead = torch.arange(tokens, device=first.device)
    return (first.unsqueeze(-1) + ahead).expand(len(pos.ids), *([-1] * pos.ids[0].ndim))


@checked
def ids_after(
    pos: PositionIds,
    cached: int | Tensor,
    tokens: int,
    *,
    counted: Literal["unmasked", "padded"] = "unmasked",
) -> Tensor:
    """Return the ids of the tokens that follow what a cache holds: the rest of the prompt, then what is generated.

    One call for a chunk of prefill, a decoded token, a speculative window and a resumed turn, rows at unequal places.

    Args:
        pos: of the whole prompt, or of a batch padded on either side; a resumed turn with new images passes the ids of
            the whole conversation.
        cached: tokens that the cache holds: one number, or `[b]`.
        tokens: how many follow, at least 0.
        counted: what `cached` counts: "unmasked" the real tokens of each row, "padded" places of the padded row, as
            cache_position does. Generated tokens follow the padded row there.

    Returns:
        `[axes, tokens]` or `[axes, b, tokens]`.

    Raises:
        PositionError: if a count is below 0, or cached is not one a row.

    Example:
        >>> pos = PositionIds(torch.tensor([[0, 1, 1, 2]]), torch.tensor(3), torch.tensor(-1))
        >>> ids_after(pos, 2, 4).tolist()
        [[1, 2, 3, 4]]

    Reference:
        transformers GenerationMixin, which counts masked tokens since 5.0 and cache_position before.
    """
    _check_count(tokens, "tokens")
    ids = pos.ids if pos.ids.ndim == 3 else pos.ids.unsqueeze(1)
    rows, length = ids.shape[1:]
    at = _by_row(cached, pos, "cached").reshape(-1, 1) + torch.arange(tokens, device=ids.device)
    at = at.expand(rows, -1)
    mask = torch.ones_like(ids[0], dtype=torch.bool)
    if pos.mask is not None and counted == "unmasked":
        mask = pos.mask.view(rows, length)
    held = mask.sum(-1, keepdim=True)
    following = pos.next_position.reshape(-1, 1) + (at - held)
    out = following.expand(len(ids), rows, tokens)
    if length:
        places = (
            (~mask).to(torch.int8).argsort(dim=-1, stable=True)
        )  # the real tokens of a row first
        inside = places.gather(-1, at.clamp(max=length - 1)).expand(len(ids), -1, -1)
        out = torch.where(at < held, ids.gather(-1, inside), out.to(ids))
    return out if pos.ids.ndim == 3 else out.squeeze(1)


@checked
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
    _check_count(axes, "axes")
    shape = () if isinstance(counted, int) else tuple(counted.shape)
    if delta.ndim != 1 or shape not in ((), tuple(delta.shape)):
        raise PositionError(
            f"delta has shape {tuple(delta.shape)} and counted {shape}; [b], one a row, is required. Use view(-1)."
        )
    first = (delta + counted).unsqueeze(-1)
    return (first + torch.arange(tokens, device=delta.device)).expand(axes, -1, -1)


@checked
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
        if tokens and not bool(mask[..., -1:].all()):
            raise PositionError(
                "pos has padding on the right; tokens cannot be appended there. Pad on the left, or take pos.row()."
            )
        mask = torch.cat([mask, mask.new_ones(*mask.shape[:-1], tokens)], -1)
    ids = torch.cat([pos.ids, next_ids(pos, tokens).to(pos.ids)], -1)
    return PositionIds(ids, pos.next_position + tokens, pos.delta, mask)


@checked
def rolled_back(pos: PositionIds, tokens: int, modality: Tensor | None = None) -> PositionIds:
    """Return ids without the last tokens: text that a speculative window had guessed wrong, or whole images.

    delta stays where text is dropped; with an image it moves as the next position does, less the tokens dropped.

    Args:
        pos: of one prompt `[axes, n]`.
        tokens: how many to drop, 0 to n.
        modality: `[n]`, 0 text, 1 image, 2 video. Ids alone do not tell where an image of a rule with whole steps along
            one axis ends, nor a frame of every rule; with types, every cut between two placeholders is refused.

    Raises:
        PositionError: if there are fewer, some are padding, or the first of them lies inside an image.

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
    if pos.mask is not None and not bool(pos.mask[length - tokens :].all()):
        raise PositionError(
            f"tokens is {tokens} and the row has padding among them; real tokens at the end of the row are required. "
            "Take padding off with split_rows."
        )
    if modality is not None and tuple(modality.shape) != (length,):
        raise PositionError(
            f"modality has shape {tuple(modality.shape)} and the prompt {length} tokens; one type a token is required."
        )
    kept = length - tokens
    first = pos.ids[:, kept]
    if modality is not None:
        inside = kept > 0 and bool(modality[kept - 1 : kept + 1].all())
    else:
        inside = kept > 0 and not _is_behind(first, pos.ids[:, :kept])
    if inside or bool((first != first[0]).any()):
        raise PositionError(
            f"token {kept} stands at {first.tolist()}, inside an image; only text and whole images can be rolled back. "
            "Drop the whole image, or pass modality= if it is text."
        )
    mask = None if pos.mask is None else pos.mask[:kept]
    moved = first[0] - pos.next_position + tokens
    return PositionIds(pos.ids[:, :kept], first[0], _moved_delta(pos, moved), mask)


@checked
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


@checked
def pending_ids(pos: PositionIds, grids_hw: Sequence[tuple[int, int]], rule: Rule) -> Tensor:
    """Return the ids of images that the model is going to generate, and of the one token that closes them.

    Args:
        pos: of one prompt, which ends on the start token of the first of them.
        grids_hw: rows and columns of each, in tokens, at least 1, in the order of generation.
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
    for number, (height, width) in enumerate(grids_hw):
        if min(height, width) < 1:
            raise PositionError(
                f"grids_hw[{number}] is {(height, width)}; at least one row and one column are required. Leave an "
                "image out that is not generated."
            )
        rows, cols = torch.arange(height), torch.arange(width)
        cells = torch.stack(torch.meshgrid(rows, cols, indexing="ij")).reshape(2, -1).to(at)
        parts.append(torch.cat([torch.zeros_like(cells[:1]), cells]) + at)
        at = at + max(height, width)
    return torch.cat([*parts, at.expand(3, 1)], -1)


def _is_behind(first: Tensor, kept: Tensor) -> bool:
    """Return whether a token stands where text behind text, or behind the last cell of an image, does."""
    on, top = first[0] - 1, kept.max()
    tops = (
        top,
        top.ceil(),
        kept[0].max(),
    )  # rules that go on behind any axis, whole numbers, the first axis
    return bool((kept[:, -1] == on).all()) or any(bool(on == one) for one in tops)


def _moved_delta(pos: PositionIds, moved: Tensor) -> Tensor:
    """Return the delta of one prompt moved by so much, or 0 if its rule keeps none."""
    counts = {pos.ids.shape[-1], int(pos.ids.shape[-1] if pos.mask is None else pos.mask.sum())}
    bases = pos.next_position, pos.ids.max() + 1
    kept = bool(pos.delta != 0) or any(bool(base == count) for base in bases for count in counts)
    return pos.delta + moved if kept else pos.delta


def _by_row(count: int | Tensor, pos: PositionIds, name: str) -> Tensor:
    """Return one count for all rows, `[]`, or one a row, `[b]`."""
    given = torch.as_tensor(count, device=pos.next_position.device)
    real = not (given.is_floating_point() or given.is_complex())
    whole = real and given.dtype != torch.bool
    if given.shape not in ((), pos.next_position.shape) or not whole:
        raise PositionError(
            f"{name} is {given.dtype} of shape {tuple(given.shape)} for ids {tuple(pos.ids.shape)}; one whole number, "
            "or one a row, is required. Count tokens, not positions."
        )
    if not torch.compiler.is_compiling() and bool((given < 0).any()):
        raise PositionError(
            f"{name} is {given.tolist()}; at least 0 is required. Count tokens, not positions."
        )
    return given


def _check_count(count: int, name: str) -> None:
    if count < 0:
        raise PositionError(f"{name} is {count}; at least 0 is required. Count generated tokens.")
