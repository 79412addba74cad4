"""parameter_groups: weight decay and layer decay that know the position parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from timm.optim import param_groups_layer_decay, param_groups_weight_decay

from visionpos.errors import PositionError
from visionpos.retrofit.attach import attachments
from visionpos.retrofit.rope import own_rope

if TYPE_CHECKING:
    from torch import nn


def parameter_groups(
    model: nn.Module, *, weight_decay: float = 0.05, layer_decay: float | None = None
) -> list[dict[str, Any]]:
    """Return optimizer groups in which no position parameter decays.

    Tables, rotary frequencies and strengths are kept out of weight decay. Under layer decay, attached encodings train
    at the full rate: they are new, and act in every layer.

    Args:
        model: a timm model, attached or not.
        weight_decay: for all other matrices.
        layer_decay: factor a layer from the head down, in (0, 1]; None for one rate.

    Returns:
        Groups for `torch.optim`; with layer_decay each has `lr_scale`, which timm's schedulers apply.

    Raises:
        PositionError: if a rate is out of range.
    """
    if weight_decay < 0 or (layer_decay is not None and not 0 < layer_decay <= 1):
        raise PositionError(
            f"weight_decay is {weight_decay} and layer_decay {layer_decay}; at least 0, and in (0, 1] or None, "
            "are required."
        )
    whole: Any = model
    still = set(whole.no_weight_decay()) if hasattr(whole, "no_weight_decay") else set()
    still |= {name for name, _ in model.named_parameters() if name.startswith("visionpos.")}
    if own_rope(whole) is not None:
        still |= {f"rope.{name}" for name, _ in own_rope(whole).named_parameters()}
    if layer_decay is None:
        groups: list[dict[str, Any]] = param_groups_weight_decay(
            model, weight_decay, no_weight_decay_list=sorted(still)
        )
        return groups
    groups = param_groups_layer_decay(
        model, weight_decay, no_weight_decay_list=sorted(still), layer_decay=layer_decay
    )
    return _full_rate(model, groups)


def _full_rate(model: nn.Module, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the groups with attached parameters in one of their own, at rate 1 and without decay."""
    new = [
        weight
        for part in attachments(model).values()
        for weight in part.parameters()
        if weight.requires_grad
    ]
    ids = {id(weight) for weight in new}
    for group in groups:
        group["params"] = [weight for weight in group["params"] if id(weight) not in ids]
    kept = [group for group in groups if group["params"]]
    return kept + ([{"params": new, "weight_decay": 0.0, "lr_scale": 1.0}] if new else [])
