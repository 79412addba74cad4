"""Media sizes and texts to token streams and position ids, over as many processes as wished, without a single pixel.

Run: .venv/bin/python examples/build_dataset.py rows.jsonl --output streams --family qwen2_5_vl --workers 8
     .venv/bin/python examples/build_dataset.py rows.jsonl --output streams --engine ray

A row is {"id": 7, "prompt": [{"text": "Describe"}, {"image": [480, 640]}, {"video": [360, 640], "seconds": [0, 0.5]}]}.
Rows are worked off in shards, each written whole or not at all, so a run that was stopped goes on where it stood. One
function plans a batch of rows; Hugging Face `datasets` (num_proc) and Ray Data both call it.
"""

import argparse
import hashlib
import json
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

from visionpos.errors import PositionError
from visionpos.vlm import Image, Text, Video, family
from visionpos.vlm.families import Family
from visionpos.vlm.segments import Segment

Columns = dict[str, list[Any]]
SCHEMA = pa.schema(
    {
        "id": pa.int64(),
        "error": pa.string(),  # why a row was refused; null for a good one
        "length": pa.int32(),
        "input_ids": pa.list_(pa.int32()),  # empty without a tokenizer
        "mm_token_type_ids": pa.list_(pa.int8()),
        "image_grid_thw": pa.list_(pa.list_(pa.int32())),
        "video_grid_thw": pa.list_(pa.list_(pa.int32())),
        "position_ids": pa.list_(pa.list_(pa.int32())),
        "rope_delta": pa.int32(),
    }
)


@lru_cache(maxsize=4)  # once a process
def model(name: str, dialect: str) -> Family:
    return family(name, dialect=dialect)


@lru_cache(maxsize=4)
def tokenizer(path: str | None) -> Any:
    if path is None:
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


def segment(part: dict[str, Any]) -> Segment:
    """Return one part of a prompt; datasets fill in the keys that other parts have with None."""
    if part.get("image") is not None:
        return Image(tuple(part["image"]))
    if part.get("video") is not None:
        return Video(tuple(part["video"]), seconds=part["seconds"])
    return Text(part["text"])


def grids(fam: Family, prompt: list[Segment], kind: type) -> list[list[int]]:
    """Return frames, height and width in patches of every image or clip, as a processor returns them."""
    merge = (fam.spec if kind is Image else fam.spec.video or fam.spec).grid.merge
    views = [fam.plan(one).views[0].tokens.shape for one in prompt if isinstance(one, kind)]
    return [[frames, height * merge, width * merge] for frames, height, width in views]


