"""One attention layer of random weights, and the places where a position scheme may enter it.

`Placed` says where tokens stand; a `Door` brings a scheme in; the base class brings none, the control of every audit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from visionpos.errors import PositionError
from visionpos.geometry.grid import Grid

_GAIN = 1.5


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """Where tokens stand.

    Args:
        cells: `[n, 3]` float64, (t, y, x) in cells of a grid; whole numbers are cell centres.
        grid: the grid whose sides the scheme is told.
        exempt: leading tokens that stand nowhere, before those of `cells`.
    """

    cells: Tensor
    grid: Grid
    exempt: int = 0

    @property
    def tokens(self) -> int:
        """Return the number of tokens."""
        return self.exempt + int(self.cells.shape[0])

    def picked(self, order: Tensor) -> Placed:
        """Return the places in another order."""
        return Placed(self.cells[order], self.grid, self.exempt)

    def moved(self, cells: Tensor, grid: Grid | None = None) -> Placed:
        """Return other places for the same tokens."""
        return Placed(cells, self.grid if grid is None else grid, self.exempt)


def cells_of(grid: Grid) -> Tensor:
    """Return `[n, 3]` float64, (t, y, x) of a grid's cells, row-major."""
    lines = [torch.arange(side, dtype=torch.float64) for side in grid.shape]
    return torch.stack(torch.meshgrid(*lines, indexing="ij"), dim=-1).flatten(0, -2)


def index_of(cells: Tensor, grid: Grid) -> Tensor:
    """Return `[n]`, the row-major index of cells in a grid.

    Raises:
        PositionError: if a cell lies between those of the grid, or outside.
    """
    whole, sides = cells.round(), cells.new_tensor(grid.shape)
    if bool((whole != cells).any()):
        raise PositionError(
            "cells lie between those of the grid; this scheme knows whole cells alone."
        )
    if bool(((whole < 0) | (whole >= sides)).any()):
        raise PositionError(
            f"cells reach outside the grid {grid.shape} (t, y, x) that the scheme is told; it has no entries there."
        )
    t, y, x = whole.long().unbind(-1)
    return (t * grid.height + y) * grid.width + x


def seen_axes(cells: Tensor, grid: Grid) -> Tensor:
    """Return cells `[n, 3]` as `[n, 2]` for an image, which has one frame."""
    return cells[:, 1:] if grid.frames == 1 else cells


class Door:
    """How a scheme enters a layer; every method of this class changes nothing: no position.

    Tokens are `[n, embed_dim]`, q, k and v `[heads, n, head_dim]`, attention `[heads, n, n]`.
    """

    lattice = False
    """Whether tokens have to stand on whole cells of a grid, one a cell."""

    def tokens(self, tokens: Tensor, placed: Placed) -> Tensor:  # noqa: ARG002 (the control)
        """Return tokens with position mixed in."""
        return tokens

    def turned(self, q: Tensor, k: Tensor, placed: Placed) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Return q and k turned."""
        return q, k

    def bias(self, q: Tensor, tokens: Tensor, placed: Placed) -> Tensor | None:  # noqa: ARG002
        """Return what is added to scaled logits, for unscaled q and the layer's input."""
        return None

    def mixed(self, weights: Tensor, placed: Placed) -> Tensor:  # noqa: ARG002
        """Return attention with position mixed in after the softmax."""
        return weights

    def term(self, q: Tensor, v: Tensor, placed: Placed) -> Tensor | None:  # noqa: ARG002
        """Return what is added to attention's output, `[heads, n, head_dim]`."""
        return None

    def native(self, placed: Placed) -> Tensor:
        """Return `[n, axes]`, places in the units that the scheme reads; no axes where it reads none."""
        return placed.cells[:, :0]

    def speeds(self, grid: Grid) -> tuple[float, ...]:  # noqa: ARG002
        """Return the largest radians that a channel turns a cell along (t, y, x)."""
        return (0.0, 0.0, 0.0)

    def angles(self, placed: Placed) -> Tensor | None:  # noqa: ARG002
        """Return radians `[..., n, pairs]`, where the scheme turns pairs of channels; None elsewhere."""
        return None

    def spread(self, placed: Placed) -> Tensor | None:  # noqa: ARG002
        """Return the position part of logits alone, where it is a function of places; None elsewhere."""
        return None


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """What a forward pass gave.

    Args:
        weights: attention `[heads, n, n]`.
        outputs: `[n, embed_dim]`.
    """

    weights: Tensor
    outputs: Tensor

    def picked(self, order: Tensor) -> Pass:
        """Return the pass with tokens in another order."""
        return Pass(self.weights[:, order][:, :, order], self.outputs[order])


class Layer:
    """Attention of random weights: q, k and v of the tokens, softmax, output projection; no residual.

    Args:
        embed_dim: width of a token.
        num_heads: attention heads.
        head_dim: channels of a head.
        generator: draws the weights.
        dtype: of weights and tokens; logits are float32 or better, as attention kernels keep them.
    """

    def __init__(
        self,
        *,
        embed_dim: int,
        num_heads: int,
        head_dim: int,
        generator: torch.Generator,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.dtype = dtype
        self.heads, self.head_dim = num_heads, head_dim
        width = num_heads * head_dim
        gains = (_GAIN, _GAIN, 1.0)
        self.inputs = [
            self._drawn(embed_dim, width, gain / math.sqrt(embed_dim), generator) for gain in gains
        ]
        self.out = self._drawn(width, embed_dim, 1 / math.sqrt(width), generator)

    def _drawn(self, rows: int, columns: int, size: float, generator: torch.Generator) -> Tensor:
        weights = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
        return (weights * size).to(self.dtype)

    def __call__(
        self, door: Door, tokens: Tensor, placed: Placed, *, seen: Tensor | None = None
    ) -> Pass:
        """Return attention and outputs.

        Args:
            door: how position enters.
            tokens: `[n, embed_dim]`.
            placed: where they stand.
            seen: `[n, n]`, True where a query may look at a key; everywhere when None.

        Raises:
            PositionError: if the scheme knows nothing of such places.
        """
        tokens = door.tokens(tokens, placed).to(self.dtype)
        q, k, v = (
            (tokens @ weight).unflatten(-1, (self.heads, self.head_dim)).transpose(0, 1)
            for weight in self.inputs
        )
        wide = torch.promote_types(self.dtype, torch.float32)
        turned_q, turned_k = door.turned(q, k, placed)
        logits = turned_q.to(wide) @ turned_k.to(wide).mT / math.sqrt(self.head_dim)
        bias = door.bias(q, tokens, placed)
        if bias is not None:
            logits = logits + bias.to(wide)
        if seen is not None:
            logits = logits.masked_fill(~seen, -math.inf)
        weights = door.mixed(torch.softmax(logits, dim=-1), placed)
        joined = weights.to(self.dtype) @ v
        term = door.term(q, v, placed)
        if term is not None:
            joined = joined + term.to(self.dtype)
        return Pass(weights, joined.transpose(0, 1).flatten(-2) @ self.out)
