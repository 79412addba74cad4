"""Attribute paths: what the seam table's dotted names stand for in a model, and the sides that its values state."""

from __future__ import annotations

import math
import operator
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from visionpos.errors import PositionError

if TYPE_CHECKING:
    from collections.abc import Iterator

Sides = tuple[int, int]
LARGEST = 1 << 24  # pixels a side


def find(owner: Any, path: str) -> Any:
    """Return the value at an attribute path, None where an attribute is missing or empty."""
    for name in path.split("."):
        owner = getattr(owner, name, None)
        if owner is None:
            return None
    return owner


def place(model: nn.Module, path: str, value: Any) -> None:
    """Put a value at an attribute path."""
    parent, _, name = path.rpartition(".")
    setattr(find(model, parent) if parent else model, name, value)


def matches(model: nn.Module, pattern: str) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of every attribute path that fits; `*` ranges over names of submodules and parameters."""
    for alternative in pattern.split("|"):
        found: list[tuple[str, Any]] = [("", model)]
        for part in alternative.split("."):
            found = [
                (f"{path}.{name}".lstrip("."), getattr(owner, name))
                for path, owner in found
                for name in _names(owner, part)
            ]
        yield from ((path, value) for path, value in found if value is not None)


def _names(owner: Any, part: str) -> list[str]:
    """Return the attribute names of one path segment."""
    if "*" not in part:
        return [part] if hasattr(owner, part) else []
    if not isinstance(owner, nn.Module):
        return []
    names = [name for name, _ in owner.named_children()]
    names += [name for name, _ in owner.named_parameters(recurse=False)]
    return [name for name in names if fnmatchcase(name, part)]


def sides_of(value: Any) -> tuple[int, int] | None:
    """Return the two sides that a number, a pair, a triple (frames first) or a patch module states, None if none."""
    if value is None:
        return None
    if isinstance(value, nn.Module):
        grid = getattr(value, "grid_size", None)
        image, patch = (sides_of(getattr(value, name, None)) for name in ("img_size", "patch_size"))
        if not hasattr(value, "grid_size") and image is not None and patch is not None:
            return image[0] // patch[0], image[1] // patch[1]
        return sides_of(grid)
    if isinstance(value, int):
        return value, value
    pair = tuple(int(side) for side in value)[-2:]
    return (pair[0], pair[1]) if len(pair) == 2 else None


def counted(sides: Any) -> tuple[Any, ...]:
    """Return sizes as numbers where torch.jit.trace has made tensors of them; a traced model serves one size."""
    return tuple(int(side) if isinstance(side, Tensor) else side for side in sides)


def whole_sides(size_hw: Any) -> Sides | None:
    """Return a size that is two whole numbers above 0 and not absurd, else None."""
    try:
        # Whole numbers of any kind; int() would cut 64.5 to 64 without a word.
        height, width = (operator.index(side) for side in size_hw)
    except (TypeError, ValueError):
        return None
    return (height, width) if min(height, width) > 0 and max(height, width) <= LARGEST else None


def divided(sides: Sides, floor: Sides, ceil: Sides) -> Sides:
    """Return sides divided by steps, rounded down, then by further steps, rounded up."""
    height, width = sides[0] // floor[0], sides[1] // floor[1]
    return -(-height // ceil[0]), -(-width // ceil[1])


def steps_of(model: Any, rule: dict[str, Any], numbers: list[int]) -> tuple[Sides, Sides]:
    """Return what a rule divides the image by: the products of `floor` and of `ceil`.

    Args:
        model: whose attributes a factor may name.
        rule: from the table.
        numbers: in the path that the rule is for, the stage first.
    """
    floor, ceil = (
        [_factor(model, factor, numbers) for factor in rule.get(word, ())]
        for word in ("floor", "ceil")
    )
    return _product(floor), _product(ceil)


def _product(steps: list[Sides]) -> Sides:
    return math.prod(step[0] for step in steps), math.prod(step[1] for step in steps)


def _factor(model: Any, factor: Any, numbers: list[int]) -> Sides:
    """Return what one factor of `floor` or `ceil` divides by: a number, an attribute, or a power of the stage."""
    if isinstance(factor, dict):
        power = factor["grow"] ** (numbers[0] - factor.get("less", 0))
        return power, power
    found = sides_of(find(model, factor) if isinstance(factor, str) else factor)
    if found is None:
        raise PositionError(
            f"model has no {factor}, which timm's class has; it cannot be moved. Create it with timm.create_model."
        )
    return found
