"""Launchers of the Triton rotation on plain tensors: q and k in one launch, any layout by its strides.

Views are `[b, heads, n, head_dim]`: packed qkv `[b, n, 3, heads, head_dim]` enters as three such views, rows of packed
sequences `[total, heads, head_dim]` as `x.transpose(0, 1)[None]`. Nothing is made contiguous. Autograd does not see
these calls; the backward launchers are what a `torch.autograd.Function` needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

import torch

from visionpos.errors import PositionError
from visionpos.kernels.choices import Accuracy, Norm, Rounding
from visionpos.kernels.triton_norm import L2, LAYER, NO_NORM, NO_ROUNDING, ONCE, RMS, TWICE
from visionpos.kernels.triton_plan import Launch, planned
from visionpos.kernels.triton_sources import Coordinates, Source, Tables
from visionpos.kernels.triton_turn import turn_kernel

if TYPE_CHECKING:
    from torch import Tensor

NORMS = dict(zip(get_args(Norm), (RMS, LAYER, L2), strict=True))
_ROUNDINGS = dict(zip(get_args(Rounding), (ONCE, TWICE, NO_ROUNDING), strict=True))


def launch_rotate(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    pairing: str = "half",
    prefix: int = 0,
    suffix: int = 0,
    conj: bool = False,
    out_q: Tensor | None = None,
    out_k: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return q and k with their channel pairs turned by cosine and sine tables.

    Args:
        q: `[b, heads, n, head_dim]` float32, bfloat16 or float16, any strides.
        k: like q, with any number of heads; None turns q alone.
        cos: `[n, pairs]`, or with leading heads or samples; see `Tables`.
        sin: like cos.
        pairing: "half" or "adjacent".
        prefix: leading tokens that do not turn.
        suffix: trailing tokens that do not turn.
        conj: turn back, which is the backward pass.
        out_q: where to write; q itself turns in place and leaves channels beyond the pairs untouched.
        out_k: like out_q.

    Raises:
        PositionError: if shapes, dtypes or devices do not fit.
        ImportError: without triton.
    """
    return _turn(q, k, Tables(cos, sin), pairing, prefix, suffix, conj=conj, outs=(out_q, out_k))


