"""Weights with their position lineage: safetensors whose header says which scheme, grids and recipe made them.

Tensors and a Lineage enter and leave; nothing is unpickled or evaluated, and a file is either whole or absent. A
lineage record (retrofit.lineage_record) may stand beside the Lineage, as one more JSON text.
"""

from __future__ import annotations

import json
import secrets
import stat
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from visionpos.errors import PositionError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

RECORD_KEY = "visionpos_record"
_KEY = "visionpos"
_FORMAT = 1
_HISTORY = (
    "source",
    "tables.*.source_grid_hw",
    "tables.*.recipe",
    "encodings.*.strength",
    "windows.policy",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """Where the positions of a checkpoint come from.

    Args:
        model: name of the architecture ("" if unknown).
        image_size_hw: image size the weights now serve, in pixels.
        grid_hw: token grid the weights now serve.
        prefix: tokens without position.
        tables: path -> {"grid_hw", "source_grid_hw", "recipe", "prefix"} of every learned table.
        encodings: name -> {"spec", "strength", "learned"} of every attached encoding.
        rope: the model's own rotary encoding as spec data, or None.
        windows: {"policy", "windows_hw", "trained_hw"} of attention in windows: how they follow the image, those of
            the stages, and path -> window that coordinates are measured in.
        build: what the architecture's name alone does not say: heads, pooling, activation, sizes at run time.
        source: free text: the checkpoint these weights started from.
    """

    model: str = ""
    image_size_hw: tuple[int, int] | None = None
    grid_hw: tuple[int, int] | None = None
    prefix: int = 0
    tables: dict[str, dict[str, Any]] = field(default_factory=dict)
    encodings: dict[str, dict[str, Any]] = field(default_factory=dict)
    rope: dict[str, Any] | None = None
    windows: dict[str, Any] = field(default_factory=dict)
    build: dict[str, Any] = field(default_factory=dict)
    source: str = ""

    def data(self) -> dict[str, Any]:
        """Return plain JSON data: tuples as lists."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain


def save(
    path: str | Path,
    tensors: Mapping[str, Tensor],
    lineage: Lineage,
    record: Mapping[str, Any] | None = None,
) -> None:
    """Write tensors and lineage to one safetensors file, whole or not at all.

    Args:
        path: file to write; an existing file is replaced only after the new one is complete, and keeps its permissions.
        tensors: name -> tensor; shared storage is written once a name.
        lineage: goes into the header.
        record: JSON data that goes beside it.

    Raises:
        PositionError: if the folder does not exist or cannot be written.
    """
    target = Path(path)
    if target.is_symlink():
        target = target.resolve()  # the file changes, the link stays
    if not target.name or (target.exists() and not target.is_file()):
        raise PositionError(
            f"path {path!s:.200} cannot be written: it is no regular file. Give the name of a file."
        )
    if not target.parent.is_dir():
        raise PositionError(
            f"path {target} is in no existing folder; create {target.parent} first."
        )
    header = {_KEY: json.dumps({"format": _FORMAT, **lineage.data()}, sort_keys=True)}
    if record is not None:
        header[RECORD_KEY] = json.dumps(record, sort_keys=True, allow_nan=False)
    separate = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    draft = target.with_name(
        f".{secrets.token_hex(8)}.draft"
    )  # a name as long as the target's may be too long
    try:
        draft.touch(exist_ok=False)
        example = target if target.is_file() else draft  # safetensors writes for the owner alone
        mode = stat.S_IMODE(example.stat().st_mode)
        save_file(separate, str(draft), metadata=header)
        draft.chmod(mode)
        draft.replace(target)
    except (OSError, SafetensorError) as error:
        raise PositionError(
            f"path {target} cannot be written: {error}. Check space and permissions."
        ) from None
    finally:
        draft.unlink(missing_ok=True)


def load(path: str | Path) -> tuple[dict[str, Tensor], Lineage]:
    """Return the tensors and the lineage of a file written by `save`.

    Raises:
        PositionError: if the file is missing, truncated, no safetensors, or carries no readable lineage.
    """
    lineage = read_lineage(path)
    with safe_open(str(path), framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, lineage  # noqa: SIM118 (no mapping)


def read_lineage(path: str | Path) -> Lineage:
    """Return the lineage in a file's header without reading its tensors.

    Raises:
        PositionError: as `load`.
    """
    header = _metadata(path).get(_KEY)
    if header is None:
        raise PositionError(
            f"path {path} carries no position lineage; it was not written by visionpos. Load it with safetensors, and "
            "attach the encoding by hand."
        )
    return _parse_lineage(header, str(path))


def read_record(path: str | Path) -> str | None:
    """Return the JSON text of the lineage record in a file's header, None where there is none.

    Raises:
        PositionError: if the file is missing, truncated or no safetensors.
    """
    return _metadata(path).get(RECORD_KEY)


def _metadata(path: str | Path) -> dict[str, str]:
    """Return the texts in a file's header."""
    if not Path(path).is_file():
        raise PositionError(
            f"path {path} is no file; give a .safetensors file written by visionpos."
        )
    try:
        with safe_open(str(path), framework="pt") as file:
            return dict(file.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise PositionError(
            f"path {path} is no whole safetensors file ({error}); write it again."
        ) from None


def _parse_lineage(header: str, path: str) -> Lineage:
    """Return the lineage of a header, refusing other formats and shapes."""
    try:
        data = json.loads(header)
        if not isinstance(data, dict) or "format" not in data:
            raise TypeError("field format is missing")
        version = data.pop("format")
        if version != _FORMAT:  # before anything else: another version has other fields
            raise PositionError(
                f"path {path} has lineage format {version}; this version reads {_FORMAT}. Update visionpos."
            )
        for name in ("image_size_hw", "grid_hw"):
            sides = data.get(name)
            _check_kind(name, [] if sides is None else sides, list)
            data[name] = None if sides is None else tuple(sides)
        lineage = Lineage(**data)
        _check_shape(lineage)
    except PositionError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise PositionError(
            f"path {path} has an unreadable position lineage ({error}); write it again."
        ) from None
    return lineage


def _check_shape(lineage: Lineage) -> None:
    """Refuse fields of another kind than the schema's, as a tampered header may hold."""
    for name, kind in (("model", str), ("tables", dict), ("encodings", dict), ("build", dict)):
        _check_kind(name, getattr(lineage, name), kind)
    _check_kind("windows", lineage.windows, dict)
    for name in ("tables", "encodings"):
        for key, entry in getattr(lineage, name).items():
            _check_kind(f"{name}.{key}", entry, dict)
    for key, entry in lineage.encodings.items():
        _check_kind(f"encodings.{key}.spec", entry.get("spec"), dict)


def _check_kind(name: str, value: Any, kind: type) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"field {name} is {value!r:.40}, {kind.__name__} is required")


def differences(found: Lineage, expected: Lineage) -> list[str]:
    """Return one line for every field in which two lineages disagree.

    History is not compared: source text, the grid and recipe a table came from, and constant strengths.

    Example:
        >>> differences(Lineage(prefix=1), Lineage(prefix=5))
        ['prefix: 1 in the file, 5 expected']
    """
    lines: list[str] = []
    _compare("", found.data(), expected.data(), lines)
    return lines


def _compare(path: str, found: Any, expected: Any, lines: list[str]) -> None:
    """Append the leaves in which two plain values differ."""
    if isinstance(found, dict) and isinstance(expected, dict):
        for key in sorted({*found, *expected}):
            _compare(f"{path}.{key}" if path else key, found.get(key), expected.get(key), lines)
    elif found != expected and not any(fnmatchcase(path, pattern) for pattern in _HISTORY):
        lines.append(f"{path}: {found} in the file, {expected} expected")


def check(found: Lineage, expected: Lineage, *, path: str | Path) -> None:
    """Refuse a file whose lineage does not fit.

    Raises:
        PositionError: naming every field that differs.
    """
    lines = differences(found, expected)
    if lines:
        raise PositionError(
            f"path {path} does not fit this model: {'; '.join(lines)}. Attach the same encoding and resize to the same "
            "image size before loading."
        )
