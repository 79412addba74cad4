"""examples/finetune.py goes on after a crash as if nothing had happened: the same curve, weights, average and moments.

Bit equality throughout: one machine, one thread, one order of operations.
"""

import json
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import finetune
import finetune_data as data_of
import finetune_model as model_of
import finetune_settings as settings_of
import finetune_store as store
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

import visionpos as vp
from tests.finetuning import (
    STEPS,
    TINY,
    assert_same_run,
    command,
    finish,
    losses,
    run_here,
    start,
    whole_steps,
    write_photos,
)
from tests.retrofit.zoo import apart, create, image, opened
from visionpos import retrofit


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_photos(tmp_path_factory.mktemp("photos"))


@pytest.fixture(scope="module")
def undisturbed(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("undisturbed")
    assert run_here(photos, run) == 0
    return run


def kill_at(arguments: list[str], run: Path, lines: int, wait: float) -> None:
    """Start a run and kill it `wait` seconds after its log has so many lines."""
    log = run / "log.jsonl"
    log.unlink(missing_ok=True)  # the run writes it anew, up to its checkpoint
    process = start(arguments)
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if log.exists() and log.read_text().count("\n") >= lines:
            time.sleep(wait)
            process.kill()
            break
        time.sleep(0.001)
    printed, _ = process.communicate()
    assert process.returncode == -signal.SIGKILL, printed


def test_a_killed_run_goes_on_as_if_nothing_had_happened(
    photos: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """Killed after ten steps or so, on the way from one checkpoint to the next; then run again."""
    kill_at(command(photos, tmp_path), tmp_path, lines=10, wait=0.01)
    done = whole_steps(tmp_path)
    assert done[-1] in range(8, STEPS)
    assert run_here(photos, tmp_path) == 0
    assert_same_run(tmp_path, undisturbed)


@pytest.mark.slow
@pytest.mark.timeout(900)  # eleven starts, each importing torch and timm
def test_killed_ten_times_at_random_moments(
    photos: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """The moments fall into steps, into checkpoints being written and removed, and into the start of a run."""
    draw = random.Random()
    moments = []
    for _ in range(10):
        done = max(whole_steps(tmp_path), default=0)
        moment = (min(STEPS - 1, done + draw.randrange(5)), draw.random() * 0.06)
        moments.append(moment)
        kill_at(command(photos, tmp_path), tmp_path, *moment)
        assert whole_steps(tmp_path) or done == 0, moments
    finish(command(photos, tmp_path))
    assert_same_run(tmp_path, undisturbed)


def test_a_run_that_was_stopped_goes_on(photos: Path, undisturbed: Path, tmp_path: Path) -> None:
    """`--stop-at` between two checkpoints; photos may move, threads and --save-every may differ."""
    assert run_here(photos, tmp_path / "run", "--stop-at", "7") == 0
    assert len(losses(tmp_path / "run")) == 7
    assert not (tmp_path / "run" / "model.safetensors").exists()
    draft = (
        tmp_path / "run/checkpoints/.draft-0123456789ab"
    )  # what a kill in the midst of a write leaves
    draft.mkdir()
    (draft / store.MODEL).write_bytes(b"half")
    moved = shutil.copytree(photos, tmp_path / "moved")
    assert run_here(moved, tmp_path / "run", "--save-every", "5", "--workers", "3") == 0
    assert not draft.exists()
    assert_same_run(tmp_path / "run", undisturbed)


def test_the_curve_depends_on_everything_that_is_restored(
    photos: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """The comparison can fail: a resume that forgets one part has another curve, average or moments."""
    forgets = {
        store.MODEL: lambda tensors: tensors["blocks.0.mlp.fc1.weight"].mul_(1.001),
        store.AVERAGE: lambda tensors: tensors["blocks.0.mlp.fc1.weight"].mul_(1.001),
        store.TRAINING: lambda tensors: tensors["exp_avg_sq/blocks.0.mlp.fc1.weight"].mul_(1.01),
    }
    assert run_here(photos, tmp_path / "start", "--stop-at", "8") == 0
    for number, (name, spoil) in enumerate(forgets.items()):
        run = shutil.copytree(tmp_path / "start", tmp_path / str(number))
        rewrite(run / "checkpoints" / "step-00000008", name, spoil)
        assert run_here(photos, run) == 0
        with pytest.raises(AssertionError):
            assert_same_run(run, undisturbed)


def rewrite(checkpoint: Path, name: str, spoil: Callable[[dict[str, Tensor]], Any]) -> None:
    """Change a tensor of a checkpoint, and make the manifest agree."""
    tensors, path = load_file(checkpoint / name), checkpoint / name
    with safe_open(path, framework="pt") as file:
        header = file.metadata()
    spoil(tensors)
    save_file(tensors, path, metadata=header)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["sha256"][name] = store._digest(path)
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


# What the run is made of.


def test_the_result_is_read_by_the_package(undisturbed: Path) -> None:
    """model.safetensors is the average, with its lineage; every checkpoint's files are the same kind."""
    model = retrofit.restore(undisturbed / "model.safetensors")
    kept = undisturbed / f"checkpoints/step-{STEPS:08d}"
    assert retrofit.grid_of(model).shape == (1, 2, 3)
    assert retrofit.attachments(model)["mixed_rope"].strength == 1.0
    pictures = image((48, 80))
    with torch.no_grad():
        assert torch.equal(retrofit.restore(kept / store.AVERAGE)(pictures), model(pictures))
        assert apart(retrofit.restore(kept / store.MODEL)(pictures), model(pictures)) > 1e-4


def test_the_strength_ramps_and_the_sizes_mix(undisturbed: Path) -> None:
    entries = [json.loads(line) for line in (undisturbed / "log.jsonl").read_text().splitlines()]
    strengths = [entry["strength"] for entry in entries]
    assert strengths[:10] == pytest.approx([0.1 * step for step in range(1, 11)])
    assert set(strengths[10:]) == {1.0}
    assert {tuple(entry["size_hw"]) for entry in entries} == {(32, 48), (48, 32), (48, 80)}
    rates = [entry["rate"] for entry in entries]
    assert rates[:3] == pytest.approx([1e-4, 2e-4, 3e-4])
    assert rates[3:] == sorted(rates[3:], reverse=True)


def test_the_first_measurement_is_that_of_the_model_as_it_came(
    photos: Path, undisturbed: Path
) -> None:
    """Attaching at strength 0 changes nothing, so `before` at the new size is timm's own result there."""
    arguments = [*TINY, "--data", str(photos), "--output", "x"]
    settings = settings_of.parse(arguments, None)
    before = store.check(undisturbed / f"checkpoints/step-{STEPS:08d}").before
    model = model_of.build(settings, 3, fresh=True)
    team = finetune.Team.join("none", "cpu")
    val = data_of.Photos.of(photos / "val")
    assert before["32x32"] == model_of.measure(team, model, val, (32, 32), settings)
    retrofit.resize(model, (32, 48))
    assert before["32x48"] == model_of.measure(team, model, val, (32, 48), settings)


def test_batches_are_functions_of_the_step(photos: Path) -> None:
    """Any start, any number of threads, and shares that make up the whole; every photo once an epoch."""
    train = data_of.Photos.of(photos / "train")
    sizes = ((32, 48), (48, 32))
    batches = data_of.Batches(train, sizes, 6, seed=3, workers=1)
    whole = list(batches.steps(0, 7))
    late = list(data_of.Batches(train, sizes, 6, seed=3, workers=4).steps(5, 7))
    for (images, labels), (mine, names) in zip(whole[5:], late, strict=True):
        assert torch.equal(images, mine)
        assert torch.equal(labels, names)
    shares = [data_of.Batches(train, sizes, 6, 3, rank, 2) for rank in range(2)]
    parts = zip(*(share.steps(0, 7) for share in shares), strict=True)
    for (images, labels), ((one, a), (two, b)) in zip(whole, parts, strict=True):
        assert torch.equal(images, torch.cat([one, two]))
        assert torch.equal(labels, torch.cat([a, b]))
    labels = torch.cat([labels for _, labels in whole])[:15]
    assert torch.equal(labels.sort().values, torch.arange(3).repeat_interleave(5))
    assert {tuple(images.shape[-2:]) for images, _ in whole} == set(sizes)
    assert not torch.equal(whole[0][0], next(data_of.Batches(train, sizes, 6, 4).steps(0, 1))[0])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--batch-size", "0"), "batch_size is 0"),
        (("--precision", "fp8"), "precision is 'fp8'"),
        (("--parallel", "ddp"), "torchrun"),
        (("--parallel", "tensor"), "parallel is 'tensor'"),
        (("--data", "nowhere"), "no image folder"),
        (("--weights", "nowhere.safetensors"), "weights nowhere.safetensors do not fit"),
        (("--size", "30x48"), "size_hw (30, 48)"),
    ],
)
def test_error_names_value_and_remedy(
    arguments: tuple[str, ...],
    named: str,
    photos: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_here(photos, tmp_path, *arguments) == 2
    assert named in capsys.readouterr().err


def test_weights_start_a_run(photos: Path, undisturbed: Path, tmp_path: Path) -> None:
    """A state dict starts a run, its head too if the classes are as many; going on does not need it any more."""
    settings = settings_of.parse([*TINY, "--data", "x", "--output", "y", "--seed", "9"], None)
    other = model_of.build(settings, 3, fresh=True)
    retrofit.save(other, tmp_path / "start.safetensors")
    weights = ("--weights", str(tmp_path / "start.safetensors"))
    assert run_here(photos, tmp_path / "run", *weights, "--stop-at", "1", "--lr", "0") == 0
    got = load_file(tmp_path / "run/checkpoints/step-00000001" / store.MODEL)
    assert torch.equal(got["blocks.3.attn.qkv.weight"], other.blocks[3].attn.qkv.weight)
    assert torch.equal(got["head.weight"], other.head.weight)
    (tmp_path / "start.safetensors").unlink()
    assert run_here(photos, tmp_path / "run", *weights, "--stop-at", "2", "--lr", "0") == 0


# The plain way, without the script.


def test_train_save_load_continue(tmp_path: Path) -> None:
    """Three steps, save, load into a new model and optimizer, two more: bit for bit as without the break."""

    def begin() -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = opened(create("vit_tiny_patch16_224", num_classes=5, drop_path_rate=0.3))
        retrofit.attach(model, vp.MixedRopeSpec(), strength=0.5, learn_strength=True)
        groups = retrofit.parameter_groups(model, layer_decay=0.8)
        return model.train(), torch.optim.AdamW(groups, lr=1e-2)

    def go(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
        curve = []
        for step in steps:
            torch.manual_seed(step)
            loss = F.cross_entropy(model(image((64, 96), seed=step)), torch.tensor([1, 3]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            curve.append(loss.item())
        return curve

    model, optimizer = begin()
    first = go(model, optimizer, range(3))
    retrofit.save(model, tmp_path / "model.safetensors")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    store.write_training(tmp_path, store.training_state(model, optimizer))
    expected = go(model, optimizer, range(3, 5))
    assert len({*first, *expected}) == 5

    for way in ("torch", "script"):
        twin, again = begin()
        retrofit.load(twin, tmp_path / "model.safetensors")
        if way == "torch":
            again.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
        else:
            store.restore_training(twin, again, store.read_training(tmp_path))
        assert go(twin, again, range(3, 5)) == expected
        assert_equal_states(twin, model)
    forgetful, fresh = begin()
    retrofit.load(forgetful, tmp_path / "model.safetensors")
    assert go(forgetful, fresh, range(3, 5)) != expected


def assert_equal_states(one: nn.Module, other: nn.Module) -> None:
    theirs = other.state_dict()
    for name, value in one.state_dict().items():
        assert torch.equal(value, theirs[name]), name
