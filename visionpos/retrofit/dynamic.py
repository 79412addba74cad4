"""make_dynamic: image sizes that differ from call to call, for classes whose tables timm fixes at one size.

The grid belongs to the call: a hook on the module that takes the image hands its size on, and position modules evaluate
their tables and networks for it. Parameters stay where they are; a swapped class follows deepcopy and pickle.
"""

from __future__ import annotations

import math
from operator import methodcaller
from typing import TYPE_CHECKING, Any

from timm.layers.pos_embed_rel import RelPosBias, RelPosMlp
from timm.models import beit, hiera, levit, maxxvit
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
from visionpos.retrofit.passes import PassHook, Recall, graph_task, keep_passes
from visionpos.retrofit.paths import find, sides_of
from visionpos.retrofit.records import recipe_of_table
from visionpos.retrofit.seams import blocks_of, class_row, row_of
from visionpos.retrofit.tables import tables_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from visionpos.retrofit.paths import Sides


class ImageHook:
    """Hands the image size of a call on to the position modules of its model."""

    def __init__(self, relay: Recall) -> None:
        self.relay = relay

    def __call__(self, _: nn.Module, args: tuple[Any, ...]) -> None:
        """Remember the sides of the image that enters."""
        sides = (args[0].shape[-2], args[0].shape[-1])
        task = graph_task()
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
_CLASSES = (
    "beit.Beit",
    "vision_transformer_relpos.VisionTransformerRelPos",
    "maxxvit.MaxxVit",
    "levit.Levit",
    "levit.LevitDistilled",
    "hiera.Hiera",
    "vision_transformer_sam.VisionTransformerSAM",
    "hieradet_sam2.HieraDet",
)
_BY_TIMM = ("vision_transformer_sam.VisionTransformerSAM", "hieradet_sam2.HieraDet")
_TAG = "_visionpos_image"


def make_dynamic(model: nn.Module) -> None:
    """Let a model take another image size at every call, in place; at its own size nothing changes.

    BEiT, RelPos, CoAtNet, LeViT and Hiera evaluate their tables and networks for the grid of the call, from the
    parameters that they have, by the recipe of their class; gradients reach them, and what checkpointing recomputes
    has the size of its own call. SAM and HieraDet resample by themselves and only lose the check of the size. MaxViT
    keeps its partitions, which must divide every map. What is attached, before or after, follows.

    Args:
        model: a model of one of these classes. State-dict keys, `resize` and `describe` stay as they were.

    Raises:
        PositionError: if the class is none of these (what creates it dynamic in timm is named), or the model has a
            table that cannot follow.

    Example:
        >>> import timm
        >>> model = timm.create_model("levit_128s", num_classes=0).eval()
        >>> make_dynamic(model)
        >>> model(torch.zeros(1, 3, 160, 96)).shape
        torch.Size([1, 384])
    """
    found = class_row(model)
    if found is None or found[0] not in _CLASSES:
        served = ", ".join(name.rpartition(".")[2] for name in _CLASSES)
        raise PositionError(
            f"model is a {type(model).__name__}; make_dynamic serves {served}. ViT, EVA and Swin take other sizes when "
            "created with dynamic_img_size=True; timm then resamples a table by its own recipe, and lift_table lets "
            "the checkpoint's recipe do it. Move the others with resize."
        )
    whole: Any = model
    chosen = dict(_chosen(whole, found[0]))
    if found[0] not in _BY_TIMM:
        _check_rest(whole, found[0], chosen)
    if chosen:
        relay = Recall()
        _swap(whole, chosen, relay)
        find(model, row_of(model).patch_embed).register_forward_pre_hook(ImageHook(relay))
        around = [*chosen, *(path for path, _ in blocks_of(model))]
        keep_passes(model, around, PassHook(relay, _TAG, relay, methodcaller("get")))
    patch = find(model, row_of(model).patch_embed)
    if getattr(patch, "img_size", None) is not None:
        patch.img_size = None


def is_dynamic(model: nn.Module) -> bool:
    """Return whether `make_dynamic` has been at a model."""
    found = class_row(model)
    if found is not None and found[0] in _BY_TIMM:
        patch = find(model, row_of(model).patch_embed)
        return getattr(patch, "img_size", ()) is None
    return any(isinstance(module, OfCall) for module in model.modules())


def _chosen(model: Any, name: str) -> Iterator[tuple[str, type]]:
    """Yield (path, dynamic class) of every position module over the whole map that has none yet."""
    for path, module in model.named_modules():
        new = _SWAPS.get(class_of(module))
        if new is not None and (name != "maxxvit.MaxxVit" or _whole_map(model, path)):
            yield path, new


def _check_rest(model: Any, name: str, chosen: dict[str, type]) -> None:
    """Refuse a table over the whole map that no dynamic class would evaluate: other sizes would not fit it."""
    paths = dict(model.named_modules())
    owners = {id(paths[path]) for path in chosen}
    for table in tables_of(model):
        windowed = name == "maxxvit.MaxxVit" and not _whole_map(model, _home(table.path))
        served = id(table.base) in owners or isinstance(table.base, OfCall)
        split = table.path.startswith("pos_embed_")  # Hiera's, one an axis of a video
        if (
            (table.moves or table.seams.kind == "log_mlp")
            and not windowed
            and (split or not served)
        ):
            raise PositionError(
                f"{table.path} belongs to a {type(table.base).__name__}, which make_dynamic cannot evaluate for "
                "another size. Move the model with resize, or build it of timm's own classes."
            )


def _home(path: str) -> str:
    """Return the path of the module that a table is in."""
    return path.rpartition(".")[0]


def _swap(model: Any, chosen: dict[str, type], relay: Recall) -> None:
    """Give position modules their dynamic classes."""
    recipes = {id(table.owner): recipe_of_table(model, table) for table in tables_of(model)}
    for path, new in chosen.items():
        module = model.get_submodule(path)
        module.visionpos_relay, module.visionpos_step = relay, _step(model, path)
        module.visionpos_recipe = recipes.get(id(module), "timm")
        give_class(module, new)


def _whole_map(model: Any, path: str) -> bool:
    """Return whether a module belongs to attention over the whole map, not to windows of it."""
    return isinstance(find(model, path.removesuffix(".attn.rel_pos")), maxxvit.TransformerBlock2d)


def _step(model: Any, path: str) -> Sides:
    """Return the pixels a cell of the map that a module sees: those of the stem, doubled at every stage."""
    row = row_of(model)
    patch = find(model, row.patch_embed)
    numbers = [int(part) for part in path.split(".") if part.isdigit()]
    if not path.startswith("stages.") or not numbers:
        return sides_of(getattr(model, "patch_stride", None) or patch.patch_size) or (1, 1)
    stage = numbers[0] - ("downsample" in path)
    stem = sides_of(patch.stride) or (1, 1)
    first = 2 if isinstance(model, maxxvit.MaxxVit) else 1
    return math.prod((stem[0], first, 2**stage)), math.prod((stem[1], first, 2**stage))
