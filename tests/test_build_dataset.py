"""examples/build_dataset.py: both engines give the same shards, a stopped run goes on, a bad row is kept and named."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from visionpos.vlm import family

pq = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("datasets")
build_dataset = pytest.importorskip("build_dataset")

# What the engines themselves warn of, at import or as they start processes.
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore::ResourceWarning",
    "ignore::UserWarning",
)


def rows(count: int) -> list[dict[str, Any]]:
    """Prompts of texts, images and clips of any size; every seventh image is too thin for the family."""
    rng = random.Random(0)
    out = []
    for number in range(count):
        prompt: list[dict[str, Any]] = [{"text": " ".join(["word"] * rng.randint(1, 5))}]
        if number % 7 == 6:
            prompt.append({"image": [3000, 10]})
        elif number % 3:
            prompt.append({"image": [rng.randint(30, 300), rng.randint(30, 300)]})
        else:
            seconds = [step * 0.5 for step in range(rng.randint(2, 9))]
            prompt.append(
                {"video": [rng.randint(56, 140), rng.randint(56, 140)], "seconds": seconds}
            )
        out.append({"id": number, "prompt": [*prompt, {"text": "end"}]})
    return out


def written(folder: Path, count: int) -> Path:
    file = folder / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows(count))), "utf-8")
    return file


def run(file: Path, output: Path, *more: str) -> list[dict[str, Any]]:
    build_dataset.main([str(file), "--output", str(output), "--shard", "5", *more])
    shards = sorted(output.glob("*.parquet"))
    return [row for shard in shards for row in pq.read_table(shard).to_pylist()]


def check(found: list[dict[str, Any]], count: int) -> None:
    """Rows are in order, and their ids are what the family says of types and grids: the other door."""
    assert [row["id"] for row in found] == list(range(count))
    fam = family("qwen2_5_vl")
    for row in found:
        if row["id"] % 7 == 6:
            assert "3000" in row["error"]
            assert row["length"] is None
            continue
        types = torch.tensor(row["mm_token_type_ids"])
        assert len(types) == row["length"]
        pos = fam.position_ids_from_tokens(
            types, types, row["image_grid_thw"] or None, row["video_grid_thw"] or None, None, 1.0
        )
        assert row["position_ids"] == pos.ids.tolist()
        assert row["rope_delta"] == int(pos.delta)


def test_shards_of_datasets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(written(tmp_path, 17), tmp_path / "out")
    check(found, 17)
    assert "2 rows refused" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "00000.parquet", "00001.parquet", "00002.parquet", "00003.parquet", "settings.json",
    ]  # fmt: skip


def test_a_stopped_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third shard fails; the next run plans what is missing, and nothing twice."""
    file, output = written(tmp_path, 17), tmp_path / "out"
    engine, seen = build_dataset.with_datasets, []

    def counted(columns: dict[str, list[Any]], work: Any, workers: int) -> Any:
        if columns["id"][0] == 10 and not seen[2:]:
            seen.append(-1)
            raise KeyboardInterrupt
        seen.append(columns["id"][0])
        return engine(columns, work, workers)

    monkeypatch.setitem(build_dataset.ENGINES, "datasets", counted)
    with pytest.raises(KeyboardInterrupt):
        run(file, output)
    check(run(file, output), 17)
    assert seen == [0, 5, -1, 10, 15]


def test_error_other_settings_or_rows(tmp_path: Path) -> None:
    file, output = written(tmp_path, 3), tmp_path / "out"
    run(file, output)
    with pytest.raises(SystemExit, match="other rows or settings"):
        run(file, output, "--family", "qwen2_vl")
    with pytest.raises(SystemExit, match="other rows or settings"):
        run(written(tmp_path, 4), output)
    with pytest.raises(ValueError, match="family 'qwen' is unknown"):
        run(file, tmp_path / "other", "--family", "qwen")


@pytest.mark.slow
def test_processes_of_datasets(tmp_path: Path) -> None:
    """num_proc starts processes: the function and what it closes over travel to them."""
    file = written(tmp_path, 17)
    many = run(file, tmp_path / "many", "--workers", "2")
    check(many, 17)


@pytest.mark.slow
def test_ray_gives_the_same(tmp_path: Path) -> None:
    ray = pytest.importorskip("ray")
    file = written(tmp_path, 17)
    try:
        found = run(file, tmp_path / "ray", "--engine", "ray", "--workers", "2")
    finally:
        ray.shutdown()
    assert found == run(file, tmp_path / "plain")
