"""Detectors of state that outlives a call: caches, copies that follow another model, grids that the last crop left."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from visionpos.audit.detectors.finding import Check, UnfitError, judged
from visionpos.audit.metrics import output_change
from visionpos.audit.result import Found
from visionpos.errors import PositionError

STALE = 0.0
FOLLOWS = 0.0
SHARED = 1e-4
GRIDS = ((14, 14), (7, 28))
_STEP = 0.5


def stale_cache(
    make: Callable[[], Callable[[Any], Tensor]],
    calls: Sequence[Any] = GRIDS,
    *,
    distinct: bool = False,
    also: Sequence[Check] = (),
) -> Found:
    """Return whether what is rendered depends on calls before: A, B, A, and each against a fresh object.

    Args:
        make: gives a fresh object each time, called with one of `calls`: a grid, an offset, a dtype.
        calls: two or more; grids of the same number of tokens show caches that are keyed by it.
        distinct: whether different calls must give different results: a table built for one grid may come back for all.
        also: further checks of the same fault, such as `stale_weights`.
    """
    used, checks = make(), list(also)
    first = _fixed(used(calls[0]))
    remedy = "Key a cache by everything that the value depends on (grid, offset, dtype, device), or keep none."
    for call in (*calls[1:], calls[0]):
        given, wanted = used(call), _fixed(make()(call))
        checks.append(
            _equal(given, wanted, f"{_word(call)}, called after {_word(calls[0])},", remedy)
        )
    if distinct:
        for call in calls[1:]:
            other = make()(call)
            same = other.shape == first.shape and torch.equal(other, first)
            checks.append(
                Check(
                    value=float(same),
                    threshold=STALE,
                    wrong=f"{_word(call)} gives what {_word(calls[0])} gives: what is asked for is not looked at",
                    remedy="Tell the object its new grid before it is used, or build it without a fixed one.",
                )
            )
    return judged("stale_cache", checks, "every call gives what a fresh object gives")


def _word(call: Any) -> str:
    return str(call).removeprefix("torch.")


def _fixed(values: Tensor) -> Tensor:
    """Return a copy, which no later call writes to."""
    return values.detach().clone()


def _equal(given: Tensor, wanted: Tensor, what: str, remedy: str) -> Check:
    same = given.shape == wanted.shape and given.dtype == wanted.dtype
    gap = float((given.detach().double() - wanted.double()).abs().max()) if same else float("inf")
    return Check(
        value=gap,
        threshold=STALE,
        wrong=f"{what} gives what a fresh object does not give, {gap:.2g} apart",
        remedy=remedy,
    )


@contextmanager
def moved(parameters: Sequence[Tensor], seed: int = 0) -> Iterator[None]:
    """Add noise of their own size to parameters, and put them back afterwards, bit by bit."""
    kept = [one.detach().clone() for one in parameters]
    draw = torch.Generator().manual_seed(seed)
    try:
        with torch.no_grad():
            for one, before in zip(parameters, kept, strict=True):
                size = float(before.double().square().mean().sqrt()) or 1.0
                noise = torch.randn(one.shape, generator=draw) * _STEP * size
                one.copy_(before + noise.to(before))
        yield
    finally:
        with torch.no_grad():
            for one, before in zip(parameters, kept, strict=True):
                one.copy_(before)


def stale_weights(module: nn.Module, run: Callable[[Any], Tensor], names: Sequence[str]) -> Check:
    """Return whether outputs follow when position weights are edited in place, as an optimizer does.

    Args:
        module: in eval mode.
        run: gives its outputs; called with the module or a copy of it.
        names: of its position parameters.
    """
    own = dict(module.named_parameters())
    with torch.no_grad():
        run(module)  # whatever is kept is kept now
        with moved([own[name] for name in names]):
            fresh = copy.deepcopy(module)
            # What a mode switch empties is fresh then.
            fresh.train().eval()
            return _equal(
                _fixed(run(module)),
                _fixed(run(fresh)),
                "the module, called after its position weights changed,",
                "Clear caches when weights change: key them by the version of the weights, or switch train and eval.",
            )


def frozen_copy(module: nn.Module, run: Callable[[Any], Tensor], names: Sequence[str]) -> Found:
    """Return whether a deep copy, as an averaged model or a teacher is one, has positions of its own.

    Args:
        module: in eval mode; it is changed for a moment, and put back.
        run: gives outputs of the module or of its copy; the same tokens each time.
        names: of its position parameters.

    Raises:
        UnfitError: if there are none.
    """
    if not names:
        raise UnfitError("there are no learned positions that a copy could lose")
    twin = copy.deepcopy(module)
    own, others = (dict(one.named_parameters()) for one in (module, twin))
    missing = [name for name in names if name not in own]
    if missing:
        raise PositionError(
            f"names holds {missing[0]!r}, which is no parameter of the module; take them from named_parameters()."
        )
    with torch.no_grad():
        before, at_first = _fixed(run(module)), _fixed(run(twin))
        with moved([own[name] for name in names]):
            dragged = output_change(at_first, run(twin))
        with moved([others[name] for name in names]):
            follows = output_change(at_first, run(twin))
            drags = output_change(before, run(module))
        different = output_change(before, at_first)
    remedy = "Let state hang off the module that a hook is handed, never a closure or the model that it was made for."
    checks = [
        Check(
            value=value,
            threshold=FOLLOWS,
            wrong=words.format(value),
            remedy=remedy,
        )
        for value, words in (
            (different, "a copy gives outputs {:.2g} away from the model's"),
            (dragged, "a copy changes by {:.2g} when the model's own positions change"),
            (drags, "the model changes by {:.2g} when its copy's positions change"),
        )
    ]
    checks.append(
        Check(
            value=follows,
            threshold=1e-9,
            wrong="a copy does not follow its own position weights",
            remedy=remedy,
            least=True,
        )
    )
    return judged("frozen_copy", checks, "a copy follows its own positions and no others")


def shared_state(
    forward: Callable[..., Tensor], crops: Sequence[Any], parameters: Sequence[Tensor]
) -> Found:
    """Return whether gradients survive checkpointing when several crops go forward before one backward.

    Args:
        forward: of one crop, called with `checkpointed=`, whether under gradient checkpointing;
            what it draws must be the same each time.
        crops: of different grids; of equal token counts to see the silent fault, of others for the loud one.
        parameters: whose gradients are compared.

    Raises:
        UnfitError: if none of them takes part.
    """
    kept = [one.grad for one in parameters]

    def gradients(*, checkpointed: bool) -> list[Tensor | None]:
        for one in parameters:
            one.grad = None
        # A loss in which every output counts differently: a plain sum is blind to much.
        total = torch.stack(
            [forward(crop, checkpointed=checkpointed).sin().sum() for crop in crops]
        ).sum()
        total.backward()
        return [None if one.grad is None else one.grad.clone() for one in parameters]

    try:
        wanted = gradients(checkpointed=False)
        if not any(one is not None for one in wanted):
            raise UnfitError("no parameter has a gradient")
        try:
            given, loud = gradients(checkpointed=True), ""
        except RuntimeError as error:  # recomputed tensors of other shapes
            given, loud = [None] * len(wanted), f": {str(error).splitlines()[0][:120]}"
    finally:
        for one, before in zip(parameters, kept, strict=True):
            one.grad = before
    gaps = [_gradient_gap(a, b) for a, b in zip(wanted, given, strict=True)]
    check = Check(
        value=float("inf") if loud else max(gaps),
        threshold=SHARED,
        wrong="recomputation of two crops fails" + loud
        if loud
        else f"gradients of checkpointed crops are off by {max(gaps):.2g}",
        remedy="Let the grid travel with the call (an argument of the block), not in a place that the next crop "
        "overwrites.",
    )
    return judged("shared_state", [check], "two crops before one backward give the same gradients")


def _gradient_gap(wanted: Tensor | None, given: Tensor | None) -> float:
    if wanted is None:
        return 0.0 if given is None else float("inf")
    return float("inf") if given is None else output_change(wanted.flatten(), given.flatten())
