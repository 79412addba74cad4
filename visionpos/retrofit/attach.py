"""attach and detach: put an encoding on a timm model, and take it off again without a trace."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from visionpos.encodings import Conditional
from visionpos.errors import PositionError
from visionpos.retrofit.attachment import Attachment
from visionpos.retrofit.checks import check_plan, check_whole
from visionpos.retrofit.hooking import hook, shared_with_others, unhook
from visionpos.retrofit.kinds import check_kinds, check_model
from visionpos.retrofit.plan import plan_of

if TYPE_CHECKING:
    from visionpos.encodings import EncodingSpec

CONTAINER = "visionpos"


def attach(
    model: nn.Module,
    spec: EncodingSpec,
    *,
    strength: float = 0.0,
    learn_strength: bool = False,
    name: str | None = None,
    generator: torch.Generator | None = None,
    partial: bool = False,
) -> Attachment:
    """Put an encoding on a timm model, in place, and return its Attachment.

    At strength 0 the model's outputs stay bit-identical. The encoding becomes the submodule `visionpos.<name>`; all
    other state-dict keys stay as they were. It enters by the door that its class says: vectors are added to patches,
    q and k are turned in every attention, a bias is added to the logits, tokens are mixed after the blocks that the
    spec names. Prefix tokens are left alone, but for the rows that a bias has for them.

    Where layers differ in heads or channels, every size has an encoding of its own. In windows positions are those
    inside the window; in training each attention draws its own shift, jitter and rescale. The bias of a Swin-V2 enters
    before its 16 sigmoid(x).

    Weights that start at random (frequencies of RoPE-Mixed, generators, networks) are drawn from torch's global
    generator, whose state moves on: `torch.manual_seed(seed)` before the call repeats them, on every rank of a parallel
    run too; `generator` is for coordinate draws alone.

    Args:
        model: a timm model with attention; it may have been wrapped by FSDP or compiled later, not before.
        spec: what to attach.
        strength: 0 to 1 (any finite number is taken): scales angles, biases, or what is added.
        learn_strength: make the strength a parameter that starts at `strength`.
        name: name of the attachment; the spec's kind when None.
        generator: source of training-time coordinate draws, not of start values; torch's default when None.
        partial: accept that attentions whose q and k cannot be reached are skipped; `attachable` counts them, and the
            lineage of a checkpoint records it.

    Raises:
        PositionError: if the class has no place for this door, or places for some of its attentions alone, the sizes
            do not fit, the name is taken, or the pairing differs from that of the model's own rotary encoding.

    Example:
        >>> import timm, visionpos as vp
        >>> model = timm.create_model("vit_tiny_patch16_224", num_classes=0)
        >>> attach(model, vp.MixedRopeSpec(), strength=0.0).idle
        True
    """
    with torch.inference_mode(mode=False):  # weights made in inference mode could never train
        check_kinds("learn_strength", learn_strength, bool)
        check_kinds("partial", partial, bool)
        check_kinds("generator", generator, torch.Generator, None)
        plan = plan_of(model, spec, partial=partial)
        name = spec.kind if name is None else name
        _check_name(model, name)
        check_whole(model)
        _check_unshared(model)
        check_plan(model, spec, plan, attachments(model), generator)
        first, *rest = plan.groups
        attachment = Attachment(
            first.encoding,
            strength=strength,
            learn=learn_strength,
            generator=generator,
            others={f"for_{group.name}": group.encoding for group in rest},
            partial=bool(plan.skipped),
        )
    weight = next(model.parameters())
    attachment.to(weight.device).train(model.training)
    for encoding in attachment.encodings:
        if isinstance(
            encoding, Conditional
        ):  # convolves the model's tokens, and works in their dtype
            encoding.to(weight.dtype)
    _container(model).add_module(name, attachment)
    hook(model, attachment, plan, name)
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
    check_kinds("name", name, str, None)
    if name is not None and name not in present:
        raise PositionError(
            f"name {name!r} is not attached; attached are {', '.join(present) or 'none'}."
        )
    if not present:
        raise PositionError("model has no attachment; attach one first.")
    for key in list(present) if name is None else [name]:
        unhook(model, present[key])
        del model.get_submodule(CONTAINER)._modules[key]  # noqa: SLF001 (ModuleDict without its key rules)
    if not attachments(model):
        delattr(model, CONTAINER)
    _forget_graphs()


class Parts(nn.Module):
    """The submodule that holds attachments; it hands on what it gets, should a model run all its children in turn."""

    def forward(self, x: Any) -> Any:
        """Return x."""
        return x


def attachments(model: nn.Module) -> dict[str, Attachment]:
    """Return name -> Attachment of everything attached to a model, in order.

    Raises:
        PositionError: if model is no module.
    """
    check_model(model)
    container = getattr(model, CONTAINER, None)
    if container is None:
        return {}
    return {key: part for key, part in container.named_children() if isinstance(part, Attachment)}


def _forget_graphs() -> None:
    """Drop compiled graphs: one traced before would go on without what was attached or detached since."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def _check_name(model: nn.Module, name: Any) -> None:
    """Refuse a name that is taken, or that a module cannot give to a part."""
    if not isinstance(name, str) or not name.isidentifier() or hasattr(nn.Module(), name):
        raise PositionError(
            f"name is {name!r}; a Python identifier is required that torch.nn.Module does not use itself. Pass "
            "another name=."
        )
    if name in attachments(model):
        raise PositionError(
            f"name {name!r} is already attached; detach(model, {name!r}) first, or pass another name=."
        )


def _check_unshared(model: nn.Module) -> None:
    """Refuse blocks of another model that has an attachment: both would act in them, in either model."""
    path = next(shared_with_others(model, attachments(model).values()), None)
    if path is not None:
        raise PositionError(
            f"{path} is shared with another model, whose attachment acts there; every model needs blocks of its own. "
            "Detach it there, or deepcopy the blocks before attach."
        )


def _container(model: nn.Module) -> nn.Module:
    """Return the submodule that holds attachments, made on first use."""
    if not hasattr(model, CONTAINER):
        model.add_module(CONTAINER, Parts())
    return model.get_submodule(CONTAINER)
