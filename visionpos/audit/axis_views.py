"""Axis views: how well each axis of a rotary layout tells the cells of a grid apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from visionpos.audit.result import Found
from visionpos.vlm import axis_visibility
from visionpos.vlm.language import LanguageSpec
from visionpos.vlm.rotary import VISIBLE_RADIANS, language_freqs

CELLS = 32  # of the grid that axes are looked at on
_SAMPLES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisView:
    """What one axis does over a grid.

    Args:
        axis: its name: "time", "row", "col", ... of the position rule.
        cells: cells of the grid along it.
        pairs: channel pairs it drives.
        phase: radians that its fastest pair turns from the first cell to the last.
        slowest: radians of its slowest pair.
        past_quarter: pairs that turn beyond a quarter, half pi.
        per_cell: mean change of a logit from one cell to the next, for normal queries and keys.
    """

    axis: str
    cells: int
    pairs: int
    phase: float
    slowest: float
    past_quarter: int
    per_cell: float


def axis_views(
    language: LanguageSpec, names: Sequence[str], cells: Sequence[int]
) -> tuple[AxisView, ...]:
    """Return what every axis of a layout does over a grid.

    Args:
        language: the rotary layout.
        names: a name an axis.
        cells: cells an axis, at least 1.

    Raises:
        PositionError: if there is not one number of at least 1 an axis.

    Example:
        >>> from visionpos.vlm import family
        >>> views = axis_views(
        ...     family("qwen2_vl").spec.language, ("time", "row", "col"), (32, 32, 32)
        ... )
        >>> [round(view.phase, 4) for view in views]
        [31.0, 0.9803, 0.0055]
    """
    seen = axis_visibility(language, cells)
    freqs = language_freqs(language, torch.float64).reshape(-1, language.axes, language.pairs)
    out = []
    for number, (view, name) in enumerate(zip(seen, names, strict=True)):
        own = freqs[:, number]
        turned = own[own > 0] * (cells[number] - 1)
        out.append(
            AxisView(
                axis=name,
                cells=int(cells[number]),
                pairs=view.pairs,
                phase=view.fastest,
                slowest=view.slowest,
                past_quarter=int((turned > torch.pi / 2).sum()),
                per_cell=_logit_change(own, language.head_dim),
            )
        )
    return tuple(out)


def _logit_change(freqs: torch.Tensor, head_dim: int) -> float:
    """Return the mean change of q.k / sqrt(head_dim) as angles grow by one cell, over heads `[heads, pairs]`."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(
        2, _SAMPLES, freqs.shape[-1], 2, generator=generator, dtype=torch.float64
    ).unbind(0)
    meet = torch.view_as_complex(q) * torch.view_as_complex(k).conj()  # [samples, pairs]
    turn = torch.polar(torch.ones_like(freqs), freqs) - 1  # [heads, pairs]
    change = (meet.unsqueeze(1) * turn).real.sum(-1) / head_dim**0.5
    return float(change.abs().mean())


def axis_findings(views: Sequence[AxisView]) -> tuple[Found, ...]:
    """Return a finding an axis, with an alarm where it turns less than 0.1 rad over its grid."""
    return tuple(_finding(view) for view in views)


def _finding(view: AxisView) -> Found:
    dark = view.cells > 1 and view.phase < VISIBLE_RADIANS
    return Found(
        detector="axis_visibility",
        value=view.phase,
        threshold=VISIBLE_RADIANS,
        alarm=dark,
        says=f"axis {view.axis} turns {view.phase:.3g} rad over {view.cells} cells; a cell moves logits by "
        f"{view.per_cell:.2g}.",
        remedy=(
            f"Attention hardly tells cells along {view.axis} apart: give it faster pairs (interleave the sections), "
            "or a larger step."
            if dark
            else ""
        ),
    )
