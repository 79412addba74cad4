"""Loading: a family's YAML, with `like`, variant, dialect and overlay laid on it, becomes a frozen spec.

This is the only place where YAML is seen; whatever leaves has been validated.
"""

from __future__ import annotations

import keyword
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from visionpos import config
from visionpos.errors import ConfigError, one_of
from visionpos.geometry.arguments import shown
from visionpos.vlm.grammar import FamilySpec
from visionpos.vlm.resize import STEPS

NAMED = {
    "factor": "grid.patch and grid.merge",
    "tile": "views.tile.px",
    "tile_area": "views.tile.px",
}
DEEPEST = 20  # maps inside maps; no family needs ten
LATER = {"dialects", "variants", "untiled"}  # parts of a file that are overlays themselves
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
        >>> family_names()[:3]
        ('aria', 'aya_vision', 'chameleon')
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
    _check_overlay(overlay)
    data = _load(name, ())
    variants = data.pop("variants", {})
    _check_known("variant", variant, variants, name)
    data = _laid(data, variants.get(variant, {}))
    dialects = {VENDOR: {}, **dict(sorted(data.pop("dialects", {}).items()))}
    _check_known("dialect", dialect, dialects, name)
    data = _laid(_laid(data, dialects[dialect]), overlay)
    return Resolved(data, tuple(dialects), tuple(variants))


def _load(name: str, seen: tuple[str, ...]) -> dict[str, Any]:
    """Return the data of a family, laid on what it is like."""
    files = config.shipped("vlm")
    if name not in list(files):  # by equality: whatever is passed gets an answer
        raise ConfigError(
            f"family {shown(name)} is unknown. {one_of(name, files)} family_names() lists them."
        )
    if name in seen:
        raise ConfigError(
            f"family {name!r} is like itself ({' -> '.join(seen)}); break the circle."
        )
    text = files[name].read_text(encoding="utf-8")
    data = dict(_parsed(text, f"configs/vlm/{name}.yaml"))
    like = data.pop("like", None)
    return data if like is None else _laid(_load(like, (*seen, name)), data)


@lru_cache(maxsize=256)  # a pure function of the text; nothing below changes what it returns
def _parsed(text: str, source: str) -> Mapping[str, Any]:
    """Return the mapping in a family's file: parsing is nine tenths of loading."""
    return config.read_yaml(text, source=source)


