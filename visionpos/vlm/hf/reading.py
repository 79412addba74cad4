"""Reading: a transformers config becomes a family, with what the checkpoint says laid over the family's data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from visionpos import config as configs
from visionpos.errors import ConfigError, PositionError
from visionpos.geometry.grid import is_whole
from visionpos.geometry.scaling import FixedScaling, Proportional
from visionpos.geometry.scaling_params import read_rope_parameters
from visionpos.vlm.families import Family, family
from visionpos.vlm.language import LanguageSpec
from visionpos.vlm.loading import VENDOR
from visionpos.vlm.rules import Rule

TRANSFORMERS = "transformers"
ORDER_KEYS = ("mrope_interleaved", "interleaved")  # whether axes take turns along the ladder
GRID_KEYS = (("patch", "patch_size"), ("merge", "spatial_merge_size"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What a model type of transformers is called here.

    Args:
        family: name of the family.
        variant: of the family.
        turning: part of a head that turns where the config says nothing, as the class of the config fills it in.
        time_last: whether sections are written rows, columns, time.
        by_tokens: whether token types, or token ids, and grids say where every token stands.
        typed: whether `get_rope_index` is given token types; else it looks for token ids.
    """

    family: str
    variant: str | None = None
    turning: float = 1.0
    time_last: bool = False
    by_tokens: bool = True
    typed: bool = True


@lru_cache(maxsize=1)
def served_rows() -> dict[str, Served]:
    """Return model type -> what it is called here, as configs/hf/model_types.yaml has it."""
    text = configs.shipped("hf")["model_types"].read_text(encoding="utf-8")
    types: dict[str, dict[str, Any]] = configs.read_yaml(text, source="model_types.yaml")["types"]
    return {kind: Served(**row) for kind, row in types.items()}


def served_types() -> tuple[str, ...]:
    """Return the model types of transformers that have a family here, sorted.

    Example:
        >>> served_types()[-3:]
        ('qwen3_vl', 'qwen3_vl_moe', 'qwen4_exp')
    """
    return tuple(sorted(served_rows()))


def family_of(
    config: Any, dialect: str | None = None, overlay: Mapping[str, Any] | None = None
) -> Family:
    """Return the family that a transformers config describes.

    Patch and merge sizes, ids a second, and the rotary layout are the config's; what it leaves out is the family's.
    The layout may stand under `rope_parameters` or `rope_scaling`, in a nested `text_config` or flat.

    Args:
        config: a config object, or the mapping of a `config.json`.
        dialect: whose rules to follow; "vendor" where None. "transformers" is accepted of every family: where the two
            agree it is the same.
        overlay: your own changes in the family's grammar, laid on last.

    Raises:
        PositionError: if the model type has no family here; the message lists those that have.
        ConfigError: if it is no config, or its rotary layout cannot be: sections that do not fill the head or are not
            one an axis, another order of them than the family's, a scaling other than default, YaRN and alpha.

    Example:
        >>> rope = {"type": "mrope", "mrope_section": [16, 24, 24]}
        >>> flat = {
        ...     "model_type": "qwen2_vl",
        ...     "hidden_size": 1536,
        ...     "num_attention_heads": 12,
        ...     "rope_scaling": rope,
        ... }
        >>> family_of(flat).spec.language.head_dim
        128
    """
    if overlay is not None and not isinstance(overlay, Mapping):
        raise ConfigError(
            f"overlay is {overlay!r}; a mapping in the family's grammar is required, such as {{'grid': {{}}}}."
        )
    data, served = _read(config)
    mine = _sizes(data)
    language = _family(served, dialect, mine).spec.language
    if language is not None:
        mine["language"] = _language(data, served, language)
    return _family(served, dialect, configs.overlay(mine, overlay or {}))


def placing_family(config: Any, dialect: str | None) -> tuple[Family, Served, dict[str, Any]]:
    """Return the family of a config for ids alone, without its rotary layout, and the config as data.

    Raises:
        PositionError: if the model type is not served, or its ids are not told by token types and grids.
    """
    data, served = _read(config)
    if not served.by_tokens:
        able = ", ".join(name for name in served_types() if served_rows()[name].by_tokens)
        raise PositionError(
            f"model type {data['model_type']!r} places tokens by more than types and grids; one of {able} is required. "
            "Take the ids of its streams from family_of(config)."
        )
    return _family(served, dialect, _sizes(data)), served, data


def rule_of(fam: Family) -> Rule:
    """Return the position rule of a family.

    Raises:
        PositionError: if it has none.
    """
    if fam.spec.rule is None:
        raise PositionError(
            f"{fam.name} has no position rule in its data. Add `rule:` by overlay, such as {{axes: [index]}}."
        )
    return fam.spec.rule


def _family(served: Served, dialect: str | None, overlay: Mapping[str, Any]) -> Family:
    """Return the family in a dialect; families with one rule have it in every dialect of transformers."""
    plain = family(served.family, variant=served.variant)
    if dialect == TRANSFORMERS and TRANSFORMERS not in plain.dialects:
        dialect = VENDOR
    return family(served.family, dialect=dialect, variant=served.variant, overlay=overlay)


