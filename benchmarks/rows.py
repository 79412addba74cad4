"""A row of the rotation's report: what was measured, against what, and how far it is from float64."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import visionpos as vp
from benchmarks.paired import copy_of, ratios

BOUND = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


@dataclass
class Row:
    """One line of the report."""

    op: str
    tier: str
    dtype: str
    shape: str
    megabytes: float
    to_copy: float
    to_copy_q25: float
    peer: str = ""
    to_peer: float | None = None
    max_error: float | None = None
    rms_error: float | None = None
    first_call_s: float | None = None


def timed(
    op: str,
    ours: Callable[[], object],
    copied: Sequence[Tensor],
    *,
    tier: str = "eager",
    peer: tuple[str, Callable[[], object]] | None = None,
    checked: tuple[Sequence[Tensor], Sequence[Tensor]] | None = None,
    shape: str = "",
) -> Row:
    """Return the row of one operation, after its result was checked against float64."""
    size = sum(x.numel() * x.element_size() for x in copied) / 2**20
    begin = time.perf_counter()
    ours()
    first = time.perf_counter() - begin
    worst = rms = None
    if checked is not None:
        worst, rms = off_by(*checked)
    median, quarter = ratios(ours, copy_of(*copied))
    to_peer = None if peer is None else ratios(ours, peer[1])[0]
    return Row(
        op, tier, str(copied[0].dtype).removeprefix("torch."), shape, round(size, 1), median, quarter,
        "" if peer is None else peer[0], to_peer, worst, rms, round(first, 3) if tier == "compiled" else None,
    )  # fmt: skip


def exact(q: Tensor, rotation: vp.Rotation) -> Tensor:
    """Return the turn in float64: the oracle."""
    wide = vp.Rotation(rotation.cos.double(), rotation.sin.double(), rotation.pairing)
    return wide.apply(q.double())


def off_by(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> tuple[float, float]:
    """Return the largest and the root-mean-square error against float64.

    Raises:
        AssertionError: if a result is wrong; it has no ratio.
    """
    off = torch.cat([(a.double() - b).flatten() for a, b in zip(found, wanted, strict=True)]).abs()
    bound = BOUND[found[0].dtype] * float(torch.cat([b.flatten() for b in wanted]).abs().max())
    assert float(off.max()) < bound, f"off by {float(off.max())}, at most {bound} allowed"
    return float(off.max()), float(off.square().mean().sqrt())
