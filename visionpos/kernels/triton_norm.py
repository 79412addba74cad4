"""The norm of queries and keys inside a rotation kernel: rms, layer or l2 over the channels of a head."""

# Triton reads its own types alone (a parameter is a tl.constexpr or says nothing), and takes arguments by place.
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: PLR0917
# Arguments stand together by kind.
# fmt: off

from __future__ import annotations

from visionpos.kernels.triton_language import AVAILABLE, jit, tl
from visionpos.kernels.triton_tiles import heads_and_channels, load_pairs

NO_NORM, RMS, LAYER, L2 = 0, 1, 2, 3
# Where the result is rounded to the dtype of the input: ONCE as torch's norms leave it, TWICE before the weight too.
NO_ROUNDING, ONCE, TWICE = 0, 1, 2

# Triton reads globals only as its own constants.
_LAYER, _L2, _TWICE = (
    (tl.constexpr(LAYER), tl.constexpr(L2), tl.constexpr(TWICE))
    if AVAILABLE
    else (LAYER, L2, TWICE)
)


@jit
def normed(
    x, first, second, rest, weight, bias, eps,
    PAIRS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, TAIL: tl.constexpr, REST: tl.constexpr,
    ADJACENT: tl.constexpr, NORM: tl.constexpr, ROUNDING: tl.constexpr,
):
    """Return a head's channels normalised in float32: the pairs that turn, and the rest that does not."""
    if NORM == _LAYER:
        first, second, rest = centred(first, second, rest, PAIRS, WIDTH, TAIL, REST)
    square = row_sum(first * first + second * second, rest * rest, TAIL)
    if NORM == _L2:
        factor = 1.0 / tl.maximum(tl.sqrt(square), eps)
    else:
        factor = tl.rsqrt(square / (2 * PAIRS + TAIL) + eps)
    first = rounded(first * factor, x, ROUNDING == _TWICE)
    second = rounded(second * factor, x, ROUNDING == _TWICE)
    rest = rounded(rest * factor, x, ROUNDING == _TWICE)
    if weight is not None:
        a, b, c = vector(weight, PAIRS, BLOCK, WIDTH, TAIL, REST, ADJACENT)
        first *= a
        second *= b
        rest *= c
    if bias is not None:
        a, b, c = vector(bias, PAIRS, BLOCK, WIDTH, TAIL, REST, ADJACENT)
        first += a
        second += b
        rest += c
    return (
        rounded(first, x, ROUNDING != 0),
        rounded(second, x, ROUNDING != 0),
        rounded(rest, x, ROUNDING != 0),
    )


@jit
def row_sum(pairs, rest, TAIL: tl.constexpr):
    """Return the sums over the channels of a head, `[BLOCK, 1]`."""
    total = tl.sum(pairs, axis=1)
    if TAIL > 0:
        total += tl.sum(rest, axis=1)
    return total[:, None]


@jit
def centred(
    first, second, rest,
    PAIRS: tl.constexpr, WIDTH: tl.constexpr, TAIL: tl.constexpr, REST: tl.constexpr,
):
    """Return the channels without their mean; idle lanes hold zeros and go on doing so."""
    mean = row_sum(first + second, rest, TAIL) / (2 * PAIRS + TAIL)
    pair = (tl.arange(0, WIDTH) < PAIRS)[None, :]
    first = tl.where(pair, first - mean, 0.0)
    second = tl.where(pair, second - mean, 0.0)
    if TAIL > 0:
        rest = tl.where((tl.arange(0, REST) < TAIL)[None, :], rest - mean, 0.0)
    return first, second, rest


@jit
def rounded(x, like, wanted: tl.constexpr):
    """Return x, rounded to the element type of the pointer `like` if wanted."""
    if wanted:
        x = x.to(like.dtype.element_ty).to(tl.float32)
    return x


@jit
def vector(
    at,
    PAIRS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, TAIL: tl.constexpr, REST: tl.constexpr,
    ADJACENT: tl.constexpr,
):
    """Return a weight's values for first channels, second channels and the rest, float32.

    Adjacent pairs are read once a row although all rows share them: one row alone would be read two bytes at a time.
    """
    _, channel, inside = heads_and_channels(WIDTH, 1, PAIRS, ADJACENT)
    if ADJACENT:
        steps = (tl.arange(0, BLOCK) * 0)[:, None]
        mask = inside[None, :] & (steps == 0)
        first, second = load_pairs(
            at, steps, channel[None, :], mask, 1, BLOCK, WIDTH, PAIRS, ADJACENT
        )
    else:
        first, second = load_pairs(
            at, 0, channel[None, :], inside[None, :], 1, 1, WIDTH, PAIRS, ADJACENT
        )
    rest = first
    if TAIL > 0:
        column = tl.arange(0, REST)
        rest = tl.load(at + 2 * PAIRS + column, mask=column < TAIL, other=0.0).to(tl.float32)[
            None, :
        ]
    return first, second, rest
