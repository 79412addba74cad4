"""The interpreter of the seam table's `sizes`: what a model writes down about its image size, rewritten in place.

A rule names attributes by a path and says by one word what they become; `_WORDS` has the words. They know kinds of
numbers, never models.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import torch

from visionpos.errors import PositionError
from visionpos.retrofit.indices import (
    NOTED,
    absolute_differences,
    displacements,
    note_sides,
    signed_differences,
)
from visionpos.retrofit.paths import divided, steps_of
from visionpos.retrofit.seams import find, matches, sides_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from visionpos.retrofit.paths import Sides


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One change of image size.

    Args:
        model: what changes.
        base: what paths start from: the model, or one of its position modules.
        old: image (height, width) in pixels that the model serves, None if it is not known.
        new: that wanted.
    """

    model: Any
    base: Any
    old: Sides | None
    new: Sides


def rewrite(move: Move, rule: dict[str, Any]) -> None:
    """Carry out one rule: set, rebuild or call what its path names."""
    word = next(name for name in rule if name in _WORDS)
    for path, value in list(matches(move.base, rule["path"])):
        parent, _, name = path.rpartition(".")
        owner = find(move.base, parent) if parent else move.base
        numbers = [int(part) for part in path.split(".") if part.isdigit()]
        made = _WORDS[word](move, value, rule, numbers)
        if "call" in rule and not hasattr(value, rule["call"]):
            raise PositionError(
                f"this timm has no {rule['call']} for {path}; it cannot follow another size. Update timm to 1.0.31."
            )
        if "call" in rule:
            getattr(value, rule["call"])(made)
        elif isinstance(made, torch.Tensor):
            put_buffer(owner, name, made)
        elif made is not None:
            setattr(owner, name, made)


def put_buffer(owner: nn.Module, name: str, value: Tensor) -> None:
    """Give a module another tensor under the name of a buffer, as lasting as it was before."""
    if name not in owner._buffers:  # noqa: SLF001 (before timm 1.0.31 some were plain attributes)
        setattr(owner, name, value)
        return
    lasting = name not in owner._non_persistent_buffers_set  # noqa: SLF001 (torch has no other word for it)
    owner.register_buffer(name, value, persistent=lasting)
    if hasattr(owner, NOTED):
        note_sides(owner, name)


