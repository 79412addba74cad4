"""Cases of the Triton rotation backward, and after a norm."""

# Cases are many, and close over all that makes them.

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch

from tests.kernels.oracle import (
    check,
    formed,
    in_layout,
    interleaved_axes,
    normalised,
    plain,
    turned,
)
from visionpos.kernels.triton_backward import (
    launch_norm_rotate_backward,
    launch_rotate_backward,
    launch_rotate_coords_backward,
)
from visionpos.kernels.triton_rotate import launch_norm_rotate
from visionpos.kernels.triton_sources import Coordinates, Tables

Case = tuple[str, Callable[[], None]]


def backward() -> Iterator[Case]:
    sizes = [
        (64, 32, 4, 2, "half", ()), (80, 40, 5, 5, "adjacent", (5,)), (72, 36, 3, 3, "half", (2, 1)),
        (32, 10, 2, 2, "adjacent", (2, 2)), (88, 44, 7, 3, "half", ()), (128, 64, 6, 1, "adjacent", (2, 1)),
    ]  # fmt: skip
    for d, pairs, heads, kv, pairing, lead in sizes:
        n = 17 if d in (32, 64) else 9  # two blocks of tokens, without many programs
        for conj in (False, True) if pairing == "adjacent" else (False,):

            def of_tables(
                d=d, pairs=pairs, heads=heads, kv=kv, pairing=pairing, lead=lead, conj=conj, n=n
            ):
                q, k = in_layout("packed", 2, heads, kv, n, d)
                angles = torch.randn(*lead, n - 2, pairs, dtype=torch.float64)
                cos, sin = angles.cos().float(), angles.sin().float()
                grads = torch.randn(2, heads, n, d), torch.randn(2, n, kv, d).transpose(1, 2)
                leaves = [x.double().requires_grad_() for x in (q, k, cos, sin)]
                outs = [plain(x, *leaves[2:], pairing, 1, conj=conj) for x in leaves[:2]]
                expected = torch.autograd.grad(outs, leaves, [g.double() for g in grads])
                check(
                    launch_rotate_backward(
                        *grads, q, k, cos, sin, pairing=pairing, prefix=1, suffix=1, conj=conj
                    ),
                    expected,
                )

            yield f"tables-{pairing}-{d}/{2 * pairs}-{heads}:{kv}-{lead}-conj={conj}", of_tables
        for kind in ("mixed", "shared", "mapped"):
            if kind == "mixed" and heads != kv:
                continue

            def of_freqs(
                d=d, pairs=pairs, heads=heads, kv=kv, pairing=pairing, lead=lead, kind=kind, n=n
            ):
                q, k = in_layout("bnhd", 2, heads, kv, n, d)
                at = torch.rand(*lead[:1], 3, n - 2) if lead[:1] == (2,) else torch.rand(3, n - 2)
                axis = interleaved_axes(pairs, 3) if kind == "mapped" else None
                shape = {"mixed": (heads, 3, pairs), "shared": (3, pairs), "mapped": (pairs,)}[kind]
                freqs = torch.randn(shape)
                grads = torch.randn_like(q), torch.randn_like(k)
                leaves = [x.double().requires_grad_() for x in (q, k, freqs)]
                angles = formed(at.double(), leaves[2], axis)
                turns = 1.5 * angles.cos(), 1.5 * angles.sin()
                outs = [plain(x, *turns, pairing, 1) for x in leaves[:2]]
                expected = torch.autograd.grad(outs, leaves, [g.double() for g in grads])
                actual = launch_rotate_coords_backward(
                    *grads, q, k, at, freqs, axis_of_pair=axis, pairing=pairing, prefix=1, suffix=1,
                    accuracy="exact", scale=1.5,
                )  # fmt: skip
                check(actual, expected)

            yield f"{kind}-{pairing}-{d}/{2 * pairs}-{heads}:{kv}", of_freqs


