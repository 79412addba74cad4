"""The scheme entries of a lineage record: what each table, encoding and rotary part is, in the words of the schema."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from visionpos.encodings import (
    Additive,
    Alibi,
    Biasing,
    Extending,
    PairBiasing,
    QueryBiasing,
    Rotary,
    T5Bias,
    Turning,
)
from visionpos.geometry.recipes import recipe_of
from visionpos.retrofit.records import record_of
from visionpos.retrofit.seams import blocks_of

if TYPE_CHECKING:
    from torch import Tensor

    from visionpos.geometry import CoordSpec
    from visionpos.retrofit.tables import Table

Entry = dict[str, Any]

# Kind of part -> by which door it enters.
_DOORS = {
    "abs": "input_add",
    "abs_tiled": "input_add",
    "index_lookup": "input_add",
    "fourier": "input_add",
    "conv": "conv",
    "lambda": "value_add",
    "rotary": "qk_rotate",
}
_ORIGINS = {"index": "corner0", "centred": "half_pixel", "endpoint": "center"}
_ORIGINS |= {"fractional": "half_pixel", "span": "corner0"}
_UNITS = {"index": "cell", "centred": "unit11", "endpoint": "unit11"}
_UNITS |= {"fractional": "unit01", "span": "unit01"}
_FIRST = {0.0: "corner0", 0.5: "half_pixel", 1.0: "one_based"}
_CUSTOM = ("golden_rope", "periodic_rope", "circle_rope")


def encoding_entry(encoding: Any) -> Entry:
    """Return the scheme entry of an encoding."""
    entry: Entry = {
        "name": encoding.spec.kind,
        "where": _door(encoding),
        "layers": None,
        "params": sum(weight.numel() for weight in encoding.parameters()),
    }
    if isinstance(encoding, Rotary):
        entry["rope"] = rope_entry(encoding)
    elif isinstance(encoding, Alibi):
        form = {"form": "distance", "metric": encoding.spec.metric}
        entry["alibi"] = {"slopes": encoding.slopes(), **form}
    elif isinstance(encoding, T5Bias):
        entry["bucket"] = {
            "num_buckets": list(encoding.spec.buckets),
            "max_distance": list(encoding.spec.max_distance),
            "bidirectional": encoding.spec.direction == "both",
            "dead": encoding.unused(),
        }
    return entry


def rope_entry(encoding: Rotary) -> Entry:
    """Return the rotary descriptor of an encoding of angles."""
    spec: Any = encoding.spec
    freqs = encoding.freqs().detach()
    learned = any(True for _ in encoding.parameters())
    kind = "mixed" if learned else "custom" if spec.kind in _CUSTOM else "default"
    bands = getattr(spec, "periods", None) or getattr(spec, "max_freq", None)
    sections = getattr(spec, "sections", None)
    return {
        "layout": "half" if encoding.pairing.startswith("half") else "interleaved",
        "rotary_dim": 2 * freqs.shape[-1],
        "head_dim": encoding.dims.channels,
        "theta": None if bands else getattr(spec, "theta", None),
        "type": "custom" if bands and not learned else kind,
        "sections": None if sections is None else list(sections),
        "sections_layout": None if sections is None else getattr(spec, "order", None),
        "inv_freq_sha256": None if learned else frequency_hash(freqs),
        "prefix_rotated": False,
    }


def frequency_hash(freqs: Tensor) -> str:
    """Return the SHA-256 of frequencies as float32 bytes, axes first."""
    return hashlib.sha256(freqs.float().contiguous().cpu().numpy().tobytes()).hexdigest()


def _door(encoding: Any) -> str:
    """Return where an encoding enters, in the words of the schema."""
    if isinstance(encoding, Additive):
        return "input_add"
    if isinstance(encoding, (Rotary, Turning)):
        return "qk_rotate"
    return (
        "logit_bias"
        if isinstance(encoding, (Biasing, PairBiasing, QueryBiasing, Extending))
        else "conv"
    )


def table_entries(model: Any, tables: list[Table]) -> list[Entry]:
    """Return the scheme entries of a model's own tables and networks; those that are alike share one."""
    paths = [path for path, _ in blocks_of(model)]
    found: list[Entry] = []
    for table in tables:
        entry, layer = _table_entry(model, table), _layer(paths, table.path)
        same = next((one for one in found if _alike(one, entry)), None)
        if same is None:
            found.append({**entry, "layers": None if layer is None else [layer]})
            continue
        same["params"] += entry["params"]
        if layer is not None and layer not in (same["layers"] or []):
            same["layers"] = [*(same["layers"] or []), layer]
    return found


def _alike(one: Entry, other: Entry) -> bool:
    return all(one.get(key) == other.get(key) for key in ("name", "where", "table"))


def _layer(paths: list[str], path: str) -> int | None:
    return next((at for at, block in enumerate(paths) if path.startswith(f"{block}.")), None)


def _table_entry(model: Any, table: Table) -> Entry:
    kind, value = table.seams.kind, table.value
    weights = [value] if isinstance(value, torch.Tensor) else list(value.parameters())
    entry: Entry = {
        "name": "learned" if kind == "abs" else kind,
        "where": _DOORS.get(kind, "logit_bias"),
        "params": sum(weight.numel() for weight in weights),
    }
    sides = table.sides
    if isinstance(value, nn.Parameter) and sides is not None:
        cells = sides[0] * sides[1] if kind in ("abs", "abs_tiled") else None
        entry["table"] = {
            "grid": list(sides),
            "prefix_rows": table.prefix,
            "max_index": None if cells is None else table.prefix + cells - 1,
            "resize_history": _history(model, table),
        }
    return entry


def _history(model: Any, table: Table) -> list[Entry]:
    """Return how a table was resized, as one step from the grid it was trained on; none if it never was."""
    record = record_of(model, table.path, table.value)
    if record is None:
        return []
    recipe = recipe_of(record.recipe.removeprefix("direct:"))
    cubic = recipe.kernel == "bicubic"
    return [
        {
            "from": [record.source_grid.height, record.source_grid.width],
            "to": [record.grid.height, record.grid.width],
            "mode": recipe.kernel,
            "recipe": record.recipe,
            "antialias": recipe.antialias,
            "align_corners": recipe.sampling == "align_corners",
            "bicubic_a": recipe.coefficient if cubic else None,
            "scale_offset": recipe.drift,
            "dtype": dtype_name(record.source.dtype),
        }
    ]


def coordinate_entry(coords: CoordSpec | None) -> Entry:
    """Return how cells are numbered; plain indices, rows first, where no scheme says more."""
    entry: Entry = {"order": "row_major_hw"}
    if coords is None:
        plain = {"origin": "corner0", "units": "cell", "normalize": "none"}
        return {"axes": ["h", "w"], **entry, **plain}
    unit = coords.unit
    divided = unit in ("centred", "fractional")
    origin = _FIRST.get(coords.offset, "corner0") if unit == "index" else _ORIGINS[unit]
    drawn = {name: getattr(coords, name) for name in ("shift", "jitter", "rescale")}
    even = coords.scale is not None and len(set(coords.scale)) == 1
    return {
        "axes": {1: ["seq"], 2: ["h", "w"], 3: ["t", "h", "w"]}[coords.axes],
        **entry,
        "origin": origin,
        "units": _UNITS[unit],
        "normalize": coords.normalize if divided else "none",
        "ref_grid": None if coords.trained_shape is None else list(coords.trained_shape),
        "jitter": drawn if coords.augments else None,
        "increment": coords.scale[0] if even and coords.scale else None,
    }


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype as the schema writes it: "float32"."""
    return str(dtype).removeprefix("torch.")
