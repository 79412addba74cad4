"""create and restore: timm models by name, and models rebuilt from the lineage of a file alone."""

from __future__ import annotations

from pathlib import Path
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
from visionpos.retrofit.dynamic import make_dynamic
from visionpos.retrofit.fade import adds_plainly
from visionpos.retrofit.kinds import check_kinds
from visionpos.retrofit.patches import adapt_channels
from visionpos.retrofit.paths import LARGEST, whole_sides
from visionpos.retrofit.ports import dims_of
from visionpos.retrofit.resize import resize
from visionpos.retrofit.rope import GridRope, own_rope, spec_of_rope
from visionpos.retrofit.seams import class_row, grid_of, place, row_of
from visionpos.retrofit.sizes import checked_size
from visionpos.retrofit.store import load
from visionpos.retrofit.windows import remember_policy, set_unit

if TYPE_CHECKING:
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
    check_kinds("name", name, str)
    check_kinds("num_classes", num_classes, int)
    check_kinds("seed", seed, int)
    check_kinds("dynamic", dynamic, bool, None)
    check_kinds("weights", weights, str, Path, None)
    if size_hw is not None and whole_sides(size_hw) is None:
        raise PositionError(
            f"size_hw {size_hw!r} is no image size (height, width); two whole numbers above 0 are required, {LARGEST} "
            "at most. Pass (224, 224), for one."
        )
    if not timm.is_model(name):
        close = timm.list_models(f"*{name}*")[:5] or timm.list_models("vit_small_patch16*")[:5]
        raise PositionError(
            f"model {name!r} is not known to timm; did you mean one of {', '.join(close)}?"
        )
    extra: dict[str, Any] = {} if dynamic is None else {"dynamic_img_size": dynamic}
    sized = size_hw is not None and _built_at_size(name)
    model = _created(
        name,
        seed,
        size_hw,
        num_classes=num_classes,
        **extra,
        **({"img_size": size_hw} if sized else {}),
    )
    if size_hw is not None and class_row(model) is not None:
        checked_size(model, row_of(model), size_hw)  # timm would crop the rest in silence
        if not sized:
            resize(model, size_hw)
    if weights is not None:
        _fill(model, weights)
    return model.eval()


def _built_at_size(name: str) -> bool:
    """Return whether timm is to build a model at a size: where resize leaves it to timm, or has no row for it."""
    try:
        with torch.device("meta"):
            model: nn.Module = timm.create_model(name)
    except (RuntimeError, NotImplementedError):  # a stem that is measured by running it
        return True
    found = class_row(model)
    return found is None or found[1].resize == "native"


def _created(name: str, seed: int, size_hw: Any, **options: Any) -> nn.Module:
    """Return a seeded model of timm's; the global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model: nn.Module = timm.create_model(name, **options)
        except (TypeError, AssertionError, ValueError, RuntimeError) as error:
            raise PositionError(
                f"model {name!r} cannot be built at size {size_hw}: {error}"
            ) from None
    return model


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
    check_kinds("path", path, str, Path)
    tensors, lineage = checkpoint.load(path)
    head = tensors.get(_head_of(lineage.model))
    model = create(
        lineage.model,
        dynamic=lineage.build.get("dynamic_img_size") or None,
        num_classes=0 if head is None else head.shape[0],
    )
    row_of(model)
    _restore_sizes(model, lineage)
    if lineage.build.get("made_dynamic"):
        make_dynamic(model)
    if adds_plainly(model) and "pos_embed" not in lineage.tables:
        place(model, "pos_embed", None)  # lifted, and perhaps faded out since
    _give_rope(model, lineage.rope)
    for name, entry in lineage.encodings.items():
        attach(
            model,
            encoding_spec(entry["spec"], source=str(path)),
            name=name,
            strength=entry.get("strength", 0.0),
            learn_strength=bool(entry.get("learned", False)),
            partial=bool(entry.get("partial", False)),
        )
    load(model, path)
    return model.eval()


def _head_of(name: str) -> str:
    """Return the path of the classifier's weight, in a model of this name."""
    cfg = timm.get_pretrained_cfg(name) if timm.is_model(name) else None
    told: Any = None if cfg is None else cfg.classifier
    first = told[0] if isinstance(told, (tuple, list)) else told
    return f"{first or 'head'}.weight"


def _restore_sizes(model: Any, found: checkpoint.Lineage) -> None:
    """Give a model the channels, patches, image size and windows that a lineage records."""
    channels, patch = found.build.get("in_chans"), found.build.get("patch_size")
    if isinstance(channels, int) and channels not in (None, getattr(model, "in_chans", channels)):
        adapt_channels(model, channels)
    row = row_of(model)
    windows = found.windows
    policy = _policy(windows)
    cut = tuple(patch) if patch and row.repatch else None
    if found.image_size_hw is not None:
        resize(model, found.image_size_hw, patch=cut, windows=policy)
    if windows:
        told = windows.get("policy")
        remember_policy(model, (told[0], told[1]) if isinstance(told, list) else told)
    for path, unit in windows.get("trained_hw", {}).items():
        set_unit(model, path, unit)


def _policy(windows: dict[str, Any]) -> Any:
    """Return the windows to resize with: one size for all stages where the lineage has one, else the policy."""
    sizes = {tuple(size) for size in windows.get("windows_hw", [])}
    return sizes.pop() if len(sizes) == 1 else windows.get("policy")


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
    place(model, str(row_of(model).rope), GridRope(rope, spec, dims_of(model), grid))
