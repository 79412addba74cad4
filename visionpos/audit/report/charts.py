"""Charts: numbers layer by layer as places in a small drawing; the template draws them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from visionpos.audit.outcome import Verdict
    from visionpos.audit.result import Measured

LEFT, RIGHT, TOP, BOTTOM = 44.0, 248.0, 8.0, 104.0
DECADES = -16, 2  # of the common axis; what lies beyond is drawn at its ends
SHAPES: dict[Verdict, str] = {
    "zero": "ring",
    "nonzero": "dot",
    "weak": "square",
    "unseen": "square",
    "undefined": "cross",
    "failed": "cross",
}


def layer_number(where: str) -> int | None:
    """Return the layer that a row is about; None for the end.

    Example:
        >>> layer_number("layer 3"), layer_number("end")
        (3, None)
    """
    word, _, digits = where.partition(" ")
    return int(digits) if word == "layer" and digits.isdecimal() else None


def layer_charts(rows: Sequence[Measured]) -> list[dict[str, Any]]:
    """Return one chart for every intervention, variant, metric and kind of tokens that was measured in layers."""
    groups: dict[tuple[str, str, str, str, str], dict[int, Measured]] = {}
    for row in rows:
        layer = layer_number(row.where)
        if layer is not None:
            key = (row.intervention, row.variant, row.metric, row.tokens, row.dtype)
            shown = groups.setdefault(key, {})
            if layer not in shown or _size(row) > _size(shown[layer]):
                shown[layer] = row
    return [_chart(key, dict(sorted(shown.items()))) for key, shown in groups.items()]


def _size(row: Measured) -> float:
    """Return what counts as the largest over seeds: a failure hides behind no number."""
    if row.value is None or not math.isfinite(row.value):
        return math.inf if row.verdict == "failed" else -1.0
    return row.value


def _chart(key: tuple[str, str, str, str, str], rows: dict[int, Measured]) -> dict[str, Any]:
    intervention, variant, metric, tokens, dtype = key
    step = (RIGHT - LEFT) / max(len(rows) - 1, 1)
    dots = [
        {"x": round(LEFT + at * step, 1), "y": _height(row.value), "shape": SHAPES[row.verdict]}
        for at, row in enumerate(rows.values())
    ]
    values = [row.value for row in rows.values() if row.value is not None]
    numbers = [value for value in values if math.isfinite(value)]
    span = f"from {min(numbers):.2g} to {max(numbers):.2g}" if numbers else "without a number"
    title = " ".join(filter(None, (intervention, variant, metric, f"({tokens}, {dtype})")))
    return {
        "title": title,
        "says": f"{title} in {len(rows)} layers, {span}",
        "dots": dots,
        "line": " ".join(f"{dot['x']},{dot['y']}" for dot in dots if dot["shape"] != "cross"),
        "ticks": [
            {"y": _height(10.0**decade), "label": f"1e{decade}" if decade else "1"}
            for decade in (-16, -12, -8, -4, 0)
        ],
        "first": f"layer {min(rows)}",
        "last": f"layer {max(rows)}",
    }


def _height(value: float | None) -> float:
    """Return where a value stands on the logarithmic axis; zero and what is no number stand at the bottom."""
    low, high = DECADES
    if value is None or not math.isfinite(value) or value <= 0:
        return BOTTOM
    share = (min(max(math.log10(value), low), high) - low) / (high - low)
    return round(BOTTOM - share * (BOTTOM - TOP), 1)
