"""Cosines and sines inside a Triton kernel: read from tables, or formed from coordinates and frequencies.

The range reduction counts turns, not steps of pi / 2: a product of two float32 numbers is held as a rounded part and
its exact remainder, whole turns are dropped without error, and at most half a turn is left. It needs no slow path at
any size, so no stack, and no fused multiply-add, so the interpreter computes what a GPU does. Kernels that call it are
compiled without contraction (`enable_fp_fusion=False`).

Frequencies are read once a row although all rows share them: such loads are 16 bytes wide and come from the nearest
cache, where one row for all would pass through shared memory and a barrier.
"""

# Triton reads its own types alone (a parameter is a tl.constexpr or says nothing), and takes arguments by place.
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: PLR0917
# Arguments stand together by kind.
# fmt: off

from __future__ import annotations

from visionpos.kernels.triton_language import jit, tl

# Where angles come from, the constexpr MODE of the kernels.
TABLE, MAP, SUM = 0, 1, 2


@jit
def remainder_of(x, y, product):
    """Return x * y - product exactly, where product is x * y rounded (Dekker)."""
    x_wide = x * 4097.0
    x_high = x_wide - (x_wide - x)
    x_low = x - x_high
    y_wide = y * 4097.0
    y_high = y_wide - (y_wide - y)
    y_low = y - y_high
    return (((x_high * y_high - product) + x_high * y_low) + x_low * y_high) + x_low * y_low


@jit
def part_turns(x, high, low):
    """Return x * (high + low) without its whole turns, within half a turn of zero."""
    product = x * high
    rest = remainder_of(x, high, product)
    return (product - tl.floor(product + 0.5)) + (rest + x * low)


@jit
def cos_sin_of_turns(turns):
    """Return the cosine and sine of `turns` turns, which lie within a few turns of zero."""
    quarter = tl.floor(turns * 4.0 + 0.5)
    x = (turns - quarter * 0.25) * 6.283185307179586  # within pi / 4
    square = x * x
    sin = x + x * square * (
        -0.166666506693 + square * (0.00833197866173 + square * -0.000194956360896)
    )
    cos = 1.0 - 0.5 * square
    cos += (
        square
        * square
        * (0.0416666468664 + square * (-0.0013887367514 + square * 2.44384514187e-05))
    )
    quadrant = quarter.to(tl.int32)
    odd = (quadrant & 1) != 0
    cos_part = tl.where(odd, sin, cos)
    sin_part = tl.where(odd, cos, sin)
    cos_part = tl.where(((quadrant + 1) & 2) != 0, -cos_part, cos_part)
    sin_part = tl.where((quadrant & 2) != 0, -sin_part, sin_part)
    return cos_part, sin_part


@jit
def cos_sin_of_angles(angles):
    """Return the cosine and sine of float32 radians, right to 1e-6 up to 2^24 radians."""
    return cos_sin_of_turns(part_turns(angles, 0.15915493667125702, 6.420638326565253e-09))


@jit
def coordinate(coords, axis: tl.constexpr, rows, valid, axis_step, row_step):
    """Return one axis' coordinates of a block of tokens, `[BLOCK, 1]` float32."""
    at = coords + axis * axis_step + rows * row_step
    return tl.load(at, mask=valid, other=0).to(tl.float32)[:, None]


@jit
def mapped_cos_sin(
    coords, freqs, freqs_low, axis_of_pair, rows, valid, columns, inside, axis_step, row_step,
    AXES: tl.constexpr, EXACT: tl.constexpr,
):
    """Return cosines and sines where every pair listens to one axis; `columns` `[BLOCK, WIDTH]` are pairs."""
    axis = tl.load(axis_of_pair + columns, mask=inside, other=0)
    high = tl.load(freqs + columns, mask=inside, other=0.0)
    at = coordinate(coords, 0, rows, valid, axis_step, row_step) + tl.zeros_like(high)
    for a in tl.static_range(1, AXES):
        at = tl.where(axis == a, coordinate(coords, a, rows, valid, axis_step, row_step), at)
    if EXACT:
        low = tl.load(freqs_low + columns, mask=inside, other=0.0)
        cos, sin = cos_sin_of_turns(part_turns(at, high, low))
    else:
        cos, sin = cos_sin_of_angles(at * high)
    return cos, sin


@jit
def summed_cos_sin(
    coords, freqs, freqs_low, rows, valid, columns, inside, axis_step, row_step, freq_step,
    AXES: tl.constexpr, EXACT: tl.constexpr,
):
    """Return cosines and sines of sums over axes; `columns` `[BLOCK, WIDTH]` are offsets into one axis of freqs."""
    total = tl.zeros_like(columns.to(tl.float32))
    for a in tl.static_range(AXES):
        x = coordinate(coords, a, rows, valid, axis_step, row_step)
        high = tl.load(freqs + a * freq_step + columns, mask=inside, other=0.0)
        if EXACT:
            low = tl.load(freqs_low + a * freq_step + columns, mask=inside, other=0.0)
            total += part_turns(x, high, low)
        else:
            total += x * high
    if EXACT:
        cos, sin = cos_sin_of_turns(total)
    else:
        cos, sin = cos_sin_of_angles(total)
    return cos, sin
