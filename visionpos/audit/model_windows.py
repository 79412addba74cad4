"""Trials inside the grids that attentions have of their own: windows, and the stages of hierarchical models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from visionpos.audit.layer import cells_of
from visionpos.audit.model_bench import Bench, Number, grid_order, ordered
from visionpos.audit.model_joined import behind, joinable, joined, map_kind
from visionpos.audit.model_moves import AttachedMove, Change
from visionpos.audit.model_parts import take_out
from visionpos.audit.model_subject import Visit
from visionpos.audit.model_watch import Key, Passed
from visionpos.errors import PositionError
from visionpos.geometry import Grid
from visionpos.retrofit.ports import Port, attentions_of

_LOUD = 3.0
"""Deviations of the noise that takes the place of a masked token."""


def numbered(bench: Bench, model: Any) -> list[tuple[int, Port]]:
    """Return (number, attention) of all between tokens that can be reached inside them.

    Raises:
        PositionError: if there is none.
    """
    found = []
    for i, port in enumerate(attentions_of(model)):
        weights = bench.base.weights.get((i, 0))  # none of one between channels
        if weights is not None and weights.shape[-1] == weights.shape[-2] and joinable(port):
            found.append((i, port))
    if not found:
        raise PositionError(
            "the model has no attention whose tokens can be reached inside it, one by one."
        )
    return found


def back_inside(model: Any, order: Callable[[int], Tensor]) -> Callable[[int, int], Tensor]:
    """Return what undoes an order of tokens inside attentions."""
    ports = attentions_of(model)

    def back(tokens: int, number: int) -> Tensor:
        port = ports[number]
        if not joinable(port):
            return torch.arange(tokens)
        return behind(torch.argsort(order(tokens - port.prefix)), tokens)

    return back


def contents_inside(bench: Bench, order: Callable[[int], Tensor]) -> list[Number]:
    """Return what contents do that change places inside attentions, where every slot keeps its place."""
    model = bench.subject.still()
    numbered(bench, model)

    def run(visit: Visit) -> Passed:
        with joined(model, order):
            return bench.subject.passed(model, visit=visit)

    return bench.apart(run, back=back_inside(model, order))


def twins_inside(bench: Bench) -> list[Number]:
    """Return how differently two keys of equal content are looked at, in the first attention that tells them apart.

    Raises:
        PositionError: if no attention has a part of position inside.
    """
    subject, model = bench.subject, bench.subject.still()
    paths = [
        "" if isinstance(part, AttachedMove) else part.path
        for part in bench.parts(model)
        if part.inside
    ]
    ports = numbered(bench, model)
    own = [one for one in ports if any(not path or path.startswith(one[1].path) for path in paths)]
    if not own:
        raise PositionError(
            "position is in the tokens before they enter an attention; keys of equal content have equal places there."
        )
    number, port = own[0]
    found: list[float] = []

    def enter(_: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        rows, put = _opened(args[0], map_kind(port))
        rows = rows.clone()
        rows[:, -1] = rows[:, port.prefix]
        return (put(rows), *args[1:]), named

    def visit(key: Key, weights: Tensor) -> None:
        if key[0] == number:
            keys = weights[..., port.prefix :, :].double()
            found.append(float((keys[..., port.prefix] - keys[..., -1]).abs().mean()))

    handle = port.holder.register_forward_pre_hook(enter, with_kwargs=True)
    try:
        subject.passed(model, visit=visit)
    finally:
        handle.remove()
    if not found:
        raise PositionError(f"{port.path} has no keys that are tokens.")
    value = sum(found) / len(found)
    return [Number("weights", where, "all", value) for where in (f"layer {number}", "end")]


def missing_inside(bench: Bench, seed: int) -> list[Number]:
    """Return what a token does that no one sees: one in every window, whose content and place are scrambled.

    What it answers itself is taken away in both passes, since the next layer would see it elsewhere.
    """
    subject = bench.subject

    def hidden(count: int) -> int:
        return seed % count

    def scrambled(grid: Grid) -> Tensor:
        cells = cells_of(grid)
        own = hidden(grid.size)
        cells[own] = cells[own - 1]
        return cells

    def seen(tokens: int) -> Tensor:
        front = max(port.prefix for _, port in numbered(bench, model))
        mask = torch.ones(tokens, tokens, dtype=torch.bool)
        if tokens > front + 1:
            own = front + hidden(tokens - front)
            mask[:, own] = mask[own] = False
            mask[own, own] = True
        return mask

    model = subject.still()
    with _scrambling(bench, model, hidden, None):
        base = subject.passed(model, seen=seen)
    try:
        model = bench.moved(Change(scrambled), inside=True)
    except PositionError:
        model = subject.still()  # places that cannot change stay: the content is scrambled
    noise = torch.Generator().manual_seed(seed)

    def run(visit: Visit) -> Passed:
        with _scrambling(bench, model, hidden, noise):
            return subject.passed(model, seen=seen, visit=visit)

    return bench.apart(run, base=base)


@contextmanager
def _scrambling(
    bench: Bench, model: Any, hidden: Callable[[int], int], noise: torch.Generator | None
) -> Iterator[None]:
    """Let one token of every attention be noise on its way in, and nothing on its way out."""
    with ExitStack() as stack:
        for _, port in numbered(bench, model):
            maps, front = map_kind(port), port.prefix

            def enter(
                _: Any,
                args: tuple[Any, ...],
                named: dict[str, Any],
                maps: str = maps,
                front: int = front,
            ) -> Any:
                rows, put = _opened(args[0], maps)
                if noise is None or rows.shape[1] < front + 2:
                    return None
                rows = rows.clone()
                own = front + hidden(rows.shape[1] - front)
                drawn = torch.randn(rows[:, own].shape, generator=noise).to(rows)
                rows[:, own] = drawn * rows.std() * _LOUD
                return (put(rows), *args[1:]), named

            def leave(
                _: Any, __: Any, output: Tensor, maps: str = maps, front: int = front
            ) -> Tensor:
                rows, put = _opened(output, maps)
                if rows.shape[1] < front + 2:
                    return output
                rows = rows.clone()
                rows[:, front + hidden(rows.shape[1] - front)] = 0.0
                return put(rows)

            before = port.holder.register_forward_pre_hook(enter, with_kwargs=True)
            after = port.holder.register_forward_hook(leave)
            stack.callback(before.remove)
            stack.callback(after.remove)
        yield


def _opened(x: Tensor, maps: str) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return tokens as rows `[b, n, d]`, and what lays rows as they lay."""
    if x.ndim == 3:
        return x, lambda rows: rows
    if maps == "nchw":
        return x.flatten(2).mT, lambda rows: rows.mT.reshape(x.shape)
    return x.flatten(1, 2), lambda rows: rows.reshape(x.shape)


def causal_inside(bench: Bench, seed: int, *, scheme: bool) -> list[Number]:
    """Return what another order of tokens does inside attentions that look back alone."""
    subject, order = bench.subject, grid_order(seed)

    def drawn(count: int) -> Tensor:
        return order(Grid(1, count))

    first = subject.still()
    front = max(port.prefix for _, port in numbered(bench, first))
    if scheme:
        second = bench.moved(ordered(lambda grid: drawn(grid.size)), inside=True)
    else:
        take_out(first)
        second = first

    def seen(tokens: int) -> Tensor:
        mask = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        mask[:, :front] = mask[:front] = True  # what is in front stands nowhere in the row
        return mask

    base = subject.passed(first, seen=seen)

    def run(visit: Visit) -> Passed:
        with joined(second, drawn):
            return subject.passed(second, seen=seen, visit=visit)

    found = bench.apart(run, back=back_inside(second, drawn), base=base)
    return [one for one in found if one.metric == "Eq"]
