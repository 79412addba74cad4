"""PositionLog: what positions a training run really sees, at a cost that no one notices.

Grids are counted and nothing else at every step; ids and attention are sampled on every fiftieth. What it has seen
becomes the `train_support` of a lineage record.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from visionpos.audit.histograms import Array, Entry, Histogram
from visionpos.audit.log_lines import (
    AXES,
    bucket_use,
    checked_path,
    drift,
    last_line,
    show,
    writer_of,
)
from visionpos.encodings import Rotary, T5Bias, Turning
from visionpos.errors import PositionError
from visionpos.geometry import Grid
from visionpos.geometry.fields import check_kind
from visionpos.geometry.ranges import is_integer

if TYPE_CHECKING:
    from os import PathLike

_QUERIES = 32  # sampled of a sequence


class PositionLog:
    """A recorder of positions, offsets, attention distances, bucket use, frequency drift and grids.

    Call `grid` or `coordinates` for every batch, `attention` where q and k are at hand, and `step` once a step. On
    every `every`-th step ids and attention are looked at, a line of JSON is appended, and TensorBoard gets its share.

    Args:
        path: JSONL file to append to, one for each process; nothing is written without one. A file that is there is
            gone on with: steps, grids and histograms count from its last whole line; drift from `watch`.
        every: steps from one look to the next.
        unit: width of the finest bins, in positions: 1, or the fraction that ids count in.
        tensorboard: a folder, for which the tensorboard package is needed, or a writer with `add_scalar`.

    Raises:
        PositionError: if `every` is no whole number of at least 1, unit is not above 0, or the file cannot be written,
            or was logged with another unit.
        ImportError: if a folder for TensorBoard is given and the package is not installed.

    Example:
        >>> log = PositionLog(every=10)
        >>> log.grid((3, 5), images=8)
        >>> log.step()
        >>> [(entry["axis"], entry["min"], entry["max"]) for entry in log.support()["offset"]]
        [('h', -2.0, 2.0), ('w', -4.0, 4.0)]
    """

    def __init__(
        self,
        path: str | PathLike[str] | None = None,
        *,
        every: int = 50,
        unit: float = 1.0,
        tensorboard: Any = None,
    ) -> None:
        if not is_integer(every) or every < 1:
            raise PositionError(f"every is {every!r}; a whole number of at least 1 is required.")
        if not _is_size(unit):
            raise PositionError(f"unit is {unit!r}; a finite number above 0 is required.")
        self.path = None if path is None else checked_path(path)
        self.every, self.unit, self.steps = every, unit, 0
        self._grids: Counter[tuple[int, int, int]] = Counter()
        self._before: Counter[tuple[int, int, int]] = Counter()  # in the histograms already
        self._found: dict[tuple[str, str], Histogram] = {}
        self._starts: dict[str, tuple[Callable[[], Tensor], Tensor]] = {}
        self._buckets: dict[str, T5Bias] = {}
        self._writer = writer_of(tensorboard)
        if self.path is not None and self.path.stat().st_size:
            self._go_on(self.path)

    def _go_on(self, path: Path) -> None:
        """Start from what an earlier run logged last."""
        line = last_line(path)
        try:
            self.steps = line["step"] + 1
            for name, images in line["grids"].items():
                frames, height, width = map(int, name.split("x"))
                self._before[frames, height, width] = int(images)
            for quantity in ("position", "offset", "attn_distance"):
                for entry in line[quantity]:
                    self._of(quantity, entry["axis"]).fill(entry)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PositionError(
                f"path {path} has a last line that cannot be gone on from ({type(error).__name__}: {error}); give the "
                "JSONL file of a PositionLog, or a new name."
            ) from None

    @property
    def due(self) -> bool:
        """Return whether this step is one that is looked at."""
        return self.steps % self.every == 0

    def watch(self, model: nn.Module) -> None:
        """Follow the learned frequencies of a model from here on, and the use of its buckets."""
        check_kind("model", model, nn.Module)
        for name, module in model.named_modules():
            if isinstance(module, T5Bias):
                self._buckets[name] = module
            rotary = isinstance(module, (Rotary, Turning)) or "rope" in name.rpartition(".")[2]
            for key, _ in module.named_parameters(recurse=False) if rotary else ():
                read = _Reader(module, key)
                self._starts[f"{name}.{key}" if name else key] = (read, read())

    def grid(self, grid: Grid | Sequence[int], *, images: int = 1) -> None:
        """Count images of a token grid.

        Args:
            grid: of the batch; or (rows, columns), or (frames, rows, columns).
            images: how many have it.
        """
        given: Any = grid.shape if isinstance(grid, Grid) else grid
        sides = tuple(given) if isinstance(given, Iterable) else ()
        if not is_integer(images) or images < 0:
            raise PositionError(f"images is {images!r}; a whole number of at least 0 is required.")
        if len(sides) not in (2, 3) or any(not is_integer(side) or side < 1 for side in sides):
            raise PositionError(
                f"grid is {grid!r}; a Grid, (rows, columns) or (frames, rows, columns) of at least 1 each is required."
            )
        frames, height, width = (1, *sides)[-3:]
        if images:
            self._grids[frames, height, width] += images

    def coordinates(
        self, coords: Tensor, *, axes: Sequence[str] = AXES, causal: bool = False
    ) -> None:
        """Look at the positions of one sequence, on steps that are due.

        Args:
            coords: `[axes, n]`, as `position_ids` gives; a batch `[axes, b, n]` is looked at by its first row.
            axes: a name an axis, of "t", "h", "w" and "seq".
            causal: whether tokens see only what stands before them.
        """
        if not self.due:
            return
        places = _places(coords, axes)
        n = places.shape[1]
        asked = np.unique(np.linspace(0, n - 1, min(_QUERIES, n)).astype(np.int64))
        seen = np.arange(n) <= asked[:, None] if causal else np.ones((len(asked), n), dtype=bool)
        for axis, line in zip(axes, places, strict=True):
            self._of("position", axis).add(line)
            offsets = line[asked][:, None] - line
            # Each asked token stands for n / asked of them.
            weights = np.full(int(seen.sum()), n / max(1, len(asked)))
            self._of("offset", axis).add(offsets[seen], weights)

    @torch.no_grad()
    def attention(
        self,
        q: Tensor,
        k: Tensor,
        coords: Tensor,
        *,
        prefix: int = 0,
        axes: Sequence[str] | None = None,
        causal: bool = False,
        scale: float | None = None,
    ) -> None:
        """Look at how far attention reaches, on steps that are due: some queries of the first sample.

        Args:
            q: `[b, heads, n, head_dim]` as it meets the keys, after norm and rotation.
            k: `[b, heads, n, head_dim]`.
            coords: `[axes, n - prefix]` positions of the tokens behind the prefix.
            prefix: leading tokens without position; what goes to them counts for nothing.
            axes: a name an axis; the last of t, h, w by default.
            causal: whether tokens see only what stands before them.
            scale: of the logits; head_dim ** -0.5 by default.
        """
        if not self.due:
            return
        names = tuple(AXES[-coords.shape[0] :] if axes is None else axes)
        places = _places(coords, names)
        n = places.shape[1]
        whole = is_integer(prefix) and prefix >= 0
        if q.ndim != 4 or q.shape != k.shape or not len(q) or not whole or q.shape[2] != n + prefix:
            raise PositionError(
                f"q is {list(q.shape)}, k {list(k.shape)}, and coords have {n} tokens with prefix {prefix!r}; equal "
                "[b, heads, n, head_dim] of at least one sample, with tokens of coords + prefix, are required."
            )
        asked = np.unique(np.linspace(0, n - 1, min(_QUERIES, n)).astype(np.int64))
        rows = torch.from_numpy(asked).to(q.device) + prefix
        with torch.autocast(q.device.type, enabled=False):
            factor = q.shape[-1] ** -0.5 if scale is None else scale
            logits = q[0, :, rows].float() @ k[0].float().mT * factor
            if causal:
                ahead = torch.arange(n + prefix, device=q.device) > rows[:, None]
                logits = logits.masked_fill(ahead, -torch.inf)
            # A pass that overflowed has no attention: it counts for nothing, and training goes on.
            weights = logits.softmax(-1).nan_to_num(0.0).mean(0)[:, prefix:].cpu().double().numpy()
        if not weights.any():
            return
        for axis, line in zip(names, places, strict=True):
            self._of("attn_distance", axis).add(np.abs(line[asked][:, None] - line), weights)

    def step(self) -> None:
        """End a step: write what was seen where it is due, and go on to the next."""
        if self.due:
            line = self.data() if self.path is not None or self._writer is not None else None
            if self.path is not None:
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
            if self._writer is not None and line is not None:
                show(self._writer, line)
        self.steps += 1

    def data(self) -> dict[str, Any]:
        """Return all that was seen so far, as JSON data."""
        return {
            "step": self.steps,
            "grids": {
                "x".join(map(str, grid)): count
                for grid, count in (self._before + self._grids).items()
            },
            **self.support(),
            "buckets": self._occupancy(),
            "drift": {name: drift(read(), start) for name, (read, start) in self._starts.items()},
        }

    def support(self) -> dict[str, list[Entry]]:
        """Return what was seen as the `train_support` of a lineage record."""
        found = {key: _copied(one) for key, one in self._found.items()}
        for grid, images in self._grids.items():
            _add_grid(found, grid, images, self.unit)
        names = sorted({axis for _, axis in found}, key=(*AXES, "seq").index)
        return {
            quantity: [
                found[quantity, axis].entry(axis, signed=quantity == "offset")
                for axis in names
                if found.get((quantity, axis))
            ]
            for quantity in ("position", "offset", "attn_distance")
        }

    def _of(self, quantity: str, axis: str) -> Histogram:
        return self._found.setdefault((quantity, axis), Histogram(self.unit))

    def _occupancy(self) -> dict[str, Any]:
        """Return how often each bucket of each watched table was asked for, one list an axis."""
        offsets = {entry["axis"]: entry for entry in self.support()["offset"]}
        return {name: bucket_use(bias, offsets) for name, bias in self._buckets.items()}


class _Reader:
    """Reads a parameter where it now is: training loops replace and move them."""

    def __init__(self, module: nn.Module, key: str) -> None:
        self.module, self.key = module, key

    def __call__(self) -> Tensor:
        value: Tensor = getattr(self.module, self.key)
        return value.detach().float().cpu().clone()


def _is_size(value: object) -> bool:
    """Return whether a value is a finite number above 0."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def _places(coords: Any, axes: Sequence[str]) -> Array:
    """Return coordinates `[axes, n]` of the first row."""
    if not isinstance(coords, Tensor) or coords.is_complex():
        raise PositionError(f"coords is {coords!r:.60}; a tensor of real numbers is required.")
    row = (
        coords
        if coords.ndim == 2
        else coords[:, 0]
        if coords.ndim == 3 and coords.shape[1]
        else coords[None]
    )
    unknown = [axis for axis in axes if axis not in (*AXES, "seq")]
    if row.ndim != 2 or row.shape[0] != len(axes) or unknown:
        raise PositionError(
            f"coords have shape {tuple(coords.shape)} and axes are {tuple(axes)}; [axes, n] or [axes, b, n], and "
            "one of t, h, w and seq an axis are required. Pass axes=."
        )
    wide = torch.float64 if row.is_floating_point() else torch.int64
    places = row.detach().to("cpu", wide)
    if not bool(places.isfinite().all()):
        raise PositionError(
            f"coords hold {float(places[~places.isfinite()][0])}; finite positions are required."
        )
    return places.numpy()


def _add_grid(
    found: dict[tuple[str, str], Histogram], grid: tuple[int, int, int], images: int, unit: float
) -> None:
    """Count every cell of a grid, and every pair of cells, of so many images."""
    cells = grid[0] * grid[1] * grid[2]
    for axis, side in zip(AXES, grid, strict=True):
        if axis == "t" and side == 1:
            continue
        line, step = np.arange(side), np.arange(1 - side, side)
        across = cells // side  # cells that share a place on this axis
        position = found.setdefault(("position", axis), Histogram(unit))
        position.add(line, np.full(side, float(across * images)))
        offset = found.setdefault(("offset", axis), Histogram(unit))
        offset.add(step, (side - np.abs(step)) * float(across**2 * images))


def _copied(one: Histogram) -> Histogram:
    copy = Histogram(one.unit)
    copy.merge(one)
    return copy
