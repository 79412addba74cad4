"""Moves of biases: tables, networks of log coordinates and projected distances, asked for other differences."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from visionpos.audit.layer import cells_of
from visionpos.audit.model_moves import Change, Move
from visionpos.errors import PositionError
from visionpos.geometry import Grid


def differences(change: Change, grid: Grid) -> Tensor:
    """Return `[n, n, 2]` float64: query minus key (y, x) of all pairs of tokens at their new places.

    Raises:
        PositionError: if other sides are told, which a bias of one window cannot hear.
    """
    if change.told(grid) != grid and not change.mirrors:
        raise PositionError("a bias of one window is told no other sides.")
    places = change.cells(grid)[:, 1:]
    return places.unsqueeze(1) - places.unsqueeze(0)


def buffers_of(module: nn.Module, *, whole: bool) -> dict[str, Tensor]:
    """Return the buffers of a module itself: of whole numbers, or of floats."""
    return {
        name: value
        for name, value in module.named_buffers(recurse=False)
        if value.is_floating_point() != whole
    }


class IndexMove(Move):
    """A table of differences, read through an index of all pairs."""

    inside = True

    def __init__(self, table: Any, spec: Any) -> None:
        super().__init__(table.path, spec)
        self.table, self.grid = table, Grid(*table.sides)
        self.signed = table.seams.kind == "rel_table"

    def largest(self, grid: Grid) -> float | None:  # noqa: ARG002 (its window's own)
        """Return the largest entry."""
        return float(self.table.value.detach().abs().max())

    def __call__(self, change: Change) -> None:
        """Let every pair of tokens read the entry of its new difference."""
        still = Change(cells_of)
        name, index, front = self._index(self._entries(differences(still, self.grid)))
        moved = self._entries(differences(change, self.grid))
        rows = self._queries(moved)
        fresh = index.clone().reshape(*self._shape(index, rows, front))
        fresh[front:, front:] = rows.to(index)
        setattr(self.table.base, name, fresh.reshape(index.shape))
        for cache in self.table.module.clear:
            setattr(self.table.base, cache, {})

    def _entries(self, apart: Tensor) -> Tensor:
        """Return `[n, n]`, the entry of every difference.

        Raises:
            PositionError: if a difference is not whole, or beyond the table.
        """
        height, width = self.grid.height, self.grid.width
        apart = apart if self.signed else apart.abs()
        reach = apart.new_tensor([height - 1, width - 1])
        if bool((apart != apart.round()).any()) or bool((apart.abs() > reach).any()):
            raise PositionError(
                f"{self.path} has entries for whole differences within {height}x{width} cells alone."
            )
        dy, dx = apart.long().unbind(-1)
        if self.signed:
            return (dy + height - 1) * (2 * width - 1) + dx + width - 1
        return dy * width + dx

    def _queries(self, entries: Tensor) -> Tensor:
        """Return the rows of the queries, which may stand on every other cell alone."""
        step = 1
        for rule in self.table.module.follow:
            found = rule.get("offsets", 1)
            step = found if isinstance(found, int) else int(getattr(self.table.base, found))
        maps: Tensor = entries.unflatten(0, (self.grid.height, self.grid.width))
        return maps[::step, ::step].flatten(0, 1)

    def _shape(self, index: Tensor, rows: Tensor, front: int) -> tuple[int, int]:
        return rows.shape[0] + front, index.numel() // (rows.shape[0] + front)

    def _index(self, entries: Tensor) -> tuple[str, Tensor, int]:
        """Return (name, index, prefix rows) of the buffer that reads the table as it should.

        Raises:
            PositionError: if there is none.
        """
        rows = self._queries(entries)
        front = self.table.extra // 3
        wanted = (rows.shape[0] + front) * (rows.shape[1] + front)
        for name, index in buffers_of(self.table.base, whole=True).items():
            if index.numel() != wanted:
                continue
            body = index.reshape(self._shape(index, rows, front))[front:, front:]
            if torch.equal(body.cpu().long(), rows):
                return name, index, front
        raise PositionError(
            f"{self.path} is read through no index that is known; it cannot be moved."
        )


class LogMove(Move):
    """A network of log coordinates: any difference can be put into it."""

    inside = True

    def __init__(self, table: Any, spec: Any) -> None:
        super().__init__(table.path, spec)
        self.table, self.grid = table, Grid(*table.sides)

    def __call__(self, change: Change) -> None:
        """Put the coordinates of all pairs at their new places into the network."""
        apart = differences(change, self.grid)
        name, coords = self._coords()
        entry = self._entry(coords)
        pairs = torch.stack([entry(apart[..., axis], axis) for axis in (0, 1)], dim=-1)
        base, count = self.table.base, self.grid.size
        if coords.numel() == 2 * count * count:  # evaluated at all pairs as it is
            setattr(base, name, pairs.reshape(coords.shape).to(coords))
            return
        setattr(base, name, pairs.reshape(*[1] * (coords.ndim - 3), count, count, 2).to(coords))
        for key, index in buffers_of(base, whole=True).items():
            if index.numel() == count * count:
                order = torch.arange(count * count, device=index.device)
                setattr(base, key, order.reshape(index.shape))

    def _coords(self) -> tuple[str, Tensor]:
        """Return (name, values) of the buffer of log coordinates, at all pairs or all differences."""
        height, width = self.grid.height, self.grid.width
        sizes = (2 * (2 * height - 1) * (2 * width - 1), 2 * self.grid.size**2)
        for name, value in buffers_of(self.table.base, whole=False).items():
            if value.shape[-1:] == (2,) and value.numel() in sizes:
                return name, value
        raise PositionError(
            f"{self.path} keeps no log coordinates; its differences cannot be changed."
        )

    def _entry(self, coords: Tensor) -> Callable[[Tensor, int], Tensor]:
        """Return the function from differences along an axis to entries, read off those that the module has."""
        height, width = self.grid.height, self.grid.width
        if coords.numel() == 2 * self.grid.size**2:
            pairs = coords.detach().double().cpu().reshape(self.grid.size, self.grid.size, 2)
            down, right = pairs[::width, 0, 0], pairs[:width, 0, 1]
        else:
            maps = coords.detach().double().cpu().reshape(2 * height - 1, 2 * width - 1, 2)
            down, right = maps[height - 1 :, 0, 0], maps[0, width - 1 :, 1]
        forms = [log_form(line) for line in (down, right)]
        return lambda apart, axis: forms[axis](apart)


def log_form(entries: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the function from differences to log coordinates that a module's own entries show.

    Args:
        entries: at the differences 0, 1, 2 and so on.

    Raises:
        PositionError: if they are of no known form.
    """
    values = entries[1:]
    if not values.numel():
        return lambda apart: apart * 0.0
    if len(values) == 1:
        raise PositionError("one difference alone does not show the form of log coordinates.")
    steps = torch.arange(1, len(entries), dtype=torch.float64)
    for scale in (math.log(8.0), 1.0):
        grown = (values * scale).expm1()
        unit = float(grown[0])
        if float((grown - unit * steps).abs().max()) <= 1e-3 * float(grown.abs().max()):
            break
    else:
        raise PositionError("log coordinates are of no known form; differences cannot be changed.")

    def form(apart: Tensor) -> Tensor:
        return torch.sign(apart) * torch.log1p(unit * apart.abs()) / scale

    return form