def _laid(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return data with an overlay laid on it, where what is to be laid on later keeps its nulls and replaces.

    `replace: true` at the top of the overlay leaves nothing of what it is laid on.
    """
    base = {} if over.get("replace") is True else base
    out = config.overlay(base, {key: item for key, item in over.items() if key not in LATER})
    for key in LATER & over.keys():
        under = base.get(key, {})
        later = {} if over[key] is None else over[key]
        if not isinstance(later, Mapping):
            raise ConfigError(
                f"{key} is {later!r}; a mapping in the family's grammar is required. Correct it."
            )
        out[key] = dict(later) if later.get("replace") is True else _merged(under, later)
        out[key].pop("replace", None)
    return out


def _merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return two overlays as one: what laying both on in order would do."""
    out = dict(under)
    for key, item in over.items():
        below = out.get(key)
        both = isinstance(item, Mapping) and isinstance(below, Mapping) and not item.get("replace")
        out[key] = _merged(below, item) if both else item  # type: ignore[arg-type]
    return out


def _check_known(what: str, value: str | None, known: Mapping[str, Any], name: str) -> None:
    if value is not None and value not in list(known):  # by equality, not by hash
        choices = one_of(value, known) if known else f"{name} has none."
        raise ConfigError(f"{what} {shown(value)} of {name} is unknown. {choices}")


def _check_overlay(overlay: Any, depth: int = 0) -> None:
    """Refuse an overlay that is no mapping, or holds itself."""
    if depth == 0 and not isinstance(overlay, Mapping):
        raise ConfigError(
            f"overlay is {overlay!r}; a mapping in the family's grammar is required, such as "
            "{'grid': {'patch': 16}}."
        )
    if depth > DEEPEST:
        raise ConfigError("overlay nests too deeply; write plain mappings and lists.")
    if isinstance(overlay, Mapping) and not isinstance(overlay.get("replace", True), bool):
        raise ConfigError(
            f"overlay has replace {overlay['replace']!r}; true, to replace the map that it stands in, is required. "
            "Leave it out to merge."
        )
    inner = overlay.values() if isinstance(overlay, Mapping) else overlay
    for item in inner:
        if isinstance(item, (Mapping, list, tuple)):
            _check_overlay(item, depth + 1)


def _check_scaling(data: Mapping[str, Any], source: str) -> None:
    """Refuse a scaling that does not say its kind: others might take its fields for theirs."""
    language = data.get("language")
    scaling = language.get("scaling") if isinstance(language, Mapping) else None
    if isinstance(scaling, Mapping) and "kind" not in scaling:
        raise ConfigError(
            f"{source}: language.scaling is {dict(scaling)} and has no kind; it is required. Write kind: linear, ntk, "
            "ntk_alpha, yarn, llama3 or proportional."
        )


def family_spec(data: Mapping[str, Any], *, source: str) -> FamilySpec:
    """Return the spec that resolved data describes.

    Args:
        data: a family's mapping, with `like`, variants and dialects already laid on it.
        source: file name for error messages.

    Raises:
        ConfigError: naming the key that is unknown, missing or out of range.
    """
    filled = dict(data)
    _check_scaling(filled, source)
    untiled = filled.pop("untiled", None)
    if isinstance(filled.get("video"), Mapping):
        # What a clip does not say for itself it takes from the family's whole image.
        views = filled.get("views")
        whole = views.get("global", {}) if isinstance(views, Mapping) else {}
        inherited = {"grid": filled.get("grid", {}), "cell": filled.get("cell")}
        if isinstance(whole, Mapping) and "size" in whole:
            inherited["size"] = whole["size"]
        filled["video"] = config.overlay(inherited, filled["video"])
    spec = config.parse(FamilySpec, _read(filled, {}, source), source=source)
    if untiled is None:
        return spec
    # Both are resolved here, so that no plan merges data.
    return replace(
        spec, untiled=family_spec(config.overlay(data, {**untiled, "untiled": None}), source=source)
    )


def _read(value: Any, names: Mapping[str, int], source: str) -> Any:
    """Return data with sizes as checked steps, names of numbers as numbers, and keys that Python accepts."""
    if isinstance(value, Mapping):
        names = _named_numbers(value, names)
        return {
            f"{key}_" if keyword.iskeyword(str(key)) else key: _read_item(key, item, names, source)
            for key, item in value.items()
        }
    return [_read(item, names, source) for item in value] if isinstance(value, list) else value


def _read_item(key: str, item: Any, names: Mapping[str, int], source: str) -> Any:
    """Return the value of one key."""
    if key in ("size", "fill") and isinstance(item, list):
        return [_step(step, names, f"{source}: {key}") for step in item]
    if key == "when" and isinstance(item, Mapping):
        return {name: _number(one, names) for name, one in item.items()}
    return _read(item, names, source)


def _number(value: Any, names: Mapping[str, int]) -> Any:
    """Return the number that a name stands for, also inside a mapping.

    Raises:
        ConfigError: if what the name is made of is no whole number.
    """
    if isinstance(value, Mapping):
        return {key: _number(item, names) for key, item in value.items()}
    if not isinstance(value, str) or value not in NAMED:
        return value
    if value not in names:
        raise ConfigError(
            f"{value!r} stands for a number, and {NAMED[value]} is none; whole numbers are required. Correct them."
        )
    return names[value]


def _named_numbers(value: Mapping[str, Any], names: Mapping[str, int]) -> Mapping[str, int]:
    """Return the names that numbers may be given by inside `value`: factor = patch * merge, tile, tile_area."""
    found = dict(names)
    grid, views = value.get("grid"), value.get("views")
    if isinstance(grid, Mapping):
        found.pop("factor", None)
        if type(grid.get("patch")) is int and type(grid.get("merge", 1)) is int:
            found["factor"] = grid["patch"] * grid.get("merge", 1)
    tile = views.get("tile") if isinstance(views, Mapping) else None
    if isinstance(tile, Mapping) and type(tile.get("px")) is int:
        found |= {"tile": tile["px"], "tile_area": tile["px"] ** 2}
    return found


def _step(data: Any, names: Mapping[str, int], source: str) -> dict[str, Any]:
    """Return one size step as plain data, after its own class has seen it: that names what is wrong."""
    kind = data.get("kind") if isinstance(data, Mapping) else None
    if not isinstance(kind, str) or kind not in STEPS:
        raise ConfigError(f"{source}: kind is {kind!r}; it must be one of {', '.join(STEPS)}.")
    step = config.parse(STEPS[kind], _number(data, names), source=f"{source} step {kind!r}")
    return config.plain(step)
