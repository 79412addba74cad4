"""Paired ratios of position ids against get_rope_index of the installed transformers, and against filling a tensor.

Run: .venv/bin/python -m benchmarks.ids

Equal ids are checked before anything is timed. "time / fill" is against `torch.full` of the ids' shape, which writes
the same bytes into fresh memory. Linearity: time a token, or a span, against that of ten times fewer.
"""

from __future__ import annotations

import os
import sys

# glibc returns large blocks to the system at every free: both sides would pay page faults by turns.
if os.environ.get("MALLOC_MMAP_MAX_") is None:
    os.environ.update(
        MALLOC_MMAP_MAX_="0", MALLOC_TRIM_THRESHOLD_="100000000000", OMP_NUM_THREADS="1"
    )
    os.execv(sys.executable, [sys.executable, "-m", "benchmarks.ids"])  # noqa: S606

import json
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from benchmarks.paired import ratio, seconds
from visionpos.vlm import family

MODELS = {"qwen2_5_vl": Qwen2_5_VLModel, "qwen3_vl": Qwen3VLModel}
Call = tuple[
    Tensor, Tensor | None, Tensor | None, Tensor | None
]  # types, image grids, clip grids, mask


def peer(name: str, call: Call) -> Callable[[], Any]:
    """The method needs two numbers of a config and no weights."""
    types, images, clips, mask = call
    vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=2)
    model: Any = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    model.get_vision_position_ids = partial(MODELS[name].get_vision_position_ids, model)
    return lambda: MODELS[name].get_rope_index(
        model, types, types, image_grid_thw=images, video_grid_thw=clips, attention_mask=mask
    )


def ours(name: str, call: Call) -> Callable[[], Any]:
    fam = family(name, dialect="transformers")
    return lambda: fam.position_ids_from_tokens(call[0], call[0], *call[1:])


def images(rows: int, tokens: int, each: int, *, masked: bool) -> Call:
    """Rows with so many images of 14x14 cells, text between and behind."""
    row = ([0] * 20 + [1] * 196) * each
    types = torch.tensor([row + [0] * (tokens - len(row))] * rows)
    grids = torch.tensor([[1, 28, 28]] * (rows * each))
    return types, grids, None, torch.ones_like(types) if masked else None


def timestamped(frames: int, cells: tuple[int, int], text: int, *, masked: bool) -> Call:
    """One clip whose frames stand between texts."""
    height, width = cells
    types = torch.tensor([([0] * text + [2] * (height * width)) * frames])
    grids = torch.tensor([[frames, 2 * height, 2 * width]])
    return types, None, grids, torch.ones_like(types) if masked else None


def compared(op: str, name: str, call: Call) -> dict[str, object]:
    mine, theirs = ours(name, call), peer(name, call)
    assert torch.equal(mine().ids, theirs()[0])
    shape = (3, *call[0].shape)
    return {
        "op": op,
        "to peer": ratio(mine, theirs, rounds=7),
        "to fill": ratio(mine, lambda: torch.full(shape, 7)),
        "ns a token": 1e9 * seconds(mine) / call[0].numel(),
    }


def linear() -> list[dict[str, object]]:
    """Four decades of tokens in one image's row, and four decades of spans of 20 tokens."""
    out = []
    for what, sizes in (
        ("tokens", (10**3, 10**4, 10**5, 10**6, 10**7)),
        ("spans", (10, 10**2, 10**3, 10**4, 10**5)),
    ):
        for few, many in pairwise(sizes):
            calls = [
                images(1, size, 1, masked=False)
                if what == "tokens"
                else timestamped(size, (4, 4), 4, masked=False)
                for size in (few, many)
            ]
            took = ratio(*(ours("qwen3_vl", call) for call in reversed(calls)), rounds=5)
            out.append({"op": f"{many} {what}", "against": few, "a piece": took * few / many})
    return out


def main() -> None:
    torch.set_num_threads(1)
    found = []
    for masked in (False, True):
        ending = ", mask given" if masked else ""
        found += [
            compared(
                f"8x4096 tokens, 16 images{ending}", "qwen2_5_vl", images(8, 4096, 2, masked=masked)
            ),
            compared(
                f"32k tokens, 128 frames{ending}",
                "qwen3_vl",
                timestamped(128, (8, 31), 8, masked=masked),
            ),
        ]
    print(
        f"{'ids of':44} {'time / peer':>11} {'peer / time':>11} {'time / fill':>11} {'ns a token':>11}"
    )
    for row in found:
        print(
            f"{row['op']:44} {row['to peer']:11.4f} {1 / row['to peer']:11.1f} {row['to fill']:11.1f} "
            f"{row['ns a token']:11.1f}"
        )  # type: ignore[operator, str-format]
    grown = linear()
    for row in grown:
        print(f"{row['op']:44} {row['a piece']:11.2f} a piece of {row['against']}")
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({"device": "cpu, 1 thread", **versions, "rows": found, "linear": grown}))


if __name__ == "__main__":
    main()