class FeatureMove(Move):
    """Distances that a layer projects: (x, y, squared length) of every pair, key minus query."""

    inside = True

    def __init__(self, table: Any, spec: Any, grid: Grid) -> None:
        super().__init__(table.path, spec)
        self.table, self.grid = table, grid

    def __call__(self, change: Change) -> None:
        """Put the distances of all pairs at their new places before the layer."""
        base = self.table.base
        still = _features(differences(Change(cells_of), self.grid))
        for name, value in buffers_of(base, whole=False).items():
            same = value.numel() == still.numel() and value.shape[-1] == still.shape[-1]
            if same and bool((value.reshape(still.shape).double().cpu() == still).all()):
                moved = _features(differences(change, self.grid))
                setattr(base, name, moved.reshape(value.shape).to(value))
                return
        raise PositionError(f"{self.path} keeps no distances that are known; it cannot be moved.")


def _features(apart: Tensor) -> Tensor:
    dy, dx = (-apart).unbind(-1)
    return torch.stack([dx, dy, dx**2 + dy**2], dim=-1)


class ConvMove(Move):
    """A convolution over the map of tokens: they are put on the cells of their new places for it."""

    def __init__(self, path: str, module: nn.Module, spec: Any) -> None:
        super().__init__(path, spec)
        self.module = module

    def __call__(self, change: Change) -> None:
        """Let the convolution see the map with its tokens at new places, where these are the cells of the map."""
        seen: list[Tensor] = []

        def enter(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            x = args[0]
            order = change.order(_sides(x, args)).to(x.device)
            seen.append(order)
            return (_ordered(x, torch.argsort(order)), *args[1:])

        def leave(_: nn.Module, __: tuple[Any, ...], output: Tensor) -> Tensor:
            return _ordered(output, seen.pop())

        try:
            change.order(Grid(3, 3))
        except PositionError:
            raise PositionError(
                f"{self.path} is a convolution over the map; it knows the cells of the map alone."
            ) from None
        self.module.register_forward_pre_hook(enter)
        self.module.register_forward_hook(leave)


def _sides(x: Tensor, args: tuple[Any, ...]) -> Grid:
    if x.ndim == 4:
        return Grid(*x.shape[-2:])
    for given in args[1:]:
        if isinstance(given, (tuple, list, torch.Size)) and len(given) == 2:
            return Grid(int(given[0]), int(given[1]))
    raise PositionError("a convolution over rows of tokens was told no sides.")


def _ordered(x: Tensor, order: Tensor) -> Tensor:
    """Return a map `[b, d, y, x]`, or rows behind their prefix, in another order of cells."""
    if x.ndim == 4:
        return x.flatten(2)[..., order].reshape(x.shape)
    front = x.shape[1] - len(order)
    return torch.cat([x[:, :front], x[:, front:][:, order]], dim=1)
