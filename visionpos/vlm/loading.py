"""Loading: a family's YAML, with `like`, variant, dialect and overlay laid on it, becomes a frozen spec.

This is the only place where YAML is seen; whatever leaves has been validated.
"""

from __future__ import annotations

import keyword
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from visionpos import config
from visionpos.errors import ConfigError
from visionpos.vlm.grammar import FamilySpec
from visionpos.vlm.resize import STEPS, Step

VENDOR = "vendor"  # what a family's file says before any dialect is laid on it


@dataclass(frozen=True, slots=True)
class Resolved:
    """A family's data after all overlays, and what else could have been asked for."""

    data: dict[str, Any]
    dialects: tuple[str, ...]
    variants: tuple[str, ...]


def family_names() -> tuple[str, ...]:
    """Return the names of the families that come with the package, sorted.

    Example:
        >>> family_names()
        ('qwen2_5_vl', 'qwen2_vl', 'qwen3_vl')
    """
    return tuple(config.shipped("vlm"))


def resolve(name: str, dialect: str, variant: str | None, overlay: Mapping[str, Any]) -> Resolved:
    """Return a family's data: like -> variant -> dialect -> overlay.

    Args:
        name: one of `family_names()`.
        dialect: "vendor", or a dialect of the family.
        variant: a variant of the family, or None. It is laid on first and brings its dialects along.
        overlay: the user's own changes.

    Raises:
        ConfigError: if name, dialect or variant is unknown; the message lists the known ones.
    """
    data = _load(name, ())
    variants = data.pop("variants", {})
    _check_known("variant", variant, variants, name)
    data = config.overlay(data, variants.get(variant, {}))
    dialects = {VENDOR: {}, **dict(sorted(data.pop("dialects", {}).items()))}
    _check_known("dialect", dialect, dialects, name)
    data = config.overlay(config.overlay(data, dialects[dialect]), overlay)
    return Resolved(data, tuple(dialects), tuple(variants))


def _load(name: str, seen: tuple[str, ...]) -> dict[str, Any]:
    """Return the data of a family, laid on what it is like."""
    files = config.shipped("vlm")
    if name not in files:
        raise ConfigError(f"family {name!r} is unknown; it must be one of {', '.join(files)}.")
    if name in seen:
        raise ConfigError(
            f"family {name!r} is like itself ({' -> '.join(seen)}); break the circle."
        )
    data = config.read_yaml(
        files[name].read_text(encoding="utf-8"), source=f"configs/vlm/{name}.yaml"
    )
    like = data.pop("like", None)
    return data if like is None else config.overlay(_load(like, (*seen, name)), data)


def _check_known(what: str, value: str | None, known: Mapping[str, Any], name: str) -> None:
    if value is not None and value not in known:
        listed = ", ".join(known) or "none"
        raise ConfigError(f"{what} {value!r} of {name} is unknown; known: {listed}.")


def family_spec(data: Mapping[str, Any], *, source: str) -> FamilySpec:
    """Return the spec that resolved data describes.

    Args:
        data: a family's mapping, with `like`, variants and dialects already laid on it.
        source: file name for error messages.

    Raises:
        ConfigError: naming the key that is unknown, missing or out of range.
    """
    filled = dict(data)
    if isinstance(filled.get("video"), Mapping):
        # What a clip does not say for itself it takes from the family.
        inherited = {"grid": filled.get("grid", {}), "cell": filled.get("cell")}
        filled["video"] = config.overlay(inherited, filled["video"])
    return config.parse(FamilySpec, _read(filled, {}, source), source=source)


def _read(value: Any, names: Mapping[str, int], source: str) -> Any:
    """Return data with sizes as steps, names of numbers as numbers, and keys that Python accepts."""
    if isinstance(value, Mapping):
        names = _named_numbers(value, names)
        return {
            f"{key}_" if keyword.iskeyword(key) else key: (
                [_step(step, names, f"{source}: size") for step in item]
                if key == "size" and isinstance(item, list)
                else _read(item, names, source)
            )
            for key, item in value.items()
        }
    return [_read(item, names, source) for item in value] if isinstance(value, list) else value


def _named_numbers(value: Mapping[str, Any], names: Mapping[str, int]) -> Mapping[str, int]:
    """Return the names that numbers may be given by inside `value`: factor = patch * merge."""
    grid = value.get("grid")
    if isinstance(grid, Mapping) and isinstance(grid.get("patch"), int):
        return {**names, "factor": grid["patch"] * grid.get("merge", 1)}
    return names


def _step(data: Any, names: Mapping[str, int], source: str) -> Step:
    """Return one size step."""
    kind = data.get("kind") if isinstance(data, Mapping) else None
    if kind not in STEPS:
        raise ConfigError(f"{source}: kind is {kind!r}; it must be one of {', '.join(STEPS)}.")
    numbers = {
        key: names.get(item, item) if isinstance(item, str) else item for key, item in data.items()
    }
    return config.parse(STEPS[kind], numbers, source=f"{source} step {kind!r}")
