"""Detectors of a rotation of q and k, whoever wrote it: which channels turn together, and how exactly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from visionpos.audit.detectors.finding import Check, judged
from visionpos.audit.result import Found
from visionpos.errors import PositionError
from visionpos.geometry.rotation import Pairing

Turn = Callable[[Tensor, Tensor], Tensor]
"""From vectors `[n, head_dim]` and their places `[n, axes]` to the turned vectors."""

NORM_DRIFT = 1e-5
SHIFT_ERROR = 1e-3
GOLDEN = 1e-5
TABLE_ERROR, TABLE_SLOPE = 5e-3, 1e-7
PLACES = (255, 257, 2049, 4095)
REACH = 24.0
_TOKENS = 24
_SHIFT = 7


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Wanted:
    """What a rotation should be.

    Args:
        pairing: which channels turn together.
        freqs: `[axes, pairs]` radians per place; None where they are not known.
        gain: constant factor on turned channels, as YaRN's.
    """

    pairing: Pairing
    freqs: Tensor | None = None
    gain: float = 1.0


def channel_pairs(pairing: Pairing, pairs: int, axes: int = 1) -> tuple[Tensor, Tensor]:
    """Return the first and the second channel of each pair, `[pairs]` each.

    Raises:
        PositionError: for a pairing that pairs no two channels.

    Example:
        >>> channel_pairs("half", 2)
        (tensor([0, 1]), tensor([2, 3]))
    """
    number = torch.arange(pairs)
    if pairing == "adjacent":
        return 2 * number, 2 * number + 1
    if pairing == "half":
        return number, number + pairs
    if pairing == "half_per_axis":
        run = pairs // axes
        first = number // run * 2 * run + number % run
        return first, first + run
    raise PositionError(
        f"pairing is {pairing!r}; 'half', 'adjacent' or 'half_per_axis' is required. Others are no rotations."
    )


def pairing_mismatch(
    turn: Turn,
    head_dim: int,
    *,
    wanted: Wanted | None = None,
    turn_keys: Turn | None = None,
    axes: int = 1,
    relative: bool = True,
    reach: float = REACH,
    seed: int = 0,
) -> Found:
    """Return whether channels turn in the pairs that they should.

    Two consistent rotations keep norms and differences whatever their pairing, so three things are looked at: norms
    (the cosines of one pairing with the partners of another), scores under a shift of all places (q and k in different
    pairings, a wrong sign), and the turned vector itself against float64 where frequencies are known.

    Args:
        turn: of queries.
        head_dim: channels of a head.
        wanted: what it should be; None looks at norms and scores alone.
        turn_keys: of keys, where it is another function.
        axes: of places.
        relative: whether scores should depend on differences of places alone.
        reach: largest place; whole numbers below 24 unless another one is given.
        seed: of the vectors, which are float32.

    Raises:
        PositionError: if the pairing pairs no two channels.
    """
    draw = torch.Generator().manual_seed(seed)
    vectors = torch.randn(2, _TOKENS, head_dim, generator=draw)
    step = reach / REACH
    places = torch.randint(1, int(REACH), (_TOKENS, axes), generator=draw) * step
    other = turn if turn_keys is None else turn_keys
    checks = [
        _norms(turn, vectors[0], places, "norms of turned queries drift by {:.2g}"),
        _norms(other, vectors[1], places, "norms of turned keys drift by {:.2g}"),
    ]
    if relative:
        checks.append(_shift(turn, other, vectors, places, _SHIFT * step))
    if wanted is not None:
        checks += [
            _partner(one, head_dim, axes, wanted.pairing)
            if wanted.freqs is None
            else _golden(one, vectors[0], places, wanted.freqs, wanted)
            for one in dict.fromkeys((turn, other))
        ]
    seen = partner_of_first(turn, head_dim, axes)
    what = "no other channel" if seen is None else f"channel {seen}"
    healthy = f"channel 0 turns with {what}; norms and scores are those of a rotation"
    return judged("pairing_mismatch", checks, healthy)


def partner_of_first(turn: Turn, head_dim: int, axes: int) -> int | None:
    """Return which channel turns together with channel 0, None if it stands still."""
    moved = turn(torch.eye(head_dim)[:1], torch.ones(1, axes))[0, 1:].abs()
    return int(moved.argmax()) + 1 if moved.numel() and float(moved.max()) > 0 else None


def _norms(turn: Turn, vectors: Tensor, places: Tensor, words: str) -> Check:
    """Return by how much lengths depend on places: a constant factor of its own is no fault."""
    lengths = [
        torch.linalg.vector_norm(turn(vectors, where).double(), dim=-1)
        for where in (places, torch.zeros_like(places))
    ]
    drift = float((lengths[0] / lengths[1] - 1).abs().max())
    return Check(
        value=drift,
        threshold=NORM_DRIFT,
        wrong=words.format(drift) + ": cosines and partners of different pairings are mixed",
        remedy="Build cos and sin in the pairing in which channels are turned.",
    )


def _shift(turn: Turn, turn_keys: Turn, vectors: Tensor, places: Tensor, shift: float) -> Check:
    def scores(by: float) -> Tensor:
        queries, keys = turn(vectors[0], places + by), turn_keys(vectors[1], places.flip(0) + by)
        return queries.double() @ keys.double().mT

    before = scores(0)
    error = float((scores(shift) - before).abs().max() / before.square().mean().sqrt())
    return Check(
        value=error,
        threshold=SHIFT_ERROR,
        wrong=f"scores move by {error:.2g} when all places shift by {shift:g}: q and k turn differently",
        remedy="Give q and k the same pairing, frequencies and sign.",
    )


def _golden(turn: Turn, vectors: Tensor, places: Tensor, freqs: Tensor, wanted: Wanted) -> Check:
    """Compare with complex numbers in float64."""
    exact = turned_exactly(vectors, places, freqs, wanted.pairing, gain=wanted.gain)
    given = turn(vectors, places).double()
    error = float((given - exact).abs().max() / exact.abs().max())
    return Check(
        value=error,
        threshold=GOLDEN,
        wrong=f"turned vectors are off by {error:.2g} from {wanted.pairing!r} with the given frequencies",
        remedy="Permute the rows of the q and k weights from one pairing to the other, or turn as they were trained.",
    )


def turned_exactly(
    vectors: Tensor, places: Tensor, freqs: Tensor, pairing: Pairing, *, gain: float = 1.0
) -> Tensor:
    """Return vectors `[n, head_dim]` turned in float64 as complex numbers; channels beyond the pairs pass."""
    exact = vectors.double()
    turns = (places.double().unsqueeze(-1) * freqs.double()).sum(-2)  # [n, pairs]
    first, second = channel_pairs(pairing, freqs.shape[-1], freqs.shape[-2])
    numbers = torch.complex(exact[:, first], exact[:, second]) * torch.polar(
        torch.full_like(turns, gain), turns
    )
    moved = exact.clone()
    moved[:, first], moved[:, second] = numbers.real, numbers.imag
    return moved


def _partner(turn: Turn, head_dim: int, axes: int, pairing: Pairing) -> Check:
    seen = partner_of_first(turn, head_dim, axes)
    # Of a head that turns in part, halves are those of the turning channels: only "next to it" is certain.
    adjacent = pairing == "adjacent"
    wrong = seen is not None and (seen == 1) != adjacent and head_dim > 2
    return Check(
        value=float(wrong),
        threshold=0.0,
        wrong=f"channel 0 turns with channel {seen}, which is not the pairing {pairing!r}",
        remedy="Permute the rows of the q and k weights from one pairing to the other.",
    )


def precision(
    turn: Turn,
    head_dim: int,
    wanted: Wanted,
    *,
    places: Sequence[int] = PLACES,
    positions: Tensor | None = None,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
) -> Found:
    """Return whether cosines and sines at large places agree with float64.

    A table in bfloat16 is off by 2.5e-3 at any place; positions in bfloat16 are wrong from 257 on, by a whole turn.

    Args:
        turn: as in `pairing_mismatch`.
        head_dim: channels of a head.
        wanted: what it should be, frequencies included.
        places: at which to look, whole numbers; 257 and 2049 are those that bfloat16 and float16 round first.
        positions: position ids of the caller, whose dtype is looked at, too.
        dtypes: of q and k.

    Raises:
        PositionError: if there are no frequencies to compare with, or the pairing pairs no two channels.
    """
    if wanted.freqs is None:
        raise PositionError("wanted has no freqs; [axes, pairs] radians per place are required.")
    checks = [
        _table_error(turn, head_dim, wanted, wanted.freqs[axis], (place, axis), dtype)
        for dtype in dtypes
        for place in places
        for axis in range(wanted.freqs.shape[-2])
    ]
    most = max(one.value for one in checks)
    if positions is not None:
        checks.append(position_dtype(positions))
    return judged("precision", checks, f"cosines and sines are within {most:.2g} of float64")


def _table_error(
    turn: Turn,
    head_dim: int,
    wanted: Wanted,
    freqs: Tensor,
    where: tuple[int, int],
    dtype: torch.dtype,
) -> Check:
    """Compare the cosines and sines of one axis, `freqs [pairs]`, at (place, axis)."""
    assert wanted.freqs is not None  # noqa: S101 (checked by the caller)
    axes, pairs = wanted.freqs.shape
    place, axis = where
    first, second = channel_pairs(wanted.pairing, pairs, axes)
    ones = torch.zeros(1, head_dim, dtype=dtype)
    ones[:, first] = 1.0  # turned, they are the cosines, and their partners the sines
    places = torch.zeros(1, axes)
    places[:, axis] = place
    given = turn(ones, places).double()
    turns, gain = place * freqs.double(), wanted.gain
    off = torch.hypot(given[0, first] - gain * turns.cos(), given[0, second] - gain * turns.sin())
    error = float(off.max()) / gain
    turned = place * max(1.0, float(freqs.abs().max()))  # float32 loses digits with the angle
    return Check(
        value=error,
        threshold=TABLE_ERROR + TABLE_SLOPE * turned,
        wrong=f"at place {place} of axis {axis}, with q and k in {str(dtype).removeprefix('torch.')}, cosines and "
        f"sines are off by {error:.2g}",
        remedy="Keep positions and frequencies in float32 or better, and cast cosines and sines alone.",
    )


def position_dtype(positions: Tensor) -> Check:
    """Return whether position ids are whole numbers, or floats of at least 32 bits."""
    kind = positions.dtype
    narrow = kind.is_floating_point and torch.finfo(kind).bits < 32
    # The first whole number that the dtype cannot hold.
    limit = round(2 / torch.finfo(kind).eps) + 1 if narrow else 0
    return Check(
        value=float(torch.finfo(kind).eps) if narrow else 0.0,
        threshold=float(torch.finfo(torch.float32).eps),
        wrong=f"positions are {str(kind).removeprefix('torch.')}, which cannot hold {limit}",
        remedy="Keep positions as int64, or as float32 where they are fractions.",
    )
