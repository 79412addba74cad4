"""Ids spread along lines: against loops in rational numbers, without a wait for the device."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from visionpos.errors import PositionError
from visionpos.kernels.ids import LinePlan, repadded

WAITS = ("_local_scalar_dense", "nonzero", "item", "masked_select", "_to_copy.cpu", "equal")


class Watch(TorchDispatchMode):
    """Refuses operations that wait for a device, and notes copies between devices."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[str, bool]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.__name__.split(".")[0]
        assert name not in WAITS, f"{name} waits for the device"
        assert name != "repeat_interleave" or kwargs.get("output_size") is not None, "a sum is read"
        if name == "_to_copy" and kwargs.get("device") is not None:
            self.copies.append(
                (torch.device(kwargs["device"]).type, kwargs.get("non_blocking", False))
            )
        return func(*args, **kwargs)


def looped(lengths: list[int], lines: list[list[tuple]], dtype: torch.dtype) -> list[list]:
    """The definition, one token at a time; a fraction is rounded once, as is its sum with the base."""
    out: list[list] = [[] for _ in lines]
    for axis, rows in enumerate(lines):
        place = 0
        for length, (base, origin, above, below) in zip(lengths, rows, strict=True):
            for _ in range(length):
                step = Fraction((place - origin) * above, below)
                out[axis].append(base + (float(step) if dtype == torch.float64 else int(step)))
                place += 1
    return out


def planned(lengths: list[int], lines: list[list[tuple]], dtype: torch.dtype) -> LinePlan:
    parts = np.array([[list(one[1:]) for one in rows] for rows in lines], dtype=np.int64)
    parts = parts.reshape(len(lines), len(lengths), 3)
    origin, above, below = torch.from_numpy(parts).unbind(-1)
    base = torch.tensor([[one[0] for one in rows] for rows in lines], dtype=dtype)
    base = base.reshape(len(lines), len(lengths))
    whole = dtype == torch.int64
    return LinePlan(
        torch.tensor(lengths, dtype=torch.int64), base, origin, above, None if whole else below, sum(lengths)
    )  # fmt: skip


@st.composite
def plans(draw, *, whole: bool):
    lengths = draw(st.lists(st.integers(0, 7), max_size=9))
    number = st.integers(-50, 10**9) if whole else st.floats(-50, 1e6, width=32)
    line = st.tuples(
        number,
        st.integers(-40, 40),
        st.integers(0, 9),
        st.just(1) if whole else st.integers(1, 300),
    )
    axes = draw(st.integers(1, 4))
    rows = st.lists(line, min_size=len(lengths), max_size=len(lengths))
    return lengths, [draw(rows) for _ in range(axes)]


@settings(max_examples=60)
@given(plans(whole=True))
def test_reference_whole(drawn) -> None:
    """Lines of any length, none too, that stand still or run, on any number of axes."""
    assert planned(*drawn, torch.int64).ids().tolist() == looped(*drawn, torch.int64)


@settings(max_examples=60)
@given(plans(whole=False))
def test_reference_fractions(drawn) -> None:
    """Bit for bit: numerators are exact whole numbers, so that only the quotient and the sum are rounded."""
    assert planned(*drawn, torch.float64).ids().tolist() == looped(*drawn, torch.float64)


def test_reference_a_prompt_by_hand() -> None:
    """Two words, a grid of 2 x 3, one word: M-RoPE as in the paper's figure."""
    #        text  row 0  row 1  text
    lengths = [2, 3, 3, 1]
    base = torch.tensor([[0, 2, 2, -3], [0, 2, 3, -3], [0, 2, 2, -3]])
    origin = torch.tensor([[0, 0, 0, 0], [0, 0, 0, 0], [0, 2, 5, 0]])
    above = torch.tensor([[1, 0, 0, 1], [1, 0, 0, 1], [1, 1, 1, 1]])
    plan = LinePlan(torch.tensor(lengths), base, origin, above, None, 9)
    assert plan.ids().tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5],
        [0, 1, 2, 2, 2, 3, 3, 3, 5],
        [0, 1, 2, 3, 4, 2, 3, 4, 5],
    ]


def test_reference_far_places_keep_every_digit() -> None:
    """Whole numbers beyond what float32 and float64 hold."""
    far = 2**60 + 1
    plan = LinePlan(
        torch.tensor([3]), torch.tensor([[far]]), torch.tensor([[0]]), torch.tensor([[1]]), None, 3
    )
    assert plan.ids().tolist() == [[far, far + 1, far + 2]]


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
def test_shape_of_nothing(dtype: torch.dtype) -> None:
    none = torch.zeros(2, 0, dtype=torch.int64)
    plan = LinePlan(none[0], none.to(dtype), none, none, None, 0)
    assert plan.ids().shape == (2, 0)
    assert plan.ids().dtype == dtype


