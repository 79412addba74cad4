"""Rotation of q and k where they lie: alone, or inside a packed projection."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from visionpos.attention.layouts import (
    Layout,
    checked_rotation,
    checked_tensor,
    is_fast,
    swapped,
    tables_of,
)
from visionpos.attention.overlap import meet, meets_itself
from visionpos.errors import PositionError
from visionpos.geometry.points import known
from visionpos.geometry.ranges import is_integer
from visionpos.geometry.rotation import Rotation
from visionpos.kernels.rotate import How, turned_in_place

if TYPE_CHECKING:
    from torch import Tensor

    from visionpos.kernels.rotate import Places


def rotate_(
    q: Tensor,
    k: Tensor,
    rotation: Rotation,
    *,
    prefix: int = 0,
    suffix: int = 0,
    layout: Layout = "bhnd",
) -> tuple[Tensor, Tensor]:
    """Turn q and k where they lie, and return them; else as `rotate`.

    Autograd sees the write: gradients are right, and an operation that needs what was there before raises. The tables
    must not learn, since what their gradient needs is written over.

    Raises:
        PositionError: if tokens or channels do not fit, q or k is a leaf that trains, or memory is shared: by q and
            k, or by entries of one of them (`expand`).

    Example:
        >>> q, k = torch.ones(2, 1, 1, 3, 2).unbind()
        >>> turned, _ = rotate_(q, k, Rotation.of(torch.full((3, 1), torch.pi)))
        >>> turned is q, q[0, 0, 0].round().tolist()
        (True, [-1.0, -1.0])
    """
    checked_rotation(rotation)
    for name, x in (("q", q), ("k", k)):
        checked_tensor(x, name)
    if q is k or (known(q) and meet(q, k)):
        raise PositionError(
            "q and k share memory, which would turn twice; two tensors are required. Clone one of them."
        )

    def place(x: Tensor) -> Tensor:
        return _inside(swapped(x, layout, "q or k"), rotation, prefix, suffix)

    for name, x in (("q", q), ("k", k)):  # all is looked at before anything is written
        _check_place(x, name, rotation, place(checked_tensor(x, name)))
    return _turn_(q, rotation, (place,)), _turn_(k, rotation, (place,))


def rotate_packed_(
    qkv: Tensor,
    rotation: Rotation,
    *,
    kv_heads: int | None = None,
    prefix: int = 0,
    suffix: int = 0,
) -> Tensor:
    """Turn the queries and keys of a packed projection where they lie, and return it.

    Args:
        qkv: `[b, n, 3, heads, head_dim]` as timm's qkv layer gives it, or `[b, n, heads + 2 kv_heads, head_dim]`,
            queries first, then keys, then values. Written to; values stay.
        rotation: as in `rotate`.
        kv_heads: heads of the keys, required by the second form.
        prefix: leading tokens that do not turn.
        suffix: trailing tokens that do not turn.

    Raises:
        PositionError: if the shape is neither, tokens or channels do not fit, or qkv is a leaf that trains.

    Example:
        >>> qkv = torch.ones(1, 4, 3, 2, 8)
        >>> out = rotate_packed_(qkv, Rotation.of(torch.ones(3, 4)), prefix=1)
        >>> out is qkv, bool((out[:, :1] == 1).all()), bool((out[:, :, 2] == 1).all())
        (True, True, True)
    """
    checked_rotation(rotation)
    heads, keys = _packed_heads(qkv, kv_heads)
    shared = all(size == 1 for size in rotation.cos.shape[-3:-2])
    # Heads of queries and keys that do not lie in one row, as in a transposed [b, n, heads, 3, head_dim], have no view.
    apart = qkv.ndim == 5 and heads > 0 and qkv.stride(2) != heads * qkv.stride(3)
    cuts = [(0, heads), (heads, heads + keys)]
    cuts = [(0, heads + keys)] if shared and not apart else cuts

    def place(x: Tensor, cut: tuple[int, int]) -> Tensor:
        part = x[:, :, cut[0] // heads] if apart else x.flatten(2, -2)[:, :, slice(*cut)]
        return _inside(part.transpose(1, 2), rotation, prefix, suffix)

    places = tuple(partial(place, cut=cut) for cut in cuts)
    for one in places:
        _check_place(qkv, "qkv", rotation, one(checked_tensor(qkv, "qkv")))
    return _turn_(qkv, rotation, places)


def _turn_(x: Tensor, rotation: Rotation, places: Places) -> Tensor:
    """Turn stretches of x where they lie, and return x."""
    if is_fast(x, rotation):
        cos, sin = tables_of(x.dtype, rotation)
        return turned_in_place(x, cos, sin, How(rotation.pairing, rotation.axes), places)
    for place in places:
        stretch = place(x)
        stretch.copy_(rotation.apply(stretch))
    return x


def _inside(x: Tensor, rotation: Rotation, prefix: int, suffix: int) -> Tensor:
    """Return the tokens and channels of x `[..., n, head_dim]` that turn, a view."""
    rotation.check_lead(x)
    rotation.check_fit(x, prefix, suffix)
    inside: Tensor = x[..., prefix : x.shape[-2] - suffix, : 2 * rotation.pairs]
    return inside


def _check_place(x: Tensor, name: str, rotation: Rotation, stretch: Tensor) -> None:
    """Refuse what cannot be written to, would be written to twice, or loses what its gradient needs."""
    eager, meta = known(x), torch._C._autograd  # noqa: SLF001 (no public name)
    root = x._base if eager and x._is_view() else None  # noqa: SLF001 (no public name)
    leaf = x.is_leaf or (root is not None and root.is_leaf)
    if torch.is_grad_enabled() and x.requires_grad and leaf:
        raise PositionError(
            f"{name} is a leaf that trains, or a view of one, and cannot be turned in place; an activation is "
            "required. Use rotate."
        )
    if torch.is_grad_enabled() and (rotation.cos.requires_grad or rotation.sin.requires_grad):
        raise PositionError(
            "rotation learns, and the turn in place writes over what its gradient needs; a rotation without gradient "
            "is required. Use rotate."
        )
    # Autograd refuses these only while it writes, the second of two tensors after the first.
    bound = eager and torch.is_grad_enabled() and x.requires_grad and x._is_view()  # noqa: SLF001 (no public name)
    if bound and meta._get_creation_meta(x) != meta.CreationMeta.DEFAULT:  # noqa: SLF001 (as above)
        raise PositionError(
            f"{name} is one of several views that one call made (unbind, split), or a view made without gradients, "
            "which cannot be turned in place in training; a view of its own is required. Index in place of unbind: "
            "qkv[:, :, 0]; or use rotate."
        )
    if eager and x.is_inference() and not torch.is_inference_mode_enabled():
        raise PositionError(
            f"{name} was made in inference mode and cannot be written to outside it; a normal tensor is required. "
            "Clone it, or use rotate."
        )
    steps = zip(stretch.stride(), stretch.shape, strict=True)
    shared = any(step == 0 and size > 1 for step, size in steps) and stretch.numel() > 0
    if shared or (eager and meets_itself(stretch)):
        raise PositionError(
            f"{name} has strides {x.stride()} for shape {tuple(x.shape)}; entries that share memory would turn more "
            "than once. Use rotate, or clone it."
        )


def _packed_heads(qkv: Any, kv_heads: int | None) -> tuple[int, int]:
    """Return the heads of queries and of keys of a packed projection."""
    shape = tuple(qkv.shape) if isinstance(qkv, torch.Tensor) else ()
    if len(shape) == 5 and shape[2] == 3 and kv_heads in (None, shape[3]):
        return shape[3], shape[3]
    if len(shape) == 4 and is_integer(kv_heads) and kv_heads and 0 < 2 * kv_heads < shape[2]:
        return shape[2] - 2 * kv_heads, kv_heads
    raise PositionError(
        f"qkv has shape {shape or type(qkv).__name__} and kv_heads is {kv_heads}; [b, n, 3, heads, head_dim], or "
        "[b, n, heads + 2 kv_heads, head_dim] with kv_heads=, is required. Unflatten the projection first."
    )
