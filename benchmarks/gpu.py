"""The Triton rotation on one CUDA device: first right, then how near to a copy of the same bytes.

`python -m benchmarks.gpu --output gpu.json` takes under eight minutes and stops starting rows after `--minutes`.
Shapes: A ViT-B/16 at 224 px, B ViT-L/16 at 1024 px (B1: one image), C a 7B VLM's prefill of 32 k tokens, D the tower of
Qwen2-VL at 16 k patches.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_checks import BOUNDS, Shape, angles_of, correctness, error_of, turned

Call = Callable[[], object]
FLUSH_BYTES = 256 * 2**20  # more than any L2
REPEATS = 30


SHAPES = {
    "A": Shape(64, 12, 12, 197, 64, 1),
    "B": Shape(8, 16, 16, 4101, 64, 5),
    "B1": Shape(1, 16, 16, 4101, 64, 5),
    "C": Shape(1, 28, 4, 32768, 128),
    "D": Shape(1, 16, 16, 16384, 80),
}


def microseconds(call: Call, flush: Tensor) -> float:
    """Median time of a call on the device, with a cold L2."""
    for _ in range(3):
        call()
    times = []
    for _ in range(REPEATS):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        times.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in times) * 1e3


def launches(call: Call) -> int | None:
    """Return the kernels of one call, or None where the profiler cannot say."""
    from torch.profiler import ProfilerActivity, profile

    try:
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            call()
            torch.cuda.synchronize()
        kind = torch.autograd.DeviceType.CUDA
        return sum(event.device_type == kind for event in seen.events())
    except Exception:
        return None


def eager(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The wording of transformers: full-width tables, rotate_half by concatenation."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def liger(shape: Shape) -> Call | None:
    """Return Liger's rotation of halves, right by its own copy of q and k, or None where it is not installed.

    It has no CPU form. It turns tokens without position too, writes to what it is given, and knows no norm.

    Raises:
        AssertionError: if its result is wrong; it has no time then.
    """
    try:
        from liger_kernel.ops.rope import LigerRopeFunction
    except ImportError:
        return None
    plain = Shape(shape.b, shape.heads, shape.kv, shape.n, shape.d)
    q, k = plain.qk(torch.bfloat16)
    given, angles = angles_of(plain, "table")
    wide = [torch.cat([given[name]] * 2, -1)[None] for name in ("cos", "sin")]
    seen = [x[:1, :, :64].clone() for x in (q, k)]
    # It writes into memory where heads follow tokens, and copies what lies otherwise: views of tokens keep it in place.
    own = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k)]
    del q, k
    turned_by_it = LigerRopeFunction.apply(*own, *wide)
    for found, x in zip(turned_by_it, seen, strict=True):
        wrong = error_of(found[:1, :, :64], turned(x, angles[:64], "half", 0))
        assert wrong <= BOUNDS[torch.bfloat16], f"Liger is off by {wrong}"
    return lambda: LigerRopeFunction.apply(*own, *wide)


def variants(shape: Shape) -> dict[str, tuple[Call, float]]:
    """Return name -> call and the bytes of q and k that it must move, in units of one read and one write of both."""
    from visionpos.kernels.triton_backward import (
        launch_rotate_backward,
        launch_rotate_coords_backward,
    )
    from visionpos.kernels.triton_rotate import (
        launch_norm_rotate,
        launch_rotate,
        launch_rotate_coords,
    )
    from visionpos.kernels.triton_sources import Tables

    q, k = shape.qk(torch.bfloat16)
    # New memory in the order of tokens, as a projection writes it.
    outs = {"out_q": torch.empty_like(q), "out_k": torch.empty_like(k)}
    at, at_map = angles_of(shape, "table")[0], angles_of(shape, "map")[0]
    pre = {"prefix": shape.prefix}
    weight = torch.ones(shape.d, device="cuda", dtype=torch.bfloat16)
    weights = {"weight_q": weight, "weight_k": weight}
    wide = [torch.cat([at[name], at[name]], -1).bfloat16() for name in ("cos", "sin")]
    # Exempt tokens turn by an arbitrary angle here: the peer is timed, not checked.
    wide = [torch.nn.functional.pad(part, (0, 0, shape.prefix, 0), value=1.0) for part in wide]
    grads = torch.randn_like(q), torch.randn_like(k)
    rms = torch.nn.functional.rms_norm
    calls: dict[str, tuple[Call, float]] = {
        "table half": (lambda: launch_rotate(q, k, **at, **pre, **outs), 1),
        "table adjacent": (lambda: launch_rotate(q, k, **at, **pre, **outs, pairing="adjacent"), 1),
        "table in place": (lambda: launch_rotate(q, k, **at, **pre, out_q=q, out_k=k), 1),
        "map reference": (lambda: launch_rotate_coords(q, k, **at_map, **pre, **outs), 1),
        "map exact": (lambda: launch_rotate_coords(q, k, **at_map, **pre, **outs, accuracy="exact"), 1),
        "rms + table": (
            lambda: launch_norm_rotate(q, k, Tables(**at), norm="rms", **weights, **pre, **outs), 1,
        ),
        "backward of tables": (lambda: launch_rotate_backward(*grads, q, k, **at, **pre), 1.5),
        "eager half": (lambda: (eager(q, *wide), eager(k, *wide)), 1),
        "eager rms, half": (
            lambda: [eager(rms(x, (shape.d,), weight, 1e-6), *wide) for x in (q, k)], 1,
        ),
    }  # fmt: skip
    other = liger(shape)
    if other is not None:
        calls["Liger half, in place"] = (other, 1)
    if shape.heads == shape.kv:
        mixed = angles_of(shape, "mixed")[0]
        calls["mixed reference"] = (lambda: launch_rotate_coords(q, k, **mixed, **pre, **outs), 1)
        calls["mixed exact"] = (
            lambda: launch_rotate_coords(q, k, **mixed, **pre, **outs, accuracy="exact"), 1,
        )  # fmt: skip
        calls["backward of mixed"] = (
            lambda: launch_rotate_coords_backward(*grads, q, k, **mixed, **pre), 1.5,
        )  # fmt: skip
    return calls


def speed(deadline: float) -> list[dict[str, Any]]:
    """Time every variant on every shape beside a copy of the same bytes; stop starting rows at the deadline."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    rows: list[dict[str, Any]] = []
    for name, shape in SHAPES.items():
        if time.monotonic() > deadline:
            rows.append({"shape": name, "variant": "all", "problem": "out of time"})
            continue
        size = shape.b * (shape.heads + shape.kv) * shape.n * shape.d
        source = torch.empty(size, dtype=torch.bfloat16, device="cuda").normal_()
        target = torch.empty_like(source)
        copy = microseconds(lambda target=target, source=source: target.copy_(source), flush)
        del source, target
        rows.append(row(name, "copy", size, copy, copy, 1, 1))
        for variant, (call, moved) in variants(shape).items():
            if time.monotonic() > deadline:
                rows.append({"shape": name, "variant": variant, "problem": "out of time"})
                continue
            try:
                spent, kernels = microseconds(call, flush), launches(call)
                rows.append(row(name, variant, size, spent, copy, moved, kernels))
            except Exception as problem:
                text = f"{type(problem).__name__}: {problem}"[:400]
                rows.append({"shape": name, "variant": variant, "problem": text})
        torch.cuda.empty_cache()
    return rows


