"""make_dynamic: image sizes that differ from call to call, for classes whose tables timm fixes at one size.

The grid belongs to the call: a hook on the module that takes the image hands its size on, and position modules evaluate
their tables and networks for it. Parameters stay where they are; a swapped class follows deepcopy and pickle.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from timm.layers.pos_embed_rel import RelPosBias, RelPosMlp
from timm.models import beit, hiera, levit, maxxvit
from torch import nn

from visionpos.errors import PositionError
from visionpos.retrofit.attachment import Relay
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
)
from visionpos.retrofit.paths import find, sides_of
from visionpos.retrofit.records import recipe_of_table
from visionpos.retrofit.seams import class_row, row_of
from visionpos.retrofit.tables import tables_of

if TYPE_CHECKING:
    from visionpos.retrofit.paths import Sides


class ImageHook:
    """Hands the image size of a call on to the position modules of its model."""

    def __init__(self, relay: Relay) -> None:
        self.relay = relay

    def __call__(self, _: nn.Module, args: tuple[Any, ...]) -> None:
        """Remember the sides of the image that enters."""
        self.relay.put((args[0].shape[-2], args[0].shape[-1]))


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


def make_dynamic(model: nn.Module) -> None:
    """Let a model take another image size at every call, in place; at its own size nothing changes.

    BEiT, RelPos, CoAtNet, LeViT and Hiera evaluate their tables and networks for the grid of the call, from the
    parameters that they have, by the recipe of their class; gradients reach them. SAM and HieraDet resample by
    themselves and only lose the check of the size. MaxViT keeps its partitions, which must divide every map.

    Args:
        model: a model of one of these classes. State-dict keys, `resize` and `describe` stay as they were.

    Raises:
        PositionError: if the class is none of these; what creates it dynamic in timm is named.

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
            f"model is a {type(model).__name__}; make_dynamic serves {served}. "
            "ViT, EVA and Swin take other sizes when created with dynamic_img_size=True; move the others with resize."
        )
    whole: Any = model
    relay = Relay()
    if _swap(whole, found[0], relay):
        find(model, row_of(model).patch_embed).register_forward_pre_hook(ImageHook(relay))
    patch = find(model, row_of(model).patch_embed)
    if getattr(patch, "img_size", None) is not None:
        patch.img_size = None


def _swap(model: Any, name: str, relay: Relay) -> bool:
    """Give every position module over the whole map its dynamic class; return whether there was one."""
    swapped = False
    recipes = {id(table.owner): recipe_of_table(model, table) for table in tables_of(model)}
    for path, module in model.named_modules():
        new = _SWAPS.get(type(module))
        if new is None or (name == "maxxvit.MaxxVit" and not _whole_map(model, path)):
            continue
        module.visionpos_relay, module.visionpos_step = relay, _step(model, path)
        module.visionpos_recipe = recipes.get(id(module), "timm")
        module.__class__ = new
        swapped = True
    return swapped


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
