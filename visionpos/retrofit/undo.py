"""Undo: a change of a model that happens wholly or not at all."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

# Containers that a module changes in place; hooks are not among them, their handles hold the dictionaries themselves.
_KEPT = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


@contextmanager
def undoing(model: nn.Module) -> Iterator[None]:
    """Give every attribute, parameter and buffer of a model back if the body raises.

    What a name stands for is kept, not the numbers in it: the body may put other tensors into the model, and must not
    write into those that are there.
    """
    before = {module: _state(module) for module in model.modules()}
    try:
        yield
    except BaseException:
        for module, (attributes, containers) in before.items():
            for name in set(module.__dict__) - set(attributes):
                del module.__dict__[name]
            module.__dict__.update(attributes)
            for name, content in containers.items():
                live = module.__dict__[name]
                live.clear()
                live.update(content)
        raise


def _state(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (name -> attribute, name -> copy of a container that the module changes in place)."""
    attributes = dict(module.__dict__)
    return attributes, {name: attributes[name].copy() for name in _KEPT if name in attributes}
