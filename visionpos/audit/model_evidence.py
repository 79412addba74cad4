"""Trials on a model of evidence: equal keys, no scheme, masked tokens, and the order that a mask carries."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from visionpos.audit.changes import reordered
from visionpos.audit.layer import cells_of
from visionpos.audit.model_bench import Back, Bench, Number, Trial, grid_order, ordered, taken
from visionpos.audit.model_joined import behind
from visionpos.audit.model_moves import Change
from visionpos.audit.model_parts import take_out
from visionpos.audit.model_watch import Seen
from visionpos.audit.model_windows import causal_inside, missing_inside, twins_inside
from visionpos.errors import PositionError
from visionpos.geometry import Grid

INSIDE = "inside each attention's own grid: windows and stages keep their places"


def seed_of(bench: Bench) -> int:
    """Return a seed that the bench draws."""
    return int(torch.randint(2**31, (), generator=bench.generator))


def back_of(order: Tensor) -> Back:
    """Return what undoes an order of patches."""
    return lambda tokens, _: behind(torch.argsort(order), tokens)


def moved(bench: Bench, variant: str, change: Change) -> Trial:
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


def duplicate_keys(bench: Bench) -> Iterator[Trial]:
    """Yield two keys of equal content, and how differently they are looked at."""
    subject = bench.subject
    first = 0
    second = min(subject.count - 1, subject.count // 2 + subject.grid.width // 2)

    def measure() -> list[Number]:
        if not subject.flat:
            return twins_inside(bench)
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
        "",
        measure,
        ("weights",),
        note="the first layer alone: later ones see other contents" if subject.flat else INSIDE,
    )


def ablation(bench: Bench) -> Iterator[Trial]:
    """Yield the scheme taken out, and places shuffled."""
    subject = bench.subject

    def without() -> list[Number]:
        model = subject.still()
        take_out(model)
        return bench.apart(lambda visit: subject.passed(model, visit=visit))

    yield Trial("taken out", without)
    yield moved(bench, "places shuffled", ordered(grid_order(seed_of(bench))))


def missing_evidence(bench: Bench) -> Iterator[Trial]:
    """Yield a masked token whose content and place are scrambled."""
    subject, count = bench.subject, bench.subject.count
    hidden, other = (int(i) for i in reordered(count, bench.generator)[:2]) if count > 1 else (0, 0)
    seed = seed_of(bench)

    def measure() -> list[Number]:
        if not subject.flat:
            return missing_inside(bench, seed)
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

    yield Trial("", measure, note="" if subject.flat else INSIDE)


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


def causal(bench: Bench) -> Iterator[Trial]:
    """Yield a causal mask, through which even no position has an order."""
    subject, seed = bench.subject, seed_of(bench)
    order, note = grid_order(seed), "" if bench.subject.flat else INSIDE

    def measured(*, scheme: bool) -> Callable[[], list[Number]]:
        def measure() -> list[Number]:
            if not subject.flat:
                return causal_inside(bench, seed, scheme=scheme)
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
                back=back_of(own),
                base=base,
            )
            return [one for one in _reached(bench, found) if one.metric == "Eq"]

        return measure

    yield Trial("without scheme", measured(scheme=False), ("Eq",), note=note)
    yield Trial("with scheme", measured(scheme=True), ("Eq",), note=note)
