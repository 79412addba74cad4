"""Results, streams and pages that the tests of reports look at."""

from __future__ import annotations

import torch

from visionpos.audit.report import stream_page
from visionpos.audit.result import AuditResult, Found, Measured
from visionpos.vlm import Image, Text, family, pack

HOSTILE = "<script>window.hit=1</script>"


def audited() -> AuditResult:
    """An incomplete audit with every verdict, a surprise, an alarm, layers and hostile names."""
    common = {"dtype": "float32", "metric": "A"}
    rows = [
        Measured(
            intervention="S1", variant="17 cells", where=f"layer {layer}", value=10.0 ** -(8 - layer),
            verdict="zero" if layer < 3 else "weak", expected="zero", **common,
        )
        for layer in range(4)
    ]  # fmt: skip
    rows += [
        Measured(intervention="S1", value=2e-7, verdict="zero", expected="zero", seed=1, **common),
        Measured(intervention="S1", value=1e-7, verdict="zero", expected="zero", **common),
        Measured(intervention="D1a", value=0.3, verdict="nonzero", expected="zero", **common),
        Measured(intervention="D2", value=0.2, verdict="nonzero", expected="bounded", **common),
        Measured(intervention="R1", value=3e-2, verdict="unseen", **{**common, "dtype": "bfloat16"}),
        Measured(intervention="N2", value=None, verdict="undefined", expected="undefined", **common),
        Measured(intervention="C1", value=float("nan"), verdict="failed", expected="nonzero",
                 note=f"raised {HOSTILE}", **common),
    ]  # fmt: skip
    found = (
        Found(detector="precision", value=1e-6, threshold=5e-3, alarm=False, says="healthy"),
        Found(detector="stale_cache", value=0.7, threshold=0.0, alarm=True,
              says=f"A, B, A: {HOSTILE}", remedy="Call update_feat_shape & <b>rebuild</b>."),
        Found(detector="tile_restart", value=None, threshold=1e-4, alarm=False),
    )  # fmt: skip
    return AuditResult(
        target=f"vit {HOSTILE} \"quoted\" & 'single'",
        scheme="axial",
        grid=(1, 3, 5),
        rows=tuple(rows),
        found=found,
        complete=False,
        lineage={"schema_version": "1.0", "scheme": [{"name": HOSTILE, "layers": [0, 1]}]},
        facts={"seconds": 12.5, "curve": [{"grid": "14x14", "quality": 0.8}], "note": HOSTILE},
    )


def photo_page():
    """A page of a prompt with a 3 x 5 photo of 84 x 140 pixels; and its stream, ids and plan."""
    fam = family("qwen2_vl")
    image = Image(size_hw=(84, 140))
    segments = [Text(HOSTILE), image, Text("after it")]
    stream, plan = fam.stream(segments), fam.plan(image)
    pos = fam.position_ids(stream)
    photo = torch.arange(3 * 84 * 140).remainder(251).to(torch.uint8).view(3, 84, 140)
    axes = fam.spec.rule.axes
    page = stream_page(stream, pos, photo=photo, plan=plan, axes=axes, title=HOSTILE)
    return page, stream, pos, plan


def packed_page():
    """A page of three prompts in one row with padding; the row, and tokens of each prompt."""
    fam = family("qwen2_vl")
    streams = [fam.stream([Text(tokens=n), Image((56, 84))]) for n in (1, 4, 2)]
    row = pack(streams, family=fam, pad_to_multiple=32)
    plans = {(number, 1): fam.plan(Image((56, 84))) for number in range(3)}
    page = stream_page(streams, row, plan=plans)
    return page, row, [one.length for one in streams]
