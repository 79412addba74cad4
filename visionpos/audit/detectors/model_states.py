"""Detectors on models that run them: size after size, with weights moved, without position, checkpointed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from visionpos.audit.detectors.crops import crops_of, image_for, observed, patched, ran
from visionpos.audit.detectors.effects import dead_scheme, order_dependence
from visionpos.audit.detectors.finding import UnfitError, judged
from visionpos.audit.detectors.model_parts import ALIKE, position_names, quiet, table_of, worst_of
from visionpos.audit.detectors.states import frozen_copy, shared_state, stale_cache, stale_weights
from visionpos.audit.model_watch import tensor_of
from visionpos.audit.result import Found
from visionpos.retrofit import attachments
from visionpos.retrofit.rope import own_rope
from visionpos.retrofit.seams import blocks_of, class_row, prefix_of


def cache_of(model: nn.Module, seed: int) -> Found:
    """Ask for sizes in turn, of the model and of its rotary module, and run it after its weights were edited."""
    said: list[Found] = []
    with quiet(model), torch.no_grad():
        rope = None if class_row(model) is None else own_rope(model)
        if rope is not None and hasattr(rope, "get_embed"):
            said.append(stale_cache(lambda: _renders(rope), ALIKE, distinct=True))
        crops = crops_of(model, seed)
        if len(crops) > 1:
            calls = list(range(len(crops)))
            said.append(stale_cache(lambda: _runs(model, crops), calls))
        names = position_names(model)
        if names:
            check = stale_weights(model, lambda one: ran(one, crops[0]), names)
            said.append(judged("stale_cache", [check], "outputs follow edited position weights"))
    if not said:
        raise UnfitError("it takes one size and has no position weights: nothing can be stale")
    return worst_of(said)


def _renders(rope: Any) -> Callable[[Any], Tensor]:
    fresh = copy.deepcopy(rope)
    return lambda sides: table_of(fresh, sides)


def _runs(model: nn.Module, crops: Sequence[Tensor]) -> Callable[[Any], Tensor]:
    fresh = copy.deepcopy(model)
    return lambda number: ran(fresh, crops[number])


def dead_of(model: nn.Module, seed: int) -> Found:
    """Zero tables and strengths and turn by no angle, for one pass."""
    image = image_for(model, seed)
    with quiet(model), torch.no_grad():
        names = position_names(model)
        own = dict(model.named_parameters())
        rope = None if class_row(model) is None else own_rope(model)
        if names and rope is None and not any(bool(own[name].any()) for name in names):
            raise UnfitError("its position weights are all zero: nothing is learned yet")
        outputs = observed(model, image)
        with without_position(model):
            bare = observed(model, image)
    said = [dead_scheme(*both) for both in zip(outputs, bare, strict=True)]
    return max(said, key=lambda one: one.value or 0.0)  # used in one place is used


@contextmanager
def without_position(model: nn.Module) -> Iterator[None]:
    """Take positions out of a model, and put them back bit by bit.

    Raises:
        UnfitError: if there are none that are known.
    """
    parts = list(attachments(model).values())
    names = [name for name in position_names(model) if not name.startswith("visionpos.")]
    rope: Any = None if class_row(model) is None else own_rope(model)
    turning = rope is not None and hasattr(rope, "get_embed")
    if not parts and not names and not turning:
        raise UnfitError("it has no positions that are known")
    own = dict(model.named_parameters())
    kept = {name: own[name].detach().clone() for name in names}
    strengths = [float(torch.as_tensor(part.strength).detach().sum()) for part in parts]
    try:
        with torch.no_grad():
            for name in names:
                own[name].zero_()
        for part in parts:
            part.set_strength(0.0)
        if turning:
            rope.get_embed = _still(rope.get_embed)
        yield
    finally:
        if turning:
            del rope.get_embed
        for part, strength in zip(parts, strengths, strict=True):
            part.set_strength(strength)
        with torch.no_grad():
            for name, value in kept.items():
                own[name].copy_(value)


def _still(get_embed: Callable[..., Any]) -> Callable[..., Any]:
    """Return a table of no angle: sines 0, cosines 1."""

    def flat(table: Tensor) -> Tensor:
        sin, cos = table.chunk(2, dim=-1)
        return torch.cat([torch.zeros_like(sin), torch.ones_like(cos)], dim=-1)

    def still(*args: Any, **kwargs: Any) -> Any:
        given = get_embed(*args, **kwargs)
        if isinstance(given, (tuple, list)):
            return type(given)((torch.zeros_like(given[0]), torch.ones_like(given[1])))
        return flat(given)

    return still


def copy_of(model: nn.Module, seed: int) -> Found:
    """Move the position weights of the model and of its copy in turn."""
    image = image_for(model, seed)

    def run(one: nn.Module) -> Tensor:
        one.train().eval()  # a bias that is kept in eval mode is another fault
        return torch.cat([part.flatten() for part in observed(one, image)]).unsqueeze(0)

    with quiet(model):
        return frozen_copy(model, run, position_names(model))


def shared_of(model: nn.Module, seed: int) -> Found:
    """Let crops of several grids go forward, checkpointed, before one backward."""
    switch = getattr(model, "set_grad_checkpointing", None)
    flags = [
        (module, module.grad_checkpointing)
        for module in model.modules()
        if isinstance(getattr(module, "grad_checkpointing", None), bool)
    ]
    if switch is None or not flags:
        raise UnfitError("it has no gradient checkpointing")
    weights = _compared_weights(model)

    try:
        switch(enable=True)
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        raise UnfitError(f"it has no gradient checkpointing ({error})") from None

    def forward(crop: Tensor, *, checkpointed: bool) -> Tensor:
        switch(enable=checkpointed)
        torch.manual_seed(seed)  # what is dropped is the same each time
        return ran(model, crop)

    kept = [(weight, weight.grad) for weight in model.parameters()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        with quiet(model), torch.enable_grad():
            crops = crops_of(model, seed)
            model.train()  # as checkpointing is used
            return shared_state(forward, crops if len(crops) > 1 else crops * 2, weights)
    finally:
        for weight, gradient in kept:  # a backward pass reaches all of them
            weight.grad = gradient
        for module, before in flags:
            module.grad_checkpointing = before
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


def _compared_weights(model: nn.Module) -> list[Tensor]:
    """Return position weights and those of the first block: gradients of all would be held twice for nothing."""
    own = dict(model.named_parameters())
    found = [own[name] for name in position_names(model)]
    blocks = blocks_of(model) if class_row(model) is not None else []
    found += list(blocks[0][1].parameters()) if blocks else list(own.values())
    return [weight for weight in dict.fromkeys(found) if weight.requires_grad]


def listed_of(model: nn.Module, seed: int) -> Found:
    """List patches with coordinates in another order."""
    found = class_row(model)
    if found is None or found[1].grid != "coords":
        raise UnfitError("it takes whole images, not patches with coordinates")
    patches, coords = patched(model, seed)
    whole: Any = model
    prefix = prefix_of(model)

    def run(order: Tensor) -> Tensor:
        given = tensor_of(
            whole.forward_features(
                patches[:, order],
                patch_coord=coords[:, order],
                patch_valid=torch.ones(1, len(order), dtype=torch.bool),
            )
        )
        return torch.cat([given[:, :prefix], given[:, prefix:][:, order.argsort()]], dim=1)

    with quiet(model), torch.no_grad():
        return order_dependence(run, patches.shape[1], seed=seed)
