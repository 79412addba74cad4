"""Ladders of grids, stretched axis by axis."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import visionpos as vp
from tests.reference import sequence as oracle
from visionpos.errors import PositionError
from visionpos.geometry import CoordSpec, Grid
from visionpos.geometry.scaling_axes import (
    GridLinear,
    GridNtk,
    GridTheta,
    GridYarn,
    grid_ladder,
)
from visionpos.geometry.scaling_time import Dype, Lumina
from visionpos.geometry.timed import ThreeWay

RULES = [GridLinear(), GridNtk(), GridTheta(), GridYarn(), Lumina(time=0.5), Dype(time=0.7)]


def axis(rule, pairs, theta, trained, target, row=1):
    """Return the ladder of the x axis of a grid that grows along x alone, or along y with row 0."""
    sides = {0: (Grid(trained, 3), Grid(target, 3)), 1: (Grid(3, trained), Grid(3, target))}[row]
    built = grid_ladder(rule, 4 * pairs, theta=theta, trained=sides[0], target=sides[1])
    return built.freqs[row, row * pairs : (row + 1) * pairs]


def test_golden_ntk_counts_the_channels_of_an_axis():
    """Facts 6: 32 channels an axis, base 100, twice as long: base 209.459."""
    found = axis(GridNtk(), 16, 100.0, 14, 28)
    torch.testing.assert_close(found, vp.ladder(16, theta=209.459), rtol=1e-5, atol=0)


@pytest.mark.parametrize(("factor", "pairs", "slowest"), [(2, 16, 1.915), (4, 28, 3.807)])
def test_golden_lumina_has_no_exponent(factor, pairs, slowest):
    """Facts 6: the slowest pair is divided by less than the factor, once the watershed is passed."""
    trained, target = Grid(14, 10), Grid(14 * factor, 10 * factor)
    built = grid_ladder(Lumina(time=1.0), 4 * pairs, theta=1e4, trained=trained, target=target)
    own = vp.ladder(pairs, theta=1e4)
    assert (own[-1] / built.freqs[0, pairs - 1]).item() == pytest.approx(slowest, abs=5e-4)
    assert built.freqs[0, 0] == 1


def test_lumina_goes_by_area_and_time():
    """One factor for both axes, linear before the watershed: twice as wide alone is slower by the root of 2 on both."""
    own = vp.ladder(4, theta=1e4)
    for time in (0.0, 0.5, 0.99):
        rule = Lumina().at_time(time)
        built = grid_ladder(rule, 16, theta=1e4, trained=Grid(8, 8), target=Grid(8, 16))
        for row in range(2):
            found = built.freqs[row, 4 * row : 4 * row + 4]
            torch.testing.assert_close(found, own / math.sqrt(2))
    early = Lumina(watershed=0.3, time=0.3)
    built = grid_ladder(early, 16, theta=1e4, trained=Grid(8, 8), target=Grid(4, 4))
    torch.testing.assert_close(built.freqs[0, :4], vp.ladder(4, theta=5e3))


@pytest.mark.parametrize("time", [1.0, 0.7, 0.35, 0.1, 0.03])
@pytest.mark.parametrize("target", [65, 96, 128, 256])
def test_reference_dype(time, target):
    """Axes of 56 channels, base 10000, 64 trained cells, as in FLUX; cos and sin grow by 0.1 ln s + 1."""
    trained, grid = Grid(64, 64), Grid(target, 64)
    built = grid_ladder(
        Dype(time=time), 112, theta=1e4, trained=trained, target=grid, dims=(56, 56)
    )
    expected = torch.tensor(oracle.dype(56, 1e4, 64, target, time))
    torch.testing.assert_close(built.freqs[0, :28], expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(built.freqs[1, 28:], vp.ladder(28, theta=1e4))  # as trained
    gain = 0.1 * math.log(target / 64) + 1
    torch.testing.assert_close(built.gains, torch.tensor([gain] * 28 + [1.0] * 28))


def test_dype_ends_at_the_trained_ladder():
    """Published code falls back to interpolation below time 0.007 (pinned), and fails at 0; the ladder stays here."""
    own = vp.ladder(28, theta=1e4, dtype=torch.float64)
    for kappa in (0.0, 0.006**2):
        rule = ThreeWay(factor=2.0, original_positions=64, kappa=kappa)
        torch.testing.assert_close(rule.frequencies(28, 1e4, torch.float64), own)
    published = torch.tensor(oracle.dype(56, 1e4, 64, 128, 0.006), dtype=torch.float64)
    torch.testing.assert_close(published, own / 2)


@pytest.mark.parametrize("time", [1.0, 0.5, 0.0])
def test_dype_ntk_raises_the_base_by_twice_time_squared(time):
    found = axis(Dype(method="ntk", time=time), 28, 1e4, 64, 128)
    base = 1e4 * (2 ** (56 / 54)) ** (2 * time**2)
    torch.testing.assert_close(found, vp.ladder(28, theta=base), rtol=2e-6, atol=0)


def test_theta_grows_with_the_grid():
    torch.testing.assert_close(axis(GridTheta(), 8, 100.0, 14, 28), vp.ladder(8, theta=200.0))
    rule = GridTheta(power=0.0, multiplier=20.0)
    torch.testing.assert_close(axis(rule, 8, 100.0, 14, 28), vp.ladder(8, theta=2000.0))


@pytest.mark.parametrize("row", [0, 1])
def test_yarn_bounds_come_of_the_grid(row):
    """The fastest pair is kept, pairs that never complete a turn are divided by the factor, others lie between."""
    own = vp.ladder(16, theta=100.0)
    kept = axis(GridYarn(), 16, 100.0, 14, 28, row) / own
    turns = 14 * own / (2 * math.pi)
    torch.testing.assert_close(kept[turns < 1], torch.full_like(kept[turns < 1], 0.5))
    assert kept[0].item() == pytest.approx(1.0)
    assert bool((kept.diff() <= 1e-6).all())
    assert bool((kept[turns >= 1] > 0.5).all())
    between = (turns[1] - 1) / (turns[0] - 1)
    assert kept[1].item() == pytest.approx(0.5 + 0.5 * between.item(), abs=1e-6)


def test_yarn_of_five_cells_is_interpolation():
    """No pair completes a turn over five cells."""
    torch.testing.assert_close(axis(GridYarn(), 8, 100.0, 5, 20), vp.ladder(8, theta=100.0) / 4)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("order", ["contiguous", "interleaved"])
@pytest.mark.parametrize(
    ("trained", "target"),
    [
        (Grid(6, 10), Grid(6, 10)),
        (Grid(7, 11), Grid(7, 23)),
        (Grid(1, 9), Grid(3, 27)),
        (Grid(4, 6, frames=3), Grid(8, 6, frames=9)),
    ],
    ids=["same", "wide", "row", "clip"],
)
def test_invariant_layout(rule, order, trained, target):
    """Axes, and which pairs they drive, are those of axial_freqs; an unchanged axis keeps its ladder, gain 1."""
    axes = 3 if trained.frames > 1 else 2
    plain = vp.axial_freqs(12 * axes, theta=100.0, axes=axes, order=order)
    built = grid_ladder(rule, 12 * axes, theta=100.0, trained=trained, target=target, order=order)
    assert torch.equal(built.freqs > 0, plain > 0)
    sides = list(zip(trained.shape, target.shape, strict=True))[-axes:]
    by_area = isinstance(rule, Lumina) and trained.shape[1:] != target.shape[1:]
    for row, (before, after) in enumerate(sides):
        mine = plain[row] > 0
        if before == after and not by_area:
            torch.testing.assert_close(built.freqs[row], plain[row])
            assert bool((built.gains[mine] == 1).all())
        elif after > before:
            assert bool((built.freqs[row][mine] <= plain[row][mine] + 1e-7).all())


def test_interpolation_equals_scaled_coordinates():
    """Frequencies divided by G1 / G0 turn as coordinates times G0 / G1 do, on a rectangle."""
    trained, target = Grid(4, 6), Grid(8, 18)
    coords = vp.coordinates(target, CoordSpec())
    built = grid_ladder(GridLinear(), 16, theta=100.0, trained=trained, target=target)
    packed = coords * torch.tensor([4 / 8, 6 / 18])
    expected = vp.angles(packed, vp.axial_freqs(16, theta=100.0))
    torch.testing.assert_close(built.rotation(coords).cos, expected.cos(), rtol=0, atol=2e-6)


@given(st.integers(2, 20), st.integers(1, 20))
def test_invariant_a_smaller_grid_is_as_trained(trained, smaller):
    smaller = min(trained, smaller)
    for rule in (GridLinear(), GridNtk(), GridTheta(), GridYarn(), Dype(time=0.5)):
        found = axis(rule, 4, 100.0, trained, smaller)
        torch.testing.assert_close(found, vp.ladder(4, theta=100.0))


@pytest.mark.parametrize("rule", [None, GridLinear(), GridTheta()])
def test_speeds_too_small_for_float32_keep_their_places(rule):
    """A base of 1e300: all pairs but the first of an axis stand still in float32."""
    built = grid_ladder(rule, 12, theta=1e300, trained=Grid(3, 5), target=Grid(3, 5))
    assert built.freqs.tolist() == [[1, 0, 0, 0, 0, 0], [0, 0, 0, 1, 0, 0]]
    assert built.gains.tolist() == [1] * 6


def test_dype_fades_to_the_trained_ladder_at_any_time():
    """Bounds times time squared leave what a float holds."""
    grids = {"trained": Grid(2, 2), "target": Grid(4, 2)}
    still = grid_ladder(None, 8, theta=10.0, **grids).freqs
    for time in (1e-150, 1e-160, 1e-170):
        assert torch.equal(grid_ladder(Dype(time=time), 8, theta=10.0, **grids).freqs, still)


def ladder_of(rule=None, head_dim=16, **changes):
    given = {"theta": 100.0, "trained": Grid(4, 4), "target": Grid(8, 8)} | changes
    return lambda: grid_ladder(rule, head_dim, **given)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (ladder_of(Lumina()), "Lumina has no time"),
        (ladder_of(Dype()), r"Use rule.at_time"),
        (lambda: Dype(time=1.5), "time is 1.5"),
        (lambda: GridYarn(beta_slow=0.0), "beta_slow is 0.0"),
        (lambda: GridYarn(beta_fast=0.5), "0 < slow < fast"),
        (lambda: GridTheta(power=-1.0), "power is -1.0"),
        (ladder_of(GridTheta(power=1e6)), "power is 1000000.0 from 4 to 8 cells"),
        (lambda: GridYarn(attention_factor=-1.0), "attention_factor is -1.0"),
        (lambda: Lumina(watershed=-1.0), "watershed is -1.0"),
        (ladder_of(head_dim=18), "multiple of 4"),
        (ladder_of(dims=(8, 6)), "sum to"),
        (ladder_of(dims=(9, 7)), "even number"),
        (ladder_of(dims=(8, 8), order="interleaved"), "order is 'interleaved' with dims"),
        (ladder_of(GridNtk(), head_dim=4), "at least 2 channel pairs"),
        (ladder_of("pi"), "rule is 'pi'"),
        (ladder_of(trained=(4, 4)), r"trained is \(4, 4\)"),
    ],
)
def test_error_names_value_and_remedy(call, match):
    with pytest.raises(PositionError, match=match):
        call()
