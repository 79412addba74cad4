"""SelfExtend: far keys are seen at grouped distances, near keys at their own, without training.

The rule gives ids for two passes of attention; `self_extend_attention` joins them in one softmax.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from visionpos.errors import PositionError
from visionpos.geometry.arguments import checked
from visionpos.geometry.fields import check_fields
from visionpos.geometry.points import check_floats
from visionpos.geometry.ranges import check_counts
from visionpos.geometry.rotation import Rotation
from visionpos.geometry.sequence import check_alike, check_ids

Turn = Callable[..., Rotation]
BLOCK = 256  # queries whose scores are held at once


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfExtend:
    """Distances below a window as they are, those beyond by groups of ids.

    A key at distance D >= window is seen at `q // group + window - window // group - k // group`.

    Args:
        group: ids that share one position, at least 1; 1 changes nothing.
        window: distances kept as they are, at least 1.
        form: "paper" floors window / group; "code" keeps the fraction, so ids of far queries lie between two numbers.

    Raises:
        PositionError: if a number is out of range.

    Example:
        >>> rule = SelfExtend(group=4, window=8)
        >>> rule.distances(torch.tensor([20]), torch.tensor([0, 5, 12, 13])).tolist()
        [[11, 10, 8, 7]]
        >>> rule.seam, SelfExtend(group=4, window=6).seam
        ((8.0, 8.0), (6.0, 7.0))

    Reference:
        SelfExtend (arXiv 2401.01325), datamllab/LongLM self_extend_patch/Llama.py. Deliberate difference: what is near
        goes by ids, not by places in the row, so padding and packed documents count as they are alone.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    group: int
    window: int
    form: Literal["paper", "code"] = "paper"

    def __post_init__(self) -> None:
        check_fields(self)
        check_counts(group=self.group, window=self.window)

    def far_queries(self, ids: Tensor) -> Tensor:
        """Return ids of queries as far keys see them: whole numbers, or float64 in the form "code" if it needs them."""
        check_ids(ids, "ids")
        whole, rest = self.window // self.group, self.window % self.group
        grouped = ids.to(torch.int64) // self.group + self.window - whole
        return grouped if self.form == "paper" or not rest else grouped.double() - rest / self.group

    def far_keys(self, ids: Tensor) -> Tensor:
        """Return ids of keys as far queries see them."""
        check_ids(ids, "ids")
        return ids.to(torch.int64) // self.group

    def distances(self, query_ids: Tensor, key_ids: Tensor) -> Tensor:
        """Return `[..., n, m]` the distance at which every query sees every key."""
        far = self.far_queries(query_ids).unsqueeze(-1) - self.far_keys(key_ids).unsqueeze(-2)
        near = query_ids.to(torch.int64).unsqueeze(-1) - key_ids.to(torch.int64).unsqueeze(-2)
        return torch.where(near < self.window, near.to(far.dtype), far)

    @property
    def seam(self) -> tuple[float, float]:
        """Return the least and the largest distance at which a key exactly `window` behind is seen.

        Both are the window if group divides it; otherwise the paper's form jumps by one more at some queries, and the
        code's lies up to one below or above it.
        """
        whole, rest = self.window // self.group, self.window % self.group
        jump = 1 if rest else 0
        taken = whole if self.form == "paper" else self.window / self.group
        least = float(self.window + whole - taken)
        return least, least + jump

    def reach(self, trained: int) -> int:
        """Return how many positions a model of so many trained ones can see.

        Example:
            >>> SelfExtend(group=8, window=1024).reach(4096)
            25600
        """
        check_counts(trained=trained)
        if trained <= self.window:
            raise PositionError(
                f"trained is {trained} and window {self.window}; a window shorter than the trained length is required. "
                "Make it smaller."
            )
        return (trained - self.window) * self.group + self.window

    @checked
    def fits(self, length: int, trained: int, *, share: float = 0.5) -> bool:
        """Return whether a text keeps to the share of the trained length within which the authors advise to stay.

        Args:
            length: tokens of the text.
            trained: positions the model was trained on.
            share: one half to two thirds.

        Raises:
            PositionError: if a count is below 1, or share not above 0 and at most 1.
        """
        check_counts(length=length, trained=trained)
        if not 0 < share <= 1:
            raise PositionError(
                f"share is {share!r}; a number above 0 and at most 1 is required. 0.5 is usual."
            )
        return share * trained > self.window + (length - self.window) / self.group


