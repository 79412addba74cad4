"""Layers: which layer of a language model turns by which ladder, sees how far, and scales its queries how.

A frozen plan, read from configs/language/*.yaml: kinds of layers and the pattern in which they follow each other.
`layer_views` makes rotations, gains and masks of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from visionpos.errors import ConfigError, PositionError
from visionpos.geometry.fields import check_fields
from visionpos.geometry.latent import Latent
from visionpos.geometry.ranges import check_counts, check_layer
from visionpos.geometry.rope_params import RopeParams
from visionpos.geometry.scaling import Scaling
from visionpos.geometry.sequence import check_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Temperature:
    """Queries grow with their position: by 1 + scale * ln(1 + floor((position + shift) / every)).

    Args:
        scale: 0.1 in Llama 4 and Ministral 3.
        every: positions of a step, at least 1.
        shift: added to the position first: 1 in Llama 4, 0 in Ministral 3.

    Raises:
        PositionError: if every is below 1 or shift below 0.

    Example:
        >>> Temperature(every=8192, shift=1).gains(torch.tensor([8190, 8191]))
        tensor([1.0000, 1.0693])

    Reference:
        Scalable softmax (arXiv 2501.19399); transformers modeling_llama4, modeling_ministral3. Deliberate difference
        from modeling_llama4, which counts places of the row: positions are ids, so packed documents are as alone.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    scale: float = 0.1
    every: int
    shift: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        check_counts(every=self.every)
        if self.shift < 0 or self.scale < 0:
            raise PositionError(
                f"shift is {self.shift} and scale {self.scale}; both must be at least 0. Read them from the config."
            )

    def gains(self, ids: Tensor) -> Tensor:
        """Return what queries at position ids are multiplied by, float32 in the shape of ids."""
        check_ids(ids, "ids")
        # Whole numbers: float32 rounds beyond 2**24. Padding may stand before 0.
        steps = ((ids.to(torch.int64) + self.shift) // self.every).clamp(min=0)
        return 1 + self.scale * torch.log1p(steps.float())


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """What layers of one kind do.

    Args:
        name: such as "sliding" or "full".
        theta: ladder base; None for no rotation (NoPE).
        share: share of a head's channels that turn, by a ladder of their own.
        scaling: how the ladder is stretched; None for not at all.
        window: tokens that a query sees, itself among them; None for all before it.
        chunk: tokens of a chunk, counted from the beginning of a document, within which a query sees; None for all.
        temperature: growth of queries with their position; None for none.
        norm: "l2" where queries and keys are normed after the turn (Llama 4).
        head_dim: channels of a head, where they differ from the plan's (Gemma 4).

    Raises:
        ConfigError: if a number is out of range, or rotation fields stand without theta.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    name: str
    theta: float | None = None
    share: float = 1.0
    scaling: Scaling | None = None
    window: int | None = None
    chunk: int | None = None
    temperature: Temperature | None = None
    norm: Literal["l2"] | None = None
    head_dim: int | None = None

    def __post_init__(self) -> None:
        _checked_fields(self)
        for field in ("window", "chunk", "head_dim"):
            count = getattr(self, field)
            if count is not None and count < 1:
                raise ConfigError(
                    f"{field} of layer kind {self.name!r} is {count}; at least 1 is required. Leave it out for none."
                )
        if self.theta is None and (self.scaling is not None or self.share != 1):
            raise ConfigError(
                f"layer kind {self.name!r} has scaling or share and no theta; without a ladder nothing turns. Add "
                "theta, or leave both out."
            )
        _ = self.rope  # theta and share are held against their ranges

    @property
    def rope(self) -> RopeParams | None:
        """Return the ladder and its stretching; None where nothing turns."""
        if self.theta is None:
            return None
        return RopeParams(theta=self.theta, share=self.share, scaling=self.scaling)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """The layers of a language model.

    Args:
        layers: how many there are.
        head_dim: channels of a head that are held against each other; with `latent` those that turn.
        kinds: the kinds of layers.
        pattern: names of kinds, repeated over the layers from the first on.
        last: name of the kind of the last layer, whatever the pattern says (Gemma 4).
        pairing: which two channels turn together.
        scale_dim: the scale of q . k is 1 / sqrt of it; None for the channels of a head (Gemma's
            query_pre_attn_scalar).
        latent: sizes of latent attention, in which part of a head turns (DeepSeek).

    Raises:
        ConfigError: if the pattern names no kind, or a number is out of range.

    Example:
        >>> local, full = LayerKind(name="sliding", theta=1e4, window=4096), LayerKind(name="full")
        >>> plan = LayerPlan(
        ...     layers=5, head_dim=128, kinds=(local, full), pattern=("sliding", "sliding", "full")
        ... )
        >>> plan.names
        ('sliding', 'sliding', 'full', 'sliding', 'sliding')
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    layers: int
    head_dim: int
    kinds: tuple[LayerKind, ...]
    pattern: tuple[str, ...]
    last: str | None = None
    pairing: Literal["half", "adjacent"] = "half"
    scale_dim: int | None = None
    latent: Latent | None = None

    def __post_init__(self) -> None:
        _checked_fields(self)
        names = [kind.name for kind in self.kinds]
        used = {*self.pattern, *([] if self.last is None else [self.last])}
        if not self.pattern or not used <= set(names) or len(set(names)) < len(names):
            raise ConfigError(
                f"pattern is {self.pattern}, last {self.last!r} and kinds are {tuple(names)}; every name must be one "
                "kind, and every kind have its own name. Correct the names."
            )
        if self.layers < 1 or self.head_dim < 2 or (self.scale_dim or 1) < 1:
            raise ConfigError(
                f"layers is {self.layers}, head_dim {self.head_dim} and scale_dim {self.scale_dim}; at least 1, 2 and "
                "1 are required. Read them from the config."
            )
        if self.latent is not None and self.latent.rope_dim != self.head_dim:
            raise ConfigError(
                f"head_dim is {self.head_dim} and rope_dim of latent {self.latent.rope_dim}; with latent attention "
                "both are the channels that turn. Write the same number."
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Return the name of the kind of every layer."""
        names = [self.pattern[layer % len(self.pattern)] for layer in range(self.layers)]
        return (*names[:-1], names[-1] if self.last is None else self.last)

    def kind(self, layer: int) -> LayerKind:
        """Return the kind of a layer, counted from 0; negative numbers count from the end.

        Raises:
            PositionError: if there is no such layer.
        """
        check_layer(layer, self.layers)
        name = self.names[layer]
        return next(kind for kind in self.kinds if kind.name == name)

    def head_dim_of(self, layer: int) -> int:
        """Return the channels of a head of a layer."""
        return self.kind(layer).head_dim or self.head_dim

    def softmax_scale(self, layer: int) -> float:
        """Return what q . k of a layer is multiplied by, the gain of YaRN's mscale_all_dim in it."""
        width = self.head_dim_of(layer) if self.latent is None else self.latent.width
        rope = self.kind(layer).rope
        gain = getattr(None if rope is None else rope.scaling, "softmax_gain", 1.0)
        return float((self.scale_dim or width) ** -0.5 * gain)


def _checked_fields(spec: Any) -> None:
    """Refuse fields of another kind, as an error of configuration."""
    try:
        check_fields(spec)
    except PositionError as error:
        raise ConfigError(str(error)) from None
