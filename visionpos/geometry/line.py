"""Lines: tokens in a row, their differences, and what has one number a difference laid over all pairs of two rows.

Queries are the last of the keys: n queries and m keys have n + m - 1 differences, ordered from m - 1 down to 1 - n, so
that the difference of query i and key j is number j - i + n - 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from visionpos.errors import PositionError
from visionpos.geometry.points import check_floats, readable
from visionpos.geometry.ranges import is_integer
from visionpos.geometry.relative import distinct_offsets

if TYPE_CHECKING:
    from torch import Tensor

    from visionpos.geometry.grid import Grid


def line_offsets(grid: Grid, *, device: torch.device | None = None) -> Tensor:
    """Return the differences of row-major token numbers, one a coordinate difference of the grid.

    A line of n tokens is `Grid(1, n)`; another grid is read row after row, as a language model reads patches.

    Args:
        grid: the lattice.
        device: where to build.

    Returns:
        `[(2h - 1)(2w - 1), 1]` float32, query minus key, in `distinct_offsets` order.

    Example:
        >>> from visionpos.geometry.grid import Grid
        >>> line_offsets(Grid(2, 2)).flatten().tolist()
        [-3.0, -2.0, -1.0, -1.0, 0.0, 1.0, 1.0, 2.0, 3.0]
    """
    offsets = distinct_offsets(grid, device=device)
    steps = (grid.height * grid.width, grid.width, 1)[-offsets.shape[-1] :]
    return (offsets * offsets.new_tensor(steps)).sum(-1, keepdim=True)


def line_steps(queries: int, keys: int, *, device: torch.device | None = None) -> Tensor:
    """Return `[queries + keys - 1]` float32, the differences of a line, from keys - 1 down.

    Example:
        >>> line_steps(2, 3).tolist()
        [2.0, 1.0, 0.0, -1.0]
    """
    return (keys - 1) - torch.arange(queries + keys - 1, device=device, dtype=torch.float32)


def laid(values: Tensor, queries: int, keys: int) -> Tensor:
    """Return `[..., queries, keys]` from one number a difference, `[..., queries + keys - 1]`, without an index.

    Example:
        >>> laid(line_steps(2, 3), 2, 3).tolist()
        [[1.0, 0.0, -1.0], [2.0, 1.0, 0.0]]
    """
    if torch.compiler.is_compiling():  # a window would tie the graph to its size
        index = _places(queries, keys, values.device)
        picked: Tensor = values.index_select(-1, index.flatten()).unflatten(-1, index.shape)
        return picked
    return values.unfold(-1, keys, 1)[..., :queries, :].flip(-2)


def shifted(rows: Tensor, keys: int) -> Tensor:
    """Return `[..., n, keys]`, in eager mode a view: entry (i, j) is entry j - i + n - 1 of row i of `[..., n, span]`.

    A span of n + keys - 1 differences serves every pair. A span of keys, the differences of at least 0, serves pairs
    whose key comes no later than the query; the others hold numbers of other pairs and have to be masked.

    Args:
        rows: one number a query and difference.
        keys: m.

    Example:
        >>> shifted(torch.arange(15).view(3, 5), 5).tolist()
        [[2, 3, 4, 5, 6], [6, 7, 8, 9, 10], [10, 11, 12, 13, 14]]

    Reference:
        Transformer-XL (arXiv 1901.02860): its shift pads a column and copies; here no number moves.
    """
    count, span = rows.shape[-2:]
    if torch.compiler.is_compiling():
        index = _places(count, keys, rows.device).clamp(max=span - 1)
        return rows.gather(-1, index.expand(*rows.shape[:-2], -1, -1))
    if span == 1:
        return rows
    return rows.flatten(-2)[..., count - 1 :].unfold(-1, keys, span - 1)[..., :count, :]


def _places(queries: int, keys: int, device: torch.device) -> Tensor:
    """Return `[queries, keys]` int64, the number of every pair's difference."""
    late = torch.arange(queries, device=device).unsqueeze(1)
    return torch.arange(keys, device=device) - late + (queries - 1)


def check_line(queries: int, keys: int) -> None:
    """Refuse what are no counts of queries at the end of a line of keys.

    Raises:
        PositionError: naming both.
    """
    if not (is_integer(queries) and is_integer(keys)) or not 1 <= queries <= keys:
        raise PositionError(
            f"queries is {queries!r} and keys {keys!r}; at least 1 query, and no fewer keys, are required: queries "
            "are the last of the keys. Count the cached tokens among the keys."
        )


