"""Paired ratios of attention biases against timm's own modules.

Run: .venv/bin/python -m benchmarks.bias

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
    os.execv(sys.executable, [sys.executable, "-m", "benchmarks.bias"])  # noqa: S606

import json
import warnings
from collections.abc import Callable

import timm
import torch
from timm.layers.pos_embed_rel import RelPosBias, RelPosMlp
from timm.models import levit, swin_transformer_v2
from timm.models.swin_transformer_v2_cr import WindowMultiHeadAttention
from timm.models.vision_transformer_sam import get_decomposed_rel_pos_bias

from benchmarks.paired import copy_of, ratio
from visionpos import Dims, Grid
from visionpos import encodings as enc

HEADS = 12
DIMS = Dims(embed_dim=768, num_heads=HEADS, depth=1)
Row = dict[str, object]


def row(
    op: str, peer: str, ours: Callable[[], torch.Tensor], theirs: Callable[[], torch.Tensor]
) -> Row:
    out = ours()
    assert torch.allclose(out, theirs().reshape(out.shape), atol=2e-5)
    return {
        "op": op,
        "peer": peer,
        "to peer": ratio(ours, theirs, rounds=7),
        "to copy": ratio(ours, copy_of(out), rounds=7),
    }


def table(side: int, prefix: int) -> Row:
    """The dense bias of a Swin or BEiT table, from the table."""
    theirs = RelPosBias((side, side), HEADS, prefix_tokens=prefix)
    spec = enc.SwinTableSpec(window_hw=(side, side), class_rows=bool(prefix))
    ours = enc.SwinTable.from_source(theirs.state_dict(), spec, DIMS)
    name = f"table {side}x{side}, prefix {prefix}"
    return row(name, "timm", lambda: ours(Grid(side, side), prefix=prefix), theirs.get_bias)


def moved(old: int, new: int) -> Row:
    """A table moved to another window, geometric."""
    theirs = RelPosBias((old, old), HEADS)
    spec = enc.SwinTableSpec(window_hw=(old, old), recipe="beit")
    ours = enc.SwinTable.from_source(theirs.state_dict(), spec, DIMS)
    start = theirs.relative_position_bias_table

    def peer() -> torch.Tensor:
        theirs.window_size, theirs.relative_position_bias_table = (old, old), start
        theirs.set_window_size((new, new))
        return theirs.relative_position_bias_table

    return row(
        f"table {old} -> {new}, geometric", "timm", lambda: ours.resized((new, new)).table, peer
    )


def network(side: int) -> Row:
    """Log bias on the distinct differences."""
    theirs = RelPosMlp((side, side), HEADS, hidden_dim=512, mode="swin").eval()
    spec = enc.LogBiasSpec(form="torchvision", hidden=512)
    ours = enc.LogBias.from_source(theirs.state_dict(), spec, DIMS)
    return row(f"log bias {side}x{side}", "timm", lambda: ours(Grid(side, side)), theirs.get_bias)


def network_v2(side: int, heads: int) -> Row:
    """Swin V2's windows in eval: timm squashes all pairs by the sigmoid, ours the distinct differences."""
    theirs = swin_transformer_v2.WindowAttention(32 * heads, (side, side), heads).eval()
    spec = enc.LogBiasSpec(pretrained_window_hw=(side, side))
    dims = Dims(embed_dim=32 * heads, num_heads=heads, depth=1)
    ours = enc.LogBias.from_source(theirs.state_dict(), spec, dims).eval()

    def peer() -> torch.Tensor:
        """Return what WindowAttention.forward adds to its logits, by its own lines."""
        table = theirs.cpb_mlp(theirs.relative_coords_table).view(-1, heads)
        pairs = table[theirs.relative_position_index.view(-1)].view(side * side, side * side, -1)
        return 16 * torch.sigmoid(pairs.permute(2, 0, 1).contiguous())

    name = f"Swin V2 window {side}x{side}, {heads} heads, eval"
    return row(name, "timm", lambda: ours(Grid(side, side)), peer)


def network_cr(side: int) -> Row:
    """The CR form, which timm runs on all pairs."""
    theirs = WindowMultiHeadAttention(768, HEADS, (side, side)).eval()
    spec = enc.LogBiasSpec(form="cr", hidden=384, out_bias=True)
    ours = enc.LogBias.from_source(theirs.state_dict(), spec, DIMS)
    return row(
        f"log bias cr {side}x{side}",
        "timm",
        lambda: ours(Grid(side, side)),
        theirs._relative_positional_encodings,  # noqa: SLF001
    )


def offsets(side: int) -> Row:
    """LeViT's table, as timm builds it in training (in eval it is cached)."""
    theirs = levit.Attention(768, 64, num_heads=HEADS, resolution=(side, side))
    spec = enc.OffsetTableSpec(window_hw=(side, side))
    ours = enc.OffsetTable.from_source(theirs.state_dict(), spec, DIMS)
    return row(
        f"offset table {side}x{side}",
        "timm",
        lambda: ours(Grid(side, side)),
        lambda: theirs.get_attention_biases(torch.device("cpu")),
    )


def decomposed(extent: int, side: int) -> Row:
    """SAM's query-dependent bias, batch 2."""
    ours = enc.DecomposedBias(enc.DecomposedBiasSpec(extent=(extent, extent)), DIMS)
    q, hw = torch.randn(2, HEADS, side * side, 64), (side, side)

    def peer() -> torch.Tensor:
        return get_decomposed_rel_pos_bias(q.flatten(0, 1), *ours.tables, hw, hw)

    return row(
        f"decomposed {extent} at {side}x{side}", "timm", lambda: ours(q, Grid(side, side)), peer
    )


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # two of timm's interpolator
    with torch.no_grad():
        rows = [table(14, 0), table(14, 1), table(32, 0), table(32, 1), table(64, 0)]
        rows += [moved(7, 12), moved(14, 32)]
        rows += [network_v2(8, 3), network_v2(8, 12), network_v2(16, 12), network_v2(24, 12)]
        rows += [network(8), network(24), network_cr(8), network_cr(16), offsets(14), offsets(32)]
        rows += [decomposed(14, 14), decomposed(64, 32)]
    print(f"{'operation':40} {'peer':6} {'time / peer':>11} {'time / copy':>11}")
    for entry in rows:
        print(
            f"{entry['op']:40} {entry['peer']:6} {entry['to peer']:11.2f} {entry['to copy']:11.2f}"
        )
    print(
        json.dumps(
            {
                "device": "cpu, 1 thread",
                "torch": torch.__version__,
                "timm": timm.__version__,
                "rows": rows,
            }
        )
    )


if __name__ == "__main__":
    main()
