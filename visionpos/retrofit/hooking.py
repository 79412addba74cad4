"""Hooking: registers the hooks of a plan, one short function a door, and removes those of an attachment."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any

from timm.layers import PatchDropout, PatchDropoutWithIndices

from visionpos.retrofit.biasing import (
    ADDED,
    WINDOW,
    ArgumentHook,
    Extra,
    NetworkHook,
    narrow,
    widen,
)
from visionpos.retrofit.checks import row_drop
from visionpos.retrofit.dropping import DropHook, RecordingDrop
from visionpos.retrofit.hooks import (
    BlockHooks,
    EnterHook,
    FlagHook,
    GridHook,
    LeaveHook,
    MarkHook,
    TurnHook,
)
from visionpos.retrofit.lattice import Reader, reader_of
from visionpos.retrofit.local import LocalEnterHook, LocalHooks, LocalLeaveHook, SeenHook
from visionpos.retrofit.mixing import AddHook, MixHook
from visionpos.retrofit.passes import ActedHook, FreshHook, PassHook, UsedHook, keep_passes
from visionpos.retrofit.places import uses_call
from visionpos.retrofit.plan import bias_of
from visionpos.retrofit.seams import blocks_of, find, matches, row_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from torch import nn

    from visionpos.retrofit.attachment import Attachment
    from visionpos.retrofit.places import Place
    from visionpos.retrofit.plan import Plan
    from visionpos.retrofit.ports import Port

_HOOK_TYPES = (
    GridHook,
    DropHook,
    MarkHook,
    EnterHook,
    LeaveHook,
    TurnHook,
    FlagHook,
    LocalEnterHook,
    LocalLeaveHook,
    SeenHook,
    ArgumentHook,
    NetworkHook,
    AddHook,
    MixHook,
    PassHook,
    UsedHook,
    FreshHook,
    ActedHook,
)


def hook(model: nn.Module, owner: Attachment, plan: Plan, name: str) -> None:
    """Register all hooks of an attachment."""
    needs_call = _needs_call(model, plan)
    if owner.learned_strength is None and plan.door != "add":  # images are not marked
        inside = [port.path for group in plan.groups for port in group.ports]
        inside += [place.path for group in plan.groups for place in group.places]
        inside += [path for path, _ in blocks_of(model)] if needs_call else []
        now = attrgetter("constant")
        keep_passes(model, inside, PassHook(owner.passes, f"_visionpos_{name}_now", owner, now))
    blocks = _hook_call(model, owner, f"_visionpos_{name}") if needs_call else []
    for number, group in enumerate(plan.groups):
        for layer, port in enumerate(group.ports):
            within: Any = blocks[port.layer] if blocks and not port.local else None
            if plan.door == "rotate":
                _hook_rotation(owner, port, within, layer, number)
            else:
                _hook_bias(owner, port, within, layer, number)
        for slot, place in enumerate(group.places):
            if plan.door == "add":
                hook_add = AddHook(owner, number, place.layout, place.prefix, *place.sides)
                place.module.register_forward_hook(hook_add, with_kwargs=True)
            else:
                _hook_mixing(model, owner, place, blocks, number, slot)
    # Last, so that marks are put on what the other hooks hand out.
    for hooks, (_, block) in zip(blocks, blocks_of(model) if blocks else [], strict=True):
        block.register_forward_hook(LeaveHook(hooks))


def _needs_call(model: nn.Module, plan: Plan) -> bool:
    if plan.door == "conditional":
        return any(uses_call(model, place) for group in plan.groups for place in group.places)
    ports = [port for group in plan.groups for port in group.ports if not port.local]
    if plan.door == "bias":
        return any(bias_of(port).kind == "argument" for port in ports)  # type: ignore[union-attr]
    return bool(ports)


def _hook_call(model: nn.Module, owner: Attachment, tag: str) -> list[BlockHooks]:
    """Register what opens a call and finds it again in every block, but for what leaves the blocks."""
    row, drop = row_of(model), row_drop(model)
    for _, patch in matches(model, row.patch_embed):
        patch.register_forward_hook(GridHook(owner), with_kwargs=True)
    if drop is not None:
        _hook_drop(find(model, drop), owner)
    entry = None if row.entry is None else find(model, row.entry)
    if entry is not None:
        entry.register_forward_hook(MarkHook(owner, tag))
    found, blocks = [], blocks_of(model)
    for layer, (_, block) in enumerate(blocks):
        hooks = BlockHooks(
            owner,
            tag,
            layer,
            depth=len(blocks),
            item=1 if row.layout == "tuple1" else 0,
            rest=row.prefix == "rest",
        )
        block.register_forward_pre_hook(EnterHook(hooks))
        found.append(hooks)
    return found


def _hook_rotation(owner: Attachment, port: Port, within: Any, layer: int, group: int) -> None:
    if within is None:
        within = LocalHooks(owner, port, layer, group)
        _hook_local(within, port)
    else:
        within.group = group
    if port.seams.flag is not None:
        flag = FlagHook(owner, port.seams.flag, own=bool(getattr(port.holder, port.seams.flag)))
        port.holder.register_forward_pre_hook(flag)
        port.holder.register_forward_hook(flag)
    taps = port.taps()
    parts = {(number, head): port.seams.taps[number].at for number, head, _ in taps}
    used = _hook_used(owner, port, parts, port.placed())
    for number, head, module in taps:
        module.register_forward_hook(TurnHook(within, port, number, head, used))


def _hook_used(
    owner: Attachment, port: Port, parts: dict[Any, str], placed: tuple[tuple[str, Any], ...] = ()
) -> UsedHook:
    """Register what refuses a pass around a port: on the attention, and on the module around it, should it go."""
    used = UsedHook(owner, port.path, parts, placed)
    around = port.path.rpartition(".")[0]
    for module in (port.holder, port.model.get_submodule(around) if around else None):
        if module is not None and parts:
            # First, and last: what the other hooks note lies between.
            module.register_forward_pre_hook(FreshHook(used), prepend=True)
            module.register_forward_hook(used)
    return used


def _hook_local(within: LocalHooks, port: Port, name: str = "", index: int = 0) -> None:
    """Register what places the tokens of an attention that tells its own grid."""
    owner, reader = within.owner, within.reader
    _hook_seen(owner, reader)
    arguments = {}
    if not name:
        arguments = {
            int(tap.at[1:]): TurnHook(within, port, number, None)
            for number, tap in enumerate(port.seams.taps)
            if tap.at.startswith("@")
        }
    port.holder.register_forward_pre_hook(LocalEnterHook(within, arguments), with_kwargs=True)
    if name:
        hook = ArgumentHook(within, name, index)
        port.holder.register_forward_pre_hook(hook, with_kwargs=True)
    port.holder.register_forward_hook(LocalLeaveHook(within))


def _hook_seen(owner: Attachment, reader: Reader) -> None:
    """Register what a reader must be told by another module."""
    kind, anchor = reader.lattice.kind, reader.anchor
    if kind == "called":
        anchor.register_forward_pre_hook(SeenHook(owner, reader), with_kwargs=True)
    elif kind == "container" and getattr(anchor, "pool", None) is not None:
        anchor.pool.register_forward_hook(SeenHook(owner, reader), with_kwargs=True)
    elif kind == "container":
        anchor.register_forward_pre_hook(SeenHook(owner, reader), with_kwargs=True)


def _hook_bias(owner: Attachment, port: Port, within: Any, layer: int, group: int) -> None:
    seams: Any = bias_of(port)
    target = port.holder if not seams.at else getattr(port.holder, seams.at)
    if seams.kind == "argument":
        used = _hook_used(owner, port, {None: f"its argument {seams.name}"})
        port.holder.register_forward_pre_hook(ActedHook(used))
        if within is None:
            local = LocalHooks(owner, port, layer, group)
            _hook_local(local, port, seams.name, seams.index)
            return
        within.group = group
        argument = ArgumentHook(within, seams.name, seams.index)
        port.holder.register_forward_pre_hook(argument, with_kwargs=True)
    elif seams.kind == "method":
        reader = (
            Reader(WINDOW, int(getattr(target, "prefix_tokens", 0)), None, WINDOW.name)
            if seams.at
            else reader_of(port)
        )
        used = _hook_used(owner, port, {None: seams.name})
        widen(target, seams.name, Extra(owner, reader, layer, group, used))
    else:
        reader = Reader(WINDOW, 0, port.holder, WINDOW.name)
        used = _hook_used(owner, port, {None: seams.at})
        target.register_forward_hook(NetworkHook(owner, reader, group, pairs=seams.kind == "pairs"))
        target.register_forward_hook(ActedHook(used))


def _hook_mixing(
    model: nn.Module,
    owner: Attachment,
    place: Place,
    blocks: list[BlockHooks],
    group: int,
    slot: int,
) -> None:
    within = blocks[place.block] if uses_call(model, place) else None
    if within is not None:
        within.group = group
    reader = reader_of(place.port) if place.port is not None else None
    holder = place.port.holder if place.port is not None else None
    mix = MixHook(
        owner,
        group,
        slot,
        layout=place.layout,
        item=place.item,
        within=within,
        reader=reader,
        holder=holder,
    )
    place.module.register_forward_hook(mix, with_kwargs=True)


def _hook_drop(drop: Any, owner: Attachment) -> None:
    """Record which tokens patch dropout keeps."""
    if type(drop) is PatchDropout:
        RecordingDrop.take(drop)
    if isinstance(drop, (RecordingDrop, PatchDropoutWithIndices)):
        drop.register_forward_hook(DropHook(owner))


def shared_with_others(model: nn.Module, own: Collection[Attachment]) -> Iterator[str]:
    """Yield the paths of modules through which attachments of another model act."""
    for path, module in model.named_modules():
        for found in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):  # noqa: SLF001
            acts = isinstance(found, _HOOK_TYPES) and not isinstance(found, (GridHook, PassHook))
            if acts and not any(_owner(found) is part for part in own):
                yield path


def unhook(model: nn.Module, owner: Attachment) -> None:
    """Remove every trace of an attachment from the model's modules."""
    for module in list(model.modules()):
        _remove_hooks(module, owner)
        if hasattr(module, ADDED):
            narrow(module, owner)
        if isinstance(module, RecordingDrop) and not _recorded(module):
            RecordingDrop.release(module)


def _recorded(drop: nn.Module) -> bool:
    return any(isinstance(hook, DropHook) for hook in drop._forward_hooks.values())  # noqa: SLF001 (see below)


def _remove_hooks(module: nn.Module, owner: Attachment) -> None:
    """Remove the hooks of one attachment from one module."""
    # Handles do not survive deepcopy, so the dictionaries are searched.
    for hooks, flags in (
        (module._forward_hooks, module._forward_hooks_with_kwargs),  # noqa: SLF001
        (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),  # noqa: SLF001
    ):
        mine: list[int] = [
            key
            for key, found in hooks.items()
            if isinstance(found, _HOOK_TYPES) and _owner(found) is owner
        ]
        for key in mine:
            found = hooks.pop(key)
            flags.pop(key, None)
            if isinstance(found, FlagHook):
                setattr(module, found.flag, found.own)


def _owner(hook: Callable[..., Any]) -> Attachment | None:
    return getattr(hook, "owner", None)
