"""Fields: the values of a frozen spec held against what its class declares, once, for every spec.

A dataclass instance enters; nothing leaves, or a refusal that names the field. Ranges are the spec's own business.
"""

from __future__ import annotations

import numbers
import operator
import sys
import types
from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

import torch

from visionpos.errors import PositionError

_LARGEST = sys.float_info.max


def check_fields(spec: Any) -> None:
    """Refuse a spec with a field that is not what its class declares; lists become tuples, numpy's numbers Python's.

    A whole number in the place of a float becomes one: 512 makes the parameter that 512.0 makes. A Fraction stays exact
    where one is declared; a float takes it only if it holds the same number. NaN and infinity are no numbers, True is
    no number, 3.0 is no whole number, and a word outside a `Literal` is refused with the words that are known.

    Args:
        spec: a dataclass instance, while it is being made.

    Raises:
        PositionError: naming the field, its value and what is required.

    Example:
        >>> import dataclasses
        >>> @dataclasses.dataclass(frozen=True)
        ... class Ladder:
        ...     theta: float
        >>> check_fields(Ladder(float("nan")))
        Traceback (most recent call last):
            ...
        visionpos.errors.PositionError: theta is nan; it must be a finite number.
    """
    if torch.compiler.is_compiling():
        return  # a spec made inside a graph is made by our own code
    kind: Any = type(spec)
    for name, hint in _declared(kind).items():
        value = getattr(spec, name)
        settled = _settled(value, hint)
        if settled is not value:
            object.__setattr__(spec, name, settled)
        if not _fits(settled, hint):
            raise PositionError(f"{name} is {value!r}; it must be {in_words(hint)}.")


def check_choice(name: str, value: object, allowed: tuple[object, ...]) -> None:
    """Refuse a value that is none of the allowed ones.

    Raises:
        PositionError: naming the argument, its value and the choices.
    """
    # By equality, not by hash: whatever a caller passes gets an answer.
    if not any(type(value) is type(choice) and value == choice for choice in allowed):
        raise PositionError(
            f"{name} is {value!r}; it must be one of {', '.join(map(repr, allowed))}."
        )


def check_kind(name: str, value: object, kind: type) -> None:
    """Refuse what is not of a class: a name, or a mapping of its fields.

    Raises:
        PositionError: naming the argument, its value and the class.
    """
    if not isinstance(value, kind):
        raise PositionError(
            f"{name} is {value!r}; a {kind.__name__} is required. Write {kind.__name__}(...) with its fields."
        )


@lru_cache(maxsize=256)
def _declared(kind: Any) -> dict[str, Any]:
    """Return field -> type of a dataclass, without its class variables."""
    hints = get_type_hints(kind)
    return {
        name: hint
        for name, hint in hints.items()
        if get_origin(hint) is not ClassVar and name in kind.__dataclass_fields__
    }


def _settled(value: Any, hint: Any) -> Any:
    """Return lists as tuples, so that a spec stays hashable, numpy's numbers as Python's, and floats as floats."""
    if isinstance(value, (list, tuple)):
        inner = tuple(
            _settled(item, part) for item, part in zip(value, _parts(hint, len(value)), strict=True)
        )
        same = isinstance(value, tuple) and all(a is b for a, b in zip(inner, value, strict=True))
        return value if same else inner
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return value
    choices = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if isinstance(value, numbers.Rational):
        return _settled_ratio(value, choices)
    return float(value)


def _settled_ratio(value: Any, choices: tuple[Any, ...]) -> Any:
    """Return a whole number or a Fraction as the field holds it, and never another number."""
    whole = operator.index(value) if isinstance(value, numbers.Integral) else None
    if whole is not None and int in choices:
        return whole
    if Fraction in choices:
        return Fraction(value)
    exact = value if whole is None else whole
    if float in choices and abs(exact) <= _LARGEST and (whole is not None or float(exact) == exact):
        return float(exact)
    return exact


def _parts(hint: Any, count: int) -> tuple[Any, ...]:
    """Return what each of `count` items of a field is declared to be; None where nothing fits."""
    choices = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    for choice in choices:
        inner = get_args(choice) if get_origin(choice) is tuple else ()
        if len(inner) == 2 and inner[1] is Ellipsis:
            return (inner[0],) * count
        if inner and len(inner) == count:
            return inner
    return (None,) * count


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a value is of a declared type."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return any(type(value) is type(word) and value == word for word in inner)
    if origin in (Union, types.UnionType):
        return any(_fits(value, choice) for choice in inner)
    if origin is tuple:
        return isinstance(value, tuple) and _fits_items(value, inner)
    return hint is Any or _fits_plain(value, origin or hint)


def _fits_items(values: tuple[Any, ...], hints: tuple[Any, ...]) -> bool:
    """Return whether the items of a tuple are of the declared types."""
    if len(hints) == 2 and hints[1] is Ellipsis:
        return all(_fits(value, hints[0]) for value in values)
    return len(values) == len(hints) and all(map(_fits, values, hints))


def _fits_plain(value: Any, kind: Any) -> bool:
    """Return whether a value is of one class; True is no number, and a number is finite."""
    if kind in (int, float) and isinstance(value, bool):
        return False
    if kind is int:
        return isinstance(value, (int, torch.SymInt))
    if kind is float:
        return isinstance(value, (int, float)) and abs(value) <= _LARGEST  # NaN compares false
    return value is None if kind is None else isinstance(value, kind)


_WORDS = {
    None: "None",
    type(None): "None",
    int: "a whole number",
    float: "a finite number",
    Fraction: "a whole number or a Fraction",
    bool: "True or False",
    str: "a text",
}


def in_words(hint: Any) -> str:
    """Return a declared type in words."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return f"{'one of ' if len(inner) > 1 else ''}{', '.join(map(repr, inner))}"
    if origin in (Union, types.UnionType):
        return " or ".join(map(in_words, inner))
    if origin is tuple:
        if len(inner) == 2 and inner[1] is Ellipsis:
            return f"a tuple ({in_words(inner[0])} each)"
        return f"({', '.join(map(in_words, inner))})"
    if origin in (list, Sequence, Iterable):
        return f"a sequence ({in_words(inner[0])} each)"
    name = str(getattr(origin or hint, "__name__", origin or hint))
    return _WORDS.get(hint, f"{'an' if name[0] in 'AEIOU' else 'a'} {name}")
