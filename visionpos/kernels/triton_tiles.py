"""Tiles of a rotation kernel: how channel pairs of several heads and tokens are read, written and given their angles.

A tile is `[BLOCK, WIDTH]` pairs, where WIDTH is a power of two: one head's pairs, or GROUP whole heads side by side
where pairs are no power of two (72, 80, 88 channels), so that few lanes idle. Every stride arrives divided by a
constant UNIT and is multiplied back here: only so does the compiler know that addresses are multiples of 16 bytes.
"""

# Triton reads its own types alone (a parameter is a tl.constexpr or says nothing), and takes arguments by place.
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: PLR0917
# Arguments stand together by kind.
# fmt: off

from __future__ import annotations

from visionpos.kernels.triton_angles import MAP as _MAP
from visionpos.kernels.triton_angles import TABLE as _TABLE
from visionpos.kernels.triton_angles import mapped_cos_sin, summed_cos_sin
from visionpos.kernels.triton_language import AVAILABLE, jit, tl

# Triton reads globals only as its own constants.
TABLE, MAP = (tl.constexpr(_TABLE), tl.constexpr(_MAP)) if AVAILABLE else (_TABLE, _MAP)


@jit
def load_pairs(
    at, steps, columns, mask, step,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr, ADJACENT: tl.constexpr,
):
    """Return the first and second channels of every pair in float32.

    `at` points to the block's first token and head; `steps` `[BLOCK, 1]` are offsets of tokens, `columns` `[1, WIDTH]`
    of first channels or, for adjacent pairs, `[1, 2 WIDTH]` of all; neighbouring channels are `step` apart.
    """
    if ADJACENT:
        # One contiguous load: even and odd channels apart would be read two bytes at a time.
        both = tl.load(at + steps + columns, mask=mask, other=0.0)
        first, second = tl.split(tl.reshape(both.to(tl.float32), (BLOCK, WIDTH, 2)))
    else:
        first = tl.load(at + steps + columns, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(at + steps + columns + PAIRS * step, mask=mask, other=0.0).to(tl.float32)
    return first, second


@jit
def store_pairs(
    at, steps, columns, mask, first, second,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr, ADJACENT: tl.constexpr,
):
    """Store what `load_pairs` loads, rounded once; channels are neighbours."""
    kind = at.dtype.element_ty
    if ADJACENT:
        both = tl.reshape(tl.join(first.to(kind), second.to(kind)), (BLOCK, 2 * WIDTH))
        tl.store(at + steps + columns, both, mask=mask)
    else:
        tl.store(at + steps + columns, first.to(kind), mask=mask)
        tl.store(at + steps + columns + PAIRS, second.to(kind), mask=mask)


@jit
def heads_and_columns(COLUMNS: tl.constexpr, GROUP: tl.constexpr, EACH: tl.constexpr):
    """Return for every column of a tile: its head within the group, its place in that head, and is it in one."""
    column = tl.arange(0, COLUMNS)
    if GROUP == 1:
        head = column * 0
        place = column
    else:
        head = column // EACH
        place = column % EACH
    return head, place, column < GROUP * EACH


@jit
def heads_and_channels(
    WIDTH: tl.constexpr, GROUP: tl.constexpr, PAIRS: tl.constexpr, ADJACENT: tl.constexpr
):
    """Return what `heads_and_columns` does, for the columns of a tile that `load_pairs` reads."""
    # Both branches are calls: a constant may be named once in a function.
    if ADJACENT:
        head, channel, inside = heads_and_columns(2 * WIDTH, GROUP, 2 * PAIRS)
    else:
        head, channel, inside = heads_and_columns(WIDTH, GROUP, PAIRS)
    return head, channel, inside


@jit
def cos_sin(
    cos, sin, coords, freqs, freqs_low, axis_of_pair, batch, first_head, heads, rows, valid, scale, t_b, t_h, t_n,
    t_p, c_b, c_a, c_n, f_h, f_a,
    PAIRS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, T_UNIT: tl.constexpr, F_UNIT: tl.constexpr,
    MODE: tl.constexpr, AXES: tl.constexpr, EXACT: tl.constexpr,
):
    """Return cosines and sines `[BLOCK, WIDTH]` float32 of a block's tokens for one group of heads."""
    head, pair, inside = heads_and_columns(WIDTH, GROUP, PAIRS)
    inside = (inside & (first_head + head < heads))[None, :] & valid[:, None]
    if MODE == TABLE:
        start = batch * t_b * T_UNIT + first_head.to(tl.int64) * t_h * T_UNIT
        at = rows[:, None] * (t_n * T_UNIT) + (head * (t_h * T_UNIT) + pair * t_p)[None, :]
        c = tl.load(cos + start + at, mask=inside, other=0.0).to(tl.float32)
        s = tl.load(sin + start + at, mask=inside, other=0.0).to(tl.float32)
    else:
        coords += batch * c_b
        columns = (rows * 0)[:, None] + pair[None, :]
        if MODE == MAP:
            c, s = mapped_cos_sin(
                coords, freqs, freqs_low, axis_of_pair, rows, valid, columns, inside, c_a, c_n, AXES, EXACT,
            )
        else:
            columns += ((first_head + head) * (f_h * F_UNIT))[None, :]
            c, s = summed_cos_sin(
                coords, freqs, freqs_low, rows, valid, columns, inside, c_a, c_n, f_a * F_UNIT, AXES, EXACT,
            )
        c *= scale
        s *= scale
    return c, s
