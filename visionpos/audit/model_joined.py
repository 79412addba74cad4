"""Tokens in another order inside the attentions of a model, and put back behind them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from visionpos.retrofit.ports import Port, attentions_of
from visionpos.retrofit.seams import row_of


def behind(order: Tensor, tokens: int) -> Tensor:
    """Return an order of patches with the prefix tokens before them as they are."""
    front = tokens - len(order)
    return torch.cat([torch.arange(front), order + front])


def joinable(port: Port) -> bool:
    """Return whether an attention tells its own grid, and its tokens can change places inside it."""
    seams = port.seams
    given = seams.grid.kind in ("argument", "called", "unrolled") or seams.grid.queries != 1
    # One that tells its own grid and refuses pools its queries, whose outputs stand elsewhere.
    own = port.refusal is None if port.local else bool(map_kind(port))
    # One that is told the sides of a map of rows cuts its windows itself.
    cuts = row_of(port.model).layout in ("nlc_size", "nlc_hw")
    taken = any(tap.at.startswith("@") for tap in seams.taps)
    return own and not (given or cuts or taken or strided(port.holder))


def strided(module: nn.Module) -> bool:
    """Return whether something in an attention has a stride, so that queries, keys or answers have other grids."""
    strides = [getattr(part, "stride", 1) for part in module.modules()]
    return any(side != 1 for one in strides for side in (one if isinstance(one, tuple) else (one,)))


def map_kind(port: Port) -> str:
    """Return how the map lies that an attention takes: "nhwc" or "nchw", "" where it takes rows."""
    kind = str(port.seams.grid.kind)
    if kind == "call":  # its block cuts the map, and hands it on as it lies
        kind = row_of(port.model).layout
    return kind if kind in ("nhwc", "nchw") else ""


@contextmanager
def joined(model: Any, order: Callable[[int], Tensor]) -> Iterator[None]:
    """Let every attention that can be joined get its tokens in another order, and put its outputs back.

    Args:
        model: a copy.
        order: from a number of patch tokens to their order.
    """
    with ExitStack() as stack:
        for port in attentions_of(model):
            if not joinable(port):
                continue
            enter, leave = _turners(order, port.prefix, map_kind(port))
            before = port.holder.register_forward_pre_hook(enter, with_kwargs=True)
            after = port.holder.register_forward_hook(leave)
            stack.callback(before.remove)
            stack.callback(after.remove)
        yield


def _turners(order: Callable[[int], Tensor], front: int, maps: str) -> tuple[Any, Any]:
    def enter(_: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        x = args[0]
        count = _rows(x, maps)
        whole = behind(order(count - front), count).to(x.device)

        def also(value: Any) -> Any:
            if isinstance(value, Tensor) and value.shape[-2:] == (count, count):
                return value[..., whole, :][..., whole]
            return value

        rest = [also(value) for value in args[1:]]
        return (_put(x, whole, maps), *rest), {key: also(value) for key, value in named.items()}

    def leave(_: Any, __: Any, output: Tensor) -> Tensor:
        count = _rows(output, maps)
        return _put(
            output, torch.argsort(behind(order(count - front), count)).to(output.device), maps
        )

    return enter, leave


def _rows(x: Tensor, maps: str) -> int:
    if maps == "nchw" and x.ndim == 4:
        return x.shape[2] * x.shape[3]
    return x.shape[1] * x.shape[2] if x.ndim == 4 else x.shape[1]


def _put(x: Tensor, order: Tensor, maps: str) -> Tensor:
    if x.ndim == 3:
        return x[:, order]
    if maps == "nchw":
        return x.flatten(2)[..., order].reshape(x.shape)
    return x.flatten(1, 2)[:, order].reshape(x.shape)
