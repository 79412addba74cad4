"""Trials: each intervention carried out on one attention layer around a scheme."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from visionpos.audit.bench import (
    Bench,
    Numbers,
    Trial,
    compared,
    in_space,
    larger,
    largest_bias,
    moved,
    undone_pass,
)
from visionpos.audit.changes import (
    GAP,
    SHIFTS,
    flipped,
    gapped,
    reordered,
    replaced,
    shifted,
    stretched,
    transposed,
    undone,
)
from visionpos.audit.layer import Door
from visionpos.audit.outcome import Band
from visionpos.audit.trials_views import extend, out_of_range, prefix, zoom
from visionpos.geometry.grid import Grid

_FAR = 1e6
GROWTH = Band(zero=0.25, nonzero=0.45)
"""Of a bias from far to far squared: a bound gives nearly 0, a logarithm nearly 1, a power more."""


def trials_of(intervention: str, bench: Bench) -> Iterator[Trial]:
    """Yield the trials of an intervention by its id."""
    yield from _TRIALS[intervention](bench)


def _content_permutation(bench: Bench) -> Iterator[Trial]:
    order = replaced(bench.placed.cells, bench.generator)

    def measure() -> Numbers:
        return undone_pass(bench.run(), bench.run(tokens=bench.tokens[order]), undone(order))

    yield Trial("", measure, ("Eq", "A"))


def _joint_permutation(bench: Bench) -> Iterator[Trial]:
    order = reordered(bench.count, bench.generator)

    def measure() -> Numbers:
        both = bench.run(bench.placed.picked(order), bench.tokens[order])
        return undone_pass(bench.run(), both, undone(order))

    yield Trial("", measure, ("Eq", "A"))


def shift_name(cells: int) -> str:
    """Return the variant's name of a shift."""
    return f"{cells} cell" if cells == 1 else f"{cells} cells"


def _shift(bench: Bench) -> Iterator[Trial]:
    for by in SHIFTS:
        yield moved(bench, shift_name(by), in_space(bench.placed.cells, lambda c: shifted(c, by)))  # noqa: B023


def _half_shift(bench: Bench) -> Iterator[Trial]:
    yield moved(bench, "", in_space(bench.placed.cells, lambda c: shifted(c, 0.5)))


def _stretch_told(bench: Bench) -> Iterator[Trial]:
    # About the outer edge, so that every token keeps its share of the sides.
    cells = in_space(bench.placed.cells, lambda c: stretched(c + 0.5) - 0.5)
    yield moved(bench, "", cells, larger(bench.placed.grid))


def _stretch_alone(bench: Bench) -> Iterator[Trial]:
    yield moved(bench, "", in_space(bench.placed.cells, stretched))

    def growth() -> Numbers:
        far, further = (largest_bias(bench, _FAR**power) for power in (1, 2))
        return {"bias": further / far - 1.0 if far else 0.0}

    if bench.door.spread(bench.placed) is not None:
        note = f"growth of the largest bias from a stretch by {_FAR:g} to its square"
        yield Trial("far", growth, ("bias",), band=GROWTH, note=note)


def _wide_axis(bench: Bench) -> int:
    """Return x, or y where the grid is one column."""
    return -1 if bench.placed.grid.width > 1 else -2


def _gap(bench: Bench) -> Iterator[Trial]:
    yield moved(
        bench, "", in_space(bench.placed.cells, lambda c: gapped(c, GAP, axis=_wide_axis(bench)))
    )


def _flip(bench: Bench) -> Iterator[Trial]:
    yield moved(
        bench, "", in_space(bench.placed.cells, lambda c: flipped(c, axis=_wide_axis(bench)))
    )


def _transpose(bench: Bench) -> Iterator[Trial]:
    grid = bench.placed.grid
    turned = Grid(grid.width, grid.height, grid.frames)
    yield moved(bench, "", in_space(bench.placed.cells, transposed), turned)


def _duplicate_keys(bench: Bench) -> Iterator[Trial]:
    first, second = 0, bench.count // 2 + bench.placed.grid.width // 2
    second = min(second, bench.count - 1)

    def measure() -> Numbers:
        tokens = bench.tokens.clone()
        tokens[second] = tokens[first]
        weights = bench.run(tokens=tokens).weights.double()
        return {"weights": float((weights[..., first] - weights[..., second]).abs().max())}

    yield Trial("", measure, ("weights",))


def _ablation(bench: Bench) -> Iterator[Trial]:
    def without() -> Numbers:
        return compared(bench.run(), bench.run(door=Door()))

    order = replaced(bench.placed.cells, bench.generator)

    def shuffled() -> Numbers:
        return compared(bench.run(), bench.run(bench.placed.picked(order)))

    yield Trial("taken out", without)
    yield Trial("places shuffled", shuffled)


def _missing_evidence(bench: Bench) -> Iterator[Trial]:
    count = bench.count
    order = reordered(count, bench.generator).tolist()
    # A scheme that counts tokens up to a key passes nothing on from the last of them, and the first counts for none.
    hidden = next(one for one in order if 0 < one < count - 1)
    other = next(one for one in order if one != hidden)
    seen = torch.ones(count, count, dtype=torch.bool)
    seen[:, hidden] = False
    seen[hidden, hidden] = True
    kept = torch.arange(count) != hidden

    def measure() -> Numbers:
        tokens, cells = bench.tokens.clone(), bench.placed.cells.clone()
        tokens[hidden] = 3.0 * bench.random_tokens(1)[0]
        if not bench.door.lattice:
            cells[hidden] = cells[other]
        before = bench.run(seen=seen).picked(kept)
        after = bench.run(bench.placed.moved(cells), tokens, seen=seen).picked(kept)
        return compared(before, after)

    note = (
        "a map has one token a cell: the content alone is scrambled" if bench.door.lattice else ""
    )
    yield Trial("", measure, note=note)


def _causal(bench: Bench) -> Iterator[Trial]:
    order = reordered(bench.count, bench.generator)
    causal = torch.ones(bench.count, bench.count, dtype=torch.bool).tril()

    def measured(door: Door) -> Callable[[], Numbers]:
        def measure() -> Numbers:
            before = bench.run(door=door, seen=causal)
            after = bench.run(
                bench.placed.picked(order), bench.tokens[order], door=door, seen=causal
            )
            return {"Eq": undone_pass(before, after, undone(order))["Eq"]}

        return measure

    yield Trial("without scheme", measured(Door()), ("Eq",))
    yield Trial("with scheme", measured(bench.door), ("Eq",))


_TRIALS: dict[str, Callable[[Bench], Iterator[Trial]]] = {
    "P1": _content_permutation,
    "P2": _joint_permutation,
    "S1": _shift,
    "S-half": _half_shift,
    "D1a": _stretch_told,
    "D1b": _stretch_alone,
    "D2": _gap,
    "R1": _flip,
    "R2": _transpose,
    "G1": out_of_range,
    "N1": _duplicate_keys,
    "N2": _ablation,
    "N3": _missing_evidence,
    "C1": _causal,
    "zoom": zoom,
    "extend": extend,
    "prefix": prefix,
}
IDS = tuple(_TRIALS)
