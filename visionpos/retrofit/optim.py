"""parameter_groups: weight decay and layer decay that know the position parameters."""

from __future__ import annotations

import math
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from torch import nn

from visionpos.errors import PositionError
from visionpos.retrofit.attach import CONTAINER, attachments
from visionpos.retrofit.kinds import check_kinds
from visionpos.retrofit.seams import row_of
from visionpos.retrofit.tables import tables_of

if TYPE_CHECKING:
    from collections.abc import Iterator


def parameter_groups(
    model: nn.Module, *, weight_decay: float = 0.05, layer_decay: float | None = None
) -> list[dict[str, Any]]:
    """Return optimizer groups in which no position parameter decays.

    Tables, networks of log coordinates (as Swin-V2 has it), rotary frequencies and strengths are kept out of weight
    decay; convolutions that mix tokens decay like others. Under layer decay, attached encodings train at the full rate:
    they are new, and act in every layer.

    Args:
        model: a timm model, attached or not.
        weight_decay: for all other matrices.
        layer_decay: factor a layer from the head down, in (0, 1]; None for one rate.

    Returns:
        Groups for `torch.optim`; with layer_decay each has `lr_scale`, which timm's schedulers apply.

    Raises:
        PositionError: if a rate is out of range.
    """
    check_kinds("weight_decay", weight_decay, float, int)
    check_kinds("layer_decay", layer_decay, float, int, None)
    if not 0 <= weight_decay < math.inf or (layer_decay is not None and not 0 < layer_decay <= 1):
        raise PositionError(
            f"weight_decay is {weight_decay} and layer_decay {layer_decay}; at least 0, and in (0, 1] or None, "
            "are required."
        )
    still = _still(model)
    if layer_decay is None:
        groups: list[dict[str, Any]] = param_groups_weight_decay(
            model, weight_decay, no_weight_decay_list=sorted(still)
        )
        return groups
    # timm counts layers up to the last parameter: attached ones would push all others a layer further from the head.
    with _put_aside(model):
        groups = param_groups_layer_decay(
            model, weight_decay, no_weight_decay_list=sorted(still), layer_decay=layer_decay
        )
    new = [
        weight
        for part in attachments(model).values()
        for weight in part.parameters()
        if weight.requires_grad
    ]
    return groups + ([{"params": new, "weight_decay": 0.0, "lr_scale": 1.0}] if new else [])


def _still(model: Any) -> set[str]:
    """Return the parameters that must not decay: what timm names, all tables, rotary frequencies and attachments."""
    rope = row_of(model).rope
    tables = tables_of(model)
    inside: tuple[str, ...] = ("visionpos.",) if rope is None else ("visionpos.", f"{rope}.")
    inside += tuple(f"{table.path}." for table in tables if table.seams.kind == "log_mlp")
    still = {name for name, _ in model.named_parameters() if name.startswith(inside)}
    still |= {table.path for table in tables if isinstance(table.value, nn.Parameter)}
    # A class may name none, or, as timm's Hiera can, ask for a table that it has not.
    with suppress(AttributeError):
        still |= set(model.no_weight_decay())
    return still


@contextmanager
def _put_aside(model: nn.Module) -> Iterator[None]:
    """Take the attachments out of the model's list of parts for a while, and put them back in their place."""
    parts = dict(model._modules)  # noqa: SLF001 (a part is taken out and its place in the order kept)
    model._modules.pop(CONTAINER, None)  # noqa: SLF001
    try:
        yield
    finally:
        model._modules.clear()  # noqa: SLF001
        model._modules.update(parts)  # noqa: SLF001
