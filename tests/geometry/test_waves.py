"""Sines and cosines of angles, in the three orders of the sources."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.compiled import graphs_of
from tests.strategies import seeds
from visionpos.errors import PositionError
from visionpos.geometry import waves

ORDERS = ("sin_cos", "cos_sin", "interleaved")


@pytest.mark.parametrize("order", ORDERS)
def test_shape(order):
    for shape in ((5,), (3, 5), (2, 1, 7, 5)):
        assert waves(torch.zeros(shape), order).shape == (*shape[:-1], 10)


@given(st.sampled_from(ORDERS), seeds())
def test_reference(order, seed):
    turns = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    for row, got in zip(turns.tolist(), waves(turns, order).tolist(), strict=True):
        sines, cosines = [math.sin(t) for t in row], [math.cos(t) for t in row]
        mixed = [v for pair in zip(sines, cosines, strict=True) for v in pair]
        expected = {"sin_cos": sines + cosines, "cos_sin": cosines + sines, "interleaved": mixed}
        assert got == pytest.approx(expected[order], abs=1e-14)


@given(st.sampled_from(ORDERS), st.floats(-9, 9), seeds())
def test_invariant_dot_product_sees_differences(order, shift, seed):
    one, two = torch.randn(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    dot = waves(one, order) @ waves(two, order)
    torch.testing.assert_close(dot, (one - two).cos().sum())
    torch.testing.assert_close(dot, waves(one + shift, order) @ waves(two + shift, order))


def test_error_order():
    with pytest.raises(PositionError, match=r"order is 'cos'; it must be 'sin_cos'"):
        waves(torch.zeros(3), "cos")


@pytest.mark.parametrize("order", ORDERS)
def test_gradient(order):
    turns = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: waves(t, order), (turns,))


@pytest.mark.parametrize("order", ORDERS)
def test_compile(order):
    calls = [(torch.randn(n, 3),) for n in (5, 7, 11, 16, 29, 35)]
    assert graphs_of(lambda t: waves(t, order), calls) == 1


def test_device(device):
    turns = torch.randn(5, 3)
    torch.testing.assert_close(waves(turns.to(device)).cpu(), waves(turns))
