"""The settings of finetune.py: one field an option, with its help."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

from visionpos.errors import PositionError

Size = tuple[int, int]  # (height, width) in pixels


def size_of(text: str) -> Size:
    """Return (height, width) of a text such as 320x448."""
    height, _, width = text.partition("x")
    if not (height.isdecimal() and width.isdecimal()):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size; HEIGHTxWIDTH is required, as 320x448"
        )
    return int(height), int(width)


def sizes_of(text: str) -> tuple[Size, ...]:
    """Return the sizes of a text such as 256x352,448x320."""
    return tuple(size_of(part) for part in text.split(",") if part)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything a run depends on: the type of an option, how its text is read, and its help."""

    data: Annotated[Path, Path, "folder with train/CLASS/*.jpg and, to measure, val/CLASS/*.jpg"]
    output: Annotated[Path, Path, "folder of the run: checkpoints/, log.jsonl, model.safetensors"]
    model: Annotated[str, str, "timm architecture"] = "vit_small_patch16_224"
    weights: Annotated[Path | None, Path, "safetensors file to start from"] = None
    pretrained: Annotated[bool, None, "start from timm's weights (downloads them)"] = False
    from_size: Annotated[Size | None, size_of, "size of the weights, if not the model's own"] = None
    size: Annotated[
        Size | None, size_of, "size to move to, if another than that of the weights"
    ] = None
    mix: Annotated[tuple[Size, ...], sizes_of, "more sizes that batches have, with commas"] = ()
    encoding: Annotated[str, str, "what is attached (see `visionpos encodings`), or none"] = (
        "rope_mixed"
    )
    strength: Annotated[float, float, "of the encoding, at the end of its ramp"] = 1.0
    ramp: Annotated[int, int, "steps in which the strength grows from 0"] = 200
    steps: Annotated[int, int, "length of the run"] = 1000
    batch_size: Annotated[int, int, "photos a step, of all processes together"] = 32
    lr: Annotated[float, float, "learning rate of the head after warmup"] = 3e-4
    warmup: Annotated[int, int, "steps in which the rate grows from 0"] = 50
    weight_decay: Annotated[float, float, "of AdamW; no position parameter decays"] = 0.05
    layer_decay: Annotated[float, float, "factor of the rate a layer, from the head down"] = 0.75
    clip: Annotated[float, float, "largest norm of the gradient"] = 1.0
    smoothing: Annotated[float, float, "of the labels"] = 0.1
    drop_path: Annotated[float, float, "rate of stochastic depth"] = 0.0
    ema: Annotated[float, float, "decay of the moving average of the weights"] = 0.999
    precision: Annotated[str, str, "bf16 (autocast) or fp32"] = "bf16"
    checkpointing: Annotated[bool, None, "recompute blocks in the backward pass: less memory"] = (
        False
    )
    seed: Annotated[int, int, "of everything random"] = 0
    save_every: Annotated[int, int, "steps between checkpoints"] = 200
    keep: Annotated[int, int, "checkpoints that are kept"] = 2
    stop_at: Annotated[int | None, int, "stop after this step, to go on later"] = None
    parallel: Annotated[str, str, "none, or under torchrun ddp or fsdp2"] = "none"
    device: Annotated[str, str, "auto, cpu or cuda"] = "auto"
    workers: Annotated[int, int, "threads that decode photos"] = 4
    quiet: Annotated[bool, None, "no progress bar"] = False

    def __post_init__(self) -> None:
        at_least = {"steps": 1, "batch_size": 1, "ramp": 0, "warmup": 0, "save_every": 1, "keep": 1}
        for name, least in at_least.items():
            if getattr(self, name) < least:
                raise PositionError(
                    f"{name} is {getattr(self, name)}; at least {least} is required."
                )
        for name, value in asdict(self).items():
            if isinstance(value, float) and not 0 <= value < math.inf:
                raise PositionError(
                    f"{name} is {value}; a finite number of at least 0 is required."
                )
        if self.precision not in ("bf16", "fp32"):
            raise PositionError(f"precision is {self.precision!r}; it must be bf16 or fp32.")

    def numbers(self) -> dict[str, Any]:
        """Return what the loss curve depends on: two runs that agree in it are one run."""
        free = {
            "data",
            "output",
            "save_every",
            "keep",
            "stop_at",
            "parallel",
            "device",
            "workers",
            "quiet",
        }
        kept = {name: value for name, value in asdict(self).items() if name not in free}
        plain: dict[str, Any] = json.loads(json.dumps(kept, default=str))
        return plain


def parse(arguments: list[str] | None, description: str | None) -> Settings:
    """Return the settings of a command line."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    hints = get_type_hints(Settings, include_extras=True)
    for entry in fields(Settings):
        _, read, text = get_args(hints[entry.name])
        name = "--" + entry.name.replace("_", "-")
        if read is None:
            parser.add_argument(name, action="store_true", help=text)
        elif entry.default is MISSING:
            parser.add_argument(name, type=read, required=True, help=text)
        else:
            shown = (
                f"{text} (default: {entry.default})" if entry.default not in (None, ()) else text
            )
            parser.add_argument(name, type=read, default=entry.default, help=shown)
    return Settings(**vars(parser.parse_args(arguments)))
