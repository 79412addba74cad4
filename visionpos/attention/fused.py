"""Rotation joined with what stands before it: angles formed on the way, and the normalisation of q and k."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

import torch

from visionpos.attention.apply import rotate
from visionpos.attention.layouts import Layout, checked_tensor, is_fast, swapped, tables_of
from visionpos.errors import PositionError
from visionpos.geometry.freqs import angles
from visionpos.geometry.points import known
from visionpos.geometry.rotation import Rotation
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
    if serves_coords(q, k, coords, pairing):
        seen = swapped(q, layout, "q"), swapped(k, layout, "k")
        turned_q, turned_k = CoordsTurned.apply(
            *seen, coords, freqs, pairing, accuracy, scale, prefix, suffix
        )
        return swapped(turned_q, layout, "q"), swapped(turned_k, layout, "k")
    dtype = torch.float64 if accuracy == "exact" else torch.float32
    wide = torch.promote_types(dtype, torch.promote_types(freqs.dtype, dtype))
    places, steps = coords.to(wide), freqs.to(wide if accuracy == "exact" else torch.float32)
    if freqs.ndim == 3 or coords.ndim == 3:
        places = places.unsqueeze(-3)
    turns = angles(places.to(steps.dtype), steps)
    rotation = Rotation.of(turns, pairing, scale=scale, axes=freqs.shape[-2])
    if q.dtype != torch.float64:
        rotation = Rotation(rotation.cos.float(), rotation.sin.float(), pairing, rotation.axes)
    return rotate(q, k, rotation, prefix=prefix, suffix=suffix, layout=layout)


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
    if norm not in get_args(Norm) or rounding not in get_args(Rounding):
        raise PositionError(
            f"norm is {norm!r} and rounding {rounding!r}; norm must be one of {list(get_args(Norm))}, rounding one of "
            f"{list(get_args(Rounding))}."
        )
    vectors: dict[str, Any] = {
        "weight_q": weight_q,
        "weight_k": weight_k,
        "bias_q": bias_q,
        "bias_k": bias_k,
    }
    for name, vector in vectors.items():
        if vector is not None and tuple(vector.shape) != (checked_tensor(q, "q").shape[-1],):
            raise PositionError(
                f"{name} has shape {tuple(vector.shape)}; [head_dim] is required, head_dim {q.shape[-1]}. Pass the "
                "norm's own weight."
            )
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


def _in_blocks(xs: tuple[Tensor, ...], rotation: Rotation) -> bool:
    """Return whether norm and turn go through the cache block by block: on the CPU, in eager mode."""
    plain = rotation.pairing in ("half", "adjacent") and len({x.dtype for x in xs}) == 1
    return plain and all(x.device.type == "cpu" and is_fast(x, rotation) for x in xs)
