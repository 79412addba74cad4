"""Trials on a model: order, places and evidence. `model_views` has those of larger grids and of prefix tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from visionpos.audit.bench import in_space, larger
from visionpos.audit.changes import (
    GAP,
    SHIFTS,
    flipped,
    gapped,
    shifted,
    stretched,
    transposed,
)
from visionpos.audit.layer import cells_of
from visionpos.audit.model_bench import Bench, Number, Trial, grid_order, ordered, taken
from visionpos.audit.model_border import WINDOW, one_window
from visionpos.audit.model_evidence import (
    INSIDE,
    ablation,
    back_of,
    causal,
    duplicate_keys,
    missing_evidence,
    moved,
    seed_of,
)
from visionpos.audit.model_joined import joined
from visionpos.audit.model_moves import Change
from visionpos.audit.model_prefix import prefix
from visionpos.audit.model_subject import Visit
from visionpos.audit.model_views import extend, out_of_range, zoom
from visionpos.audit.model_watch import Passed
from visionpos.audit.model_windows import back_inside, contents_inside
from visionpos.errors import PositionError
from visionpos.geometry import Grid


def trials_of(intervention: str, bench: Bench) -> Iterator[Trial]:
    """Yield the trials of an intervention by its id."""
    yield from _TRIALS[intervention](bench)


def _content_permutation(bench: Bench) -> Iterator[Trial]:
    subject, order = bench.subject, grid_order(seed_of(bench))

    def tokens() -> list[Number]:
        own = order(subject.grid)
        rows = taken(subject.rows, own)
        back = back_of(own)
        return bench.apart(
            lambda visit: subject.passed(subject.still(), rows, visit=visit), back=back
        )

    def places() -> list[Number]:
        model = bench.moved(ordered(order))
        return bench.apart(lambda visit: subject.passed(model, visit=visit), undone=True)

    def contents() -> list[Number]:
        # One order a count of tokens: an attention knows no more of its grid.
        return contents_inside(bench, lambda count: order(Grid(1, count)))

    if subject.flat:
        yield Trial("", tokens, ("Eq", "A"))
    elif _refused(lambda: bench.moved(ordered(order))):
        yield Trial("", contents, ("Eq", "A"), note=INSIDE)
    else:
        yield Trial("", places, ("Eq", "A"), note=f"places change in place of contents, {INSIDE}")


def _refused(move: Callable[[], Any]) -> bool:
    """Return whether a part of the model refuses a change of places."""
    try:
        move()
    except PositionError:
        return True
    return False


def _joint_permutation(bench: Bench) -> Iterator[Trial]:
    subject, order = bench.subject, grid_order(seed_of(bench))

    def whole() -> list[Number]:
        own = order(subject.grid)
        model, rows = bench.moved(ordered(order)), taken(subject.rows, own)
        return bench.apart(
            lambda visit: subject.passed(model, rows, visit=visit), back=back_of(own)
        )

    if subject.flat:
        yield Trial("", whole, ("Eq", "A"))
    else:
        yield Trial("", _windows(bench, order), ("Eq", "A"), note=INSIDE)


def _windows(bench: Bench, order: Callable[[Grid], Tensor]) -> Callable[[], list[Number]]:
    """Return the measurement in which tokens and places change inside every attention."""

    # An attention knows how many tokens it has, and a part the sides of its window: one order a count.
    def drawn(count: int) -> Tensor:
        return order(Grid(1, count))

    def measure() -> list[Number]:
        subject = bench.subject
        model = bench.moved(ordered(lambda grid: drawn(grid.size)), inside=True)

        def run(visit: Visit) -> Passed:
            with joined(model, drawn):
                return subject.passed(model, visit=visit)

        return bench.apart(run, back=back_inside(model, drawn))

    return measure


def in_plane(
    change: Callable[[Tensor], Tensor],
    *,
    told: Callable[[Grid], Grid] = lambda grid: grid,
    mirrors: bool = False,
) -> Change:
    """Return a change of y and x on the cells of any grid."""
    return Change(lambda grid: in_space(cells_of(grid), change), told, mirrors)


def _shift(bench: Bench) -> Iterator[Trial]:
    for by in SHIFTS:
        name = f"{by} cell" if by == 1 else f"{by} cells"
        yield moved(bench, name, in_plane(lambda c, by=by: shifted(c, by)))  # type: ignore[misc]
    if not bench.subject.flat:
        yield Trial(WINDOW, lambda: one_window(bench), ("O",), note="every block by itself")


def _half_shift(bench: Bench) -> Iterator[Trial]:
    yield moved(bench, "", in_plane(lambda c: shifted(c, 0.5)))


def _stretch_told(bench: Bench) -> Iterator[Trial]:
    # About the outer edge, so that every token keeps its share of the sides.
    yield moved(bench, "", in_plane(lambda c: stretched(c + 0.5) - 0.5, told=larger))


def _stretch_alone(bench: Bench) -> Iterator[Trial]:
    yield moved(bench, "", in_plane(stretched))


def _gap(bench: Bench) -> Iterator[Trial]:
    yield moved(bench, "", in_plane(lambda c: gapped(c, GAP)))


def _flip(bench: Bench) -> Iterator[Trial]:
    yield moved(bench, "", in_plane(flipped, mirrors=True))


def _transpose(bench: Bench) -> Iterator[Trial]:
    def turned(grid: Grid) -> Grid:
        return Grid(grid.width, grid.height, grid.frames)

    yield moved(bench, "", in_plane(transposed, told=turned, mirrors=True))


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
    "N1": duplicate_keys,
    "N2": ablation,
    "N3": missing_evidence,
    "C1": causal,
    "zoom": zoom,
    "extend": extend,
    "prefix": prefix,
}
IDS = tuple(_TRIALS)
