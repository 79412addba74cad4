"""Figures: PNGs by matplotlib of what an encoding, an attention map or a release card looks like.

Every function returns the bytes of a PNG; `visionpos.audit.writing.write_whole` writes them. matplotlib comes with the
extra `viz`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

import torch
from torch import Tensor

from visionpos.errors import PositionError
from visionpos.geometry import Grid

# Beside colours, so that lines differ in print and one that lies on another shows.
MARKS = "o", "s", "^", "D", "v", "P", "X", "*"
DASHES = "-", "--", "-.", ":"


def similarity_map(values: Tensor, grid: Grid, *, tokens_yx: Sequence[tuple[int, int]]) -> bytes:
    """Return maps of how alike some cells are to all others, one map a cell.

    Args:
        values: `[n, n]` similarity, such as `cosine_similarity` gives of codes; or a bias, or logits.
        grid: the cells, one frame.
        tokens_yx: (row, column) of the cells to look from.

    Raises:
        PositionError: if shapes do not fit, or a cell is not on the grid.
        ImportError: without matplotlib, naming the extra.
    """
    if tuple(values.shape) != (grid.size, grid.size) or grid.frames != 1:
        raise PositionError(
            f"values are {list(values.shape)} and the grid is {grid.shape}; [n, n] with n cells of one frame is "
            "required. Take one frame, without prefix tokens."
        )
    cells = list(tokens_yx)
    for row, col in cells:
        if not (0 <= row < grid.height and 0 <= col < grid.width):
            raise PositionError(
                f"tokens_yx has {(row, col)}; (row, column) on a grid of {grid.height} x {grid.width} is required."
            )
    if not cells:
        raise PositionError("tokens_yx is empty; at least one cell is required. Pass [(0, 0)].")
    maps = values.detach().double().cpu().view(grid.size, grid.height, grid.width).numpy()
    low, high = float(maps.min()), float(maps.max())
    columns = min(len(cells), 4)
    figure, axes = _figure(-(-len(cells) // columns), columns)
    shown = None
    for at, place in zip(cells, axes, strict=False):
        shown = place.imshow(maps[at[0] * grid.width + at[1]], vmin=low, vmax=high, cmap="viridis")
        place.plot(at[1], at[0], marker="x", color="red", markersize=8)
        place.set(title=f"row {at[0]}, column {at[1]}", xlabel="column", ylabel="row")
    for place in axes[len(cells) :]:
        place.set_axis_off()
    figure.colorbar(shown, ax=list(axes), label="similarity")
    return _png(figure)


def cosine_similarity(codes: Tensor) -> Tensor:
    """Return `[n, n]` cosine of the angle between codes.

    Args:
        codes: `[n, d]`, such as an additive encoding gives of a grid.

    Example:
        >>> cosine_similarity(torch.tensor([[1.0, 0.0], [0.0, 2.0]])).tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """
    unit = torch.nn.functional.normalize(codes.double(), dim=-1)
    return unit @ unit.mT


def phase_similarity(angles: Tensor) -> Tensor:
    """Return `[n, n]` mean cosine of the angle between turned pairs: what a constant query and key see of a rotation.

    Args:
        angles: `[n, pairs]` radians of one head.

    Example:
        >>> phase_similarity(torch.tensor([[0.0], [torch.pi]])).round().tolist()
        [[1.0, -1.0], [-1.0, 1.0]]
    """
    turned = torch.cat([angles.double().cos(), angles.double().sin()], dim=-1)
    return turned @ turned.mT / angles.shape[-1]


def frequency_map(freqs: Tensor, *, axes: Sequence[str] = ()) -> bytes:
    """Return which axis drives which channel pair, and how fast.

    Args:
        freqs: `[axes, pairs]` radians per unit, zero where an axis does not drive a pair; as `Family.frequencies`.
        axes: their names.

    Raises:
        PositionError: if freqs have another shape, or names do not fit.
        ImportError: without matplotlib, naming the extra.
    """
    if freqs.ndim != 2 or len(axes) not in (0, freqs.shape[0]):
        raise PositionError(
            f"freqs are {list(freqs.shape)} and axes {tuple(axes)}; [axes, pairs] and one name an axis are required."
        )
    names = list(axes) or [f"axis {number}" for number in range(freqs.shape[0])]
    speed = freqs.detach().double().abs().cpu().numpy()
    figure, (place,) = _figure(1, 1, width=9)
    for number, name in enumerate(names):
        (driven,) = speed[number].nonzero()
        marker = MARKS[number % len(MARKS)]
        place.plot(driven, speed[number, driven], marker, label=f"{name}: {len(driven)} pairs")
    if speed.any():
        place.set_yscale("log")
    place.set(
        xlabel="channel pair", ylabel="radians per unit", title="Which axis drives which pair"
    )
    place.legend()
    return _png(figure)


def distance_histogram(weights: Tensor, grid: Grid, *, bins: int = 20) -> bytes:
    """Return how far attention looks: the share of attention by distance in cells, one line a head.

    Args:
        weights: `[heads, n, n]` or `[b, heads, n, n]` attention of the cells, prefix tokens left out.
        grid: the cells, one frame.
        bins: of distance.

    Raises:
        PositionError: if weights are not those of the grid.
        ImportError: without matplotlib, naming the extra.
    """
    shares, edges = distance_shares(weights, grid, bins=bins)
    figure, (place,) = _figure(1, 1, width=9)
    middles = ((edges[1:] + edges[:-1]) / 2).numpy()
    for head, share in enumerate(shares.numpy()):
        place.plot(middles, share, _style(head), label=f"head {head}")
    place.set(xlabel="distance in cells", ylabel="share of attention", title="Attention distance")
    place.legend(ncols=2, fontsize="small")
    return _png(figure)


def distance_shares(weights: Tensor, grid: Grid, *, bins: int = 20) -> tuple[Tensor, Tensor]:
    """Return the share of attention in each bin of distance, and the edges of the bins.

    Args:
        weights: as `distance_histogram`.
        grid: the cells, one frame.
        bins: at least 1.

    Returns:
        `[heads, bins]` float64 that sums to the attention of a query, 1 without prefix tokens; `[bins + 1]` float64.

    Raises:
        PositionError: if weights are not those of the grid.

    Example:
        >>> even = torch.full((1, 2, 2), 0.5)
        >>> distance_shares(even, Grid(1, 2), bins=2)[0].tolist()
        [[0.5, 0.5]]
    """
    if weights.ndim not in (3, 4) or weights.shape[-2:] != (grid.size, grid.size) or bins < 1:
        raise PositionError(
            f"weights are {list(weights.shape)}, the grid {grid.shape} and bins {bins}; [heads, n, n] of n = "
            f"{grid.size} cells, and at least 1 bin, are required. Leave prefix tokens out."
        )
    row, col = torch.meshgrid(torch.arange(grid.height), torch.arange(grid.width), indexing="ij")
    cells = torch.stack([row.flatten(), col.flatten()], -1).double().repeat(grid.frames, 1)
    distance = torch.cdist(cells, cells)  # [n, n]
    edges = torch.linspace(0, max(float(distance.max()), 1.0), bins + 1, dtype=torch.float64)
    which = (torch.bucketize(distance, edges, right=True) - 1).clamp(0, bins - 1).flatten()
    per_head = weights.detach().double().cpu()
    per_head = per_head if per_head.ndim == 3 else per_head.mean(0)
    flat = per_head.flatten(1) / grid.size
    shares = torch.zeros(flat.shape[0], bins, dtype=torch.float64)
    return shares.index_add_(1, which, flat), edges


def resolution_curves(
    curves: Mapping[str, Sequence[tuple[str, float]]], *, quality: str = "quality"
) -> bytes:
    """Return task quality against resolution, one line for each kind of change.

    Args:
        curves: label -> (grid, such as "14x14", and quality there) in order; NaN leaves a gap.
        quality: name of the vertical axis.

    Raises:
        PositionError: if there is no curve.
        ImportError: without matplotlib, naming the extra.
    """
    grids = list(dict.fromkeys(grid for points in curves.values() for grid, _ in points))
    if not grids:
        raise PositionError(
            "curves are empty; at least one label with a point is required. Measure a grid first."
        )
    figure, (place,) = _figure(1, 1, width=9)
    for number, (label, points) in enumerate(curves.items()):
        at = [grids.index(grid) for grid, _ in points]
        heights = [value if math.isfinite(value) else math.nan for _, value in points]
        place.plot(at, heights, _style(number), label=label)
    place.set_xticks(range(len(grids)), grids)
    place.set(xlabel="token grid", ylabel=quality, title=f"{quality} against resolution")
    place.legend()
    return _png(figure)


def _style(number: int) -> str:
    return MARKS[number % len(MARKS)] + DASHES[number % len(DASHES)]


def _figure(rows: int, columns: int, *, width: float = 0.0) -> tuple[Any, list[Any]]:
    """Return a figure and its places, row by row; no global state is touched."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "matplotlib is not installed, and figures need it. Install visionpos[viz]."
        ) from error
    size = (width or 3.2 * columns + 1, 3.2 * rows if rows * columns > 1 else 5)
    figure = Figure(figsize=size, layout="constrained")
    places = figure.subplots(rows, columns, squeeze=False)
    return figure, list(places.flat)


def _png(figure: Any) -> bytes:
    out = BytesIO()
    # Without the date and version that matplotlib writes, equal figures are equal files.
    figure.savefig(out, format="png", dpi=120, metadata={"Software": None})
    return out.getvalue()
