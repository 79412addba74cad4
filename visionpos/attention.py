"""The one place that applies an encoding to q and k, and chooses how.

A Rotation that covers every token enters with q or k; the turned tensor leaves. Compiled and exported graphs get the
plain form, which inductor fuses and exporters know; eager CPU and CUDA get the form with the fewest passes over
memory.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch

from visionpos.errors import PositionError
from visionpos.geometry.points import known
from visionpos.geometry.rotation import Rotation
from visionpos.geometry.rotation import rotate as plain_rotate
from visionpos.kernels.rotate import How, turned, turned_in_place

if TYPE_CHECKING:
    from torch import Tensor

    from visionpos.geometry.blocks import BasisTurn, BlockTurn
    from visionpos.kernels.rotate import Places

Layout = Literal["bhnd", "bnhd", "thd"]
_FAST = ("half", "adjacent", "half_per_axis")


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
    seen = _view(q, layout, "q"), _view(k, layout, "k")
    if not isinstance(rotation, Rotation):
        turned_q, turned_k = plain_rotate(*seen, rotation, prefix=prefix, suffix=suffix)
    else:
        turned_q, turned_k = _turn(seen, rotation, prefix, suffix, kept=layout != "bhnd")
    return _view(turned_q, layout, "q"), _view(turned_k, layout, "k")


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
    return _turn((x,), rotation, 0, 0, kept=False)[0]


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
    for name, x in (("q", q), ("k", k)):
        _checked(x, name)
    if known(q) and q.numel() and q.data_ptr() == k.data_ptr():
        raise PositionError(
            "q and k share memory, which would turn twice; two tensors are required. Clone one of them."
        )

    def place(x: Tensor) -> Tensor:
        return _inside(_view(x, layout, "q or k"), rotation, prefix, suffix)

    for name, x in (("q", q), ("k", k)):  # all is looked at before anything is written
        _check_place(x, name, rotation, place(_checked(x, name)))
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
    heads, keys = _packed_heads(qkv, kv_heads)
    shared = all(size == 1 for size in rotation.cos.shape[-3:-2])
    cuts = [(0, heads + keys)] if shared else [(0, heads), (heads, heads + keys)]

    def place(x: Tensor, cut: tuple[int, int]) -> Tensor:
        part = x.flatten(2, -2)[:, :, slice(*cut)].transpose(1, 2)
        return _inside(part, rotation, prefix, suffix)

    places = tuple(partial(place, cut=cut) for cut in cuts)
    for one in places:
        _check_place(qkv, "qkv", rotation, one(_checked(qkv, "qkv")))
    return _turn_(qkv, rotation, places)


def _turn(
    xs: tuple[Tensor, ...], rotation: Rotation, prefix: int, suffix: int, *, kept: bool
) -> tuple[Tensor, ...]:
    """Return tensors turned alike; `kept` lays the results out as they are."""
    for x in xs:
        rotation.check_lead(x)
        rotation.check_fit(x, prefix, suffix)
    if not all(_is_fast(x, rotation) for x in xs) or len({x.dtype for x in xs}) > 1:
        whole = rotation.padded(prefix, suffix)
        return tuple(whole.apply(x) for x in xs)
    cos, sin = _tables(xs[0].dtype, rotation)
    return turned(xs, cos, sin, How(rotation.pairing, rotation.axes, prefix, suffix), kept=kept)


def _tables(dtype: torch.dtype, rotation: Rotation) -> tuple[Tensor, Tensor]:
    """Return cosines and sines in the dtype of the arithmetic."""
    wide = torch.promote_types(torch.float32, torch.promote_types(dtype, rotation.cos.dtype))
    return rotation.cos.to(wide), rotation.sin.to(wide)


def _turn_(x: Tensor, rotation: Rotation, places: Places) -> Tensor:
    """Turn stretches of x where they lie, and return x."""
    if _is_fast(x, rotation):
        cos, sin = _tables(x.dtype, rotation)
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


def _checked(x: Tensor, name: str) -> Tensor:
    """Return x, which is looked into but not turned, after refusing what is no tensor."""
    if not isinstance(x, torch.Tensor):
        raise PositionError(f"{name} is {type(x).__name__}; a float tensor is required.")
    return x.detach()


def _check_place(x: Tensor, name: str, rotation: Rotation, stretch: Tensor) -> None:
    """Refuse what cannot be written to, would be written to twice, or loses what its gradient needs."""
    if torch.is_grad_enabled() and x.requires_grad and x.is_leaf:
        raise PositionError(
            f"{name} is a leaf that trains and cannot be turned in place; an activation is required. Use rotate."
        )
    if torch.is_grad_enabled() and (rotation.cos.requires_grad or rotation.sin.requires_grad):
        raise PositionError(
            "rotation learns, and the turn in place writes over what its gradient needs; a rotation without gradient "
            "is required. Use rotate."
        )
    steps = zip(stretch.stride(), stretch.shape, strict=True)
    if any(step == 0 and size > 1 for step, size in steps):
        raise PositionError(
            f"{name} has strides {x.stride()} for shape {tuple(x.shape)}; entries that share memory would turn more "
            "than once. Use rotate, or clone it."
        )


def _view(x: Tensor, layout: Layout, name: str) -> Tensor:
    """Return x as `[..., heads, n, head_dim]`, or back: the change is its own inverse."""
    if layout == "bhnd":
        return x
    dims = {"bnhd": 4, "thd": 3}.get(layout)
    if dims is None:
        raise PositionError(f"layout is {layout!r}; it must be 'bhnd', 'bnhd' or 'thd'.")
    if _checked(x, name).ndim != dims:
        raise PositionError(
            f"{name} has shape {tuple(x.shape)}; layout {layout!r} has {dims} dimensions. Name the layout that it has."
        )
    swapped: Tensor = x.transpose(-3, -2)
    return swapped


def _packed_heads(qkv: Any, kv_heads: int | None) -> tuple[int, int]:
    """Return the heads of queries and of keys of a packed projection."""
    shape = tuple(qkv.shape) if isinstance(qkv, torch.Tensor) else ()
    if len(shape) == 5 and shape[2] == 3 and kv_heads in (None, shape[3]):
        return shape[3], shape[3]
    if len(shape) == 4 and kv_heads is not None and 0 < 2 * kv_heads < shape[2]:
        return shape[2] - 2 * kv_heads, kv_heads
    raise PositionError(
        f"qkv has shape {shape or type(qkv).__name__} and kv_heads is {kv_heads}; [b, n, 3, heads, head_dim], or "
        "[b, n, heads + 2 kv_heads, head_dim] with kv_heads=, is required. Unflatten the projection first."
    )


def _is_fast(x: Tensor, rotation: Rotation) -> bool:
    """Return whether views as complex numbers and writes into fresh memory are safe here."""
    traced = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    plain = known(x) and not traced and x.device.type in ("cpu", "cuda")
    return plain and rotation.pairing in _FAST
