"""Watching a model: attention weights and outputs of every layer of one forward pass, whatever class it is.

A function mode sees the softmax, or the fused kernel, of whichever attention is running; nothing of the class is asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from visionpos.retrofit.ports import Port

Key = tuple[int, int]
"""(number of the attention, which of its softmaxes)."""
Visit = Callable[[Key, Tensor], None]
Seen = Callable[[int], Tensor]
Turn = Callable[[int, Tensor], Tensor]
"""From (number of the attention, q or k `[b, heads, n, head_dim]`) to what it is turned into."""

_SOFTMAX = (torch.softmax, Tensor.softmax, functional.softmax)
_FUSED = functional.scaled_dot_product_attention


@dataclass(slots=True, eq=False)
class Passed:
    """What one forward pass gave.

    Args:
        weights: attention `[..., n, m]` of every softmax; empty where they were handed to a visitor.
        blocks: outputs of every block.
        end: the model's features.
        peak: most bytes of tensors held here.
    """

    weights: dict[Key, Tensor] = field(default_factory=dict)
    blocks: list[Tensor] = field(default_factory=list)
    end: Tensor = field(default_factory=lambda: torch.empty(0))


class Watch(TorchFunctionMode):
    """Hands every attention matrix to a visitor, and hides keys or turns q and k where it is told to.

    Args:
        ports: the attentions, see `retrofit.ports.attentions_of`.
        visit: called with (attention, softmax) and its weights.
        seen: from a number of tokens to `[n, n]`, True where a query may look at a key; everywhere when None.
        turn: turns q and k, where a fused kernel takes them.
    """

    def __init__(
        self,
        ports: list[Port],
        visit: Visit,
        *,
        seen: Seen | None = None,
        turn: Turn | None = None,
    ) -> None:
        super().__init__()
        self.ports, self.visit, self.seen, self.turn = ports, visit, seen, turn
        self.within: list[int] = []  # attentions that are running, innermost last
        self.calls: dict[int, int] = {}
        self.counts: dict[int, tuple[int, ...]] = {}
        self.turned: set[int] = set()

    @contextmanager
    def hooked(self) -> Iterator[Watch]:
        """Watch while the context lasts; hooks are gone afterwards."""
        with ExitStack() as stack:
            for number, port in enumerate(self.ports):
                before = port.holder.register_forward_pre_hook(self._enter(number), prepend=True)
                # Called after a failure too: the next pass must not believe itself inside.
                after = port.holder.register_forward_hook(self._leave, always_call=True)
                stack.callback(before.remove)
                stack.callback(after.remove)
            stack.enter_context(self)
            yield self

    def _enter(self, number: int) -> Callable[..., None]:
        def enter(_: Any, args: tuple[Any, ...]) -> None:
            self.within.append(number)
            self.calls[number] = 0
            shape = next((one.shape for one in args if isinstance(one, Tensor)), ())
            # Of rows the last is no number of tokens: channels may attend to channels.
            sides = [shape[1:2]] if len(shape) < 4 else [shape[1:3], shape[2:4]]
            self.counts[number] = tuple(math.prod(side) for side in sides)

        return enter

    def _leave(self, *_: Any) -> None:
        if self.within:
            self.within.pop()

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a function of torch; attention is run in the open."""
        named = kwargs or {}
        if self.within and func is _FUSED:
            return self._attend(*args, **named)
        if self.within and func in _SOFTMAX and self._over_keys(args, named):
            return self._weigh(func, args, named)
        return func(*args, **named)

    def _over_keys(self, args: tuple[Any, ...], named: dict[str, Any]) -> bool:
        """Return whether a softmax runs over tokens: attention between channels is none."""
        logits = args[0]
        dim = named.get("dim", args[1] if len(args) > 1 else None)
        if dim not in (-1, logits.ndim - 1) or logits.ndim < 3:
            return False
        number = self.within[-1]
        return self.ports[number].local or logits.shape[-2] in self.counts[number]

    def _weigh(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
        logits = args[0]
        hidden = self._hidden(logits)
        logits = logits if hidden is None else logits.masked_fill(hidden, -math.inf)
        weights: Tensor = func(logits, *args[1:], **named)
        self._told(weights)
        return weights

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,  # noqa: ARG002 (eval mode drops nothing)
        is_causal: bool = False,  # noqa: FBT001, FBT002 (torch's signature)
        scale: float | None = None,
        enable_gqa: bool = False,  # noqa: FBT001, FBT002
    ) -> Tensor:
        number = self.within[-1]
        if self.turn is not None:
            q, k = self.turn(number, q), self.turn(number, k)
            self.turned.add(number)
        if enable_gqa:
            k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
        wide = torch.promote_types(q.dtype, torch.float32)
        factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        logits = q.to(wide) @ k.to(wide).mT * factor
        if is_causal:
            n, m = logits.shape[-2:]
            later = torch.ones(n, m, dtype=torch.bool, device=logits.device).triu(1)
            logits = logits.masked_fill(later, -math.inf)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            logits = logits.masked_fill(~attn_mask, -math.inf)
        elif attn_mask is not None:
            logits = logits + attn_mask
        hidden = self._hidden(logits)
        logits = logits if hidden is None else logits.masked_fill(hidden, -math.inf)
        weights = torch.softmax(logits, dim=-1)
        self._told(weights)
        return weights.to(v.dtype) @ v

    def _hidden(self, logits: Tensor) -> Tensor | None:
        n, m = logits.shape[-2:]
        return None if self.seen is None or n != m else ~self.seen(n).to(logits.device)

    def _told(self, weights: Tensor) -> None:
        number = self.within[-1]
        key = (number, self.calls[number])
        self.calls[number] += 1
        self.visit(key, weights)


def tensor_of(output: Any) -> Tensor:
    """Return a module's output as one tensor: the tokens, where it gives more; branches joined, `[b, numbers]`."""
    if isinstance(output, dict):
        output = next(value for value in output.values() if isinstance(value, Tensor))
    if isinstance(output, tuple):
        output = output[0] if len(output) < 2 or not _is_tokens(output[1]) else list(output)
    if isinstance(output, list):
        return torch.cat([one.flatten(1) for one in output], dim=1)
    found: Tensor = output
    return found


def _is_tokens(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
