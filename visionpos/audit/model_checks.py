"""General checks of a model: same call twice, deepcopy, other sizes in between, and the order of what comes in.

They know no class: what is asked is whether equal questions get equal answers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from visionpos.audit.model_found import HALF, apart, found_of
from visionpos.audit.model_order import order
from visionpos.audit.model_parts import positional_weights
from visionpos.audit.model_subject import Subject, features
from visionpos.audit.result import Found
from visionpos.errors import PositionError
from visionpos.retrofit.sizes import multiple_of

SAME = 1e-6
"""Of the norm: the same arithmetic on other memory differs by less."""


def checks_of(subject: Subject) -> Iterator[tuple[str, Callable[[], Found]]]:
    """Yield (name, check) of every general check; `repeat` comes first, since all others rest on it."""
    yield "repeat", lambda: repeat(subject)
    yield "copy", lambda: copied(subject)
    yield "A-B-A", lambda: other_sizes(subject)
    yield "A-B-A weights", lambda: other_weights(subject)
    yield "order", lambda: order(subject)


def repeat(subject: Subject) -> Found:
    """Return whether the same call in eval mode gives the same bits."""
    model = subject.fresh()
    first, second = (features(model, subject.image) for _ in range(2))
    value = 0.0 if torch.equal(first, second) else max(apart(first, second), 5e-324)
    return found_of(
        "repeat",
        value,
        0.0,
        "two calls in eval mode differ: something is drawn, or kept from call to call.",
        "Turn augmentation and dropout off in eval mode; what an audit measures has no meaning before.",
        "two calls in eval mode agree bit for bit.",
    )


@contextmanager
def in_eval(model: nn.Module) -> Iterator[None]:
    """Let a model be read in eval mode: flags, and what modules keep in dictionaries, are as before afterwards."""
    kept = [
        (
            module,
            module.training,
            {
                name: (value, dict(value))
                for name, value in vars(module).items()
                if type(value) is dict and not name.startswith("_")
            },
        )
        for module in model.modules()
    ]
    try:
        for module, _, __ in kept:
            module.training = False
        yield
    finally:
        for module, training, dictionaries in kept:
            module.training = training
            for value, content in dictionaries.values():
                value.clear()
                value.update(content)


@torch.no_grad()
def copied(subject: Subject) -> Found:
    """Return whether a deepcopy answers as the model does, with its weights and with others, and leaves it alone."""
    model = subject.model
    weight = next((one for one in model.parameters() if one.is_floating_point()), None)
    image = subject.image if weight is None else subject.image.to(weight.dtype)
    limit = SAME if weight is None or weight.dtype.itemsize > 2 else HALF
    made: Any = copy.deepcopy(model)
    with in_eval(model):
        made.eval()
        mine = features(made, image)
        own = features(model, image)
        numbers = {"a deepcopy answers otherwise than the model": apart(mine, own)}
        generator = torch.Generator().manual_seed(0)
        for one in made.parameters():
            if one.is_floating_point():
                noise = torch.randn(one.shape, generator=generator).to(one)
                one.mul_(1 + 0.1 * noise).add_(0.02 * noise)
        # An attribute of the copy that still points at the model would answer with the model's weights.
        mine = features(made, image)
        with lent(model, made):
            told = features(model, image)
        numbers["with other weights a deepcopy answers otherwise than the model"] = apart(
            mine, told
        )
        numbers["a change of the copy changes the model"] = apart(features(model, image), own)
    what, value = max(numbers.items(), key=lambda item: item[1])
    return found_of(
        "copy",
        value,
        limit,
        f"{what}: hooks or methods of the copy still hold parts of the original.",
        "Keep state on the module that a hook is given, never in a closure; EMA and teachers are copies.",
        "a deepcopy answers as the model, with its weights and with others.",
    )


@contextmanager
def lent(model: nn.Module, other: nn.Module) -> Iterator[None]:
    """Let a model compute with the weights of its copy; its own are back afterwards, the same objects."""
    # Module by module, each once: torch's functional_call loses weights of modules that stand in two places.
    pairs = list(zip(model.modules(), other.modules(), strict=True))
    own = [dict(mine._parameters) for mine, _ in pairs]  # noqa: SLF001 (setattr would register them anew)
    try:
        for mine, its in pairs:
            mine._parameters.update(its._parameters)  # noqa: SLF001
        yield
    finally:
        for (mine, _), weights in zip(pairs, own, strict=True):
            mine._parameters.update(weights)  # noqa: SLF001


def other_sizes(subject: Subject) -> Found:
    """Return whether another size in between leaves a trace, and whether parts answer for the size they are asked."""
    says, value = _asked(subject)
    taken = _other_size(subject)
    if taken is not None:
        size, fresh = taken
        model = subject.fresh()
        image = _image(subject, size)
        first, between, last = (
            features(model, one) for one in (subject.image, image, subject.image)
        )
        for what, number in (
            (
                f"images of {size} in between change the answer to the first size",
                apart(last, first),
            ),
            (
                f"a model that saw {subject.size} first answers otherwise to {size}",
                apart(between, fresh),
            ),
        ):
            if number > value:
                says, value = what, number
    elif not says:
        return Found(
            detector="A-B-A",
            value=None,
            threshold=SAME,
            alarm=False,
            says="the model takes images of one size alone, and no part of it serves several.",
        )
    return found_of(
        "A-B-A",
        value,
        SAME,
        f"{says}.",
        "Key what is kept by everything that it depends on, or rebuild it: update_feat_shape, retrofit.resize.",
        "another size in between leaves no trace.",
    )


def _asked(subject: Subject) -> tuple[str, float]:
    """Return what parts that serve a grid on demand do wrong when asked for another one, and by how much."""
    says, value = "", 0.0
    grid = subject.grid
    for path, module in subject.fresh().named_modules():
        if not (hasattr(module, "get_embed") and hasattr(module, "update_feat_shape")):
            continue
        fixed = getattr(module, "feat_shape", None)
        sides = tuple(fixed) if fixed is not None else (grid.height, grid.width)
        other = (2 * sides[0], sides[1]) if sides[0] % 2 else (sides[0] // 2, 2 * sides[1])
        told = copy.deepcopy(module)
        try:
            told.update_feat_shape(other)
            given, wanted = module.get_embed(shape=other), told.get_embed(shape=other)
        except (RuntimeError, AssertionError, ValueError, TypeError):
            continue
        number = apart(given.detach(), wanted.detach())
        if number > value:
            says = f"{path}, made for {sides}, gives another table than that of {other} when asked for it"
            value = number
    return says, value


def _other_size(subject: Subject) -> tuple[tuple[int, int], Tensor] | None:
    """Return another image size that the model takes without being moved, with its features; None if there is none."""
    height, width = subject.size
    step_y, step_x = (
        multiple_of(subject.model, subject.row) if subject.row.patches == () else (1, 1)
    )
    cell = height // max(1, subject.grid.height), width // max(1, subject.grid.width)
    step = max(step_y, cell[0]), max(step_x, cell[1])
    candidates = [(height // 2, 2 * width), (height + step[0], width), (2 * height, width)]
    for size in candidates:
        if size == subject.size or size[0] % step[0] or size[1] % step[1] or min(size) < 1:
            continue
        try:
            return size, features(subject.fresh(), _image(subject, size))
        except PositionError:
            continue
    return None


def _image(subject: Subject, size: tuple[int, int]) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(1, subject.image.shape[1], *size, generator=generator).to(subject.image)


@torch.no_grad()
def other_weights(subject: Subject) -> Found:
    """Return whether position weights that change in eval mode are heard."""
    used, fresh = subject.fresh(), subject.fresh()
    features(used, subject.image)
    for model in (used, fresh):
        ids = positional_weights(model)
        generator = torch.Generator().manual_seed(0)
        for weight in model.parameters():
            if id(weight) in ids and weight.is_floating_point():
                noise = torch.randn(weight.shape, generator=generator).to(weight)
                weight.mul_(1 + 0.1 * noise).add_(0.1 * noise)
    fresh.train()  # by habit, this empties what is kept for eval mode
    fresh.eval()
    value = apart(features(used, subject.image), features(fresh, subject.image))
    limit = SAME if subject.dtype.itemsize > 2 else HALF
    return found_of(
        "A-B-A weights",
        value,
        limit,
        "position weights that changed in eval mode are not heard: something was kept from the call before.",
        "Call train() and eval() after every change of weights, or load them before the first call.",
        "position weights that change between calls are heard.",
    )
