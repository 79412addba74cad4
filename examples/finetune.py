r"""Fine-tune a timm ViT, retrofitted with visionpos, at a new resolution: a plain torch loop on an image folder.

    python examples/finetune.py --data photos --model vit_small_patch16_224 --weights vit_small.safetensors \
        --size 320x448 --mix 256x352,448x320 --output run
    torchrun --nproc-per-node 8 examples/finetune.py --parallel fsdp2 --data photos ...

The encoding is attached at strength 0, so the model starts as it was, and its strength grows over the ramp. Run the
same command again to go on after a crash: on one machine the loss curve is, bit for bit, that of an undisturbed run.
What is random in a step comes from generators seeded by the step; learning rate and strength are functions of the step;
weights, their average, the optimizer's moments and the losses are in the checkpoint.
"""

from __future__ import annotations

import copy
import json
import math
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import finetune_store as store
import timm
import torch
from finetune_data import Batches, Photos, seed_of
from finetune_model import autocast, build, decay, measure, rate, sizes_of, strength
from finetune_parallel import Team, local
from finetune_settings import Settings, parse
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.nn import functional as F

from visionpos import config, retrofit
from visionpos.errors import PositionError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn


@dataclass(kw_only=True)
class Run:
    """A model in training, and what goes on beside it."""

    settings: Settings
    team: Team
    model: Any
    average: Any
    shell: Any  # whole weights go through it where the model's are divided among processes
    runner: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Batches
    losses: list[float]
    before: dict[str, Any]


def prepare(
    settings: Settings, team: Team, train: Photos, val: Photos | None, *, fresh: bool
) -> Run:
    """Return a run at its first step."""
    model = build(settings, len(train.classes), fresh=fresh).to(team.device)
    (old, new), before = sizes_of(settings, model), {}
    if fresh and val is not None:
        before[f"{old[0]}x{old[1]}"] = measure(team, model, val, old, settings)
    if settings.encoding != "none":
        torch.manual_seed(seed_of(settings.seed, "encoding"))
        retrofit.attach(model, config.load_encoding(settings.encoding), strength=0.0)
    retrofit.resize(model, new)
    if fresh and val is not None:
        before[f"{new[0]}x{new[1]}"] = measure(team, model, val, new, settings)
    average = copy.deepcopy(model).eval().requires_grad_(requires_grad=False)
    shell = copy.deepcopy(average) if team.mode == "fsdp2" else None
    model.set_grad_checkpointing(settings.checkpointing)
    team.shard(model)
    team.shard(average)
    groups = retrofit.parameter_groups(
        model, weight_decay=settings.weight_decay, layer_decay=settings.layer_decay
    )
    return Run(
        settings=settings,
        team=team,
        model=model.train(),
        average=average,
        shell=shell,
        runner=team.runner(model),
        optimizer=torch.optim.AdamW(groups, lr=settings.lr),
        batches=Batches(
            train,
            (new, *settings.mix),
            settings.batch_size,
            settings.seed,
            team.rank,
            team.world,
            settings.workers,
        ),
        losses=[],
        before=before,
    )


# Checkpoints.


def save(run: Run, settings: dict[str, Any]) -> None:
    """Write a checkpoint. All processes gather, the first one writes."""
    manifest = store.Manifest(step=len(run.losses), settings=settings, before=run.before)
    folder = run.settings.output / "checkpoints"
    first = run.team.rank == 0
    with (
        store.writing(folder, manifest, keep=run.settings.keep) if first else nullcontext() as draft
    ):
        for name, model in ((store.MODEL, run.model), (store.AVERAGE, run.average)):
            gathered = run.team.gathered(model, run.shell)
            if draft is not None:
                retrofit.save(gathered, draft / name, source=f"finetune.py, step {manifest.step}")
        tensors = store.training_state(run.model, run.optimizer)
        tensors["loss"] = torch.tensor(run.losses, dtype=torch.float64)
        if draft is not None:
            store.write_training(draft, tensors)


def resume(run: Run, path: Path, manifest: store.Manifest) -> None:
    """Bring a run to where a checkpoint was written."""
    for name, model in ((store.MODEL, run.model), (store.AVERAGE, run.average)):
        target = model if run.shell is None else run.shell
        retrofit.load(target, path / name)
        run.team.fill(model, target)
    tensors = store.read_training(path)
    run.losses, run.before = tensors.pop("loss").tolist(), manifest.before
    store.restore_training(run.model, run.optimizer, tensors)


# The loop.


def one_step(run: Run, step: int, images: Tensor, labels: Tensor) -> float:
    """Train on one batch and return its loss, the mean over all processes."""
    settings, team = run.settings, run.team
    torch.manual_seed(seed_of(settings.seed, "step", step, team.rank))
    for model in (run.model, run.average):
        for part in retrofit.attachments(model).values():
            part.set_strength(strength(settings, step))
    for group in run.optimizer.param_groups:
        group["lr"] = rate(settings, step) * group.get("lr_scale", 1.0)
    with autocast(settings, team):
        logits = run.runner(images.to(team.device, non_blocking=True))
    loss = F.cross_entropy(
        logits.float(), labels.to(team.device), label_smoothing=settings.smoothing
    )
    value = team.mean(loss)
    if not math.isfinite(value):
        raise PositionError(
            f"loss is {value} at step {step}; a finite one is required. The last checkpoint is as it was: try a lower "
            "--lr, a longer --warmup, or --precision fp32, with another --output."
        )
    loss.backward()
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), settings.clip)
    run.optimizer.step()
    run.optimizer.zero_grad()
    follow(run.average, run.model, decay(settings, step))
    return value


