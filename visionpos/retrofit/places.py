"""Places of the doors add and conditional: a model's patch embeddings and blocks, with how tokens lie there."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from torch import nn

from visionpos.config import read_yaml, shipped
from visionpos.retrofit.mixing import sides_at, width_of
from visionpos.retrofit.port_rows import nearest
from visionpos.retrofit.ports import attentions_of, prefix_row_is_flat
from visionpos.retrofit.seams import blocks_of, find, matches, prefix_of, row_of

if TYPE_CHECKING:
    from visionpos.retrofit.ports import Port


@dataclass(frozen=True, slots=True)
class Place:
    """One place where tokens can be added to, or mixed.

    Args:
        path: of the module whose output they are.
        module: that module.
        width: channels of a token.
        layout: how they lie: a word of `seam_rows.BlockLayout`, or "prefixed" (rows with prefix tokens, then the grid).
        prefix: tokens in front of the grid.
        block: number of the block, -1 for a patch embedding.
        item: which item of the output, None for the output itself.
        sides: (module, attribute) that state the grid where the output does not.
        port: the attention inside that knows the grid of rows, or None.
    """

    path: str
    module: Any
    width: int
    layout: str
    prefix: int = 0
    block: int = -1
    item: int | None = None
    sides: tuple[Any, str] = (None, "")
    port: Port | None = None


@lru_cache(maxsize=1)
def _embeds() -> dict[str, dict[str, str]]:
    text = shipped("retrofit")["attentions"].read_text(encoding="utf-8")
    found: dict[str, dict[str, str]] = read_yaml(text, source="attentions.yaml")["embeds"]
    return found


def embeds_of(model: nn.Module) -> list[Place]:
    """Return where vectors can be added to a model's patches."""
    row = nearest(model, _embeds()) or {"at": row_of(model).patch_embed, "layout": "nlc"}
    prefix = prefix_of(model) if row["layout"] == "prefixed" else 0
    sides = sides_at(model, row["grid"]) if "grid" in row else (None, "")
    found = []
    for path, module in matches(model, row["at"]):
        if "width" in row:
            wide = int(find(model, row["width"]))
        else:
            wide = int(getattr(module, "embed_dim", 0)) or width_of(module)
        end = _end(path, module)
        found.append(Place(*end, wide, row["layout"], prefix=prefix, sides=sides))
    return found


def _end(path: str, module: Any) -> tuple[str, Any]:
    """Return the last part of a chain whose own forward_intermediates runs its parts and goes around its hooks."""
    if not (isinstance(module, nn.Sequential) and hasattr(module, "forward_intermediates")):
        return path, module
    name, last = list(module.named_children())[-1]
    return f"{path}.{name}", last


def mixers_of(model: nn.Module) -> list[list[Place]]:
    """Return, for every block after which tokens can be mixed, its places: one, or one a branch."""
    row, attentions = row_of(model), attentions_of(model)
    last = (nearest(model, _embeds()) or {}).get("unit", "")
    layout = str(row.mixer_layout or row.layout)
    if row.mixers is None:
        units = blocks_of(model)
    else:
        units = [
            (f"{path}.{name}", child)
            for path, parent in matches(model, row.mixers)
            for name, child in parent.named_children()
        ]
    units = [(path, unit) for path, unit in units if next(unit.parameters(), None) is not None]
    found = []
    for number, (path, unit) in enumerate(units):
        inside = [port for port in attentions if port.path.startswith(f"{path}.")]
        if layout == "list_nlc":
            found.append(_branches(path, unit, number, inside))
            continue
        port = inside[-1] if inside and inside[-1].local else None
        item = int(layout[5]) if layout.startswith("tuple") else None
        prefix = 0 if layout.endswith(("nhwc", "nchw")) else prefix_of(model)
        wide = width_of(find(unit, last) or unit) if last else width_of(unit)
        found.append([Place(path, unit, wide, layout, prefix, number, item, port=port)])
    return found


def _branches(path: str, unit: Any, number: int, inside: list[Port]) -> list[Place]:
    """Return one place a branch of a block that takes and gives a list."""
    ports = {id(port.seams.grid.anchor): port for port in inside}
    first = {port.seams.grid.anchor: port for port in ports.values()}
    return [
        Place(
            path, unit, port.heads * port.head_dim, "list_nlc", port.prefix, number, item, port=port
        )
        for item, port in enumerate(first[anchor] for anchor in sorted(first))
    ]


def uses_call(model: nn.Module, place: Place) -> bool:
    """Return whether the grid of a block's rows is that of the call."""
    flat = prefix_row_is_flat(model) or row_of(model).layout == "tuple1"
    return flat and place.block >= 0
