"""Rotation against a copy of the same bytes and against named peers, forward and with gradients, eager and compiled.

Run: .venv/bin/python -m benchmarks.rotation [--quick]

A row: what, tier, dtype, shape, bytes of q and k, time / copy (median and lower quartile), time / peer, largest and
root-mean-square error against float64. A wrong result prints no ratio. One thread, thread CPU time, paired in one
process. "copy" writes the same bytes, as they lie, into memory that is there.
"""

from __future__ import annotations

import os
import sys

# glibc returns large blocks to the system at every free: a copy would pay page faults that no kernel pays.
if os.environ.get("MALLOC_MMAP_MAX_") is None:
    os.environ.update(
        MALLOC_MMAP_MAX_="0", MALLOC_TRIM_THRESHOLD_="100000000000", OMP_NUM_THREADS="1"
    )
    os.execv(sys.executable, [sys.executable, "-m", "benchmarks.rotation", *sys.argv[1:]])  # noqa: S606

import json
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from typing import Any

import timm
import torch
import transformers
from rotary_embedding_torch import apply_rotary_emb
from timm.layers.pos_embed_sincos import RotaryEmbeddingMixed, apply_rot_embed_cat
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding

import visionpos as vp
from benchmarks.rows import BOUND, Row, exact, off_by, timed
from visionpos.attention import rotate_, rotate_packed_
from visionpos.vlm import family

# Batch, heads, tokens, channels a head: a small ViT, ViT-S at 512 px, a language model's prefill.
SHAPES = {
    "vit 197": (8, 12, 197, 64),
    "vit 1025": (16, 6, 1025, 64),
    "vlm 1024": (2, 32, 1024, 128),
}


