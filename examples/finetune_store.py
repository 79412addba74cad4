"""Checkpoints of a fine-tune: folders that are whole or absent, without pickle; the last good ones are kept.

    checkpoints/step-00000200/
        model.safetensors     weights with their position lineage: `visionpos describe`, `retrofit.restore`
        average.safetensors   the same of the moving average
        training.safetensors  optimizer moments by parameter name, and the loss curve
        manifest.json         step, settings, measurements, and the SHA-256 of the three files

Everything else that a run needs is a function of the step: data order, random numbers, learning rate, strength.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune_parallel import placed, whole
from safetensors.torch import load_file, save_file

from visionpos.errors import PositionError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import Tensor, nn

FORMAT = "visionpos finetune 1"
MODEL, AVERAGE, TRAINING = FILES = (
    "model.safetensors",
    "average.safetensors",
    "training.safetensors",
)
_MANIFEST = "manifest.json"
_DRAFT = ".draft-"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint says about itself.

    Args:
        step: steps that were done.
        settings: all that the loss curve depends on.
        before: what was measured before the first step.
        sha256: file name -> digest.
    """

    step: int
    settings: dict[str, Any]
    before: dict[str, Any] = field(default_factory=dict)
    sha256: dict[str, str] = field(default_factory=dict)


@contextmanager
def writing(folder: Path, manifest: Manifest, *, keep: int) -> Iterator[Path]:
    """Yield a draft folder for the three files; at the end it becomes the checkpoint of its step, in one rename.

    A process that is killed at any moment leaves the checkpoints before it as they were, and perhaps a draft, which
    `clear` removes.
    """
    draft, target = folder / f"{_DRAFT}{secrets.token_hex(6)}", folder / f"step-{manifest.step:08d}"
    draft.mkdir(parents=True)
    try:
        yield draft
        digests = {name: _digest(draft / name) for name in FILES}
        text = json.dumps({"format": FORMAT, **asdict(manifest), "sha256": digests}, indent=1)
        (draft / _MANIFEST).write_text(text)
        for path in (*draft.iterdir(), draft):
            _flush(path)
        _discard(target)  # one that was refused, or is written again
        draft.rename(target)
        _flush(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    done = [path for path in _steps(folder) if path.name <= target.name]
    for path in done[:-keep]:
        _discard(path)


def write_training(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write moments and losses into a draft."""
    save_file(
        {name: value.detach().cpu().contiguous() for name, value in tensors.items()},
        folder / TRAINING,
    )


def read_training(folder: Path) -> dict[str, Tensor]:
    """Return moments and losses of a checkpoint."""
    return load_file(folder / TRAINING)


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return what the optimizer remembers, as `<what>/<parameter>`."""
    return {
        f"{key}/{name}": whole(value)
        for name, weight in model.named_parameters()
        for key, value in optimizer.state.get(weight, {}).items()
    }


def restore_training(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]
) -> None:
    """Give the optimizer back what it remembered."""
    weights = dict(model.named_parameters())
    for entry, value in tensors.items():
        key, _, name = entry.partition("/")
        # The count of steps is a number on the CPU; moments lie where their parameter lies.
        moved = value if value.ndim == 0 else placed(value, weights[name])
        optimizer.state[weights[name]][key] = moved


def newest(
    folder: Path, settings: dict[str, Any]
) -> tuple[Path | None, Manifest | None, list[str]]:
    """Return the newest whole checkpoint with its manifest, and what was refused before it was found.

    Raises:
        PositionError: if that checkpoint is of a run with other settings, or none of those there are is whole.
    """
    refused: list[str] = []
    for path in reversed(_steps(folder)):
        try:
            manifest = check(path)
        except PositionError as error:
            refused.append(str(error))
            continue
        _check_settings(path, manifest.settings, settings)
        return path, manifest, refused
    if refused:
        raise PositionError(
            f"output {folder} has no whole checkpoint: {' '.join(refused)} Put one back, or give another --output."
        )
    return None, None, []


def check(path: Path) -> Manifest:
    """Return the manifest of a checkpoint whose files are whole and its own.

    Raises:
        PositionError: naming the file and what is wrong with it.
    """
    try:
        data = json.loads((path / _MANIFEST).read_text())
        if data.pop("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT!r}")
        manifest = Manifest(**data)
        if f"step-{manifest.step:08d}" != path.name or set(manifest.sha256) != set(FILES):
            raise ValueError("it is of another step")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise PositionError(
            f"checkpoint {path / _MANIFEST} is not one of this script ({error}). Remove the folder."
        ) from None
    for name, digest in manifest.sha256.items():
        if not (path / name).is_file() or _digest(path / name) != digest:
            raise PositionError(
                f"checkpoint {path / name} is truncated, foreign or missing: its SHA-256 is not the manifest's. "
                "Remove the folder."
            )
    return manifest


def _check_settings(path: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Refuse to go on with another run."""
    lines = [
        f"{name} is {found.get(name)!r} there and {wanted.get(name)!r} now"
        for name in sorted({*found, *wanted})
        if found.get(name) != wanted.get(name)
    ]
    if lines:
        raise PositionError(
            f"checkpoint {path} is of another run: {'; '.join(lines)}. Give the same settings, or another --output."
        )


def _steps(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, oldest first."""
    return sorted(path for path in folder.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name))


def clear(folder: Path) -> None:
    """Remove what killed processes left."""
    for path in folder.glob(f"{_DRAFT}*"):
        shutil.rmtree(path, ignore_errors=True)


def _discard(path: Path) -> None:
    """Remove a checkpoint: first its name, so that no half of it is ever found."""
    if path.exists():
        aside = path.with_name(f"{_DRAFT}{secrets.token_hex(6)}")
        path.rename(aside)
        shutil.rmtree(aside)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
