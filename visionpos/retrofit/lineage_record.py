"""The lineage record of a model: its position schemes, and what they were trained on, for whoever deploys the weights.

It stands beside the header of `lineage` as one more JSON text. The header says what a file needs to be loaded; the
record what a reader needs to compare two checkpoints, or a deployment with its training.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from visionpos import checkpoint
from visionpos.config import overlay
from visionpos.encodings import build
from visionpos.errors import PositionError
from visionpos.retrofit.attach import attachments
from visionpos.retrofit.kinds import check_kinds
from visionpos.retrofit.lineage_schema import check_record
from visionpos.retrofit.lineage_scheme import (
    coordinate_entry,
    dtype_name,
    encoding_entry,
    table_entries,
)
from visionpos.retrofit.ports import dims_of
from visionpos.retrofit.rope import own_rope, spec_of_rope
from visionpos.retrofit.seams import row_of
from visionpos.retrofit.tables import tables_of
from visionpos.retrofit.windows import windows_of

if TYPE_CHECKING:
    from torch import Tensor

Record = dict[str, Any]
SCHEMA_VERSION = "1.0"
_KEPT = "visionpos_record"
_CARRIED = ("train_support", "audit")  # what a model itself cannot tell


def lineage_record(model: nn.Module, over: Mapping[str, Any] | None = None) -> Record:
    """Return the lineage record of a model: schemes, coordinates, trained support, precision, masks.

    Trained support and audit rows come with the file that the model was loaded from, or with `over`; a model alone
    cannot tell what it was trained on, and the lists are empty then.

    Args:
        model: a timm model whose class has a row in the seam table, attached and resized as it may be.
        over: laid on the record: `{"run": {"phase": "finetune", "step": 1000}, "train_support": log.support()}`.

    Returns:
        JSON data by `lineage_schema()`.

    Raises:
        PositionError: if the class has no row, or the record with `over` breaks the schema (naming the field).

    Example:
        >>> from visionpos.retrofit import create
        >>> lineage_record(create("vit_tiny_patch16_224"))["scheme"][0]["table"]["grid"]
        [14, 14]
    """
    check_kinds("over", over, Mapping, None)
    row_of(model)
    kept: Record = record_kept(model) or {}
    found: Record = {
        "schema_version": SCHEMA_VERSION,
        "run": _run(kept),
        **_parts(model),
        "train_support": {"position": [], "offset": [], "attn_distance": []},
        "masking": _masking(model),
        **{key: kept[key] for key in _CARRIED if key in kept},
    }
    whole = overlay(found, over or {})
    check_record(whole, "record")
    return whole


def _parts(model: Any) -> Record:
    """Return the schemes of a model, its coordinates and precision."""
    encodings = [encoding for part in attachments(model).values() for encoding in part.encodings]
    own, rest = _own(model), tables_of(model)
    if own is not None:  # told by its spec, not as a module of timm
        rest = [table for table in rest if table.path != row_of(model).rope]
        encodings.insert(0, own)
    entries = [*table_entries(model, rest), *map(encoding_entry, encodings)]
    told = [getattr(one.spec, "coords", None) for one in encodings]
    tables = [table.value for table in rest if isinstance(table.value, nn.Parameter)]
    turns = any(entry["where"] == "qk_rotate" for entry in entries)
    biased = any(entry["where"] == "logit_bias" for entry in entries)
    weights = next((dtype_name(one.dtype) for one in model.parameters()), None)
    return {
        "scheme": entries,
        "coordinates": coordinate_entry(next((one for one in told if one is not None), None)),
        "precision": {
            "position_dtype": "float32",
            "angle_dtype": "float32" if turns else None,
            "table_dtype": dtype_name(tables[0].dtype) if tables else None,
            "bias_dtype": weights if biased else None,
        },
    }


def _own(model: Any) -> Any:
    """Return the model's own rotary encoding as one of this package, None where no spec says it."""
    spec = spec_of_rope(own_rope(model))
    try:
        return None if spec is None else build(spec, dims_of(model))
    except PositionError:  # layers of several sizes
        return None


def _run(kept: Record) -> Record:
    before: Record = kept.get("run", {})
    parent = before.get("weights_sha256") or before.get("parent")
    phase = before.get("phase", "export")
    return {
        "phase": phase,
        "step": before.get("step"),
        "parent": parent,
        "code_version": f"visionpos {_version()}",
        "weights_sha256": None,
    }


def _version() -> str:
    try:
        return version("visionpos")
    except PackageNotFoundError:  # read from a checkout that was never installed
        return "unknown"


def _masking(model: Any) -> Record:
    row = row_of(model)
    windows = [] if row.windows is None else windows_of(row, model)
    return {
        "kind": "window" if windows else "none",
        "window": list(windows[0]) if windows else None,
        "packed": False,
        "reset_per_document": None,
        "sink_tokens": 0,
        "cache_positions": None,
    }


def record_of_tensors(record: Record, tensors: Mapping[str, Tensor]) -> Record:
    """Return a record that names its weights by their SHA-256: names, dtypes, shapes and bytes in order of names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {dtype_name(tensor.dtype)} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return {**record, "run": {**record["run"], "weights_sha256": digest.hexdigest()}}


def read_record(path: str | Path) -> Record | None:
    """Return the lineage record of a file, None of a file that was written without one.

    Raises:
        PositionError: if the file is no safetensors file, or its record breaks the schema: names file and field.
    """
    check_kinds("path", path, str, Path)
    text = checkpoint.read_record(path)
    if text is None:
        return None
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PositionError(
            f"path {path} has a lineage record in field {checkpoint.RECORD_KEY} that is no JSON ({error}); write the "
            "file again."
        ) from None
    check_record(record, f"path {path}")
    found: Record = record
    return found


def keep_record(model: Any, record: Record | None) -> None:
    """Keep with a model the record of the file that it was loaded from; it follows deepcopy and pickle."""
    object.__setattr__(model, _KEPT, record)


def record_kept(model: Any) -> Record | None:
    """Return the record of the file that a model was loaded from, None if there is none."""
    record: Record | None = getattr(model, _KEPT, None)
    return record


def record_line(record: Record) -> str:
    """Return a record in a line: phase, trained positions, audit rows, weights."""
    run, seen = record["run"], record["train_support"]["position"]
    step = "" if run.get("step") is None else f" at step {run['step']}"
    ranges = ", ".join(f"{one['axis']} {one['min']:g} to {one['max']:g}" for one in seen)
    return (
        f"{run['phase']}{step}; trained positions {ranges or 'unknown'}; {len(record.get('audit', []))} audit rows; "
        f"weights {(run.get('weights_sha256') or 'unnamed')[:12]}"
    )
