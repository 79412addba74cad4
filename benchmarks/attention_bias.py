"""Biases on their way into attention: dense forms and their gradients, Swin V2 in training, FlexAttention, memory.

Run: .venv/bin/python -m benchmarks.attention_bias [--output FILE]

Every pair is checked for equal results before it is timed. Ratios below 1 mean less time, or memory, than the peer.
"""

from __future__ import annotations

import os
import sys

# glibc returns large blocks to the system at every free: a copy would pay page faults that no kernel pays.
if os.environ.get("MALLOC_MMAP_MAX_") is None:
    os.environ.update(
        MALLOC_MMAP_MAX_="0", MALLOC_TRIM_THRESHOLD_="100000000000", OMP_NUM_THREADS="1"
    )
    os.execv(sys.executable, [sys.executable, "-m", "benchmarks.attention_bias", *sys.argv[1:]])  # noqa: S606

import argparse
import json
import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path

import timm
import torch
from timm.models import swin_transformer_v2
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.paired import copy_of, ratio
from visionpos import Dims, Grid
from visionpos import encodings as enc
from visionpos.geometry.relative import relative_index
from visionpos.kernels.bias import expand
from visionpos.kernels.scores import attend

Row = dict[str, object]
Call = Callable[[], object]
PATHS = ("sdpa without bias", "dense", "dense, learns", "flex")


