"""Model parts: what detectors on models have in common: modes, the rotary module, names of position weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from visionpos.audit.detectors.finding import UnfitError
from visionpos.audit.result import Found
from visionpos.retrofit.rope import own_rope
from visionpos.retrofit.seams import class_row
from visionpos.retrofit.tables import tables_of

ALIKE = ((14, 14), (7, 28))


@contextmanager
def quiet(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode, and every module of it back into its own afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training


def rope_of(model: nn.Module) -> Any:
    """Return the model's own rotary module.

    Raises:
        UnfitError: if it has none that is known.
    """
    rope = None if class_row(model) is None else own_rope(model)
    if rope is None or not hasattr(rope, "get_embed"):
        raise UnfitError("it has no rotary encoding of its own")
    return rope


def position_names(model: nn.Module) -> list[str]:
    """Return the names of all parameters that hold positions: tables, networks, learned frequencies, attachments."""
    paths = [table.path for table in tables_of(model)]
    found = class_row(model)
    paths += [] if found is None or found[1].rope is None else [found[1].rope]
    paths.append("visionpos")
    return [
        name
        for name, _ in model.named_parameters()
        if any(name == path or name.startswith(f"{path}.") for path in paths)
    ]


def table_of(rope: Any, sides: tuple[int, int]) -> Tensor:
    """Return the sines and cosines of a rotary module for (rows, columns), as one tensor."""
    given = rope.get_embed(sides)
    return torch.cat(given, dim=-1) if isinstance(given, (tuple, list)) else given


def worst_of(said: Sequence[Found]) -> Found:
    """Return the finding that matters most."""
    return max(said, key=lambda one: (one.alarm, one.value or 0.0))
