"""What the Triton kernels are compared with, in float64, and the layouts they are given."""

import torch
from torch import Tensor

from tests.tolerances import assert_close_to


def turned(
    x: Tensor, angles: Tensor, pairing: str, prefix: int = 0, suffix: int = 0, scale: float = 1.0
) -> Tensor:
    """The oracle, in float64: channel pairs as complex numbers times exp(i angle); angles `[..., n, pairs]`."""
    x = x.double()
    pairs, last = angles.shape[-1], x.shape[2] - suffix
    middle = x[:, :, prefix:last]
    if pairing == "half":
        z = torch.complex(middle[..., :pairs], middle[..., pairs : 2 * pairs])
    else:
        z = torch.complex(middle[..., 0 : 2 * pairs : 2], middle[..., 1 : 2 * pairs : 2])
    z = z * torch.polar(torch.full_like(angles, scale, dtype=torch.float64), angles.double())
    parts = (z.real, z.imag)
    new = torch.cat(parts, -1) if pairing == "half" else torch.stack(parts, -1).flatten(-2)
    new = torch.cat([new, middle[..., 2 * pairs :]], -1)
    return torch.cat([x[:, :, :prefix], new, x[:, :, last:]], 2)


def plain(
    x: Tensor, cos: Tensor, sin: Tensor, pairing: str, exempt: int, *, conj: bool = False
) -> Tensor:
    """The textbook rotation by independent cos and sin, which autograd differentiates; float64."""
    pairs, middle = cos.shape[-1], x[:, :, exempt:-exempt]
    sin = -sin if conj else sin
    if pairing == "half":
        a, b = middle[..., :pairs], middle[..., pairs : 2 * pairs]
        new = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    else:
        a, b = middle[..., 0 : 2 * pairs : 2], middle[..., 1 : 2 * pairs : 2]
        new = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    new = torch.cat([new, middle[..., 2 * pairs :]], -1)
    return torch.cat([x[:, :, :exempt], new, x[:, :, -exempt:]], 2)


def formed(at: Tensor, freqs: Tensor, axis: Tensor | None) -> Tensor:
    """Angles `[..., heads or 1, n, pairs]`, differentiable."""
    if axis is not None:
        return (at.mT[..., axis] * freqs).unsqueeze(-3)
    return torch.einsum("...an,hap->...hnp", at, freqs if freqs.ndim == 3 else freqs[None])


def normalised(x: Tensor, norm: str, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x, size = x.double(), x.shape[-1:]
    weight, bias = (None if v is None else v.double() for v in (weight, bias))
    if norm == "rms":
        return torch.nn.functional.rms_norm(x, size, weight, 1e-6)
    if norm == "layer":
        return torch.nn.functional.layer_norm(x, size, weight, bias, 1e-6)
    return torch.nn.functional.normalize(x, dim=-1, eps=1e-6) * (1.0 if weight is None else weight)


def in_layout(layout: str, b: int, heads: int, kv: int, n: int, d: int) -> tuple[Tensor, Tensor]:
    """q and k as `[b, heads, n, d]` views of memory in another order."""
    if layout == "packed":
        qkv = torch.randn(b, n, heads + 2 * kv, d).transpose(1, 2)
        return qkv[:, :heads], qkv[:, heads : heads + kv]
    if layout == "thd":
        return tuple(torch.randn(b * n, h, d).transpose(0, 1)[None] for h in (heads, kv))
    if layout == "bnhd":
        return tuple(torch.randn(b, n, h, d).transpose(1, 2) for h in (heads, kv))
    if layout == "channels_first":
        return tuple(torch.randn(b, h, d, n).transpose(2, 3) for h in (heads, kv))
    return torch.randn(b, heads, n, d), torch.randn(b, kv, n, d)


def interleaved_axes(pairs: int, axes: int) -> Tensor:
    return torch.arange(pairs, dtype=torch.int32) % axes


def check(actual: tuple[Tensor | None, ...], expected: tuple[Tensor | None, ...]) -> None:
    for one, other in zip(actual, expected, strict=True):
        if other is None:
            assert one is None
        else:
            assert_close_to(one, other)