def spread(side: int, heads: int) -> list[Row]:
    """The dense bias from its table, and the gradient back, against one index_select over all pairs."""
    grid = Grid(side, side)
    table = torch.randn(heads, (2 * side - 1) ** 2, requires_grad=True)
    weight = torch.randn(heads, grid.size, grid.size)

    def indexed() -> torch.Tensor:
        index = relative_index(grid)
        return table.index_select(-1, index.flatten()).unflatten(-1, index.shape)

    ours, theirs = expand(table, None, grid), indexed()
    assert torch.equal(ours, theirs)

    def back(pairs: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: torch.autograd.grad(pairs, table, weight, retain_graph=True)[0]

    def both(make: Callable[[], torch.Tensor]) -> Call:
        return lambda: torch.autograd.grad(make(), table, weight)

    assert torch.allclose(back(ours)(), back(theirs)(), atol=1e-3)
    name = f"table {side}x{side}, {heads} heads"
    with torch.no_grad():
        forward = ratio(lambda: expand(table, None, grid), indexed, rounds=7)
        copied = ratio(lambda: expand(table, None, grid), copy_of(weight), rounds=7)
    trained = ratio(both(lambda: expand(table, None, grid)), both(indexed), rounds=7)
    return [
        {"op": f"{name}, forward", "peer": "index_select", "to peer": forward, "to copy": copied},
        {"op": f"{name}, with gradient", "peer": "index_select", "to peer": trained},
    ]


def swin_v2(side: int, heads: int) -> list[Row]:
    """Swin V2's windows in training and in eval: timm squashes all pairs by the sigmoid, ours the differences."""
    theirs = swin_transformer_v2.WindowAttention(32 * heads, (side, side), heads)
    spec = enc.LogBiasSpec(pretrained_window_hw=(side, side))
    dims = Dims(embed_dim=32 * heads, num_heads=heads, depth=1)
    ours, grid = enc.LogBias.from_source(theirs.state_dict(), spec, dims), Grid(side, side)

    def peer() -> torch.Tensor:
        """Return what WindowAttention.forward adds to its logits, by its own lines."""
        table = theirs.cpb_mlp(theirs.relative_coords_table).view(-1, heads)
        pairs = table[theirs.relative_position_index.view(-1)].view(side * side, side * side, -1)
        return 16 * torch.sigmoid(pairs.permute(2, 0, 1).contiguous())

    weight = torch.randn(heads, side * side, side * side)

    def step(make: Callable[[], torch.Tensor], module: torch.nn.Module) -> Call:
        def run() -> None:
            module.zero_grad()
            make().backward(weight)

        return run

    assert torch.allclose(ours(grid), peer(), atol=2e-5)
    name = f"Swin V2 window {side}x{side}, {heads} heads"
    rows: list[Row] = []
    with torch.no_grad():
        for mode in ("train", "eval"):  # the first evaluates the network at every call
            ours.train(mode == "train"), theirs.train(mode == "train")
            found = ratio(lambda: ours(grid), peer, rounds=7)
            label = {"train": "no cache", "eval": "cache"}[mode]
            rows.append({"op": f"{name}, forward, {label}", "peer": "timm", "to peer": found})
    ours.train(), theirs.train()
    both = ratio(step(lambda: ours(grid), ours), step(peer, theirs), rounds=7)
    return [*rows, {"op": f"{name}, forward and backward", "peer": "timm", "to peer": both}]


def attention(dtype: torch.dtype, how: str) -> Row:
    """Attention of 1024 tokens with a table, without gradients, against SDPA without any bias."""
    q, k, v, bias, grid = parts(32, dtype)
    with torch.no_grad():
        one, other = (attend(q, k, v, bias, grid, how=way) for way in (how, "dense"))
        assert (one - other).abs().max() < (1e-4 if dtype == torch.float32 else 0.05)

        def peer() -> torch.Tensor:
            return scaled_dot_product_attention(q, k, v)

        found = ratio(lambda: attend(q, k, v, bias, grid, how=how), peer, rounds=5)
    name = f"attention 32x32, 12 heads, {str(dtype)[6:]}, {how}"
    return {"op": name, "peer": "SDPA, no bias", "to peer": found}


def parts(
    side: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, enc.SwinTable, Grid]:
    dims = Dims(embed_dim=768, num_heads=12, depth=1)
    bias = enc.SwinTable(enc.SwinTableSpec(window_hw=(side, side), std=1.0), dims)
    q, k, v = torch.randn(3, 2, 12, side * side, 64).to(dtype).unbind()
    return q, k, v, bias, Grid(side, side)


def peak(side: int, path: str) -> float:
    """Return MiB that a call takes beyond what stood before it; to be run in a process of its own."""
    q, k, v, bias, grid = parts(side, torch.float32)
    small, learns = Grid(4, 4), path == "dense, learns"
    bias.requires_grad_(learns)

    def call(grid: Grid) -> None:
        n = grid.size
        args = q[:, :, :n], k[:, :, :n], v[:, :, :n]
        if path == "sdpa without bias":
            scaled_dot_product_attention(*args)
        else:
            out = attend(*args, bias, grid, how="flex" if path == "flex" else "dense")
            if learns:
                out.sum().backward()

    with torch.set_grad_enabled(learns):
        call(grid if path == "flex" else small)  # what compiling takes is no memory of the call
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts anew
        before = _kib("VmRSS")
        call(grid)
    return (_kib("VmHWM") - before) / 1024


def _kib(key: str) -> int:
    """Return a number of this process's memory, as Linux keeps it."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))


def memory(side: int, path: str) -> Row:
    # Blocks that go back to the system at once, so that none of an earlier call is used again unseen.
    system = {**os.environ, "MALLOC_MMAP_MAX_": "65536", "MALLOC_MMAP_THRESHOLD_": "65536"}
    found = subprocess.run(
        [sys.executable, "-m", "benchmarks.attention_bias", "--peak", str(side), path],
        check=True,
        capture_output=True,
        text=True,
        env=system,
    )
    return {"op": f"memory {side}x{side}, batch 2, 12 heads: {path}", "MiB": float(found.stdout)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--peak", nargs=2, metavar=("SIDE", "PATH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of the compiler
    if options.peak:
        print(peak(int(options.peak[0]), options.peak[1]))
        return
    rows: list[Row] = []
    for side, heads in ((7, 3), (7, 24), (8, 24), (14, 12), (16, 3), (16, 24), (24, 16), (32, 12)):
        rows += spread(side, heads)
    for side, heads in ((8, 3), (8, 24), (16, 24), (24, 16)):
        rows += swin_v2(side, heads)
    rows += [
        attention(dtype, how)
        for dtype in (torch.float32, torch.bfloat16)
        for how in ("dense", "flex")
    ]
    rows += [memory(side, path) for side in (32, 48) for path in PATHS]
    print(f"{'operation':56} {'peer':14} {'time / peer':>11} {'time / copy':>11} {'MiB':>7}")
    for row in rows:
        cells = [
            f"{row[key]:{width}.2f}" if key in row else " " * width
            for key, width in (("to peer", 11), ("to copy", 11), ("MiB", 7))
        ]
        print(f"{row['op']:56} {row.get('peer', ''):14} " + " ".join(cells))
    found = {
        "device": "cpu, 1 thread",
        "torch": torch.__version__,
        "timm": timm.__version__,
        "rows": rows,
    }
    if options.output:
        options.output.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    else:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