@settings(max_examples=40)
@given(st.integers(0, 4), st.integers(1, 7), st.integers(1, 3), st.integers(0, 999))
def test_reference_repadded(b: int, n: int, axes: int, seed: int) -> None:
    """Padding at either end or in the middle, rows that are all padding, against a loop."""
    draw = np.random.default_rng(seed)
    keep = draw.random((b, n)) < 0.6
    line = draw.integers(0, 99, (axes, keep.sum()))
    expected = np.full((axes, b, n), -7)
    for seen, (row, at) in enumerate(zip(*np.nonzero(keep), strict=True)):
        expected[:, row, at] = line[:, seen]
    out = repadded(torch.from_numpy(line), torch.from_numpy(keep), -7)
    assert out.tolist() == expected.tolist()


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
def test_device_one_copy_and_no_wait(dtype: torch.dtype) -> None:
    """From a plan on the host to padded rows on the device: one copy, nothing that waits, no call on two devices."""
    lengths, lines = [2, 3, 0, 4], [[(1, 0, 1, 2)] * 4, [(5, 3, 0, 1)] * 4]
    plan = planned(lengths, lines, dtype)
    keep = torch.tensor([[True] * 5 + [False], [False, False] + [True] * 4])
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        held = fake.from_tensor(keep).to("cuda")
        with Watch() as watch:
            ids = plan.to("cuda").ids()
            rows = repadded(ids, held, 0)
    assert watch.copies == [("cuda", True)]
    assert (ids.device.type, tuple(ids.shape), ids.dtype) == ("cuda", (2, 9), dtype)
    assert (rows.device.type, tuple(rows.shape)) == ("cuda", (2, 2, 6))


def test_device_the_watch_can_fail() -> None:
    with Watch(), pytest.raises(AssertionError, match="waits"):
        torch.ones(2).nonzero()
    with Watch(), pytest.raises(AssertionError, match="a sum is read"):
        torch.arange(2).repeat_interleave(torch.tensor([1, 2]))


def test_device_the_plan_on_its_own_device_is_itself() -> None:
    plan = planned([2], [[(1, 0, 1, 1)]], torch.int64)
    assert plan.to("cpu") is plan


def moved(plan: LinePlan) -> LinePlan:
    """Through the one tensor that `to` copies, by way of a device that keeps no values; then back by hand."""
    there = plan.to("meta")
    assert there.length.device.type == "meta"
    return there


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
def test_device_shapes_and_dtypes_survive_the_copy(dtype: torch.dtype) -> None:
    plan = planned([2, 1], [[(1, 0, 1, 1)] * 2] * 3, dtype)
    there = moved(plan)
    for name in ("length", "base", "origin", "above", "below"):
        one, other = getattr(plan, name), getattr(there, name)
        assert (one is None) == (other is None)
        assert one is None or (one.shape, one.dtype) == (other.shape, other.dtype)
    assert there.ids().shape == (3, 3)


def test_device_runs_where_there_is_one(device: torch.device) -> None:
    """The values after the copy, on a real device where one is at hand."""
    draw = np.random.default_rng(0)
    lengths = draw.integers(0, 5, 40).tolist()
    for dtype in (torch.int64, torch.float64):
        lines = [[tuple(draw.integers(1, 60, 4).tolist()) for _ in lengths] for _ in range(3)]
        if dtype == torch.int64:
            lines = [[(*one[:3], 1) for one in rows] for rows in lines]
        plan = planned(lengths, lines, dtype)
        got: Tensor = plan.to(device).ids()
        assert got.tolist() == looped(lengths, lines, dtype)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_device_waits_for_nothing_on_a_gpu() -> None:
    plan = planned([2, 3], [[(1, 0, 1, 1)] * 2], torch.int64)
    there = plan.to("cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        ids = there.ids()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert ids.tolist() == [[1, 2, 3, 4, 5]]


def test_error_shapes_and_dtypes() -> None:
    one, two = torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 3, dtype=torch.int64)
    with pytest.raises(PositionError, match=r"length is \(3,\).*\(1, 2\)"):
        LinePlan(two[0], one, one, one, None, 0)
    with pytest.raises(PositionError, match=r"one shape"):
        LinePlan(one[0], one, two, one, None, 0)
    with pytest.raises(PositionError, match=r"base is torch.int64 with steps that are fractions"):
        LinePlan(one[0], one, one, one, one + 1, 0)
    for dtype in (
        torch.int32,
        torch.float32,
    ):  # moved to a device, their bytes would be read two at a time
        with pytest.raises(PositionError, match=r"base is .*; int64, or float64"):
            LinePlan(one[0], one.to(dtype), one, one, None, 0)
