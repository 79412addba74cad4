"""Taps: q and k of a model's first attention, where they leave its projections and where they meet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from visionpos.audit.detectors.finding import UnfitError
from visionpos.retrofit.ports import ports_of


class _Meeting(TorchFunctionMode):
    """Keeps q and k of the first fused attention."""

    def __init__(self) -> None:
        super().__init__()
        self.met: tuple[Tensor, Tensor] | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.scaled_dot_product_attention and self.met is None:
            given = dict(zip(("query", "key"), args[:2], strict=False)) | (kwargs or {})
            self.met = (given["query"].detach(), given["key"].detach())
        return func(*args, **(kwargs or {}))


def norms_at_first_attention(model: nn.Module, run: Callable[[], Any]) -> tuple[Tensor, Tensor]:
    """Return the sorted lengths of the vectors of q and k before and after whatever turns them.

    Args:
        model: in eval mode.
        run: a forward pass of it.

    Raises:
        UnfitError: if the attention hands q and k out nowhere, or does not use the fused kernel.
    """
    ports = ports_of(model)
    sides = ports[0].sides if ports else ()
    if len(sides) != 2:
        raise UnfitError("its first attention does not hand out q and k one by one")
    left: list[Tensor] = []
    hooks = [
        side.register_forward_hook(lambda _m, _i, out: left.append(out.detach()), prepend=True)
        for side in sides
    ]
    try:
        with _Meeting() as meeting:
            run()
    finally:
        for hook in hooks:
            hook.remove()
    if meeting.met is None or len(left) < 2:
        raise UnfitError("its attention does not use the fused kernel, where q and k are seen")
    ends = [_lengths(both) for both in (tuple(left[:2]), meeting.met)]
    if ends[0].shape != ends[1].shape:
        raise UnfitError("q and k come to their product in other shapes than they are handed out")
    if all(torch.equal(a, b) for a, b in zip(left[:2], meeting.met, strict=True)):
        raise UnfitError("nothing turns its q and k")
    return ends[0], ends[1]


def _lengths(both: tuple[Tensor, ...]) -> Tensor:
    """Return the lengths of all vectors, sorted: layouts differ in the order of heads and tokens alone."""
    return torch.cat(
        [torch.linalg.vector_norm(one.double(), dim=-1).flatten().sort().values for one in both]
    )
