"""Hypothesis strategies: rectangles first, because half of all position bugs vanish on squares."""

from hypothesis import strategies as st

PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47)


def grids(*, max_side: int, min_side: int = 1) -> st.SearchStrategy[tuple[int, int]]:
    """Draw (height, width) in tokens: non-squares, primes, one row, one column, some squares."""
    side = st.integers(min_side, max_side)
    primes = [prime for prime in PRIMES if min_side <= prime <= max_side]
    kinds: list[st.SearchStrategy[tuple[int, int]]] = [
        st.tuples(side, side).filter(lambda hw: hw[0] != hw[1])
        if max_side > min_side
        else st.tuples(side, side),
        side.map(lambda n: (n, n)),
    ]
    if len(primes) > 1:
        kinds.insert(1, st.permutations(primes).map(lambda order: (order[0], order[1])))
    if min_side == 1:
        kinds += [side.map(lambda n: (1, n)), side.map(lambda n: (n, 1))]
    return st.one_of(kinds)


def volumes(*, max_side: int, max_frames: int) -> st.SearchStrategy[tuple[int, int, int]]:
    """Draw (frames, height, width) in tokens, rectangles as in `grids`."""
    return st.tuples(st.integers(1, max_frames), grids(max_side=max_side)).map(
        lambda fg: (fg[0], *fg[1])
    )


def shifts(*, max_shift: int = 64) -> st.SearchStrategy[tuple[int, int]]:
    """Draw (dy, dx), never both zero, so that an invariance under shift says something."""
    step = st.integers(-max_shift, max_shift)
    return st.tuples(step, step).filter(any)


def seeds() -> st.SearchStrategy[int]:
    """Draw a seed for `torch.Generator().manual_seed`."""
    return st.integers(0, 2**31 - 1)
