"""Rope parameters: what transformers keeps in a config about a ladder and its stretching, read and written.

Flat data gives one `RopeParams`; data nested by layer type (Gemma 3: sliding_attention, full_attention) one a type.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from visionpos.errors import ConfigError
from visionpos.geometry.arguments import checked
from visionpos.geometry.rope_params import RopeParams
from visionpos.geometry.scaling import (
    DynamicNtk,
    Linear,
    Llama3,
    LongRope,
    NtkAlpha,
    Proportional,
    Scaling,
)
from visionpos.geometry.yarn import Yarn

_PLAIN = ("default", "mrope", "xdrope", None)
_ORIGINAL = "original_max_position_embeddings"
_CALLED = {
    "original_positions": _ORIGINAL,
    "share": "partial_rotary_factor",
    "max": "max_position_embeddings",
}
_NUMBERS = (
    *(
        "rope_theta",
        "partial_rotary_factor",
        "max",
        "factor",
        "alpha",
        _ORIGINAL,
        "beta_fast",
        "beta_slow",
    ),
    *("attention_factor", "mscale", "mscale_all_dim", "low_freq_factor", "high_freq_factor"),
)


def read_rope_parameters(
    data: Mapping[str, Any],
    *,
    theta: float | None = None,
    share: float | None = None,
    positions: int | None = None,
    original: int | None = None,
) -> RopeParams | dict[str, RopeParams]:
    """Return what rope parameters of transformers say, in the form before version 5 (rope_scaling) and since.

    Args:
        data: `rope_parameters` or `rope_scaling` of a config, flat, or nested by layer type; entries beside nested ones
            are those of every type.
        theta: `rope_theta` of the config, where the data lack it.
        share: `partial_rotary_factor` of the config, where the data lack it.
        positions: `max_position_embeddings` of the config.
        original: `original_max_position_embeddings` of the config itself (Phi-3), which wins over that of the data.

    Returns:
        One `RopeParams`, or a dict of them by layer type; types without rotation (None) are left out.

    Raises:
        ConfigError: for an unknown type, a missing factor, theta, list or trained length, or a number out of range.

    Example:
        >>> read_rope_parameters({"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0})
        RopeParams(theta=10000.0, share=1.0, scaling=Linear(kind='linear', factor=4.0))

    Reference:
        transformers modeling_rope_utils. Deliberate difference: there `truncate` of YaRN is read from the top level
        only, so nested parameters lose it (5.24); here it is read where it stands.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(
            f"rope parameters are {data!r:.60}; a mapping is required. Pass config.rope_parameters."
        )
    told = {"rope_theta": theta, "partial_rotary_factor": share, "max": positions, _ORIGINAL: None}
    layers = {name: part for name, part in data.items() if isinstance(part, Mapping)}
    beside = {name: part for name, part in data.items() if name not in layers and part is not None}
    if layers and not beside.keys() & {"rope_type", "type"}:
        if strays := beside.keys() - {*_NUMBERS, "truncate"}:
            raise ConfigError(
                f"rope parameters hold {', '.join(sorted(map(str, strays)))} beside {', '.join(layers)}; nested ones "
                "hold a mapping or None a layer type, and what all of them share. Correct the config."
            )
        return {name: _read(part, told | beside, original) for name, part in layers.items()}
    return _read(data, told, original)


def _read(data: Mapping[str, Any], told: Mapping[str, Any], original: int | None) -> RopeParams:
    """Return the parameters of flat data; what the config itself says stands behind what the data say."""
    given = {**told, **{name: value for name, value in data.items() if value is not None}}
    if original is not None:
        given[_ORIGINAL] = original
    for name in _NUMBERS:
        value = given.get(name)
        if isinstance(value, bool) or not isinstance(value, numbers.Real | None):
            raise ConfigError(
                f"{_CALLED.get(name, name)} is {value!r}; a number is required. Correct the config."
            )
    if given["rope_theta"] is None:
        raise ConfigError(
            "rope parameters have no rope_theta; a ladder base is required. Pass theta=config.rope_theta."
        )
    scaling = _scaling(given)
    share = given["partial_rotary_factor"]
    whole = share is None or isinstance(scaling, Proportional)
    return RopeParams(theta=given["rope_theta"], share=1.0 if whole else share, scaling=scaling)


def _scaling(given: Mapping[str, Any]) -> Scaling | None:
    """Return how the ladder is stretched."""
    kind = given.get("rope_type", given.get("type"))
    if kind in ("dynamic", "xdrope") and given.get("alpha"):
        return NtkAlpha(alpha=given["alpha"])
    if kind in _PLAIN:
        return None
    if not isinstance(kind, str) or kind not in _READERS:
        raise ConfigError(
            f"rope_type is {kind!r}; one of default, {', '.join(_READERS)} is required. Correct the config."
        )
    return _READERS[kind](given)


def _linear(given: Mapping[str, Any]) -> Linear:
    return Linear(factor=_required(given, "factor"))


def _dynamic(given: Mapping[str, Any]) -> DynamicNtk:
    return DynamicNtk(factor=_required(given, "factor"), original_positions=_required(given, "max"))


def _llama3(given: Mapping[str, Any]) -> Llama3:
    names = ("factor", "low_freq_factor", "high_freq_factor")
    found = {name: _required(given, name) for name in names}
    return Llama3(original_positions=_original(given), **found)


def _proportional(given: Mapping[str, Any]) -> Proportional:
    share = given["partial_rotary_factor"]
    return Proportional(share=1.0 if share is None else share, factor=given.get("factor", 1.0))


def _longrope(given: Mapping[str, Any]) -> LongRope:
    return LongRope(
        short_factor=_required(given, "short_factor"),
        long_factor=_required(given, "long_factor"),
        original_positions=_original(given),
        # Told it must be a growth; that of the two lengths may be none, as in transformers.
        factor=_factor(given) if given.get("factor") is not None else max(_factor(given), 1.0),
        attention_factor=given.get("attention_factor"),
    )


def _yarn(given: Mapping[str, Any]) -> Yarn:
    """Return YaRN; betas of 0 mean the usual ones, as in transformers."""
    betas = {name: given[name] for name in ("beta_fast", "beta_slow") if given.get(name)}
    names = ("truncate", "attention_factor", "mscale", "mscale_all_dim")
    named = {name: given[name] for name in names if name in given}
    return Yarn(factor=_factor(given), original_positions=_original(given), **betas, **named)


def _factor(given: Mapping[str, Any]) -> float:
    """Return how many times longer the context is; the ratio of the two lengths where no factor stands."""
    if given.get("factor") is not None:
        return float(given["factor"])
    return float(_required(given, "max") / _original(given))


def _original(given: Mapping[str, Any]) -> int:
    """Return the trained length; the largest one where none stands, as in transformers."""
    found = given[_ORIGINAL] if given[_ORIGINAL] is not None else given["max"]
    if found is None:
        raise ConfigError(
            f"rope parameters of type {given.get('rope_type', given.get('type'))!r} have no {_ORIGINAL}; the trained "
            "length is required. Pass positions=config.max_position_embeddings."
        )
    if not found >= 1:
        raise ConfigError(
            f"{_ORIGINAL} is {found}; at least 1 trained position is required. Correct the config."
        )
    length: int = found
    return length


def _required(given: Mapping[str, Any], name: str) -> Any:
    """Return an entry.

    Raises:
        ConfigError: if it is missing.
    """
    if given.get(name) is None:
        raise ConfigError(
            f"rope parameters of type {given.get('rope_type', given.get('type'))!r} have no {_CALLED.get(name, name)}; "
            "it is required. Read it from the checkpoint's config."
        )
    return given[name]


@checked
def write_rope_parameters(params: RopeParams | Mapping[str, RopeParams]) -> dict[str, Any]:
    """Return rope parameters as transformers 5 keeps them: the inverse of `read_rope_parameters`.

    Args:
        params: a ladder and its stretching, or one a layer type, which are written nested.

    Raises:
        PositionError: if params are neither.
        ConfigError: for a rule that transformers has no type for: NTK with a fixed factor, YaRN over turns. A dynamic
            rule also needs `max_position_embeddings` of the config set to its original_positions.

    Example:
        >>> write_rope_parameters(RopeParams(theta=1e4, scaling=Linear(factor=4.0)))
        {'rope_theta': 10000.0, 'rope_type': 'linear', 'factor': 4.0}
    """
    if isinstance(params, Mapping):
        return {name: write_rope_parameters(one) for name, one in params.items()}
    rule = params.scaling
    out: dict[str, Any] = {"rope_theta": params.theta}
    if params.share != 1:
        out["partial_rotary_factor"] = params.share
    if rule is None:
        return out | {"rope_type": "default"}
    if isinstance(rule, NtkAlpha):
        return out | {"rope_type": "dynamic", "alpha": rule.alpha}
    if rule.kind not in _READERS or getattr(rule, "ramp", "pairs") != "pairs":
        raise ConfigError(
            f"scaling is {rule}; transformers has no rope_type for it. Use linear, yarn over pairs, or raise theta "
            "itself."
        )
    out["rope_type"] = rule.kind
    for field in fields(rule):
        value, called = getattr(rule, field.name), _CALLED.get(field.name, field.name)
        kept_elsewhere = rule.kind == "dynamic" and called == _ORIGINAL
        if value is not None and not kept_elsewhere and called not in ("kind", "ramp"):
            out[called] = list(value) if isinstance(value, tuple) else value
    return out


_READERS: dict[str, Callable[[Mapping[str, Any]], Scaling]] = {
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
    "su": _longrope,  # Phi-3's first configs
    "proportional": _proportional,
}
