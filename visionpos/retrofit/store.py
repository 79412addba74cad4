"""save and load: a model's weights with its position lineage in one safetensors file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from visionpos import checkpoint
from visionpos.errors import PositionError
from visionpos.retrofit.describe import lineage

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn


def save(model: nn.Module, path: str | Path, *, source: str = "") -> None:
    """Write a model's state dict and lineage to a safetensors file, whole or not at all.

    Args:
        model: a timm VisionTransformer or Eva, attached and resized as it may be.
        path: file to write.
        source: free text for the lineage: the checkpoint these weights started from.

    Raises:
        PositionError: if the file cannot be written.
    """
    checkpoint.save(path, model.state_dict(), lineage(model, source=source))


def load(model: nn.Module, path: str | Path) -> checkpoint.Lineage:
    """Read a file written by `save` into a model of the same lineage, and return the lineage.

    Args:
        model: with the same encodings attached and the same image size.
        path: file to read.

    Raises:
        PositionError: if the lineages differ (naming every field), or tensors are missing, unknown or of another shape; the
            model is then unchanged.
    """
    tensors, found = checkpoint.load(path)
    checkpoint.check(found, lineage(model), path=path)
    wanted = model.state_dict()
    faults = [f"{name} is missing" for name in wanted if name not in tensors]
    faults += [f"{name} is unknown to the model" for name in tensors if name not in wanted]
    faults += [
        f"{name} has shape {tuple(tensors[name].shape)}, the model {tuple(wanted[name].shape)}"
        for name in wanted
        if name in tensors and tensors[name].shape != wanted[name].shape
    ]
    if faults:
        raise PositionError(f"path {path} does not fit this model: {'; '.join(faults)}. Build the model that wrote it.")
    model.load_state_dict(tensors)
    return found
