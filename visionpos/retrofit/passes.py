"""Passes: what belongs to one forward pass, found again when checkpointing recomputes a part of it.

A strength may move on, and the next image may have another size, before the backward pass runs blocks once more. The
input of every module around an attention bears the value of its pass; a recomputation gets the same tensor, or an
alias of it.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

from visionpos.errors import PositionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor, nn


def graph_task() -> int:
    """Return the number of the backward pass in progress, -1 outside one."""
    if torch.compiler.is_compiling():
        return -1
    return int(torch._C._current_graph_task_id())  # noqa: SLF001 (no public name; checkpoint itself relies on it)


def mark(x: Tensor, tag: str, value: Any) -> None:
    """Say what a tensor belongs to; its memory says it too, for aliases that are made in a backward pass."""
    setattr(x, tag, value)
    if not torch.compiler.is_compiling():
        setattr(_memory(x), tag, value)


def marked(x: Tensor, tag: str) -> Any:
    """Return what a tensor, or in a backward pass its memory, belongs to; None if nothing says so."""
    value = getattr(x, tag, None)
    if value is None and graph_task() != -1:
        # FSDP's hooks and re-entrant checkpointing recompute on another tensor in the memory of the input.
        value = getattr(_memory(x), tag, None)
    return value


def _memory(x: Tensor) -> Any:
    """Return the storage of a tensor, or the tensor itself where it has none (vmap)."""
    try:
        return x.untyped_storage()
    except NotImplementedError:
        return x


class Relay:
    """What one hook hands to the next within a call: a slot a thread. A copy of the model starts with empty slots."""

    def __init__(self) -> None:
        self.latest: Any = None
        self.traced = False
        self.own = threading.local()

    def put(self, value: Any) -> None:
        """Hand a value on."""
        self.latest, self.traced = value, torch.compiler.is_compiling()
        if not self.traced:
            self.own.value = value

    def get(self) -> Any:
        """Return what was handed on last, in this thread; a graph is traced in one thread, and knows no slots."""
        if torch.compiler.is_compiling() or self.traced:
            return self.latest
        return getattr(self.own, "value", None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Relay:
        return type(self)()

    def __reduce__(self) -> tuple[type[Relay], tuple[()]]:
        return (type(self), ())


class Recall(Relay):
    """A relay whose value is the recomputed pass's own while a backward pass runs, once `recall` has found it."""

    def __init__(self) -> None:
        super().__init__()
        self.again = Relay()  # (value, backward pass)

    def recall(self, x: Tensor, tag: str, now: Any) -> None:
        """Mark an input with the value of the present pass; in a backward pass take the value that it bears.

        Args:
            x: input of a module that may be recomputed.
            tag: name of the mark.
            now: the value of a forward pass.
        """
        task = graph_task()
        if task == -1:
            mark(x, tag, now)
            return
        value = marked(x, tag)
        if value is not None:
            self.again.put((value, task))

    def recalled(self) -> Any:
        """Return the value of the pass that is being recomputed; None outside a backward pass, or if it is unknown."""
        task = graph_task()
        held = None if task == -1 else self.again.get()
        return None if held is None or held[1] != task else held[0]


class UsedHook:
    """After an attention: refuses one that went around its port, as a forward of the user's own may.

    Args:
        owner: the attachment.
        path: of the attention.
        at: the parts, or the method, through which its port acts.
    """

    def __init__(self, owner: Any, path: str, at: str) -> None:
        self.owner, self.path, self.at = owner, path, at
        self.relay = Relay()  # whether the port has acted

    def use(self) -> None:
        """Note that the port has acted."""
        if not torch.compiler.is_compiling():
            self.relay.put(True)  # noqa: FBT003 (a relay hands on any value)

    def __call__(self, module: Any, args: tuple[Any, ...], output: Any) -> None:  # noqa: ARG002 (torch's signature)
        """Check that it has, and forget it."""
        if torch.compiler.is_compiling() or self.owner.idle:
            return
        if self.relay.get() is None:
            raise PositionError(
                f"{self.path} is a {type(module).__name__} that ran without {self.at}, where the encoding acts; it "
                "would do nothing there. Let its forward use them as timm's class does, or detach."
            )
        self.relay.put(None)


class PassHook:
    """Before a module around attentions: keeps the value of the pass with the module's input."""

    def __init__(self, recall: Recall, tag: str, owner: Any, now: Callable[[Any], Any]) -> None:
        self.relay, self.tag, self.owner, self.now = recall, tag, owner, now

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ARG002 (torch's signature)
        """Mark the first tensor that goes in, or read its mark."""
        if torch.compiler.is_compiling():
            return
        x = next(_tensors([*args, *kwargs.values()]), None)
        if x is not None:
            self.relay.recall(x, self.tag, self.now(self.owner))


def _tensors(values: Iterable[Any]) -> Any:
    """Yield the tensors among values, and in the lists among them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)


def keep_passes(model: nn.Module, paths: Iterable[str], hook: PassHook) -> None:
    """Register a hook on the modules at paths and on every module around them, but for the model itself."""
    around = {
        ".".join(parts[:depth])
        for parts in (path.split(".") for path in paths)
        for depth in range(1, len(parts) + 1)
    }
    for path in sorted(around - {""}):
        model.get_submodule(path).register_forward_pre_hook(hook, with_kwargs=True)
