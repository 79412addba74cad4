"""The schema of lineage records, and a check against it that names every field at fault.

The schema is data (configs/audit/lineage.schema.json, JSON Schema draft 2020-12); this reads the keywords it uses, so
that no validator need be installed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from visionpos.config import shipped_json
from visionpos.errors import PositionError


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats, which readers compute with
        return False


_KINDS: dict[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, Mapping),
    "array": lambda value: isinstance(value, Sequence) and not isinstance(value, str),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "number": _is_number,
    "integer": lambda value: _is_number(value) and value == int(value),
}
# Keyword -> whether a number keeps it.
_LIMITS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "minimum": ("at least", lambda value, limit: value >= limit),
    "exclusiveMinimum": ("above", lambda value, limit: value > limit),
    "multipleOf": ("a multiple of", lambda value, limit: value % limit == 0),
}


@cache
def lineage_schema() -> dict[str, Any]:
    """Return the JSON schema of a lineage record (draft 2020-12).

    Example:
        >>> lineage_schema()["required"][:3]
        ['schema_version', 'run', 'scheme']
    """
    return shipped_json("audit", "lineage.schema")


def record_faults(record: Any) -> list[str]:
    """Return one line for every field of a record that the schema refuses, empty if it is whole.

    Args:
        record: plain JSON data.

    Example:
        >>> record_faults({})[0]
        'field schema_version is missing'
    """
    return list(_faults(record, lineage_schema(), ""))


def check_record(record: Any, source: str = "record") -> None:
    """Refuse a record that the schema does not allow.

    Args:
        record: plain JSON data.
        source: file name, or argument, for the message.

    Raises:
        PositionError: naming the source and every field at fault.
    """
    faults = record_faults(record)
    if faults:
        more = f", and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise PositionError(
            f"{source} holds a lineage record that cannot be read: {'; '.join(faults[:5])}{more}. Correct it by "
            "configs/audit/lineage.schema.json, or write the file again."
        )


def _faults(value: Any, schema: Mapping[str, Any], path: str) -> Iterator[str]:
    """Yield the faults of a value and of all below it."""
    if "$ref" in schema:
        schema = lineage_schema()["$defs"][schema["$ref"].rpartition("/")[2]]
    faults = list(_value_faults(value, schema, f"field {path}" if path else "the record"))
    yield from faults
    if isinstance(value, Mapping) and not faults:
        yield from _object_faults(value, schema, path)
    elif _KINDS["array"](value) and not faults:
        yield from _array_faults(value, schema, path)


def _value_faults(value: Any, schema: Mapping[str, Any], name: str) -> Iterator[str]:
    """Yield what is wrong with a value itself: its kind, or that it is none of the allowed."""
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(_KINDS[kind](value) for kind in kinds):
        yield f"{name} is {_shown(value)}; {' or '.join(kinds)} is required"
        return
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if choices is not None and not any(_same(value, choice) for choice in choices):
        yield f"{name} is {_shown(value)}; one of {', '.join(map(_word, choices))} is required"
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        yield f"{name} is {_shown(value)}; the form {schema['pattern']} is required"
    for keyword, (words, keeps) in _LIMITS.items():
        if keyword in schema and _is_number(value) and not keeps(value, schema[keyword]):
            yield f"{name} is {value}; a number {words} {schema[keyword]} is required"


def _array_faults(value: Sequence[Any], schema: Mapping[str, Any], path: str) -> Iterator[str]:
    least = schema.get("minItems", 0)
    if len(value) < least:
        yield f"field {path} holds {len(value)} entries; at least {least} are required"
    for at, item in enumerate(value):
        yield from _faults(item, schema.get("items", {}), f"{path}[{at}]")


def _object_faults(value: Mapping[str, Any], schema: Mapping[str, Any], path: str) -> Iterator[str]:
    dot = f"{path}." if path else ""
    known = schema.get("properties", {})
    for key in schema.get("required", []):
        if key not in value:
            yield f"field {dot}{key} is missing"
    for key, item in value.items():
        if key in known:
            yield from _faults(item, known[key], f"{dot}{key}")
        elif not schema.get("additionalProperties", True):
            yield f"field {dot}{key} is unknown"


def _same(value: Any, choice: Any) -> bool:
    return type(value) is type(choice) and bool(value == choice)


def _word(choice: Any) -> str:
    return "null" if choice is None else str(choice)


def _shown(value: Any) -> str:
    return f"{value!r:.60}"
