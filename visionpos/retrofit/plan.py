"""Plans: before anything changes, what an attachment would do to a model, one encoding for each size of layers.

A model and a spec enter; a `Plan` leaves: the places, grouped by the encoding that serves them, and what is skipped.
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from visionpos.config import shipped
from visionpos.encodings import (
    Additive,
    Biasing,
    Conditional,
    Dims,
    Encoding,
    EncodingSpec,
    Extending,
    PairBiasing,
    PegSpec,
    QueryBiasing,
    Rotary,
    Turning,
    build,
)
from visionpos.errors import PositionError, did_you_mean
from visionpos.retrofit.places import Place, embeds_of, mixers_of
from visionpos.retrofit.ports import Port, attentions_of, group_dims, groups_of, ports_of
from visionpos.retrofit.seams import blocks_of, class_row, prefix_of, row_of

if TYPE_CHECKING:
    from torch import nn

    from visionpos.retrofit.port_rows import BiasSeams

Door = Literal["rotate", "bias", "add", "conditional"]
_DOORS: dict[type, Door | None] = {
    Rotary: "rotate",
    Biasing: "bias",
    Additive: "add",
    Conditional: "conditional",
    QueryBiasing: None,
    PairBiasing: None,
    Extending: None,
    Turning: "rotate",
}


@dataclass(slots=True)
class Group:
    """The places that one encoding serves: ports, or places where tokens are added to or mixed."""

    name: str
    encoding: Encoding
    ports: list[Port] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)


@dataclass(slots=True)
class Plan:
    """What an attachment would do: its groups, and (path, reason) of every attention it would skip."""

    door: Door
    groups: list[Group]
    skipped: list[tuple[str, str]] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Return how many places are served."""
        return sum(len(group.ports) + len(group.places) for group in self.groups)


def door_of(spec: EncodingSpec) -> Door:
    """Return by which door a spec enters a timm model.

    Raises:
        PositionError: if spec is no Spec, or enters by a door that no timm model has.
    """
    given: Any = spec
    if isinstance(given, str):
        raise PositionError(_not_a_name(given))
    if not type(spec).__module__.startswith("visionpos.encodings."):
        build(spec, Dims(embed_dim=8, num_heads=1, depth=1))  # says what is required
    here = vars(sys.modules[type(spec).__module__])
    made = [
        item
        for item in here.values()
        if isinstance(item, type) and item.__module__ == here["__name__"]
    ]
    for base, door in _DOORS.items():
        if door is not None and any(issubclass(item, base) for item in made):
            return door
    raise PositionError(
        f"spec {spec.kind!r} enters by another door than add, rotate, bias and conditional; attach serves those four. "
        "Build it with visionpos.build, and call it where your attention forms its logits."
    )


def _not_a_name(name: str) -> str:
    """Return what to say to a name in place of a spec."""
    known = shipped("encodings")
    if name in known:
        return (
            f"spec is {name!r}, the name of a shipped encoding; a Spec is required. Pass "
            f"visionpos.config.load_encoding({name!r}), or a Spec such as visionpos.AxialRopeSpec()."
        )
    return (
        f"spec is {name!r}; a Spec is required, and no shipped encoding has this name.{did_you_mean(name, known)} Pass "
        "visionpos.config.load_encoding(name), or a Spec such as visionpos.AxialRopeSpec()."
    )


def plan_of(model: nn.Module, spec: EncodingSpec, *, partial: bool) -> Plan:
    """Return what attaching a spec would do to a model, which is not changed.

    Raises:
        PositionError: if nothing can be served; or not all, unless `partial`.
    """
    door = door_of(spec)
    if door in ("add", "conditional") or not attentions_of(model):
        row_of(model)  # a class without a row has nothing to read
    plan = _PLANNERS[door](model, spec)
    if not plan.count or (plan.skipped and not partial):
        raise PositionError(_refusal(model, plan))
    return plan


def _refusal(model: nn.Module, plan: Plan) -> str:
    reasons = list(dict.fromkeys(reason for _, reason in plan.skipped))
    why = "; ".join(reasons) or f"{type(model).__name__} has no place for the door {plan.door}"
    if not plan.count:
        others = "add or conditional" if plan.door in ("rotate", "bias") else "rotate"
        return f"{why}. Use the door {others}."
    total = plan.count + len(plan.skipped)
    return (
        f"{why}; {len(plan.skipped)} of {total} attention modules would be skipped. Pass partial=True to accept "
        "(--partial on the command line), or use the door add."
    )


def _rotating(model: nn.Module, spec: EncodingSpec) -> Plan:
    ports_of(model)  # refuses blocks without an attention that is known
    attentions = attentions_of(model)
    plan = Plan("rotate", [])
    plan.skipped = [(port.path, port.refusal) for port in attentions if port.refusal is not None]
    able = [port for port in attentions if port.refusal is None]
    # Groups of the call come first: what a call shares belongs to the first encoding.
    groups = sorted(groups_of(able).items(), key=lambda item: item[0][2])
    for (heads, head_dim, _), ports in groups:
        try:
            encoding = build(spec, group_dims(model, ports))
        except PositionError as error:
            if len(groups) == 1:
                raise
            reason = f"heads of {head_dim} channels do not fit: {error}"
            plan.skipped += [(port.path, reason) for port in ports]
            continue
        plan.groups.append(Group(f"{heads}x{head_dim}", encoding, ports=ports))
    return plan


