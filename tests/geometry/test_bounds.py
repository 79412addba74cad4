"""Bounds of the ladder base; goldens stand in tests/golden/test_sequence.py."""

import math

import pytest
import torch

from visionpos.errors import PositionError
from visionpos.geometry import bounds
from visionpos.geometry.freqs import ladder


@pytest.mark.parametrize(("trained", "theta", "head_dim"), [(4096, 1e4, 128), (100, 50.0, 12)])
def test_critical_dim_counts_pairs_that_complete_a_turn(trained, theta, head_dim):
    turning = int((trained * ladder(head_dim // 2, theta=theta) >= 2 * math.pi).sum())
    assert bounds.critical_dim(trained, theta, head_dim) == 2 * turning


def test_critical_base_of_the_trained_context_is_its_own():
    assert bounds.critical_base(4096, 4096, 5e5) == pytest.approx(5e5)


def test_cosine_sum_by_loops():
    for m in (0, 3, 29):
        expected = sum(math.cos(m * 100.0 ** (-k / 16)) for k in range(16))
        found = bounds.cosine_sum(torch.tensor([m]), 100.0, 16)
        assert found.item() == pytest.approx(expected, abs=1e-12)


def test_first_failure_is_the_first(monkeypatch):
    """In pieces or at once, the same distance; the next ones may hold again."""
    sums = bounds.cosine_sum(torch.arange(100), 100.0, 16)
    first = int((sums < 0).nonzero()[0])
    assert bounds.first_failure(99, 100.0, 16) == first
    assert bounds.first_failure(first - 1, 100.0, 16) is None
    monkeypatch.setattr(bounds, "SCANNED", 16 * 7)
    assert bounds.first_failure(99, 100.0, 16) == first
    assert bounds.first_failure(first, 100.0, 16) == first


def test_scan_reports_none_where_there_is_none():
    good = bounds.scan_bases(20, 16, low=1e4, high=2e4)
    assert (good.first, good.last_failing) == (1e4, None)
    bad = bounds.scan_bases(4000, 16, low=50.0, high=60.0)
    assert bad.first is None
    assert bad.last_failing == pytest.approx(60, rel=1e-2)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: bounds.critical_dim(6, 1e4, 128), "trained is 6"),
        (lambda: bounds.critical_dim(4096, 1.0, 128), "theta is 1.0"),
        (lambda: bounds.critical_dim(4096, 1e4, 127), "head_dim 127"),
        (lambda: bounds.critical_base(3, 4096), "context is 3"),
        (lambda: bounds.cosine_sum(torch.arange(3), 0.0, 4), "theta is 0.0"),
        (lambda: bounds.first_failure(0, 100.0, 4), "context is 0"),
        (lambda: bounds.scan_bases(9, 4, low=9.0, high=3.0), "low is 9.0"),
        (lambda: bounds.scan_bases(9, 4, low=1.0, high=3.0, step=1.0), "step 1.0"),
        (lambda: bounds.fitted_base(0), "context is 0"),
        (lambda: bounds.fitted_base(10**400), "context is"),
        (lambda: bounds.critical_dim(4096, math.nan, 128), "theta is nan"),
        (lambda: bounds.critical_dim(4096, math.inf, 128), "theta is inf"),
        (lambda: bounds.critical_base(10**18, 7, 1e300), "base would be too large"),
        (lambda: bounds.cosine_sum(torch.tensor([math.nan]), 100.0, 4), "distances holds NaN"),
    ],
)
def test_error_names_value_and_remedy(call, match):
    with pytest.raises(PositionError, match=match):
        call()