def _read(config: Any) -> tuple[dict[str, Any], Served]:
    """Return a config as plain data, that of the part which reads the prompt, and what it is called here."""
    plain = config.to_dict() if callable(getattr(config, "to_dict", None)) else config
    if not isinstance(plain, Mapping):
        raise ConfigError(
            f"config is a {type(config).__name__}; a transformers config or the mapping of its config.json is "
            "required. Pass model.config."
        )
    data = dict(plain)
    kind = data.get("model_type")
    if isinstance(data.get("thinker_config"), Mapping):
        data = dict(data["thinker_config"])
    served = served_rows().get(kind) if isinstance(kind, str) else None
    if served is None:
        raise PositionError(
            f"model_type is {kind!r}; one of {', '.join(served_types())} is required. Use family(name) for families "
            "that transformers places one-dimensionally."
        )
    data["model_type"] = kind
    return data, served


def _part(data: Mapping[str, Any], name: str) -> dict[str, Any]:
    part = data.get(name)
    return dict(part) if isinstance(part, Mapping) else {}


def _whole(part: Mapping[str, Any], key: str) -> int | None:
    """Return a whole number of a config, None where it says nothing."""
    value = part.get(key)
    if value is None or is_whole(value):
        return value
    raise ConfigError(
        f"{key} is {value!r}; a whole number of at least 1 is required. Correct the config, or leave it out to take "
        "the family's."
    )


def _real(part: Mapping[str, Any], key: str) -> float | None:
    """Return a number of a config, None where it says nothing."""
    value = part.get(key)
    if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool)):
        return value
    raise ConfigError(
        f"{key} is {value!r}; a number is required. Correct the config, or leave it out to take the family's."
    )


def _sizes(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the overlay of grid and rule: patch, merge, ids a second, frames a time step."""
    vision = _part(data, "vision_config")
    read = ((ours, _whole(vision, theirs)) for ours, theirs in GRID_KEYS)
    grid = {ours: side for ours, side in read if side is not None}
    rule: dict[str, Any] = {}
    rate = data.get("position_id_per_seconds", vision.get("tokens_per_second"))
    if rate is not None:
        rule["frame_step"] = {"per_second": rate}
    if vision.get("temporal_merge_size") is not None:
        rule["temporal_merge"] = vision["temporal_merge_size"]
    return {name: part for name, part in (("grid", grid), ("rule", rule)) if part}


def _language(data: Mapping[str, Any], served: Served, usual: LanguageSpec) -> dict[str, Any]:
    """Return the overlay of the rotary layout; what the config leaves out is as usual in the family."""
    text = _part(data, "text_config") or dict(data)
    rope = {**_part(text, "rope_parameters"), **_part(text, "rope_scaling")}
    width, heads = _whole(text, "hidden_size"), _whole(text, "num_attention_heads")
    keys = ("qk_rope_head_dim", "head_dim", "attention_head_dim")
    head = next((found for key in keys if (found := _whole(text, key))), None)
    if head is None:
        head = width // heads if width and heads else usual.head_dim
    turning = _real({**text, **rope}, "partial_rotary_factor")
    layout: dict[str, Any] = {
        "head_dim": head,
        "rotary_dim": int(head * (served.turning if turning is None else turning)),
    }
    theta = rope.get("rope_theta", text.get("rope_theta"))
    if theta is not None:
        layout["theta"] = theta
    _check_order(rope, served, usual)
    sections = rope.get("mrope_section") or rope.get("xdrope_section")
    if sections:
        layout["sections"] = _sections(sections, served, usual)
    scaling = _scaling(rope, text)
    if scaling is not None:
        said = {name: value for name, value in asdict(scaling).items() if value is not None}
        layout["scaling"] = said
    if isinstance(scaling, Proportional):  # its ladder is that of the whole head
        layout["rotary_dim"] = head
    return layout


def _sections(sections: Any, served: Served, usual: LanguageSpec) -> list[Any]:
    """Return the sections of a config, time first."""
    if not isinstance(sections, (list, tuple)):
        raise ConfigError(
            f"sections are {sections!r}; a list of channel pairs, one an axis, is required. Correct the config."
        )
    if len(sections) != usual.axes:
        raise ConfigError(
            f"sections are {list(sections)}, for {len(sections)} axes, and ids of {served.family!r} have {usual.axes}; "
            f"{usual.axes} numbers are required. Correct the config, or its model_type."
        )
    return [*sections[-1:], *sections[:-1]] if served.time_last else list(sections)


def _check_order(rope: Mapping[str, Any], served: Served, usual: LanguageSpec) -> None:
    """Refuse a config that says another order of sections than its model type computes, whatever is said."""
    for key in ORDER_KEYS:
        said = rope.get(key)
        if said is not None and said is not (usual.order == "interleaved"):
            raise ConfigError(
                f"{key} is {said!r} and sections of {served.family!r} are {usual.order}; the two must agree, or every "
                "angle of an image is another. Correct the config, or its model_type."
            )


def _scaling(rope: Mapping[str, Any], text: Mapping[str, Any]) -> FixedScaling | None:
    """Return how the ladder is stretched, None for not at all."""
    kind = rope.get("rope_type", rope.get("type"))
    if kind == "longrope" or (kind == "dynamic" and not rope.get("alpha")):
        raise ConfigError(
            f"rope_type is {kind!r}, which depends on the length of every document; default, linear, yarn, llama3, "
            "proportional, or dynamic with alpha is required. Take position ids alone, from attach or family(name), "
            "and leave the rotation to the model."
        )
    positions = _whole(text, "max_position_embeddings")
    share = _real(text, "partial_rotary_factor")
    found = read_rope_parameters({**rope, "rope_theta": 1e4}, share=share, positions=positions)
    scaling: FixedScaling | None = getattr(found, "scaling", None)  # nested by layer type: none
    return scaling
