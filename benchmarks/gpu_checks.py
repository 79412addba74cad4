"""The Triton rotation on a CUDA device against float64; `benchmarks.gpu` runs this before it times anything."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shape:
    """Batch, heads, kv heads, tokens, head_dim, tokens without position."""

    b: int
    heads: int
    kv: int
    n: int
    d: int
    prefix: int = 0

    @property
    def rows(self) -> int:
        """Return the number of tokens that turn."""
        return self.n - self.prefix

    def qk(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return q and k as views of one packed projection."""
        qkv = torch.randn(
            self.b, self.n, self.heads + 2 * self.kv, self.d, device="cuda", dtype=dtype
        )
        qkv = qkv.transpose(1, 2)
        return qkv[:, : self.heads], qkv[:, self.heads : self.heads + self.kv]


SMALL = {
    "72": Shape(2, 6, 6, 50, 72, 1),
    "80": Shape(2, 5, 5, 33, 80),
    "88": Shape(1, 16, 16, 70, 88, 2),
    "96": Shape(2, 7, 2, 40, 96),
    "128": Shape(2, 28, 4, 61, 128, 1),
    "256": Shape(1, 4, 2, 40, 256),
    "32": Shape(2, 3, 3, 130, 32),
    "64": Shape(2, 12, 12, 197, 64, 1),
}


def turned(x: Tensor, angles: Tensor, pairing: str, prefix: int) -> Tensor:
    """Channel pairs as complex numbers times exp(i angle)."""
    x, z = x.double(), torch.polar(torch.ones_like(angles), angles)
    middle, pairs = x[:, :, prefix:], angles.shape[-1]
    if pairing == "half":
        a, b = middle[..., :pairs], middle[..., pairs : 2 * pairs]
    else:
        a, b = middle[..., 0 : 2 * pairs : 2], middle[..., 1 : 2 * pairs : 2]
    z = torch.complex(a.contiguous(), b.contiguous()) * z
    parts = (z.real, z.imag)
    new = torch.cat(parts, -1) if pairing == "half" else torch.stack(parts, -1).flatten(-2)
    return torch.cat([x[:, :, :prefix], new], 2)


