"""The lab: the essay's numbers to their digits, and a gap between keys that a closed form predicts."""

from __future__ import annotations

import cmath
import math
from dataclasses import replace

import numpy as np
import pytest

from visionpos import PositionError
from visionpos.audit.lab import LAB_SCHEMES, lab, lab_weights

# Printed by the essay's own functions: facts of section 2. Written here apart from the shipped YAML.
SHIFT_17 = {"none": 0.0, "sin": 0.484804, "rope": 0.0, "alibi": 0.0}
WEIGHTS = {
    "none": (0.255899, 0.239172, 0.265757, 0.239172),
    "sin": (0.341376, 0.422017, 0.101390, 0.135216),
    "rope": (0.266553, 0.236610, 0.265650, 0.231187),
    "alibi": (0.197911, 0.208558, 0.294599, 0.298932),
}
TWINS = {"none": 1.0, "sin": 3.121051, "rope": 1.023457, "alibi": 0.697676}
QUERY_GAP = {
    "none": (0, 0, 0, 0),
    "sin": (0.0312, 0.2505, 0.0784, 0.3001),
    "rope": (0.0258, 0.0278, 0.0784, 0.0610),
    "alibi": (0, 0, 0, 0),
}


def change(scheme, **moved) -> float:
    return float((lab_weights(scheme) - lab_weights(scheme, **moved)).abs().sum())


@pytest.mark.parametrize("scheme", LAB_SCHEMES)
def test_recorded_numbers(scheme):
    assert round(change(scheme, shift=17), 6) == SHIFT_17[scheme]
    assert lab_weights(scheme).tolist() == pytest.approx(WEIGHTS[scheme], abs=5.1e-7)
    weights = lab_weights(scheme)
    assert float(weights[1] / weights[3]) == pytest.approx(TWINS[scheme], abs=5.1e-7)
    for gap, wanted in zip((1, 5, 50, 5000), QUERY_GAP[scheme], strict=True):
        assert change(scheme, query_gap=gap) == pytest.approx(wanted, abs=5.1e-5)


def test_far_shift():
    assert change("sin", shift=8000) == pytest.approx(0.2270, abs=5e-5)
    assert change("rope", shift=8000) < 1e-11


def test_every_row_agrees_and_every_recorded_number_is_shown():
    rows = lab()
    assert [row for row in rows if not row.agrees] == []
    shown = {(row.test, row.by, row.scheme): row.recorded for row in rows}
    assert {scheme: shown["shift", 17, scheme] for scheme in LAB_SCHEMES} == SHIFT_17
    for scheme in LAB_SCHEMES:
        assert tuple(shown["weight", key, scheme] for key in range(4)) == WEIGHTS[scheme]
        assert shown["twins", None, scheme] == TWINS[scheme]


@pytest.mark.parametrize("gap", [1, 5, 50, 5000])
def test_a_gap_between_keys_is_what_alibi_says(gap):
    """The two keys before the gap lose 0.12 a place; the two behind it keep their distance."""
    before = lab_weights("alibi").numpy()
    wanted = before * np.array([math.exp(-0.12 * gap)] * 2 + [1.0] * 2)
    assert np.allclose(lab_weights("alibi", key_gap=gap).numpy(), wanted / wanted.sum(), atol=1e-12)


@pytest.mark.parametrize("gap", [1, 5, 50])
def test_a_gap_between_keys_turns_rope(gap):
    """q . k is the real part of a sum of products of complex channels, turned by the offset."""
    tokens = np.array(
        [[1, 0.2, 0.4, -0.1], [0.6, 0.8, -0.2, 0.3], [0.1, 0.7, 0.5, -0.4],
         [0.6, 0.8, -0.2, 0.3], [0.3, -0.1, 0.9, 0.7]]
    )  # fmt: skip
    wq = np.array([0.7, -0.2, 0.1, 0.3, 0.1, 0.8, -0.4, 0.2, -0.3, 0.2, 0.9, 0.1, 0.2, 0.1, 0.3, 0.7])  # fmt: skip
    wk = np.array([0.6, 0.1, -0.2, 0.4, -0.2, 0.7, 0.3, 0.1, 0.2, -0.3, 0.8, 0.2, 0.4, 0.2, 0.1, 0.6])  # fmt: skip
    query, keys = tokens[-1] @ wq.reshape(4, 4), tokens[:-1] @ wk.reshape(4, 4)
    offsets = [6 + gap, 5 + gap, 3, 2]
    logits = [
        sum(
            (complex(*query[pair : pair + 2]) * complex(*key[pair : pair + 2]).conjugate()
             * cmath.exp(1j * offset * speed)).real
            for pair, speed in ((0, 1.0), (2, 0.01))
        )
        / 2
        for key, offset in zip(keys, offsets, strict=True)
    ]  # fmt: skip
    wanted = np.exp(logits) / np.exp(logits).sum()
    assert np.allclose(lab_weights("rope", key_gap=gap).numpy(), wanted, atol=1e-12)


def test_a_gap_between_keys_shows_distance_where_moving_the_query_does_not():
    for gap in (1, 5, 50, 5000):
        assert change("alibi", query_gap=gap) < 1e-11
        assert change("alibi", key_gap=gap) > 1e-2
        assert change("none", key_gap=gap) == 0


def test_a_row_can_disagree():
    """What is shown as agreeing is compared, not asserted."""
    row = next(row for row in lab() if row.test == "shift" and row.scheme == "sin")
    assert not replace(row, recorded=0.484806).agrees
    gap = next(row for row in lab() if row.test == "key_gap" and row.scheme == "alibi")
    assert not replace(gap, computed=0.0).agrees
    assert not replace(gap, computed=1e-5).agrees  # weak proves nothing


def test_unknown_scheme():
    with pytest.raises(PositionError, match=r"scheme is 'rpoe'.*rope"):
        lab_weights("rpoe")
