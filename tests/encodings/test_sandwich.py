"""Sandwich: the fact sheet's numbers, any number of heads, lines and grids."""

import math

import pytest
import torch

from tests.reference import pairs as oracle
from visionpos import Dims, Grid, PositionError
from visionpos.config import load_encoding
from visionpos.encodings import Sandwich, SandwichSpec


def sandwich(heads: int = 8, **fields) -> Sandwich:
    return Sandwich(SandwichSpec(**fields), Dims(embed_dim=heads * 4, num_heads=heads, depth=1))


def test_golden():
    """Facts 1.2, NVIDIA/NeMo's formula: width 128, 8 heads."""
    bias = sandwich().values(torch.tensor([0.0, 1, 2, 8, 64, 512]).unsqueeze(-1))
    expected = torch.tensor([0, -1.44662, -5.20199, -17.13399, -32.87182, -47.96132])
    torch.testing.assert_close(bias[0], expected, rtol=0, atol=6e-5)
    assert torch.equal(bias[7], bias[0] / 8)


@pytest.mark.parametrize(("heads", "width"), [(1, 2), (3, 6), (12, 64)])
def test_reference(heads, width):
    module = sandwich(heads, width=width)
    steps = torch.arange(-40.0, 41.0, dtype=torch.float64)
    out = module.values(steps.unsqueeze(-1))
    expected = [
        [oracle.sandwich(int(step), width, head, heads) for step in steps]
        for head in range(1, heads + 1)
    ]
    torch.testing.assert_close(out, torch.tensor(expected, dtype=torch.float64))


def test_invariant_far_differences_keep_float32():
    """Terms are summed as falls from 1: near 0 nothing is lost."""
    exact = sandwich().values(torch.ones(1, 1, dtype=torch.float64))
    torch.testing.assert_close(
        sandwich().values(torch.ones(1, 1)).double(), exact, rtol=1e-6, atol=0
    )


def test_shape_of_a_grid_row_after_row():
    """Another grid is read as the line of its cells."""
    module = sandwich(2)
    assert torch.equal(module(Grid(3, 5)), module(Grid(1, 15)))
    assert torch.equal(module(Grid(3, 5)), module.along(15))
    assert torch.equal(module.along(3, 15), module.along(15)[:, 12:])
    assert load_encoding("sandwich") == SandwichSpec()


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"width": 7}, "width is 7; an even number"),
        ({"width": 0}, "width is 0"),
        ({"theta": -1.0}, r"theta is -1\.0"),
    ],
)
def test_error_spec(fields, match):
    with pytest.raises(PositionError, match=match):
        SandwichSpec(**fields)


def test_error_axes():
    with pytest.raises(PositionError, match=r"offsets has 2 axes"):
        sandwich().values(torch.zeros(3, 2))


def test_ids_past_float32():
    """Far ids keep the turns of neighbouring differences: a loop in float64 is the oracle."""
    bias = Sandwich(SandwichSpec(), Dims(embed_dim=16, num_heads=2, depth=1))
    far = [2**17 + 1, 2**24 + 1, 2**24 + 2]
    found = bias.between(torch.tensor(far).unsqueeze(-1), torch.zeros(1, 1, dtype=torch.int64))
    expected = [
        sum(math.cos(step * 10000 ** (-2 * k / 128)) - 1 for k in range(1, 65)) * 2 / 8
        for step in far
    ]
    torch.testing.assert_close(found[0, :, 0], torch.tensor(expected), rtol=1e-5, atol=1e-5)
