"""describe: what position parts a model has, as a table of plain rows."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from visionpos.encodings import Additive
from visionpos.errors import PositionError
from visionpos.retrofit.attach import attachments
from visionpos.retrofit.lineage import lineage
from visionpos.retrofit.lineage_record import record_kept, record_line
from visionpos.retrofit.ports import ports_of
from visionpos.retrofit.recipes import recipe_for
from visionpos.retrofit.records import recipe_of_table, record_of
from visionpos.retrofit.rope import own_rope, spec_of_rope
from visionpos.retrofit.seams import class_row, prefix_of, row_of
from visionpos.retrofit.tables import Table, tables_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

__all__ = ["Part", "describe", "lineage", "unclaimed"]

# What a name looks like that holds positions. A gate, scale or norm beside a table is none.
_POSITIONAL = re.compile(
    r"(^|\.)(pos_embed|pos_emb|patch_pos|pixel_pos|position_embedding|abs_pos|rel_pos|relative_position|relative_coord"
    r"|attention_bias|height_rel|width_rel|height_lookup|width_lookup|rel_ind|rel_coords|cpb_mlp|meta_mlp|pos_proj"
    r"|(rope|freqs|cpe\d?|crpe|pos_enc|pos_block)(\.|$))"
)
_WHAT = {
    "abs_tiled": "tiled over the map",
    "log_mlp": "network of log coordinates, any size",
    "offset_feature": "projects distances, any size",
    "fourier": "fixed waves and a projection, any size",
    "conv": "depthwise convolution over the map, any size",
    "lambda": "relative positions inside a lambda layer",
    "index_lookup": "one row a coordinate, looked up, never resampled",
    "rotary": "coordinates and bands of timm",
    "axis_table": "one table an axis, multiplied with the query",
    "abs_offset": "one number a head and absolute difference",
    "rel_table": "one number a head and difference",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One position part of a model.

    Args:
        kind: "table" (absolute), "abs_tiled", "rel_table", "abs_offset", "axis_table", "log_mlp", "offset_feature",
            "rotary", "fourier", "conv", "lambda", "index_lookup", "attached", "ports", "lineage" for the record of the
            file that the model was loaded from, or "unknown" for what looks positional and has no row.
        path: where it is on the model.
        shape: size of its parameter, () if it has none.
        grid_hw: grid or window it serves, or None if it serves any.
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
        model: a timm model. Position modules are known in any model; of a class that has no row in the seam table,
            what looks positional besides is listed as "unknown".

    Example:
        >>> import timm
        >>> [part.kind for part in describe(timm.create_model("vit_tiny_patch16_224"))]
        ['table', 'ports']
    """
    whole: Any = model
    known = class_row(model) is not None
    tables = tables_of(model)
    rotary = _rotary(whole) if known else None
    parts = [
        _table(whole, group) for group in _grouped(tables) if not _is_own(whole, group, rotary)
    ]
    first = sum(table.module is None for table in tables)
    parts[first:first] = [] if rotary is None else [rotary]
    prefix = prefix_of(whole) if known else 0
    parts += [_attached(name, part, prefix) for name, part in attachments(model).items()]
    parts += _ports(whole, known=known)
    parts += _lineage(whole)
    return parts + list(_unknown(whole, known=known))


def unclaimed(model: nn.Module) -> list[str]:
    """Return the names of parameters and buffers that look positional and belong to no part."""
    tables = tables_of(model)
    claimed = [table.path for table in tables]
    owners = [_owner_path(table) for table in tables if table.module is not None]
    rope = class_row(model) and row_of(model).rope
    claimed += [str(rope)] if rope else []
    names = [name for name, _ in [*model.named_parameters(), *model.named_buffers()]]
    return [
        name
        for name in names
        if _POSITIONAL.search(name)
        and not name.startswith("visionpos.")
        and not any(name == path or name.startswith(f"{path}.") for path in claimed)
        and name.rpartition(".")[0] not in owners
    ]


def _owner_path(table: Table) -> str:
    """Return the path of the position module that a table belongs to."""
    return table.path.removesuffix(table.seams.path).rstrip(".")


def _grouped(tables: list[Table]) -> list[list[Table]]:
    """Return the tables of one part together: those of a position module, and those of the axes of one table."""
    groups: dict[Any, list[Table]] = {}
    for table in tables:
        axis = table.seams.layout in ("axis_h", "axis_w", "axis_line")
        key: Any = (id(table.base), "module") if table.module is not None else table.path
        groups.setdefault((id(table.owner), "axes") if axis else key, []).append(table)
    return list(groups.values())


def _is_own(model: Any, group: list[Table], rotary: Part | None) -> bool:
    """Return whether a part is the model's own rotary encoding, which has a row of its own."""
    return rotary is not None and group[0].path == row_of(model).rope


