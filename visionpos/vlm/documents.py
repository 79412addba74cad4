"""Documents: who may attend to whom in packed rows, in the three forms that attention kernels take.

A tensor `[rows, n]` with the document of every place enters, -1 for padding, every document in one piece; cumulative
lengths, a dense mask or a FlexAttention block mask leaves. Padding is a document like another: it sees padding of its
row alone, so that no softmax is empty and no output NaN, in any kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from visionpos.errors import PositionError
from visionpos.geometry.grid import is_whole

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn.attention.flex_attention import BlockMask


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
    from torch.nn.attention.flex_attention import BlockMask

    if not is_whole(block):
        raise PositionError(
            f"block is {block!r}; a whole number of tokens, at least 1, is required. FlexAttention compiles 128."
        )
    n = documents.shape[-1]
    turn = _begins(documents).cumsum(-1)  # documents of a row counted from its left
    firsts = torch.arange(0, n, block, device=documents.device)
    lasts = (firsts + block - 1).clamp(max=n - 1)
    low, high = turn[:, firsts], turn[:, lasts]  # [rows, blocks]
    # Documents lie in one piece, so two blocks share one exactly when their ranges meet.
    meets = (low.unsqueeze(-1) <= high.unsqueeze(-2)) & (low.unsqueeze(-2) <= high.unsqueeze(-1))
    pure = (low == high) & (firsts + block <= n)
    full = meets & pure.unsqueeze(-1) & pure.unsqueeze(-2)
    if causal:
        meets = meets & (firsts <= lasts.unsqueeze(-1))  # [queries, keys]: some key is not later
        full = full & (lasts <= firsts.unsqueeze(-1))  # no key is later

    def same_document(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return documents[row, query] == documents[row, key]

    def same_and_earlier(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return same_document(row, head, query, key) & (query >= key)

    return BlockMask.from_kv_blocks(
        *_listed(meets & ~full),
        *_listed(full),
        BLOCK_SIZE=block,
        mask_mod=same_and_earlier if causal else same_document,
        seq_lengths=(n, n),
    )


def _begins(documents: Tensor) -> Tensor:
    """Return `[rows, n]` bool, True on the first place of every piece."""
    first = torch.ones_like(documents[:, :1], dtype=torch.bool)
    return torch.cat([first, documents[:, 1:] != documents[:, :-1]], dim=-1)


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many key blocks each query block sees, `[rows, 1, blocks]`, and which, those first."""
    counted = blocks.sum(-1, dtype=torch.int32).unsqueeze(1)
    order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return counted, order.to(torch.int32).unsqueeze(1)
