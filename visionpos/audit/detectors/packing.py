"""Detectors of rows that hold several documents, and of pictures whose tiles all begin at the origin."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from visionpos.audit.detectors.finding import Check, judged
from visionpos.audit.metrics import output_change
from visionpos.audit.result import Found
from visionpos.errors import PositionError

RESET = 0.0
PACKED = 5e-6
RESTART = 0.0
BLIND = 1e-4


def missing_reset(
    ids: Tensor, starts: Sequence[int] | Tensor, *, own: Sequence[Tensor] | None = None
) -> Found:
    """Return whether positions begin anew with every packed document.

    For a purely relative scheme with a block mask a missing reset is invisible in outputs: ids are looked at.

    Args:
        ids: `[n]` or `[axes, n]` of a packed row.
        starts: where documents begin; a closing entry n, as in `cu_seqlens`, is allowed.
        own: ids of every document alone, `[axes, length]`; when None each is to begin as the first does.

    Raises:
        PositionError: if starts lie outside the row, or `own` has another number of documents.
    """
    rows = ids.unsqueeze(0) if ids.ndim == 1 else ids
    begins = [int(start) for start in starts if int(start) < rows.shape[-1]]
    if not begins or min(begins) < 0:
        raise PositionError(
            f"starts are {list(starts)} for a row of {rows.shape[-1]}; places inside it are required. Pass cu_seqlens."
        )
    if own is None:
        off = [float((rows[:, start] - rows[:, begins[0]]).abs().max()) for start in begins]
    else:
        if len(own) != len(begins):
            raise PositionError(
                f"own has {len(own)} documents and starts {len(begins)}; one each is required."
            )
        alone = [one.unsqueeze(0) if one.ndim == 1 else one for one in own]
        off = [
            float((rows[:, start : start + one.shape[-1]] - one).abs().max())
            if one.numel()
            else 0.0
            for start, one in zip(begins, alone, strict=True)
        ]
    worst = max(range(len(off)), key=off.__getitem__)
    check = Check(
        value=off[worst],
        threshold=RESET,
        wrong=f"document {worst} has ids {off[worst]:g} away from those it has alone",
        remedy="Begin positions anew at every document: build ids before packing, and carry document numbers.",
    )
    return judged("missing_reset", [check], f"{len(off)} documents begin anew")


def packed_outputs(together: Sequence[Tensor], alone: Sequence[Tensor]) -> Found:
    """Return whether documents in one row give what they give alone, in float32 or float64.

    Args:
        together: outputs of each document, cut out of the packed row, `[n, d]`.
        alone: outputs of each document by itself.
    """
    changes = [output_change(one, other) for one, other in zip(alone, together, strict=True)]
    worst = max(range(len(changes)), key=changes.__getitem__)
    check = Check(
        value=changes[worst],
        threshold=PACKED,
        wrong=f"document {worst} gives outputs {changes[worst]:.2g} away from those it gives alone",
        remedy="Mask attention between documents and begin positions anew with each.",
    )
    return judged("missing_reset", [check], "documents give what they give alone")


def tile_restart(ids: Tensor) -> Found:
    """Return whether two tokens of one picture have the same position, as where every tile begins at the origin.

    Args:
        ids: `[n, axes]`, of one picture, in any numbering.
    """
    count = ids.shape[0]
    unique = len(torch.unique(ids, dim=0)) if count else 0
    check = Check(
        value=1.0 - unique / count if count else 0.0,
        threshold=RESTART,
        wrong=f"{count} tokens of a picture have {unique} different positions",
        remedy="Number cells over the whole picture, or tell tiles apart by another axis or by tile markers.",
    )
    return judged("tile_restart", [check], f"all {count} tokens have positions of their own")


def tile_swap(encode: Callable[[Tensor], Tensor], tokens: Tensor, order: Tensor) -> Found:
    """Return whether an encoder is blind to where tiles lie: contents swap places, outputs are swapped back.

    Args:
        encode: from tokens `[n, d]` to outputs `[n, d]`, float32 or float64, in eval mode.
        tokens: contents.
        order: `[n]`, which token stands at each place after the swap.
    """
    before, after = encode(tokens), encode(tokens[order])
    seen = output_change(before, after[torch.argsort(order)])
    check = Check(
        value=seen,
        threshold=BLIND,
        wrong=f"outputs follow swapped tiles to {seen:.2g}: the encoder cannot tell where a tile lies",
        remedy="Give tokens positions over the whole picture before they meet.",
        least=True,
    )
    return judged("tile_restart", [check], f"a swap of tiles changes outputs by {seen:.2g}")
