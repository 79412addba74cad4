"""checkpoint: weights and lineage come back as they were, or a file is refused by name."""

import json
import os
import pickle
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from visionpos import checkpoint
from visionpos.checkpoint import Lineage, check, differences, load, read_lineage, save
from visionpos.errors import PositionError

LINEAGE = Lineage(
    model="vit_tiny_patch16_224",
    image_size_hw=(64, 96),
    grid_hw=(4, 6),
    prefix=1,
    tables={
        "pos_embed": {"grid_hw": [4, 6], "source_grid_hw": [14, 14], "recipe": "timm", "prefix": 1}
    },
    encodings={
        "mixed_rope": {
            "spec": {"kind": "mixed_rope", "theta": 10.0},
            "learned": False,
            "strength": 0.5,
        }
    },
    rope={"kind": "axial_rope", "theta": 100.0},
    source="ünïcode, 'quotes' and\nlines",
)


def tensors() -> dict[str, torch.Tensor]:
    shared = torch.arange(6.0)
    return {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "bf16": torch.randn(3).bfloat16(),
        "f16": torch.randn(3).half(),
        "f64": torch.randn(3).double(),
        "ids": torch.tensor([1 << 40, -1]),
        "mask": torch.tensor([True, False]),
        "strided": torch.randn(4, 6).t(),
        "expanded": torch.randn(1, 3).expand(4, 3),
        "shared a": shared,
        "shared b": shared[2:],
        "learned": torch.nn.Parameter(torch.randn(2, 2)),
    }


def test_round_trip(tmp_path: Path) -> None:
    path, wanted = tmp_path / "weights.safetensors", tensors()
    save(path, wanted, LINEAGE)
    found, lineage = load(path)
    assert lineage == LINEAGE
    assert read_lineage(str(path)) == LINEAGE
    assert sorted(found) == sorted(wanted)
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value)
    assert sorted(load_file(path)) == sorted(wanted), "any safetensors reader reads it"


def test_round_trip_of_an_empty_lineage_and_no_tensors(tmp_path: Path) -> None:
    save(tmp_path / "none.safetensors", {}, Lineage())
    assert load(tmp_path / "none.safetensors") == ({}, Lineage())


def test_what_is_saved_is_not_changed(tmp_path: Path) -> None:
    given = tensors()
    before = {name: value.clone() for name, value in given.items()}
    save(tmp_path / "a.safetensors", given, LINEAGE)
    assert all(torch.equal(value, before[name]) for name, value in given.items())
    found, _ = load(tmp_path / "a.safetensors")
    found["strided"].zero_()
    assert torch.equal(given["strided"], before["strided"])


def test_names_of_any_length(tmp_path: Path) -> None:
    """A name the file system takes is a name that can be written."""
    path = tmp_path / ("w" * 240 + ".safetensors")
    save(path, tensors(), LINEAGE)
    assert read_lineage(path) == LINEAGE
    assert [item.name for item in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(
    "error", [OSError("no space left"), KeyboardInterrupt(), RuntimeError("boom")], ids=repr
)
def test_an_interrupted_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    path = tmp_path / "weights.safetensors"
    save(path, tensors(), LINEAGE)
    old = path.read_bytes()

    def half(given: Any, draft: str, metadata: Any) -> None:
        Path(draft).write_bytes(b"half of it")
        raise error

    monkeypatch.setattr(checkpoint, "save_file", half)
    with pytest.raises((PositionError, KeyboardInterrupt, RuntimeError)) as caught:
        save(path, tensors(), replace(LINEAGE, model="other"))
    if isinstance(error, OSError):
        assert f"path {path} cannot be written: no space left. Check space" in str(caught.value)
    assert path.read_bytes() == old
    assert [item.name for item in tmp_path.iterdir()] == [path.name], "no draft is left behind"


def test_a_new_file_is_never_half_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    path = tmp_path / "weights.safetensors"

    def watched(given: Any, draft: str, metadata: Any) -> None:
        seen.append(path.exists())
        save_file(given, draft, metadata=metadata)
        seen.append(path.exists())

    monkeypatch.setattr(checkpoint, "save_file", watched)
    save(path, tensors(), LINEAGE)
    assert seen == [False, False]
    assert path.exists()


def test_a_file_that_others_may_not_read_stays_so(tmp_path: Path) -> None:
    """Replacing a file keeps who may read it."""
    path = tmp_path / "weights.safetensors"
    save(path, tensors(), LINEAGE)
    path.chmod(0o600)
    save(path, tensors(), LINEAGE)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    old = os.umask(0o027)
    try:
        save(tmp_path / "new.safetensors", tensors(), LINEAGE)
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "new.safetensors").stat().st_mode) == 0o640


def test_error_where_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        PositionError,
        match=r"path .*missing/a.safetensors is in no existing folder; create .*missing first",
    ):
        save(tmp_path / "missing" / "a.safetensors", {}, LINEAGE)
    (tmp_path / "folder.safetensors").mkdir()
    with pytest.raises(PositionError, match=r"folder.safetensors cannot be written"):
        save(tmp_path / "folder.safetensors", {}, LINEAGE)
    assert [item.name for item in tmp_path.iterdir()] == ["folder.safetensors"]

    def refused(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "touch", refused)
    with pytest.raises(
        PositionError, match=r"a.safetensors cannot be written: .*Permission denied"
    ):
        save(tmp_path / "a.safetensors", {}, LINEAGE)


