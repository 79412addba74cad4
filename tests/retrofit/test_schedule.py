"""Schedules against torch's own learning-rate schedulers, and the laws of a pure function of the step."""

import dataclasses
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from visionpos.errors import PositionError
from visionpos.retrofit import Schedule

values = st.floats(-1e3, 1e3)
schedules = st.builds(
    Schedule,
    steps=st.integers(1, 10**7),
    begin=st.integers(0, 10**7),
    start=values,
    end=values,
    shape=st.sampled_from(["linear", "cosine"]),
)


def torch_rates(start: float, end: float, steps: int, shape: str, count: int) -> list[float]:
    """Return what torch's closed forms give a learning rate that goes the same way."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=start)
    kind: Any = torch.optim.lr_scheduler
    if shape == "cosine":
        scheduler = kind.CosineAnnealingLR(optimizer, T_max=steps, eta_min=end)
    else:
        scheduler = kind.LinearLR(
            optimizer, start_factor=1.0, end_factor=end / start, total_iters=steps
        )
    rates = []
    for _ in range(count):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("shape", ["linear", "cosine"])
@pytest.mark.parametrize(("start", "end"), [(1.0, 0.25), (1.0, 0.0), (0.5, 0.125)])
def test_schedule_reference(shape: Any, start: float, end: float) -> None:
    schedule = Schedule(steps=7, start=start, end=end, shape=shape)
    expected = torch_rates(start, end, 7, shape, 8)
    assert [schedule.at(step) for step in range(8)] == pytest.approx(expected, abs=1e-12)


def test_schedule_values_by_hand() -> None:
    """Half a wave: 0, (1 - sqrt(1/2)) / 2, 1/2, 1 - that, 1."""
    ramp = Schedule(steps=4, begin=10, shape="cosine")
    seen = [ramp.at(step) for step in (0, 9, 10, 11, 12, 13, 14, 15, 10**9)]
    eighth = (1 - 0.5**0.5) / 2
    assert seen == pytest.approx([0, 0, 0, eighth, 0.5, 1 - eighth, 1, 1, 1], abs=1e-15)
    assert [Schedule(steps=4, start=2.0, end=-2.0).at(step) for step in range(5)] == [
        2,
        1,
        0,
        -1,
        -2,
    ]


@given(schedules, st.integers(0, 10**7))
def test_schedule_is_exact_at_both_ends(schedule: Schedule, more: int) -> None:
    assert schedule.at(0) == schedule.at(schedule.begin) == schedule.start
    assert schedule.at(schedule.begin + schedule.steps) == schedule.end
    assert schedule.at(schedule.begin + schedule.steps + more) == schedule.end


@given(schedules, st.lists(st.integers(0, 3 * 10**7), min_size=2))
def test_schedule_never_turns_back(schedule: Schedule, steps: list[int]) -> None:
    seen = [schedule.at(step) for step in sorted(steps)]
    assert seen == sorted(seen, reverse=schedule.end < schedule.start)
    low, high = sorted((schedule.start, schedule.end))
    assert all(low <= value <= high for value in seen)


def test_schedule_rounding_does_not_pass_the_end() -> None:
    """2.6 - 4.8 is -2.2000000000000006 in float64: one step before the end it would lie beyond it."""
    schedule = Schedule(steps=10**15, start=2.6, end=-2.2, shape="cosine")
    assert 2.6 + (-2.2 - 2.6) < -2.2
    assert schedule.at(10**15 - 1) == schedule.at(10**15) == -2.2


@given(schedules, st.integers(0, 2 * 10**7))
def test_schedule_reversed_is_the_other_side(schedule: Schedule, step: int) -> None:
    """The two sides of a cross-fade add up to the same at every step."""
    total = schedule.at(step) + schedule.reversed().at(step)
    assert total == pytest.approx(schedule.start + schedule.end, abs=1e-9)
    assert schedule.reversed().reversed() == schedule


def test_schedule_needs_the_step_alone() -> None:
    """Order of calls and copies do not matter; the spec is plain data."""
    schedule = Schedule(steps=9, begin=2, shape="cosine")
    again = Schedule(**dataclasses.asdict(schedule))
    assert again == schedule
    backwards = [schedule.at(step) for step in reversed(range(15))]
    assert backwards[::-1] == [again.at(step) for step in range(15)]
    with pytest.raises(dataclasses.FrozenInstanceError):
        schedule.steps = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"steps": 0}, "steps is 0 and begin 0; whole numbers of at least 1"),
        ({"steps": 2.5}, "steps is 2.5"),
        ({"steps": 3, "begin": -1}, "begin -1"),
        ({"steps": 3, "start": float("nan")}, "start is nan"),
        ({"steps": 3, "end": float("inf")}, "end inf; finite numbers"),
        ({"steps": 3, "shape": "step"}, "shape is 'step'; it must be 'linear' or 'cosine'"),
    ],
)
def test_schedule_error(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(PositionError, match=match):
        Schedule(**fields)


WRONG: list[Any] = [None, "0.5", [1.0], {"x": 0.5}, float("nan"), True]


@pytest.mark.parametrize("field", ["start", "end", "steps", "begin", "shape"])
@pytest.mark.parametrize("value", WRONG, ids=str)
def test_schedule_error_of_kinds(field: str, value: Any) -> None:
    if field in ("steps", "begin") and value is True:
        return  # Python's True counts as 1
    with pytest.raises(PositionError, match=rf"\b{field} (is )?"):
        Schedule(**{"steps": 5, field: value})


@pytest.mark.parametrize("step", [-1, 0.5, None, "3"])
def test_schedule_error_of_a_step(step: Any) -> None:
    with pytest.raises(PositionError, match=r"step is .*; a whole number of at least 0"):
        Schedule(steps=3).at(step)
