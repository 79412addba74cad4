"""Streaming: which cached tokens stay, which ids they have as slots, and cached keys turned to new ids.

StreamingLLM keeps the first tokens, the sinks, and the recent ones, and numbers them by their slot in the cache, not by
their place in the text. A cache of keys before rotation turns them by slot; a cache of turned keys is mended in place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from visionpos.errors import PositionError
from visionpos.geometry.arguments import checked
from visionpos.geometry.fields import check_fields
from visionpos.geometry.ranges import check_counts, is_integer
from visionpos.geometry.rotation import Rotation

Turn = Callable[[Tensor], Rotation]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sinks:
    """A cache of the first tokens and the recent ones.

    Args:
        sinks: first tokens that stay for good, at least 0; 4 in the paper.
        window: recent tokens that stay, at least 1.

    Raises:
        PositionError: if a count is out of range.

    Example:
        >>> Sinks(sinks=4, window=3).kept(9).tolist()
        [0, 1, 2, 3, 6, 7, 8]

    Reference:
        StreamingLLM (arXiv 2309.17453), mit-han-lab/streaming-llm kv_cache.py.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    sinks: int = 4
    window: int

    def __post_init__(self) -> None:
        check_fields(self)
        check_counts(window=self.window)
        if self.sinks < 0:
            raise PositionError(
                f"sinks is {self.sinks}; at least 0 first tokens are required. 4 are usual, 0 keeps recent ones alone."
            )

    @property
    def size(self) -> int:
        """Return the most tokens that the cache holds."""
        return self.sinks + self.window

    def kept(self, length: int, coming: int = 0, *, device: torch.device | None = None) -> Tensor:
        """Return which cached tokens stay, `[kept]` int64 in their order; their slots are 0, 1, ....

        Args:
            length: tokens in the cache.
            coming: tokens about to be added, for which room is made.
            device: where to build.

        Raises:
            PositionError: if more tokens come than the window holds.
        """
        if not (is_integer(length) and is_integer(coming)) or length < 0 or coming < 0:
            raise PositionError(
                f"length is {length!r} and coming {coming!r}; token counts of at least 0 are required. Pass those of "
                "the cache and of the next piece."
            )
        if coming > self.window:
            raise PositionError(
                f"coming is {coming} and window {self.window}; at most a window of tokens can be added at once. Feed "
                "the text in pieces."
            )
        if length + coming <= self.size:
            return torch.arange(length, device=device)
        first = max(length - (self.window - coming), self.sinks)
        sinks = torch.arange(min(self.sinks, length), device=device)
        return torch.cat([sinks, torch.arange(first, length, device=device)])


@checked
def turned_again(
    keys: Tensor, old_ids: Tensor, new_ids: Tensor, turn: Turn, *, old_turn: Turn | None = None
) -> Tensor:
    """Return cached keys, turned at old ids, as if they had been turned at new ids.

    The turn between the two is formed from both rotations, so a gain of cos and sin is kept once, and a cache filled
    under another ladder (LongRoPE's short list, a dynamic base) comes out right as well.

    Args:
        keys: `[b, kv_heads, m, head_dim]`, not changed.
        old_ids: `[m]` or `[b, m]`, at which they were turned.
        new_ids: like old_ids, such as the slots of a cache.
        turn: ids -> Rotation, such as `RopeTurn`, or the `rotation` of a language model.
        old_turn: what they were turned with; the same when None.

    Returns:
        Shape and dtype of keys.

    Raises:
        PositionError: if the two rotations do not fit each other or the keys.

    Example:
        >>> from visionpos.geometry.rope_turn import RopeTurn
        >>> from visionpos.geometry.rope_params import RopeParams
        >>> turn = RopeTurn(rope=RopeParams(theta=1e4), head_dim=8)
        >>> keys, old, slots = torch.ones(1, 1, 2, 8), torch.tensor([0, 9]), torch.tensor([0, 1])
        >>> again = turned_again(turn(old).apply(keys), old, slots, turn)
        >>> torch.allclose(again, turn(slots).apply(keys), atol=1e-6)
        True
    """
    old, new = (turn if old_turn is None else old_turn)(old_ids), turn(new_ids)
    if old.pairing != new.pairing or old.cos.shape != new.cos.shape:
        raise PositionError(
            f"old_turn gives {old.pairing!r} {tuple(old.cos.shape)} and turn {new.pairing!r} {tuple(new.cos.shape)}; "
            "they must agree. Pass one old id a new id, and ladders of one model."
        )
    if new.pairing == "adjacent_tiled":
        raise PositionError(
            "pairing is 'adjacent_tiled', which is no rotation; turned keys cannot be turned back. Cache them before "
            "the turn."
        )
    size = old.cos.square() + old.sin.square()  # of the old gain, which is taken out
    cos = (new.cos * old.cos + new.sin * old.sin) / size
    sin = (new.sin * old.cos - new.cos * old.sin) / size
    return Rotation(cos, sin, new.pairing, new.axes).apply(keys)
