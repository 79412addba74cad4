"""Rotation of q and k into new memory, by the fastest form for their device, dtype and strides."""

from __future__ import annotations

from typing import TYPE_CHECKING

from visionpos.attention.layouts import Layout, checked_rotation, is_fast, swapped, tables_of
from visionpos.geometry.rotation import Rotation
from visionpos.geometry.rotation import rotate as plain_rotate
from visionpos.kernels.rotate import How, turned

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
    layout: Layout = "bhnd",
) -> tuple[Tensor, Tensor]:
    """Return q and k with their channel pairs turned, so that q.k depends on coordinate differences.

    Args:
        q: `[b, heads, n, head_dim]`, or as `layout` says. Any strides: a view of a packed qkv is read where it lies.
        k: `[b, kv_heads, n, head_dim]`; grouped-query heads may be fewer.
        rotation: `[n, pairs]`, or with leading heads or batch sizes; or the turn of another scheme.
        prefix: leading tokens that do not turn.
        suffix: trailing tokens that do not turn.
        layout: "bhnd"; "bnhd", `[b, n, heads, head_dim]` as flash attention takes it; "thd", `[n, heads, head_dim]`, a
            packed row of sequences whose rotation has one turn a token.

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
    seen = swapped(q, layout, "q"), swapped(k, layout, "k")
    if not isinstance(rotation, Rotation):
        turned_q, turned_k = plain_rotate(*seen, rotation, prefix=prefix, suffix=suffix)
    else:
        turned_q, turned_k = _turn(seen, rotation, prefix, suffix, kept=layout != "bhnd")
    return swapped(turned_q, layout, "q"), swapped(turned_k, layout, "k")


def turn(x: Tensor, rotation: Rotation) -> Tensor:
    """Return `rotation.apply(x)` by the fastest form for this device and dtype.

    Halves turn with a fused multiply-add in eager mode, which rounds once where `apply` rounds twice. Adjacent pairs
    have the bits of `apply` in whole vectors of 8 pairs on one thread; elsewhere the last bit may differ.

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
    return _turn((x,), checked_rotation(rotation), 0, 0, kept=False)[0]


def _turn(
    xs: tuple[Tensor, ...], rotation: Rotation, prefix: int, suffix: int, *, kept: bool
) -> tuple[Tensor, ...]:
    """Return tensors turned alike; `kept` lays the results out as they are."""
    for x in xs:
        rotation.check_lead(x)
        rotation.check_fit(x, prefix, suffix)
    if not all(is_fast(x, rotation) for x in xs) or len({x.dtype for x in xs}) > 1:
        whole = rotation.padded(prefix, suffix)
        return tuple(whole.apply(x) for x in xs)
    cos, sin = tables_of(xs[0].dtype, rotation)
    return turned(xs, cos, sin, How(rotation.pairing, rotation.axes, prefix, suffix), kept=kept)
