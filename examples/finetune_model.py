"""The model of a fine-tune: how it is built and measured, and what is a function of the step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import timm
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

import visionpos as vp
from visionpos import retrofit
from visionpos.errors import PositionError

if TYPE_CHECKING:
    from pathlib import Path

    from finetune_data import Photos
    from finetune_parallel import Team
    from finetune_settings import Settings, Size
    from torch import nn


def rate(settings: Settings, step: int) -> float:
    """Return the learning rate: linear warmup, then a cosine down to a hundredth."""
    if step < settings.warmup:
        return settings.lr * (step + 1) / settings.warmup
    progress = (step - settings.warmup) / max(1, settings.steps - settings.warmup)
    return settings.lr * (0.01 + 0.99 * (1 + math.cos(math.pi * progress)) / 2)


def strength(settings: Settings, step: int) -> float:
    """Return the strength of the encoding in a step; never 0, as DDP wants every parameter used."""
    ramp = retrofit.Schedule(steps=max(1, settings.ramp), end=settings.strength)
    return ramp.at(step + 1)


def decay(settings: Settings, step: int) -> float:
    """Return how much of the moving average stays: less at first, when it is still the start."""
    return min(settings.ema, (1 + step) / (10 + step))


def sizes_of(settings: Settings, model: Any) -> tuple[Size, Size]:
    """Return the image size of the weights, and that of the run."""
    old = settings.from_size or tuple(model.patch_embed.img_size)
    return old, settings.size or old


def build(settings: Settings, classes: int, *, fresh: bool) -> Any:
    """Return the timm model before anything is attached; weights are read only if the run begins."""
    extra: dict[str, Any] = {"img_size": settings.from_size} if settings.from_size else {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        try:
            model = timm.create_model(
                settings.model,
                pretrained=settings.pretrained and fresh,
                num_classes=classes,
                dynamic_img_size=True,  # batches have several sizes
                drop_path_rate=settings.drop_path,
                **extra,
            )
        except (RuntimeError, TypeError, ValueError) as error:
            raise PositionError(
                f"model {settings.model!r} cannot be built with sizes that change from batch to batch: "
                f"{' '.join(str(error).split())[:300]}. Give --model a ViT, DeiT, DINO, SigLIP, CLIP, EVA or Swin."
            ) from None
    for size in settings.mix:
        vp.Grid.of_image(
            size, patch=model.patch_embed.patch_size
        )  # refuses what timm would in a later step
    if settings.weights is not None and fresh:
        read_weights(model, settings.weights)
    return model


def read_weights(model: nn.Module, path: Path) -> None:
    """Load a state dict; a head of another number of classes stays as it is."""
    try:
        tensors = load_file(path)
        own = model.state_dict()
        for name in ("head.weight", "head.bias"):
            if name in tensors and tensors[name].shape != own[name].shape:
                tensors[name] = own[name]
        tensors.pop("visionpos_source.table", None)
        model.load_state_dict(tensors)
    except (OSError, KeyError, RuntimeError, ValueError) as error:
        raise PositionError(
            f"weights {path} do not fit: {' '.join(str(error).split())[:300]}. Give a safetensors file of this --model "
            "at --from-size, with nothing attached."
        ) from None


def autocast(settings: Settings, team: Team) -> torch.autocast:
    """Return the context in which the model runs forward."""
    return torch.autocast(team.device.type, torch.bfloat16, enabled=settings.precision == "bf16")


@torch.no_grad()
def measure(
    team: Team, model: Any, photos: Photos, size_hw: Size, settings: Settings
) -> dict[str, float]:
    """Return accuracy and loss on the middle of every photo. Every process takes as many, some twice, at weight 0."""
    training = model.training
    model.eval()
    count, share = len(photos.samples), max(1, settings.batch_size // team.world)
    sums = torch.zeros(2, device=team.device, dtype=torch.float64)
    for first in range(team.rank * share, count + team.rank * share, team.world * share):
        numbers = range(first, first + share)
        images, labels = zip(
            *(photos.whole(min(i, count - 1), size_hw) for i in numbers), strict=True
        )
        weights = torch.tensor([float(i < count) for i in numbers], device=team.device)
        target = torch.tensor(labels, device=team.device)
        with autocast(settings, team):
            logits = model(torch.stack(images).to(team.device)).float()
        hits = logits.argmax(-1) == target
        losses = F.cross_entropy(logits, target, reduction="none")
        sums += torch.stack([(hits * weights).sum(), (losses * weights).sum()])
    model.train(training)
    hits_mean, loss_mean = (team.mean(total) * team.world / count for total in sums)
    return {"accuracy": hits_mean, "loss": loss_mean}