@checked
def self_extend_attention(  # noqa: PLR0913 (tensors and rules of one attention)
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: SelfExtend,
    turn: Turn,
    ids: Tensor,
    *,
    documents: Tensor | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Return causal attention in which far keys are seen at grouped distances, `[b, heads, n, width of v]`.

    Both scores of a pair are formed, one of them is taken, and one softmax runs over the row. Scores of 256 queries
    are held at once. A query that may see no key gets zeros.

    Args:
        q: `[b, heads, n, head_dim]`, not turned: the last n of the m tokens.
        k: `[b, kv_heads, m, head_dim]`, not turned; heads a multiple of kv_heads.
        v: `[b, kv_heads, m, any width]`.
        rule: group and window.
        turn: ids -> Rotation, such as `RopeTurn`; called once, with the ids of both passes behind each other, so that
            a ladder that goes by length is one for queries and keys. With documents, (ids, documents) -> Rotation.
        ids: `[m]` or `[b, m]` whole numbers, those of the queries last; restarting with every document.
        documents: like ids, the document of every token, for packed rows: others are hidden, and ladders that go by
            length take that of each; one document a row when None.
        mask: bool, broadcasts to `[b, heads, n, m]`, True where a query may see a key: padding, documents. Later tokens
            are hidden in any case.
        scale: of q . k; 1 / sqrt(head_dim) when None.

    Returns:
        dtype of q; scores are formed in float32 or better.

    Raises:
        PositionError: if sizes do not fit, mask is no bool, or scale not finite.
    """
    for x, name in ((q, "q"), (k, "k"), (v, "v")):
        check_floats(x, name)
    _check_sizes(q, k, v, ids, mask)
    if documents is not None:
        check_alike(documents, ids)
    if scale is not None and not math.isfinite(scale):
        raise PositionError(
            f"scale is {scale}; a finite number is required. Leave it out for 1 / sqrt(head_dim)."
        )
    heads, n, m = q.shape[1], q.shape[2], k.shape[2]
    dtype, scale = q.dtype, 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    wide = torch.promote_types(torch.float32, dtype)
    q, k, v = (x.to(wide).repeat_interleave(heads // x.shape[1], 1) for x in (q, k, v))
    ids = ids.to(q.device, torch.int64)
    documents = None if documents is None else documents.to(q.device)
    last = ids[..., m - n :]
    turns = _turns(rule, turn, ids, n, documents)
    passes = [
        (own.apply(q) * scale, other.apply(k).transpose(-1, -2))
        for own, other in (turns[:2], turns[2:])
    ]
    if documents is not None:
        same = documents[..., m - n :].unsqueeze(-1) == documents.unsqueeze(-2)
        same = same if documents.ndim == 1 else same.unsqueeze(1)
        mask = same if mask is None else mask & same
    allowed = None if mask is None else mask.expand(q.shape[0], heads, n, m)
    places = torch.arange(m, device=q.device)

    def attended(rows: slice) -> Tensor:
        offsets = last[..., rows].unsqueeze(-1) - ids.unsqueeze(-2)
        is_near = (offsets if ids.ndim == 1 else offsets.unsqueeze(1)) < rule.window
        near, far = (one[:, :, rows] @ other for one, other in passes)
        seen = places <= places[m - n :][rows].unsqueeze(-1)
        seen = seen if allowed is None else seen & allowed[:, :, rows]
        blind = ~seen.any(-1, keepdim=True)  # its softmax is kept finite, for the gradient's sake
        scores = torch.where(is_near, near, far).masked_fill(~(seen | blind), -math.inf)
        return scores.softmax(-1).masked_fill(blind, 0.0) @ v

    if n <= BLOCK:  # also what keeps graphs free of a loop over a size
        return attended(slice(None)).to(dtype)
    blocks = [attended(slice(at, at + BLOCK)) for at in range(0, n, BLOCK)]
    return torch.cat(blocks, dim=2).to(dtype)


def _turns(
    rule: SelfExtend, turn: Turn, ids: Tensor, n: int, documents: Tensor | None
) -> list[Rotation]:
    """Return the turns of queries and of keys as near ones see each other, then as far ones do."""
    m = ids.shape[-1]
    last = ids[..., m - n :]
    far, first = rule.far_queries(last), ids.amin(-1, keepdim=True) if m else ids
    # Queries with nothing far keep their ids: grouped ones would make a short document longer than it is.
    far = torch.where(last - first < rule.window, last.to(far.dtype), far)
    together = torch.cat([last, ids, far, rule.far_keys(ids)], -1)
    if documents is None:
        turned = turn(together)
    else:
        own = torch.cat([documents[..., m - n :], documents], -1)
        turned = turn(together, torch.cat([own, own], -1))
    if turned.n != 2 * (n + m):
        raise PositionError(
            f"turn gives {turned.n} tokens for {2 * (n + m)} ids; one turn an id is required. Pass a function of ids, "
            "such as RopeTurn."
        )
    parts = zip(*(x.split((n, m, n, m), -2) for x in (turned.cos, turned.sin)), strict=True)
    return [Rotation(cos, sin, turned.pairing, turned.axes) for cos, sin in parts]


def _check_sizes(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, mask: Tensor | None) -> None:
    """Refuse tensors that do not fit each other."""
    check_ids(ids, "ids")
    shapes = tuple(tuple(x.shape) for x in (q, k, v))
    if any(x.ndim != 4 for x in (q, k, v)) or not _fit(q, k, v):
        raise PositionError(
            f"q, k and v have shapes {shapes[0]}, {shapes[1]} and {shapes[2]}; one batch, kv heads that divide the "
            "heads, one head_dim of q and k, one length of k and v, and no more queries than keys are required."
        )
    if ids.shape not in ((k.shape[2],), (k.shape[0], k.shape[2])):
        raise PositionError(
            f"ids have shape {tuple(ids.shape)} for keys {shapes[1]}; [m] or [b, m] is required. Pass the ids of all "
            "keys, those of the queries last."
        )
    if mask is not None and mask.dtype != torch.bool:
        raise PositionError(
            f"mask is {mask.dtype}; bool is required, True where a query may see a key. Use mask > -1 for an additive "
            "one."
        )
    wanted = (*q.shape[:3], k.shape[2])
    sides = () if mask is None else zip(mask.shape[::-1], wanted[::-1], strict=False)
    if mask is not None and (mask.ndim > 4 or any(a not in (1, b) for a, b in sides)):
        raise PositionError(
            f"mask has shape {tuple(mask.shape)}; one that broadcasts to {tuple(wanted)}, batch, heads, queries and "
            "keys, is required. Give it one row a query of this call."
        )


def _fit(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether batch, heads, lengths and widths agree."""
    alike = k.shape[:3] == v.shape[:3] and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3]
    return alike and q.shape[2] <= k.shape[2] and k.shape[1] > 0 and q.shape[1] % k.shape[1] == 0
