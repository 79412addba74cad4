"""Sources: what the state dict of a published module holds, found by name and checked, for encodings that load one.

A state dict and the names that sources give to one thing enter; the tensor leaves, or a refusal that says why.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from visionpos.errors import PositionError
from visionpos.geometry.grid import is_whole
from visionpos.geometry.relative import relative_index

if TYPE_CHECKING:
    from torch import Tensor

    from visionpos.geometry.grid import Grid

M = TypeVar("M", bound=nn.Module)


def sides(name: str, sides_hw: Any, *, axes: int = 2) -> tuple[int, ...]:
    """Return the sides of a trained window, checked.

    Raises:
        PositionError: unless they are `axes` whole numbers of at least 1.
    """
    listed = isinstance(sides_hw, (tuple, list)) and len(sides_hw) == axes
    if not listed or not all(map(is_whole, sides_hw)):
        raise PositionError(
            f"{name} is {sides_hw!r}; {axes} whole numbers of at least 1, ordered (t,) y, x, are required."
        )
    return tuple(map(operator.index, sides_hw))


def start(weight: Tensor, std: float, generator: torch.Generator | None) -> None:
    """Fill a weight with truncated normal start values, or with zeros where std is 0."""
    if std:
        torch.nn.init.trunc_normal_(weight, std=std, generator=generator)
    else:
        torch.nn.init.zeros_(weight)


def checked_state(state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return a source's state dict, once it is one: texts to anything, for a whole model may hold more than tensors.

    Raises:
        PositionError: if it is none.
    """
    given: Any = state
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise PositionError(
            f"state is {type(state).__name__}; a state dict, name to tensor, is required. Pass module.state_dict(), or "
            "the dict that a file was loaded to."
        )
    return state


def _tensor(state: Mapping[str, Tensor], key: str) -> Tensor:
    """Return an entry of a source's state dict, which must be a tensor."""
    value: Any = state[key]
    if not isinstance(value, torch.Tensor):
        raise PositionError(
            f"state holds {type(value).__name__} at {key}; a tensor is required. Pass the part of the checkpoint that "
            "holds the weights."
        )
    return value


def source_entry(state: Mapping[str, Tensor], *names: str) -> Tensor | None:
    """Return the one entry of a source's state dict that goes by one of these names, or None.

    Args:
        state: of one module, or of a model that has one such module; keys may carry a path before the name.
        names: the names that sources give to one and the same thing.

    Raises:
        PositionError: if several entries match: a bias a layer is not one bias.

    Example:
        >>> source_entry({"attn.logit_scale": torch.ones(1)}, "logit_scale", "tau")
        tensor([1.])
    """
    ends = tuple(f".{name}" for name in names)
    keys = [key for key in checked_state(state) if key in names or key.endswith(ends)]
    if len(keys) > 1:
        raise PositionError(
            f"state holds {len(keys)} entries named {names[0]}, {keys[0]} first; one module takes one. Pass the state "
            "dict of a single attention module."
        )
    return _tensor(state, keys[0]) if keys else None


def required_entry(state: Mapping[str, Tensor], *names: str, ranks: tuple[int, ...] = ()) -> Tensor:
    """Return `source_entry`, which must be there.

    Args:
        state: as in `source_entry`.
        names: likewise.
        ranks: how many axes the entry may have; any number when empty.

    Raises:
        PositionError: naming what was looked for and what there is.
    """
    found = source_entry(state, *names)
    if found is None:
        raise PositionError(
            f"state has no entry {' or '.join(names)}, only {', '.join(sorted(state)[:6]) or 'nothing'}; pass the "
            "state dict of the attention module that holds it."
        )
    if ranks and found.ndim not in ranks:
        raise PositionError(
            f"state holds {names[0]} of shape {tuple(found.shape)}; {' or '.join(map(str, ranks))} axes are required. "
            "Pass the entry as its source wrote it."
        )
    return found


