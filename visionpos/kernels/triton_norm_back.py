"""The backward kernel of norm and rotation: gradients turned back and taken through the norm in one pass.

Every program writes sums of its own for weights and biases, which the launcher adds up in a fixed order.
"""

# Triton reads its own types alone (a parameter is a tl.constexpr or says nothing), and takes arguments by place.
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: PLR0917, PLR0915, ARG001, FBT003
# Arguments stand together by kind.
# fmt: off

from __future__ import annotations

from visionpos.kernels.triton_language import AVAILABLE, jit, tl
from visionpos.kernels.triton_norm import L2, LAYER, centred, row_sum, vector
from visionpos.kernels.triton_tiles import cos_sin, heads_and_channels, load_pairs, store_pairs

# Triton reads globals only as its own constants.
_LAYER, _L2 = (tl.constexpr(LAYER), tl.constexpr(L2)) if AVAILABLE else (LAYER, L2)


@jit
def norm_heads_back(
    g, out, x, c, s, weight, eps, batch, start, head, heads, tokens, turns, g_b, g_h, g_n, g_d, o_b, o_h, o_n, x_b,
    x_h, x_n, x_d,
    PAIRS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, UNIT: tl.constexpr, TAIL: tl.constexpr,
    REST: tl.constexpr, ADJACENT: tl.constexpr, NORM: tl.constexpr,
):
    """Write the gradient of one head of a block of tokens; return what it adds to those of weight and bias."""
    token = tl.arange(0, BLOCK)
    _, channel, inside = heads_and_channels(WIDTH, 1, PAIRS, ADJACENT)
    present = ((start + token < tokens) & (head < heads))[:, None]
    mask = present & inside[None, :]
    # Only the offsets within a tile are 32 bits wide.
    head = head.to(tl.int64)
    start = start.to(tl.int64)
    g += batch * g_b * UNIT + head * g_h * UNIT + start * g_n * UNIT
    x += batch * x_b * UNIT + head * x_h * UNIT + start * x_n * UNIT
    out += batch * o_b * UNIT + head * o_h * UNIT + start * o_n * UNIT
    g_steps = token[:, None] * (g_n * UNIT)
    x_steps = token[:, None] * (x_n * UNIT)
    o_steps = token[:, None] * (o_n * UNIT)
    first, second = load_pairs(
        x, x_steps, (channel * x_d)[None, :], mask, x_d, BLOCK, WIDTH, PAIRS, ADJACENT
    )
    g_first, g_second = load_pairs(
        g, g_steps, (channel * g_d)[None, :], mask, g_d, BLOCK, WIDTH, PAIRS, ADJACENT
    )
    column = (2 * PAIRS + tl.arange(0, REST))[None, :]
    rest_mask = present & (column < 2 * PAIRS + TAIL)
    rest = first
    by_rest = first
    if TAIL > 0:
        rest = tl.load(x + x_steps + column * x_d, mask=rest_mask, other=0.0).to(tl.float32)
        by_rest = tl.load(g + g_steps + column * g_d, mask=rest_mask, other=0.0).to(tl.float32)
    by_first = tl.where(turns, g_first * c + g_second * s, g_first)
    by_second = tl.where(turns, g_second * c - g_first * s, g_second)
    SIZE: tl.constexpr = 2 * PAIRS + TAIL
    if NORM == _LAYER:
        first, second, rest = centred(first, second, rest, PAIRS, WIDTH, TAIL, REST)
    square = row_sum(first * first + second * second, rest * rest, TAIL)
    if NORM == _L2:
        factor = 1.0 / tl.maximum(tl.sqrt(square), eps)
    else:
        factor = tl.rsqrt(square / SIZE + eps)
    first *= factor
    second *= factor
    rest *= factor
    w_first = tl.sum(by_first * first, axis=0)
    w_second = tl.sum(by_second * second, axis=0)
    w_rest = tl.sum(by_rest * rest, axis=0)
    b_first = tl.sum(by_first, axis=0)
    b_second = tl.sum(by_second, axis=0)
    b_rest = tl.sum(by_rest, axis=0)
    if weight is not None:
        a, b, d = vector(weight, PAIRS, BLOCK, WIDTH, TAIL, REST, ADJACENT)
        by_first *= a
        by_second *= b
        by_rest *= d
    along = row_sum(by_first * first + by_second * second, by_rest * rest, TAIL)
    if NORM == _L2:  # shorter than eps, a vector is divided by a constant
        along = tl.where(tl.sqrt(square) >= eps, along, 0.0)
    else:
        along = along / SIZE
    if NORM == _LAYER:
        mean = row_sum(by_first + by_second, by_rest, TAIL) / SIZE
        by_first -= mean
        by_second -= mean
        by_rest -= mean
    store_pairs(
        out, o_steps, channel[None, :], mask, (by_first - first * along) * factor,
        (by_second - second * along) * factor, BLOCK, WIDTH, PAIRS, ADJACENT,
    )
    if TAIL > 0:
        tl.store(
            out + o_steps + column, ((by_rest - rest * along) * factor).to(out.dtype.element_ty), mask=rest_mask,
        )
    return w_first, w_second, w_rest, b_first, b_second, b_rest


