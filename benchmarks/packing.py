"""Paired ratios of packed and padded batches of ragged images against named peers.

Run: .venv/bin/python -m benchmarks.packing

Equal results are checked before anything is timed. Ratios below 1 mean less time than the peer.
"""

from __future__ import annotations

import os
import sys

# glibc returns large blocks to the system at every free: a copy would pay page faults that no kernel pays.
if os.environ.get("MALLOC_MMAP_MAX_") is None:
    os.environ.update(
        MALLOC_MMAP_MAX_="0", MALLOC_TRIM_THRESHOLD_="100000000000", OMP_NUM_THREADS="1"
    )
    os.execv(sys.executable, [sys.executable, "-m", "benchmarks.packing"])  # noqa: S606

import json
import time

import timm
import torch
from timm.data.naflex_dataset import NaFlexCollator
from torch.nn.attention.flex_attention import create_block_mask
from vit_pytorch.na_vit import group_images_by_max_seq_len

from benchmarks.paired import copy_of, ratio
from visionpos import Grid, coordinates
from visionpos.vlm import naflex_batch, pack_images
from visionpos.vlm.bins import placed

Row = dict[str, object]


def ragged(images: int, most: int = 24) -> list[Grid]:
    sides = torch.randint(4, most + 1, (images, 2), generator=torch.Generator().manual_seed(0))
    return [Grid(height, width) for height, width in sides.tolist()]


def row(op: str, peer: str, to_peer: float, to_copy: float | None = None) -> Row:
    return {"op": op, "peer": peer, "to peer": to_peer, "to copy": to_copy}


def padded(images: int) -> Row:
    """A NaFlex batch of flattened 16x16 patches; coordinates are made here, and given to timm's collator."""
    grids = ragged(images)
    patches = [torch.randn(grid.size, 768) for grid in grids]
    items = [
        {
            "patches": one,
            "patch_coord": coordinates(grid).long(),
            "patch_valid": torch.ones(grid.size, dtype=torch.bool),
        }
        for one, grid in zip(patches, grids, strict=True)
    ]
    collate, targets = NaFlexCollator(576), [(item, 0) for item in items]

    def ours() -> dict[str, torch.Tensor]:
        return naflex_batch(patches, grids, length=576).for_timm()

    made, theirs = ours(), collate(targets)[0]
    assert all(torch.equal(made[name], theirs[name]) for name in made)
    copy = copy_of(made["patches"])
    to_peer = ratio(ours, lambda: collate(targets), rounds=7)
    return row(f"NaFlex batch of {images}", "timm", to_peer, ratio(ours, copy, rounds=7))


def rows_of(images: int) -> list[Row]:
    """Which row every image goes to: first fit and best fit against a peer that only looks at the last row."""
    grids = ragged(images)
    lengths = [grid.size for grid in grids]
    pixels = [torch.empty(3, 1, 1).expand(3, g.height * 16, g.width * 16) for g in grids]

    def peer() -> int:
        return len(group_images_by_max_seq_len(pixels, 16, None, 1024))

    out = []
    for method in ("first_fit", "best_fit"):
        needed = placed(lengths, 1024, method=method)[2]
        assert needed <= peer()
        took = ratio(lambda how=method: placed(lengths, 1024, method=how), peer, rounds=7)
        name = f"{method} of {images}: {1 - sum(lengths) / needed / 1024:.1%} padding"
        out.append(row(name, f"vit-pytorch: {1 - sum(lengths) / peer() / 1024:.1%}", took))
    return out


def blocks(images: int) -> Row:
    """The block mask of rows of 2048 tokens."""
    packed = pack_images(ragged(images), 2048)
    documents, (rows, budget) = packed.documents, packed.shape

    def peer() -> torch.Tensor:
        def same(
            b: torch.Tensor, _: torch.Tensor, q: torch.Tensor, k: torch.Tensor
        ) -> torch.Tensor:
            return documents[b, q] == documents[b, k]

        return create_block_mask(same, rows, None, budget, budget, device="cpu").to_dense()

    def ours() -> torch.Tensor:
        return packed.block_mask().to_dense()

    assert torch.equal(ours(), peer())
    return row(f"block mask, {rows} rows", "create_block_mask", ratio(ours, peer, rounds=5))


def grown(few: int, many: int) -> Row:
    """Packing many images against packing few, an image; and the seconds of many."""
    small, large = ragged(few), ragged(many)
    times = ratio(lambda: pack_images(large, 1024), lambda: pack_images(small, 1024), rounds=5)
    start = time.thread_time()
    pack_images(large, 1024)
    name = f"pack {many} images ({time.thread_time() - start:.2f} s)"
    return row(name, f"{few} images, an image", times * few / many)


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    found = [padded(16), padded(64), *rows_of(10_000), blocks(64), grown(1000, 100_000)]
    print(f"{'operation':40} {'peer':24} {'time / peer':>11} {'time / copy':>11}")
    for entry in found:
        copied = entry["to copy"]
        last = "" if copied is None else f"{copied:11.2f}"
        print(f"{entry['op']:40} {entry['peer']:24} {entry['to peer']:11.3f} {last:>11}")
    versions = {"torch": torch.__version__, "timm": timm.__version__}
    print(json.dumps({"device": "cpu, 1 thread", **versions, "rows": found}))


if __name__ == "__main__":
    main()