def check_form(value: Tensor, name: str, form: tuple[int | str, ...]) -> None:
    """Refuse an entry of a source that has not the sizes it is known to have.

    Args:
        value: the entry.
        name: of the argument or key.
        form: its sizes; a text stands for any, and the same text for the same size.

    Raises:
        PositionError: naming the entry, its shape and the form.

    Example:
        >>> check_form(torch.zeros(2, 5, 5), "freqs", (2, "n", "n"))
    """
    shape: tuple[int, ...] = tuple(value.shape)
    named = dict(zip(form, shape, strict=False))
    if len(shape) != len(form) or shape != tuple(
        size if isinstance(size, int) else named[size] for size in form
    ):
        raise PositionError(
            f"{name} has shape {shape}; ({', '.join(map(str, form))}) is required. Pass the entry as its source stores "
            "it, of a model of these sizes."
        )


def check_index(index: Tensor | None, grid: Grid, *, class_rows: bool = False) -> None:
    """Refuse a stored relative index that numbers the pairs of this grid in another way than `relative_index`.

    An index of another size belongs to another window and says nothing: it is left behind, and rebuilt at need.

    Args:
        index: a source's buffer, any shape, or None.
        grid: the window that the stored table belongs to.
        class_rows: whether row and column 0 belong to a class token, with the last three numbers.

    Raises:
        PositionError: if the numbers differ: the table's rows would be read in another order.
    """
    tokens = grid.size + class_rows
    if index is None or index.numel() != tokens * tokens or index.is_meta:
        return
    cells = index.reshape(tokens, tokens)[class_rows:, class_rows:].cpu()
    if not torch.equal(cells.to(torch.int64), relative_index(grid)):
        raise PositionError(
            f"state holds a relative index from {int(cells.min())} to {int(cells.max())} that is not the row-major "
            f"query-minus-key index of window {grid.shape[1:]}; the table's rows would be misread. Check the order of "
            "the window's sides, or drop the buffer if the table alone is right."
        )


def renamed(state: Mapping[str, Tensor], tails: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the entries of a source's state dict that go by known names, under ours; others are left out.

    Args:
        state: of one module, or of a model around it; keys may carry a path before the name.
        tails: end of a source's key -> our name. Several ends may lead to one name: copies of one tensor.

    Raises:
        PositionError: if two entries of one name differ.

    Example:
        >>> renamed(
        ...     {"a.proj.weight": torch.ones(1), "b": torch.zeros(1)}, {"proj.weight": "weight"}
        ... )
        {'weight': tensor([1.])}
    """
    own: dict[str, Tensor] = {}
    for key in checked_state(state):
        parts = key.split(".")
        ends = [".".join(parts[start:]) for start in range(len(parts))]
        name = next((tails[end] for end in ends if end in tails), None)
        if name is None:
            continue
        value = _tensor(state, key)
        if name in own and not torch.equal(own[name], value):
            raise PositionError(
                f"{key} differs from the other copy that the state dict holds; the two must be equal. Load a "
                "checkpoint whose copies were not trained apart."
            )
        own[name] = value
    return own


def filled(module: M, state: Mapping[str, Tensor], *, source: str) -> M:
    """Return the module with every entry of its state copied from a source, by the module's own names.

    Args:
        module: the encoding to fill, in place.
        state: its state-dict key -> value; shapes must agree, dtypes are converted.
        source: whose weights they are, for error messages.

    Raises:
        PositionError: naming the missing keys, the keys too many, or the key whose shape differs.
    """
    own = module.state_dict()
    missing, extra = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    if missing or extra:
        raise PositionError(
            f"the state dict of {source} lacks {missing or 'nothing'} and has {extra or 'nothing'} too many for "
            f"{type(module).__name__}; exactly one entry a weight is required. Pass the entries of this module, and a "
            "spec that describes them."
        )
    for key, value in own.items():
        if value.shape != _tensor(state, key).shape:
            raise PositionError(
                f"{key} of {source} has shape {tuple(state[key].shape)}; {tuple(value.shape)} is required. Pass the "
                "Dims and the spec of the model that wrote it."
            )
    module.load_state_dict(dict(state))
    return module
