"""Counts for `visionpos retrofit --coverage`: every registered timm model of a class in the seam table, built and read.

`python -m tests.retrofit.scan --write` rewrites configs/retrofit/coverage.yaml; it takes about twenty minutes.
"""

# ruff: noqa: T201 (a script that answers on the terminal)
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import timm
import torch

from visionpos import retrofit
from visionpos.errors import PositionError
from visionpos.retrofit.coverage import tally
from visionpos.retrofit.seams import class_row, find, model_rows, row_of
from visionpos.retrofit.sizes import image_of

FILE = Path(__file__).resolve().parents[2] / "configs" / "retrofit" / "coverage.yaml"
NAMES = ("rectangles", "add", "rotate", "skipped", "bias", "conditional")
HEAD = """# Registered timm models behind every row of the seam table, for `visionpos retrofit --coverage`.
# Made by `python -m tests.retrofit.scan --write`; do not edit. Two of the models are lambda ResNets whose positions are
# a convolution; without them it is 620.
"""


def candidates() -> list[str]:
    """Return the registered models of every module of timm that defines or imports a class of the seam table."""
    wanted = {name.rpartition(".")[2] for name in model_rows()}
    modules = [
        name.rpartition(".")[2]
        for name, module in list(sys.modules.items())
        if name.startswith("timm.models.") and not wanted.isdisjoint(vars(module))
    ]
    return sorted({name for module in modules for name in timm.list_models(module=module)})


def read(name: str) -> tuple[str, dict[str, Any]] | None:
    """Return (row, what is found) of one model, None if it has no row or no position mechanism."""
    model = build(name, "meta")
    row = class_row(model)
    found = None if row is None else tally(model)
    if row is None or found is None:
        return None
    unknown = [part.path for part in retrofit.describe(model) if part.kind == "unknown"]
    assert not unknown, f"{name}: {unknown}"
    return row[0], {**found, "rectangles": resizes(name, model)}


def build(name: str, device: str) -> Any:
    """Return a model; stems that are measured by running them need real memory."""
    try:
        with torch.device(device):
            return timm.create_model(name)
    except (RuntimeError, NotImplementedError):
        return timm.create_model(name)


def resizes(name: str, model: Any) -> bool:
    """Return whether resize moves a model to a rectangle about twice as wide, and every part follows."""
    for attempt in (
        lambda: model,
        lambda: timm.create_model(name),
    ):  # what reads numbers cannot run on meta
        made = attempt()
        target = wide(made)
        try:
            retrofit.resize(made, target)
        except (PositionError, NotImplementedError, RuntimeError) as error:
            print(f"{name}: {error}")
            continue
        return image_of(made) == target
    return False


def wide(model: Any) -> tuple[int, int]:
    """Return a rectangle that the patches of a model divide."""
    height, width = image_of(model) or (256, 256)
    row = row_of(model)
    patch = find(model, row.patches[0]) if row.patches else None
    step = patch.feat_ratio() if hasattr(patch, "feat_ratio") else 1
    return height // step * step, 2 * width // step * step


def scan(names: list[str]) -> dict[str, Any]:
    """Return the counts of many models."""
    rows: dict[str, Any] = {}
    began = time.time()
    for number, name in enumerate(names):
        found = read(name)
        if found is None:
            continue
        row = rows.setdefault(found[0], {"models": 0, "parts": {}, **dict.fromkeys(NAMES, 0)})
        row["models"] += 1
        for kind in found[1]["parts"]:
            row["parts"][kind] = row["parts"].get(kind, 0) + 1
        for key in NAMES:
            row[key] += int(found[1][key])
        if number % 50 == 0:
            print(f"{number}/{len(names)} {name} {time.time() - began:.0f}s", flush=True)
    return rows


def text_of(rows: dict[str, Any]) -> str:
    """Return the counts as the file has them."""
    lines = [HEAD + f"timm: {timm.__version__}", "rows:"]
    for name in model_rows():
        if name in rows:
            row = rows[name]
            parts = ", ".join(f"{kind}: {count}" for kind, count in row["parts"].items())
            verbs = ", ".join(f"{key}: {row[key]}" for key in NAMES)
            lines.append(f"  {name}: {{models: {row['models']}, parts: {{{parts}}}, {verbs}}}")
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    """Count, and write the file if asked to."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = scan(candidates())
    text = text_of(rows)
    print(text, sum(row["models"] for row in rows.values()))
    if arguments == ["--write"]:
        FILE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
