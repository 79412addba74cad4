"""Windows: how those of attention follow the image, by a named policy, and which window coordinates are measured in."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from visionpos.errors import PositionError
from visionpos.retrofit.seams import find, matches, sides_of
from visionpos.retrofit.tables import position_modules

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from visionpos.retrofit.paths import Sides
    from visionpos.retrofit.seams import ModelSeams

_RECORD = "visionpos_windows"

Windows = Literal["keep", "scale"] | tuple[int, int]


def policy_of(row: ModelSeams, model: Any, windows: Windows | None) -> Windows | None:
    """Return the policy to follow, None where the class has no windows.

    Raises:
        PositionError: if the class has no such choice.
    """
    if row.windows is None:
        if windows is not None:
            raise PositionError(
                f"windows is {windows!r}; a {type(model).__name__} has no choice of windows. Leave windows=None."
            )
        return None
    chosen = row.windows.default if windows is None else windows
    known = ("keep", "scale") if row.windows.keeps else ("scale",)
    if chosen not in known and not (row.windows.blocks and _positive_pair(chosen)):
        raise PositionError(
            f"windows is {windows!r}; a {type(model).__name__} takes {' or '.join(map(repr, known))}"
            f"{', or (rows, columns) in cells' if row.windows.blocks else ''}. Name one of them."
        )
    return chosen  # type: ignore[return-value]


def _positive_pair(value: Any) -> bool:
    """Return whether a value is two whole numbers above 0."""
    pair = isinstance(value, (tuple, list)) and len(value) == 2
    return pair and all(type(side) is int and side > 0 for side in value)


def remember_policy(model: Any, policy: Windows | None) -> None:
    """Keep with the model which policy its windows followed last, for its lineage."""
    object.__setattr__(model, _RECORD, policy)


def last_policy(model: Any) -> Windows | None:
    """Return the policy that the model's windows followed last, None if it was never resized."""
    found: Windows | None = getattr(model, _RECORD, None)
    return found


def window_arguments(
    row: ModelSeams, model: Any, policy: Windows | None, size_hw: Sides
) -> dict[str, Any]:
    """Return what timm's set_input_size is given so that windows follow a policy.

    Raises:
        PositionError: if kept windows do not fit a map of the new size.
    """
    if row.windows is None or policy is None:
        return {}
    if row.windows.blocks:
        return _stage_arguments(row, model, policy)
    if policy != "keep":
        return {}
    return _partition_arguments(row, model, size_hw)


def windows_of(row: ModelSeams, model: Any) -> list[Sides]:
    """Return the window of every stage as it was meant, before a small map clamps it; [] without windows."""
    if row.windows is None or not row.windows.blocks:
        return []
    meant = getattr(model, "_ref_window_sizes", None)
    if meant is not None:  # timm 1.0.31 keeps the windows and the grid that they were made for
        grid, made = sides_of(model.patch_embed) or (1, 1), model._ref_grid_size  # noqa: SLF001
        return [
            (max(1, height * grid[0] // made[0]), max(1, width * grid[1] // made[1]))
            for height, width in meant
        ]
    stages = [list(blocks) for _, blocks in matches(model, row.windows.blocks)]
    held = [
        [sides_of(getattr(block, row.windows.attribute)) or (1, 1) for block in stage]
        for stage in stages
    ]
    if not held:
        return []
    # Before timm 1.0.31 all stages were given one window; a small map may have clamped it in some.
    largest = max(h for stage in held for h, _ in stage), max(w for stage in held for _, w in stage)
    return [largest] * len(held)


def _stage_arguments(row: ModelSeams, model: Any, policy: Windows) -> dict[str, Any]:
    """Return the window of every stage, for classes whose stages have one each."""
    if policy == "scale" and hasattr(model, "_ref_window_sizes"):
        return {}
    if policy == "scale":
        raise PositionError(
            "windows 'scale' needs timm 1.0.31 or newer, which keeps the windows that a grid was made for. Update "
            "timm, or give windows=(rows, columns)."
        )
    wanted = windows_of(row, model)
    if policy != "keep":
        wanted = [(int(policy[0]), int(policy[1]))] * len(wanted)
    alike = len(set(wanted)) == 1 and not hasattr(model, "_ref_window_sizes")
    return {"window_size": wanted[0] if alike else tuple(wanted)}


def _partition_arguments(row: ModelSeams, model: Any, size_hw: Sides) -> dict[str, Any]:
    """Return the partitions that the model has, if they divide every map of the new size."""
    found = {
        name: sides_of(value)
        for name in ("attn_block", "attn_grid")
        for _, value in matches(model, f"{row.blocks}.*.{name}.partition_size")
    }
    kept = {
        ("window_size" if name == "attn_block" else "grid_size"): side
        for name, side in found.items()
        if side
    }
    for stage in range(len(list(model.stages))):
        feat = (size_hw[0] // (4 * 2**stage), size_hw[1] // (4 * 2**stage))
        for name, side in kept.items():
            if feat[0] % side[0] or feat[1] % side[1]:
                raise PositionError(
                    f"size {size_hw} gives a {feat[0]}x{feat[1]} map in stage {stage}, which {name} {side} does not "
                    "divide. Use windows='scale', or a size whose maps it divides."
                )
    return dict(kept)


@contextmanager
def remembered_windows(model: nn.Module) -> Iterator[None]:
    """Let networks of log coordinates keep the window they were trained with as their unit while windows change.

    With no such window recorded, timm measures coordinates in the present one, and the bias of one and the same
    displacement would change with it. Where a window stays, nothing is recorded.
    """
    held: list[tuple[Any, str, Any, Sides]] = []
    for _, module, row in position_modules(model):
        reference = row.reference
        if reference is None:
            continue
        fits = all(
            getattr(module, key, None) == value for key, value in reference.get("only", {}).items()
        )
        unit, window = (
            sides_of(getattr(module, name, None))
            for name in (reference["attribute"], "window_size")
        )
        if fits and unit is not None and window is not None and min(unit) <= 0 and min(window) > 1:
            held.append(
                (module, reference["attribute"], getattr(module, reference["attribute"]), window)
            )
            setattr(module, reference["attribute"], window)
    yield
    for module, name, before, window in held:
        if sides_of(find(module, "window_size")) == window:
            setattr(module, name, before)


def set_unit(model: nn.Module, path: str, unit: Any) -> None:
    """Let the network of log coordinates at a path measure in a window, as a lineage records it."""
    sides = sides_of(unit)
    for found, module, row in position_modules(model):
        if found == path and row.reference is not None and sides is not None:
            setattr(module, row.reference["attribute"], sides)
            getattr(module, row.reference["rebuild"])()
