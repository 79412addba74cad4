"""Sequence: position ids of one axis, one function a scheme: packing restart, randomized ids, PoSE.

Lengths, documents and a generator enter; int64 ids leave, which are coordinates: `ids.unsqueeze(-1)` is `[n, 1]`.
Coupled ids are in `coupling`, ids of caches in `streaming`, grouped ones in `self_extend`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from visionpos.errors import PositionError
from visionpos.geometry.arguments import checked
from visionpos.geometry.ranges import check_counts

LARGEST = 2**63 - 1  # of the ids that a tensor holds
_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def restart(documents: Tensor) -> Tensor:
    """Return the place of every token in its own document: ids that restart where a document begins.

    Args:
        documents: `[..., n]` whole numbers, the document of every token, each document in one run; -1 for padding,
            whose runs restart too.

    Returns:
        `[..., n]` int64.

    Raises:
        PositionError: if documents are no whole numbers.

    Example:
        >>> restart(torch.tensor([7, 7, 7, 2, 2, -1]))
        tensor([0, 1, 2, 0, 1, 0])
    """
    check_documents(documents)
    places = torch.arange(documents.shape[-1], device=documents.device).expand(documents.shape)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[..., 1:] = documents[..., 1:] != documents[..., :-1]
    return places - torch.where(begins, places, 0).cummax(-1).values


def document_lengths(ids: Tensor, documents: Tensor | None = None) -> Tensor:
    """Return, for every token, the length of its document: its largest id + 1, which rules that stretch by length take.

    Args:
        ids: `[n]` or `[b, n]` whole numbers.
        documents: like ids, the document of every token, -1 for padding; one document a row when None.

    Returns:
        Shape of ids, int64.

    Raises:
        PositionError: if ids or documents are no whole numbers, or their shapes differ.

    Example:
        >>> document_lengths(torch.tensor([0, 1, 2, 0, 1]), torch.tensor([0, 0, 0, 1, 1]))
        tensor([3, 3, 3, 2, 2])
    """
    check_ids(ids, "ids")
    if documents is None:
        documents = torch.zeros_like(ids)
    check_alike(documents, ids)
    if not ids.numel():
        return ids.to(torch.int64)
    rows = torch.arange(ids[..., 0].numel(), device=ids.device).view(*ids.shape[:-1], 1)
    keys = torch.stack([rows.expand_as(documents), documents.to(torch.int64)], dim=-1)
    found, owner = torch.unique(keys.flatten(0, -2), dim=0, return_inverse=True)
    longest = torch.zeros(len(found), dtype=torch.int64, device=ids.device)
    longest = longest.scatter_reduce(0, owner, ids.flatten().to(torch.int64) + 1, "amax")
    return longest[owner].view(ids.shape)


@checked
def randomized(n: int, limit: int, *, generator: torch.Generator) -> Tensor:
    """Return n different ids below a limit, in rising order, so that training sees the ids of longer texts.

    One draw serves a whole batch, and evaluation draws too.

    Args:
        n: tokens.
        limit: ids are below it; at least n.
        generator: source of the draw.

    Returns:
        `[n]` int64 on the generator's device, strictly rising.

    Raises:
        PositionError: if n or limit is no whole number of at least 1, or limit is below n.

    Example:
        >>> ids = randomized(4, 2048, generator=torch.Generator().manual_seed(0))
        >>> bool((ids.diff() > 0).all()), ids.shape
        (True, torch.Size([4]))

    Reference:
        Ruoss et al. (arXiv 2305.16843), google-deepmind/randomized_positional_encodings.
    """
    check_counts(n=n, limit=limit)
    if limit < n:
        raise PositionError(
            f"limit is {limit} and n {n}; at least n different ids are required. Raise limit, 2048 is usual."
        )
    drawn = torch.randperm(limit, generator=generator, device=generator.device)[:n]
    return drawn.sort().values


@dataclass(frozen=True, slots=True, eq=False)
class PoseDraw:
    """A training text in two parts, the second as if it stood further on.

    Args:
        ids: `[n]` int64 position ids, one jump in them.
        tokens: `[n]` int64 places in the longer text that the two parts are taken from.
    """

    ids: Tensor
    tokens: Tensor


@checked
def skipped(n: int, first: int, skip: int) -> Tensor:
    """Return ids 0, 1, ... with one jump: those after the first part are larger by `skip`.

    Args:
        n: tokens.
        first: tokens before the jump, 0 to n.
        skip: at least 0.

    Returns:
        `[n]` int64.

    Raises:
        PositionError: if first or skip is out of range, or the last id beyond 2**63 - 1.

    Example:
        >>> skipped(8, 3, 10)
        tensor([ 0,  1,  2, 13, 14, 15, 16, 17])
    """
    check_counts(n=n)
    if not 0 <= first <= n or skip < 0:
        raise PositionError(
            f"first is {first} and skip {skip} for {n} tokens; 0 <= first <= n and a skip of at least 0 are required."
        )
    if n + skip > LARGEST:
        raise PositionError(
            f"skip is {skip} for {n} tokens; ids up to 2**63 - 1 can be held. Make it smaller."
        )
    places = torch.arange(n)
    return places + torch.where(places >= first, skip, 0)


@checked
def pose(
    n: int, target: int, *, generator: torch.Generator, text_tokens: int | None = None
) -> PoseDraw:
    """Return ids and tokens of PoSE: a short text that is trained on the distances of a long one.

    The first part has 1 to (n + 1) // 2 tokens and keeps its ids; those of the rest move on by one skip, 0 to
    target - n. Where the text is longer than n, the second part is taken from a later place of it.

    Args:
        n: tokens of the training text.
        target: positions that the model is to learn, at least n.
        generator: source of the draws.
        text_tokens: tokens of the text to cut from, at least n; n when None.

    Raises:
        PositionError: if target or text_tokens is below n.

    Example:
        >>> draw = pose(8, 64, generator=torch.Generator().manual_seed(0))
        >>> int((draw.ids.diff() != 1).sum()) <= 1, int(draw.ids.max()) < 64
        (True, True)

    Reference:
        PoSE (arXiv 2309.10400), dwzhu-pku/PoSE src/train_pose.py, in the revision whose first part is not moved.
    """
    check_counts(n=n, target=target)
    text = n if text_tokens is None else text_tokens
    if target < n or text < n:
        raise PositionError(
            f"target is {target} and text_tokens {text} for n {n}; at least n of both are required. Cut the text "
            "shorter, or raise target."
        )
    first = drawn(1, (n + 1) // 2, generator)
    end = drawn(n, text, generator)
    ids = skipped(n, first, drawn(0, target - n, generator))
    return PoseDraw(ids=ids, tokens=skipped(n, first, end - n))


def check_ids(ids: Tensor, name: str) -> None:
    """Refuse position ids that are no whole numbers: halves have no odd numbers beyond 256.

    Raises:
        PositionError: naming the argument and its dtype.
    """
    given: Any = ids
    is_whole = isinstance(given, Tensor) and given.dtype in _WHOLE
    if not is_whole or given.ndim < 1:
        what = (
            f"{given.dtype} of shape {tuple(given.shape)}" if isinstance(given, Tensor) else given
        )
        raise PositionError(
            f"{name} is {what}; a tensor [..., n] of whole numbers is required. Make it with dtype=torch.int64; "
            "bfloat16 has no odd numbers beyond 256."
        )


def check_documents(documents: Tensor) -> None:
    """Refuse documents that are no whole numbers; see `check_ids`."""
    check_ids(documents, "documents")


def check_alike(documents: Tensor, ids: Tensor) -> None:
    """Refuse documents that are no whole numbers, or not one a token."""
    check_documents(documents)
    if documents.shape != ids.shape:
        raise PositionError(
            f"documents has shape {tuple(documents.shape)} and ids {tuple(ids.shape)}; one document a token is "
            "required. Pass the documents of this row."
        )


def drawn(low: int, high: int, generator: torch.Generator) -> int:
    """Return a whole number, both ends possible."""
    return int(
        torch.randint(low, high + 1, (), generator=generator, device=generator.device).item()
    )
