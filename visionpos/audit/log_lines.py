"""Lines of a PositionLog: what stands in them beside histograms, how TensorBoard shows them, how they are read back."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from visionpos.errors import PositionError

if TYPE_CHECKING:
    from os import PathLike

    from torch import Tensor

    from visionpos.audit.histograms import Entry
    from visionpos.encodings import T5Bias

AXES = ("t", "h", "w")
_SUPPORT = ("position", "offset", "attn_distance")


def last_support(path: str | PathLike[str]) -> dict[str, list[Entry]]:
    """Return the `train_support` of the last whole line that a PositionLog wrote.

    Raises:
        PositionError: if the file cannot be read, or holds no such line.
    """
    data = last_line(path)
    return {key: data[key] for key in _SUPPORT}


def last_line(path: str | PathLike[str]) -> dict[str, Any]:
    """Return the last whole line that a PositionLog wrote.

    Raises:
        PositionError: if the file cannot be read, or holds no such line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise PositionError(
            f"path {path} cannot be read ({error}); the JSONL file of a PositionLog is required."
        ) from None
    for line in reversed(lines):
        try:
            data: dict[str, Any] = json.loads(line)
            if all(isinstance(data[key], list) for key in _SUPPORT):
                return data
        except (ValueError, KeyError, TypeError, RecursionError):
            continue  # a run that was killed leaves half a line
    raise PositionError(
        f"path {path} holds no line of a PositionLog; the JSONL file of one is required."
    )


def checked_path(path: str | PathLike[str]) -> Path:
    """Return where lines go, the file made and its last line ended; refuse before training starts.

    Raises:
        PositionError: if it cannot be written.
    """
    try:
        place = Path(path)
        with place.open("a+b") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # a run that was killed
                    file.write(b"\n")
    except (OSError, TypeError, ValueError) as error:
        raise PositionError(
            f"path {path} cannot be written ({error}); the name of a file in a folder that is there is required."
        ) from None
    return place


def drift(now: Tensor, start: Tensor) -> float | None:
    """Return how far a parameter went, as a share of its size at the start; None if it has another shape now."""
    if now.shape != start.shape:
        return None
    size = float(start.norm())
    return float((now - start).norm()) / size if size else float(now.norm())


def bucket_use(bias: T5Bias, offsets: Mapping[str, Entry]) -> list[list[float]]:
    """Return how often each bucket of each axis was asked for."""
    names, out = AXES[-len(bias.spec.buckets) :], []
    for number, (axis, rows) in enumerate(zip(names, bias.spec.buckets, strict=True)):
        used = np.zeros(rows)
        if axis in offsets:
            edges = np.asarray(offsets[axis]["bins"])
            middle = torch.from_numpy((edges[:-1] + edges[1:]) / 2)
            asked = middle[:, None].expand(-1, len(names))
            found = bias.buckets(asked)[:, number].numpy()
            np.add.at(used, found, np.asarray(offsets[axis]["hist"]))
        out.append(used.tolist())
    return out


def writer_of(tensorboard: Any) -> Any:
    """Return a writer of TensorBoard for a folder, or the writer that is given."""
    if not isinstance(tensorboard, (str, Path)):
        if tensorboard is not None and not callable(getattr(tensorboard, "add_scalar", None)):
            raise PositionError(
                f"tensorboard is {tensorboard!r:.60}; a folder, or a writer with add_scalar is required."
            )
        return tensorboard
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ImportError(
            "tensorboard is not installed and a folder for it is given; install it with pip install tensorboard, or "
            "leave tensorboard= out."
        ) from None
    return SummaryWriter(str(tensorboard))


def show(writer: Any, line: Mapping[str, Any]) -> None:
    """Write the numbers that a person follows: reach, mean distance, drift and dead buckets."""
    step = line["step"]
    for name, value in _scalars(line):
        writer.add_scalar(f"positions/{name}", value, step)


def _scalars(line: Mapping[str, Any]) -> Iterable[tuple[str, float]]:
    for quantity in _SUPPORT:
        for entry in line[quantity]:
            edges, mass = np.asarray(entry["bins"]), np.asarray(entry["hist"])
            middle = np.abs(edges[:-1] + edges[1:]) / 2
            yield f"{quantity}/{entry['axis']}/max", entry["max"]
            yield f"{quantity}/{entry['axis']}/mean", float((middle * mass).sum() / mass.sum())
    for name, share in line["drift"].items():
        if share is not None:
            yield f"drift/{name}", share
    for name, axes in line["buckets"].items():
        for number, used in enumerate(axes):
            yield f"buckets/{name}/{number}/empty", sum(not count for count in used) / len(used)
