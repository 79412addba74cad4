"""examples/finetune.py under torchrun: DDP and FSDP2 on two gloo processes are one process, to float noise.

The noise is that of the same sums in another order. Measured over 8 steps in float32: losses differ by 1e-7 of
themselves, weights, average and moments by 5e-7, where a step at the full rate moves a weight by 3e-4.
"""

from pathlib import Path

import finetune_store as store
import pytest
from safetensors.torch import load_file

from tests.finetuning import command, finish, losses, run_here, write_photos

# Dropped paths are drawn a process: the one thing in which two processes are not one.
EXACT = ("--precision", "fp32", "--steps", "8", "--save-every", "8")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_photos(tmp_path_factory.mktemp("photos"))


@pytest.fixture(scope="module")
def alone(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("alone")
    assert run_here(photos, run, *EXACT) == 0
    return run


def two(photos: Path, run: Path, parallel: str, *more: str) -> str:
    """Run on two processes."""
    return finish(command(photos, run, "--parallel", parallel, *EXACT, *more, processes=2))


def largest_difference(run: Path, other: Path, file: str) -> float:
    """Return how far apart two files of the last checkpoints are, in any entry of any tensor."""
    last = Path("checkpoints/step-00000008") / file
    mine, theirs = load_file(run / last), load_file(other / last)
    assert mine.keys() == theirs.keys()
    return max((mine[name] - theirs[name]).abs().max().item() for name in mine)


def assert_one_run(run: Path, alone: Path) -> None:
    """Losses, weights, average and moments agree to float noise."""
    assert losses(run) == pytest.approx(losses(alone), rel=1e-6)
    for file in store.FILES:
        assert largest_difference(run, alone, file) < 5e-6, file


@pytest.mark.parametrize("parallel", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp2"])
def test_two_processes_are_one(parallel: str, photos: Path, alone: Path, tmp_path: Path) -> None:
    """Recomputed blocks, three sizes, a ramp of the strength, layer decay, clipping, an average and measurements."""
    printed = two(photos, tmp_path, parallel)
    assert printed.count("before:") == 1
    assert_one_run(tmp_path, alone)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [("ddp", "fsdp2"), ("fsdp2", "none"), ("fsdp2", "ddp")])
def test_a_run_goes_on_in_another_way(
    first: str, then: str, photos: Path, alone: Path, tmp_path: Path
) -> None:
    """A checkpoint holds whole tensors: any number of processes goes on with it."""
    two(photos, tmp_path, first, "--stop-at", "5")
    if then == "none":
        assert run_here(photos, tmp_path, *EXACT) == 0
    else:
        two(photos, tmp_path, then)
    assert_one_run(tmp_path, alone)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_a_divided_run_goes_on_bit_for_bit(parallel: str, photos: Path, tmp_path: Path) -> None:
    """Stopped and started again with as many processes: every bit of the curve, dropped paths and bf16 included."""
    noisy = ("--drop-path", "0.3", "--precision", "bf16")
    two(photos, tmp_path / "whole", parallel, *noisy)
    two(photos, tmp_path / "parts", parallel, *noisy, "--stop-at", "5")
    two(photos, tmp_path / "parts", parallel, *noisy)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    for file in store.FILES:
        assert largest_difference(tmp_path / "parts", tmp_path / "whole", file) == 0, file
