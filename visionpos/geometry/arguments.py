"""Arguments: the values of a call held against what the function declares, once, for every public function.

A function enters and leaves with a check in front: what is of another kind is refused by name, before anything is
computed. Ranges, shapes and counts are the function's own business.
"""

from __future__ import annotations

import numbers
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, update_wrapper
from inspect import Parameter, signature
from reprlib import Repr
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch
from torch import Tensor

from visionpos.errors import PositionError
from visionpos.geometry.fields import in_words

P = ParamSpec("P")
R = TypeVar("R")

_LARGEST = 2**63 - 1  # of the whole numbers that a tensor holds
_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = 60


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function with a check in front that refuses arguments of another kind than it declares.

    A whole number serves as a float, an array of numpy as a sequence, and any sequence as a tuple of its length; True
    and text are no numbers, and text is no sequence. Ranges are for the function to check, NaN included. Compiled
    graphs leave the check out.

    Args:
        function: with annotations that can be resolved; those that cannot, and unknown kinds, are not checked.

    Example:
        >>> @checked
        ... def halved(scale: float) -> float:
        ...     return scale / 2
        >>> halved("4")
        Traceback (most recent call last):
            ...
        visionpos.errors.PositionError: scale is '4'; it must be a finite number. Pass one.
    """

    def check(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling():
            for name, value, hint in _given(function, args, kwargs):
                if not _suits(value, hint):
                    raise PositionError(
                        f"{name} is {shown(value)}; it must be {in_words(hint)}. Pass one."
                    )

    def front(*args: P.args, **kwargs: P.kwargs) -> R:
        check(args, kwargs)
        return function(*args, **kwargs)

    # In the function's own globals, which tell doctest where it was written.
    made = types.FunctionType(
        front.__code__, function.__globals__, function.__name__, None, front.__closure__
    )
    return update_wrapper(made, function)


def shown(value: object) -> str:
    """Return a value for a message: shortened, a tensor by its kind and shape.

    Example:
        >>> shown(torch.zeros(2, 3))
        'a tensor of shape (2, 3)'
    """
    if isinstance(value, (Tensor, np.ndarray)):
        kind = "a tensor" if isinstance(value, Tensor) else "an array"
        return f"{kind} of shape {tuple(value.shape)}"
    return _SHORT.repr(value)


def _given(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, value and declared kind of what a call passes; too many and unknown ones are Python's to refuse."""
    names, hints = _declared(function)
    for name, value in (*zip(names, args, strict=False), *kwargs.items()):
        if name in hints:
            yield name, value, hints[name]


@lru_cache(maxsize=512)
def _declared(function: Callable[..., Any]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the names of positional arguments, and name -> declared kind of every argument."""
    try:
        hints = get_type_hints(function)
    except NameError:  # a name that only type checkers import
        hints = {}
    places = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    parameters = signature(function).parameters.values()
    hints.pop("return", None)
    return tuple(one.name for one in parameters if one.kind in places), hints


def _suits(value: Any, hint: Any) -> bool:
    """Return whether a value can stand for what an argument declares."""
    if hint is int or hint is float:
        return _is_number(value, whole=hint is int)
    if type(value) is hint:
        return True
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return any(type(value) is type(word) and value == word for word in inner)
    if origin in (Union, types.UnionType):
        return any(_suits(value, choice) for choice in inner)
    kind = origin or hint
    if kind in (tuple, list, Sequence, Iterable):
        return _is_listed(value, kind) and _suits_items(value, kind, inner)
    return _is_of(value, kind)


def _is_number(value: Any, *, whole: bool) -> bool:
    """Return whether a value counts, or measures; tensors of no dimension do, by their dtype."""
    if type(value) is int:
        return abs(value) <= (_LARGEST if whole else sys.float_info.max)
    if isinstance(value, (bool, np.bool_)):
        return False
    if isinstance(value, (Tensor, np.ndarray)):
        return value.ndim == 0 and _holds_numbers(value, whole=whole)
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return not whole or isinstance(value, torch.SymInt)
    if isinstance(value, numbers.Integral):
        return abs(int(value)) <= (_LARGEST if whole else sys.float_info.max)
    return not whole and isinstance(value, numbers.Real)


def _holds_numbers(value: Tensor | np.ndarray[Any, Any], *, whole: bool) -> bool:
    """Return whether a tensor or array holds numbers; arrays measure alone, torch counts by none of them."""
    if isinstance(value, np.ndarray):
        return not whole and value.dtype.kind in "iuf"
    if value.is_floating_point():
        return not whole
    return value.dtype != torch.bool and not value.is_complex()


def _is_listed(value: Any, kind: Any) -> bool:
    """Return whether a value is a line of items: text and mappings are none, nor is a tensor a sequence."""
    if isinstance(value, (str, bytes, Mapping)):
        return False
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return isinstance(value, Iterable if kind is Iterable else Sequence)


def _suits_items(values: Any, kind: Any, hints: tuple[Any, ...]) -> bool:
    """Return whether the items of a line are what is declared; those of an iterator stay unseen, arrays are numbers."""
    if not hints or not isinstance(values, Sequence):
        return True
    if kind is tuple and hints[-1] is not Ellipsis:
        return len(values) == len(hints) and all(map(_suits, values, hints))
    if isinstance(hints[0], type):  # thousands of items of one class, at the speed of isinstance
        return all(type(value) is hints[0] or _suits(value, hints[0]) for value in values)
    return all(_suits(value, hints[0]) for value in values)


def _is_of(value: Any, kind: Any) -> bool:
    """Return whether a value is of a class; type variables, Any and protocols are not asked."""
    if not isinstance(kind, type):
        return kind is not None or value is None
    return bool(getattr(kind, "_is_protocol", False)) or isinstance(value, kind)
