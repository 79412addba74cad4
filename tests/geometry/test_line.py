"""Lines: differences, what is laid over pairs, the shift, and ids that a dtype cannot count."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from visionpos import Grid, PositionError
from visionpos.geometry.line import (
    check_line,
    differences,
    laid,
    line_offsets,
    line_steps,
    shifted,
)
from visionpos.geometry.relative import relative_index

lengths = st.tuples(st.integers(1, 9), st.integers(0, 7)).map(lambda pair: (pair[0], sum(pair)))


@given(lengths)
def test_reference_laid(pair):
    """Entry (i, j) is the difference of the i-th of the last n places and place j."""
    n, m = pair
    out = laid(line_steps(n, m), n, m)
    assert out.tolist() == [[float(i - j) for j in range(m)] for i in range(m - n, m)]


@given(lengths)
def test_reference_shifted_both(pair):
    """With all n + m - 1 differences every pair finds its own."""
    n, m = pair
    rows = 1000 * torch.arange(n).unsqueeze(1) + line_steps(n, m).long()
    assert shifted(rows, m).tolist() == [
        [1000 * i + (m - n + i) - j for j in range(m)] for i in range(n)
    ]


@given(lengths)
def test_reference_shifted_causal(pair):
    """With the m differences of at least 0, pairs up to the diagonal do."""
    n, m = pair
    rows = 1000 * torch.arange(n).unsqueeze(1) + line_steps(1, m).long()
    out = shifted(rows, m)
    assert out.shape == (n, m)
    for i in range(n):
        for j in range(m - n + i + 1):
            assert out[i, j] == 1000 * i + (m - n + i) - j


def test_golden_shift():
    """Facts 1.2: 3 queries and 5 keys: row 0 picks columns 2, 3, 4, row 2 picks 0 to 4."""
    columns = shifted(torch.arange(5).expand(3, 5).contiguous(), 5)
    assert columns[0, :3].tolist() == [2, 3, 4]
    assert columns[2].tolist() == [0, 1, 2, 3, 4]


def test_invariant_shift_is_a_view():
    rows = torch.randn(2, 3, 7)
    assert shifted(rows, 5).data_ptr() == rows.data_ptr() + 2 * 4


def test_gradient_shift():
    rows = torch.randn(2, 3, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: shifted(x, 5) ** 2, rows)
    assert torch.autograd.gradcheck(lambda x: laid(x[0, 0], 3, 5) ** 2, rows)


@pytest.mark.parametrize("grid", [Grid(1, 6), Grid(3, 5), Grid(5, 1), Grid(2, 3, frames=4)])
def test_reference_line_offsets(grid):
    """Every pair of a grid reads the difference of its row-major numbers."""
    steps = line_offsets(grid)[relative_index(grid)][..., 0]
    numbers = torch.arange(grid.size)
    assert torch.equal(steps, (numbers.unsqueeze(1) - numbers).float())


def test_invariant_differences_of_large_ids():
    """Whole numbers past 2 ** 24 keep their differences; so they do beside floats, in float64."""
    ids = torch.tensor([[2**24 + 1], [2**40 + 3]])
    apart = differences(ids, ids - 1)[..., 0]
    assert apart.dtype == torch.int64
    assert apart[0, 0] == 1
    assert apart[1, 0] == 2**40 + 3 - 2**24
    mixed = differences(ids, (ids - 1).double())
    assert mixed.dtype == torch.float64
    assert mixed[0, 0] == 1.0


@pytest.mark.parametrize(
    ("dtype", "last"),
    [(torch.bfloat16, 256), (torch.float16, 2048), (torch.float32, 2**24)],
)
def test_error_ids_a_dtype_cannot_count(dtype, last):
    """257 in bfloat16, 2049 in float16, 2 ** 24 + 1 in float32 are their neighbours."""
    assert torch.tensor(last + 1, dtype=torch.int64).to(dtype).item() != last + 1
    good = torch.tensor([[last - 1]], dtype=torch.int64).to(dtype)
    assert differences(good, good).item() == 0.0
    bad = torch.tensor([[last + 1]], dtype=torch.int64).to(dtype)
    with pytest.raises(PositionError, match=rf"keys are {dtype} and reach .* below {last} alone"):
        differences(good, bad)


@pytest.mark.parametrize(("n", "m"), [(0, 5), (6, 5), (2.0, 5), (True, 5), (-1, 5)])
def test_error_line(n, m):
    with pytest.raises(PositionError, match=r"queries is .*; at least 1 query"):
        check_line(n, m)
