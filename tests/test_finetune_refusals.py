"""examples/finetune.py takes nobody else's checkpoint for its own, and no half of one for a whole."""

import shutil
from collections.abc import Callable
from pathlib import Path

import finetune_store as store
import pytest
import torch
from safetensors.torch import save_file

from tests.finetuning import STEPS, assert_same_run, run_here, whole_steps, write_photos
from visionpos.errors import PositionError


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_photos(tmp_path_factory.mktemp("photos"))


@pytest.fixture(scope="module")
def undisturbed(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("undisturbed")
    assert run_here(photos, run) == 0
    return run


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize("file", [*store.FILES, "manifest.json"])
def test_error_truncated(
    file: str, photos: Path, undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The newest checkpoint is refused by name; the run goes on from the one before, to the same end."""
    run = shutil.copytree(undisturbed, tmp_path / "run")
    (run / "model.safetensors").unlink()
    cut(run / "checkpoints" / f"step-{STEPS:08d}" / file)
    good = run / "checkpoints" / "step-00000016"
    path, manifest, refused = store.newest(good.parent, store.check(good).settings)
    assert (path, manifest) == (good, store.check(good))
    assert len(refused) == 1
    assert run_here(photos, run) == 0
    said = capsys.readouterr().err
    assert f"step-{STEPS:08d}/{file}" in said
    assert f"going on from {good}" in said
    assert_same_run(run, undisturbed)


def test_error_no_checkpoint_is_whole(
    photos: Path, undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run whose checkpoints are all damaged does not begin anew over them."""
    run = shutil.copytree(undisturbed, tmp_path / "run")
    for path in (run / "checkpoints").glob("step-*"):
        cut(path / store.AVERAGE)
    before = bytes_of(run)
    assert run_here(photos, run) == 2
    said = capsys.readouterr().err
    assert said.count("average.safetensors is truncated") == 2
    assert "Put one back" in said
    assert bytes_of(run) == before


def foreign_files(run: Path, checkpoint: Path, other: Path) -> None:
    shutil.copy(other / "model.safetensors", checkpoint / store.MODEL)


def foreign_pickle(run: Path, checkpoint: Path, other: Path) -> None:
    torch.save({"model": torch.zeros(3)}, checkpoint / store.TRAINING)


def foreign_folder(run: Path, checkpoint: Path, other: Path) -> None:
    shutil.rmtree(checkpoint)
    checkpoint.mkdir()
    (checkpoint / "manifest.json").write_text('{"format": "somebody else 3"}')


@pytest.mark.parametrize("foreign", [foreign_files, foreign_pickle, foreign_folder])
def test_error_foreign_file(
    foreign: Callable[[Path, Path, Path], None], photos: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """A file or a folder of another origin under the name of the newest checkpoint; the one before is taken."""
    run = shutil.copytree(undisturbed, tmp_path / "run")
    newest = run / "checkpoints" / f"step-{STEPS:08d}"
    foreign(run, newest, undisturbed)
    with pytest.raises(PositionError, match=f"checkpoint .*step-{STEPS:08d}"):
        store.check(newest)
    before = bytes_of(run / "checkpoints" / "step-00000016")
    settings = store.check(run / "checkpoints" / "step-00000016").settings
    assert store.newest(newest.parent, settings)[0] == newest.with_name("step-00000016")
    assert bytes_of(run / "checkpoints" / "step-00000016") == before


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (("--lr", "0.5"), "lr is 0.0003 there and 0.5 now"),
        (("--model", "test_vit2"), "model is 'test_vit' there"),
        (("--mix", "48x32"), "mix is [[48, 32], [48, 80]] there and [[48, 32]] now"),
    ],
)
def test_error_another_run(
    change: tuple[str, ...],
    named: str,
    photos: Path,
    undisturbed: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Other settings are another run; nothing is written."""
    before = bytes_of(undisturbed)
    assert run_here(photos, undisturbed, *change) == 2
    said = capsys.readouterr().err
    assert named in said
    assert "another --output" in said
    assert bytes_of(undisturbed) == before


def test_error_other_photos(
    undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_photos(tmp_path / "photos", classes=4)
    assert run_here(other, undisturbed) == 2
    assert "photos is " in capsys.readouterr().err


def test_a_write_that_fails_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    """An error half way through leaves no draft and no new name."""
    for step in (1, 2):
        with store.writing(tmp_path, manifest_of(step), keep=2) as draft:
            write_files(draft, step)
    before = bytes_of(tmp_path)
    with pytest.raises(FileNotFoundError):
        half_write(tmp_path, 3)
    assert bytes_of(tmp_path) == before
    with store.writing(tmp_path, manifest_of(3), keep=2) as draft:
        write_files(draft, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


def half_write(folder: Path, step: int) -> None:
    with store.writing(folder, manifest_of(step), keep=2) as draft:
        write_files(draft, step)
        (draft / store.TRAINING).unlink()


def manifest_of(step: int) -> store.Manifest:
    return store.Manifest(step=step, settings={"lr": 0.1})


def write_files(folder: Path, step: int) -> None:
    for name in store.FILES:
        save_file({"x": torch.full((3,), float(step))}, folder / name)


def test_a_loss_that_is_not_finite_stops_the_run(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_here(photos, tmp_path, "--lr", "1e30", "--clip", "1e30", "--warmup", "0") == 2
    said = capsys.readouterr().err
    assert "at step " in said
    assert "a lower --lr" in said
    assert whole_steps(tmp_path)[-1] < STEPS


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--model", "nope"), "model 'nope' cannot be built"),
        (("--model", "levit_128s"), "cannot be built with sizes that change from batch to batch"),
        (("--mix", "100x100"), "size_hw (100, 100) is not divisible by patch"),
        (("--lr", "nan"), "lr is nan; a finite number of at least 0 is required"),
    ],
)
def test_error_before_the_first_step(
    options: tuple[str, str],
    said: str,
    photos: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What would end a run in a later step ends it before it begins."""
    assert run_here(photos, tmp_path / "run", *options) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run" / "checkpoints").exists()