def move_patch(patch: Any, image: Sides, cut: Sides | None = None) -> None:
    """Write an image size into a module that cuts patches: whatever it keeps of size, grid and number of patches."""
    if hasattr(patch, "set_input_size"):
        patch.set_input_size(img_size=image, **({} if cut is None else {"patch_size": cut}))
        return
    conv = getattr(patch, "conv", None)
    if conv is not None and hasattr(patch, "height"):  # patches that overlap
        sizes = zip(image, conv.kernel_size, conv.stride, conv.padding, strict=True)
        grid = tuple((side + 2 * pad - kernel) // step + 1 for side, kernel, step, pad in sizes)
    else:
        step_hw = sides_of(patch.patch_size) or (1, 1)
        grid = (image[0] // step_hw[0], image[1] // step_hw[1])
    known = {
        "img_size": image,
        "grid_size": grid,
        "num_patches": grid[0] * grid[1],
        "height": grid[0],
        "width": grid[1],
        "H": grid[0],
        "W": grid[1],
    }
    for name, value in known.items():
        if hasattr(patch, name):
            setattr(patch, name, value)


def ratio(side: int, new: int, old: int) -> int:
    """Return a side in proportion to the image, refusing one that would not be whole."""
    if side * new % old:
        raise PositionError(
            f"size has a side of {new} pixels; {side} cells served {old}, and {new} gives no whole number of them. Use "
            "a multiple of the model's stride."
        )
    return side * new // old


def scale(move: Move, sides: Sides, axes: tuple[int, ...] = (0, 1)) -> Sides:
    """Return sides in proportion to the image, along the axes named; the other side as it is.

    Raises:
        PositionError: if nothing says which image the sides belong to, or a side would not be whole.
    """
    if move.old is None:
        raise PositionError(
            f"model is a {type(move.model).__name__} that does not say which image size it serves; its maps cannot be "
            "scaled. Create it with timm.create_model."
        )
    found = list(sides)
    for axis in axes:
        found[axis] = ratio(sides[axis], move.new[axis], move.old[axis])
    return found[0], found[1]


def _image(move: Move, value: Any, rule: dict[str, Any], _: list[int]) -> Any:
    return _like(value, (move.new[0] // rule["image"], move.new[1] // rule["image"]))


def _strided(move: Move, value: Any, rule: dict[str, Any], numbers: list[int]) -> Any:
    """Return the image divided by factors, rounded down at each, then by factors rounded up at each."""
    return _like(value, divided(move.new, *steps_of(move.model, rule, numbers)))


def _share(move: Move, value: Any, rule: dict[str, Any], numbers: list[int]) -> Any:
    """Return a window that is cut out of its map as often as before."""
    window = value if isinstance(value, (tuple, list)) else value.window_size
    old = sides_of(find(move.base, _numbered(rule["share"], numbers)))
    new = _strided(move, tuple(window), rule, numbers)
    if old is None:
        return window
    return tuple(now // (was // side) for now, was, side in zip(new, old, window, strict=True))


def _tiles(move: Move, _: Any, rule: dict[str, Any], numbers: list[int]) -> int:
    """Return how many windows a map is cut into."""
    feat = sides_of(find(move.base, _numbered(rule["tiles"][0], numbers)))
    window = sides_of(find(move.base, _numbered(rule["tiles"][1], numbers)))
    if feat is None or window is None:
        raise PositionError(
            "model has no windows, which timm's class has; it cannot be moved. Create it with timm.create_model."
        )
    return (feat[0] // window[0]) * (feat[1] // window[1])


def _proportional(move: Move, value: Any, rule: dict[str, Any], _: list[int]) -> Any:
    """Return a number of cells in proportion to one axis of the image, or two in proportion to both."""
    if isinstance(value, int):
        axis = int(rule["ratio"])
        return scale(move, (value, value), (axis,))[axis]
    return _like(value, scale(move, (int(value[0]), int(value[1]))))


def _halves(move: Move, _: Any, rule: dict[str, Any], __: list[int]) -> Sides:
    """Return a map halved, rounded up."""
    sides = sides_of(find(move.base, rule["halves"])) or (1, 1)
    return -(-sides[0] // 2), -(-sides[1] // 2)


def _block(move: Move, _: Any, rule: dict[str, Any], __: list[int]) -> int:
    """Return the side of a block of patches, or its area, where a square number of blocks tiles a square image."""
    blocks: int = move.model.patch_size * math.isqrt(move.model.num_blocks[0])
    return int((move.new[0] // blocks) ** rule["block"])


def _copy(move: Move, _: Any, rule: dict[str, Any], __: list[int]) -> Any:
    return find(move.base, rule["copy"])


def _item(move: Move, _: Any, rule: dict[str, Any], numbers: list[int]) -> Any:
    return find(move.base, rule["item"])[numbers[0]]


def _area(move: Move, _: Any, rule: dict[str, Any], numbers: list[int]) -> int:
    sides = sides_of(find(move.base, _numbered(rule["area"], numbers))) or (1, 1)
    return sides[0] * sides[1]


def _scaled(move: Move, value: Any, rule: dict[str, Any], _: list[int]) -> Any:
    """Return the size of the image in every branch, the share of each read from the sizes so far."""
    image = sides_of(find(move.base, rule["scaled"])) or move.new
    shares = [float(_simple(branch, image)) for branch in value]
    return [tuple(int(side * share) for side in move.new) for share in shares]


def _simple(branch: Sides, image: Sides) -> Fraction:
    """Return the simplest fraction that gives a branch's size from the image's."""
    for largest in range(1, max(image) + 1):
        guess = Fraction(max(branch), max(image)).limit_denominator(largest)
        if all(int(side * float(guess)) == made for side, made in zip(image, branch, strict=True)):
            return guess
    return Fraction(max(branch), max(image))


def _patch(move: Move, value: Any, _: dict[str, Any], __: list[int]) -> None:
    """Move a module that cuts patches out of a map, at the stride that it has now."""
    was = sides_of(value.img_size)
    if move.old is None or was is None:
        return
    stride = 1
    while (move.old[0] // stride, move.old[1] // stride) != was:
        stride *= 2
        if stride > max(move.old):
            raise PositionError(
                f"model has a patch module for {was} beside an image of {move.old}; no power of two leads from one to "
                "the other. Create the model anew at its size."
            )
    move_patch(value, (move.new[0] // stride, move.new[1] // stride))


def _schedule(move: Move, value: Any, rule: dict[str, Any], _: list[int]) -> dict[int, Any]:
    """Return a schedule of permutations on the new map: every size in it in proportion to the first."""
    now = find(move.base, rule["schedule"])
    first = value[min(value)][1]
    return {
        key: (steps, [side * new // old for side, new, old in zip(size, now, first, strict=True)])
        for key, (steps, size) in value.items()
    }


def _differences(move: Move, value: Tensor, rule: dict[str, Any], _: list[int]) -> Tensor:
    return signed_differences(sides_of(find(move.model, rule["differences"])) or (1, 1), value)


def _offsets(move: Move, value: Tensor, rule: dict[str, Any], _: list[int]) -> Tensor:
    step = rule["offsets"]
    by = sides_of(step if isinstance(step, int) else find(move.base, step)) or (1, 1)
    return absolute_differences(rule["sides"], by[0], value.device)


def _displacements(_: Move, value: Tensor, rule: dict[str, Any], __: list[int]) -> Tensor:
    return displacements(rule["sides"], value.device)


def _numbered(path: str, numbers: list[int]) -> str:
    """Return a path whose `*` are replaced by numbers, in order."""
    for number in numbers:
        path = path.replace("*", str(number), 1)
    return path


def _like(value: Any, sides: Sides) -> Any:
    """Return two sides in the kind that the old value had."""
    if len(value) != len(sides):
        raise PositionError(
            f"model has maps of {len(value)} axes; resize moves models of images, with two. Leave a video model at its "
            "size."
        )
    return list(sides) if isinstance(value, list) else tuple(sides)


_WORDS: dict[str, Callable[[Move, Any, dict[str, Any], list[int]], Any]] = {
    "share": _share,
    "image": _image,
    "floor": _strided,
    "ceil": _strided,
    "tiles": _tiles,
    "halves": _halves,
    "block": _block,
    "patch_to": lambda move, value, _, __: move_patch(value, move.new),
    "ratio": _proportional,
    "copy": _copy,
    "item": _item,
    "area": _area,
    "scaled": _scaled,
    "patch": _patch,
    "schedule": _schedule,
    "differences": _differences,
    "offsets": _offsets,
    "displacements": _displacements,
}
