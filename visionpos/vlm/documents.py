"""Documents: who may attend to whom in packed rows, in the three forms that attention kernels take.

A tensor `[rows, n]` with the document of every place enters, -1 for padding, every document in one piece; cumulative
lengths, a dense mask or a FlexAttention block mask leaves. Padding is a document like another: it sees padding of its
row alone, so that no softmax is empty and no output NaN, in any kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from visionpos.errors import PositionError
from visionpos.geometry.grid import is_whole

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

MaskRule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def cumulative_lengths(documents: Tensor) -> tuple[Tensor, int]:
    """Return the first token of every piece, closed by the number of tokens, and the longest piece.

    Args:
        documents: `[rows, n]`; a row's padding, and each row, is a piece of its own.

    Returns:
        `[pieces + 1]` int32 as varlen kernels take it, over the tokens of all rows in a line; and a length in tokens.

    Example:
        >>> cumulative_lengths(torch.tensor([[0, 0, 1], [2, -1, -1]]))
        (tensor([0, 2, 3, 4, 6], dtype=torch.int32), 2)
    """
    firsts = _begins(documents).flatten().nonzero().flatten()
    ends = F.pad(firsts, (0, 1), value=documents.numel())
    longest = int(ends.diff().max()) if len(firsts) else 0
    return ends.to(torch.int32), longest


def pieces_of(documents: Tensor) -> Tensor:
    """Return `[rows, n]` int64: pieces of a row counted from its left, for rows in which padding lies in several.

    Example:
        >>> pieces_of(torch.tensor([[5, -1, 7, -1, -1]])).tolist()
        [[0, 1, 2, 3, 3]]
    """
    return _begins(documents).cumsum(-1) - 1


def document_mask(documents: Tensor, *, causal: bool = False) -> Tensor:
    """Return `[rows, 1, n, n]` bool, True where a query may see a key; grows as n x n.

    Args:
        documents: `[rows, n]`.
        causal: hide later places.

    Example:
        >>> document_mask(torch.tensor([[0, 0, 1]]))[0, 0].int().tolist()
        [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
    """
    same = (documents.unsqueeze(-1) == documents.unsqueeze(-2)).unsqueeze(1)
    return same.tril() if causal else same


def document_blocks(documents: Tensor, block: int = 128, *, causal: bool = False) -> BlockMask:
    """Return the block mask of `document_mask`, for `flex_attention`.

    The same mask as `create_block_mask` gives for the rule "same document", but read off the first and last document
    of every block: it grows as (n / block)^2, where that one evaluates all n^2 pairs.

    Args:
        documents: `[rows, n]`.
        block: tokens a side of a block; FlexAttention's own 128, or a multiple of it for its compiled kernels.
        causal: hide later places.

    Raises:
        PositionError: if `block` is no whole number of at least 1.

    Example:
        >>> document_blocks(torch.tensor([[0, 0, 1, 1]]), block=2).to_dense().tolist()
        [[[[1, 0], [0, 1]]]]

    Reference:
        torch.nn.attention.flex_attention; attention-gym masks/document_mask.py.
    """
    turn = _begins(documents).cumsum(-1)  # documents of a row counted from its left
    tokens = Tokens(turn, torch.arange(documents.shape[-1], device=documents.device))
    return seen_blocks(tokens, tokens, block, causal=causal)


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """Some tokens of rows, on the side of queries or of keys.

    Args:
        pieces: `[rows, n]` which piece of its row each belongs to, rising along the row; `[n]` if all rows are alike.
        places: `[n]` where they stand in the row, in any order.
    """

    pieces: Tensor
    places: Tensor

    @staticmethod
    def at(places: Tensor, documents: Tensor | None) -> Tokens:
        """Return the tokens at some places of rows.

        Args:
            places: `[n]` int64.
            documents: of the whole rows, `[rows, all]` or `[all]`; None for one document without padding.

        Raises:
            PositionError: if a document lies in several pieces.
        """
        if documents is None:
            return Tokens(torch.zeros_like(places), places)
        rows = documents if documents.ndim == 2 else documents.unsqueeze(0)
        for row in rows:
            stretches = row[_begins(row[None])[0]]
            torn = stretches[stretches >= 0].unique(return_counts=True)
            if bool((torn[1] > 1).any()):
                raise PositionError(
                    f"documents hold document {int(torn[0][torn[1] > 1][0])} in several pieces; one stretch a document "
                    "is required. Pass the documents of the whole row, in its own order."
                )
        places = places.to(documents.device)
        pieces = pieces_of(rows)[:, places]
        return Tokens(pieces if documents.ndim == 2 else pieces[0], places)


def seen_mask(queries: Tokens, keys: Tokens, *, causal: bool) -> Tensor:
    """Return `[rows, 1, n, m]` bool, True where a query may see a key; rows is 1 where all rows are alike."""
    seen = queries.pieces.unsqueeze(-1) == keys.pieces.unsqueeze(-2)
    if causal:
        seen = seen & (queries.places.unsqueeze(-1) >= keys.places)
    return seen.view(-1, 1, *seen.shape[-2:])


def seen_rule(queries: Tokens, keys: Tokens, *, causal: bool) -> MaskRule:
    """Return `seen_mask` as a mask_mod of `flex_attention`; queries and keys count from 0 on either side."""
    alike = queries.pieces.ndim == 1

    def same_document(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if alike:
            return queries.pieces[query] == keys.pieces[key]
        return queries.pieces[row, query] == keys.pieces[row, key]

    def same_and_earlier(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        earlier = queries.places[query] >= keys.places[key]
        return same_document(row, head, query, key) & earlier

    return same_and_earlier if causal else same_document


def seen_blocks(queries: Tokens, keys: Tokens, block: int = 128, *, causal: bool) -> BlockMask:
    """Return the block mask of `seen_rule`, read off the first and last piece and place of every block.

    Raises:
        PositionError: if `block` is no whole number of at least 1.
    """
    from torch.nn.attention.flex_attention import BlockMask

    if not is_whole(block):
        raise PositionError(
            f"block is {block!r}; a whole number of tokens, at least 1, is required. FlexAttention compiles 128."
        )
    (low, high), (least, most) = _blocked(queries.pieces, block), _blocked(keys.pieces, block)
    low, high, least, most = low.unsqueeze(-1), high.unsqueeze(-1), least.unsqueeze(-2), most.unsqueeze(-2)  # fmt: skip
    # Documents lie in one piece, so two blocks that share one have ranges that meet.
    meets = (low <= most) & (least <= high)
    full = meets & (low == high) & (least == most)
    if causal:
        first, last = (one.unsqueeze(-1) for one in _blocked(queries.places, block))
        begins, ends = _blocked(keys.places, block)
        meets = meets & (begins <= last)  # some key is not later
        full = full & (ends <= first)  # no key is later
    sizes = len(queries.places), len(keys.places)
    whole = [
        torch.arange(blocks, device=full.device) < size // block
        for size, blocks in zip(sizes, full.shape[-2:], strict=True)
    ]
    full = full & whole[0].unsqueeze(-1) & whole[1]
    rows = (-1, *full.shape[-2:])
    return BlockMask.from_kv_blocks(
        *_listed((meets & ~full).view(rows)),
        *_listed(full.view(rows)),
        BLOCK_SIZE=block,
        mask_mod=seen_rule(queries, keys, causal=causal),
        seq_lengths=sizes,
    )


def _blocked(values: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return the least and the largest value of every block, `[..., blocks]` each."""
    n = values.shape[-1]
    blocks = -(-n // block)
    index = torch.arange(blocks * block, device=values.device).clamp(max=n - 1)
    held = values[..., index].unflatten(-1, (blocks, block))
    return held.amin(-1), held.amax(-1)


def _begins(documents: Tensor) -> Tensor:
    """Return `[rows, n]` bool, True on the first place of every piece."""
    first = torch.ones_like(documents[:, :1], dtype=torch.bool)
    return torch.cat([first, documents[:, 1:] != documents[:, :-1]], dim=-1)


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many key blocks each query block sees, `[rows, 1, blocks]`, and which, those first."""
    counted = blocks.sum(-1, dtype=torch.int32).unsqueeze(1)
    order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return counted, order.to(torch.int32).unsqueeze(1)
