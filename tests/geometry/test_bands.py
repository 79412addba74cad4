"""Bands that are no ladder: pixels, golden directions, whole turns, clamped sections, a circle."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import visionpos as vp
from tests.compiled import SIZES, graphs_of
from tests.reference import directions as oracle
from tests.strategies import grids
from tests.tolerances import assert_close_to
from visionpos import Grid, PositionError
from visionpos.geometry import circle_coords, golden_freqs, pixel_freqs, whole_turns
from visionpos.geometry.sections import clamped_axes, section_freqs

TURN = 2 * math.pi


def test_reference_golden_pixel_bands():
    """Facts 1B, timm trap: d=8 gives bands 3.1416 and 351.858 on both axes."""
    freqs = pixel_freqs(8, max_freq=224.0, spacing="log")
    expected = torch.tensor([[3.141593, 351.858, 0, 0], [0, 0, 3.141593, 351.858]])
    torch.testing.assert_close(freqs, expected, rtol=2e-6, atol=0)


@given(st.integers(1, 12), st.integers(1, 3), st.floats(2, 500), st.booleans())
def test_reference_pixel_bands(steps, axes, max_freq, log):
    freqs = pixel_freqs(
        2 * steps * axes, max_freq=max_freq, spacing="log" if log else "linear", axes=axes
    )
    bands = torch.from_numpy(oracle.pixel_bands(steps, max_freq, log=log))
    for axis in range(axes):
        own = freqs[axis, axis * steps : (axis + 1) * steps]
        torch.testing.assert_close(own.double(), bands, rtol=1e-5, atol=0)
        assert freqs[axis].count_nonzero() == steps


@given(st.integers(1, 10), st.integers(1, 4), st.sampled_from([0.0, 0.25, 0.6]))
def test_reference_golden(pairs, heads, still):
    freqs = golden_freqs(2 * pairs, num_heads=heads, slowest=0.2, fastest=20.0, still=still)
    expected = torch.from_numpy(oracle.golden(2 * pairs, heads, 0.2, 20.0, still))
    torch.testing.assert_close(freqs.double(), expected, rtol=2e-4, atol=2e-4)


def test_invariant_golden_directions_are_spread():
    """Every pair of every head points its own way, and any run of them covers the half circle evenly."""
    freqs = golden_freqs(64, num_heads=6, slowest=1.0, fastest=1.0)  # [6, 2, 32]
    y, x = freqs.transpose(0, 1).flatten(1)
    angle = torch.atan2(y, x).remainder(math.pi).sort().values
    gaps = angle.diff()
    assert gaps.min() > 0.3 * math.pi / 192
    assert gaps.max() < 3 * math.pi / 192


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_shape_of_quasirandom(axes):
    freqs = golden_freqs(16, num_heads=3, directions="quasirandom", axes=axes)
    assert freqs.shape == (3, axes, 8)
    speeds = freqs.norm(dim=1)
    expected = torch.from_numpy(0.2 * 100 ** np.linspace(0, 1, 8)).float().expand(3, 8)
    torch.testing.assert_close(speeds, expected, rtol=1e-5, atol=1e-6)


@given(st.integers(2, 200), st.sampled_from(["keep", "still"]), st.sampled_from([0.5, 1.0, 3.0]))
def test_reference_whole_turns(width, slow, least):
    """Fast bands count whole turns around, at most half a turn from what they were; slow ones stay or stop."""
    freqs = vp.ladder(24, theta=1e4)
    out = whole_turns(freqs, float(width), least=least, slow=slow)
    before, after = freqs.double() * width / TURN, out.double() * width / TURN
    for old, new in zip(before.tolist(), after.tolist(), strict=True):
        if old >= least:
            assert new == pytest.approx(round(new), abs=1e-4 * max(1.0, new))
            assert abs(new - old) <= 0.5 + 1e-4
            assert round(new) >= 1 or old == pytest.approx(0.5, abs=1e-3)
        else:
            assert new == (pytest.approx(old) if slow == "keep" else 0.0)


@given(st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(0, 20)), st.integers(1, 64))
def test_reference_clamped_axes(sections, pairs):
    assert clamped_axes(sections, pairs).tolist() == oracle.clamped_owners(sections, pairs)


@pytest.mark.parametrize(
    ("sections", "pairs", "counts"),
    [
        ((8, 12, 12), 32, [11, 11, 10]),
        ((16, 24, 24), 64, [22, 21, 21]),
        ((24, 20, 20), 64, [24, 20, 20]),
    ],
)
def test_reference_golden_clamped_counts(sections, pairs, counts):
    """facts/timm.md 1.4: what the axes really get."""
    assert clamped_axes(sections, pairs).bincount(minlength=3).tolist() == counts
    freqs = section_freqs(2 * pairs, sections, theta=1e4, order="interleaved", clamp=True)
    assert (freqs != 0).sum(-1).tolist() == counts


@given(grids(max_side=9), st.sampled_from([10.0, None, 3.5]), st.sampled_from([0.0, 0.5, 1.0]))
def test_reference_circle(hw, radius, alpha):
    if radius is None and hw == (1, 1):
        return  # no extent: a circle of radius 0
    coords = vp.coordinates(Grid(*hw)).double()
    ours = circle_coords(coords, radius=radius, alpha=alpha)
    assert_close_to(ours, torch.from_numpy(oracle.circle(*hw, radius, alpha)), kind="applied")


def test_reference_golden_circle():
    """lose4578/CircleRoPE code/circle_rope.py, run on a 2x3 grid with its shipped config (radius 10, alpha .5)."""
    ours = circle_coords(vp.coordinates(Grid(2, 3)), radius=10.0, alpha=0.5)
    torch.testing.assert_close(ours, torch.tensor(CIRCLE_2X3), rtol=0, atol=2e-5)


@given(grids(max_side=9), st.floats(-50, 50))
def test_invariant_circle_is_equally_far_from_text(hw, s):
    """Per-token distance 0: a text token at (s, s, s) sees every cell at one distance."""
    ids = circle_coords(vp.coordinates(Grid(*hw)).double())
    far = (ids - s).norm(dim=-1)
    assert (far.max() - far.min()).item() < 1e-9
    torch.testing.assert_close(ids.sum(-1), torch.zeros(len(ids)).double(), rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: pixel_freqs(8, max_freq=1.0), r"max_freq is 1\.0"),
        (
            lambda: pixel_freqs(8, max_freq=9.0, spacing="cubic"),
            r"spacing is 'cubic'; it must be one of 'linear', 'log'",
        ),
        (lambda: pixel_freqs(6, max_freq=9.0), r"head_dim is 6 for 2 axes"),
        (lambda: golden_freqs(7, num_heads=1), r"head_dim is 7"),
        (lambda: golden_freqs(8, num_heads=0), r"num_heads 0"),
        (
            lambda: golden_freqs(8, num_heads=1, slowest=2.0, fastest=1.0),
            r"slowest is 2\.0, fastest 1\.0",
        ),
        (lambda: golden_freqs(8, num_heads=1, still=1.0), r"still 1\.0"),
        (lambda: golden_freqs(8, num_heads=1, axes=3), r"directions are 'angle' for 3 axes"),
        (lambda: golden_freqs(8, num_heads=1, directions="wild"), r"directions are 'wild'"),
        (lambda: whole_turns(torch.ones(1), 4.0, least=0.2), r"least is 0\.2"),
        (
            lambda: whole_turns(torch.ones(1), 4.0, slow="stop"),
            r"slow is 'stop'; it must be one of 'keep', 'still'",
        ),
        (lambda: clamped_axes((8, -1, 2), 4), r"sections are \(8, -1, 2\) over 4 pairs"),
        (lambda: section_freqs(8, (4,), theta=1e4, order="contiguous", clamp=True), r"clamp needs"),
        (lambda: circle_coords(torch.zeros(4, 3)), r"coords has shape \(4, 3\); \[\.\.\., n, 2\]"),
        (lambda: circle_coords(torch.zeros(4, 2), alpha=1.5), r"alpha 1\.5; .*alpha in \[0, 1\]"),
        (lambda: circle_coords(torch.zeros(4, 2), radius=0.0), r"radius is 0\.0, .*above 0"),
    ],
)
def test_error(call, match):
    with pytest.raises(PositionError, match=match):
        call()


def test_compile_circle():
    assert graphs_of(lambda h, w: circle_coords(vp.coordinates(Grid(h, w))), SIZES) == 1


def test_device(device):
    for filling in (
        lambda d: pixel_freqs(16, max_freq=10.0, device=d),
        lambda d: golden_freqs(16, num_heads=2, device=d),
        lambda d: golden_freqs(16, num_heads=2, directions="quasirandom", device=d),
        lambda d: clamped_axes((8, 12, 12), 32, device=d),
        lambda d: circle_coords(vp.coordinates(Grid(3, 5), device=d)),
    ):
        there = filling(device)
        assert there.device.type == device.type
        torch.testing.assert_close(there.cpu(), filling(None), rtol=1e-5, atol=1e-5)


# (t, y, x) of the six cells, as the public code prints them.
CIRCLE_2X3 = [
    [0.0, 7.071068, -7.071068],
    [7.527473, -1.0246, -6.502873],
    [5.831871, -7.864871, 2.033],
    [-8.164967, 4.082483, 4.082483],
    [-8.100424, 3.162885, 4.937539],
    [-7.907818, 2.19328, 5.714539],
]
