"""What attach refuses because it would be wrong without an error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from visionpos.encodings import LearnedSpec, Rotary, Turning
from visionpos.errors import PositionError
from visionpos.retrofit.seams import class_row, find, matches, prefix_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from visionpos.encodings import EncodingSpec
    from visionpos.geometry.rotation import Pairing
    from visionpos.retrofit.attachment import Attachment
    from visionpos.retrofit.plan import Plan
    from visionpos.retrofit.ports import Port
    from visionpos.retrofit.seams import ModelSeams


def check_whole(model: nn.Module) -> None:
    """Refuse a block that stands in the model twice: its hooks would act twice.

    Raises:
        PositionError: naming it.
    """
    found = class_row(model)
    for path, container in () if found is None else matches(model, found[1].blocks):
        if not isinstance(container, (nn.Sequential, nn.ModuleList)):
            continue
        blocks = list(container)
        if len({id(block) for block in blocks}) < len(blocks):
            raise PositionError(
                f"model.{path} holds one block several times; each needs hooks of its own. Give every layer its own "
                "block."
            )


def check_plan(
    model: nn.Module,
    spec: EncodingSpec,
    plan: Plan,
    present: Mapping[str, Attachment],
    generator: torch.Generator | None,
) -> None:
    """Refuse what would be wrong without an error.

    Raises:
        PositionError: if a table has prefix rows, patch dropout counts other tokens, two rotations would not commute,
            or draws could not be repeated.
    """
    if isinstance(spec, LearnedSpec) and spec.prefix_rows:
        raise PositionError(
            f"spec has {spec.prefix_rows} prefix_rows; an attached table acts on patch tokens only. Set prefix_rows=0."
        )
    if any(not port.local for group in plan.groups for port in group.ports):
        path = row_drop(model)
        if path is not None:
            _check_drop(model, path, prefix_of(model))
    if plan.door == "rotate":
        for group in plan.groups:
            encoding: Any = group.encoding
            _check_rotations(model, encoding, group.ports, present)
            _check_ports(encoding, group.ports)
            _check_draws(encoding, group.ports, generator)


def row_drop(model: nn.Module) -> str | None:
    """Return where the model drops patches in training, None if it does not."""
    found = class_row(model)
    return None if found is None else found[1].patch_drop


def _check_rotations(
    model: nn.Module,
    encoding: Rotary | Turning,
    ports: list[Port],
    present: Mapping[str, Attachment],
) -> None:
    """Refuse a rotation that would not commute with one that is there."""
    own = own_pairing_at(model, ports[0])
    if own is not None:
        _check_commutes(encoding, None, "the model's own rotary encoding")
        _check_planes(encoding, "the model's own", own, encoding.dims.channels // 2)
    for name, part in present.items():
        for other in part.encodings:
            if (
                isinstance(other, Turning | Rotary)
                and other.dims.channels == encoding.dims.channels
            ):
                _check_commutes(encoding, other, f"attached {name!r}")
                _check_planes(encoding, f"attached {name!r}", _pairing(other), _pairs(other))


def _check_commutes(encoding: Any, other: Any, whose: str) -> None:
    """Refuse two rotations of which one turns blocks of channels."""
    if isinstance(encoding, Turning) or isinstance(other, Turning):
        kind = (encoding if isinstance(encoding, Turning) else other).spec.kind
        raise PositionError(
            f"spec {encoding.spec.kind!r} meets {whose}; {kind!r} turns blocks of channels in planes that it learns, "
            "and two rotations in different planes are no function of distance. Attach it alone, to a model without a "
            "rotary encoding of its own."
        )


def own_pairing_at(model: nn.Module, port: Port) -> Pairing | None:
    """Return the pairing of the model's own rotary encoding at a port, None without one."""
    if port.seams.pairing is not None:
        return port.seams.pairing
    found = class_row(model)
    if found is None or found[1].rope is None or find(model, found[1].rope) is None:
        return None
    return "half" if getattr(port.holder, "rotate_half", False) else "adjacent"


def _check_draws(
    encoding: Rotary | Turning, ports: list[Port], generator: torch.Generator | None
) -> None:
    """Refuse draws that a recomputation could not repeat, or that cannot be told apart."""
    if not (ports[0].local and encoding.coords.augments):
        return
    if generator is not None:
        raise PositionError(
            f"generator is given and {ports[0].path} draws inside its windows; checkpointing repeats the draws of "
            "torch's default generator alone. Leave generator=None, and seed torch."
        )
    if encoding.coords.scope == "sample":
        raise PositionError(
            f"scope is 'sample' and {ports[0].path} sees windows, not samples; 'forward' or 'block' is required, both "
            "of which draw once an attention there. Set coords.scope='block'."
        )


def _check_ports(encoding: Rotary | Turning, ports: list[Port]) -> None:
    """Refuse frequencies a head where queries and keys have different heads, or where every head has its own module."""
    for port in ports:
        if isinstance(encoding, Turning) and any(tap.at.endswith("*") for tap in port.seams.taps):
            raise PositionError(
                f"{port.path} hands out q and k one head at a time; {encoding.spec.kind!r} turns all heads together. "
                "Use AxialRopeSpec or MixedRopeSpec."
            )
        own = encoding.layerwise or isinstance(encoding, Turning)
        if own and port.key_heads != port.heads:
            raise PositionError(
                f"{port.path} has {port.heads} query heads and {port.key_heads} key heads; an encoding with "
                "frequencies a "
                "head cannot turn grouped queries. Use AxialRopeSpec."
            )


def _check_drop(model: Any, path: str, prefix: int) -> None:
    """Refuse a patch dropout whose indices count from another token, as timm's distilled DeiT has it."""
    counted = getattr(find(model, path), "num_prefix_tokens", prefix)
    if counted != prefix:
        raise PositionError(
            f"{path} spares {counted} prefix tokens and the model has {prefix}; it would drop the others like patches. "
            f"Set model.{path}.num_prefix_tokens = {prefix}."
        )


def _check_planes(encoding: Any, whose: str, pairing: Pairing, pairs: int) -> None:
    """Refuse a rotation in other planes than one that is there: the two together are no function of distance."""
    if pairing != encoding.pairing:
        raise PositionError(
            f"pairing {encoding.pairing!r} differs from {whose} {pairing!r}; two rotations in different planes are "
            f"no function of distance. Use pairing={pairing!r}."
        )
    if pairing != "adjacent" and pairs != _pairs(encoding):
        raise PositionError(
            f"spec turns {_pairs(encoding)} pairs and {whose} {pairs}; pairing {pairing!r} joins distant channels, "
            f"so both must turn as many. Set rotary_dim={2 * pairs}."
        )


def _pairing(encoding: Any) -> Pairing:
    """Return which channels an encoding turns together."""
    pairing: Pairing = encoding.pairing
    return pairing


def _pairs(encoding: Any) -> int:
    """Return the channel pairs that an encoding turns."""
    return int(encoding.freqs().shape[-1])


def check_movable(model: Any, row: ModelSeams) -> None:
    """Refuse a model with a rotary encoding of its own that would stay at its size.

    Raises:
        PositionError: naming it.
    """
    for path in row.still:
        if find(model, path) is not None:
            raise PositionError(
                f"{path} is a rotary encoding that the model was made with for its image size; nothing here moves it. "
                "Create the model at the new img_size and load the weights, or create it without and attach one."
            )
