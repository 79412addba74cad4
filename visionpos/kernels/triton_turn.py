"""The rotation kernel: q and k of any layout, angles from tables or coordinates, after a norm if asked."""

# Triton reads its own types alone (a parameter is a tl.constexpr or says nothing), and takes arguments by place.
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: PLR0917
# Arguments stand together by kind.
# fmt: off

from __future__ import annotations

from visionpos.kernels.triton_language import jit, tl
from visionpos.kernels.triton_norm import normed
from visionpos.kernels.triton_tiles import cos_sin, heads_and_channels, load_pairs, store_pairs


@jit
def turn_heads(
    x, out, c, s, weight, bias, eps, batch, start, first_head, heads, tokens, turns, x_b, x_h, x_n, x_d, o_b, o_h,
    o_n,
    PAIRS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, UNIT: tl.constexpr,
    TAIL: tl.constexpr, REST: tl.constexpr, ADJACENT: tl.constexpr, NORM: tl.constexpr, ROUNDING: tl.constexpr,
):
    """Turn one group of heads of a block of tokens; `turns` [BLOCK, 1] is false for exempt tokens."""
    token = tl.arange(0, BLOCK)
    head, channel, inside = heads_and_channels(WIDTH, GROUP, PAIRS, ADJACENT)
    present = ((start + token < tokens) & (first_head < heads))[:, None]
    mask = present & (inside & (first_head + head < heads))[None, :]
    # Only the offsets within a tile are 32 bits wide.
    first_head = first_head.to(tl.int64)
    start = start.to(tl.int64)
    x += batch * x_b * UNIT + first_head * x_h * UNIT + start * x_n * UNIT
    out += batch * o_b * UNIT + first_head * o_h * UNIT + start * o_n * UNIT
    x_steps = token[:, None] * (x_n * UNIT)
    o_steps = token[:, None] * (o_n * UNIT)
    x_columns = (head * (x_h * UNIT) + channel * x_d)[None, :]
    o_columns = (head * (o_h * UNIT) + channel)[None, :]
    first, second = load_pairs(x, x_steps, x_columns, mask, x_d, BLOCK, WIDTH, PAIRS, ADJACENT)
    rest = first
    rest_column = (2 * PAIRS + tl.arange(0, REST))[None, :]
    rest_mask = present & (rest_column < 2 * PAIRS + TAIL)
    if TAIL > 0:
        rest = tl.load(x + x_steps + rest_column * x_d, mask=rest_mask, other=0.0).to(tl.float32)
    if NORM != 0:
        first, second, rest = normed(
            x, first, second, rest, weight, bias, eps, PAIRS, BLOCK, WIDTH, TAIL, REST, ADJACENT, NORM, ROUNDING,
        )
    new_first = tl.where(turns, first * c - second * s, first)
    new_second = tl.where(turns, second * c + first * s, second)
    store_pairs(out, o_steps, o_columns, mask, new_first, new_second, BLOCK, WIDTH, PAIRS, ADJACENT)
    if TAIL > 0:
        tl.store(out + o_steps + rest_column, rest.to(out.dtype.element_ty), mask=rest_mask)


@jit(do_not_specialize=["tokens", "rows", "prefix", "q_heads", "k_heads", "blocks", "splits"])
def turn_kernel(
    q, k, out_q, out_k, cos, sin, coords, freqs, freqs_low, axis_of_pair, weight_q, weight_k, bias_q, bias_k, eps,
    scale, tokens, rows, prefix, q_heads, k_heads, blocks, splits, q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, oq_b,
    oq_h, oq_n, ok_b, ok_h, ok_n, t_b, t_h, t_n, t_p, c_b, c_a, c_n, f_h, f_a,
    PAIRS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, Q_TILES: tl.constexpr,
    K_TILES: tl.constexpr, UNIT: tl.constexpr, T_UNIT: tl.constexpr, F_UNIT: tl.constexpr, TAIL: tl.constexpr,
    REST: tl.constexpr, ADJACENT: tl.constexpr, CONJ: tl.constexpr, PER_HEAD: tl.constexpr, MODE: tl.constexpr,
    AXES: tl.constexpr, EXACT: tl.constexpr, NORM: tl.constexpr, ROUNDING: tl.constexpr,
):
    """Turn q and k. A program shares one tile of angles among a few heads of both; its neighbours hold other heads."""
    program = tl.program_id(0)
    split = program % splits
    start = (program // splits) % blocks * BLOCK
    batch = (program // splits // blocks).to(tl.int64)
    row = start - prefix + tl.arange(0, BLOCK)
    valid = (row >= 0) & (row < rows)
    TILES: tl.constexpr = max(Q_TILES, K_TILES)
    for tile in tl.static_range(TILES):
        q_head = (split * Q_TILES + tile) * GROUP
        k_head = (split * K_TILES + tile) * GROUP
        if tile == 0 or PER_HEAD:
            c, s = cos_sin(
                cos, sin, coords, freqs, freqs_low, axis_of_pair, batch, q_head if PER_HEAD else split * 0,
                q_heads if PER_HEAD else GROUP, row, valid, scale, t_b, t_h, t_n, t_p, c_b, c_a, c_n, f_h, f_a,
                PAIRS, WIDTH, GROUP, T_UNIT, F_UNIT, MODE, AXES, EXACT,
            )
            if CONJ:
                s = -s
        if tile < Q_TILES:
            turn_heads(
                q, out_q, c, s, weight_q, bias_q, eps, batch, start, q_head, q_heads, tokens, valid[:, None], q_b,
                q_h, q_n, q_d, oq_b, oq_h, oq_n, PAIRS, BLOCK, WIDTH, GROUP, UNIT, TAIL, REST, ADJACENT, NORM,
                ROUNDING,
            )
        if tile < K_TILES:
            turn_heads(
                k, out_k, c, s, weight_k, bias_k, eps, batch, start, k_head, k_heads, tokens, valid[:, None], k_b,
                k_h, k_n, k_d, ok_b, ok_h, ok_n, PAIRS, BLOCK, WIDTH, GROUP, UNIT, TAIL, REST, ADJACENT, NORM,
                ROUNDING,
            )
