"""Lattices: where the tokens of an attention lie that knows its grid by itself; one reader for the kinds of the table.

The arguments of an attention enter; its `Sites` leave: a grid, and which of its points queries and keys stand on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from visionpos.errors import PositionError
from visionpos.geometry import Grid
from visionpos.retrofit.called import OfCall
from visionpos.retrofit.indices import NOTED, note_sides
from visionpos.retrofit.passes import Relay, graph_task
from visionpos.retrofit.paths import counted
from visionpos.retrofit.seams import find, sides_of

if TYPE_CHECKING:
    from torch import Tensor

    from visionpos.retrofit.port_rows import Lattice
    from visionpos.retrofit.ports import Port


@dataclass(frozen=True, slots=True)
class Sites:
    """Where the tokens of one attention call stand.

    Args:
        grid: the lattice.
        prefix: tokens in front of it, of queries and keys alike.
        stride: queries stand on every stride-th point along each axis.
        pool: keys stand in the middle of squares of pool x pool points.
        unroll: the model's own permutation and how many tokens it has left, or None for row-major.
    """

    grid: Grid
    prefix: int = 0
    stride: int = 1
    pool: int = 1
    unroll: tuple[Any, int] | None = None

    def queries(self, points: Tensor) -> Tensor:
        """Return the rows of `[n, axes]` points of the grid at the queries."""
        if self.unroll is not None:
            return _unrolled(points, *self.unroll)
        if self.stride == 1:
            return points
        return self._map(points)[:: self.stride, :: self.stride].flatten(0, 1)

    def keys(self, points: Tensor) -> Tensor:
        """Return the rows at the keys: means over squares, whose last rows and columns may be cut off."""
        if self.unroll is not None:
            return _unrolled(points, *self.unroll)
        if self.pool == 1:
            return points
        rows, columns = self.grid.height // self.pool, self.grid.width // self.pool
        cut = self._map(points)[: rows * self.pool, : columns * self.pool]
        squares = cut.unflatten(1, (columns, self.pool)).unflatten(0, (rows, self.pool))
        means: Tensor = squares.mean(dim=(1, 3)).flatten(0, 1)
        return means

    @property
    def alike(self) -> bool:
        """Return whether queries and keys stand on the same points."""
        return self.stride == 1 and self.pool == 1

    def _map(self, points: Tensor) -> Tensor:
        rows: Tensor = points.unflatten(0, (self.grid.height, self.grid.width))
        return rows


class Reader:
    """Tells where the tokens of one attention lie, from what the attention is called with.

    Args:
        lattice: the kind, from the table.
        prefix: tokens in front of the grid.
        anchor: the other module that the kind needs, or None.
        name: attribute to read on the anchor.
    """

    def __init__(self, lattice: Lattice, prefix: int, anchor: Any, name: str) -> None:
        self.lattice, self.prefix, self.anchor, self.name = lattice, prefix, anchor, name
        self.relay = Relay()  # (sides, backward pass) that another module saw

    def sites(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sites:
        """Return where the tokens of this call stand.

        Raises:
            PositionError: if they cannot be placed.
        """
        kind = self.lattice.kind
        if kind == "unrolled":
            return Sites(
                Grid(*stated_sides(self.anchor, "size")), unroll=(self.anchor, args[0].shape[1])
            )
        height, width = counted(getattr(self, f"_{kind}")(module, args, kwargs))
        return Sites(
            Grid(height, width),
            self.prefix,
            _count(self.lattice.queries, module),
            _count(self.lattice.keys, module),
        )

    def see(self, sides: Any) -> None:
        """Remember the sides that another module saw in this call."""
        self.relay.put(((sides[0], sides[1]), graph_task()))

    def _attribute(self, module: Any, *_: Any) -> Any:
        owner = module if self.anchor is None else self.anchor
        return stated_sides(owner, self.name)

    def _patches(self, *_: Any) -> Any:
        return sides_of(self.anchor)

    def _nhwc(self, _: Any, args: tuple[Any, ...], __: Any) -> Any:
        return args[0].shape[-3:-1]

    def _nchw(self, _: Any, args: tuple[Any, ...], __: Any) -> Any:
        return args[0].shape[-2:]

    def _argument(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return kwargs[self.name] if self.name in kwargs else args[self.lattice.index]

    def _square(self, _: Any, args: tuple[Any, ...], __: Any) -> Any:
        side = math.isqrt(args[0].shape[-2])
        return side, side

    def _index(self, module: Any, *_: Any) -> Any:
        if torch.compiler.is_compiling():
            return getattr(module, NOTED)
        return note_sides(module, self.name)

    def _container(self, module: Any, *_: Any) -> Any:
        handed = self.relay.get()
        if handed is None or handed[1] != graph_task():
            raise PositionError(
                f"{type(module).__name__} ran without the module that sees its map, so its grid is unknown. Checkpoint "
                "whole stages, not the blocks inside."
            )
        return handed[0]

    _called = _container


def reader_of(port: Port) -> Reader:
    """Return the reader of a port that tells its own grid.

    Raises:
        PositionError: if the module it needs is gone.
    """
    lattice = port.seams.grid
    anchor, name = None, lattice.name
    if lattice.of == "model":
        stem, _, name = lattice.name.rpartition(".")
        anchor = find(port.model, stem)
    elif lattice.anchor:
        anchor = find(port.model, lattice.anchor)
        if anchor is None:
            raise PositionError(
                f"port {port.path} finds its grid at {lattice.anchor}, which is gone. Attach before changing the model."
            )
    if lattice.kind == "index":
        note_sides(port.holder, name)
    return Reader(lattice, port.prefix, anchor, name)


def stated_sides(owner: Any, name: str) -> Any:
    """Return the sides that an attribute states; the call's, where they differ from call to call."""
    return owner.call_sides() if isinstance(owner, OfCall) else sides_of(getattr(owner, name))


def _count(given: int | str, module: Any) -> int:
    return given if isinstance(given, int) else int(getattr(module, given))


def _unrolled(points: Tensor, unroll: Any, tokens: int) -> Tensor:
    """Return points in the order of the model's own permutation, averaged where it has pooled."""
    moved: Tensor = unroll(points.unsqueeze(0))[0]
    for strides in unroll.schedule:
        if moved.shape[0] <= tokens:
            break
        moved = moved.unflatten(0, (math.prod(strides), -1)).mean(0)
    if moved.shape[0] != tokens:
        raise PositionError(
            f"the attention got {tokens} tokens of a grid of {tuple(stated_sides(unroll, 'size'))}; whole images are "
            "required. Masked mask units (patch_drop_rate, mask=) are not followed: set patch_drop_rate=0."
        )
    return moved
