"""attach and detach: put an encoding on a timm model, and take it off again without a trace."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from timm.layers import PatchDropout, PatchDropoutWithIndices
from torch import nn

from visionpos.encodings import Additive, Encoding, EncodingSpec, LearnedSpec, Rotary, build
from visionpos.errors import PositionError
from visionpos.retrofit.attachment import Attachment
from visionpos.retrofit.hooks import (
    BlockHooks,
    DropHook,
    EnterHook,
    GridHook,
    LeaveHook,
    MarkHook,
    RecordingDrop,
    TurnHook,
)
from visionpos.retrofit.ports import Port, dims_of, ports_of
from visionpos.retrofit.rope import own_pairing
from visionpos.retrofit.seams import row_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from visionpos.geometry.rotation import Pairing
    from visionpos.retrofit.seams import ModelSeams

CONTAINER = "visionpos"
_HOOK_TYPES = (GridHook, DropHook, MarkHook, EnterHook, LeaveHook, TurnHook)


def attach(
    model: nn.Module,
    spec: EncodingSpec,
    *,
    strength: float = 0.0,
    learn_strength: bool = False,
    name: str | None = None,
    generator: torch.Generator | None = None,
) -> Attachment:
    """Put an encoding on a timm model, in place, and return its Attachment.

    At strength 0 the model's outputs stay bit-identical. The encoding becomes the submodule `visionpos.<name>`; all
    other state-dict keys stay as they were. Additive encodings act on patch tokens after patch_embed, rotary ones on
    q and k of every attention after their norms; prefix tokens are left alone.

    Args:
        model: a timm VisionTransformer or Eva, or a subclass; it may have been wrapped by FSDP or compiled later, not
            before.
        spec: what to attach.
        strength: 0 to 1 (any finite number is taken): scales angles, or the added vectors.
        learn_strength: make the strength a parameter that starts at `strength`.
        name: name of the attachment; the spec's kind when None.
        generator: source of training-time coordinate draws; torch's default when None.

    Raises:
        PositionError: if the class has no row, the sizes do not fit, the name is taken, or the pairing differs from
            that of the model's own rotary encoding.

    Example:
        >>> import timm, visionpos as vp
        >>> model = timm.create_model("vit_tiny_patch16_224", num_classes=0)
        >>> attach(model, vp.MixedRopeSpec(), strength=0.0).idle
        True
    """
    row, dims = row_of(model), dims_of(model)
    with torch.inference_mode(mode=False):  # weights made in inference mode could never train
        encoding = build(spec, dims)
    name = spec.kind if name is None else name
    _check_name(model, name)
    _check_whole(model, row)
    ports = ports_of(model) if isinstance(encoding, Rotary) else []
    _check(model, spec, encoding, ports)
    with torch.inference_mode(mode=False):
        attachment = Attachment(
            encoding, strength=strength, learn=learn_strength, generator=generator
        )
    weight = next(model.parameters())
    attachment.to(weight.device).train(model.training)
    _container(model).add_module(name, attachment)
    getattr(model, row.patch_embed).register_forward_hook(GridHook(attachment))
    if ports:
        tag = f"_visionpos_{name}"
        _hook_drop(model, row.patch_drop, attachment)
        getattr(model, row.entry).register_forward_hook(MarkHook(attachment, tag))
        _hook_blocks(model, row.blocks, tag, attachment, ports)
    _forget_graphs()
    return attachment


def detach(model: nn.Module, name: str | None = None) -> None:
    """Take an attachment off; the model is bit for bit what it was before, and so is its state dict.

    Args:
        model: a model that `attach` has changed.
        name: which attachment; all when None.

    Raises:
        PositionError: if there is no such attachment.
    """
    present = attachments(model)
    if name is not None and name not in present:
        raise PositionError(
            f"name {name!r} is not attached; attached are {', '.join(present) or 'none'}."
        )
    if not present:
        raise PositionError("model has no attachment; attach one first.")
    for key in list(present) if name is None else [name]:
        for module in model.modules():
            _remove_hooks(module, present[key])
        del model.get_submodule(CONTAINER)._modules[key]  # noqa: SLF001 (ModuleDict without its key rules)
    if not attachments(model):
        delattr(model, CONTAINER)
        _restore_drop(model, row_of(model).patch_drop)
    _forget_graphs()


def attachments(model: nn.Module) -> dict[str, Attachment]:
    """Return name -> Attachment of everything attached to a model, in order."""
    container = getattr(model, CONTAINER, None)
    if container is None:
        return {}
    return {key: part for key, part in container.named_children() if isinstance(part, Attachment)}


def _check_whole(model: Any, row: ModelSeams) -> None:
    """Refuse a block that stands in the model twice: its hooks would act twice."""
    blocks = list(getattr(model, row.blocks))
    if len({id(block) for block in blocks}) < len(blocks):
        raise PositionError(
            f"model.{row.blocks} holds one block several times; each needs hooks of its own. Give every layer its "
            "own block."
        )


def _forget_graphs() -> None:
    """Drop compiled graphs: one traced before would go on without what was attached or detached since."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def _check_name(model: nn.Module, name: str) -> None:
    """Refuse a name that is taken, or that a module cannot give to a part."""
    if name in attachments(model):
        raise PositionError(
            f"name {name!r} is already attached; detach(model, {name!r}) first, or pass another name=."
        )
    if not name.isidentifier() or hasattr(nn.Module(), name):
        raise PositionError(
            f"name is {name!r}; a Python identifier is required that torch.nn.Module does not use itself. Pass "
            "another name=."
        )


