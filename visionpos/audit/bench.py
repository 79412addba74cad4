"""The bench: one attention layer around a scheme, on which trials are carried out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from visionpos.audit.changes import STRETCH, stretched
from visionpos.audit.layer import Door, Layer, Pass, Placed
from visionpos.audit.metrics import attention_change, output_change
from visionpos.audit.outcome import Band
from visionpos.audit.result import Metric, Tokens
from visionpos.errors import PositionError
from visionpos.geometry.grid import Grid

_MOST_CELLS = 1024
HIDDEN = 1e30
"""Entries of a bias that are larger hide keys."""
Numbers = Mapping[Metric, float]


@dataclass(frozen=True, slots=True)
class Trial:
    """One variant of an intervention, not yet carried out.

    Args:
        variant: which form of it.
        measure: carries it out; a PositionError says that the scheme has no meaning there.
        metrics: what it measures.
        angle: the largest angle of a pair of channels, in radians: float32 rounds it.
        tokens: over which tokens.
        band: from which size on its numbers prove something; that of the dtype when None.
        note: what to know when reading it.
    """

    variant: str
    measure: Callable[[], Numbers]
    metrics: tuple[Metric, ...] = ("A", "O")
    angle: float = 0.0
    tokens: Tokens = "patches"
    band: Band | None = None
    note: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Bench:
    """One layer, its tokens and where they stand, for one seed.

    Args:
        door: the scheme.
        layer: random attention.
        tokens: `[n, embed_dim]`.
        placed: where they stand at first: on the cells of a grid.
        generator: of what trials draw.
    """

    door: Door
    layer: Layer
    tokens: Tensor
    placed: Placed
    generator: torch.Generator

    @property
    def count(self) -> int:
        """Return the number of tokens."""
        return int(self.tokens.shape[0])

    def run(
        self,
        placed: Placed | None = None,
        tokens: Tensor | None = None,
        *,
        door: Door | None = None,
        seen: Tensor | None = None,
    ) -> Pass:
        """Return the layer's pass; what is left out stays as it was at first."""
        return self.layer(
            self.door if door is None else door,
            self.tokens if tokens is None else tokens,
            self.placed if placed is None else placed,
            seen=seen,
        )

    def pair(self, cells: Tensor, grid: Grid | None = None) -> tuple[Placed, Placed]:
        """Return the first places and changed ones; a scheme that takes maps is given one with room for both.

        Args:
            cells: `[n, 3]`, the changed places.
            grid: what the scheme is told after the change; what it was told before when None.
        """
        told = self.placed.grid if grid is None else grid
        if not self.door.lattice:
            return self.placed, self.placed.moved(cells, told)
        most = torch.maximum(cells.amax(0), self.placed.cells.amax(0)).ceil().long() + 1
        sides = [max(side, int(own)) for side, own in zip(told.shape, most, strict=True)]
        room = Grid(sides[1], sides[2], sides[0])
        if room.size > _MOST_CELLS:
            raise PositionError(
                f"a map of {room.shape} (t, y, x) cells would be needed; it is too large to be tried."
            )
        return self.placed.moved(self.placed.cells, room), self.placed.moved(cells, room)

    def angle(self, cells: Tensor) -> float:
        """Return the largest angle of a pair of channels before and after a change of places, in radians."""
        # Float32 rounds the whole angle, not the part of it that a shift adds.
        reach = torch.maximum(cells.abs().amax(0), self.placed.cells.abs().amax(0)).tolist()
        speeds = self.door.speeds(self.placed.grid)
        return float(sum(speed * far for speed, far in zip(speeds, reach, strict=True)))

    def random_tokens(self, count: int) -> Tensor:
        """Return `[count, embed_dim]` new tokens of the same statistics."""
        drawn = torch.randn(
            count, self.tokens.shape[-1], generator=self.generator, dtype=torch.float64
        )
        return drawn.to(self.tokens.dtype)


def compared(before: Pass, after: Pass) -> Numbers:
    """Return how far attention and outputs of two passes are apart."""
    return {
        "A": attention_change(before.weights, after.weights),
        "O": output_change(before.outputs, after.outputs),
    }


def undone_pass(before: Pass, after: Pass, back: Tensor) -> Numbers:
    """Return the same once the tokens of the second pass are put back into order."""
    again = after.picked(back)
    return {
        "Eq": output_change(before.outputs, again.outputs),
        "A": attention_change(before.weights, again.weights),
    }


def moved(
    bench: Bench, variant: str, cells: Tensor, grid: Grid | None = None, note: str = ""
) -> Trial:
    """Return the trial that moves tokens to other places."""

    def measure() -> Numbers:
        before, after = bench.pair(cells, grid)
        return compared(bench.run(before), bench.run(after))

    return Trial(variant, measure, angle=bench.angle(cells), note=note)


def in_space(cells: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Return cells with y and x changed; time stays."""
    return torch.cat([cells[:, :1], change(cells[:, 1:])], dim=-1)


def larger(grid: Grid) -> Grid:
    """Return the grid with sides in space twice as long."""
    return Grid(STRETCH * grid.height, STRETCH * grid.width, grid.frames)


def largest_bias(bench: Bench, stretch: float = 1.0, placed: Placed | None = None) -> float:
    """Return the largest size of a bias; entries that hide keys do not count."""
    if placed is None:
        cells = in_space(bench.placed.cells, lambda c: stretched(c, stretch))
        placed = bench.pair(cells)[1]
    values = bench.door.spread(placed)
    if values is None:
        raise PositionError("this scheme adds no bias.")
    plain = values[values.abs() < HIDDEN]
    return float(plain.abs().max()) if plain.numel() else 0.0
