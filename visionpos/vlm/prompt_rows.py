"""Prompt rows: prompts laid end to end in one row, each with positions of its own.

Streams, or ids with their tokens and types, enter; `PackedIds` leaves. A row is packed because `pack` made it: nothing
here or later guesses it from the number of rows or from ids that restart.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from visionpos.errors import PositionError
from visionpos.geometry.arguments import checked
from visionpos.geometry.grid import is_whole
from visionpos.vlm.batches import check_rows
from visionpos.vlm.documents import cumulative_lengths, pieces_of
from visionpos.vlm.families import Family
from visionpos.vlm.ids import PositionIds
from visionpos.vlm.packed_ids import PackedIds
from visionpos.vlm.runs import run, spread
from visionpos.vlm.stream import TokenStream
from visionpos.vlm.tokens import Tokenizer


@checked
def pack(
    streams: Sequence[TokenStream],
    *,
    family: Family,
    tokenizer: Tokenizer | None = None,
    pad_token: int = 0,
    pad_to_multiple: int = 1,
    pad_each_to: int = 1,
    length: int | None = None,
) -> PackedIds:
    """Return streams packed into one row: ids that restart, documents, boundaries, types and tokens.

    Args:
        streams: from `family.stream`, in the order they shall lie in; `bin_lengths` says which go together.
        family: whose position rule places them.
        tokenizer: gives token ids; `tokens` is None without one.
        pad_token: token id of padding.
        pad_to_multiple: the row is padded at its end to a multiple of this, in tokens, ids and types alike.
        pad_each_to: every stream is padded at its end to a multiple of this: 2 x ranks to shard documents one by one.
        length: places of the row; as many as needed when None.

    Raises:
        PositionError: if there are no streams, one is none, a number is out of range, or they do not fit into length.

    Example:
        >>> from visionpos.vlm import Image, Text, family
        >>> fam = family("qwen2_vl")
        >>> row = pack(
        ...     [fam.stream([Text(tokens=n), Image((56, 56))]) for n in (1, 2)],
        ...     family=fam,
        ...     pad_to_multiple=8,
        ... )
        >>> row.ids[0].tolist()
        [0, 1, 2, 2, 2, 2, 4, 0, 1, 2, 3, 3, 3, 3, 5, 1]
        >>> row.cu_seqlens.tolist(), row.max_seqlen, row.length
        ([0, 7, 15], 8, 16)
    """
    rule = family.spec.rule
    return pack_rows(
        [family.position_ids(stream) for stream in streams],
        types=[stream.modality for stream in streams],
        tokens=None if tokenizer is None else [one.token_ids(tokenizer) for one in streams],
        pad_id=0 if rule is None else rule.pad_id,
        pad_token=pad_token,
        pad_to_multiple=pad_to_multiple,
        pad_each_to=pad_each_to,
        length=length,
    )


@checked
def pack_rows(
    rows: Sequence[PositionIds],
    *,
    types: Sequence[Tensor] | None = None,
    tokens: Sequence[Tensor] | None = None,
    pad_id: int = 0,
    pad_token: int = 0,
    pad_to_multiple: int = 1,
    pad_each_to: int = 1,
    length: int | None = None,
) -> PackedIds:
    """Return prompts packed into one row, from their ids.

    Args:
        rows: `[axes, n]` each, without padding.
        types: `[n]` each, 0 text, 1 image, 2 video.
        tokens: `[n]` each, vocabulary ids.
        pad_id: id of padding on every axis, as in the rule.
        pad_token: token id of padding.
        pad_to_multiple: the row is padded at its end to a multiple of this.
        pad_each_to: every prompt is padded at its end to a multiple of this.
        length: places of the row; as many as needed when None.

    Raises:
        PositionError: if there are none, one is a batch or padded, types or tokens are not one entry a token, a number
            is out of range, or they do not fit into length.

    Example:
        >>> one, two = (
        ...     PositionIds(torch.arange(n).expand(3, -1), torch.tensor(n), torch.tensor(0))
        ...     for n in (2, 3)
        ... )
        >>> row = pack_rows([one, two], pad_each_to=4)
        >>> row.ids[0].tolist(), row.text.tolist()
        ([0, 1, 0, 0, 0, 1, 2, 0], [0, 1, 0, 1, 0, 1, 2, 0])
        >>> row.cu_seqlens.tolist(), row.cu_seqlens_padded.tolist(), row.max_seqlen
        ([0, 2, 5], [0, 4, 8], 3)
    """
    check_rows(rows)
    _check_numbers(pad_to_multiple=pad_to_multiple, pad_each_to=pad_each_to)
    counts = torch.tensor([row.ids.shape[-1] for row in rows])
    room = -(-counts // pad_each_to) * pad_each_to
    total = _row_length(int(room.sum()), pad_to_multiple, length)
    starts = F.pad(room.cumsum(0), (1, 0))
    starts[-1] = total  # padding at the end belongs to the last
    documents = torch.full((total,), -1)
    documents[run(starts[:-1], counts)] = spread(torch.arange(len(rows)), counts)
    begins = cumulative_lengths(pieces_of(documents[None]))[0].long()
    device = rows[0].ids.device
    frame = PackedIds(
        ids=rows[0].ids,
        text=run(torch.zeros_like(begins[1:]), begins.diff()),
        documents=documents,
        cu_seqlens=F.pad(counts.cumsum(0), (1, 0)).int(),
        cu_seqlens_padded=starts.int(),
        max_seqlen=int(counts.max()),
    ).to(device)
    return PackedIds(
        ids=frame.fill([row.ids for row in rows], pad_id),
        text=frame.text,
        documents=frame.documents,
        cu_seqlens=frame.cu_seqlens,
        cu_seqlens_padded=frame.cu_seqlens_padded,
        max_seqlen=frame.max_seqlen,
        types=_filled(frame, types, 0, "types"),
        tokens=_filled(frame, tokens, pad_token, "tokens"),
    )


def _filled(
    frame: PackedIds, parts: Sequence[Tensor] | None, value: int, name: str
) -> Tensor | None:
    """Return types or tokens in the row."""
    if parts is None:
        return None
    shapes = [tuple(part.shape) for part in parts]
    wanted = [(count,) for count in frame.cu_seqlens.diff().tolist()]
    if shapes != wanted:
        raise PositionError(
            f"{name} have shapes {shapes} and the prompts {wanted} tokens; one entry a token is required. Pass them as "
            "they were placed, without padding."
        )
    return frame.fill([part.to(frame.ids.device) for part in parts], value)


def _check_numbers(**numbers: int) -> None:
    for name, value in numbers.items():
        if not is_whole(value):
            raise PositionError(
                f"{name} is {value!r}; a whole number of at least 1 is required. 1 adds no padding."
            )


def _row_length(needed: int, multiple: int, length: int | None) -> int:
    """Return the places of the row."""
    if length is None:
        return -(-needed // multiple) * multiple
    if not is_whole(length) or length < needed or length % multiple:
        raise PositionError(
            f"length is {length!r} and the prompts need {needed} places; at least that many, and a multiple of "
            f"{multiple}, is required. Pack fewer prompts (bin_lengths), or shorten one with truncate_stream."
        )
    return length
