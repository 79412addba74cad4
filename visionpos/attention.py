"""The one place that applies an encoding to q and k, and chooses how.

A Rotation that covers every token enters with q or k; the turned tensor leaves. Compiled and exported graphs get the
plain form, which inductor fuses and exporters know; eager CPU and CUDA get the form with the fewest passes over
memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from visionpos.geometry.rotation import Rotation
from visionpos.geometry.rotation import rotate as plain_rotate
from visionpos.kernels.rotate import is_pairwise, turn_adjacent, turn_half

if TYPE_CHECKING:
    from torch import Tensor

    from visionpos.geometry.blocks import BasisTurn, BlockTurn


def rotate(
    q: Tensor,
    k: Tensor,
    rotation: Rotation | BlockTurn | BasisTurn,
    *,
    prefix: int = 0,
    suffix: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return q and k with their channel pairs turned, so that q.k depends on coordinate differences.

    Args:
        q: `[b, heads, n, head_dim]`.
        k: `[b, kv_heads, n, head_dim]`; grouped-query heads may be fewer.
        rotation: `[n, pairs]`, or with leading heads or batch sizes; or the turn of another scheme.
        prefix: leading tokens that do not turn.
        suffix: trailing tokens that do not turn.

    Returns:
        Two new tensors of the inputs' shapes and dtypes.

    Raises:
        PositionError: if tokens or channels do not fit.

    Example:
        >>> from visionpos.geometry import Rotation
        >>> q = torch.ones(1, 2, 5, 8)
        >>> turned, _ = rotate(q, q, Rotation.of(torch.zeros(4, 4)), prefix=1)
        >>> torch.equal(turned, q)
        True

    Reference:
        RoFormer (arXiv 2104.09864). Keys of another length than the queries turn by their own rotation: use `turn`. The
        plain form, one line of arithmetic, is `visionpos.geometry.rotate`.
    """
    if not isinstance(rotation, Rotation):
        return plain_rotate(q, k, rotation, prefix=prefix, suffix=suffix)
    whole = rotation.padded(prefix, suffix)
    return turn(q, whole), turn(k, whole)


def turn(x: Tensor, rotation: Rotation) -> Tensor:
    """Return `rotation.apply(x)` by the fastest form for this device and dtype.

    Results are bit-equal on one CPU thread. With several threads, and on CUDA, adjacent pairs may differ in the last
    bit: see `kernels.rotate.turn_adjacent`.

    Args:
        x: `[b, heads, n, head_dim]`, not changed.
        rotation: covers all n tokens (`rotation.padded(prefix)` adds those that do not turn).

    Returns:
        Shape and dtype of x.

    Raises:
        PositionError: if tokens or channels do not fit.

    Example:
        >>> turn(torch.ones(1, 1, 2, 4), Rotation.of(torch.zeros(2, 2))).shape
        torch.Size([1, 1, 2, 4])
    """
    channels = 2 * rotation.pairs
    rotation.check_lead(x)
    if (
        not _is_plain_eager(x)
        or x.shape[-2] != rotation.n
        or x.shape[-1] < channels
        or x.numel() == 0
    ):
        return rotation.apply(x)
    dtype = torch.promote_types(torch.float32, torch.promote_types(x.dtype, rotation.cos.dtype))
    head, cos, sin = x[..., :channels].to(dtype), rotation.cos.to(dtype), rotation.sin.to(dtype)
    if rotation.pairing == "half":
        out = turn_half(head, cos, sin)
    elif rotation.pairing == "half_per_axis":
        head, cos, sin = (part.unflatten(-1, (rotation.axes, -1)) for part in (head, cos, sin))
        out = turn_half(head, cos, sin).flatten(-2)
    elif rotation.pairing == "adjacent" and is_pairwise(head):
        out = turn_adjacent(head, cos, sin)
    else:
        return rotation.apply(x)
    out = out.to(x.dtype)
    return out if channels == x.shape[-1] else torch.cat([out, x[..., channels:]], dim=-1)


def _is_plain_eager(x: Tensor) -> bool:
    """Return whether views as complex numbers and writes into fresh memory are safe here."""
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    return not traced and x.device.type in ("cpu", "cuda")
