"""make_dynamic: image sizes that differ from call to call, for classes whose tables timm fixes at one size.

The grid belongs to the call: a hook on the module that takes the image hands its size on, and position modules evaluate
their tables and networks for it. Parameters stay where they are; a swapped class follows deepcopy and pickle.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from operator import methodcaller
from typing import TYPE_CHECKING, Any

import torch
from timm.layers.pos_embed_rel import RelPosBias, RelPosMlp
from timm.models import beit, hiera, levit
from torch import nn

from visionpos.errors import PositionError
from visionpos.retrofit.biasing import class_of, give_class
from visionpos.retrofit.called import (
    DynamicBeitAttention,
    DynamicHiera,
    DynamicLevitAttention,
    DynamicLevitDownsample,
    DynamicRelPosBias,
    DynamicRelPosMlp,
    DynamicReroll,
    DynamicSubsample,
    DynamicUnroll,
    OfCall,
)
from visionpos.retrofit.checks import check_movable
from visionpos.retrofit.passes import PassHook, Recall, graph_task, keep_passes
from visionpos.retrofit.paths import counted, find, steps_of
from visionpos.retrofit.records import recipe_of_table
from visionpos.retrofit.seams import DynamicSeams, blocks_of, class_row, model_rows, row_of
from visionpos.retrofit.sizes import check_steps, multiple_of
from visionpos.retrofit.tables import tables_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from visionpos.retrofit.tables import Table


class ImageHook:
    """Hands the image size of a call on to the position modules of its model, and refuses one that it cannot serve."""

    def __init__(self, model: Any, seams: DynamicSeams, relay: Recall) -> None:
        self.model, self.seams, self.relay = model, seams, relay

    def __call__(self, _: nn.Module, args: tuple[Any, ...]) -> None:
        """Remember the sides of the image that enters."""
        sides = (args[0].shape[-2], args[0].shape[-1])
        task = graph_task()
        # A graph serves what it can be traced for: a check would tie it to the multiple.
        if task == -1 and not torch.compiler.is_compiling():
            check_steps(self.model, counted(sides), multiple_of(self.model, self.seams))
        if task == -1:
            self.relay.put(sides)
        else:  # the whole model is recomputed
            self.relay.again.put((sides, task))


_SWAPS: dict[type, type] = {
    beit.Attention: DynamicBeitAttention,
    RelPosBias: DynamicRelPosBias,
    RelPosMlp: DynamicRelPosMlp,
    levit.Attention: DynamicLevitAttention,
    levit.AttentionDownsample: DynamicLevitDownsample,
    levit.Downsample: DynamicSubsample,
    hiera.Unroll: DynamicUnroll,
    hiera.Reroll: DynamicReroll,
    hiera.Hiera: DynamicHiera,
}
_TAG = "_visionpos_image"


def make_dynamic(model: nn.Module) -> None:
    """Let a model take another image size at every call, in place; at its own size nothing changes.

    BEiT, RelPos, CoAtNet, LeViT and Hiera evaluate their tables and networks for the grid of the call, from the
    parameters that they have, by the recipe of their class; gradients reach them, and what checkpointing recomputes
    has the size of its own call. SAM and HieraDet resample by themselves and only lose the check of their own size.
    MaxViT keeps its partitions, which must divide every map. What is attached, before or after, follows. A call whose
    image would be cropped, or cut into broken windows, is refused; LeViT takes any.

    `torch.compile(model, dynamic=True)` makes one graph for all sizes of BEiT, RelPos and Hiera. Five small sizes on a
    CPU made 2 graphs of LeViT, 3 of LeViT with convolutions and of CoAtNet: torch keeps a convolution of at most 20480
    values apart there. HieraDet made 2 and SAM 3: timm pads their windows, and maps that need it are another graph.

    Args:
        model: a model of one of these classes. State-dict keys, `resize` and `describe` stay as they were.

    Raises:
        PositionError: if the class is none of these (what creates it dynamic in timm is named), or the model has a
            table that cannot follow; at a call, if its image has a size that the class cannot serve.

    Example:
        >>> import timm
        >>> model = timm.create_model("levit_128s", num_classes=0).eval()
        >>> make_dynamic(model)
        >>> model(torch.zeros(1, 3, 160, 96)).shape
        torch.Size([1, 384])
    """
    found = class_row(model)
    seams = None if found is None else found[1].dynamic
    if seams is None:
        served = [name.rpartition(".")[2] for name, row in model_rows().items() if row.dynamic]
        raise PositionError(
            f"model is a {type(model).__name__}; make_dynamic serves {', '.join(served)}. ViT, EVA and Swin take other "
            "sizes when created with dynamic_img_size=True; timm then resamples a table by its own recipe, and "
            "lift_table lets the checkpoint's recipe do it. Move the others with resize."
        )
    check_movable(model, row_of(model))
    chosen = dict(_chosen(model, seams))
    if seams.by == "visionpos":
        _check_rest(model, seams, chosen)
    patch = find(model, row_of(model).patch_embed)
    hook = _image_hook(model)
    if hook is None:
        hook = ImageHook(model, seams, Recall())
        patch.register_forward_pre_hook(hook)
    if chosen:
        relay = hook.relay
        _swap(model, seams, chosen, relay)
        around = [*chosen, *(path for path, _ in blocks_of(model))]
        keep_passes(model, around, PassHook(relay, _TAG, relay, methodcaller("get")))
    if getattr(patch, "img_size", None) is not None:
        patch.img_size = None


def is_dynamic(model: nn.Module) -> bool:
    """Return whether `make_dynamic` has been at a model."""
    return _image_hook(model) is not None


def _image_hook(model: nn.Module) -> ImageHook | None:
    """Return the hook that hands image sizes on, None before `make_dynamic`."""
    patch = None if class_row(model) is None else find(model, row_of(model).patch_embed)
    hooks = patch._forward_pre_hooks.values() if isinstance(patch, nn.Module) else ()  # noqa: SLF001 (torch has no other list)
    return next((hook for hook in hooks if isinstance(hook, ImageHook)), None)


def _chosen(model: nn.Module, seams: DynamicSeams) -> Iterator[tuple[str, type]]:
    """Yield (path, dynamic class) of every position module over the whole map that has none yet."""
    for path, module in model.named_modules():
        new = _SWAPS.get(class_of(module))
        if new is not None and _rule(seams, path) is not None:
            yield path, new


def _rule(seams: DynamicSeams, path: str) -> dict[str, Any] | None:
    """Return the rule of a position module over the whole map, None for any other."""
    return next((rule for rule in seams.cells if re.fullmatch(rule["path"], path)), None)


def _check_rest(model: nn.Module, seams: DynamicSeams, chosen: dict[str, type]) -> None:
    """Refuse a table over the whole map that no dynamic class would evaluate: other sizes would not fit it."""
    paths = dict(model.named_modules())
    owners = {id(paths[path]) for path in chosen}
    for table in tables_of(model):
        if not _follows(table, seams, owners):
            raise PositionError(
                f"{table.path} belongs to a {type(table.base).__name__}, which make_dynamic cannot evaluate for "
                "another size. Move the model with resize, or build it of timm's own classes."
            )


def _follows(table: Table, seams: DynamicSeams, owners: set[int]) -> bool:
    """Return whether a table serves every size: it need not move, is evaluated for the call, or belongs to a window."""
    if not (table.moves or table.seams.kind == "log_mlp"):
        return True
    if seams.windows and _rule(seams, table.path.rpartition(".")[0]) is None:
        return True
    fixed = any(fnmatchcase(table.path, pattern) for pattern in seams.fixed)
    return not fixed and (id(table.base) in owners or isinstance(table.base, OfCall))


def _swap(model: Any, seams: DynamicSeams, chosen: dict[str, type], relay: Recall) -> None:
    """Give position modules their dynamic classes."""
    recipes = {id(table.owner): recipe_of_table(model, table) for table in tables_of(model)}
    for path, new in chosen.items():
        module, rule = model.get_submodule(path), _rule(seams, path)
        numbers = [int(part) for part in path.split(".") if part.isdigit()]
        module.visionpos_relay = relay
        module.visionpos_steps = steps_of(model, rule or {}, numbers)
        module.visionpos_recipe = recipes.get(id(module), "timm")
        give_class(module, new)