def check_rows(x: Tensor, name: str, sizes: tuple[int, int], keys: int, *, whole: bool) -> None:
    """Refuse queries or keys that are no tokens of a line.

    Args:
        x: `[b, heads, tokens, channels]`.
        name: of the argument.
        sizes: heads and channels.
        keys: tokens of the line.
        whole: whether every token is required; else any last ones are taken.

    Raises:
        PositionError: naming the shape and what is required.
    """
    good = x.ndim == 4 and (x.shape[1], x.shape[3]) == sizes
    if not good or not (x.shape[2] == keys if whole else 1 <= x.shape[2] <= keys):
        count = f"{keys}" if whole else f"1 to {keys}"
        raise PositionError(
            f"{name} has shape {tuple(x.shape)}; [b, {sizes[0]}, {count}, {sizes[1]}] is required, tokens of the grid. "
            "Pass the grid of all keys, Grid(1, m) for a line of m, and the Dims of the model."
        )


def check_pair(q: Tensor, k: Tensor, sizes: tuple[int, int], keys: int) -> None:
    """Refuse queries and keys that are no tokens of one line, or not of one batch, dtype and device.

    Args:
        q: `[b, heads, n, channels]`, the last n tokens.
        k: `[b, heads, keys, channels]`.
        sizes: heads and channels.
        keys: tokens of the line.

    Raises:
        PositionError: naming what differs.
    """
    for name, x in (("q", q), ("k", k)):
        check_floats(x, name)
        check_rows(x, name, sizes, keys, whole=name == "k")
    # Autocast brings dtypes together, and the meta device knows none.
    cast = not q.is_meta and torch.is_autocast_enabled(q.device.type)
    agree = q.shape[0] == k.shape[0] and q.device == k.device
    if not agree or (q.dtype != k.dtype and not cast):
        raise PositionError(
            f"q is a batch of {q.shape[0]}, {q.dtype} on {q.device}, and k of {k.shape[0]}, {k.dtype} on {k.device}; "
            "they must agree. Cast or move one of them, and expand a batch of one."
        )


def check_logits(logits: Tensor, heads: int) -> None:
    """Refuse what are no logits of the last tokens of a line.

    Args:
        logits: `[b, heads, n, m]`.
        heads: of the model.

    Raises:
        PositionError: naming the shape.
    """
    check_floats(logits, "logits")
    if logits.ndim != 4 or logits.shape[1] != heads or logits.shape[2] > logits.shape[3]:
        raise PositionError(
            f"logits have shape {tuple(logits.shape)}; [b, {heads}, n, m] of the last n of m tokens is required. Pass "
            "those of all heads, with cached keys among the m."
        )


def check_counted(ids: Tensor, name: str) -> None:
    """Refuse ids whose dtype cannot tell them from their neighbours, where that costs no wait for a device.

    Raises:
        PositionError: naming the dtype and how far it counts.
    """
    if not ids.is_floating_point() or ids.dtype == torch.float64:
        return
    last = round(2 / torch.finfo(ids.dtype).eps)
    if readable(ids) and ids.numel() and float(ids.abs().max()) >= last:
        raise PositionError(
            f"{name} are {ids.dtype} and reach {float(ids.abs().max()):g}; it counts whole numbers below {last} alone. "
            "Pass them as int64 or float64, or as float32 if they are below 16777216."
        )


def differences(queries: Tensor, keys: Tensor) -> Tensor:
    """Return `[..., n, m, axes]`, query minus key, exact for whole numbers and float32 or better for others.

    Args:
        queries: `[..., n, axes]`.
        keys: `[..., m, axes]`.

    Raises:
        PositionError: if ids are so large that their dtype has rounded them, or the two are of other batches.
    """
    leads = zip(reversed(queries.shape[:-2]), reversed(keys.shape[:-2]), strict=False)
    if any(mine != other and 1 not in (mine, other) for mine, other in leads):
        raise PositionError(
            f"queries have shape {tuple(queries.shape)} and keys {tuple(keys.shape)}; what stands before [n, axes] and "
            "[m, axes] must agree, or be 1. Pass the ids of one batch."
        )
    for name, ids in (("queries", queries), ("keys", keys)):
        check_counted(ids, name)
    if queries.is_floating_point() or keys.is_floating_point():
        exact = not (queries.is_floating_point() and keys.is_floating_point())
        least = torch.float64 if exact else torch.float32
        dtype = torch.promote_types(least, torch.promote_types(queries.dtype, keys.dtype))
    else:
        dtype = torch.int64
    return queries.to(dtype).unsqueeze(-2) - keys.to(dtype).unsqueeze(-3)
