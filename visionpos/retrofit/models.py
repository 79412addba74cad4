"""create and restore: timm models by name, and models rebuilt from the lineage of a file alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import timm
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from visionpos import checkpoint
from visionpos.config import encoding_spec, plain
from visionpos.errors import PositionError
from visionpos.geometry import Grid
from visionpos.retrofit.attach import attach
from visionpos.retrofit.ports import dims_of
from visionpos.retrofit.resize import target_grid
from visionpos.retrofit.rope import GridRope, own_rope, spec_of_rope
from visionpos.retrofit.seams import grid_of, row_of
from visionpos.retrofit.store import load

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn


def create(
    name: str,
    *,
    size_hw: tuple[int, int] | None = None,
    num_classes: int = 0,
    seed: int = 0,
    dynamic: bool | None = None,
    weights: str | Path | None = None,
) -> nn.Module:
    """Return a timm model in eval mode; nothing is downloaded. Without `weights` they are random.

    Args:
        name: a registered timm architecture.
        size_hw: image size in pixels; the model's own when None.
        num_classes: outputs of the head; 0 for features.
        seed: of the random weights. The global generator is left as it was.
        dynamic: whether other image sizes run without `resize`; the model's own habit when None.
        weights: a safetensors file with a state dict of this architecture, size and number of classes.

    Raises:
        PositionError: if timm does not know the name, cannot build it at this size, or the weights do not fit.
    """
    if not timm.is_model(name):
        close = timm.list_models(f"*{name}*")[:5] or timm.list_models("vit_small_patch16*")[:5]
        raise PositionError(
            f"model {name!r} is not known to timm; did you mean one of {', '.join(close)}?"
        )
    extra: dict[str, Any] = {} if size_hw is None else {"img_size": size_hw}
    if dynamic is not None:
        extra["dynamic_img_size"] = dynamic
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model: nn.Module = timm.create_model(name, num_classes=num_classes, **extra)
        except (TypeError, AssertionError, ValueError, RuntimeError) as error:
            raise PositionError(
                f"model {name!r} cannot be built at size {size_hw}: {error}"
            ) from None
    if size_hw is not None and hasattr(model, "patch_embed"):
        target_grid(model.patch_embed, size_hw)  # timm would crop the rest in silence
    if weights is not None:
        _fill(model, weights)
    return model.eval()


def _fill(model: nn.Module, path: str | Path) -> None:
    """Load a plain state dict, refusing one of another model."""
    try:
        model.load_state_dict(load_file(str(path)))
    except (OSError, SafetensorError) as error:
        raise PositionError(
            f"weights {path} cannot be read: {error}. Give a safetensors file."
        ) from None
    except RuntimeError as error:
        raise PositionError(
            f"weights {path} do not fit: {' '.join(str(error).split())[:300]}. Give the state dict of this "
            "architecture, at "
            "its own image size and number of classes."
        ) from None


def restore(path: str | Path) -> nn.Module:
    """Return the model that a file written by `save` describes: created, attached, sized and loaded.

    Args:
        path: a safetensors file with lineage.

    Raises:
        PositionError: if the file or its lineage cannot be read, or timm builds another model under that name.
    """
    tensors, lineage = checkpoint.load(path)
    head = tensors.get("head.weight")
    model = create(
        lineage.model,
        size_hw=lineage.image_size_hw,
        dynamic=lineage.build.get("dynamic_img_size"),
        num_classes=0 if head is None else head.shape[0],
    )
    row_of(model)
    _give_rope(model, lineage.rope)
    for name, entry in lineage.encodings.items():
        learned = bool(entry.get("learned", False))
        spec = encoding_spec(entry["spec"], source=str(path))
        attach(model, spec, name=name, strength=entry.get("strength", 0.0), learn_strength=learned)
    load(model, path)
    return model.eval()


def _give_rope(model: Any, data: dict[str, Any] | None) -> None:
    """Give the model's own rotary encoding the coordinates that the lineage records."""
    rope = own_rope(model)
    if rope is None or data is None:
        return
    now = spec_of_rope(rope)
    if now is not None and checkpoint.Lineage(rope=plain(now)).data()["rope"] == data:
        return
    spec: Any = encoding_spec(data, source="lineage")
    grid: Grid = grid_of(model)
    setattr(model, str(row_of(model).rope), GridRope(rope, spec, dims_of(model), grid))
