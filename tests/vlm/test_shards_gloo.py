"""Context parallel on two gloo processes: what ranks hold, gathered, is the whole row, in value and in gradient.

No attention is computed: ids, rotation and queries are cut, turned and gathered; positions have part in no more.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.nn.functional import all_gather as gathered

import visionpos as vp
from tests.vlm.conversations import fam_of, stream_of
from visionpos.vlm import pack

RANKS = 2
PROMPTS = [(("text", 7), ("image", 0)), (("text", 1),), (("image", 2), ("clip", 4))]
NAMES = ["qwen2_5_vl", "hunyuan_vl", "internvl_v2pe"]
CASES = [
    (name, order, per_document)
    for name in NAMES
    for order in ("zigzag", "contiguous")
    for per_document in (False, True)
]


def check(rank: int, store: str) -> None:
    """Run every case on one of the processes; an assertion that fails fails the test."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    try:
        for name, order, per_document in CASES:
            _check_row(rank, name, order, per_document=per_document)
    finally:
        dist.destroy_process_group()


def _check_row(rank: int, name: str, order: Any, *, per_document: bool) -> None:
    """Take this rank's part of a row, turn it, gather, and compare with the row turned at once."""
    fam = fam_of(name)
    streams = [stream_of(name, parts) for parts in PROMPTS]
    row = pack(streams, family=fam, pad_each_to=2 * RANKS)
    shards = row.shards(RANKS, order=order, per_document=per_document)
    assert row.types is not None
    for whole in (row.ids, row.four_rows, row.types, row.documents):
        own = shards.take(whole, rank).contiguous()
        parts = [torch.empty_like(own) for _ in range(RANKS)]
        dist.all_gather(parts, own)
        assert torch.equal(shards.join(parts), whole)

    language = fam.spec.language
    assert language is not None
    draws = torch.Generator().manual_seed(7)  # the same on every rank
    q, weight = torch.randn(2, 1, 2, row.length, language.head_dim, generator=draws)
    alone = q.clone().requires_grad_()
    turned = vp.rotate(alone, alone, fam.rotation(row.ids))[0]
    (turned * weight).sum().backward()

    mine = shards.take(q, rank, -2).requires_grad_()
    own = vp.rotate(mine, mine, fam.rotation(shards.take(row.ids, rank)))[0]
    joined = shards.join(gathered(own.contiguous()), -2)
    assert torch.equal(joined, turned)
    (joined * weight).sum().backward()
    assert mine.grad is not None
    assert alone.grad is not None
    # Every rank takes the loss of the whole row, and gathering adds up their gradients.
    assert torch.equal(mine.grad, RANKS * shards.take(alone.grad, rank, -2))


@pytest.mark.skipif(not dist.is_gloo_available(), reason="torch without gloo")
def test_two_processes_hold_one_row(tmp_path: Path) -> None:
    """Gather of shards is the row, and a shard turns, and takes its gradient, as in the whole."""
    mp.spawn(check, args=(str(tmp_path / "store"),), nprocs=RANKS, join=True)
