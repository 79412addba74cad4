"""The backward kernel: gradients turned back, and in the same pass the gradients of tables or of frequencies.

Every program writes sums of its own, which the launcher adds up in a fixed order: no atomics, so the same result every
run.
"""

# Triton reads its own types alone (a parameter is a tl.constexpr or says nothing), and takes arguments by place.
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: PLR0917
# Arguments stand together by kind.
# fmt: off

from __future__ import annotations

from visionpos.kernels.triton_angles import coordinate
from visionpos.kernels.triton_language import jit, tl
from visionpos.kernels.triton_tiles import (
    MAP,
    TABLE,
    cos_sin,
    heads_and_channels,
    heads_and_columns,
    load_pairs,
    store_pairs,
)


@jit
def turn_heads_back(
    g, out, x, c, s, batch, start, first_head, heads, tokens, turns, g_b, g_h, g_n, g_d, o_b, o_h, o_n, x_b, x_h,
    x_n, x_d,
    PAIRS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, UNIT: tl.constexpr,
    TAIL: tl.constexpr, REST: tl.constexpr, ADJACENT: tl.constexpr, CONJ: tl.constexpr, MODE: tl.constexpr,
):
    """Turn the gradients `g` of one group of heads back, and return what their inputs `x` say about the angles.

    That is the gradient of cosines and of sines `[BLOCK, WIDTH]` for tables; else the gradient of the angle, twice.
    """
    token = tl.arange(0, BLOCK)
    head, channel, inside = heads_and_channels(WIDTH, GROUP, PAIRS, ADJACENT)
    present = ((start + token < tokens) & (first_head < heads))[:, None]
    mask = present & (inside & (first_head + head < heads))[None, :]
    # Only the offsets within a tile are 32 bits wide.
    first_head = first_head.to(tl.int64)
    start = start.to(tl.int64)
    g += batch * g_b * UNIT + first_head * g_h * UNIT + start * g_n * UNIT
    x += batch * x_b * UNIT + first_head * x_h * UNIT + start * x_n * UNIT
    out += batch * o_b * UNIT + first_head * o_h * UNIT + start * o_n * UNIT
    g_steps = token[:, None] * (g_n * UNIT)
    x_steps = token[:, None] * (x_n * UNIT)
    o_steps = token[:, None] * (o_n * UNIT)
    g_columns = (head * (g_h * UNIT) + channel * g_d)[None, :]
    x_columns = (head * (x_h * UNIT) + channel * x_d)[None, :]
    o_columns = (head * (o_h * UNIT) + channel)[None, :]
    g_first, g_second = load_pairs(g, g_steps, g_columns, mask, g_d, BLOCK, WIDTH, PAIRS, ADJACENT)
    if CONJ:
        s = -s
    new_first = tl.where(turns, g_first * c + g_second * s, g_first)
    new_second = tl.where(turns, g_second * c - g_first * s, g_second)
    store_pairs(out, o_steps, o_columns, mask, new_first, new_second, BLOCK, WIDTH, PAIRS, ADJACENT)
    if TAIL > 0:
        column = (2 * PAIRS + tl.arange(0, REST))[None, :]
        rest_mask = present & (column < 2 * PAIRS + TAIL)
        rest = tl.load(g + g_steps + column * g_d, mask=rest_mask, other=0.0)
        tl.store(out + o_steps + column, rest.to(out.dtype.element_ty), mask=rest_mask)
    first, second = load_pairs(x, x_steps, x_columns, mask, x_d, BLOCK, WIDTH, PAIRS, ADJACENT)
    if MODE == TABLE:
        by_cos = g_first * first + g_second * second
        by_sin = g_second * first - g_first * second
    else:
        by_cos = tl.where(turns, first * new_second - second * new_first, 0.0)
        by_sin = by_cos
    if CONJ:
        # Turned by -angle: what was said about angles and sines has the other sign.
        by_sin = -by_sin
        by_cos = by_cos if MODE == TABLE else by_sin
    return by_cos, by_sin


@jit
def store_sums(
    part_cos, part_sin, coords, axis_of_pair, by_cos, by_sin, batch, block, slot, slots, row, rows, valid,
    blocks, c_b, c_a, c_n,
    PAIRS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, MODE: tl.constexpr, AXES: tl.constexpr,
):
    """Store a program's share: `[b, slots, rows, pairs]` for tables, else `[b, blocks, slots, axes or 1, pairs]`."""
    head, pair, inside = heads_and_columns(WIDTH, GROUP, PAIRS)
    inside = inside & (slot + head < slots)
    if MODE == TABLE:
        start = (batch * slots + slot) * rows * PAIRS
        at = start + row[:, None] * PAIRS + (head * rows * PAIRS + pair)[None, :]
        tl.store(part_cos + at, by_cos, mask=valid[:, None] & inside[None, :])
        tl.store(part_sin + at, by_sin, mask=valid[:, None] & inside[None, :])
    else:
        coords += batch * c_b
        start = (batch * blocks + block) * slots + slot
        if MODE == MAP:
            axis = tl.load(axis_of_pair + pair, mask=inside, other=0)[None, :]
            at = coordinate(coords, 0, row, valid, c_a, c_n) + tl.zeros_like(by_cos)
            for a in tl.static_range(1, AXES):
                at = tl.where(axis == a, coordinate(coords, a, row, valid, c_a, c_n), at)
            tl.store(
                part_cos + (start + head) * PAIRS + pair, tl.sum(at * by_cos, axis=0), mask=inside
            )
        else:
            for a in tl.static_range(AXES):
                x = coordinate(coords, a, row, valid, c_a, c_n)
                at = ((start + head) * AXES + a) * PAIRS + pair
                tl.store(part_cos + at, tl.sum(x * by_cos, axis=0), mask=inside)