def launch_rotate_coords(
    q: Tensor,
    k: Tensor | None,
    coords: Tensor,
    freqs: Tensor,
    *,
    axis_of_pair: Tensor | None = None,
    pairing: str = "half",
    prefix: int = 0,
    suffix: int = 0,
    accuracy: Accuracy = "reference",
    scale: float = 1.0,
    conj: bool = False,
    out_q: Tensor | None = None,
    out_k: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return q and k turned by angles that the kernel forms itself: M-RoPE, axial or mixed, without a table.

    Args:
        q: see `launch_rotate`.
        k: see `launch_rotate`.
        coords: `[axes, n]` or `[b, axes, n]`; see `Coordinates` for this and the next three.
        freqs: `[pairs]`, `[axes, pairs]` or `[heads, axes, pairs]`.
        axis_of_pair: `[pairs]` int.
        accuracy: "reference" or "exact".
        scale: factor of cos and sin.
        pairing: see `launch_rotate`, like all that follow.
        prefix: leading tokens that do not turn.
        suffix: trailing tokens that do not turn.
        conj: turn back.
        out_q: where to write.
        out_k: where to write.

    Raises:
        PositionError: if shapes, dtypes or devices do not fit.
        ImportError: without triton.
    """
    source = Coordinates(coords, freqs, axis_of_pair, accuracy, scale)
    return _turn(q, k, source, pairing, prefix, suffix, conj=conj, outs=(out_q, out_k))


def launch_norm_rotate(
    q: Tensor,
    k: Tensor,
    source: Source,
    *,
    norm: Norm,
    weight_q: Tensor | None = None,
    weight_k: Tensor | None = None,
    bias_q: Tensor | None = None,
    bias_k: Tensor | None = None,
    eps: float = 1e-6,
    rounding: Rounding = "once",
    pairing: str = "half",
    prefix: int = 0,
    suffix: int = 0,
    out_q: Tensor | None = None,
    out_k: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return q and k normalised over head_dim, then turned, in one pass over memory. Exempt tokens are normalised too.

    Args:
        q: see `launch_rotate`.
        k: see `launch_rotate`.
        source: `Tables` or `Coordinates`.
        norm: "rms", "layer" or "l2" (as torch.nn.functional.normalize).
        weight_q: `[head_dim]`, contiguous.
        weight_k: `[head_dim]`, contiguous.
        bias_q: `[head_dim]`, contiguous.
        bias_k: `[head_dim]`, contiguous.
        eps: added to the variance, or the least norm for "l2".
        rounding: to q's dtype between norm and turn: "once" as torch's own norms leave it, "twice" also before the
            weight as transformers' RMSNorm modules do, "none" keeps float32.
        pairing: see `launch_rotate`, like all that follow.
        prefix: leading tokens that do not turn.
        suffix: trailing tokens that do not turn.
        out_q: where to write.
        out_k: where to write.

    Raises:
        PositionError: if shapes, dtypes, devices or names do not fit.
        ImportError: without triton.
    """
    if norm not in NORMS or rounding not in _ROUNDINGS:
        raise PositionError(
            f"norm is {norm!r} and rounding {rounding!r}; norm must be one of {list(NORMS)}, rounding of "
            f"{list(_ROUNDINGS)}. Normalise before the launch otherwise."
        )
    vectors = {"weight_q": weight_q, "weight_k": weight_k, "bias_q": bias_q, "bias_k": bias_k}
    for name, vector in vectors.items():
        if vector is not None and (vector.shape != q.shape[-1:] or not vector.is_contiguous()):
            raise PositionError(
                f"{name} has shape {tuple(vector.shape)}; contiguous [head_dim] is required, head_dim {q.shape[-1]}. "
                "Pass the norm's own weight."
            )
    outs = outputs(q, out_q), outputs(k, out_k)
    launch = plan_turn(
        q, k, *outs, source, pairing=pairing, prefix=prefix, suffix=suffix,
        norm=NORMS[norm], rounding=_ROUNDINGS[rounding], eps=eps, vectors=vectors,
    )  # fmt: skip
    launch.run()
    return outs


def plan_turn(
    q: Tensor, k: Tensor | None, out_q: Tensor, out_k: Tensor | None, source: Source, *,
    pairing: str = "half", prefix: int = 0, suffix: int = 0, conj: bool = False, norm: int = NO_NORM,
    rounding: int = NO_ROUNDING, eps: float = 0.0, vectors: dict[str, Tensor | None] | None = None,
) -> Launch:  # fmt: skip
    """Return the launch of `turn_kernel` that writes out_q and out_k; the arguments are those of the launchers."""
    tail = q.shape[-1] - 2 * source.pairs
    in_place = out_q is q and out_k is k
    launch = planned(
        turn_kernel, q, k, out_q, out_k, source, pairing=pairing, prefix=prefix, suffix=suffix, conj=conj,
        tail=0 if in_place and not norm else tail, normed=norm != NO_NORM,
    )  # fmt: skip
    names = ("weight_q", "weight_k", "bias_q", "bias_k")
    launch.arguments.update(
        dict.fromkeys(names), eps=eps, NORM=norm, ROUNDING=rounding, **(vectors or {})
    )
    return launch


def _turn(
    q: Tensor, k: Tensor | None, source: Source, pairing: str, prefix: int, suffix: int, *, conj: bool,
    outs: tuple[Tensor | None, Tensor | None],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    out_q, out_k = outputs(q, outs[0]), None if k is None else outputs(k, outs[1])
    plan_turn(
        q, k, out_q, out_k, source, pairing=pairing, prefix=prefix, suffix=suffix, conj=conj
    ).run()
    return out_q, out_k


def outputs(x: Tensor, out: Tensor | None) -> Tensor:
    """Return `out`, or new memory in the order of x's own axes where its channels are neighbours."""
    if out is None:
        return torch.empty_like(x) if x.stride(-1) == 1 else x.new_empty(x.shape)
    if out.shape != x.shape or out.dtype != x.dtype or out.device != x.device:
        raise PositionError(
            f"the output is {tuple(out.shape)} {out.dtype} on {out.device} and the input {tuple(x.shape)} {x.dtype} "
            f"on {x.device}; they must agree. Leave it out to get a new tensor."
        )
    return out
