"""Layout check: proof by random queries and keys that a conversion between two rotary layouts changes no score."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from visionpos.errors import PositionError
from visionpos.geometry.coords import coordinates
from visionpos.geometry.fields import check_kind
from visionpos.geometry.freqs import angles
from visionpos.geometry.grid import Grid
from visionpos.geometry.layout import Layout, convert
from visionpos.geometry.rotation import Rotation

_WIDTH = 16  # of the random tokens


def check_layout(
    source: Layout,
    target: Layout,
    *,
    before: tuple[Tensor, Tensor] | None = None,
    after: tuple[Tensor, Tensor] | None = None,
    grid: Grid | None = None,
    tolerance: float = 1e-6,
    generator: torch.Generator | None = None,
) -> float:
    """Return how far attention scores move from one layout to another, or refuse if they move at all.

    Random tokens on a rectangle pass through the q and k projections of both sides and are turned as each layout says;
    every score, exempt tokens included, must agree. All of it runs in float64 on the CPU.

    Args:
        source: layout the weights were trained with.
        target: layout of the attention that will use them.
        before: q and k projection weights `[heads * head_dim, width]` in the source's order; random when None. Grouped
            queries have fewer heads of k, each shared by neighbouring heads of q.
        after: the same weights in the target's order; `convert(before)` when None. Pass what a converter wrote to
            check it, or `before` again to see what skipping the conversion does.
        grid: rectangle to measure on; 3 x 5 when None. A square would hide swapped axes.
        tolerance: largest difference allowed, in units of the scores' root mean square.
        generator: source of the draws; torch's default generator when None.

    Returns:
        The largest difference found, in the same unit.

    Raises:
        PositionError: with the measured difference if scores differ, or if the layouts cannot be joined at all.

    Example:
        >>> from visionpos.geometry.layout import Layout
        >>> adjacent = Layout(head_dim=16, pairing="adjacent", axis_order=(1, 0))
        >>> check_layout(adjacent, Layout(head_dim=16)) < 1e-12
        True
    """
    check_kind("source", source, Layout)
    check_kind("target", target, Layout)
    if source.prefix + source.suffix != target.prefix + target.suffix:
        raise PositionError(
            f"source exempts {source.prefix} + {source.suffix} tokens and target {target.prefix} + {target.suffix}; "
            "the counts of prefix + suffix must agree. Give both layouts the tokens of the model."
        )
    grid = Grid(3, 5) if grid is None else grid
    if before is None:
        rows = (source.head_dim, _WIDTH)
        before = (_normal(*rows, generator=generator), _normal(*rows, generator=generator))
    before = _checked("before", before, source)
    theirs = after is not None
    if after is None:
        after = (convert(before[0], source, target), convert(before[1], source, target))
    after = _checked("after", after, target)
    if [part.shape for part in before] != [part.shape for part in after]:
        raise PositionError(
            f"before has shapes {_shapes(before)} and after {_shapes(after)}; the two must agree. Pass the same q and "
            "k projections, before and after the conversion."
        )
    exempt = source.prefix + source.suffix
    tokens = _normal(exempt + grid.size, before[0].shape[1], generator=generator)
    old, new = _scores(tokens, before, source, grid), _scores(tokens, after, target, grid)
    error = float((new - old).abs().max() / old.square().mean().sqrt())
    if not error <= tolerance:
        raise PositionError(
            f"scores of source and target differ by {error:.3g} of their root mean square on grid "
            f"{grid.height} x {grid.width}; at most {tolerance:g} is required. {_advice(source, target, theirs=theirs)}"
        )
    return error


def _normal(*shape: int, generator: torch.Generator | None) -> Tensor:
    device = None if generator is None else generator.device
    return torch.randn(*shape, generator=generator, device=device, dtype=torch.float64).cpu()


def _checked(name: str, weights: Any, layout: Layout) -> tuple[Tensor, Tensor]:
    """Return q and k weights in float64 on the CPU, refusing what is no pair of projections of one attention."""
    pair = isinstance(weights, (tuple, list)) and len(weights) == 2
    if not pair or not all(isinstance(part, Tensor) and part.ndim == 2 for part in weights):
        raise PositionError(
            f"{name} is {_shapes(weights)}; two tensors [heads * head_dim, width], q and k, are required. Biases "
            "and norms move with `convert` and have no scores of their own."
        )
    q, k = (part.detach().double().cpu() for part in weights)
    heads, rest = divmod(q.shape[0], layout.head_dim)
    kv_heads, kv_rest = divmod(k.shape[0], layout.head_dim)
    whole = not rest and not kv_rest and 0 < kv_heads <= heads and heads % kv_heads == 0
    if not whole or q.shape[1] != k.shape[1]:
        raise PositionError(
            f"{name} has shapes {_shapes(weights)} and head_dim is {layout.head_dim}; whole heads of one width are "
            "required, and as many heads of q as of k or a multiple (grouped queries). Split q, k and v first."
        )
    return q, k


def _shapes(weights: Any) -> str:
    """Return what an error says of weights: their shapes, never their numbers."""
    if isinstance(weights, Tensor):
        return str(tuple(weights.shape))
    if isinstance(weights, (tuple, list)):
        return " and ".join(map(_shapes, weights))
    return repr(weights)


def _scores(tokens: Tensor, weights: tuple[Tensor, Tensor], layout: Layout, grid: Grid) -> Tensor:
    """Return `[heads, exempt + n, exempt + n]`, exempt tokens first whatever the layout does with them."""
    n, exempt = grid.size, layout.prefix + layout.suffix
    coords = coordinates(grid, layout.coords).double()
    turns = angles(coords, layout.freqs(dtype=torch.float64))
    rotation = Rotation.of(turns, layout.pairing, axes=len(layout.axis_order))
    # Places in the model's own sequence: prefix, patches, suffix.
    place = torch.arange(n + exempt)
    place = torch.cat([place[: layout.prefix], place[exempt:], place[layout.prefix : exempt]])
    turned = []
    for weight in weights:
        x = (tokens[place] @ weight.mT).unflatten(-1, (-1, layout.head_dim)).transpose(0, 1)
        out = rotation.apply(x.unsqueeze(0), prefix=layout.prefix, suffix=layout.suffix)
        turned.append(out[0].index_select(1, place.argsort()))
    q, k = turned
    scores: Tensor = q @ k.repeat_interleave(q.shape[0] // k.shape[0], 0).mT
    return scores


def _advice(source: Layout, target: Layout, *, theirs: bool) -> str:
    """Return what may be to blame: rows that the caller converted or did not, and the numbering of tokens."""
    rows = (
        "Convert the q and k rows of every head with `convert`, q and k alike. " if theirs else ""
    )
    if source.coords == target.coords:
        return rows.strip()
    return f"{rows}The coordinates differ too: {source.coords} and {target.coords}. Build the target with the source's."
