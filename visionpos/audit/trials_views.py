"""Trials of range and view: larger grids, same or wider view, and tokens without a place."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from visionpos.audit.bench import (
    Bench,
    Numbers,
    Trial,
    compared,
    in_space,
    larger,
    largest_bias,
    moved,
)
from visionpos.audit.changes import PREFIXES, SHIFTS, STRETCH, outside_share, shifted
from visionpos.audit.layer import Pass, Placed, cells_of
from visionpos.audit.metrics import entropy_share
from visionpos.audit.result import Tokens
from visionpos.geometry.grid import Grid


def out_of_range(bench: Bench) -> Iterator[Trial]:
    """Yield a grid of twice the sides, its sides told and not."""
    large = larger(bench.placed.grid)
    tokens = bench.random_tokens(large.size)
    for variant, told in (("trained sides told", bench.placed.grid), ("new sides told", large)):
        yield Trial(variant, _range_of(bench, tokens, large, told), ("entropy", "outside"))
        bias, phase = _bias_excess(bench, large, told), _phase_excess(bench, large, told)
        if bias is not None:
            yield Trial(variant, bias, ("bias",))
        if phase is not None:
            yield Trial(variant, phase, ("phase",))


def _placed_for(bench: Bench, cells: Tensor, told: Grid) -> Placed:
    if bench.door.lattice:  # a map is as large as the grid, whatever is told
        return bench.pair(cells, told)[1]
    return Placed(cells, told)


def _range_of(bench: Bench, tokens: Tensor, large: Grid, told: Grid) -> Callable[[], Numbers]:
    def measure() -> Numbers:
        placed = (
            Placed(cells_of(large), large) if bench.door.lattice else Placed(cells_of(large), told)
        )
        deployed = bench.run(placed, tokens)
        native = bench.door.native(bench.placed), bench.door.native(placed)
        return {"entropy": entropy_share(deployed.weights), "outside": outside_share(*native)}

    return measure


def _bias_excess(bench: Bench, large: Grid, told: Grid) -> Callable[[], Numbers] | None:
    if bench.door.spread(bench.placed) is None:
        return None

    def measure() -> Numbers:
        trained = largest_bias(bench, placed=bench.placed)
        deployed = largest_bias(bench, placed=Placed(cells_of(large), told))
        return {"bias": deployed / trained - 1.0 if trained else math.inf}

    return measure


def _phase_excess(bench: Bench, large: Grid, told: Grid) -> Callable[[], Numbers] | None:
    trained = bench.door.angles(bench.placed)
    if trained is None:
        return None

    def measure() -> Numbers:
        deployed = bench.door.angles(Placed(cells_of(large), told))
        assert deployed is not None  # noqa: S101 (it turned before)
        spans = [turns.amax(-2) - turns.amin(-2) for turns in (trained, deployed)]
        turning = spans[0] > 0
        if not bool(turning.any()):
            return {"phase": 0.0}
        return {"phase": float((spans[1][turning] / spans[0][turning]).max()) - 1.0}

    return measure


def zoom(bench: Bench) -> Iterator[Trial]:
    """Yield four tokens in place of each, within the same view."""
    grid = bench.placed.grid
    large = larger(grid)
    fine = cells_of(large)
    parents = in_space(fine, lambda c: (c / STRETCH).floor())
    rescaled = in_space(fine, lambda c: (c + 0.5) / STRETCH - 0.5)
    yield Trial("coordinates rescaled", _gathered(bench, parents, Placed(rescaled, grid)))
    yield Trial("new sides told", _gathered(bench, parents, Placed(fine, large)))


def extend(bench: Bench) -> Iterator[Trial]:
    """Yield four copies of the picture side by side."""
    grid = bench.placed.grid
    wide = cells_of(larger(grid))
    sides = wide.new_tensor([grid.height, grid.width])
    copies = in_space(wide, lambda c: c.remainder(sides))
    told = larger(grid) if bench.door.lattice else grid
    yield Trial("trained sides told", _gathered(bench, copies, Placed(wide, told)))


def _gathered(bench: Bench, origin: Tensor, placed: Placed) -> Callable[[], Numbers]:
    """Return a measurement of more tokens, each with the content of one at first: those of one are taken together."""

    def measure() -> Numbers:
        grid = bench.placed.grid
        t, y, x = origin.long().unbind(-1)
        owner = (t * grid.height + y) * grid.width + x  # [m]
        after = bench.run(placed, bench.tokens[owner])
        group = torch.nn.functional.one_hot(owner, bench.count).to(torch.float64)  # [m, n]
        share = group / group.sum(0)
        weights = share.mT @ after.weights.double() @ group
        return compared(bench.run(), Pass(weights, share.mT @ after.outputs.double()))

    return measure


def prefix(bench: Bench) -> Iterator[Trial]:
    """Yield a shift under a token before the others that stands somewhere, or nowhere."""
    first = bench.random_tokens(1)
    cells = bench.placed.cells
    by = SHIFTS[1]
    further = in_space(cells, lambda c: shifted(c, by))
    places: dict[str, Tensor | None] = {
        "rotated at origin": torch.zeros_like(cells[:1]),
        "rotated at centre": (cells.amin(0, keepdim=True) + cells.amax(0, keepdim=True)) / 2,
        "unrotated": None,
    }
    yield moved(bench, PREFIXES[0], further)
    for variant in PREFIXES[1:]:
        place = places[variant]
        tokens = torch.cat([first, bench.tokens])

        def passes(place: Tensor | None = place, tokens: Tensor = tokens) -> tuple[Pass, Pass]:
            if place is None:
                before, after = bench.pair(further)
                both = [Placed(one.cells, one.grid, 1) for one in (before, after)]
            else:
                whole = torch.cat([place, cells])
                own = Bench(
                    bench.door,
                    bench.layer,
                    tokens,
                    Placed(whole, bench.placed.grid),
                    bench.generator,
                )
                both = list(own.pair(in_space(whole, lambda c: shifted(c, by))))
            return bench.run(both[0], tokens), bench.run(both[1], tokens)

        angle = bench.angle(further)
        yield _prefix_trial(variant, passes, "patches", slice(1, None), angle)
        yield _prefix_trial(variant, passes, "prefix", slice(0, 1), angle)


def _prefix_trial(
    variant: str,
    passes: Callable[[], tuple[Pass, Pass]],
    kind: Tokens,
    rows: slice,
    angle: float,
) -> Trial:
    def measure() -> Numbers:
        before, after = (Pass(one.weights[:, rows], one.outputs[rows]) for one in passes())
        return compared(before, after)

    return Trial(variant, measure, angle=angle, tokens=kind)
