"""Readings: in which units an encoding reads the cells that tokens stand on.

They are tried, not asked of an encoding's name: that one is right under which explicit places give what the encoding
gives for its grid.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from visionpos.audit.layer import cells_of
from visionpos.encodings import Rotary, Turning
from visionpos.geometry.coords import CoordSpec, coordinates
from visionpos.geometry.grid import Grid

Reading = Callable[[Tensor], Tensor]
"""From cells `[n, 3]` to what an encoding reads, `[n, axes]`."""

_CLOSE = 1e-2
"""Of the largest entry: readings differ by far more, roundings of float32 by far less."""


def readings(encoding: Any, grid: Grid) -> Iterator[Reading]:
    """Yield ways in which an encoding may read cells when told a grid: its own numbering first."""
    points = getattr(encoding, "points", None)
    spec = getattr(encoding, "spec", None)
    numbering = getattr(encoding, "coords", None)
    numbering = numbering if isinstance(numbering, CoordSpec) else getattr(spec, "coords", None)
    if points is not None and isinstance(encoding, (Rotary, Turning)):
        yield from _fitted(points(grid), grid)
    elif isinstance(numbering, CoordSpec):
        yield from _fitted(coordinates(grid, numbering), grid)
    if getattr(encoding, "axes", None) == 1:
        steps = torch.tensor([grid.height * grid.width, grid.width, 1], dtype=torch.float64)
        yield lambda cells: (cells * steps).sum(-1, keepdim=True)
    for axes in (2, 3):
        yield _scaled(torch.ones(3, dtype=torch.float64), 0.0, axes)
        trained = getattr(spec, "trained_shape", None)
        if trained is not None and len(trained) == axes:
            factor = torch.ones(3, dtype=torch.float64)
            sides = grid.shape[3 - axes :]
            factor[3 - axes :] = torch.tensor(
                [own / side for own, side in zip(trained, sides, strict=True)], dtype=torch.float64
            )
            yield _scaled(factor, 0.5, axes, back=0.5)
        share = 1.0 / torch.tensor(grid.shape, dtype=torch.float64)
        for start in (0.0, 0.5, 1.0):
            yield _scaled(share, start, axes)
    yield from _fitted(coordinates(grid, CoordSpec(unit="centred")), grid)


def _scaled(factor: Tensor, start: float, axes: int, *, back: float = 0.0) -> Reading:
    """Return `(cell + start) * factor - back` of the last axes."""
    return lambda cells: ((cells + start) * factor - back)[..., 3 - axes :]


def _fitted(points: Tensor, grid: Grid) -> Iterator[Reading]:
    """Yield the affine map from cells to points of a grid, if there is one."""
    cells = cells_of(grid)
    rows = torch.nn.functional.pad(cells, (0, 1), value=1.0)
    wanted = points.detach().double()
    if wanted.shape[:-1] != rows.shape[:-1]:
        return
    slopes = torch.linalg.lstsq(rows, wanted, driver="gelsd").solution
    # Sides of one cell leave a slope open: the least one, and places off that cell are not told apart.
    if float((rows @ slopes - wanted).abs().max()) > 1e-4 * max(1.0, float(wanted.abs().max())):
        return
    slopes = torch.where(slopes.abs() < 1e-9, 0.0, slopes)
    yield lambda cells: torch.nn.functional.pad(cells, (0, 1), value=1.0) @ slopes


def near(given: Tensor, wanted: Tensor) -> bool:
    """Return whether two renderings agree; entries that hide keys are as large as numbers get."""
    given, wanted = given.double(), wanted.double()
    plain = wanted.abs() < 1e30
    if bool((plain != (given.abs() < 1e30)).any()):
        return False
    size = float(wanted[plain].abs().max()) if bool(plain.any()) else 0.0
    if not math.isfinite(size):
        return False
    return bool(((given - wanted)[plain].abs() <= _CLOSE * max(size, 1e-12)).all())
