"""One window further: content and coordinates move by a window through the blocks that cut their map into windows.

Which tokens a block lets meet is tried, not asked: a token is changed, and the box of answers that change is its
window.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from visionpos.audit.metrics import output_change
from visionpos.audit.model_bench import Bench, Number
from visionpos.errors import PositionError
from visionpos.retrofit.ports import Port, attentions_of
from visionpos.retrofit.seams import blocks_of

WINDOW = "one window"
"""The variant of S1 that moves content and coordinates, where attention knows windows alone."""
_HEARD = 1e-6
"""Of the largest answer: those of other windows change by less, by rounding."""


@dataclass(slots=True, eq=False)
class _Unit:
    """A module that takes a map and gives one, with one attention inside.

    Args:
        number: of the attention.
        module: it.
        front: whether channels come before rows and columns.
        call: from a map to what it gives, with all else as it was called with.
        given: the map that it was called with.
    """

    number: int
    module: nn.Module
    front: bool
    call: Callable[[Tensor], Tensor]
    given: Tensor

    def answer(self, maps: Tensor) -> Tensor:
        """Return `[b, y, x, d]` for `[b, y, x, d]`."""
        entering = maps.permute(0, 3, 1, 2) if self.front else maps
        given = self.call(entering.contiguous())
        return given.permute(0, 2, 3, 1) if self.front else given


def one_window(bench: Bench) -> list[Number]:
    """Return how far answers are from their own when content and coordinates move by one window.

    Windows at the border are masked or padded, so that only those are compared which lie inside before and after.

    Raises:
        PositionError: if no block has windows, or no map holds enough of them.
    """
    subject = bench.subject
    found: dict[int, list[float]] = {}
    for unit in _units(subject):
        maps = unit.given.permute(0, 2, 3, 1) if unit.front else unit.given
        answer = unit.answer(maps)
        for axis in (1, 2):
            span = _window(unit, maps, answer, axis)
            if span is None:
                continue
            start, size = span
            side = maps.shape[axis]
            lowest = start + size
            highest = side - side % size if start == 0 else (side // size - 1) * size + start
            if highest <= lowest:
                continue
            moved = unit.answer(maps.roll(size, axis)).narrow(axis, lowest, highest - lowest)
            still = answer.roll(size, axis).narrow(axis, lowest, highest - lowest)
            found.setdefault(unit.number, []).append(output_change(still, moved))
    if not found:
        raise PositionError(
            "no block cuts its map into windows, or no map holds two of them side by side, three where they are "
            "shifted. Pass size_hw= of a larger image."
        )
    numbers = [Number("O", f"layer {number}", "all", max(v)) for number, v in found.items()]
    return [*numbers, Number("O", "end", "all", max(one.value for one in numbers))]


def _units(subject: Any) -> list[_Unit]:
    """Return every outermost module around one attention that takes and gives a map, as it is called."""
    model = subject.still()
    ports = attentions_of(model)
    blocks = [path for path, _ in blocks_of(model)]
    found: dict[int, list[_Unit]] = {}
    with ExitStack() as stack:
        for number, port in enumerate(ports):
            for path in _around(port, ports, blocks):
                module = model.get_submodule(path)

                def keep(
                    module: nn.Module,
                    args: tuple[Any, ...],
                    named: dict[str, Any],
                    output: Any,
                    number: int = number,
                    port: Port = port,
                ) -> None:
                    x: Any = args[0] if args else None
                    maps = isinstance(x, Tensor) and isinstance(output, Tensor) and x.ndim == 4
                    if not maps or output.shape != x.shape:
                        return
                    width = port.heads * port.head_dim
                    if width not in (x.shape[1], x.shape[-1]):
                        return

                    def call(entering: Tensor) -> Tensor:
                        given: Tensor = module(entering, *args[1:], **named)
                        return given

                    unit = _Unit(number, module, x.shape[-1] != width, call, x.detach().clone())
                    found.setdefault(number, []).append(unit)

                handle = module.register_forward_hook(keep, with_kwargs=True)
                stack.callback(handle.remove)
        subject.passed(model)
    return [units[-1] for units in found.values()]  # the outermost ends last


def _around(port: Port, ports: list[Port], blocks: list[str]) -> list[str]:
    """Return paths of the modules around an attention, within its block, that hold no other attention."""
    parts = port.path.split(".")
    paths = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    within = [path for path in paths if any(f"{path}.".startswith(f"{block}.") for block in blocks)]
    return [
        path for path in within if sum(f"{one.path}.".startswith(f"{path}.") for one in ports) == 1
    ]


def _window(unit: _Unit, maps: Tensor, answer: Tensor, axis: int) -> tuple[int, int] | None:
    """Return (start of the first whole window, side of windows) along an axis; None where there are none side by side.

    A window is a full box of tokens, and that of the next token behind it begins where it ends.
    """
    middle = [side // 2 for side in maps.shape[1:3]]
    first = _box(unit, maps, answer, middle)
    if first is None:
        return None
    start, size = first[axis - 1]
    if start + size >= maps.shape[axis] and start > 0:
        middle[axis - 1] = start - 1
    else:
        middle[axis - 1] = start + size
    if not 0 <= middle[axis - 1] < maps.shape[axis]:
        return None
    second = _box(unit, maps, answer, middle)
    if second is None or second[2 - axis] != first[2 - axis]:
        return None
    beside = abs(second[axis - 1][0] - first[axis - 1][0])
    return (start % size, size) if beside == size else None


def _box(
    unit: _Unit, maps: Tensor, answer: Tensor, place: list[int]
) -> list[tuple[int, int]] | None:
    """Return (start, side) along y and x of the answers that a token changes; None where they are no full box."""
    changed = maps.clone()
    changed[:, place[0], place[1]] += changed.std() * torch.linspace(
        -1, 1, maps.shape[-1], device=maps.device, dtype=maps.dtype
    )
    apart = (unit.answer(changed) - answer).abs().amax(dim=(0, 3))
    heard = apart > _HEARD * answer.abs().max()
    rows, columns = (torch.nonzero(heard.any(1 - axis)).flatten() for axis in (0, 1))
    if not len(rows):
        return None
    spans = [(int(one[0]), int(one[-1] - one[0]) + 1) for one in (rows, columns)]
    full = int(heard.sum()) == spans[0][1] * spans[1][1]
    return spans if full else None
