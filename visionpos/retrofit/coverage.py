"""coverage: model class -> seams -> what can be attached and whether resize works, with the timm models behind it.

The rows come from the seam table; the counts from configs/retrofit/coverage.yaml, which `python -m tests.retrofit.scan
--write` makes by building every registered model of these classes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from visionpos.config import read_yaml, shipped
from visionpos.retrofit.describe import describe
from visionpos.retrofit.plan import attachable
from visionpos.retrofit.seams import model_rows

if TYPE_CHECKING:
    from torch import nn

_NONE = ("ports", "attached", "unknown")
# Kind of grid -> what its counts do not say.
_DETAILS = {
    "coords": "attached encodings serve whole images; patches with coordinates of their own are refused"
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """What the toolkit does for one model class.

    Args:
        model: the class.
        models: registered timm models of it that have a position mechanism.
        parts: kind of part -> how many of them have it.
        grid: where a call learns its token grid.
        resize: "native" (timm's set_input_size), "in_place", "free" (nothing but notes to rewrite) or "square".
        rectangles: how many of them resize moves to a rectangle.
        add: how many take vectors added to tokens.
        rotate: how many have a port for a rotation.
        skipped: how many of those have attentions that it leaves out.
        bias: how many have a port for a bias.
        conditional: how many let tokens be mixed after a block.
        detail: what an attached encoding does not serve there, "" if nothing.
    """

    model: str
    models: int
    parts: dict[str, int]
    grid: str
    resize: str
    rectangles: int
    add: int
    rotate: int
    skipped: int
    bias: int
    conditional: int
    detail: str = ""


def coverage() -> list[Coverage]:
    """Return one row a model class of the seam table, in its order.

    Example:
        >>> rows = coverage()
        >>> rows[0].model, rows[0].resize
        ('VisionTransformer', 'native')
    """
    counted, rows = _counts()["rows"], []
    for name, seams in model_rows().items():
        found = counted.get(name, {})
        rows.append(
            Coverage(
                model=name.rpartition(".")[2],
                models=found.get("models", 0),
                parts=found.get("parts", {}),
                grid=seams.grid,
                resize=seams.resize,
                detail=_DETAILS.get(seams.grid, ""),
                **{
                    key: found.get(key, 0)
                    for key in ("rectangles", "add", "rotate", "skipped", "bias", "conditional")
                },
            )
        )
    return rows


def totals() -> dict[str, int]:
    """Return the sums over all rows: models, and how many of them each verb serves."""
    rows = coverage()
    names = ("models", "rectangles", "add", "rotate", "skipped", "bias", "conditional")
    return {name: sum(getattr(row, name) for row in rows) for name in names}


def counted_with() -> str:
    """Return the version of timm whose registry was counted."""
    return str(_counts()["timm"])


def tally(model: nn.Module) -> dict[str, Any] | None:
    """Return what `describe` and the doors find in one model, None if it has no position mechanism."""
    parts = Counter(part.kind for part in describe(model) if part.kind not in _NONE)
    return None if not parts else {"parts": dict(parts), **_doors(model)}


def _doors(model: nn.Module) -> dict[str, bool]:
    """Return by which doors an encoding can be attached to a model, and whether a rotation leaves some out."""
    found = attachable(model)
    served: dict[str, bool] = {door: places > 0 for door, (places, _, _) in found.items()}
    turned, attentions, _ = found["rotate"]
    return {**served, "skipped": 0 < turned < attentions}


@lru_cache(maxsize=1)
def _counts() -> dict[str, Any]:
    """Return the shipped counts."""
    text = shipped("retrofit")["coverage"].read_text(encoding="utf-8")
    return read_yaml(text, source="coverage.yaml")