def _table(model: Any, group: list[Table]) -> Part:
    table = group[0]
    sides = [one.sides for one in group]
    grid = sides[0]
    if len(group) > 1 and sides[0] and sides[1]:
        grid = (max(sides[0][0], sides[1][0]), max(sides[0][1], sides[1][1]))
    kind = "table" if table.seams.kind == "abs" else table.seams.kind
    others = ", ".join(one.path.rpartition(".")[2] for one in group[1:])
    detail = "; ".join(filter(None, (_recipe(model, table), others and f"with {others}")))
    return Part(
        kind=kind,
        path=table.path,
        shape=table.shape,
        grid_hw=grid,
        prefix=table.prefix,
        detail=detail,
    )


def _recipe(model: Any, table: Table) -> str:
    """Return how a table follows other sizes, and what it is."""
    seams, what = table.seams, _WHAT.get(table.seams.kind, "")
    note = row_of(model).note if table.module is None and class_row(model) is not None else ""
    if not table.moves:
        how = (
            f"resampled at every forward, recipe {seams.recipe}"
            if seams.recipe not in ("checkpoint", "runtime")
            else ""
        )
        how = (
            "resampled at every forward, as the model was built to"
            if seams.recipe == "runtime"
            else how
        )
        return "; ".join(filter(None, (what, how, note))) or "same at every size"
    record = record_of(model, table.path, table.value)
    if record is not None:
        came = record.source_grid
        how = f"recipe {record.recipe}, evaluated from {came.height}x{came.width}"
    elif seams.recipe == "checkpoint":
        recipe, reason = recipe_for(model)
        how = f"recipe {recipe} ({reason})"
    else:
        how = f"recipe {seams.recipe} (of its class)"
    return "; ".join(filter(None, (what, how, note, _at_run_time(model, table))))


def _at_run_time(model: Any, table: Table) -> str:
    """Return by which recipe timm resamples a model's own table for the image of a call, if that is another one."""
    free = table.module is None and getattr(model, "dynamic_img_size", False)
    if not free or recipe_of_table(model, table) == "timm":
        return ""
    return "other sizes at run time by recipe timm, lift_table serves them by this one"


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
        prefix=prefix_of(model),
        detail=f"{type(rope).__name__}: {_short(spec) if spec else 'coordinates and bands of timm'}",
    )


def _attached(name: str, part: Any, prefix: int) -> Part:
    learned = part.learned_strength is not None
    strength = float(part.strength.detach()) if learned else part.constant
    kind = "learned strength" if learned else "strength"
    shapes = [tuple(weight.shape) for weight in part.encoding.parameters()]
    return Part(
        kind="attached",
        path=f"visionpos.{name}",
        shape=shapes[0] if shapes else (),
        grid_hw=None,
        prefix=prefix if isinstance(part.encoding, Additive) else part.encoding.dims.prefix,
        detail=f"{kind} {strength:g}, {_short(part.encoding.spec)}",
    )


def _ports(model: Any, *, known: bool) -> list[Part]:
    """Return one row for all attentions at which q and k can be turned, none if there is none."""
    try:
        ports: list[Any] = ports_of(model)
    except PositionError:
        return []
    if not ports:
        return []
    counts: dict[int, set[int]] = {}  # channels of a head -> how many heads
    for port in ports:
        counts.setdefault(port.head_dim, set()).add(port.heads)
    heads = ", ".join(
        f"{_alternatives(sorted(counts[channels]))} heads of {channels} channels"
        for channels in sorted(counts)
    )
    taps = " and ".join(dict.fromkeys(tap.at for tap in ports[0].seams.taps))
    return [
        Part(
            kind="ports",
            path=row_of(model).blocks if known else "",
            shape=(),
            grid_hw=None,
            prefix=prefix_of(model) if known else 0,
            detail=f"{len(ports)} attentions, {heads}, q and k after {taps}",
        )
    ]


def _lineage(model: Any) -> list[Part]:
    """Return one row for the lineage record that a model was loaded with, none if there is none."""
    record = record_kept(model)
    if record is None:
        return []
    detail = record_line(record)
    return [Part(kind="lineage", path="", shape=(), grid_hw=None, prefix=0, detail=detail)]


def _alternatives(numbers: list[int]) -> str:
    """Return numbers as words: 3, 6 or 12."""
    *front, last = map(str, numbers)
    return f"{', '.join(front)} or {last}" if front else last


def _unknown(model: Any, *, known: bool) -> Iterator[Part]:
    """Yield what looks positional and has no row; for a class without a row, at least one line that says so."""
    sentence = f"{type(model).__name__} is no class that visionpos knows; attach and resize refuse"
    names = unclaimed(model)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name in names:
        yield Part(
            kind="unknown",
            path=name,
            shape=tuple(state[name].shape),
            grid_hw=None,
            prefix=0,
            detail=f"looks positional; {'none of the parts known of its class' if known else sentence}",
        )
    if not known and not names:
        yield Part(kind="unknown", path="", shape=(), grid_hw=None, prefix=0, detail=sentence)


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