def test_error_no_file(tmp_path: Path) -> None:
    for path in (tmp_path / "none.safetensors", tmp_path):
        with pytest.raises(PositionError, match=r"path .* is no file; give a .safetensors file"):
            load(path)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.9, 0.999])
def test_error_truncated(tmp_path: Path, share: float) -> None:
    path = tmp_path / "weights.safetensors"
    save(path, {"w": torch.randn(1000)}, LINEAGE)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    for read in (load, read_lineage):
        with pytest.raises(
            PositionError, match=r"weights.safetensors is no whole safetensors file.*write it again"
        ):
            read(path)


def test_error_other_formats(tmp_path: Path) -> None:
    """A pickle is refused and never opened: what is in it does not run."""
    mark = tmp_path / "ran"

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (mark,)

    (tmp_path / "bomb.safetensors").write_bytes(pickle.dumps(Bomb()))
    torch.save({"w": torch.ones(2)}, tmp_path / "weights.pt")
    (tmp_path / "text.safetensors").write_text("hello")
    for name in ("bomb.safetensors", "weights.pt", "text.safetensors"):
        with pytest.raises(PositionError, match=rf"{name} is no whole safetensors file"):
            load(tmp_path / name)
    assert not mark.exists()


def test_error_foreign_safetensors(tmp_path: Path) -> None:
    for index, metadata in enumerate((None, {"format": "pt"}, {"other": "x"})):
        path = tmp_path / f"foreign{index}.safetensors"
        save_file({"w": torch.ones(2)}, path, metadata=metadata)
        with pytest.raises(
            PositionError, match=rf"foreign{index}.safetensors carries no position lineage.*by hand"
        ):
            load(path)


HEADERS = {
    "not json": "{",
    "a list": "[]",
    "a number": "3",
    "null": "null",
    "no format": json.dumps({"model": "x"}),
    "unknown field": json.dumps({"format": 1, "colour": "red"}),
    "a side": json.dumps({"format": 1, "grid_hw": 3}),
}


@pytest.mark.parametrize("name", HEADERS)
def test_error_unreadable_lineage(tmp_path: Path, name: str) -> None:
    path = tmp_path / "weights.safetensors"
    save_file({"w": torch.ones(2)}, path, metadata={"visionpos": HEADERS[name]})
    with pytest.raises(
        PositionError, match=r"weights.safetensors has an unreadable position lineage"
    ):
        load(path)


def test_error_lineage_of_a_later_version(tmp_path: Path) -> None:
    """A later format may have other fields: the message says to update, not that the file is broken."""
    path = tmp_path / "weights.safetensors"
    for extra in ({}, {"windows": [1, 2]}):
        header = json.dumps({"format": 2, **LINEAGE.data(), **extra})
        save_file({"w": torch.ones(2)}, path, metadata={"visionpos": header})
        with pytest.raises(
            PositionError, match=r"lineage format 2; this version reads 1. Update visionpos"
        ):
            load(path)


def test_differences_name_every_field() -> None:
    assert differences(LINEAGE, LINEAGE) == []
    other = replace(
        LINEAGE,
        model="other",
        grid_hw=(5, 6),
        prefix=5,
        rope=None,
        encodings={"mixed_rope": {"spec": {"kind": "mixed_rope", "theta": 20.0}, "learned": True}},
    )
    lines = differences(LINEAGE, other)
    for start in (
        "model: ",
        "grid_hw: ",
        "prefix: 1 in the file, 5 expected",
        "rope: ",
        "encodings.mixed_rope.spec.theta: 10.0 in the file, 20.0 expected",
        "encodings.mixed_rope.learned: False in the file, True expected",
    ):
        assert sum(line.startswith(start) for line in lines) == 1, start
    assert len(lines) == 6


def test_differences_leave_history_alone() -> None:
    """Where a table came from and how far a fade has come do not make two models different."""
    other = replace(LINEAGE, source="elsewhere")
    other.tables["pos_embed"] = {**LINEAGE.tables["pos_embed"]}
    changed = json.loads(json.dumps(LINEAGE.data()))
    changed["tables"]["pos_embed"] |= {"source_grid_hw": [7, 7], "recipe": "mae"}
    changed["encodings"]["mixed_rope"]["strength"] = 1.0
    changed["source"] = "elsewhere"
    assert (
        differences(Lineage(**changed | {"grid_hw": (4, 6), "image_size_hw": (64, 96)}), LINEAGE)
        == []
    )


@pytest.mark.parametrize("name", ["source", "recipe", "strength", "source_grid_hw"])
def test_differences_see_fields_and_names_that_are_called_like_history(name: str) -> None:
    """A spec's recipe is no history, and neither is an encoding that somebody called "strength"."""
    one = Lineage(encodings={name: {"spec": {"kind": "learned", "recipe": "timm"}}})
    other = Lineage(encodings={name: {"spec": {"kind": "learned", "recipe": "dinov2"}}})
    assert differences(one, other) == [
        f"encodings.{name}.spec.recipe: timm in the file, dinov2 expected"
    ]
    assert len(differences(one, Lineage())) == 1


def test_check_names_file_fields_and_remedy() -> None:
    check(LINEAGE, LINEAGE, path="x")
    with pytest.raises(
        PositionError,
        match=r"path x.safetensors does not fit this model: grid_hw: \[4, 6\] in the file, \[5, 6\] expected.*resize",
    ):
        check(LINEAGE, replace(LINEAGE, grid_hw=(5, 6)), path="x.safetensors")


def test_lineage_data_is_plain() -> None:
    data = LINEAGE.data()
    assert json.loads(json.dumps(data)) == data
    assert data["grid_hw"] == [4, 6]