def norm() -> Iterator[Case]:
    for kind in ("rms", "layer", "l2"):
        for pairing, d, pairs in (
            ("half", 64, 32),
            ("adjacent", 80, 40),
            ("half", 72, 18),
            ("adjacent", 48, 12),
        ):
            for weighted in (True, False) if d == 64 else (True,):

                def run(kind=kind, pairing=pairing, d=d, pairs=pairs, weighted=weighted):
                    q, k = in_layout("packed", 2, 3, 2, 7, d)
                    q, k = q * 3 + 1, k - 2
                    weights = [torch.rand(d) + 0.5 if weighted else None for _ in range(2)]
                    biases = [
                        torch.randn(d) if weighted and kind == "layer" else None for _ in range(2)
                    ]
                    angles = torch.randn(6, pairs, dtype=torch.float64)
                    outs = launch_norm_rotate(
                        q, k, Tables(angles.cos().float(), angles.sin().float()), norm=kind,
                        weight_q=weights[0], weight_k=weights[1], bias_q=biases[0], bias_k=biases[1],
                        pairing=pairing, prefix=1,
                    )  # fmt: skip
                    expected = (
                        turned(normalised(x, kind, w, b), angles, pairing, 1)
                        for x, w, b in zip((q, k), weights, biases, strict=True)
                    )
                    check(outs, tuple(expected))

                yield f"{kind}-{pairing}-{d}/{2 * pairs}-weighted={weighted}", run

    def from_coords():
        q, k = in_layout("bnhd", 2, 3, 3, 7, 64)
        at, freqs = torch.rand(2, 7), torch.randn(3, 2, 32)
        outs = launch_norm_rotate(q, k, Coordinates(at, freqs, accuracy="exact"), norm="rms")
        angles = formed(at.double(), freqs.double(), None)
        check(outs, tuple(turned(normalised(x, "rms", None, None), angles, "half") for x in (q, k)))

    def in_place():
        q, k = in_layout("packed", 2, 3, 3, 7, 64)
        angles = torch.randn(7, 16, dtype=torch.float64)
        expected = tuple(turned(normalised(x, "rms", None, None), angles, "half") for x in (q, k))
        tables = Tables(angles.cos().float(), angles.sin().float())
        launch_norm_rotate(q, k, tables, norm="rms", out_q=q, out_k=k)
        check((q, k), expected)

    yield from norm_backs()
    yield "from_coords", from_coords
    yield "in_place", in_place
    for rounding in ("none", "once", "twice"):
        yield f"rounding-{rounding}", lambda rounding=rounding: roundings(rounding)


def norm_backs() -> Iterator[Case]:
    sizes = [
        ("half", 64, 32, ()),
        ("adjacent", 80, 40, (3,)),
        ("half", 72, 18, (2, 1)),
        ("adjacent", 48, 12, ()),
    ]
    for kind, size in product(("rms", "layer", "l2"), sizes):
        yield f"{kind}-back-{size}", partial(norm_back, kind, *size)


def norm_back(kind: str, pairing: str, d: int, pairs: int, lead: tuple[int, ...]) -> None:
    """Gradients of q, k, weights and biases against autograd of the float64 oracle; partial rotary, odd strides."""
    q, k = in_layout("packed", 2, 3, 3 if lead == (3,) else 2, 9, d)
    q, k = q * 2 + 1, k - 2
    weights = [torch.rand(d) + 0.5 for _ in range(2)]
    angles = torch.randn(*lead, 8, pairs, dtype=torch.float64)
    grads = torch.randn(2, 3, 9, d), torch.randn(2, 9, k.shape[1], d).transpose(1, 2)
    leaves = [x.double().requires_grad_() for x in (q, k, *weights, *torch.zeros(2, d))]
    outs = [
        turned(normalised(x, kind, weight, None) + bias, angles, pairing, 1)
        for x, weight, bias in zip(leaves[:2], leaves[2:4], leaves[4:], strict=True)
    ]
    expected = torch.autograd.grad(outs, leaves, [grad.double() for grad in grads])
    actual = launch_norm_rotate_backward(
        *grads, q, k, Tables(angles.cos().float(), angles.sin().float()), norm=kind, weight_q=weights[0],
        weight_k=weights[1], pairing=pairing, prefix=1,
    )  # fmt: skip
    check(actual, expected)


def roundings(rounding: str) -> None:
    """Bit-equal, but for a few last places of rsqrt, to the peer that rounds there and to no other."""
    x = torch.randn(1, 4, 64, 64, dtype=torch.float16)
    weight = (torch.rand(64) + 0.5).half()
    angles = torch.randn(64, 32)
    cos, sin = angles.cos(), angles.sin()
    out, _ = launch_norm_rotate(
        x, x, Tables(cos, sin), norm="rms", weight_q=weight, weight_k=weight, rounding=rounding
    )
    hat = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    peers = {
        "none": hat * weight.float(),
        "once": (hat * weight.float()).half(),
        "twice": weight * hat.half(),
    }
    for name, peer in peers.items():
        a, b = peer.float().chunk(2, -1)
        expected = torch.cat([a * cos - b * sin, b * cos + a * sin], -1).half()
        equal = (out == expected).double().mean().item()
        assert (equal > 0.995) == (name == rounding), f"{equal:.3f} of the bits equal {name}"
