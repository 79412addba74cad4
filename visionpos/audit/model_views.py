"""Trials on a model that is moved to a larger grid."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from visionpos.audit.changes import STRETCH, outside_share
from visionpos.audit.layer import cells_of
from visionpos.audit.metrics import attention_change, entropy_share, output_change
from visionpos.audit.model_bench import Bench, Number, Trial
from visionpos.audit.model_codes import CodeMove
from visionpos.audit.model_inputs import channels_of
from visionpos.audit.model_moves import AttachedMove, Move
from visionpos.audit.model_parts import moves_of
from visionpos.audit.model_rope import RopeMove
from visionpos.audit.model_tables import TableMove
from visionpos.audit.model_watch import Key
from visionpos.errors import PositionError
from visionpos.geometry import Grid
from visionpos.geometry.coords import Extent
from visionpos.retrofit.resize import resize
from visionpos.retrofit.sizes import image_of

# What a wider or a finer grid is told, in the words of an encoding's audit.
_EXTENTS: tuple[tuple[str, Extent], ...] = (
    ("trained sides told", "index"),
    ("new sides told", "trained"),
)


def _grown(bench: Bench, extent: Extent) -> Any:
    """Return a copy that serves images of twice the sides.

    Raises:
        PositionError: if the model cannot, or has a table where a wider view is asked for.
    """
    subject = bench.subject
    model = subject.fresh()
    resampled = (TableMove, CodeMove)
    table = next((part for part in bench.parts(model) if isinstance(part, resampled)), None)
    if table is not None and extent == "index":
        raise PositionError(
            f"{table.path} is a table, which is resampled to the view; it has no entries beyond it."
        )
    size = STRETCH * subject.size[0], STRETCH * subject.size[1]
    turns = any(isinstance(part, (RopeMove, AttachedMove)) for part in bench.parts(model))
    if turns and image_of(model) not in (None, subject.size):
        resize(
            model, subject.size
        )  # an extent is kept from the grid of the audit, not from another
    resize(model, size, extent=extent if turns else None)
    return model


def out_of_range(bench: Bench) -> Iterator[Trial]:
    """Yield a grid of twice the sides, with the view kept and the scale kept."""
    for variant, extent in _EXTENTS:
        yield Trial(
            variant,
            _range(bench, extent),
            ("entropy", "outside", "phase", "bias"),
            parts=_parts_on(bench, extent),
        )


def _parts_on(bench: Bench, extent: Extent) -> Callable[[], list[Move]]:
    """Return what gives the position parts of a copy that serves twice the sides."""
    grid, size = bench.subject.grid, bench.subject.size
    large = Grid(STRETCH * grid.height, STRETCH * grid.width)
    return lambda: moves_of(_grown(bench, extent), large, (STRETCH * size[0], STRETCH * size[1]))


def _range(bench: Bench, extent: Extent) -> Callable[[], list[Number]]:
    def measure() -> list[Number]:
        subject, model = bench.subject, _grown(bench, extent)
        large = Grid(STRETCH * subject.grid.height, STRETCH * subject.grid.width)
        found: dict[int, list[float]] = {}

        def visit(key: Key, weights: Tensor) -> None:
            found.setdefault(key[0], []).append(entropy_share(weights))

        generator = torch.Generator().manual_seed(int(bench.generator.initial_seed()))
        sides = STRETCH * subject.size[0], STRETCH * subject.size[1]
        image = torch.randn(1, channels_of(subject.model), *sides, generator=generator)
        subject.passed(model, image=image.to(subject.image), visit=visit)
        tokens = "patches" if subject.flat else "all"
        means = {number: sum(values) / len(values) for number, values in found.items()}
        numbers = [
            Number("entropy", f"layer {number}", tokens, value)  # type: ignore[arg-type]
            for number, value in means.items()
        ]
        if means:
            mean = sum(means.values()) / len(means)
            numbers.append(Number("entropy", "end", tokens, mean))  # type: ignore[arg-type]
        return numbers + _reach(bench, model, large)

    return measure


def _reach(bench: Bench, model: Any, large: Grid) -> list[Number]:
    """Return how far parts are beyond their trained range: differences, angles, and sizes of biases."""
    subject, grid = bench.subject, bench.subject.grid
    size = STRETCH * subject.size[0], STRETCH * subject.size[1]
    trained, deployed = bench.parts(), moves_of(model, large, size)
    shares, phases, biases = [], [], []
    for before, after in zip(trained, deployed, strict=True):
        places = before.native(grid), after.native(large)
        if places[0] is not None and places[1] is not None:
            shares.append(outside_share(places[0], places[1]))
        turns = before.angles(grid), after.angles(large)
        if turns[0] is not None and turns[1] is not None:
            phases.append(_excess(turns[0], turns[1]))
        most = before.largest(grid), after.largest(large)
        if most[0] and most[1] is not None:
            biases.append(most[1] / most[0] - 1.0)
    tokens = "patches" if subject.flat else "all"
    return [
        Number(metric, "end", tokens, max(values))  # type: ignore[arg-type]
        for metric, values in (("outside", shares), ("phase", phases), ("bias", biases))
        if values
    ]


def _excess(trained: Tensor, deployed: Tensor) -> float:
    """Return by which share the largest phase of a pair grows beyond what it was."""
    spans = [turns.double().amax(-2) - turns.double().amin(-2) for turns in (trained, deployed)]
    turning = spans[0] > 0
    if not bool(turning.any()):
        return 0.0
    return float((spans[1][turning] / spans[0][turning]).max()) - 1.0


def zoom(bench: Bench) -> Iterator[Trial]:
    """Yield four tokens in place of each, within the same view."""
    yield _gathered(bench, "new sides told", "trained", lambda c, _: (c / STRETCH).floor())


def extend(bench: Bench) -> Iterator[Trial]:
    """Yield four copies of the picture side by side, at the same scale."""
    yield _gathered(bench, "trained sides told", "index", lambda c, sides: c.remainder(sides))


Origin = Callable[[Tensor, Tensor], Tensor]
"""From cells of the large grid, and the sides of the small one, to cells there."""


def _gathered(bench: Bench, variant: str, extent: Extent, origin: Origin) -> Trial:
    """Return a trial of more tokens, each with the content of one at first: those of one are taken together."""
    flat = bench.subject.flat
    return Trial(
        variant,
        lambda: _many(bench, extent, origin),
        ("A", "O") if flat else ("O",),
        note="" if flat else "what the last stage gives, means over those of one token",
        parts=_parts_on(bench, extent),
    )


def _many(bench: Bench, extent: Extent, origin: Origin) -> list[Number]:
    """Return how far answers of many tokens are from that of the one whose content they have."""
    subject, grid = bench.subject, bench.subject.grid
    if len(subject.rows) != 1:
        raise PositionError(
            "later stages embed patches anew; what replaces the first tokens does not replace those."
        )
    model = _grown(bench, extent)
    owner = _owner(grid, origin).to(subject.device)
    rows = [one[:, owner] for one in subject.rows]
    image = torch.zeros(1, subject.image.shape[1], *(STRETCH * side for side in subject.size))
    image = image.to(subject.image)
    if not subject.flat:
        return [_pooled(bench, subject.passed(model, rows, image=image).end, origin)]
    found: dict[int, list[float]] = {}

    def visit(key: Key, weights: Tensor) -> None:
        before = bench.base.weights[key]
        front = before.shape[-1] - subject.count
        together = _together(_together(weights, owner, front, -2, mean=True), owner, front, -1)
        value = attention_change(before[..., front:, :], together[..., front:, :])
        found.setdefault(key[0], []).append(value)

    passed = subject.passed(model, rows, image=image, visit=visit)
    means = {number: sum(values) / len(values) for number, values in found.items()}
    numbers = [Number("A", f"layer {n}", "patches", value) for n, value in means.items()]
    if means:
        numbers.append(Number("A", "end", "patches", sum(means.values()) / len(means)))
    pairs = zip(bench.base.blocks, passed.blocks, strict=True)
    outputs = [(f"layer {i}", *pair) for i, pair in enumerate(pairs)]
    for where, before, after in [*outputs, ("end", bench.base.end, passed.end)]:
        front = before.shape[1] - subject.count
        joint = _together(after, owner, front, 1, mean=True)
        numbers.append(
            Number("O", where, "patches", output_change(before[:, front:], joint[:, front:]))
        )
    return numbers


def _owner(grid: Grid, origin: Origin) -> Tensor:
    """Return `[m]`, for every cell of the large grid the cell whose content it has."""
    cells = cells_of(Grid(STRETCH * grid.height, STRETCH * grid.width))[:, 1:]
    own = origin(cells, cells.new_tensor([grid.height, grid.width])).long()
    return own[:, 0] * grid.width + own[:, 1]


def _pooled(bench: Bench, after: Tensor, origin: Origin) -> Number:
    """Return how far the last stage's answers are from those of the small grid, in its own cells.

    Raises:
        PositionError: if its map has not twice the sides.
    """
    before, grid = bench.base.end, bench.subject.grid
    if before.ndim == 4:
        axes = [i for i in range(4) if before.shape[i] != after.shape[i]]
        first = axes[0] if axes else 1
        sides = before.shape[first : first + 2]
        before, after = (x.flatten(first, first + 1) for x in (before, after))
    else:
        first, side = 1, math.isqrt(before.shape[1] * grid.height // grid.width)
        sides = torch.Size([side, before.shape[1] // max(1, side)])
    if math.prod(sides) != before.shape[first] or after.shape[first] != STRETCH**2 * math.prod(
        sides
    ):
        raise PositionError(
            f"the last stage gives {tuple(after.shape)} in place of {tuple(before.shape)}, no map of twice the sides."
        )
    owner = _owner(Grid(int(sides[0]), int(sides[1])), origin).to(after.device)
    return Number(
        "O", "end", "all", output_change(before, _together(after, owner, 0, first, mean=True))
    )


def _together(x: Tensor, owner: Tensor, front: int, dim: int, *, mean: bool = False) -> Tensor:
    """Return tokens of one owner summed, or averaged, along a dimension; prefix tokens stay."""
    moved = x.movedim(dim, 0)
    count = int(owner.max()) + 1
    room = moved.new_zeros(front + count, *moved.shape[1:])
    places = torch.cat([torch.arange(front, device=owner.device), owner + front])
    room.index_add_(0, places, moved)
    if mean:
        sizes = torch.bincount(places, minlength=front + count).to(room)
        room /= sizes.reshape(-1, *[1] * (room.ndim - 1))
    return room.movedim(0, dim)
