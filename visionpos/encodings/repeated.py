"""Repeated: a table that a network gives again and again while its weights stay, evaluated once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from visionpos.geometry.points import readable

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from torch import Tensor, nn

_PLACE = "_repeated"


def repeated(module: nn.Module, key: Hashable, evaluate: Callable[[], Tensor]) -> Tensor:
    """Return what `evaluate` returns, from the last time where nothing has changed since.

    Only in eval mode, without gradients and on the CPU; elsewhere it is evaluated. The weights, and buffers such as the
    masks of pruning, are compared by value: versions miss what is written through `.data`, and addresses miss what is
    written in place.

    Args:
        module: the owner of the weights; what is kept leaves with it, and is in no state dict.
        key: all that the table depends on beside the weights.
        evaluate: makes the table.

    Returns:
        A tensor of the caller's own.
    """
    if module.training or torch.is_grad_enabled():
        return evaluate()
    weights = [*module.parameters(), *module.buffers()]
    if not all(map(is_plain, weights)):
        return evaluate()
    kept: tuple[Hashable, list[Tensor], Tensor] | None = module.__dict__.get(_PLACE)
    if kept is not None and kept[0] == key and _same(kept[1], weights):
        return kept[2].clone()
    table = evaluate()
    module.__dict__[_PLACE] = (key, [weight.clone() for weight in weights], table.clone())
    return table


def is_plain(weight: Tensor) -> bool:
    """Return whether a weight is a plain tensor of now on the CPU, whose values can be looked at for free."""
    plain = type(weight) in (torch.Tensor, torch.nn.Parameter)
    traced = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    return plain and readable(weight) and not traced


def _same(held: list[Tensor], weights: list[Tensor]) -> bool:
    """Return whether weights hold what they held; NaN is never the same."""
    return len(held) == len(weights) and all(
        old.dtype == new.dtype and torch.equal(old, new)
        for old, new in zip(held, weights, strict=True)
    )
