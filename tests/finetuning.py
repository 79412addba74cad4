"""A tiny image folder and a tiny run of examples/finetune.py, for tests that kill it or divide it among processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import finetune
import finetune_store as store
import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "examples" / "finetune.py"
if str(SCRIPT.parent) not in sys.path:
    sys.path.append(
        str(SCRIPT.parent)
    )  # the scripts import each other by name, as `python SCRIPT` lets them

# Three rectangles, recomputed blocks, dropped paths: whatever draws random numbers or depends on the size of a batch.
STEPS = 18
TINY = [
    *("--model", "test_vit", "--from-size", "32x32", "--size", "32x48", "--mix", "48x32,48x80"),
    *(
        "--batch-size",
        "4",
        "--ramp",
        "10",
        "--warmup",
        "3",
        "--steps",
        str(STEPS),
        "--save-every",
        "4",
    ),
    *("--checkpointing", "--device", "cpu", "--workers", "1", "--quiet"),
]


def write_photos(folder: Path, *, classes: int = 3, seed: int = 5) -> Path:
    """Write an image folder of random rectangles, and return it."""
    draw = np.random.default_rng(seed)
    for part, count in (("train", 5), ("val", 3)):
        for label in range(classes):
            place = folder / part / f"class{label}"
            place.mkdir(parents=True)
            for number in range(count):
                shape = (40 + 3 * number, 60 - 4 * label, 3)
                picture = draw.integers(0, 256, shape, dtype=np.uint8)
                Image.fromarray(picture).save(place / f"{number}.png")
    return folder


def losses(run: Path) -> list[float]:
    """Return the loss curve of a run, every bit of it."""
    lines = (run / "log.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    assert [entry["step"] for entry in entries] == list(range(len(entries)))
    return [entry["loss"] for entry in entries]


def run_here(photos: Path, run: Path, *more: str) -> int:
    """Run in this process, where torch is imported already, and return the exit code."""
    return finetune.main([*TINY, "--data", str(photos), "--output", str(run), *more])


def command(photos: Path, run: Path, *more: str, processes: int = 0) -> list[str]:
    """Return the command line of a run, under torchrun if it has processes."""
    launcher = [sys.executable]
    if processes:
        launcher += [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(processes),
        ]
    return [*launcher, str(SCRIPT), *TINY, "--data", str(photos), "--output", str(run), *more]


def start(arguments: list[str]) -> "subprocess.Popen[str]":
    """Start a run with one thread a process, as the tests themselves have: sums keep their order."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(arguments: list[str]) -> str:
    """Run to the end, and return what was printed."""
    process = start(arguments)
    printed, _ = process.communicate(timeout=240)
    assert process.returncode == 0, printed
    return printed


def whole_steps(run: Path) -> list[int]:
    """Return the steps of all checkpoints, each of them whole."""
    return [store.check(path).step for path in sorted((run / "checkpoints").glob("step-*"))]


def assert_same_run(run: Path, other: Path) -> None:
    """Loss curve, weights, average, moments: every bit."""
    assert losses(run) == losses(other)
    assert len(losses(run)) == STEPS
    last = f"checkpoints/step-{STEPS:08d}"
    for name in (*(f"{last}/{file}" for file in store.FILES), "model.safetensors"):
        mine, theirs = load_file(run / name), load_file(other / name)
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():
            assert torch.equal(value, theirs[key]), f"{name}: {key}"
