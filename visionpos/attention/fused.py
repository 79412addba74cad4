"""Rotation joined with what stands before it: angles formed on the way, and the normalisation of q and k."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, get_args

import torch

from visionpos.attention.apply import rotate
from visionpos.attention.layouts import (
    Layout,
    checked_rotation,
    checked_tensor,
    is_fast,
    swapped,
    tables_of,
)
from visionpos.errors import PositionError
from visionpos.geometry.freqs import angles
from visionpos.geometry.places import check_points
from visionpos.geometry.points import known
from visionpos.geometry.rotation import Rotation
from visionpos.geometry.rotation import rotate as plain_rotate
from visionpos.kernels.choices import Accuracy, Norm, Rounding
from visionpos.kernels.device import (
    CoordsTurned,
    NormTurnedTogether,
    norm_turned,
    serves,
    serves_coords,
)
from visionpos.kernels.norm import Norming, normed, normed_and_turned, trains

if TYPE_CHECKING:
    from torch import Tensor

    from visionpos.geometry.rotation import Pairing


def rotate_at(
    q: Tensor,
    k: Tensor,
    coords: Tensor,
    freqs: Tensor,
    *,
    pairing: Pairing = "half",
    accuracy: Accuracy = "reference",
    scale: float = 1.0,
    prefix: int = 0,
    suffix: int = 0,
    layout: Layout = "bhnd",
) -> tuple[Tensor, Tensor]:
    """Return q and k turned at coordinates: axial, mixed and M-RoPE in one call, no table kept.

    On CUDA angles are formed inside the kernel; elsewhere one table is built, used and forgotten. Gradients reach q, k
    and frequencies that learn.

    Args:
        q: `[b, heads, n, head_dim]`, or as `layout` says.
        k: like q; heads may be fewer, except where freqs are a head's own.
        coords: `[turning tokens, axes]`, or `[b, turning tokens, axes]`: cells, positions or fractions.
        freqs: `[axes, pairs]` radians per coordinate unit, zero where an axis does not drive a pair, or `[heads, axes,
            pairs]`.
        pairing: see `Rotation`.
        accuracy: "reference" forms coordinate times frequency in float32, as transformers does: at position 10^6 it is
            off by 6e-2 rad. "exact" keeps 1e-6 rad there; pass freqs in float64 then.
        scale: factor of cosines and sines, as YaRN's attention factor.
        prefix: leading tokens that do not turn.
        suffix: trailing tokens that do not turn.
        layout: see `rotate`.

    Raises:
        PositionError: if coordinates and frequencies have other axes, or tokens or channels do not fit.

    Example:
        >>> from visionpos.geometry import Grid, axial_freqs, coordinates
        >>> q = torch.ones(1, 2, 15, 16)
        >>> turned, _ = rotate_at(q, q, coordinates(Grid(3, 5)), axial_freqs(16))
        >>> torch.equal(turned[0, 0, 0], q[0, 0, 0])
        True
    """
    if accuracy not in get_args(Accuracy):
        raise PositionError(f"accuracy is {accuracy!r}; it must be 'reference' or 'exact'.")
    for name, part in (("q", q), ("k", k), ("coords", coords), ("freqs", freqs)):
        checked_tensor(part, name)
    check_points(coords, None, "coords", rank=2)
    if freqs.ndim < 2 or freqs.is_complex():
        raise PositionError(
            f"freqs are {freqs.dtype} of shape {tuple(freqs.shape)}; real [axes, pairs] or [heads, axes, pairs] is "
            "required. Use unsqueeze(0) for a single axis."
        )
    if serves_coords(q, k, coords, pairing):
        seen = swapped(q, layout, "q"), swapped(k, layout, "k")

        def plain(q: Tensor, k: Tensor, freqs: Tensor) -> tuple[Tensor, Tensor]:
            rotation = _rotation_at(coords, freqs, pairing, accuracy, scale, q.dtype)
            return plain_rotate(q, k, rotation, prefix=prefix, suffix=suffix)

        turned_q, turned_k = CoordsTurned.apply(
            *seen, coords, freqs, pairing, accuracy, scale, prefix, suffix, plain
        )
        return swapped(turned_q, layout, "q"), swapped(turned_k, layout, "k")
    rotation = _rotation_at(coords, freqs, pairing, accuracy, scale, q.dtype)
    return rotate(q, k, rotation, prefix=prefix, suffix=suffix, layout=layout)


def _rotation_at(
    coords: Tensor,
    freqs: Tensor,
    pairing: Pairing,
    accuracy: Accuracy,
    scale: float,
    of: torch.dtype,
) -> Rotation:
    """Return the rotation at coordinates for tensors of a dtype; other arguments as in `rotate_at`."""
    dtype = torch.float64 if accuracy == "exact" else torch.float32
    wide = torch.promote_types(dtype, torch.promote_types(freqs.dtype, dtype))
    places, steps = coords.to(wide), freqs.to(wide if accuracy == "exact" else torch.float32)
    if freqs.ndim == 3 or coords.ndim == 3:
        places = places.unsqueeze(-3)
    turns = angles(places.to(steps.dtype), steps)
    rotation = Rotation.of(turns, pairing, scale=scale, axes=freqs.shape[-2])
    if of == torch.float64:
        return rotation
    return Rotation(rotation.cos.float(), rotation.sin.float(), pairing, rotation.axes)


def norm_rotate(
    q: Tensor,
    k: Tensor,
    rotation: Rotation,
    *,
    norm: Norm = "rms",
    weight_q: Tensor | None = None,
    weight_k: Tensor | None = None,
    bias_q: Tensor | None = None,
    bias_k: Tensor | None = None,
    eps: float = 1e-6,
    rounding: Rounding = "once",
    prefix: int = 0,
    suffix: int = 0,
    layout: Layout = "bhnd",
) -> tuple[Tensor, Tensor]:
    """Return q and k normalised over head_dim and turned, in one pass over memory and, with gradients, one back.

    On CUDA that is one launch either way, unless the tables learn or channels stay unturned in training. On the CPU
    stretches of tokens stay in the cache from norm to turn; so do they on the way back for "rms" and "l2".

    Args:
        q: `[b, heads, n, head_dim]`, or as `layout` says.
        k: like q; heads may be fewer.
        rotation: as in `rotate`. Tokens that do not turn are normalised too.
        norm: "rms", "layer", or "l2" (as torch.nn.functional.normalize).
        weight_q: `[head_dim]`, or None.
        weight_k: like weight_q.
        bias_q: `[head_dim]`, or None; for "layer".
        bias_k: like bias_q.
        eps: added to the variance; the least norm for "l2".
        rounding: to q's dtype between norm and turn: "once" as torch's norms leave it, "twice" also before the weight
            as transformers' RMSNorm modules do, "none" keeps float32.
        prefix: leading tokens that do not turn.
        suffix: trailing tokens that do not turn.
        layout: see `rotate`.

    Raises:
        PositionError: if a name is unknown, a weight is not `[head_dim]`, or tokens or channels do not fit.

    Example:
        >>> q = torch.full((1, 1, 2, 4), 3.0)
        >>> out, _ = norm_rotate(q, q, Rotation.of(torch.zeros(2, 2)))
        >>> out[0, 0, 0].round().tolist()
        [1.0, 1.0, 1.0, 1.0]
    """
    vectors: dict[str, Any] = {
        "weight_q": weight_q,
        "weight_k": weight_k,
        "bias_q": bias_q,
        "bias_k": bias_k,
    }
    checked_rotation(rotation)
    for name, x in (("q", q), ("k", k)):
        checked_tensor(x, name)
    _check_norming(Norming(norm, eps, rounding))
    for name, vector in vectors.items():
        _check_vector(vector, name, q)
    seen = swapped(q, layout, "q"), swapped(k, layout, "k")
    learns = trains((q, k, rotation.cos, *vectors.values()))
    whole = not rotation.cos.requires_grad and 2 * rotation.pairs == q.shape[-1]
    if known(q) and (whole or not learns) and serves(seen, rotation.cos, rotation.pairing):
        places: dict[str, Any] = {"norm": norm, "eps": eps, "prefix": prefix, "suffix": suffix}
        if learns:
            done = NormTurnedTogether.apply(*seen, *vectors.values(), rotation, places, rounding)
        else:
            done = norm_turned(*seen, rotation, rounding=rounding, **(places | vectors))
        return swapped(done[0], layout, "q"), swapped(done[1], layout, "k")
    given, how = ((q, weight_q, bias_q), (k, weight_k, bias_k)), Norming(norm, eps, rounding)
    if _in_blocks(seen, rotation):
        for x in seen:
            rotation.check_lead(x)
            rotation.check_fit(x, prefix, suffix)
        tables = tables_of(q.dtype, rotation.padded(prefix, suffix))
        out_q, out_k = (
            normed_and_turned(x, *tables, *part[1:], rotation.pairing, how, kept=layout != "bhnd")
            for x, part in zip(seen, given, strict=True)
        )
        return swapped(out_q, layout, "q"), swapped(out_k, layout, "k")
    normed_q, normed_k = (normed(*part, how) for part in given)
    out_q, out_k = rotate(normed_q, normed_k, rotation, prefix=prefix, suffix=suffix, layout=layout)
    return out_q.to(q.dtype), out_k.to(k.dtype)


def _check_norming(how: Norming) -> None:
    """Refuse norms and roundings that have no name here, and what cannot be added to a variance."""
    if how.norm not in get_args(Norm) or how.rounding not in get_args(Rounding):
        raise PositionError(
            f"norm is {how.norm!r} and rounding {how.rounding!r}; norm must be one of {list(get_args(Norm))}, rounding "
            f"one of {list(get_args(Rounding))}."
        )
    eps: Any = how.eps
    if not isinstance(eps, int | float) or not 0 <= eps < math.inf:
        raise PositionError(
            f"eps is {eps!r}; a finite number of at least 0 is required (1e-6 is usual)."
        )


def _check_vector(vector: Any, name: str, q: Tensor) -> None:
    """Refuse a weight or bias that is no vector of head_dim floats where q is."""
    if vector is None:
        return
    given = checked_tensor(vector, name)
    if tuple(given.shape) != tuple(q.shape[-1:]):
        raise PositionError(
            f"{name} has shape {tuple(given.shape)}; [head_dim] is required, head_dim {q.shape[-1]}. Pass the norm's "
            "own weight."
        )
    if not given.is_floating_point() or given.device != q.device:
        raise PositionError(
            f"{name} is {given.dtype} on {given.device} and q on {q.device}; floats on one device are required. Cast "
            "or move it."
        )


def _in_blocks(xs: tuple[Tensor, ...], rotation: Rotation) -> bool:
    """Return whether norm and turn go through the cache block by block: on the CPU, in eager mode."""
    plain = rotation.pairing in ("half", "adjacent") and len({x.dtype for x in xs}) == 1
    return plain and all(x.device.type == "cpu" and is_fast(x, rotation) for x in xs)
