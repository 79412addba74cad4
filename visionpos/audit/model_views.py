"""Trials on a model that is moved to a larger grid, and on its prefix tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from visionpos.audit.bench import in_space
from visionpos.audit.changes import PREFIXES, SHIFTS, STRETCH, outside_share, shifted
from visionpos.audit.layer import Placed, cells_of
from visionpos.audit.metrics import attention_change, entropy_share, output_change
from visionpos.audit.model_bench import Bench, Number, Trial
from visionpos.audit.model_moves import AttachedMove, Change, Move, RopeMove, TableMove
from visionpos.audit.model_parts import moves_of
from visionpos.audit.model_subject import channels_of
from visionpos.audit.model_watch import Key, Turn
from visionpos.encodings import Rotary
from visionpos.errors import PositionError
from visionpos.geometry import Grid, Rotation, rotate
from visionpos.geometry.coords import Extent
from visionpos.retrofit.ports import attentions_of
from visionpos.retrofit.resize import resize

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
    table = next((part for part in bench.parts(model) if isinstance(part, TableMove)), None)
    if table is not None and extent == "index":
        raise PositionError(
            f"{table.path} is a table, which is resampled to the view; it has no entries beyond it."
        )
    size = STRETCH * subject.size[0], STRETCH * subject.size[1]
    turns = any(isinstance(part, (RopeMove, AttachedMove)) for part in bench.parts(model))
    resize(model, size, extent=extent if turns else None)
    return model


def out_of_range(bench: Bench) -> Iterator[Trial]:
    """Yield a grid of twice the sides, with the view kept and the scale kept."""
    for variant, extent in _EXTENTS:
        yield Trial(variant, _range(bench, extent), ("entropy", "outside", "phase"))


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
    """Return how far what turns is beyond its trained range: differences, and angles."""
    subject, grid = bench.subject, bench.subject.grid
    trained, deployed = bench.parts(), moves_of(model, large)
    shares, phases = [], []
    for before, after in zip(trained, deployed, strict=True):
        places = before.native(grid), after.native(large)
        if places[0] is not None and places[1] is not None:
            shares.append(outside_share(places[0], places[1]))
        turns = before.angles(grid), after.angles(large)
        if turns[0] is not None and turns[1] is not None:
            phases.append(_excess(turns[0], turns[1]))
    tokens = "patches" if subject.flat else "all"
    return [
        Number(metric, "end", tokens, max(values))  # type: ignore[arg-type]
        for metric, values in (("outside", shares), ("phase", phases))
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
    yield Trial("new sides told", _gathered(bench, "trained", lambda c, _: (c / STRETCH).floor()))


def extend(bench: Bench) -> Iterator[Trial]:
    """Yield four copies of the picture side by side, at the same scale."""
    yield Trial(
        "trained sides told", _gathered(bench, "index", lambda c, sides: c.remainder(sides))
    )


def _gathered(
    bench: Bench, extent: Extent, origin: Callable[[Tensor, Tensor], Tensor]
) -> Callable[[], list[Number]]:
    """Return a measurement of more tokens, each with the content of one at first: those of one are taken together."""

    def measure() -> list[Number]:
        subject, grid = bench.subject, bench.subject.grid
        if not subject.flat:
            raise PositionError(
                "windows and stages have other neighbours on a larger grid; no token keeps its own."
            )
        model = _grown(bench, extent)
        cells = cells_of(Grid(STRETCH * grid.height, STRETCH * grid.width))[:, 1:]
        own = origin(cells, cells.new_tensor([grid.height, grid.width])).long()
        owner = (own[:, 0] * grid.width + own[:, 1]).to(subject.device)  # [m]
        rows = [one[:, owner] for one in subject.rows]
        image = torch.zeros(1, subject.image.shape[1], *(STRETCH * side for side in subject.size))
        found: dict[int, list[float]] = {}

        def visit(key: Key, weights: Tensor) -> None:
            before = bench.base.weights[key]
            front = before.shape[-1] - subject.count
            together = _together(_together(weights, owner, front, -2, mean=True), owner, front, -1)
            value = attention_change(before[..., front:, :], together[..., front:, :])
            found.setdefault(key[0], []).append(value)

        passed = subject.passed(model, rows, image=image.to(subject.image), visit=visit)
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

    return measure


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


def prefix(bench: Bench) -> Iterator[Trial]:
    """Yield a shift under prefix tokens that are hidden, turned as if they stood somewhere, or left alone."""
    by = SHIFTS[1]
    change = Change(lambda grid: in_space(cells_of(grid), lambda c: shifted(c, by)))
    for variant in PREFIXES:
        yield Trial(variant, _under(bench, variant, change, by), angle=lambda: bench.angle(change))


def _under(bench: Bench, variant: str, change: Change, by: int) -> Callable[[], list[Number]]:
    subject = bench.subject

    def measure() -> list[Number]:
        front = subject.prefix
        if front <= 0:
            raise PositionError("the model has no tokens in front of its patches.")
        moved = bench.moved(change)
        if variant == "unrotated":
            return bench.apart(lambda visit: subject.passed(moved, visit=visit))
        if variant == "removed":

            def seen(tokens: int) -> Tensor:
                mask = torch.ones(tokens, tokens, dtype=torch.bool)
                mask[tokens - subject.count :, : tokens - subject.count] = False
                return mask

            base = subject.passed(subject.still(), seen=seen)
            found = bench.apart(
                lambda visit: subject.passed(moved, seen=seen, visit=visit), base=base
            )
            return [one for one in found if one.tokens == "patches"]
        sides = subject.grid.height - 1, subject.grid.width - 1
        place = torch.tensor([[0.0, *sides]], dtype=torch.float64) / 2
        place = place if variant == "rotated at centre" else place * 0
        turns = [_turn(bench, place + torch.tensor([[0.0, far, far]]), front) for far in (0, by)]
        base = subject.passed(subject.still(), turn=turns[0])
        return bench.apart(
            lambda visit: subject.passed(moved, turn=turns[1], visit=visit), base=base
        )

    return measure


def _turn(bench: Bench, place: Tensor, front: int) -> Turn:
    """Return what turns prefix tokens as a rotation would that had them at a place.

    Raises:
        PositionError: if the model has no single rotation.
    """
    model = bench.subject.still()
    parts = [part for part in bench.parts(model) if isinstance(part, (RopeMove, AttachedMove))]
    if len(parts) != 1 or len(bench.parts(model)) != 1:
        raise PositionError(
            "prefix tokens can be turned where one rotation is the whole scheme alone."
        )
    placed = Placed(place, bench.subject.grid)
    layers = [port.layer for port in attentions_of(model)]

    def turn(number: int, x: Tensor) -> Tensor:
        radians, pairing = _radians(parts[0], placed, layers[number])
        cos, sin = (
            wave(radians).to(torch.promote_types(x.dtype, torch.float32))
            for wave in (torch.cos, torch.sin)
        )
        rotation = Rotation(cos, sin, pairing)
        firsts = x[..., :front, :]
        turned = torch.cat(
            [
                rotate(firsts[..., i : i + 1, :], firsts[..., i : i + 1, :], rotation)[0]
                for i in range(front)
            ],
            dim=-2,
        )
        return torch.cat([turned.to(x.dtype), x[..., front:, :]], dim=-2)

    return turn


def _radians(part: Move, placed: Placed, layer: int) -> tuple[Tensor, Any]:
    """Return radians `[(heads,) 1, pairs]` of one layer at a place, and the pairing."""
    if isinstance(part, RopeMove):
        turns = part.turns(placed)
        return (turns[layer] if turns.ndim == 4 else turns), part.spec.pairing
    assert isinstance(part, AttachedMove)  # noqa: S101 (chosen so)
    if not isinstance(part.encoding, Rotary):
        raise PositionError(
            f"{part.path} turns more than pairs of channels; prefix tokens cannot be turned like it."
        )
    return part.turns(placed, layer), part.encoding.pairing