@jit
def store_vector(
    at, first, second, rest,
    PAIRS: tl.constexpr, WIDTH: tl.constexpr, TAIL: tl.constexpr, REST: tl.constexpr, ADJACENT: tl.constexpr,
):
    """Store a program's share of the gradient of a weight or a bias, `[head_dim]`."""
    pair = tl.arange(0, WIDTH)
    if ADJACENT:
        tl.store(at + 2 * pair, first, mask=pair < PAIRS)
        tl.store(at + 2 * pair + 1, second, mask=pair < PAIRS)
    else:
        tl.store(at + pair, first, mask=pair < PAIRS)
        tl.store(at + PAIRS + pair, second, mask=pair < PAIRS)
    if TAIL > 0:
        column = tl.arange(0, REST)
        tl.store(at + 2 * PAIRS + column, rest, mask=column < TAIL)


@jit
def norm_tensor_back(
    g, out, x, part, c, s, cos, sin, weight, eps, batch, start, program, split, row, valid, heads, tokens, g_b, g_h,
    g_n, g_d, o_b, o_h, o_n, x_b, x_h, x_n, x_d, t_b, t_h, t_n, t_p,
    PAIRS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, TILES: tl.constexpr, UNIT: tl.constexpr,
    T_UNIT: tl.constexpr, TAIL: tl.constexpr, REST: tl.constexpr, ADJACENT: tl.constexpr, PER_HEAD: tl.constexpr,
    NORM: tl.constexpr,
):
    """Take a program's heads of one tensor back, and store its share of the sums, `[2, programs, head_dim]`."""
    w_first = tl.zeros((WIDTH,), tl.float32)
    w_second = tl.zeros((WIDTH,), tl.float32)
    b_first = tl.zeros((WIDTH,), tl.float32)
    b_second = tl.zeros((WIDTH,), tl.float32)
    LEFT: tl.constexpr = REST if TAIL > 0 else WIDTH
    w_rest = tl.zeros((LEFT,), tl.float32)
    b_rest = tl.zeros((LEFT,), tl.float32)
    for tile in range(TILES):
        head = split * TILES + tile
        if PER_HEAD:
            c, s = cos_sin(
                cos, sin, None, None, None, None, batch, head, heads, row, valid, 1.0, t_b, t_h, t_n, t_p, 0, 0, 0,
                0, 0, PAIRS, WIDTH, 1, T_UNIT, 1, 0, 1, False,
            )
        a, b, d, e, f, h = norm_heads_back(
            g, out, x, c, s, weight, eps, batch, start, head, heads, tokens, valid[:, None], g_b, g_h, g_n, g_d, o_b,
            o_h, o_n, x_b, x_h, x_n, x_d, PAIRS, BLOCK, WIDTH, UNIT, TAIL, REST, ADJACENT, NORM,
        )
        w_first += a
        w_second += b
        w_rest += d
        b_first += e
        b_second += f
        b_rest += h
    SIZE: tl.constexpr = 2 * PAIRS + TAIL
    at = part + program.to(tl.int64) * SIZE
    store_vector(at, w_first, w_second, w_rest, PAIRS, WIDTH, TAIL, REST, ADJACENT)
    at += tl.num_programs(0).to(tl.int64) * SIZE
    store_vector(at, b_first, b_second, b_rest, PAIRS, WIDTH, TAIL, REST, ADJACENT)