def row_of(fam: Family, words: Any, prompt: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what is trained on of one prompt."""
    parts = [segment(part) for part in prompt]
    stream = fam.stream(parts, tokenizer=words)
    placed = fam.position_ids(stream)
    return {
        "error": None,
        "length": stream.length,
        "input_ids": [] if words is None else list(stream.token_ids(words)),
        "mm_token_type_ids": stream.modality.tolist(),
        "image_grid_thw": grids(fam, parts, Image),
        "video_grid_thw": grids(fam, parts, Video),
        "position_ids": placed.ids.tolist(),
        "rope_delta": int(placed.delta),
    }


def planned(rows: Columns, *, name: str, dialect: str, words: str | None) -> Columns:
    """Return the streams of a batch of rows. A row that the family refuses is kept, with the reason."""
    out: Columns = {field.name: [] for field in SCHEMA}
    for number, prompt in zip(rows["id"], rows["prompt"], strict=True):
        empty = dict.fromkeys(SCHEMA.names)
        try:
            made = {**empty, **row_of(model(name, dialect), tokenizer(words), list(prompt))}
        except PositionError as error:
            made = {**empty, "error": str(error)}
        for key, value in {**made, "id": number}.items():
            out[key].append(value)
    return out


def with_datasets(rows: Columns, work: Callable[[Columns], Columns], workers: int) -> pa.Table:
    """Return the streams of a shard by `datasets`."""
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()  # one bar over all shards is shown
    found = Dataset.from_dict(rows).map(
        work,
        batched=True,
        batch_size=64,
        remove_columns=["prompt"],
        num_proc=workers if workers > 1 else None,
        load_from_cache_file=False,
    )
    return pa.Table.from_pydict(found.to_dict(), schema=SCHEMA)


def with_ray(rows: Columns, work: Callable[[Columns], Columns], workers: int) -> pa.Table:
    """Return the streams of a shard by Ray Data, in the order of the rows."""
    import ray

    if not ray.is_initialized():
        here = {"env_vars": {"PYTHONPATH": str(Path(__file__).parent)}}  # workers import this file
        ray.init(
            num_cpus=workers,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            runtime_env=here,
        )
    ray.data.DataContext.get_current().enable_progress_bars = False

    def on_arrow(block: pa.Table) -> pa.Table:
        return pa.Table.from_pydict(work(block.to_pydict()), schema=SCHEMA)

    found = ray.data.from_arrow(pa.Table.from_pydict(rows)).map_batches(
        on_arrow, batch_format="pyarrow", batch_size=64
    )
    blocks = [ray.get(block) for block in found.to_arrow_refs()]
    return pa.concat_tables(blocks).sort_by("id")


ENGINES = {"datasets": with_datasets, "ray": with_ray}


def claimed(output: Path, settings: dict[str, Any]) -> None:
    """Begin an output folder, or refuse one that other rows or settings have begun."""
    output.mkdir(parents=True, exist_ok=True)
    record = output / "settings.json"
    if record.exists() and json.loads(record.read_text("utf-8")) != settings:
        raise SystemExit(
            f"{output} was begun with other rows or settings ({record}). Give another --output, or remove it."
        )
    record.write_text(json.dumps(settings, indent=1), "utf-8")


def build(options: argparse.Namespace) -> int:
    """Write all shards that are not there yet, and return how many rows were refused."""
    text = options.rows.read_text("utf-8")
    rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    shards = [rows[at : at + options.shard] for at in range(0, len(rows), options.shard)]
    claimed(
        options.output,
        {
            "rows": hashlib.sha256(text.encode()).hexdigest(),
            "family": options.family,
            "dialect": options.dialect,
            "tokenizer": options.tokenizer,
            "shard": options.shard,
        },
    )
    work = partial(planned, name=options.family, dialect=options.dialect, words=options.tokenizer)
    refused = 0
    with Progress(
        *Progress.get_default_columns(), MofNCompleteColumn(), TimeRemainingColumn()
    ) as bar:
        task = bar.add_task("rows", total=len(rows))
        for number, shard in enumerate(shards):
            target = options.output / f"{number:05d}.parquet"
            if not target.exists():
                columns = {key: [row[key] for row in shard] for key in ("id", "prompt")}
                table = ENGINES[options.engine](columns, work, options.workers)
                half = target.with_suffix(".half")  # a name that no reader takes for a shard
                pq.write_table(table, half)
                half.replace(target)
            refused += len(shard) - pq.read_table(target, columns=["error"])["error"].null_count
            bar.advance(task, len(shard))
    return refused


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("rows", type=Path, help="JSON lines, one prompt each")
    parser.add_argument("--output", type=Path, required=True, help="folder of parquet shards")
    parser.add_argument("--family", default="qwen2_5_vl")
    parser.add_argument("--dialect", default="vendor")
    parser.add_argument(
        "--tokenizer", help="a folder or name that AutoTokenizer reads; words are counted without"
    )
    parser.add_argument("--engine", choices=sorted(ENGINES), default="datasets")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--shard", type=int, default=1000, help="rows a shard")
    options = parser.parse_args(arguments)
    family(
        options.family, dialect=options.dialect
    )  # an unknown name fails here, not in every worker
    refused = build(options)
    print(f"{options.output}: done, {refused} rows refused (column error says why)")


if __name__ == "__main__":
    main()