def forward(name: str, pairing: str, dtype: torch.dtype) -> list[Row]:
    """Functional, in place, and read out of a packed qkv."""
    b, heads, n, d = SHAPES[name]
    q, k = torch.randn(2, b, heads, n, d).to(dtype)
    rotation = vp.Rotation.of(torch.randn(n, d // 2), pairing)
    full = rotation.full_width()
    table = torch.cat(full[::-1], -1)
    if pairing == "half":
        peer = "transformers", partial(apply_rotary_pos_emb, q, k, full[0][None], full[1][None])
    else:
        peer = "timm", lambda: [apply_rot_embed_cat(x, table) for x in (q, k)]
    wanted = [exact(x, rotation) for x in (q, k)]
    rows = [
        timed(
            f"{pairing}", lambda: vp.rotate(q, k, rotation), (q, k), peer=peer, shape=name,
            checked=(vp.rotate(q, k, rotation), wanted),
        )
    ]  # fmt: skip
    own = [q.clone(), k.clone()]
    rotate_(*own, rotation)
    rows.append(
        timed(f"{pairing}, in place", lambda: rotate_(*own, rotation), (q, k), shape=name,
              checked=([x.clone() for x in own], wanted))
    )  # fmt: skip
    qkv = torch.randn(b, n, 3, heads, d).to(dtype)
    pq, pk, _ = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    wanted = [exact(x, rotation) for x in (pq, pk)]
    packed_peer = (
        "timm",
        lambda: [apply_rot_embed_cat(x, table, half=pairing == "half") for x in (pq, pk)],
    )
    rows.append(
        timed(f"{pairing}, from packed qkv", lambda: vp.rotate(pq, pk, rotation), (pq, pk), shape=name,
              peer=packed_peer, checked=(vp.rotate(pq, pk, rotation), wanted))
    )  # fmt: skip
    held = qkv.clone()
    rotate_packed_(held, rotation)
    parts = held.permute(2, 0, 3, 1, 4).unbind(0)[:2]
    checked = [x.clone() for x in parts], wanted
    rows.append(
        timed(f"{pairing}, in packed qkv", lambda: rotate_packed_(held, rotation), (pq, pk), shape=name,
              checked=checked)
    )  # fmt: skip
    return rows


def training(name: str, pairing: str, dtype: torch.dtype) -> Row:
    """Forward and backward, against copies of q, k and their gradients."""
    b, heads, n, d = SHAPES[name]
    q, k = (x.requires_grad_() for x in torch.randn(2, b, heads, n, d).to(dtype).unbind())
    grad = torch.randn_like(q)
    rotation = vp.Rotation.of(torch.randn(n, d // 2), pairing)
    table = torch.cat(rotation.full_width()[::-1], -1)

    def run(turn: Callable[[], Any]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(list(turn()), [q, k], [grad, grad])

    ours = partial(run, lambda: vp.rotate(q, k, rotation))
    peer = partial(
        run, lambda: [apply_rot_embed_cat(x, table, half=pairing == "half") for x in (q, k)]
    )
    back = vp.Rotation(rotation.cos, -rotation.sin, pairing)
    wanted = [exact(grad, back)] * 2
    copied = [q.detach(), k.detach(), grad, grad]
    return timed(
        f"{pairing}, with gradients",
        ours,
        copied,
        peer=("timm", peer),
        checked=(ours(), wanted),
        shape=name,
    )


def compiled(name: str, pairing: str, dtype: torch.dtype, *, train: bool) -> Row:
    """What inductor makes of the plain form, beside what it makes of the peer's."""
    b, heads, n, d = SHAPES[name]
    q, k = torch.randn(2, b, heads, n, d).to(dtype)
    rotation = vp.Rotation.of(torch.randn(n, d // 2), pairing)
    cos, sin = (part[None] for part in rotation.full_width())
    torch.compiler.reset()
    ours = torch.compile(
        lambda q, k, c, s: vp.rotate(q, k, vp.Rotation(c, s, pairing)), fullgraph=True
    )
    theirs = torch.compile(apply_rotary_pos_emb, fullgraph=True)
    run, other = partial(ours, q, k, rotation.cos, rotation.sin), partial(theirs, q, k, cos, sin)
    op, copied, wanted = pairing, [q, k], [exact(x, rotation) for x in (q, k)]
    if train:
        leaves, grad = [q.requires_grad_(), k.requires_grad_()], torch.randn_like(q)
        op, copied = f"{pairing}, with gradients", [q.detach(), k.detach(), grad, grad]
        wanted = [exact(grad, vp.Rotation(rotation.cos, -rotation.sin, pairing))] * 2
        run, other = (partial(_backward, forward, leaves, [grad, grad]) for forward in (run, other))
    begin = time.perf_counter()
    got = run()
    first = time.perf_counter() - begin
    off_by(other(), wanted)
    row = timed(
        op,
        run,
        copied,
        tier="compiled",
        peer=("transformers", other),
        shape=name,
        checked=(got, wanted),
    )
    row.first_call_s = round(first, 1)
    return row


def _backward(
    forward: Callable[[], Any], leaves: list[Tensor], grads: list[Tensor]
) -> tuple[Tensor, ...]:
    return torch.autograd.grad(list(forward()), leaves, grads)


def from_angles(name: str, dtype: torch.dtype) -> Row:
    """Angles in, cosines and sines made at every call, as rotary-embedding-torch has it."""
    b, heads, n, d = SHAPES[name]
    q, k = torch.randn(2, b, heads, n, d).to(dtype)
    angles = torch.randn(n, d // 2)
    wide = angles.repeat_interleave(2, dim=-1)
    wanted = [exact(x, vp.Rotation.of(angles.double(), "adjacent")) for x in (q, k)]

    def ours() -> tuple[Tensor, Tensor]:
        return vp.rotate(q, k, vp.Rotation.of(angles, "adjacent"))

    def peer() -> list[Tensor]:
        return [apply_rotary_emb(wide, x) for x in (q, k)]

    off_by(peer(), wanted)
    return timed("adjacent, from angles", ours, (q, k), shape=name, checked=(ours(), wanted),
                 peer=("rotary-embedding-torch", peer))  # fmt: skip


def mixed() -> list[Row]:
    """RoPE-Mixed on 64 x 64 tokens: one layer's table, and a training step with the gradient of its frequencies."""
    grid = vp.Grid(64, 64)
    module = vp.build(vp.MixedRopeSpec(), vp.Dims(embed_dim=768, num_heads=12, depth=1))
    theirs = RotaryEmbeddingMixed(768, 1, 12, feat_shape=[64, 64])
    q, k = (x.requires_grad_() for x in torch.randn(2, 1, 12, 4096, 64).unbind())
    grad = torch.randn_like(q)
    copied = [q.detach(), k.detach()]
    with torch.no_grad():
        module.frequencies.copy_(vp.encodings.MixedRope.from_timm(theirs.freqs))
        angles = vp.angles(module.points(grid).double(), module.frequencies[0].double())
        got = module(grid)
        checked = [got.cos, got.sin], [angles.cos(), angles.sin()]
        assert max(float((a - b).abs().max()) for a, b in zip(*checked, strict=True)) < 1e-5
        rows = [
            timed("mixed, table of a layer", lambda: module(grid), copied, shape="64x64, 12 heads",
                  peer=("timm", lambda: theirs.get_embed([64, 64])))
        ]  # fmt: skip

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(
            list(vp.rotate(q, k, module(grid))), [q, k, module.frequencies], [grad, grad]
        )

    def peer() -> tuple[Tensor, ...]:
        table = theirs.get_embed([64, 64])[0]
        turned = [apply_rot_embed_cat(x, table) for x in (q, k)]
        return torch.autograd.grad(turned, [q, k, theirs.freqs], [grad, grad])

    ours, other = step(), peer()
    assert torch.allclose(ours[0], other[0], atol=1e-4)
    of_freqs = vp.encodings.MixedRope.from_timm(other[2])  # sums of 4096 cells times coordinates
    assert (ours[2] - of_freqs).norm() < 1e-5 * of_freqs.norm()
    rows.append(
        timed(
            "mixed, training step",
            step,
            [*copied, grad, grad],
            shape="64x64, 12 heads",
            peer=("timm", peer),
        )
    )
    return rows


def tables() -> list[Row]:
    """Cosines and sines of M-RoPE from position ids, beside the bytes of q and k that they turn."""
    q, k = torch.randn(2, 1, 32, 4096, 128)
    ids = torch.randint(0, 4096, (3, 4096))
    theirs = Qwen2VLRotaryEmbedding(transformers.Qwen2VLConfig().get_text_config())
    ours = family("qwen2_vl")

    def peer() -> tuple[Tensor, Tensor]:
        return theirs(q, ids[:, None])

    found = ours.rotation(ids).full_width()
    assert all(torch.equal(part, other[0]) for part, other in zip(found, peer(), strict=True))
    return [
        timed("M-RoPE tables", lambda: ours.rotation(ids), (q, k), shape="4096 tokens",
              peer=("transformers", peer))
    ]  # fmt: skip


def main() -> None:
    """Print a table, then the rows as JSON."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    names = ["vit 1025"] if "--quick" in sys.argv else list(SHAPES)
    rows: list[Row] = []
    for name in names:
        for pairing in ("adjacent", "half"):
            for dtype in (torch.float32, torch.bfloat16):
                with torch.no_grad():
                    rows += forward(name, pairing, dtype)
                rows.append(training(name, pairing, dtype))
        with torch.no_grad():
            rows += [from_angles(name, dtype) for dtype in BOUND]
    rows += mixed() + tables()
    with torch.no_grad():
        rows += [compiled(name, "half", dtype, train=False) for name in names for dtype in BOUND]
    rows += [compiled(name, "half", dtype, train=True) for name in names for dtype in BOUND]
    head = f"{'operation':28} {'tier':9} {'dtype':9} {'shape':16} {'MB':>6} {'/ copy':>7} {'q25':>6} {'/ peer':>7} peer"
    print(head)
    for row in rows:
        peer = "" if row.to_peer is None else f"{row.to_peer:7.2f} {row.peer}"
        print(
            f"{row.op:28} {row.tier:9} {row.dtype:9} {row.shape:16} {row.megabytes:6.1f} {row.to_copy:7.2f} "
            f"{row.to_copy_q25:6.2f} {peer}"
        )
    facts = {
        "device": "cpu, 1 thread",
        "torch": torch.__version__,
        "timm": timm.__version__,
        "transformers": transformers.__version__,
        "rotary-embedding-torch": version("rotary-embedding-torch"),
    }
    print(json.dumps({**facts, "rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
