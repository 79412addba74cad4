"""Trials on a model's prefix tokens: hidden, turned as if they stood somewhere, or left alone under a shift."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from visionpos.audit.bench import in_space
from visionpos.audit.changes import PREFIXES, SHIFTS, shifted
from visionpos.audit.layer import Placed, cells_of
from visionpos.audit.model_bench import Bench, Number, Trial
from visionpos.audit.model_moves import AttachedMove, Change, Move
from visionpos.audit.model_rope import RopeMove
from visionpos.audit.model_watch import Turn
from visionpos.encodings import Rotary
from visionpos.errors import PositionError
from visionpos.geometry import Rotation, rotate
from visionpos.retrofit.ports import attentions_of


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
