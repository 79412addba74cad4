"""describe: what position parts a model has, as a table of plain rows; and its lineage."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from visionpos.checkpoint import Lineage
from visionpos.config import plain
from visionpos.retrofit.attach import attachments
from visionpos.retrofit.ports import ports_of
from visionpos.retrofit.recipes import recipe_for
from visionpos.retrofit.resize import table_record
from visionpos.retrofit.rope import own_rope, spec_of_rope
from visionpos.retrofit.seams import grid_of, row_of, table_prefix

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One position part of a model.

    Args:
        kind: "table", "rotary", "attached" or "ports".
        path: where it is on the model.
        shape: size of its parameter, () if it has none.
        grid_hw: grid it serves, or None if it serves any.
        prefix: leading rows or tokens without position.
        detail: what a reader wants to know next: recipe, spec, strength.
    """

    kind: str
    path: str
    shape: tuple[int, ...]
    grid_hw: tuple[int, int] | None
    prefix: int
    detail: str


def describe(model: nn.Module) -> list[Part]:
    """Return every position part of a model, in the order in which tokens meet them.

    Args:
        model: a timm VisionTransformer or Eva, or a subclass.

    Raises:
        PositionError: if the class has no row in the seam table.

    Example:
        >>> import timm
        >>> [part.kind for part in describe(timm.create_model("vit_tiny_patch16_224"))]
        ['table', 'ports']
    """
    whole: Any = model
    parts = [part for part in (_table(whole), _rotary(whole)) if part is not None]
    parts += [_attached(name, part) for name, part in attachments(model).items()]
    ports = ports_of(whole)
    detail = f"{len(ports)} attentions, {ports[0].heads} heads of {ports[0].head_dim} channels"
    parts.append(
        Part(
            kind="ports",
            path=row_of(whole).blocks,
            shape=(),
            grid_hw=None,
            prefix=int(whole.num_prefix_tokens),
            detail=f"{detail}, q and k after {ports[0].seams.q} and {ports[0].seams.k}",
        )
    )
    return parts


def lineage(model: nn.Module, *, source: str = "") -> Lineage:
    """Return where the positions of a model come from, for the header of its checkpoint.

    Args:
        model: a timm VisionTransformer or Eva, or a subclass.
        source: free text: the checkpoint these weights started from.
    """
    whole: Any = model
    grid = grid_of(whole)
    patch = getattr(whole, row_of(whole).patch_embed)
    # A model freed of a fixed size still has the grid that its table serves.
    step_hw = patch.feat_ratio(as_scalar=False)
    size_hw = patch.img_size or (grid.height * step_hw[0], grid.width * step_hw[1])
    spec = spec_of_rope(own_rope(whole))
    cfg = getattr(whole, "pretrained_cfg", None) or {}
    return Lineage(
        model=cfg.get("architecture") or type(whole).__name__,
        image_size_hw=(int(size_hw[0]), int(size_hw[1])),
        grid_hw=(grid.height, grid.width),
        prefix=int(whole.num_prefix_tokens),
        tables=_tables(whole),
        encodings={
            name: {"spec": plain(part.encoding.spec), "learned": part.learned_strength is not None}
            | ({} if part.learned_strength is not None else {"strength": part.constant})
            for name, part in attachments(model).items()
        },
        rope=None if spec is None else plain(spec),
        build=_build(whole),
        source=source,
    )


def _build(model: Any) -> dict[str, Any]:
    """Return what two models of one name can differ in without a tensor that shows it."""
    port = ports_of(model)[0]
    act = getattr(getattr(model.blocks[0], "mlp", None), "act", None)
    return {
        "depth": len(model.blocks),
        "embed_dim": int(model.embed_dim),
        "num_heads": port.heads,
        "head_dim": port.head_dim,
        "global_pool": str(model.global_pool),
        "act": type(act).__name__,
        "norm": type(model.norm).__name__,
        "fc_norm": type(getattr(model, "fc_norm", None)).__name__,
        "dynamic_img_size": bool(getattr(model, "dynamic_img_size", False)),
    }


def _table(model: Any) -> Part | None:
    name = row_of(model).table
    table = getattr(model, name)
    if table is None:
        return None
    grid, record = grid_of(model), table_record(model)
    recipe, reason = recipe_for(model)
    detail = f"recipe {recipe} ({reason})"
    if record is not None:
        came = record.source_grid
        detail = f"recipe {record.recipe}, evaluated from {came.height}x{came.width}"
    return Part(
        kind="table",
        path=name,
        shape=tuple(table.shape),
        grid_hw=(grid.height, grid.width),
        prefix=table_prefix(model),
        detail=detail,
    )


def _rotary(model: Any) -> Part | None:
    rope = own_rope(model)
    if rope is None:
        return None
    spec, freqs = spec_of_rope(rope), getattr(rope, "freqs", None)
    fixed = getattr(rope, "feat_shape", None)
    return Part(
        kind="rotary",
        path=str(row_of(model).rope),
        shape=() if freqs is None else tuple(freqs.shape),
        grid_hw=None if fixed is None else (int(fixed[0]), int(fixed[1])),
        prefix=int(model.num_prefix_tokens),
        detail=f"{type(rope).__name__}: {_short(spec) if spec else 'coordinates and bands of timm'}",
    )


def _attached(name: str, part: Any) -> Part:
    learned = part.learned_strength is not None
    strength = float(part.strength.detach()) if learned else part.constant
    kind = "learned strength" if learned else "strength"
    shapes = [tuple(weight.shape) for weight in part.encoding.parameters()]
    return Part(
        kind="attached",
        path=f"visionpos.{name}",
        shape=shapes[0] if shapes else (),
        grid_hw=None,
        prefix=part.encoding.dims.prefix,
        detail=f"{kind} {strength:g}, {_short(part.encoding.spec)}",
    )


def _short(spec: Any) -> str:
    """Return a spec as kind and the fields that differ from the defaults."""
    inside = ", ".join(f"{key}={value}" for key, value in _changed(spec).items() if key != "kind")
    return f"{spec.kind}({inside})"


def _changed(spec: Any) -> dict[str, Any]:
    """Return the fields of a spec that have no default, or another value than it."""
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        usual = field.default
        if field.default_factory is not dataclasses.MISSING:
            usual = field.default_factory()
        if usual is dataclasses.MISSING or value != usual:
            changed[field.name] = _changed(value) if dataclasses.is_dataclass(value) else value
    return changed


def _tables(model: Any) -> dict[str, dict[str, Any]]:
    name = row_of(model).table
    if getattr(model, name) is None:
        return {}
    grid, record = grid_of(model), table_record(model)
    came = grid if record is None else record.source_grid
    recipe = recipe_for(model)[0] if record is None else record.recipe
    return {
        name: {
            "grid_hw": [grid.height, grid.width],
            "source_grid_hw": [came.height, came.width],
            "recipe": recipe,
            "prefix": table_prefix(model),
        }
    }
