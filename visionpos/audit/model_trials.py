"""Trials on a model: order, places and evidence. `model_views` has those of larger grids and of prefix tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from visionpos.audit.bench import in_space, larger
from visionpos.audit.changes import (
    GAP,
    SHIFTS,
    flipped,
    gapped,
    reordered,
    shifted,
    stretched,
    transposed,
)
from visionpos.audit.layer import cells_of
from visionpos.audit.model_bench import (
    Back,
    Bench,
    Number,
    Trial,
    behind,
    grid_order,
    joinable,
    joined,
    ordered,
    taken,
)
from visionpos.audit.model_moves import Change
from visionpos.audit.model_parts import take_out
from visionpos.audit.model_subject import Visit
from visionpos.audit.model_views import extend, out_of_range, prefix, zoom
from visionpos.audit.model_watch import Passed, Seen
from visionpos.errors import PositionError
from visionpos.geometry import Grid
from visionpos.retrofit.ports import attentions_of

INSIDE = "inside each attention's own grid: windows and stages keep their places"


def trials_of(intervention: str, bench: Bench) -> Iterator[Trial]:
    """Yield the trials of an intervention by its id."""
    yield from _TRIALS[intervention](bench)


def _seed(bench: Bench) -> int:
    return int(torch.randint(2**31, (), generator=bench.generator))


def _content_permutation(bench: Bench) -> Iterator[Trial]:
    subject, order = bench.subject, grid_order(_seed(bench))

    def tokens() -> list[Number]:
        own = order(subject.grid)
        rows = taken(subject.rows, own)
        back = _back(own)
        return bench.apart(
            lambda visit: subject.passed(subject.still(), rows, visit=visit), back=back
        )

    def places() -> list[Number]:
        model = bench.moved(ordered(order))
        return bench.apart(lambda visit: subject.passed(model, visit=visit), undone=True)

    if subject.flat:
        yield Trial("", tokens, ("Eq", "A"))
    else:
        yield Trial("", places, ("Eq", "A"), note=f"places change in place of contents, {INSIDE}")


def _back(order: Tensor) -> Back:
    return lambda tokens, _: behind(torch.argsort(order), tokens)


def _joint_permutation(bench: Bench) -> Iterator[Trial]:
    subject, order = bench.subject, grid_order(_seed(bench))

    def whole() -> list[Number]:
        own = order(subject.grid)
        model, rows = bench.moved(ordered(order)), taken(subject.rows, own)
        return bench.apart(lambda visit: subject.passed(model, rows, visit=visit), back=_back(own))

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
        ports = attentions_of(model)

        def run(visit: Visit) -> Passed:
            with joined(model, drawn):
                return subject.passed(model, visit=visit)

        def back(tokens: int, number: int) -> Tensor:
            port = ports[number]
            if not joinable(port):
                return torch.arange(tokens)
            return behind(torch.argsort(drawn(tokens - port.prefix)), tokens)

        return bench.apart(run, back=back)

    return measure


def _moved(bench: Bench, variant: str, change: Change) -> Trial:
    """Return the trial that brings every position part to other places; tokens stay as they are."""
    subject = bench.subject

    def measure() -> list[Number]:
        model = bench.moved(change)
        return bench.apart(lambda visit: subject.passed(model, visit=visit))

    return Trial(
        variant,
        measure,
        angle=lambda: bench.angle(change),
        note="" if subject.flat else INSIDE,
    )


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
        yield _moved(bench, name, in_plane(lambda c, by=by: shifted(c, by)))  # type: ignore[misc]


def _half_shift(bench: Bench) -> Iterator[Trial]:
    yield _moved(bench, "", in_plane(lambda c: shifted(c, 0.5)))


def _stretch_told(bench: Bench) -> Iterator[Trial]:
    # About the outer edge, so that every token keeps its share of the sides.
    yield _moved(bench, "", in_plane(lambda c: stretched(c + 0.5) - 0.5, told=larger))


def _stretch_alone(bench: Bench) -> Iterator[Trial]:
    yield _moved(bench, "", in_plane(stretched))


def _gap(bench: Bench) -> Iterator[Trial]:
    yield _moved(bench, "", in_plane(lambda c: gapped(c, GAP)))


def _flip(bench: Bench) -> Iterator[Trial]:
    yield _moved(bench, "", in_plane(flipped, mirrors=True))


def _transpose(bench: Bench) -> Iterator[Trial]:
    def turned(grid: Grid) -> Grid:
        return Grid(grid.width, grid.height, grid.frames)

    yield _moved(bench, "", in_plane(transposed, told=turned, mirrors=True))


def _duplicate_keys(bench: Bench) -> Iterator[Trial]:
    subject = bench.subject
    first = 0
    second = min(subject.count - 1, subject.count // 2 + subject.grid.width // 2)

    def measure() -> list[Number]:
        if not subject.flat:
            raise PositionError(
                "windows and stages mix tokens between layers; two keys of equal content exist in none of them."
            )
        own = torch.arange(subject.count)
        own[second] = first
        found: list[float] = []

        def visit(key: tuple[int, int], weights: Tensor) -> None:
            if key[0] == 0:
                front = weights.shape[-1] - subject.count
                rows = weights[..., front:, :].double()
                apart = (rows[..., front + first] - rows[..., front + second]).abs()
                found.append(float(apart.mean()))

        subject.passed(subject.still(), taken(subject.rows, own), visit=visit)
        if not found:
            raise PositionError("the first attention has no keys that are tokens.")
        mean = sum(found) / len(found)
        return [Number("weights", where, "patches", mean) for where in ("layer 0", "end")]

    yield Trial(
        "", measure, ("weights",), note="the first layer alone: later ones see other contents"
    )


def _ablation(bench: Bench) -> Iterator[Trial]:
    subject = bench.subject

    def without() -> list[Number]:
        model = subject.still()
        take_out(model)
        return bench.apart(lambda visit: subject.passed(model, visit=visit))

    yield Trial("taken out", without)
    yield _moved(bench, "places shuffled", ordered(grid_order(_seed(bench))))


def _missing_evidence(bench: Bench) -> Iterator[Trial]:
    subject, count = bench.subject, bench.subject.count
    hidden, other = (int(i) for i in reordered(count, bench.generator)[:2]) if count > 1 else (0, 0)
    seed = _seed(bench)

    def measure() -> list[Number]:
        if not subject.flat:
            raise PositionError(
                "windows and stages give a masked token another number in every layer; no mask follows it."
            )
        model = subject.still()
        kept = torch.arange(count)[torch.arange(count) != hidden]

        def scrambled(grid: Grid) -> Tensor:
            cells = cells_of(grid)
            cells[hidden] = cells[other]
            return cells

        for part in bench.parts(model):
            # A map has one token a cell, and holds the content alone.
            try:
                part(Change(scrambled))
            except PositionError:
                continue
        rows = [one.clone() for one in subject.rows]
        generator = torch.Generator().manual_seed(seed)
        for one in rows:
            noise = torch.randn(one[:, hidden].shape, generator=generator).to(one)
            one[:, hidden] = noise * one.std() * 3
        seen = _without(hidden, count)
        base = subject.passed(subject.still(), seen=seen)
        found = bench.apart(
            lambda visit: subject.passed(model, rows, seen=seen, visit=visit), kept=kept, base=base
        )
        return _reached(bench, found)

    yield Trial("", measure)


def _without(hidden: int, count: int) -> Seen:
    """Return a mask by which everybody sees everything but one patch, which sees itself."""

    def seen(tokens: int) -> Tensor:
        mask = torch.ones(tokens, tokens, dtype=torch.bool)
        key = tokens - count + hidden
        mask[:, key] = False
        mask[key, key] = True
        return mask

    return seen


def _later(count: int) -> Seen:
    """Return a causal mask, through which all see the prefix, whatever its place in the array."""

    def seen(tokens: int) -> Tensor:
        mask = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        mask[:, : tokens - count] = True
        return mask

    return seen


def _reached(bench: Bench, found: list[Number]) -> list[Number]:
    """Return numbers without those of prefix tokens that join behind the blocks, where no mask reaches them."""
    blocks = bench.base.blocks
    late = bool(blocks) and blocks[-1].shape[1] != bench.base.end.shape[1]
    return [one for one in found if not (late and one.where == "end" and one.tokens == "prefix")]


def _causal(bench: Bench) -> Iterator[Trial]:
    subject, order = bench.subject, grid_order(_seed(bench))

    def measured(*, scheme: bool) -> Callable[[], list[Number]]:
        def measure() -> list[Number]:
            if not subject.flat:
                raise PositionError(
                    "windows have no common order; a causal mask has no meaning there."
                )
            own = order(subject.grid)
            models = subject.still(), bench.moved(ordered(order)) if scheme else subject.still()
            for model in () if scheme else models:
                take_out(model)
            seen = _later(subject.count)
            base = subject.passed(models[0], seen=seen)
            found = bench.apart(
                lambda visit: subject.passed(
                    models[1], taken(subject.rows, own), seen=seen, visit=visit
                ),
                back=_back(own),
                base=base,
            )
            return [one for one in _reached(bench, found) if one.metric == "Eq"]

        return measure

    yield Trial("without scheme", measured(scheme=False), ("Eq",))
    yield Trial("with scheme", measured(scheme=True), ("Eq",))


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
