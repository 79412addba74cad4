"""Position ids of one axis: restart, randomized, PoSE, coupling."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from visionpos.errors import PositionError
from visionpos.geometry import Grid
from visionpos.geometry.coupling import coupled_addition, coupled_cells, coupled_start
from visionpos.geometry.sequence import (
    document_lengths,
    pose,
    randomized,
    restart,
    skipped,
)


def source(seed=0):
    return torch.Generator().manual_seed(seed)


@given(st.lists(st.integers(1, 7), min_size=1, max_size=6))
def test_invariant_restart_equals_documents_alone(lengths):
    documents = torch.cat([torch.full((n,), 10 - i) for i, n in enumerate(lengths)])
    alone = torch.cat([torch.arange(n) for n in lengths])
    assert torch.equal(restart(documents), alone)
    longest = torch.cat([torch.full((n,), n) for n in lengths])
    assert torch.equal(document_lengths(restart(documents), documents), longest)


def test_restart_of_rows_with_padding_between():
    rows = torch.tensor([[3, 3, -1, 0, 0, -1, -1], [1, 1, 1, 1, 1, 1, 2]])
    assert restart(rows).tolist() == [[0, 1, 0, 0, 1, 0, 1], [0, 1, 2, 3, 4, 5, 0]]
    assert restart(rows[:, :0]).shape == (2, 0)


def test_lengths_are_a_row_s_own():
    """Two rows name their documents alike; neither sees the other's length. Padding runs count for themselves."""
    ids = torch.tensor([[0, 1, 2], [0, 0, 7]])
    documents = torch.tensor([[0, 0, 0], [0, -1, 0]])
    assert document_lengths(ids, documents).tolist() == [[3, 3, 3], [8, 1, 8]]
    assert document_lengths(ids).tolist() == [[3, 3, 3], [8, 8, 8]]
    assert document_lengths(ids[0, :0]).tolist() == []


@given(st.integers(1, 40), st.integers(0, 60), st.integers(0, 99))
def test_invariant_randomized(n, more, seed):
    ids = randomized(n, n + more, generator=source(seed))
    assert ids.shape == (n,)
    assert ids.dtype == torch.int64
    assert bool((ids.diff() > 0).all())
    assert 0 <= int(ids.min()) <= int(ids.max()) < n + more


def test_draws_come_from_the_generator_alone():
    torch.manual_seed(0)
    first = randomized(5, 2048, generator=source(3))
    torch.manual_seed(1)
    assert torch.equal(first, randomized(5, 2048, generator=source(3)))
    assert not torch.equal(first, randomized(5, 2048, generator=source(4)))
    state = torch.random.get_rng_state()
    pose(9, 50, generator=source())
    assert torch.equal(state, torch.random.get_rng_state())


@given(st.integers(1, 30), st.integers(0, 50), st.integers(0, 50), st.integers(0, 99))
def test_invariant_pose(n, more, rest, seed):
    draw = pose(n, n + more, generator=source(seed), text_tokens=n + rest)
    for line, limit in ((draw.ids, n + more), (draw.tokens, n + rest)):
        assert line.shape == (n,)
        jumps = (line.diff() != 1).nonzero().flatten()
        assert len(jumps) <= 1
        assert int(line[0]) == 0
        assert int(line.max()) < limit
    if len(jumps):
        assert int(jumps) + 1 <= (n + 1) // 2


def test_pose_reaches_both_ends():
    """Every first part, the largest skip, and the last token of the text are drawn at times."""
    draws = [pose(5, 9, generator=source(seed), text_tokens=7) for seed in range(200)]
    assert {int((draw.ids.diff() != 1).nonzero().sum()) for draw in draws} >= {0, 1, 2}
    assert {int(draw.ids[-1]) for draw in draws} == {4, 5, 6, 7, 8}
    assert {int(draw.tokens[-1]) for draw in draws} == {4, 5, 6}


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 7), st.integers(1, 9), st.booleans())
def test_invariant_coupling(first, second, answer, start, is_reversed):
    """Digits of equal weight share an id, others differ; no id is 0."""
    ids = coupled_addition(first, second, answer, start=start, is_reversed=is_reversed).tolist()
    a, plus, b = ids[:first], ids[first], ids[first + 1 : first + 1 + second]
    c = ids[first + second + 2 :]
    c = c[::-1] if is_reversed else c
    assert len(ids) == first + second + answer + 2
    for digits in (a, b, c):
        assert digits[::-1] == [start + 1 + weight for weight in range(len(digits))]
    assert plus == start >= 1


def test_coupled_start_fills_the_table():
    starts = {coupled_start(8, 3, generator=source(seed)) for seed in range(100)}
    assert starts == {1, 2, 3}
    assert max(coupled_addition(3, 3, 3, start=3).tolist()) == 7


@pytest.mark.parametrize("size", [(3, 5), (1, 7), (7, 1), (2, 2)])
def test_coupled_cells_of_one_size_are_the_same(size):
    grid = Grid(*size)
    assert coupled_cells(grid, grid).tolist() == list(range(grid.size))


def test_coupled_cells_by_centres():
    """Each cell's centre lies in the cell it is coupled to, on rectangles of unlike sides."""
    small, large = Grid(2, 3), Grid(7, 5)
    for cells, onto in ((small, large), (large, small)):
        found = coupled_cells(cells, onto).tolist()
        for number, place in enumerate(found):
            y, x = divmod(number, cells.width)
            row, column = divmod(place, onto.width)
            assert row <= (y + 0.5) * onto.height / cells.height < row + 1 + 1e-9
            assert column <= (x + 0.5) * onto.width / cells.width < column + 1 + 1e-9


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: randomized(5, 4, generator=source()), "limit is 4 and n 5"),
        (lambda: randomized(0, 4, generator=source()), "n is 0"),
        (lambda: pose(8, 7, generator=source()), "target is 7"),
        (lambda: pose(8, 9, generator=source(), text_tokens=7), "text_tokens 7"),
        (lambda: skipped(4, 5, 0), "first is 5"),
        (lambda: skipped(4, 2, -1), "skip -1"),
        (lambda: skipped(4, 2, 2**63 - 1), r"up to 2\*\*63 - 1"),
        (lambda: coupled_addition(3, 2, 3, start=2**63 - 1), r"up to 2\*\*63 - 1"),
        (lambda: coupled_addition(3, 2, 3, start=0), "start is 0"),
        (lambda: coupled_start(5, 3, generator=source()), "at least 6 rows"),
        (lambda: coupled_cells(Grid(2, 2, frames=2), Grid(2, 2)), "2 and 1 frames"),
        (lambda: restart(torch.tensor([0.0, 1.0])), "whole numbers"),
        (lambda: restart(torch.zeros(3, dtype=torch.bfloat16)), "bfloat16"),
        (lambda: document_lengths(torch.arange(3), torch.arange(2)), r"\(2,\) and ids \(3,\)"),
        (lambda: randomized(5, 9, generator=3), "generator is 3"),
    ],
)
def test_error_names_value_and_remedy(call, match):
    with pytest.raises(PositionError, match=match):
        call()
