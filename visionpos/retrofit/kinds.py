"""Kinds: what an argument must be; refused by name, before anything is done with it."""

from __future__ import annotations

from typing import Any

from torch import nn

from visionpos.errors import PositionError
from visionpos.geometry.fields import in_words


def check_kinds(name: str, value: Any, *kinds: Any) -> None:
    """Refuse a value that is of none of these classes; None stands for itself, and True is no number.

    Raises:
        PositionError: naming the argument, its value and what is required.

    Example:
        >>> check_kinds("partial", "yes", bool)
        Traceback (most recent call last):
            ...
        visionpos.errors.PositionError: partial is 'yes'; it must be True or False. Pass one.
    """
    for kind in kinds:
        true_or_false = isinstance(value, bool) and kind is not bool
        if value is kind is None or (kind and isinstance(value, kind) and not true_or_false):
            return
    words = " or ".join(in_words(kind) for kind in kinds)
    raise PositionError(f"{name} is {value!r:.60}; it must be {words}. Pass one.")


def check_model(model: Any) -> None:
    """Refuse what is no module.

    Raises:
        PositionError: naming what it is.
    """
    if not isinstance(model, nn.Module):
        raise PositionError(
            f"model is {type(model).__name__}; a timm model is required. Create one with timm.create_model, or with "
            "retrofit.create, and pass it."
        )
