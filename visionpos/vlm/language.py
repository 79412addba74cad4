"""Language: the rotary layout of a language model, which axis of the ids drives which channel pair."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from visionpos.errors import ConfigError, PositionError
from visionpos.geometry.scaling import FixedScaling
from visionpos.geometry.sections import clamped_axes, section_axes

SectionOrder = Literal["contiguous", "interleaved", "alternating", "greedy", "pattern", "heads"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageSpec:
    """The rotary layout of the language model.

    Args:
        head_dim: channels of a head.
        theta: ladder base.
        sections: channel pairs an axis, in the order of the ids' axes; for "pattern" the repeated axes themselves, for
            "heads" key-value heads an axis.
        order: which axis drives which pair. "contiguous": a run of pairs each (Qwen2-VL, GLM, XD-RoPE). "interleaved":
            in turns, the first axis takes what is left (Qwen3-VL). "alternating": all but the first in turns on the
            fast pairs, the first on the slow rest (ERNIE, VideoRoPE). "greedy": whichever axis lags behind its share,
            none twice running, the last pair the first axis's (openPangu). "pattern": a list of axes, repeated
            (MM-RoPE). "heads": all pairs of a key-value head belong to one axis, heads left over do not turn (MHRoPE).
        pairing: which two channels turn together.
        rotary_dim: channels that turn; all of them where the YAML says nothing.
        scaling: how the ladder is stretched, the same at every length; None for not at all.
        still: axes whose pairs do not turn (HoPE: time).
        kv_heads: key-value heads, for order "heads".

    Raises:
        ConfigError: if sections do not fill the pairs; the message says what the checkpoint would really get.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    head_dim: int
    theta: float
    sections: tuple[int, ...]
    order: SectionOrder
    pairing: Literal["half", "adjacent"]
    rotary_dim: int | None = None
    scaling: FixedScaling | None = None
    still: tuple[int, ...] = ()
    kv_heads: int | None = None

    def __post_init__(self) -> None:
        rotary = self.head_dim if self.rotary_dim is None else self.rotary_dim
        if rotary < 2 or rotary % 2 or rotary > self.head_dim:
            raise ConfigError(
                f"rotary_dim is {rotary} and head_dim {self.head_dim}; an even number of channels, 2 to head_dim, is "
                "required. Read both from the checkpoint."
            )
        if (self.order == "heads") != (self.kv_heads is not None):
            raise ConfigError(
                f"kv_heads is {self.kv_heads} with order {self.order!r}; order 'heads' needs it and no other takes it."
            )
        if not set(self.still) <= set(range(self.axes)):
            raise ConfigError(
                f"still is {self.still} and there are {self.axes} axes; numbers from 0 are required."
            )
        if self.order == "heads":
            if not self.sections or sum(self.sections) > (self.kv_heads or 0):
                raise ConfigError(
                    f"sections {self.sections} sum to {sum(self.sections)} and kv_heads is {self.kv_heads}; at most so "
                    "many heads can be given to axes. Read both from the checkpoint."
                )
        elif self.order != "pattern" and sum(self.sections) != self.pairs:
            raise ConfigError(
                f"sections {self.sections} sum to {sum(self.sections)} and rotary_dim / 2 is {self.pairs}; the two "
                f"must be equal. {self._really()}"
            )
        axis_table(self)

    def _really(self) -> str:
        """Return what a model makes of sections that do not fill its pairs."""
        if self.order != "interleaved":
            return "The checkpoint's own code raises; correct head_dim, rotary_dim or sections."
        counts = clamped_axes(self.sections, self.pairs).bincount(minlength=self.axes)
        return (
            f"The checkpoint would really get {tuple(counts.tolist())}; write that to keep it, or set rotary_dim to "
            f"{2 * sum(self.sections)}."
        )

    @property
    def pairs(self) -> int:
        """Return the number of channel pairs that turn."""
        return (self.head_dim if self.rotary_dim is None else self.rotary_dim) // 2

    @property
    def axes(self) -> int:
        """Return the number of axes."""
        return max(self.sections, default=-1) + 1 if self.order == "pattern" else len(self.sections)


def axis_table(language: LanguageSpec) -> Tensor:
    """Return the axis that drives each pair, `[pairs]` int64; `[kv_heads]` for order "heads", -1 where none does.

    Every layout is this one table; cos and sin come of one gather by it.

    Raises:
        PositionError: if the sections cannot be laid out so; the message says what the axes would really get.

    Example:
        >>> spec = LanguageSpec(
        ...     head_dim=12, theta=1e4, sections=(2, 2, 2), order="alternating", pairing="half"
        ... )
        >>> axis_table(spec).tolist()
        [1, 2, 1, 2, 0, 0]
    """
    sections, pairs = language.sections, language.pairs
    if language.order == "contiguous" or language.order == "interleaved":
        return section_axes(sections, order=language.order)
    if language.order == "pattern":
        return torch.tensor(sections)[torch.arange(pairs) % len(sections)]
    if language.order == "heads":
        owner = [axis for axis, heads in enumerate(sections) for _ in range(heads)]
        return torch.tensor(owner + [-1] * ((language.kv_heads or 0) - len(owner)))
    owner = _greedy(list(sections)) if language.order == "greedy" else _alternating(list(sections))
    real = tuple(owner.count(axis) for axis in range(len(sections)))
    if real != tuple(sections):
        raise PositionError(
            f"sections {sections} cannot be laid out {language.order!r} over {pairs} pairs; the axes would get {real}. "
            "Give all axes but the first the same number."
        )
    return torch.tensor(owner)


def _alternating(sections: list[int]) -> list[int]:
    """Return owners: axes from the second on take turns up to their count, the first takes the rest."""
    turns = len(sections) - 1
    owner = [0] * sum(sections)
    for axis, count in enumerate(sections[1:]):
        for pair in range(axis, min(turns * count, len(owner)), turns):
            owner[pair] = axis + 1
    return owner


def _greedy(sections: list[int]) -> list[int]:
    """Return owners: the axis that lags furthest behind its share, never the last one again if another is left."""
    shares = [sections[0] - 1, *sections[1:]]
    placed = [0] * len(sections)
    owner: list[int] = []
    for _ in range(sum(shares)):
        left = [axis for axis, share in enumerate(shares) if placed[axis] < share]
        fresh = [axis for axis in left if not owner or axis != owner[-1]] or left
        axis = min(fresh, key=lambda one: (placed[one] / shares[one], one))
        placed[axis] += 1
        owner.append(axis)
    return [*owner, 0]