@jit(
    do_not_specialize=[ "tokens", "rows", "prefix", "q_heads", "k_heads", "blocks", "splits", "slots", ],
)
def turn_back_kernel(  # noqa: C901 - compile-time branches
    q, k, out_q, out_k, x_q, x_k, part_cos, part_sin, cos, sin, coords, freqs, freqs_low, axis_of_pair, scale,
    tokens, rows, prefix, q_heads, k_heads, blocks, splits, slots, q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, oq_b,
    oq_h, oq_n, ok_b, ok_h, ok_n, xq_b, xq_h, xq_n, xq_d, xk_b, xk_h, xk_n, xk_d, t_b, t_h, t_n, t_p, c_b, c_a, c_n,
    f_h, f_a,
    PAIRS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, Q_TILES: tl.constexpr,
    K_TILES: tl.constexpr, UNIT: tl.constexpr, T_UNIT: tl.constexpr, F_UNIT: tl.constexpr, TAIL: tl.constexpr,
    REST: tl.constexpr, ADJACENT: tl.constexpr, CONJ: tl.constexpr, PER_HEAD: tl.constexpr, MODE: tl.constexpr,
    AXES: tl.constexpr, EXACT: tl.constexpr,
):
    """Turn the gradients q and k back; x_q and x_k are the inputs of the forward pass."""
    program = tl.program_id(0)
    split = program % splits
    block = (program // splits) % blocks
    start = block * BLOCK
    batch = (program // splits // blocks).to(tl.int64)
    row = start - prefix + tl.arange(0, BLOCK)
    valid = (row >= 0) & (row < rows)
    TILES: tl.constexpr = max(Q_TILES, K_TILES)
    by_cos = tl.zeros((BLOCK, WIDTH), tl.float32)
    by_sin = tl.zeros((BLOCK, WIDTH), tl.float32)
    if not PER_HEAD:
        c, s = cos_sin(
            cos, sin, coords, freqs, freqs_low, axis_of_pair, batch, split * 0, GROUP, row, valid, scale,
            t_b, t_h, t_n, t_p, c_b, c_a, c_n, f_h, f_a, PAIRS, WIDTH, GROUP, T_UNIT, F_UNIT, MODE, AXES, EXACT,
        )
    # Not unrolled, unlike the forward pass: loads of all tiles at once would take 170 registers.
    for tile in range(TILES):
        q_head = (split * Q_TILES + tile) * GROUP
        k_head = (split * K_TILES + tile) * GROUP
        if PER_HEAD:
            c, s = cos_sin(
                cos, sin, coords, freqs, freqs_low, axis_of_pair, batch, q_head, q_heads, row, valid, scale,
                t_b, t_h, t_n, t_p, c_b, c_a, c_n, f_h, f_a, PAIRS, WIDTH, GROUP, T_UNIT, F_UNIT, MODE, AXES, EXACT,
            )
            by_cos = tl.zeros((BLOCK, WIDTH), tl.float32)
            by_sin = tl.zeros((BLOCK, WIDTH), tl.float32)
        # A program may hold fewer heads of one than of the other.
        if tile < Q_TILES:
            of_cos, of_sin = turn_heads_back(
                q, out_q, x_q, c, s, batch, start, q_head, q_heads, tokens, valid[:, None],
                q_b, q_h, q_n, q_d, oq_b, oq_h, oq_n, xq_b, xq_h, xq_n, xq_d,
                PAIRS, BLOCK, WIDTH, GROUP, UNIT, TAIL, REST, ADJACENT, CONJ, MODE,
            )
            by_cos += of_cos
            if MODE == TABLE:
                by_sin += of_sin
        if K_TILES > 0:  # noqa: SIM102 - the one is known to the compiler, the other is not
            if tile < K_TILES:
                of_cos, of_sin = turn_heads_back(
                    k, out_k, x_k, c, s, batch, start, k_head, k_heads, tokens, valid[:, None],
                    k_b, k_h, k_n, k_d, ok_b, ok_h, ok_n, xk_b, xk_h, xk_n, xk_d,
                    PAIRS, BLOCK, WIDTH, GROUP, UNIT, TAIL, REST, ADJACENT, CONJ, MODE,
                )
                by_cos += of_cos
                if MODE == TABLE:
                    by_sin += of_sin
        if PER_HEAD:
            store_sums(
                part_cos, part_sin, coords, axis_of_pair, by_cos, by_sin, batch, block, q_head, slots, row, rows, valid,
                blocks, c_b, c_a, c_n, PAIRS, WIDTH, GROUP, MODE, AXES,
            )
    if not PER_HEAD:
        store_sums(
            part_cos, part_sin, coords, axis_of_pair, by_cos, by_sin, batch, block, split * GROUP, slots, row, rows,
            valid, blocks, c_b, c_a, c_n, PAIRS, WIDTH, GROUP, MODE, AXES,
        )