@torch.no_grad()
def follow(average: nn.Module, model: nn.Module, stays: float) -> None:
    """Move the average towards the model; what does not average, such as counters, is copied."""
    weights = model.state_dict()
    for name, mine in average.state_dict().items():
        theirs = local(weights[name])
        if theirs.is_floating_point():
            local(mine).lerp_(theirs, 1 - stays)
        else:
            local(mine).copy_(theirs)


def log_line(run: Run, step: int) -> str:
    """Return the log's line of a step that is done."""
    entry = {
        "step": step,
        "loss": run.losses[step],
        "rate": rate(run.settings, step),
        "strength": strength(run.settings, step),
        "size_hw": run.batches.size_hw(step),
    }
    return json.dumps(entry) + "\n"


def train_on(run: Run, numbers: dict[str, Any]) -> None:
    """Train until the last step, with a progress bar, a log and checkpoints."""
    settings, start = run.settings, len(run.losses)
    first, stop = run.team.rank == 0, min(settings.steps, settings.stop_at or settings.steps)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=Console(stderr=True), disable=settings.quiet or not first)
    log = (settings.output / "log.jsonl").open("w") if first else nullcontext()
    with log as file, bar:
        if file is not None:
            file.writelines(log_line(run, step) for step in range(start))
        task = bar.add_task("training", total=settings.steps, completed=start)
        for step, (images, labels) in enumerate(run.batches.steps(start, stop), start):
            run.losses.append(one_step(run, step, images, labels))
            if file is not None:
                file.write(log_line(run, step))
                file.flush()
            bar.update(task, advance=1, description=f"loss {run.losses[-1]:.3f}")
            if (step + 1) % settings.save_every == 0 or step + 1 == stop:
                save(run, numbers)


def report(name: str, measured: dict[str, Any]) -> str:
    """Return one line of measurements."""
    parts = [
        f"{size} {m['accuracy']:.1%} right, loss {m['loss']:.3f}" for size, m in measured.items()
    ]
    return f"{name}: " + " | ".join(parts)


def find(
    folder: Path, team: Team, numbers: dict[str, Any]
) -> tuple[Path | None, store.Manifest | None]:
    """Return the checkpoint to go on from, the same in all processes, or None where the run begins."""
    path, manifest, refused = store.newest(folder, numbers)
    step = -1 if manifest is None else manifest.step
    if team.least(step) != step:
        raise PositionError(
            f"output {folder} has step {step} for process {team.rank}, and less for another; all must see the same "
            "folder. Put --output on a disk that they share."
        )
    if team.rank == 0:
        store.clear(folder)
        for line in refused:
            print(f"refused: {line}", file=sys.stderr)
        if path is not None:
            print(f"going on from {path}", file=sys.stderr)
    return path, manifest


def execute(settings: Settings, team: Team) -> None:
    """Begin a run or go on with it, to its end."""
    cfg = timm.get_pretrained_cfg(settings.model)
    statistics = {"mean": cfg.mean, "std": cfg.std} if cfg is not None else {}
    train = Photos.of(settings.data / "train", **statistics)
    has_val = (settings.data / "val").is_dir()
    val = Photos.of(settings.data / "val", **statistics) if has_val else None
    if val is not None and val.classes != train.classes:
        raise PositionError(
            f"data {settings.data}/val has classes {val.classes}; those of train, {train.classes}, are required."
        )
    numbers = {**settings.numbers(), "photos": train.digest(), "val": val and val.digest()}
    path, manifest = find(settings.output / "checkpoints", team, numbers)
    run = prepare(settings, team, train, val, fresh=manifest is None)
    if path is not None and manifest is not None:
        resume(run, path, manifest)
    else:
        save(run, numbers)
    train_on(run, numbers)
    if len(run.losses) < settings.steps:
        return
    sizes = dict.fromkeys(sizes_of(settings, run.model)) if val is not None else {}
    after = {f"{h}x{w}": measure(team, run.average, val, (h, w), settings) for h, w in sizes}
    gathered = team.gathered(run.average, run.shell)
    if team.rank == 0:
        retrofit.save(
            gathered, settings.output / "model.safetensors", source=f"finetune.py, {settings.model}"
        )
        for name, measured in (("before", run.before), ("after ", after)) if after else ():
            print(report(name, measured))
        print(f"wrote {settings.output / 'model.safetensors'}")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; 2 for what the user can mend."""
    try:
        settings = parse(arguments, __doc__)
        team = Team.join(settings.parallel, settings.device)
    except PositionError as error:
        print(f"finetune: {error}", file=sys.stderr)
        return 2
    try:
        execute(settings, team)
    except PositionError as error:
        print(f"finetune: {error}", file=sys.stderr)
        return 2
    finally:
        team.leave()
    return 0


if __name__ == "__main__":
    sys.exit(main())
