"""Bias ports: what adds an encoding's bias to attention logits; one class a kind of the table.

A method that makes logits' bias is widened by giving its object a class of its own, made from the object's class: keys,
isinstance and the object stay, and copies and pickles find the class again by its base.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from visionpos.retrofit.port_rows import Lattice

if TYPE_CHECKING:
    from torch import Tensor, nn

    from visionpos.retrofit.attachment import Attachment
    from visionpos.retrofit.lattice import Reader
    from visionpos.retrofit.passes import UsedHook

ADDED = "visionpos_biases"
WINDOW = Lattice(kind="attribute", name="window_size")


class ArgumentHook:
    """Before an attention: adds the bias to its argument."""

    def __init__(self, within: Any, name: str, index: int) -> None:
        self.within, self.owner, self.name, self.index = within, within.owner, name, index

    def __call__(
        self,
        module: Any,  # noqa: ARG002 (torch's signature)
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return the arguments with the bias in them, or None to leave them."""
        if self.owner.idle:
            return None
        bias = self.within.handed(args, kwargs).to(args[0].dtype)
        if kwargs.get(
            "is_causal"
        ):  # a kernel takes one or the other, and timm's plain form drops the mask
            bias, kwargs = _causal(bias), {**kwargs, "is_causal": False}
        if self.name in kwargs or len(args) <= self.index:
            return args, {**kwargs, self.name: _with_mask(bias, kwargs.get(self.name))}
        moved = list(args)
        moved[self.index] = _with_mask(bias, args[self.index])
        return tuple(moved), kwargs


def _causal(bias: Tensor) -> Tensor:
    """Return a bias `[..., n, n]` that lets no query see a later key."""
    n = bias.shape[-1]
    later = torch.ones(n, n, dtype=torch.bool, device=bias.device).triu(1)
    return bias.masked_fill(later, float("-inf"))


def _with_mask(bias: Tensor, mask: Tensor | None) -> Tensor:
    """Return a bias joined with a mask: what is masked stays masked."""
    if mask is None:
        return bias
    return bias.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else mask + bias


class NetworkHook:
    """After the network that makes a model's own bias: adds to it at all differences, or all pairs."""

    def __init__(self, owner: Attachment, reader: Reader, group: int, *, pairs: bool) -> None:
        self.owner, self.reader, self.group, self.pairs = owner, reader, group, pairs

    def __call__(self, module: Any, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        """Return the network's output with the bias added, or None to leave it."""
        if self.owner.idle:
            return None
        sites, encoding = self.reader.sites(module, args, {}), self.owner.encodings[self.group]
        device = output.device
        rows = (
            encoding(sites.grid, device=device).flatten(1)
            if self.pairs
            else encoding.distinct(sites.grid, device=device)
        )
        moved: Tensor = output + (rows * self.owner.present).mT.reshape(output.shape).to(
            output.dtype
        )
        return moved


class Extra:
    """What one attachment adds to what a method returns."""

    def __init__(
        self, owner: Attachment, reader: Reader, layer: int, group: int, used: UsedHook
    ) -> None:
        self.owner, self.reader, self.layer, self.group = owner, reader, layer, group
        self.used = used

    def added(self, module: Any, bias: Tensor) -> Tensor:
        """Return the bias `[(1,) heads, n, m]` with the attachment's added; itself while it is idle."""
        if self.owner.idle:
            return bias
        self.used.use()
        sites = self.reader.sites(module, (), {})
        return bias + self.owner.biases(sites, self.layer, self.group, bias.device).to(bias.dtype)


@cache
def _widened(base: Any, method: str) -> type[nn.Module]:
    """Return a subclass whose method adds what the object's attachments give."""
    original = getattr(base, method)

    def added(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        bias: Tensor = original(self, *args, **kwargs)
        for extra in getattr(self, ADDED):
            bias = extra.added(self, bias)
        return bias

    def reduced(self: Any, protocol: Any) -> tuple[Any, ...]:  # noqa: ARG001 (pickle's signature)
        return _remade, (base, method), self.__dict__

    names = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
    }
    return type(
        base.__name__,
        (base,),
        {**names, method: added, "__reduce_ex__": reduced, "_visionpos_base": (base, method)},
    )


def _remade(base: Any, method: str) -> Any:
    """Return an empty object of a widened class, for copies and pickles."""
    made = _widened(base, method)
    return made.__new__(made)


def widen(module: Any, method: str, extra: Extra) -> None:
    """Let a module's method add what an attachment gives."""
    if not hasattr(module, ADDED):
        base: Any = type(module)
        module.__class__ = _widened(base, method)
        setattr(module, ADDED, [])
    getattr(module, ADDED).append(extra)


def narrow(module: Any, owner: Attachment) -> None:
    """Take an attachment's part back; a module without any becomes what it was."""
    extras: list[Extra] | None = getattr(module, ADDED, None)
    if extras is None:
        return
    extras[:] = [extra for extra in extras if extra.owner is not owner]
    if not extras:
        delattr(module, ADDED)
        module.__class__ = class_of(module)


def class_of(module: Any) -> type[nn.Module]:
    """Return the class of a module, or the one that its widened class was made from."""
    base: type[nn.Module] = getattr(type(module), "_visionpos_base", (type(module),))[0]
    return base


def give_class(module: Any, new: Any) -> None:
    """Give a module another class; a method that was widened stays so."""
    widened = getattr(type(module), "_visionpos_base", None)
    module.__class__ = new if widened is None else _widened(new, widened[1])
