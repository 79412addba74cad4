"""Detectors of how channels are shared out: pairs an axis, radians an axis turns, rows that nothing reaches."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from visionpos.audit.detectors.finding import Check, UnfitError, judged
from visionpos.audit.result import Found

SHARE = 0.0
VISIBLE = 0.1
UNUSED = 0.0
KEYS = 64
_FAR = 123457.0  # so far that the cosine of the slowest pair is seen in float32


def section_shares(
    sections: Sequence[int],
    pairs: int,
    rendered: Callable[[Tensor], Tensor] | None = None,
    *,
    axes: int | None = None,
) -> Found:
    """Return whether every axis drives the pairs that its section asks for.

    Some codes take any sections: strides that run out leave the first axis more than was asked, without a word.

    Args:
        sections: pairs an axis, as configured.
        pairs: that turn, rotary_dim / 2.
        rendered: from places `[1, axes]` to anything with one entry, or the same number of entries, a pair: angles,
            cosines, a turned vector. Each axis is moved alone, and what changes is counted.
        axes: how many of the last sections have coordinates, where the first stand still; all when None.
    """
    total = sum(sections)
    checks = [
        Check(
            value=float(abs(total - pairs)),
            threshold=SHARE,
            wrong=f"sections {tuple(sections)} sum to {total} and {pairs} pairs turn",
            remedy="Make the sections sum to rotary_dim / 2.",
        )
    ]
    if rendered is not None:
        count = len(sections) if axes is None else axes
        real, asked = driven_pairs(rendered, count, pairs), sections[len(sections) - count :]
        checks.append(
            Check(
                value=float(max(abs(a - b) for a, b in zip(real, asked, strict=True))),
                threshold=SHARE,
                wrong=f"sections {tuple(sections)} are configured and axes drive {real} pairs",
                remedy=f"Write {real} to keep what the weights were trained with, or correct the layout.",
            )
        )
    return judged("section_shares", checks, f"axes drive {tuple(sections)} pairs, as configured")


def driven_pairs(rendered: Callable[[Tensor], Tensor], axes: int, pairs: int) -> tuple[int, ...]:
    """Return how many pairs each axis moves."""
    still = torch.zeros(1, axes, dtype=torch.float64)
    before = rendered(still)
    entries = max(1, before.shape[-1] // pairs)
    counts = []
    for axis in range(axes):
        moved = still.clone()
        moved[:, axis] = _FAR
        counts.append(int((rendered(moved) != before).flatten(0, -2).any(0).sum()) // entries)
    return tuple(counts)


def axis_visibility(freqs: Tensor, extents: Sequence[float]) -> Found:
    """Return whether every axis turns far enough over a grid to tell its cells apart.

    Args:
        freqs: `[..., axes, pairs]` radians per unit.
        extents: units from the first cell to the last of each axis; 0 for an axis with one cell, which is left out.

    Raises:
        UnfitError: if no axis has two cells.
    """
    speeds = freqs.detach().double().abs().movedim(-2, 0).flatten(1).amax(-1)
    phases = {
        axis: float(speed) * extent
        for axis, (speed, extent) in enumerate(zip(speeds, extents, strict=True))
        if extent > 0
    }
    if not phases:
        raise UnfitError("no axis has two cells")
    axis, least = min(phases.items(), key=lambda one: one[1])
    check = Check(
        value=least,
        threshold=VISIBLE,
        wrong=f"axis {axis} turns {least:.2g} rad from its first cell to its last: its cells look alike",
        remedy="Give the axis faster pairs (interleaved sections), or a larger step.",
        least=True,
    )
    words = ", ".join(f"{axis}: {phase:.3g}" for axis, phase in phases.items())
    return judged(
        "axis_visibility", [check], f"radians from the first to the last cell: axis {words}"
    )


def unused_buckets(hit: Tensor, count: int, *, known: Collection[int] = ()) -> Found:
    """Return whether rows of a table are reached by no difference.

    Args:
        hit: rows that differences of all sizes reach, any shape.
        count: rows of the table.
        known: rows that the published scheme leaves unused, such as row 16 of T5's 32.
    """
    reached = set(hit.flatten().tolist())
    dead = [row for row in range(count) if row not in reached and row not in known]
    check = Check(
        value=len(dead) / count,
        threshold=UNUSED,
        wrong=f"{len(dead)} of {count} rows are reached by no difference, {dead[:4]} among them",
        remedy="Give a table as many rows as there are buckets, and index it from 0.",
    )
    return judged(
        "unused_buckets", [check], f"all {count} rows but {len(known)} known ones are reached"
    )


def bias_collapse(bias: Tensor, *, keys: int = KEYS) -> Found:
    """Return whether neighbouring keys get the same bias, as where slope times place is kept in half precision.

    Args:
        bias: `[heads, m]` of one query, in the dtype in which it is added; the last keys are looked at.
        keys: how many.
    """
    last = bias[..., -keys:].flatten(0, -2) if bias.ndim > 1 else bias[None, -keys:]
    wanted = last.shape[-1]
    found = [len(torch.unique(row[~row.isnan()])) for row in last]
    head = min(range(len(found)), key=found.__getitem__)
    check = Check(
        value=float(found[head]),
        threshold=float(wanted),
        wrong=f"the last {wanted} keys of head {head} have {found[head]} different biases in "
        f"{str(bias.dtype).removeprefix('torch.')}",
        remedy="Form the bias from distances, slope * (i - j), or keep it in float32.",
        least=True,
    )
    return judged("bias_collapse", [check], f"the last {wanted} keys have biases of their own")


def is_linear(bias: Tensor) -> bool:
    """Return whether a bias `[heads, m]` changes by the same step from key to key, and changes at all."""
    step = bias.double().diff(dim=-1)
    size = float(step.abs().max()) if step.numel() else 0.0
    return size > 0 and math.isfinite(size) and float(step.diff(dim=-1).abs().max()) <= 1e-5 * size
