"""The bench of a model: passes compared layer by layer, patches and prefix tokens apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from visionpos.audit.layer import cells_of
from visionpos.audit.metrics import attention_change, output_change
from visionpos.audit.model_joined import joinable
from visionpos.audit.model_moves import AttachedMove, Change, Move
from visionpos.audit.model_parts import moves_of
from visionpos.audit.model_subject import Rows, Subject, Visit
from visionpos.audit.model_watch import Key, Passed
from visionpos.audit.result import Metric, Tokens
from visionpos.errors import PositionError
from visionpos.geometry import Grid
from visionpos.retrofit.ports import attentions_of

Run = Callable[[Visit], Passed]
Back = Callable[[int, int], Tensor]
"""From (number of tokens, prefix included; number of the attention) to the order that undoes a change."""


@dataclass(frozen=True, slots=True)
class Number:
    """One number of a trial; see `result.Measured`."""

    metric: Metric
    where: str
    tokens: Tokens
    value: float


@dataclass(frozen=True, slots=True)
class Trial:
    """One variant of an intervention on a model, not yet carried out.

    Args:
        variant: which form of it.
        measure: carries it out; a PositionError says that it has no meaning there.
        metrics: what it measures.
        angle: returns the radians that it adds at most to a pair of channels.
        note: what to know when reading it.
        parts: returns the position parts as they are afterwards, where the model itself is changed.
    """

    variant: str
    measure: Callable[[], list[Number]]
    metrics: tuple[Metric, ...] = ("A", "O")
    angle: Callable[[], float] = lambda: 0.0
    note: str = ""
    parts: Callable[[], list[Move]] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Bench:
    """A subject, its pass as it is, and what trials draw from.

    Args:
        subject: the model.
        base: its pass, nothing changed.
        generator: of what trials draw.
    """

    subject: Subject
    base: Passed
    generator: torch.Generator

    def parts(self, model: Any | None = None) -> list[Move]:
        """Return the position parts of a copy."""
        return moves_of(
            self.subject.fresh() if model is None else model, self.subject.grid, self.subject.size
        )

    def moved(self, change: Change, *, inside: bool = False) -> Any:
        """Return a copy whose position parts have all come to new places.

        Args:
            change: the new places.
            inside: whether parts stay that are outside of attentions that can be joined.

        Raises:
            PositionError: if a part knows nothing of them, or none is left.
        """
        model = self.subject.fresh()
        parts = self.parts(model)
        if inside:
            ports = [f"{port.path}." for port in attentions_of(model) if joinable(port)]
            if not ports:
                raise PositionError(
                    "the model has no attention whose tokens can change places inside it."
                )
            within = [any(f"{part.path}.".startswith(path) for path in ports) for part in parts]
            attached = [isinstance(part, AttachedMove) for part in parts]
            if any(attached) and len(ports) < len(attentions_of(model)):
                raise PositionError(
                    "what is attached serves attentions whose tokens cannot change places, too."
                )
            parts = [
                part
                for part, own, added in zip(parts, within, attached, strict=True)
                if own or (added and part.inside)
            ]
        for part in parts:
            part(change)
        return model

    def angle(self, change: Change) -> float:
        """Return the radians that a change adds at most to a pair of channels."""
        try:
            return max((part.angle(change) for part in self.parts()), default=0.0)
        except PositionError:  # the trial itself will say it
            return 0.0

    def apart(
        self,
        run: Run,
        *,
        back: Back | None = None,
        kept: Tensor | None = None,
        undone: bool = False,
        base: Passed | None = None,
    ) -> list[Number]:
        """Return how far a pass is from the base: A and O, or Eq where a change is undone, for every layer and the end.

        A of "end" is the mean over layers.

        Args:
            run: makes the pass.
            back: undoes a change of order.
            kept: `[n]` patch tokens to compare; all when None.
            undone: whether outputs are called Eq.
            base: the pass to compare with; the bench's own when None.
        """
        base = self.base if base is None else base
        seen = _Weights(self.subject, base, back, kept)
        passed = run(seen)
        word: Metric = "Eq" if undone or back is not None else "O"
        outputs = [
            (f"layer {i}", one, other)
            for i, (one, other) in enumerate(zip(base.blocks, passed.blocks, strict=True))
        ]
        found = seen.numbers()
        for where, before, after in [*outputs, ("end", base.end, passed.end)]:
            if before.shape != after.shape:
                raise PositionError(f"outputs of {where} changed their shape with the change.")
            turned = back is not None and self.subject.flat
            again = after[:, back(after.shape[1], 0).to(after.device)] if turned and back else after
            for tokens, one, other in self._split(before, again, kept):
                found.append(Number(word, where, tokens, output_change(one, other)))
        return found

    def _split(
        self, before: Tensor, after: Tensor, kept: Tensor | None
    ) -> Iterator[tuple[Tokens, Tensor, Tensor]]:
        if not self.subject.flat:
            yield "all", before, after
            return
        fronts, patches = zip(*map(self.subject.split, (before, after)), strict=True)
        if kept is not None:
            patches = tuple(one[:, kept] for one in patches)
        yield "patches", *patches
        if fronts[0] is not None:
            yield "prefix", *fronts


class _Weights:
    """A visitor that compares attention with that of the base, and keeps numbers alone."""

    def __init__(
        self, subject: Subject, base: Passed, back: Back | None, kept: Tensor | None
    ) -> None:
        self.subject, self.base, self.back, self.kept = subject, base, back, kept
        self.found: dict[tuple[int, Tokens], list[float]] = {}

    def __call__(self, key: Key, weights: Tensor) -> None:
        before = self.base.weights.get(key)
        if before is None or before.shape != weights.shape:
            raise PositionError(f"attention {key[0]} changed its shape with the change.")
        if self.back is not None and weights.shape[-1] == weights.shape[-2]:
            order = self.back(weights.shape[-1], key[0]).to(weights.device)
            weights = weights[..., order, :][..., order]
        for tokens, rows in self._rows(weights):
            value = attention_change(before[..., rows, :], weights[..., rows, :])
            self.found.setdefault((key[0], tokens), []).append(value)

    def _rows(self, weights: Tensor) -> Iterator[tuple[Tokens, Any]]:
        front = weights.shape[-2] - self.subject.count
        if not self.subject.flat or front < 0:
            yield "all", slice(None)
            return
        yield "patches", slice(front, None) if self.kept is None else self.kept + front
        if front:
            yield "prefix", slice(0, front)

    def numbers(self) -> list[Number]:
        """Return A of every attention, and its mean."""
        found, means = [], dict[Tokens, list[float]]()
        for (number, tokens), values in self.found.items():
            value = sum(values) / len(values)
            found.append(Number("A", f"layer {number}", tokens, value))
            means.setdefault(tokens, []).append(value)
        return found + [
            Number("A", "end", tokens, sum(values) / len(values))
            for tokens, values in means.items()
        ]


def grid_order(seed: int) -> Callable[[Grid], Tensor]:
    """Return a random order of cells for every grid, the same at every call."""

    def order(grid: Grid) -> Tensor:
        drawn = torch.randperm(grid.size, generator=torch.Generator().manual_seed(seed))
        return drawn.roll(1) if bool((drawn == torch.arange(grid.size)).all()) else drawn

    return order


def ordered(order: Callable[[Grid], Tensor]) -> Change:
    """Return the change that puts every token on the cell of another."""
    return Change(lambda grid: cells_of(grid)[order(grid)])


def taken(rows: Rows, order: Tensor) -> Rows:
    """Return tokens in another order, or some of them again and again."""
    return [one[:, order.to(one.device)] for one in rows]
