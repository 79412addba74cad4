"""What stretching does to the phases of a grid: the measured warning of facts 6, and the advice."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from visionpos.errors import PositionError
from visionpos.geometry import Grid
from visionpos.geometry.phases import RULES, compare_stretches


def rows(theta, trained, target, **options):
    advice = compare_stretches(theta, trained, target, **({"head_dim": 64} | options))
    return {row.rule: row for row in advice.rows}, advice


# Facts 6, "Measured warning": 14 to 28 cells, base 100, 16 pairs an axis.
@pytest.mark.parametrize(
    ("rule", "outside", "excess", "adjacent"),
    [
        ("none", 13, 2.08, 1.0),
        ("pi", 0, 1.04, 0.50),
        ("ntk", 11, 1.81, 1.0),
        ("theta", 12, 1.82, 1.0),
        ("yarn", 0, 1.04, 1.0),
        ("yarn_paper", 0, 1.04, 0.52),
    ],
)
def test_golden_twice_as_many_cells(rule, outside, excess, adjacent):
    found, _ = rows(100.0, Grid(14, 14), Grid(28, 28))
    for axis in found[rule].axes:
        assert (axis.outside, axis.unturned) == (outside, 13)
        assert axis.excess == pytest.approx(excess, abs=5e-3)
        assert axis.adjacent == pytest.approx(adjacent, abs=5e-3)


def test_golden_four_times_as_many_cells():
    found, _ = rows(100.0, Grid(16, 16), Grid(64, 64))
    assert found["ntk"].excess == pytest.approx(2.90, abs=5e-3)


@pytest.mark.parametrize("target", [Grid(28, 28), Grid(32, 32), Grid(14, 32), Grid(20, 31)])
def test_advice_is_what_keeps_both(target):
    """Index-ramp YaRN is the only stock rule that keeps the trained range and the phase between neighbours."""
    found, advice = rows(100.0, Grid(14, 14), target)
    assert advice.rule == "yarn"
    both = [
        name
        for name, row in found.items()
        if row.outside == 0 and row.adjacent > 0.99 and name in ("pi", "ntk", "theta", "yarn_paper")
    ]
    assert not both
    assert "0 of the 26 pairs" in advice.reason
    assert "pi leaves 0 of 26 outside and keeps" in advice.reason
    assert f"ntk leaves {found['ntk'].outside} of 26 outside" in advice.reason


@pytest.mark.parametrize("target", [Grid(14, 14), Grid(7, 11), Grid(15, 14)])
def test_advice_for_a_grid_no_larger_is_none(target):
    """One cell more is within the margin of 1.1."""
    _, advice = rows(100.0, Grid(14, 14), target)
    assert advice.rule == "none"
    assert "no pair leaves" in advice.reason


def test_axes_are_told_apart():
    found, _ = rows(100.0, Grid(14, 16), Grid(14, 64))
    y, x = found["none"].axes
    assert (y.outside, x.outside) == (0, 12)
    assert (y.excess, x.excess) == pytest.approx((1.0, 63 / 15))
    clip, _ = rows(100.0, Grid(4, 4, frames=3), Grid(4, 4, frames=12), head_dim=48)
    assert [axis.outside for axis in clip["none"].axes] == [8, 0, 0]


def test_one_trained_cell_has_no_phase_to_keep():
    found, advice = rows(100.0, Grid(1, 14), Grid(4, 14))
    assert found["pi"].axes[0].excess == float("inf")
    assert found["pi"].axes[0].outside == 16
    assert advice.rule == "none"
    assert "no rule keeps more than 13 of the 29 pairs" in advice.reason
    same, _ = rows(100.0, Grid(1, 14), Grid(1, 14))
    assert same["none"].outside == 0


@pytest.mark.parametrize(
    ("trained", "target"), [((7, 7), (32, 32)), ((3, 5), (7, 11)), ((2, 8), (9, 40))]
)
def test_interpolation_leaves_no_phase_of_short_axes(trained, target):
    """Interpolated cells lie within the trained extent, of which the last cell is 1 / (cells - 1) of what was seen."""
    found, advice = rows(100.0, Grid(*trained), Grid(*target))
    assert found["pi"].outside == 0
    assert found["none"].outside > 0
    assert advice.rule != "none"
    for axis, cells in zip(found["pi"].axes, trained, strict=True):
        assert 1 < axis.excess < cells / (cells - 1)


def test_pairs_that_turn_are_left_out():
    """A base of 1.5 over 64 cells: every pair has seen every phase."""
    found, advice = rows(1.5, Grid(64, 64), Grid(128, 128))
    assert found["none"].unturned == 0
    assert found["none"].excess == 0
    assert advice.rule == "none"


def test_time_adds_the_rules_of_diffusion():
    found, advice = rows(1e4, Grid(64, 64), Grid(128, 128), time=0.5)
    assert set(found) == {*RULES, "lumina", "dype"}
    assert advice.rule in RULES
    assert found["lumina"].adjacent == pytest.approx(0.5)


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 40), st.integers(2, 40), st.integers(2, 90), st.integers(2, 90))
def test_invariant_advice_is_not_beaten(h, w, new_h, new_w):
    found, advice = rows(100.0, Grid(h, w), Grid(new_h, new_w))
    best = found[advice.rule]
    for row in found.values():
        assert row.outside >= best.outside
        if row.outside == best.outside:
            assert row.adjacent <= best.adjacent + 1e-6


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: rows(1.0, Grid(4, 4), Grid(8, 8)), "theta is 1.0; a ladder base above 1"),
        (lambda: rows(0.0, Grid(4, 4), Grid(8, 8)), "theta is 0.0"),
        (lambda: rows(100.0, Grid(4, 4), Grid(8, 8), head_dim=18), "multiple of 4"),
        (lambda: rows(100.0, Grid(4, 4), Grid(8, 8), time=2.0), "time is 2.0"),
        (lambda: rows(100.0, (4, 4), Grid(8, 8)), "trained is"),
    ],
)
def test_error_names_value_and_remedy(call, match):
    with pytest.raises(PositionError, match=match):
        call()