def _check(model: Any, spec: EncodingSpec, encoding: Encoding, ports: list[Port]) -> None:
    """Refuse what would be wrong without an error."""
    if not isinstance(encoding, (Additive, Rotary)):
        raise PositionError(
            f"spec {spec.kind!r} enters by another door than add or rotate; attach serves those two. Build it with "
            "visionpos.build, and call it where your attention adds its logits."
        )
    if isinstance(spec, LearnedSpec) and spec.prefix_rows:
        raise PositionError(
            f"spec has {spec.prefix_rows} prefix_rows; an attached table acts on patch tokens only. Set prefix_rows=0."
        )
    if isinstance(encoding, Rotary):
        _check_drop(model, row_of(model).patch_drop, encoding.dims.prefix)
        _check_rotations(model, encoding)
        _check_ports(encoding, ports)


def _check_rotations(model: Any, encoding: Rotary) -> None:
    """Refuse a rotation that would not commute with one that is there."""
    own = own_pairing(model)
    if own is not None:
        _check_planes(encoding, "the model's own", own, encoding.dims.channels // 2)
    for name, part in attachments(model).items():
        if isinstance(part.encoding, Rotary):
            whose, pairs = f"attached {name!r}", _pairs(part.encoding)
            _check_planes(encoding, whose, part.encoding.pairing, pairs)


def _check_ports(encoding: Rotary, ports: list[Port]) -> None:
    """Refuse frequencies a head where queries and keys have different heads."""
    for port in ports:
        if encoding.layerwise and port.key_heads != port.heads:
            raise PositionError(
                f"{port.path} has {port.heads} query heads and {port.key_heads} key heads; an encoding with "
                "frequencies a "
                "head cannot turn grouped queries. Use AxialRopeSpec."
            )


def _check_drop(model: Any, path: str, prefix: int) -> None:
    """Refuse a patch dropout whose indices count from another token, as timm's distilled DeiT has it."""
    counted = getattr(getattr(model, path, None), "num_prefix_tokens", prefix)
    if counted != prefix:
        raise PositionError(
            f"{path} spares {counted} prefix tokens and the model has {prefix}; it would drop the others like patches. "
            f"Set model.{path}.num_prefix_tokens = {prefix}."
        )


def _check_planes(encoding: Rotary, whose: str, pairing: Pairing, pairs: int) -> None:
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


def _pairs(encoding: Rotary) -> int:
    """Return the channel pairs that an encoding turns."""
    return int(encoding.freqs().shape[-1])


def _container(model: nn.Module) -> nn.Module:
    """Return the submodule that holds attachments, made on first use."""
    if not hasattr(model, CONTAINER):
        model.add_module(CONTAINER, nn.Module())
    return model.get_submodule(CONTAINER)


def _hook_blocks(
    model: nn.Module, blocks: str, tag: str, attachment: Attachment, ports: list[Port]
) -> None:
    """Register the hooks of every block and port."""
    for layer, block in enumerate(getattr(model, blocks)):
        hooks = BlockHooks(attachment, tag, layer)
        block.register_forward_pre_hook(EnterHook(hooks))
        block.register_forward_hook(LeaveHook(hooks))
        for port in (port for port in ports if port.layer == layer):
            for side in port.sides:
                side.register_forward_hook(TurnHook(hooks, port.seams))


def _hook_drop(model: nn.Module, path: str, attachment: Attachment) -> None:
    """Record which tokens patch dropout keeps."""
    drop = getattr(model, path, None)
    if type(drop) is PatchDropout:
        RecordingDrop.take(drop)
    if isinstance(drop, (RecordingDrop, PatchDropoutWithIndices)):
        drop.register_forward_hook(DropHook(attachment))


def _restore_drop(model: nn.Module, path: str) -> None:
    """Give a patch dropout its own class back."""
    drop = getattr(model, path, None)
    if isinstance(drop, RecordingDrop):
        RecordingDrop.release(drop)


def _remove_hooks(module: nn.Module, owner: Attachment) -> None:
    """Remove the hooks of one attachment from one module."""
    for hooks in (module._forward_hooks, module._forward_pre_hooks):  # noqa: SLF001 (handles do not survive deepcopy)
        mine: list[int] = [
            key
            for key, hook in hooks.items()
            if isinstance(hook, _HOOK_TYPES) and _owner(hook) is owner
        ]
        for key in mine:
            del hooks[key]


def _owner(hook: Callable[..., Any]) -> Attachment | None:
    return getattr(hook, "owner", None)
