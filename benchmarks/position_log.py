"""What a PositionLog costs beside a training step of ViT-S with RoPE-Mixed: both in one process, by turns.

Run: .venv/bin/python -m benchmarks.position_log

The logged share is that of fifty steps, one of which is looked at: grids, ids, attention, drift, bucket use, a line of
JSON. "looked-at step" is that one step alone.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import timm
import torch

import visionpos as vp
from benchmarks.paired import ratio
from visionpos import retrofit
from visionpos.audit.position_log import PositionLog
from visionpos.encodings import T5Bias, T5BiasSpec

EVERY = 50
GRIDS = ((14, 14), (10, 20), (7, 28), (16, 12))


def rows(batch: int = 8) -> list[dict[str, object]]:
    """Return the share of a training step that logging takes."""
    model = timm.create_model("vit_small_patch16_224", num_classes=10)
    retrofit.attach(model, vp.MixedRopeSpec(), strength=1.0)
    model.add_module("buckets", T5Bias(T5BiasSpec(), retrofit.dims_of(model)))
    optimizer = torch.optim.AdamW(model.parameters())
    images, labels = torch.randn(batch, 3, 224, 224), torch.randint(10, (batch,))
    q, k = torch.randn(2, batch, 6, 197, 64)
    coords = vp.coordinates(vp.Grid(14, 14)).T

    def step() -> None:
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    with tempfile.TemporaryDirectory() as folder:
        log = PositionLog(Path(folder) / "positions.jsonl", every=EVERY)
        log.watch(model)

        def logged() -> None:
            for number in range(EVERY):
                log.grid(GRIDS[number % len(GRIDS)], images=batch)
                log.coordinates(coords, axes=("h", "w"))
                log.attention(q, k, coords, prefix=1)
                log.step()

        share = ratio(logged, step, rounds=7)
    name = f"ViT-S, batch {batch}, 224 px"
    return [
        {"op": f"PositionLog, {name}", "peer": "training step", "to peer": share / EVERY},
        {"op": f"PositionLog, looked-at step, {name}", "peer": "training step", "to peer": share},
    ]


if __name__ == "__main__":
    torch.set_num_threads(1)
    for row in rows():
        print(f"{row['op']:52} {row['peer']:14} {100 * float(str(row['to peer'])):8.3f} %")
