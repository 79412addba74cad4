"""Layout: which channels of a head turn together and by which axis, and how to move weights between layouts.

Two checkpoints with the same frequencies may differ only in the order of q and k channels. A Layout names that order;
`convert` permutes the rows of q and k weights so that scores stay the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal

import torch

from visionpos.errors import PositionError
from visionpos.geometry.bands import Spacing, pixel_freqs
from visionpos.geometry.coords import CoordSpec
from visionpos.geometry.fields import check_fields, check_kind
from visionpos.geometry.freqs import Bands, Order, axial_freqs, period_freqs
from visionpos.geometry.ranges import check_max_freq, check_periods, check_theta
from visionpos.geometry.rotation import PER_AXIS, Pairing

if TYPE_CHECKING:
    from torch import Tensor

Name = tuple[object, ...]
AngleUnit = Literal["radians", "turns"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The whole descriptor of a rotary head: the order of its channels, how fast they turn, and which tokens do.

    Args:
        head_dim: channels of a head.
        pairing: which two channels turn together; see `Rotation`.
        axis_order: axis that owns the first, second, ... share of pairs: (0, 1) is y then x, (1, 0) x then y.
        order: "contiguous" blocks of pairs an axis (split, thirds), or pairs "interleaved" between axes (alternate).
        bands: "shared" ladder on every axis, or one ladder "dealt" to the axes (odd and even steps, for two).
        rotary_dim: channels that turn, all when None; the rest keep their place at the end.
        theta: ladder base, unused with periods or max_freq.
        unit: "radians", or "turns": times 2 pi.
        periods: shortest and longest period instead of theta.
        max_freq: pixel bands instead of theta, with `spacing`.
        spacing: of pixel bands.
        coords: how tokens are numbered. `convert` does not look at it; `check_layout` does.
        prefix: leading tokens that do not turn.
        suffix: trailing tokens that do not turn.

    Raises:
        PositionError: if the channels cannot be shared out, or a word is unknown.
    """

    head_dim: int
    pairing: Pairing = "half"
    axis_order: tuple[int, ...] = (0, 1)
    order: Order = "contiguous"
    bands: Bands = "shared"
    rotary_dim: int | None = None
    theta: float = 10000.0
    unit: AngleUnit = "radians"
    periods: tuple[float, float] | None = None
    max_freq: float | None = None
    spacing: Spacing = "linear"
    coords: CoordSpec = field(default_factory=CoordSpec)
    prefix: int = 0
    suffix: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        axes = len(self.axis_order)
        if not axes or sorted(self.axis_order) != list(range(axes)):
            raise PositionError(
                f"axis_order is {self.axis_order}; a permutation of the axes is required."
            )
        self._check_speeds()
        if not 0 < self.turned <= self.head_dim or self.turned % (2 * axes):
            raise PositionError(
                f"rotary_dim is {self.turned} of head_dim {self.head_dim} for {axes} axes; a positive multiple of "
                f"{2 * axes}, at most head_dim, is required. Change num_heads, or rotate a part of the head."
            )
        if self.pairing in PER_AXIS and self.order != "contiguous":
            raise PositionError(
                f"order is {self.order!r} with pairing {self.pairing!r}; every axis needs its own run of channels. "
                "Use order='contiguous'."
            )
        if min(self.prefix, self.suffix) < 0:
            raise PositionError(
                f"prefix is {self.prefix} and suffix {self.suffix}; token counts of at least 0 are required."
            )

    def _check_speeds(self) -> None:
        """Refuse speeds that are out of range, or given together with an order that they do not know."""
        check_theta(self.theta)
        if self.periods is not None:
            check_periods(*self.periods)
        if self.max_freq is not None:
            check_max_freq(self.max_freq)
        plain = ("contiguous", "shared", tuple(range(len(self.axis_order))))
        for name in ("periods", "max_freq"):
            if (
                getattr(self, name) is not None
                and (self.order, self.bands, self.axis_order) != plain
            ):
                raise PositionError(
                    f"{name} is {getattr(self, name)} with order {self.order!r}, bands {self.bands!r} and axis_order "
                    f"{self.axis_order}; its frequencies know contiguous shared bands in axis order. Drop {name}, "
                    "or leave those at their defaults."
                )

    @property
    def turned(self) -> int:
        """Return the number of channels that turn."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def schedule(self) -> tuple[object, ...]:
        """Return what sets the speed of the bands, apart from their place."""
        base = self.theta if self.periods is None and self.max_freq is None else None
        spacing = None if self.max_freq is None else self.spacing
        return (base, self.unit, self.periods, self.max_freq, spacing)

    def freqs(
        self, *, device: torch.device | None = None, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Return `[axes, pairs]` radians per coordinate unit."""
        axes = len(self.axis_order)
        if self.periods is not None:
            shortest, longest = self.periods
            freqs = period_freqs(
                self.turned,
                shortest=shortest,
                longest=longest,
                axes=axes,
                device=device,
                dtype=dtype,
            )
        elif self.max_freq is not None:
            freqs = pixel_freqs(
                self.turned,
                max_freq=self.max_freq,
                spacing=self.spacing,
                axes=axes,
                device=device,
                dtype=dtype,
            )
        else:
            freqs = axial_freqs(
                self.turned,
                theta=self.theta,
                axes=axes,
                order=self.order,
                bands=self.bands,
                axis_order=self.axis_order,
                device=device,
                dtype=dtype,
            )
        return freqs * (2.0 * math.pi) if self.unit == "turns" else freqs

    def pair_names(self) -> list[tuple[int, int]]:
        """Return (axis, step on that axis) of every pair, in pair order."""
        axes, pairs = len(self.axis_order), self.turned // 2
        share = pairs // axes
        if self.order == "contiguous":
            return [(self.axis_order[pair // share], pair % share) for pair in range(pairs)]
        return [(self.axis_order[pair % axes], pair // axes) for pair in range(pairs)]

    def channel_names(self) -> list[tuple[int, int, int]]:
        """Return (axis, step, member of the pair) of every channel that turns, in channel order."""
        pairs = self.pair_names()
        if self.pairing == "half":
            return [(*pair, member) for member in (0, 1) for pair in pairs]
        if self.pairing == "half_per_axis":
            share = len(pairs) // len(self.axis_order)
            runs = [pairs[start : start + share] for start in range(0, len(pairs), share)]
            return [(*pair, member) for run in runs for member in (0, 1) for pair in run]
        return [(*pair, member) for pair in pairs for member in (0, 1)]

    def channel_speeds(self) -> list[Name]:
        """Return for every channel that turns what it is to attention: channels of one name are one channel.

        A name holds axis, place of the pair on its ladder in [0, 1), and member of the pair. Tiled channels carry the
        place in their run too, since each of them turns by angles of two places.
        """
        if self.pairing == "adjacent_tiled":
            share = self.turned // 2 // len(self.axis_order)
            # The cosines of a run stand there twice over; place and speed of a channel name both its angles.
            return [
                ("tiled", axis, at, self._rung(axis, at % share))
                for axis in self.axis_order
                for at in range(2 * share)
            ]
        return [
            (axis, self._rung(axis, step), member) for axis, step, member in self.channel_names()
        ]

    def _rung(self, axis: int, step: int) -> Fraction:
        """Return the place on the ladder, in [0, 1), of a step of an axis."""
        axes, share = len(self.axis_order), self.turned // 2 // len(self.axis_order)
        if self.bands == "shared":
            return Fraction(step, share)
        return Fraction(step * axes + self.axis_order.index(axis), share * axes)


def channel_permutation(source: Layout, target: Layout) -> Tensor:
    """Return `[head_dim]` indices such that `old[indices]` stands in the target's channel order.

    Raises:
        PositionError: if no permutation joins the two: other sizes, axes, or frequencies.

    Example:
        >>> channel_permutation(Layout(head_dim=8, pairing="adjacent"), Layout(head_dim=8)).tolist()
        [0, 2, 4, 6, 1, 3, 5, 7]
    """
    check_kind("source", source, Layout)
    check_kind("target", target, Layout)
    if (source.head_dim, source.turned) != (target.head_dim, target.turned):
        raise PositionError(
            f"source turns {source.turned} of {source.head_dim} channels and target {target.turned} of "
            f"{target.head_dim}; the two must agree. Convert between layouts of one head size."
        )
    have, want = source.channel_speeds(), target.channel_speeds()
    if source.schedule != target.schedule or sorted(map(str, have)) != sorted(map(str, want)):
        raise PositionError(
            f"source has {_band_words(source)} and target {_band_words(target)}; other frequencies cannot be "
            "reached by reordering channels. Retrain, or keep the source's frequencies."
        )
    where = {name: channel for channel, name in enumerate(have)}
    indices = [where[name] for name in want]
    return torch.tensor(indices + list(range(source.turned, source.head_dim)))


def _band_words(layout: Layout) -> str:
    """Return what an error says of a layout's frequencies."""
    base, unit, periods, max_freq, _ = layout.schedule
    speed = f"theta {base}" if base is not None else f"periods {periods}, max_freq {max_freq}"
    dealt = f" in axis order {layout.axis_order}" if layout.bands == "dealt" else ""
    tiled = ", tiled (no rotation)" if layout.pairing == "adjacent_tiled" else ""
    return (
        f"bands {layout.bands!r} over {len(layout.axis_order)} axes{dealt} ({speed}, {unit}{tiled})"
    )


def convert(weight: Tensor, source: Layout, target: Layout) -> Tensor:
    """Return q or k rows in the target's channel order; convert q and k alike and scores stay the same.

    Args:
        weight: `[heads * head_dim, ...]`: a projection weight, its bias, or `[head_dim]` of a q/k norm. Grouped queries
            have fewer heads of k; each weight is converted by itself.
        source: layout the weight was trained with.
        target: layout of the attention that will use it. Coordinates and exempt tokens are not looked at: see
            `check_layout`.

    Returns:
        A new tensor of the same shape.

    Raises:
        PositionError: if the rows are no whole number of heads or the layouts cannot be joined.

    Reference:
        transformers' checkpoint converters permute q and k rows this way; skipping it gives no shape error and scores
        that are wrong by several units.
    """
    check_kind("source", source, Layout)
    given: Any = weight
    if not isinstance(given, torch.Tensor):
        raise PositionError(
            f"weight is {type(given).__name__}; a tensor [heads * head_dim, ...] is required. Make it with "
            "torch.as_tensor."
        )
    if weight.ndim < 1 or not weight.shape[0] or weight.shape[0] % source.head_dim:
        raise PositionError(
            f"weight has shape {tuple(weight.shape)} and head_dim is {source.head_dim}; rows of whole heads are "
            "required. Split q, k and v before converting."
        )
    order = channel_permutation(source, target).to(weight.device)
    heads: Tensor = weight.unflatten(0, (-1, source.head_dim))
    return heads.index_select(1, order).flatten(0, 1)
