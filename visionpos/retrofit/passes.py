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
    """After an attention and the module around it: refuses a pass in which a port has not acted.

    A forward of the user's own may go around it, and so may whatever stands in the place of the attention, or of a part
    of it, since the encoding was attached.

    Args:
        owner: the attachment.
        path: of the attention.
        parts: key -> name of each part, or method, through which its port acts.
        placed: (name, part) of every part of the attention that carries a hook. What has taken its place since may call
            it and still add a share of its own that does not turn, as a low-rank adapter does. What has taken its hook
            over is another thing: quantisation does that. Compiled graphs, which note nothing, are checked by this
            alone.
    """

    def __init__(
        self, owner: Any, path: str, parts: dict[Any, str], placed: tuple[tuple[str, Any], ...] = ()
    ) -> None:
        self.owner, self.path, self.parts, self.placed = owner, path, parts, placed
        self.relay = Relay()  # the keys of what has acted

    def forget(self) -> None:
        """Begin a pass through the attention."""
        if not torch.compiler.is_compiling():
            self.relay.put(frozenset())

    def use(self, key: Any = None) -> None:
        """Note that a part of the port has acted."""
        if not torch.compiler.is_compiling():
            self.relay.put((self.relay.get() or frozenset()) | {key})

    def __call__(self, module: Any, args: tuple[Any, ...], output: Any) -> None:  # noqa: ARG002 (torch's signature)
        """Check that all have."""
        if self.owner.idle:
            return
        if self.placed:
            self._check_placed(module)
        if torch.compiler.is_compiling():
            return
        acted = self.relay.get() or frozenset()
        missing = dict.fromkeys(name for key, name in self.parts.items() if key not in acted)
        if missing and not any(map(_is_compiled, module.modules())):
            last = self.path.rpartition(".")[2]
            inner = getattr(module, last, None)  # of the module around the attention
            raise PositionError(
                f"{self.path} is a {type(module if inner is None else inner).__name__} that ran without "
                f"{' and '.join(missing)}, where the encoding acts; it would do nothing there. Let its forward use "
                "them as timm's class does, replace parts before attach, or detach."
            )

    def _check_placed(self, module: Any) -> None:
        """Refuse a part in whose place another stands, wrappers that hand on what they get aside."""
        for name, part in self.placed:
            now = module
            for step in name.split("."):
                now = getattr(now, step, None)
            if now is None:  # of the module around the attention, which has no such part
                continue
            while now is not part and not self._acts_on(now):
                inner = [
                    getattr(now, wrap)
                    for wrap in _WRAPS
                    if wrap in now.__dict__.get("_modules", {})
                ]
                if not inner:
                    raise PositionError(
                        f"{self.path}.{name} is a {type(now).__name__} since the encoding was attached; what it adds "
                        "would not turn. Adapt or fuse first and attach then."
                    )
                now = inner[0]

    def _acts_on(self, part: Any) -> bool:
        """Return whether a part carries a hook of this port."""
        hooks = getattr(part, "_forward_hooks", {}).values()
        return any(getattr(hook, "used", None) is self for hook in hooks)


def _is_compiled(module: Any) -> bool:
    """Return whether a module runs as a graph of its own, which notes nothing: compile() or torch.compile."""
    return (
        module._compiled_call_impl is not None  # noqa: SLF001 (no public name)
        or "_orig_mod" in module._modules  # noqa: SLF001 (of an OptimizedModule)
        or hasattr(module.forward, "_torchdynamo_orig_callable")
    )


# Where wrappers that change nothing keep what they wrap: torch.compile, checkpointing, FSDP.
_WRAPS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


class FreshHook:
    """Before an attention and the module around it: begins a pass of its port."""

    def __init__(self, used: UsedHook) -> None:
        self.used, self.owner = used, used.owner

    def __call__(self, module: Any, args: tuple[Any, ...]) -> None:  # noqa: ARG002 (torch's signature)
        """Forget the pass before."""
        self.used.forget()


class ActedHook:
    """Beside a hook that acts without telling, on the same module: notes that it has."""

    def __init__(self, used: UsedHook, key: Any = None) -> None:
        self.used, self.owner, self.key = used, used.owner, key

    def __call__(self, *_: Any) -> None:
        """Note it."""
        self.used.use(self.key)


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
