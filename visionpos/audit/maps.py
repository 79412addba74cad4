"""Doors of encodings that work on the map of tokens: tokens are put on the cells of a grid, the rest is empty."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from visionpos.audit.layer import Door, Placed, index_of, seen_axes
from visionpos.errors import PositionError


class _OnLattice(Door):
    """An encoding that works on the map of tokens: they are put on the cells of the grid, the rest is empty."""

    lattice = True

    def __init__(self, encoding: Any, layer: int) -> None:  # noqa: ARG002 (as every door)
        self.encoding = encoding

    dense = True
    """Whether a map with holes is another input than the scheme is made for."""

    def _places(self, placed: Placed) -> Tensor:
        cells = index_of(placed.cells, placed.grid)
        if len(set(cells.tolist())) < len(cells):
            raise PositionError(
                "two tokens stand on one cell; a map of tokens has room for one a cell."
            )
        box = placed.cells.amax(0) - placed.cells.amin(0) + 1
        if self.dense and int(box.prod()) != len(cells):
            raise PositionError("tokens leave cells between them empty; a dense map is required.")
        return cells

    def _put(self, values: Tensor, placed: Placed, exempt: tuple[int, int]) -> Tensor:
        """Return `[..., first + cells + last, k]`: values `[..., n, k]` on the map, and empty exempt tokens."""
        before, after = exempt
        size = before + placed.grid.size + after
        room = values.new_zeros(*values.shape[:-2], size, values.shape[-1])
        room[..., before + self._places(placed), :] = values[..., placed.exempt :, :]
        return room

    def _own(self, values: Tensor) -> Tensor:
        """Return values in the dtype of the encoding's weights, which convolutions insist on."""
        weight = next(self.encoding.parameters())
        return values.to(weight.dtype)

    def native(self, placed: Placed) -> Tensor:
        """Return no axes: what is read is the map."""
        return placed.cells[:, :0]

    def _exempt(self) -> tuple[int, int]:
        return self.encoding.dims.prefix, self.encoding.dims.suffix


class Convolving(_OnLattice):
    """Tokens mixed with their neighbours, between layers."""

    def tokens(self, tokens: Tensor, placed: Placed) -> Tensor:
        """Return tokens mixed with their neighbours on the map."""
        exempt = self._exempt()
        room = self._put(self._own(tokens), placed, exempt)
        moved = self.encoding(room.unsqueeze(0), placed.grid)[0]
        own = moved[exempt[0] + self._places(placed)].to(tokens.dtype)
        return torch.cat([tokens[: placed.exempt], own])


class Surrounding(_OnLattice):
    """What surrounds a value, weighed by the query, added to attention's output."""

    def term(self, q: Tensor, v: Tensor, placed: Placed) -> Tensor:
        """Return the term of the map."""
        exempt = self._exempt()
        rooms = [self._put(self._own(x), placed, exempt).unsqueeze(0) for x in (q, v)]
        whole: Tensor = self.encoding(*rooms, placed.grid)[0]
        own = whole[:, exempt[0] + self._places(placed)]
        return torch.nn.functional.pad(own, (0, 0, placed.exempt, 0))


class Querying(_OnLattice):
    """A function of the query and differences on a grid, added to logits."""

    dense = False

    def native(self, placed: Placed) -> Tensor:
        """Return shares of the sides, where tables are evaluated on the grid that is told; else cells."""
        if getattr(self.encoding.spec, "extent", None) is None:
            return seen_axes(placed.cells, placed.grid)
        sides = placed.cells.new_tensor(placed.grid.shape)
        return seen_axes(placed.cells / sides, placed.grid)

    def bias(self, q: Tensor, tokens: Tensor, placed: Placed) -> Tensor:  # noqa: ARG002
        """Return the bias of the grid at the tokens' cells."""
        room = self._put(self._own(q), placed, (0, 0)).unsqueeze(0)
        whole: Tensor = self.encoding(room, placed.grid)[0]
        cells = self._places(placed)
        own = whole[:, cells][:, :, cells]
        return torch.nn.functional.pad(own, (placed.exempt, 0, placed.exempt, 0))


class Pairing(_OnLattice):
    """What queries, keys and their places in a line say together, added to logits; cells are numbered row-major."""

    def turned(self, q: Tensor, k: Tensor, placed: Placed) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Return q and k as they are, and keep the keys for the bias."""
        self.keys = k
        return q, k

    def bias(self, q: Tensor, tokens: Tensor, placed: Placed) -> Tensor:  # noqa: ARG002
        """Return the bias of the line at the tokens' cells; the layer's own scale of q.k stays."""
        rooms = [self._put(self._own(x), placed, (0, 0)).unsqueeze(0) for x in (q, self.keys)]
        whole: Tensor = self.encoding(*rooms, placed.grid)[0]
        cells = self._places(placed)
        own = whole[:, cells][:, :, cells]
        return torch.nn.functional.pad(own, (placed.exempt, 0, placed.exempt, 0))