def error_of(actual: Tensor, expected: Tensor) -> float:
    """rms(actual - expected) / rms(expected)."""
    off = (actual.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    return float(off)


BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


def angles_of(shape: Shape, kind: str) -> tuple[dict[str, Any], Tensor]:
    """Arguments of a launcher, and the same angles in float64."""
    pairs = shape.d // 2
    ladder = 1e4 ** -(torch.arange(pairs, device="cuda", dtype=torch.float64) / pairs)
    if kind == "mixed":
        yx = torch.rand(2, shape.rows, device="cuda") * 64
        freqs = torch.randn(shape.heads, 2, pairs, device="cuda") * 0.3
        angles = torch.einsum("an,hap->hnp", yx.double(), freqs.double())
        return {"coords": yx, "freqs": freqs}, angles
    ids = torch.randint(0, 32768, (3, shape.rows), device="cuda", dtype=torch.int32)
    axis = torch.arange(pairs, device="cuda", dtype=torch.int32) % 3
    angles = ids.double().mT[:, axis.long()] * ladder
    if kind == "map":
        return {"coords": ids, "freqs": ladder, "axis_of_pair": axis}, angles
    return {"cos": angles.cos().float(), "sin": angles.sin().float()}, angles


def correctness(deadline: float) -> list[dict[str, Any]]:
    """Every operation against float64 on every small shape; an error is a row, not an end."""
    rows: list[dict[str, Any]] = [check_far_positions()]
    for name, shape in SMALL.items():
        # Every kernel is compiled on the spot, about a second each, so float32 goes through two shapes alone.
        for dtype in (torch.bfloat16, torch.float32)[: 2 if name in ("64", "72") else 1]:
            for pairing in ("half", "adjacent"):
                for check in (check_tables, check_map, check_mixed, check_norm, check_backward):
                    if check is check_mixed and shape.heads != shape.kv:
                        continue
                    label = f"{check.__name__[6:]} {name} {pairing} {str(dtype)[6:]}"
                    if time.monotonic() > deadline:
                        rows.append({"check": label, "error": "out of time", "right": False})
                        continue
                    torch.manual_seed(0)
                    try:
                        error = check(shape, dtype, pairing)
                        right = error <= BOUNDS[dtype]
                        rows.append({"check": label, "error": error, "right": right})
                    except Exception as problem:
                        text = f"{type(problem).__name__}: {problem}"[:400]
                        rows.append({"check": label, "error": text, "right": False})
    return rows


def check_tables(shape: Shape, dtype: torch.dtype, pairing: str) -> float:
    from visionpos.kernels.triton_rotate import launch_rotate

    q, k = shape.qk(dtype)
    given, angles = angles_of(shape, "table")
    options = {"pairing": pairing, "prefix": shape.prefix}
    expected = [turned(x, angles, pairing, shape.prefix) for x in (q, k)]
    fresh = launch_rotate(q, k, **given, **options)
    errors = [error_of(a, e) for a, e in zip(fresh, expected, strict=True)]
    inside = launch_rotate(q, k, **given, **options, out_q=q, out_k=k)
    return max(*errors, *(error_of(a, e) for a, e in zip(inside, expected, strict=True)))


def check_map(shape: Shape, dtype: torch.dtype, pairing: str) -> float:
    from visionpos.kernels.triton_rotate import launch_rotate_coords

    q, k = shape.qk(dtype)
    given, angles = angles_of(shape, "map")
    outs = launch_rotate_coords(
        q, k, **given, pairing=pairing, prefix=shape.prefix, accuracy="exact"
    )
    expected = (turned(x, angles, pairing, shape.prefix) for x in (q, k))
    return max(error_of(a, e) for a, e in zip(outs, expected, strict=True))


def check_mixed(shape: Shape, dtype: torch.dtype, pairing: str) -> float:
    from visionpos.kernels.triton_rotate import launch_rotate_coords

    q, k = shape.qk(dtype)
    given, angles = angles_of(shape, "mixed")
    outs = launch_rotate_coords(
        q, k, **given, pairing=pairing, prefix=shape.prefix, accuracy="exact"
    )
    expected = (turned(x, angles, pairing, shape.prefix) for x in (q, k))
    return max(error_of(a, e) for a, e in zip(outs, expected, strict=True))


def check_norm(shape: Shape, dtype: torch.dtype, pairing: str) -> float:
    from visionpos.kernels.triton_rotate import launch_norm_rotate
    from visionpos.kernels.triton_sources import Tables

    q, k = shape.qk(dtype)
    weight = torch.rand(shape.d, device="cuda", dtype=dtype) + 0.5
    given, angles = angles_of(shape, "table")
    outs = launch_norm_rotate(
        q, k, Tables(**given), norm="rms", weight_q=weight, weight_k=weight, pairing=pairing,
        prefix=shape.prefix, rounding="none",
    )  # fmt: skip
    normed = (
        torch.nn.functional.rms_norm(x.double(), (shape.d,), weight.double(), 1e-6) for x in (q, k)
    )
    expected = (turned(x, angles, pairing, shape.prefix) for x in normed)
    return max(error_of(a, e) for a, e in zip(outs, expected, strict=True))


def check_backward(shape: Shape, dtype: torch.dtype, pairing: str) -> float:
    """Gradients of tables, and of mixed frequencies where heads agree, in float64 by hand; twice, bit-equal."""
    from visionpos.kernels import triton_backward as back

    q, k = shape.qk(dtype)
    grads = torch.randn_like(q), torch.randn_like(k)
    given, angles = angles_of(shape, "table")
    options = {"pairing": pairing, "prefix": shape.prefix}
    first = back.launch_rotate_backward(*grads, q, k, **given, **options)
    again = back.launch_rotate_backward(*grads, q, k, **given, **options)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True)), "not deterministic"
    errors = [
        error_of(a, turned(g, -angles, pairing, shape.prefix))
        for a, g in zip(first[:2], grads, strict=True)
    ]
    by_cos, by_sin = 0.0, 0.0
    for x, g in zip((q, k), grads, strict=True):
        (a, b), (c, d) = (split(t[:, :, shape.prefix :].double(), pairing) for t in (x, g))
        by_cos, by_sin = by_cos + (c * a + d * b).sum((0, 1)), by_sin + (d * a - c * b).sum((0, 1))
    # Sums are float32 whatever the dtype of q: they have the bound of float32, in units of the dtype's own.
    wide = BOUNDS[dtype] / BOUNDS[torch.float32]
    errors += [error_of(first[2], by_cos) * wide, error_of(first[3], by_sin) * wide]
    if shape.heads == shape.kv:
        given, angles = angles_of(shape, "mixed")
        actual = back.launch_rotate_coords_backward(
            *grads, q, k, **given, **options, accuracy="exact"
        )
        of_angle = 0.0
        for x, g in zip((q, k), grads, strict=True):
            new = split(turned(x, angles, pairing, shape.prefix)[:, :, shape.prefix :], pairing)
            c, d = split(g[:, :, shape.prefix :].double(), pairing)
            of_angle = of_angle + (d * new[0] - c * new[1]).sum(0)
        by_freqs = torch.einsum("an,hnp->hap", given["coords"].double(), of_angle)
        errors.append(error_of(actual[2], by_freqs) * wide)
    return max(errors)


def split(x: Tensor, pairing: str) -> tuple[Tensor, ...]:
    return x.chunk(2, -1) if pairing == "half" else x.unflatten(-1, (-1, 2)).unbind(-1)


def check_far_positions() -> dict[str, Any]:
    """Angles at position 10^6, where a float32 product is off by 6e-2 rad."""
    from visionpos.kernels.triton_rotate import launch_rotate_coords

    ids = torch.arange(10**6, 10**6 + 512, device="cuda", dtype=torch.int32)
    freqs = 1e4 ** -(torch.arange(64, device="cuda", dtype=torch.float64) / 64)
    q = torch.zeros(1, 1, 512, 128, device="cuda")
    q[..., :64] = 1
    axis = torch.zeros(64, device="cuda", dtype=torch.int32)
    label = "angles at 10^6"
    try:
        out, _ = launch_rotate_coords(
            q, None, ids[None], freqs, axis_of_pair=axis, accuracy="exact"
        )
    except Exception as problem:
        return {
            "check": label,
            "error": f"{type(problem).__name__}: {problem}"[:400],
            "right": False,
        }
    angles = ids.double()[:, None] * freqs
    error = float((out[0, 0].double() - torch.cat([angles.cos(), angles.sin()], -1)).abs().max())
    return {"check": label, "error": error, "right": error < 1e-6}