@jit(do_not_specialize=["tokens", "rows", "prefix", "q_heads", "k_heads", "blocks", "splits"])
def norm_back_kernel(
    q, k, out_q, out_k, x_q, x_k, part_q, part_k, weight_q, weight_k, eps, cos, sin, coords, freqs, freqs_low,
    axis_of_pair, scale, tokens, rows, prefix, q_heads, k_heads, blocks, splits, q_b, q_h, q_n, q_d, k_b, k_h, k_n,
    k_d, oq_b, oq_h, oq_n, ok_b, ok_h, ok_n, xq_b, xq_h, xq_n, xq_d, xk_b, xk_h, xk_n, xk_d, t_b, t_h, t_n, t_p, c_b,
    c_a, c_n, f_h, f_a,
    PAIRS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, Q_TILES: tl.constexpr,
    K_TILES: tl.constexpr, UNIT: tl.constexpr, T_UNIT: tl.constexpr, F_UNIT: tl.constexpr, TAIL: tl.constexpr,
    REST: tl.constexpr, ADJACENT: tl.constexpr, CONJ: tl.constexpr, PER_HEAD: tl.constexpr, MODE: tl.constexpr,
    AXES: tl.constexpr, EXACT: tl.constexpr, NORM: tl.constexpr,
):
    """Take the gradients q and k back; x_q and x_k are the inputs of the forward pass. Angles come from tables."""
    program = tl.program_id(0)
    split = program % splits
    start = (program // splits) % blocks * BLOCK
    batch = (program // splits // blocks).to(tl.int64)
    row = start - prefix + tl.arange(0, BLOCK)
    valid = (row >= 0) & (row < rows)
    c, s = cos_sin(
        cos, sin, coords, freqs, freqs_low, axis_of_pair, batch, split * 0, 1, row, valid, scale, t_b, t_h, t_n, t_p,
        c_b, c_a, c_n, f_h, f_a, PAIRS, WIDTH, 1, T_UNIT, F_UNIT, MODE, AXES, EXACT,
    )
    norm_tensor_back(
        q, out_q, x_q, part_q, c, s, cos, sin, weight_q, eps, batch, start, program, split, row, valid, q_heads,
        tokens, q_b, q_h, q_n, q_d, oq_b, oq_h, oq_n, xq_b, xq_h, xq_n, xq_d, t_b, t_h, t_n, t_p,
        PAIRS, BLOCK, WIDTH, Q_TILES, UNIT, T_UNIT, TAIL, REST, ADJACENT, PER_HEAD, NORM,
    )
    norm_tensor_back(
        k, out_k, x_k, part_k, c, s, cos, sin, weight_k, eps, batch, start, program, split, row, valid, k_heads,
        tokens, k_b, k_h, k_n, k_d, ok_b, ok_h, ok_n, xk_b, xk_h, xk_n, xk_d, t_b, t_h, t_n, t_p,
        PAIRS, BLOCK, WIDTH, K_TILES, UNIT, T_UNIT, TAIL, REST, ADJACENT, PER_HEAD, NORM,
    )
