"""Biases of lines beside transformers and x-transformers, and beside the plain form of schemes that neither has.

Run: .venv/bin/python -m benchmarks.sequence [--output FILE]

Every pair is checked for equal results before it is timed. Ratios below 1 mean less time than the peer.
"""

from __future__ import annotations

import os
import sys

# glibc returns large blocks to the system at every free: a copy would pay page faults that no kernel pays.
if os.environ.get("MALLOC_MMAP_MAX_") is None:
    os.environ.update(
        MALLOC_MMAP_MAX_="0", MALLOC_TRIM_THRESHOLD_="100000000000", OMP_NUM_THREADS="1"
    )
    os.execv(sys.executable, [sys.executable, "-m", "benchmarks.sequence", *sys.argv[1:]])  # noqa: S606

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import DebertaV2Config, T5Config
from transformers.models.deberta_v2.modeling_deberta_v2 import (
    DisentangledSelfAttention,
    build_relative_position,
)
from transformers.models.t5.modeling_t5 import T5Attention
from x_transformers import x_transformers as xt

from benchmarks.paired import copy_of, ratio
from visionpos import Dims, Grid
from visionpos import encodings as enc

Row = dict[str, object]
Call = Callable[[], Tensor]
HEADS, WIDTH = 8, 64
DIMS = Dims(embed_dim=HEADS * WIDTH, num_heads=HEADS, depth=1)


def row(op: str, peer: str, ours: Call, theirs: Call, *, atol: float = 1e-4) -> Row:
    """Return the row of one pair, once both give the same."""
    one, other = ours(), theirs()
    assert one.shape == other.shape
    assert torch.allclose(one, other, atol=atol), (op, (one - other).abs().max())
    rounds = 7
    return {
        "op": op,
        "peer": peer,
        "to peer": ratio(ours, theirs, rounds=rounds),
        "to copy": ratio(ours, copy_of(one), rounds=rounds),
    }


def t5(n: int, direction: str) -> list[Row]:
    causal = direction == "causal"
    config = T5Config(d_model=DIMS.embed_dim, d_kv=WIDTH, num_heads=HEADS, is_decoder=causal)
    hf = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    other = xt.RelativePositionBias(1.0, causal=causal, heads=HEADS)
    other.relative_attention_bias.weight.data.copy_(hf.relative_attention_bias.weight)
    spec = enc.T5BiasSpec(buckets=(32,), max_distance=(128,), direction=direction)
    ours = enc.T5Bias.from_source(hf.state_dict(), spec, DIMS)
    name = f"T5 {direction}, n {n}"
    return [
        row(name, "transformers", lambda: ours.along(n), lambda: hf.compute_bias(n, n)[0]),
        row(name, "x-transformers", lambda: ours.along(n), lambda: other(n, n)),
    ]


def alibi(n: int) -> Row:
    ours, theirs = enc.Alibi(enc.AlibiSpec(), DIMS), xt.AlibiPositionalBias(heads=HEADS)

    def peer() -> Tensor:
        theirs.bias = None  # it keeps the last one
        return theirs(n, n)

    return row(f"ALiBi, n {n}, not kept", "x-transformers", lambda: ours.along(n), peer)


def deberta(n: int) -> Row:
    config = DebertaV2Config(
        hidden_size=DIMS.embed_dim,
        num_attention_heads=HEADS,
        relative_attention=True,
        max_relative_positions=512,
        position_buckets=256,
        pos_att_type=["c2p", "p2c"],
        share_att_key=True,
    )
    theirs, table = DisentangledSelfAttention(config).eval(), torch.randn(512, DIMS.embed_dim)
    spec = enc.DebertaSpec(span=256, max_distance=512, key_bias=True)
    state = {**theirs.state_dict(), "rel_embeddings.weight": table}
    ours = enc.Deberta.from_source(state, spec, DIMS)
    q, k = torch.randn(2, 1, HEADS, n, WIDTH).unbind()
    places = build_relative_position(q, k, bucket_size=256, max_position=512)
    return row(
        f"DeBERTa v2, n {n}",
        "transformers",
        lambda: ours(q, k, Grid(1, n))[0],
        lambda: theirs.disentangled_attention_bias(q[0], k[0], places, table, 3),
        atol=1e-3,
    )


def cope(n: int) -> Row:
    theirs = xt.CoPE(dim=WIDTH, heads=HEADS, max_pos=64)
    theirs.pos_emb.data.normal_()
    ours = enc.Cope(enc.CopeSpec(), DIMS)
    ours.load_state_dict({"table": theirs.pos_emb})
    q, k = torch.randn(2, 1, HEADS, n, WIDTH).unbind()
    logits = q @ k.mT / WIDTH**0.5
    later = torch.ones(n, n, dtype=torch.bool).triu(1)
    hidden = logits.masked_fill(later, -torch.finfo(torch.float32).max)
    return row(
        f"CoPE, n {n}",
        "x-transformers",
        lambda: ours.of_logits(q, hidden),
        lambda: theirs(q, hidden),
    )


def fire(n: int) -> Row:
    ours = enc.Fire(enc.FireSpec(reach="query", threshold=n / 4), DIMS)

    def plain() -> Tensor:
        """Return the network at every pair, as the public sources run it."""
        ids = torch.arange(n, dtype=torch.float32)
        inputs = ours.inputs((ids.unsqueeze(1) - ids).abs(), reach=ids.unsqueeze(1))
        return ours.out(ours.hidden(inputs.unsqueeze(-1)).relu()).movedim(-1, 0)

    return row(f"FIRE causal, n {n}", "network a pair", lambda: ours.along(n), plain)


def shaw(n: int) -> Row:
    ours = enc.Shaw(enc.ShawSpec(reach=(16,), std=0.5), DIMS)
    q = torch.randn(1, HEADS, n, WIDTH)
    ids = torch.arange(n)
    places = (ids - ids.unsqueeze(1)).clamp(-16, 16) + 16

    def plain() -> Tensor:
        """Return the query times a vector of every pair."""
        return torch.einsum("bhnd,nmd->bhnm", q, ours.keys[0][places]) * WIDTH**-0.5

    return row(f"Shaw, n {n}", "vector a pair", lambda: ours(q, Grid(1, n)), plain)


def shift(n: int) -> Row:
    from visionpos.geometry.line import shifted

    rows = torch.randn(1, HEADS, n, 2 * n - 1)

    def padded() -> Tensor:
        """Return the shift by a column of zeros and a copy, as Transformer-XL's own code makes it."""
        longer = torch.nn.functional.pad(rows, (1, 0)).view(1, HEADS, 2 * n, n)
        return longer[:, :, 1:].reshape(1, HEADS, n, 2 * n - 1)[..., :n].contiguous()

    ours = shifted(rows, n).contiguous()
    assert torch.equal(ours, padded())
    return row(
        f"Transformer-XL's shift both ways, n {n}",
        "pad and copy",
        lambda: shifted(rows, n).contiguous(),
        padded,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rows: list[Row] = []
    with torch.no_grad():
        for n in (256, 1024):
            rows += t5(n, "both") + t5(n, "causal")
            rows += [alibi(n), deberta(n), cope(n), fire(n), shaw(n), shift(n)]
    print(f"{'operation':40} {'peer':16} {'time / peer':>11} {'time / copy':>11}")
    for one in rows:
        print(f"{one['op']:40} {one['peer']:16} {one['to peer']:11.2f} {one['to copy']:11.2f}")
    found = {
        "device": "cpu, 1 thread",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "rows": rows,
    }
    if options.output:
        options.output.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    else:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
