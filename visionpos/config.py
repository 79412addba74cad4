"""YAML in, validated frozen specs out, and back: data enters here and nowhere else.

YAML is plain data: a `kind` and the fields of a spec. Nothing here imports a name found in a file.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import pydantic
import yaml

from visionpos.encodings import spec_type
from visionpos.errors import ConfigError, PositionError, did_you_mean
from visionpos.geometry.layers import LayerPlan

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

    from visionpos.encodings import EncodingSpec

Data = dict[str, Any]
T = TypeVar("T")


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key written twice, which plain YAML silently overwrites."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002 (PyYAML's own signature)
        own = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        keys = [self.construct_object(key, deep=deep) for key in own]
        for key in keys:
            if keys.count(key) > 1:
                raise ConfigError(
                    f"key {key!r} stands twice in the map at line {node.start_mark.line + 1}; "
                    "keys must be unique. Delete one."
                )
        return cast("dict[Any, Any]", super().construct_mapping(node, deep))


# YAML 1.1 reads 1e4 as a text, 0100 as 64 and 1:30 as 90; people mean numbers as YAML 1.2 reads them, or nothing.
_NUMBERS = {
    "int": r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$",
    "float": r"^[-+]?(?:(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|\.(?:inf|Inf|INF|nan|NaN|NAN))$",
}
_StrictLoader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in found if tag.rpartition(":")[2] not in _NUMBERS]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_StrictLoader.add_constructor(
    "tag:yaml.org,2002:int",
    lambda _, node: int(node.value, 0 if node.value[1:2] in ("o", "x") else 10),
)
for _kind, _form in _NUMBERS.items():
    _StrictLoader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_kind}", re.compile(_form), list("-+.0123456789")
    )


def read_yaml(text: str, *, source: str = "<text>") -> Data:
    """Return the mapping that a YAML text holds.

    Args:
        text: YAML with one mapping at the top.
        source: file name for error messages.

    Raises:
        ConfigError: if the text is not YAML, or its top is not a mapping with text keys.
    """
    try:
        data = yaml.load(text, Loader=_StrictLoader)  # noqa: S506 (a SafeLoader)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    except RecursionError:
        raise ConfigError(f"{source} nests too deeply; write plain mappings and lists.") from None
    except (
        ValueError,
        KeyError,
        AttributeError,
    ) as error:  # a tag or a number of thousands of digits
        raise ConfigError(
            f"{source} holds a value that cannot be read: {' '.join(str(error).split())}; write plain numbers and "
            "texts."
        ) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise ConfigError(
            f"{source} holds {type(data).__name__}; a mapping with text keys is required."
        )
    return data


def shipped(folder: str) -> dict[str, Traversable]:
    """Return name -> file of the YAML files that come with the package, sorted by name.

    Args:
        folder: "audit", "dialects", "encodings", "hf", "language", "retrofit" or "vlm".
    """
    files = [item for item in (_configs() / folder).iterdir() if item.name.endswith(".yaml")]
    return {
        item.name.removesuffix(".yaml"): item for item in sorted(files, key=lambda item: item.name)
    }


def shipped_json(folder: str, name: str) -> Data:
    """Return the data of a JSON file that comes with the package, such as ("audit", "lineage.schema")."""
    text = (_configs() / folder / f"{name}.json").read_text(encoding="utf-8")
    return cast("Data", json.loads(text))


def _configs() -> Traversable:
    root: Traversable = resources.files("visionpos") / "configs"
    if not root.is_dir():  # an editable install reads the checkout
        root = Path(__file__).resolve().parent.parent / "configs"
    return root


def overlay(base: Mapping[str, Any], over: Mapping[str, Any]) -> Data:
    """Return `base` with `over` laid on it: maps merge, scalars and lists replace, null removes.

    `replace: true` inside a map replaces the whole map instead of merging it. Neither input is changed.

    Example:
        >>> overlay({"a": {"x": 1, "y": 2}, "b": [1]}, {"a": {"y": None, "z": 3}, "b": [2]})
        {'a': {'x': 1, 'z': 3}, 'b': [2]}
    """
    out = dict(base)
    for key, value in over.items():
        if key == "replace":
            continue
        if value is None:
            out.pop(key, None)
        elif isinstance(value, Mapping):
            under = out.get(key)
            keep = isinstance(under, Mapping) and value.get("replace") is not True
            out[key] = overlay(under if keep and isinstance(under, Mapping) else {}, value)
        else:
            out[key] = value
    return out


@lru_cache(maxsize=128)
def _adapter(kind: Any) -> pydantic.TypeAdapter[Any]:
    return pydantic.TypeAdapter(kind)


def parse(kind: type[T], data: object, *, source: str = "<data>") -> T:
    """Return `data` validated as `kind`, a frozen dataclass or a union of them.

    Args:
        kind: the type to build; its dataclasses refuse unknown keys when they carry
            `__pydantic_config__ = {"extra": "forbid"}`, as every spec of this package does.
        data: plain data, as read from YAML.
        source: file name for error messages.

    Raises:
        ConfigError: naming source, key, value and what is wrong with each.
    """
    try:
        return cast("T", _validated(_adapter(cast("Any", kind)), data))
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    except pydantic.ValidationError as error:
        raise ConfigError(
            f"{source}: " + "; ".join(_complaint(item) for item in error.errors())
        ) from None


def _validated(adapter: pydantic.TypeAdapter[Any], data: object) -> Any:
    """Return validated data: strictly, as JSON, where lists are tuples, but "5" and true are no numbers."""
    try:
        text = json.dumps(data)
    except TypeError:  # data that holds specs made before, or what YAML knows and JSON does not
        return adapter.validate_python(data)
    except (ValueError, RecursionError):
        raise ConfigError("the data holds itself, by an anchor; write plain mappings.") from None
    return adapter.validate_json(text, strict=True)


def _complaint(item: Any) -> str:
    """Return one validation fault as `key = value: reason`."""
    where = ".".join(str(part) for part in item["loc"]) or "the top level"
    if item["type"] == "unexpected_keyword_argument":
        return f"unknown key {where}; remove it or correct its spelling"
    if item["type"] == "missing":
        return f"key {where} is missing; add it"
    if item["type"] == "value_error":  # a spec's own refusal says everything
        message = str(item["msg"]).removeprefix("Value error, ")
        return message if not item["loc"] else f"{where}: {message}"
    return f"{where} = {item['input']!r}: {item['msg']}"


def set_value(data: Mapping[str, Any], assignment: str) -> Data:
    """Return `data` with one dotted override laid on it, such as `encoding.theta=100`.

    Args:
        data: the mapping to override; not changed.
        assignment: `dotted.key=value`; the value is read as YAML, so `[3, 5]` is a list.

    Raises:
        ConfigError: if there is no `=`, or a part of the path is empty.
    """
    if not isinstance(assignment, str):
        raise ConfigError(f"override {assignment!r} is no text. Write it as 'encoding.theta=100'.")
    path, equals, text = assignment.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(
            f"override {assignment!r} is not key=value. Write it as encoding.theta=100."
        )
    value: Any = read_yaml(f"value: {text}", source=f"--set {assignment}")["value"]
    for key in reversed(keys):
        value = {key: value}
    return overlay(data, value)


def encoding_spec(data: Mapping[str, Any], *, source: str = "<data>") -> EncodingSpec:
    """Return the encoding spec that a mapping with a `kind` describes.

    Raises:
        ConfigError: naming the known kinds if `kind` is missing or unknown, or the key that is wrong.
    """
    try:
        kind = spec_type(data.get("kind"))
    except PositionError as error:
        raise ConfigError(f"{source}: {error}") from None
    return parse(kind, dict(data), source=source)


def load_encoding(name: str | Path, *, overrides: Sequence[str] = ()) -> EncodingSpec:
    """Return the spec in a shipped YAML (by name, "dinov3") or in a file (by path).

    Args:
        name: a name from `shipped("encodings")`, or a path to a YAML file with an `encoding:` mapping.
        overrides: dotted assignments such as `encoding.theta=50`.

    Raises:
        ConfigError: if there is no such name or file, a key is unknown, or a value is out of range.
    """
    if isinstance(overrides, str):
        raise ConfigError(
            f"overrides is {overrides!r}; a list of texts is required. Write [{overrides!r}]."
        )
    text, source = _read(name, "encodings")
    data = read_yaml(text, source=source)
    for assignment in overrides:
        data = set_value(data, assignment)
    unknown = sorted(set(data) - {"encoding", "about"})
    if unknown or not isinstance(data.get("encoding"), dict):
        fault = f"unknown key {unknown[0]}" if unknown else "no mapping `encoding`"
        raise ConfigError(
            f"{source}: {fault}; the top level holds `encoding:` and, if wanted, `about:`."
        )
    return encoding_spec(data["encoding"], source=source)


def load_language(name: str | Path) -> LayerPlan:
    """Return the layers of a language model in a shipped YAML (by name, "llama4") or in a file (by path).

    Args:
        name: a name from `shipped("language")`, or a path to a YAML file with a `plan:` mapping.

    Raises:
        ConfigError: if there is no such name or file, a key is unknown, or a value is out of range.
    """
    data = load_data(name, "language")
    if set(data) - {"plan", "about"} or not isinstance(data.get("plan"), dict):
        raise ConfigError(
            f"{name} holds {', '.join(data) or 'nothing'}; the top level holds a mapping `plan:` and, if wanted, "
            "`about:`."
        )
    return parse(LayerPlan, data["plan"], source=str(name))


def load_data(name: str | Path, folder: str) -> Data:
    """Return the plain mapping in a shipped YAML (by name) or in a file (by path).

    Args:
        name: a name from `shipped(folder)`, or a path to a YAML file.
        folder: as in `shipped`.

    Raises:
        ConfigError: if there is no such name or file, or it holds no mapping.
    """
    text, source = _read(name, folder)
    return read_yaml(text, source=source)


def _read(name: str | Path, folder: str) -> tuple[str, str]:
    """Return the text and the display name of a shipped YAML or of a file."""
    if not isinstance(name, (str, Path)):
        raise ConfigError(
            f"name is {name!r}; a shipped name or the path of a YAML file is required."
        )
    files = shipped(folder)
    if str(name) in files:
        return files[str(name)].read_text(encoding="utf-8"), f"{name}.yaml"
    path = Path(name)
    try:
        return path.read_text(encoding="utf-8"), str(path)
    except (OSError, ValueError) as error:  # a name may hold what no path can
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        known = ", ".join(files)
        raise ConfigError(
            f"{name} is neither a readable file ({reason}) nor a shipped name. Shipped: {known}."
            f"{did_you_mean(name, files)}"
        ) from None


def plain(spec: Any) -> Data:
    """Return a spec as plain data: dataclasses become mappings, tuples become lists."""
    return {field.name: _plain(getattr(spec, field.name)) for field in dataclasses.fields(spec)}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return plain(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (tuple, list)) else value


def dump_encoding(spec: EncodingSpec) -> str:
    """Return the YAML text that `load_encoding` reads back to an equal spec."""
    return yaml.safe_dump({"encoding": plain(spec)}, sort_keys=False)