def row(
    shape: str,
    variant: str,
    size: int,
    spent: float,
    copy: float,
    moved: float,
    kernels: int | None,
) -> dict[str, Any]:
    """One line of the result; `share` is the bandwidth in units of the copy's."""
    return {
        "shape": shape, "variant": variant, "MB": size * 2 / 1e6, "microseconds": spent,
        "TB_per_s": moved * 4 * size / spent / 1e6, "share_of_copy": moved * copy / spent, "kernels": kernels,
    }  # fmt: skip


def report(right: list[dict[str, Any]], fast: list[dict[str, Any]]) -> None:
    """Print both tables."""
    wrong = [line for line in right if not line["right"]]
    print(f"right: {len(right) - len(wrong)} of {len(right)} checks against float64")
    for line in wrong:
        print(f"  WRONG {line['check']}: {line['error']}")
    print(f"{'shape':6}{'variant':22}{'MB':>8}{'us':>9}{'TB/s':>7}{'of copy':>9}{'kernels':>9}")
    for line in fast:
        if "problem" in line:
            print(f"{line['shape']:6}{line['variant']:22}  {line['problem']}")
            continue
        print(
            f"{line['shape']:6}{line['variant']:22}{line['MB']:8.1f}{line['microseconds']:9.1f}"
            f"{line['TB_per_s']:7.2f}{line['share_of_copy']:9.2f}{line['kernels']!s:>9}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="where the JSON goes")
    parser.add_argument("--minutes", type=float, default=7.0, help="after which no row starts")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print(
            "No CUDA device: this benchmark measures GPU kernels, and runs nowhere else.",
            file=sys.stderr,
        )
        return 2
    start, budget = time.monotonic(), 60 * given.minutes
    right = correctness(start + budget / 2)
    fast = speed(start + budget)
    report(right, fast)
    if given.output is not None:
        properties = torch.cuda.get_device_properties(0)
        found = {
            "device": properties.name,
            "torch": torch.__version__,
            "checks": right,
            "speed": fast,
        }
        given.output.parent.mkdir(parents=True, exist_ok=True)
        given.output.write_text(json.dumps(found, indent=1))
    return 0 if all(line["right"] for line in right) else 1


if __name__ == "__main__":
    raise SystemExit(main())
