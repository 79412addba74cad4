"""The machine code of the kernels, compiled without a GPU: no spills, wide accesses, few registers."""

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from visionpos.kernels.aot import Report, compile_launch
from visionpos.kernels.triton_backward import plan_norm_back, plan_turn_back
from visionpos.kernels.triton_norm import LAYER, ONCE, RMS
from visionpos.kernels.triton_plan import Launch
from visionpos.kernels.triton_rotate import plan_turn
from visionpos.kernels.triton_sources import Coordinates, Source, Tables

HEADS, TOKENS = 16, 2048


def packed(
    d: int, *, dtype: torch.dtype = torch.bfloat16, room: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k inside a packed projection; only shapes and strides matter. `room` breaks their alignment."""
    qkv = torch.empty(1, dtype=dtype).expand(2, TOKENS, 3, HEADS, d)
    steps = (TOKENS * 3 * HEADS * d + room, 3 * HEADS * d + room, HEADS * d + room, d + room, 1)
    qkv = torch.empty(0, dtype=dtype, device="meta").as_strided(qkv.shape, steps)
    return qkv[:, :, 0].transpose(1, 2), qkv[:, :, 1].transpose(1, 2)


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def sources(d: int) -> dict[str, Source]:
    pairs = d // 2
    axis = empty(pairs, dtype=torch.int32)
    return {
        "table": Tables(empty(TOKENS, pairs), empty(TOKENS, pairs)),
        "head table": Tables(empty(HEADS, TOKENS, pairs), empty(HEADS, TOKENS, pairs)),
        "map": Coordinates(empty(3, TOKENS), empty(pairs), axis),
        "map exact": Coordinates(empty(3, TOKENS), empty(pairs), axis, "exact"),
        "mixed": Coordinates(empty(2, TOKENS), empty(HEADS, 2, pairs)),
        "mixed exact": Coordinates(empty(2, TOKENS), empty(HEADS, 2, pairs), None, "exact"),
    }


def forward(d: int, pairing: str, source: str, **options: object) -> Launch:
    q, k = packed(d)
    outs = empty(*q.shape, dtype=q.dtype), empty(*k.shape, dtype=k.dtype)
    return plan_turn(q, k, *outs, sources(d)[source], pairing=pairing, **options)


def normed(d: int, pairing: str, source: str) -> Launch:
    weight = empty(d, dtype=torch.bfloat16)
    given = {"weight_q": weight, "weight_k": weight}
    return forward(d, pairing, source, norm=RMS, rounding=ONCE, eps=1e-6, vectors=given)


def layered(d: int, pairing: str, source: str) -> Launch:
    vectors = dict.fromkeys(("weight_q", "weight_k", "bias_q", "bias_k"), empty(d))
    return forward(d, pairing, source, norm=LAYER, rounding=ONCE, eps=1e-6, vectors=vectors)


def backward(d: int, pairing: str, source: str) -> Launch:
    q, k = packed(d)
    grads = [empty(2, TOKENS, HEADS, d, dtype=q.dtype).transpose(1, 2) for _ in range(2)]
    outs = torch.empty_like(grads[0]), torch.empty_like(grads[1])
    return plan_turn_back(*grads, q, k, outs, sources(d)[source], pairing=pairing)[0]


def norm_backward(
    d: int, pairing: str, source: str, norm: str = "rms", dtype: torch.dtype = torch.bfloat16
) -> Launch:
    q, k = packed(d, dtype=dtype)
    grads = [empty(2, TOKENS, HEADS, d, dtype=dtype).transpose(1, 2) for _ in range(2)]
    outs = torch.empty_like(grads[0]), torch.empty_like(grads[1])
    given = {"norm": norm, "weights": (empty(d, dtype=dtype),) * 2, "eps": 1e-6, "pairing": pairing}
    return plan_norm_back(*grads, q, k, outs, sources(d)[source], **given)[0]


def layer_backward(d: int, pairing: str, source: str) -> Launch:
    return norm_backward(d, pairing, source, "layer")


def widest(d: int, pairing: str) -> int:
    """Halves of 36 and 44 channels begin at a multiple of 8 bytes alone."""
    return 64 if pairing == "half" and d // 2 % 8 else 128


def check(launch: Launch, capability: int, widest: int) -> Report:
    report = compile_launch(launch, capability)
    assert not report.faults(widest=widest), report
    assert widest in report.stores, report
    return report


FEW = [
    (forward, 64, "half", "table"), (forward, 72, "adjacent", "table"), (forward, 80, "half", "map"),
    (forward, 128, "adjacent", "map exact"), (forward, 64, "adjacent", "mixed exact"),
    (normed, 128, "half", "table"), (normed, 80, "adjacent", "table"), (backward, 64, "half", "table"),
    (backward, 80, "adjacent", "mixed exact"), (norm_backward, 128, "half", "table"),
    (layer_backward, 80, "adjacent", "head table"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "d", "pairing", "source"), FEW)
def test_machine_code(kind: Callable[..., Launch], d: int, pairing: str, source: str) -> None:
    narrow = kind is norm_backward and pairing == "half"
    check(kind(d, pairing, source), 90, 64 if narrow else widest(d, pairing))


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("d", [64, 72, 80, 96, 128])
@pytest.mark.parametrize("pairing", ["half", "adjacent"])
def test_machine_code_everywhere(capability: int, d: int, pairing: str) -> None:
    cases = [(forward, source) for source in sources(d)]
    cases += [(normed, "table"), (normed, "map exact"), (layered, "mixed")]
    cases += [(backward, source) for source in ("table", "head table", "map exact", "mixed exact")]
    cases += [(norm_backward, "table"), (norm_backward, "head table"), (layer_backward, "table")]
    for kind, source in cases:
        mapped = kind is backward and source.startswith("map")
        narrow = pairing == "half" and (mapped or kind in (norm_backward, layer_backward))
        check(kind(d, pairing, source), capability, 64 if narrow else widest(d, pairing))


def test_plain_loads_are_wide() -> None:
    """One tile of a head: two loads and two stores of 16 bytes a tensor and head, and four loads of the tables."""
    report = check(forward(64, "half", "table"), 90, 128)
    launch = forward(64, "half", "table").arguments
    tensors = launch["Q_TILES"] + launch["K_TILES"]
    assert dict(report.loads) == {128: 2 * tensors + 4}
    assert dict(report.stores) == {128: 2 * tensors}


@pytest.mark.parametrize("kind", ["forward", "backward"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_tails_and_other_dtypes(kind: str, dtype: torch.dtype) -> None:
    """Half of the channels turn; the tail is copied 16 bytes at a time, in registers that suffice."""
    q, k = packed(128, dtype=dtype)
    outs = empty(*q.shape, dtype=dtype), empty(*k.shape, dtype=dtype)
    tables = Tables(empty(TOKENS, 32), empty(TOKENS, 32))
    if kind == "forward":
        check(plan_turn(q, k, *outs, tables), 90, 128)
    else:
        check(plan_turn_back(*outs, q, k, outs, tables)[0], 90, 128)


def test_the_gate_can_fail() -> None:
    """Strides that nothing divides leave accesses of two bytes, and the report says so."""
    q, k = packed(64, room=1)
    outs = empty(*q.shape, dtype=q.dtype), empty(*k.shape, dtype=k.dtype)
    launch = plan_turn(q, k, *outs, sources(64)["table"])
    assert launch.arguments["UNIT"] == 1
    faults = " ".join(compile_launch(launch, 90).faults())
    assert "16-bit loads" in faults


@pytest.mark.parametrize(
    ("report", "fault"),
    [
        (Report(97, 0, 0, {128: 1}, {128: 1}, 0), "97 registers, at most 96"),
        (Report(40, 32, 0, {128: 1}, {128: 1}, 0), "32 bytes of stack"),
        (Report(40, 0, 0, {128: 1}, {128: 1}, 2), "2 accesses to local memory"),
        (Report(40, 0, 0, {128: 1}, {16: 1}, 0), "16-bit stores"),
        (Report(40, 0, 0, {32: 1}, {128: 1}, 0), "no loads of 128 bits"),
    ],
)
def test_faults_name_their_number(report: Report, fault: str) -> None:
    assert any(fault in found for found in report.faults())