def bias_of(port: Port) -> BiasSeams | None:
    """Return where a bias enters at an attention, None if nowhere."""
    return next(iter(port.seams.bias), None)


def bias_is_local(port: Port) -> bool:
    """Return whether the bias of an attention needs no call: its grid is its own, or that of its own bias."""
    seams = bias_of(port)
    return port.local or (seams is not None and seams.kind == "method")


def _biasing(model: nn.Module, spec: EncodingSpec) -> Plan:
    plan, sizes = Plan("bias", []), {}  # type: ignore[var-annotated]
    for port in attentions_of(model):
        if bias_of(port) is None:
            reason = f"no place for a bias in the logits of {type(port.holder).__name__}"
            plan.skipped.append((port.path, reason))
        else:
            heads = port.heads // port.seams.heads_factor
            sizes.setdefault((bias_is_local(port), heads, port.prefix), []).append(port)
    for (local, heads, _), ports in sorted(sizes.items(), key=lambda item: item[0][0]):
        width = heads * ports[0].head_dim
        prefix = ports[0].prefix if local else prefix_of(model)
        dims = Dims(embed_dim=width, num_heads=heads, depth=len(ports), prefix=prefix)
        plan.groups.append(Group(f"{heads}", build(spec, dims), ports=ports))
    return plan


def _adding(model: nn.Module, spec: EncodingSpec) -> Plan:
    groups: dict[int, list[Place]] = {}
    for place in embeds_of(model):
        groups.setdefault(place.width, []).append(place)
    return Plan("add", [_group(model, spec, width, places) for width, places in groups.items()])


def _group(model: nn.Module, spec: EncodingSpec, width: int, places: list[Place]) -> Group:
    ports = [port for port in attentions_of(model) if port.refusal is None]
    heads = ports[0].heads if ports and width % ports[0].heads == 0 else 1
    depth = len(blocks_of(model))
    dims = Dims(embed_dim=width, num_heads=heads, depth=depth, prefix=places[0].prefix)
    return Group(f"{width}", build(spec, dims), places=places)


def _mixing(model: nn.Module, spec: EncodingSpec) -> Plan:
    if not isinstance(spec, PegSpec) or spec.after is None:
        raise PositionError(
            f"spec {spec.kind!r} mixes tokens before blocks; attach mixes them after blocks. Set after=, and "
            "before=None."
        )
    units = mixers_of(model)
    if isinstance(spec.after, tuple):
        if spec.after[-1] >= len(units):
            raise PositionError(
                f"after is {spec.after} and the model has {len(units)} blocks; indices below that are required."
            )
        chosen = list(spec.after)
    else:
        stages = [places[0].path.rpartition(".")[0] for places in units]
        chosen = [i for i, stage in enumerate(stages) if stage not in stages[:i]]
    groups: dict[tuple[int, int | None], list[Place]] = {}
    for unit in chosen:
        for place in units[unit]:
            groups.setdefault((place.width, place.item), []).append(place)
    made: list[Group] = []
    for (width, _), places in groups.items():
        # One convolution a place.
        slots = dataclasses.replace(spec, after=tuple(place.block for place in places))
        dims = Dims(embed_dim=width, num_heads=1, depth=len(units), prefix=places[0].prefix)
        made.append(Group(f"{width}_{len(made)}", build(slots, dims), places=places))
    return Plan("conditional", made)


_PLANNERS = {"rotate": _rotating, "bias": _biasing, "add": _adding, "conditional": _mixing}


def attachable(model: nn.Module) -> dict[Door, tuple[int, int, str]]:
    """Return door -> (places that can be served, places there are, why not all), read from the model.

    Example:
        >>> import timm
        >>> attachable(timm.create_model("vit_tiny_patch16_224"))["rotate"]
        (12, 12, '')
    """
    attentions = attentions_of(model)
    refused = list(dict.fromkeys(port.refusal for port in attentions if port.refusal is not None))
    turned = sum(port.refusal is None for port in attentions)
    biased = sum(bias_of(port) is not None for port in attentions)
    known = class_row(model) is not None
    embeds, mixers = (embeds_of(model), mixers_of(model)) if known else ([], [])
    unknown = "" if known else f"{type(model).__name__} is no class that visionpos knows"
    nowhere = "" if biased == len(attentions) else "no place for a bias in the logits"
    return {
        "rotate": (turned, len(attentions), "; ".join(refused)),
        "bias": (biased, len(attentions), nowhere),
        "add": (len(embeds), max(1, len(embeds)), unknown),
        "conditional": (len(mixers), max(1, len(mixers)), unknown),
    }
