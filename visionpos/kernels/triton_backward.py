"""Launchers of the backward pass: gradients of q and k, and of what the angles came from, in one launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from visionpos.errors import PositionError
from visionpos.kernels.choices import Accuracy, Norm
from visionpos.kernels.triton_back import turn_back_kernel
from visionpos.kernels.triton_norm_back import norm_back_kernel
from visionpos.kernels.triton_plan import Launch, planned
from visionpos.kernels.triton_rotate import NORMS, outputs
from visionpos.kernels.triton_sources import Coordinates, Source, Tables

if TYPE_CHECKING:
    from torch import Tensor


def launch_rotate_backward(
    grad_q: Tensor,
    grad_k: Tensor | None,
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    pairing: str = "half",
    prefix: int = 0,
    suffix: int = 0,
    conj: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Return the gradients of q, k, cos and sin of `launch_rotate`. Without those of tables, launch it with conj.

    Args:
        grad_q: gradient of the turned q, any strides.
        grad_k: gradient of the turned k, or None.
        q: what the forward pass turned.
        k: like q, or None.
        cos: as in the forward pass, like all that follow.
        sin: like cos.
        pairing: "half" or "adjacent".
        prefix: leading tokens that do not turn.
        suffix: trailing tokens that do not turn.
        conj: the forward pass turned back.

    Returns:
        Gradients of q, k (None without k), cos and sin; the last two float32, summed in a fixed order.

    Raises:
        PositionError: if shapes, dtypes or devices do not fit.
        ImportError: without triton.
    """
    tables = Tables(cos, sin)
    outs = outputs(grad_q, None), None if grad_k is None else outputs(grad_k, None)
    launch, parts = plan_turn_back(
        grad_q, grad_k, q, k, outs, tables, pairing=pairing, prefix=prefix, suffix=suffix, conj=conj
    )
    launch.run()
    per_head = (parts if tables.heads > 1 else parts.sum(2, keepdim=True)).unbind(0)
    of_cos, of_sin = (part.sum_to_size(cos.shape) for part in per_head)
    return *outs, of_cos, of_sin


def launch_rotate_coords_backward(
    grad_q: Tensor,
    grad_k: Tensor | None,
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
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the gradients of q, k and freqs of `launch_rotate_coords`, in closed form.

    Args:
        grad_q: gradient of the turned q, any strides.
        grad_k: gradient of the turned k, or None.
        q: what the forward pass turned.
        k: like q, or None.
        coords: as in the forward pass, like all that follow.
        freqs: like coords.
        axis_of_pair: `[pairs]` int, or None.
        pairing: "half" or "adjacent".
        prefix: leading tokens that do not turn.
        suffix: trailing tokens that do not turn.
        accuracy: "reference" or "exact".
        scale: factor of cos and sin.
        conj: the forward pass turned back.

    Returns:
        Gradients of q, k (None without k) and freqs; the last float32, summed in a fixed order.

    Raises:
        PositionError: if shapes, dtypes or devices do not fit.
        ImportError: without triton.
    """
    source = Coordinates(coords, freqs, axis_of_pair, accuracy, scale)
    outs = outputs(grad_q, None), None if grad_k is None else outputs(grad_k, None)
    launch, parts = plan_turn_back(
        grad_q, grad_k, q, k, outs, source, pairing=pairing, prefix=prefix, suffix=suffix, conj=conj
    )
    launch.run()
    total = parts.sum((0, 1))  # [slots, axes or 1, pairs]
    if source.heads == 1:
        total = total.sum(0)
    return *outs, total.reshape(freqs.shape)


def plan_turn_back(
    grad_q: Tensor, grad_k: Tensor | None, q: Tensor, k: Tensor | None, outs: tuple[Tensor, Tensor | None],
    source: Source, *, pairing: str = "half", prefix: int = 0, suffix: int = 0, conj: bool = False,
) -> tuple[Launch, Tensor]:  # fmt: skip
    """Return the launch of `turn_back_kernel` and the memory of its sums, every element of which it writes.

    The sums are `[2, b, slots, rows, pairs]` for tables, else `[b, blocks, slots, axes or 1, pairs]`.
    """
    for name, x, grad in (("q", q, grad_q), ("k", k, grad_k)):
        if (x is None) != (grad is None) or (
            x is not None and grad is not None and x.shape != grad.shape
        ):
            raise PositionError(
                f"{name} is {_shape(x)} and its gradient {_shape(grad)}; both must agree. Pass the gradient of the "
                "turned tensor."
            )
    launch = planned(
        turn_back_kernel, grad_q, grad_k, *outs, source, pairing=pairing, prefix=prefix, suffix=suffix, conj=conj,
        tail=grad_q.shape[-1] - 2 * source.pairs, saved=(q, k),
    )  # fmt: skip
    given = launch.arguments
    slots = source.heads if source.heads > 1 else given["splits"] * given["GROUP"]
    if isinstance(source, Tables):
        shape = [2, q.shape[0], slots, source.rows, source.pairs]
    else:
        axes = source.axes if source.axis_of_pair is None else 1
        shape = [q.shape[0], given["blocks"], slots, axes, source.pairs]
    parts = torch.empty(shape, dtype=torch.float32, device=q.device)
    by_cos, by_sin = parts if isinstance(source, Tables) else (parts, None)
    given.update(x_q=q, x_k=k, part_cos=by_cos, part_sin=by_sin, slots=slots)
    return launch, parts


def launch_norm_rotate_backward(
    grad_q: Tensor, grad_k: Tensor, q: Tensor, k: Tensor, tables: Tables, *, norm: Norm, weight_q: Tensor | None = None,
    weight_k: Tensor | None = None, eps: float = 1e-6, pairing: str = "half", prefix: int = 0, suffix: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k, both weights and both biases of `launch_norm_rotate`, in one launch.

    Args:
        grad_q: gradient of the result for q, any strides.
        grad_k: like grad_q.
        q: what the forward pass took.
        k: like q.
        tables: as in the forward pass, like all that follow. They do not learn.
        norm: "rms", "layer" or "l2".
        weight_q: `[head_dim]`, contiguous, or None.
        weight_k: like weight_q.
        eps: added to the variance, or the least norm for "l2".
        pairing: "half" or "adjacent".
        prefix: leading tokens that do not turn.
        suffix: trailing tokens that do not turn.

    Returns:
        Gradients of q and k in their dtypes; of weights and biases `[head_dim]` float32, summed in a fixed order.
        Roundings between norm and turn count as none.

    Raises:
        PositionError: if shapes, dtypes or devices do not fit.
        ImportError: without triton.
    """
    outs = outputs(grad_q, None), outputs(grad_k, None)
    launch, parts = plan_norm_back(
        grad_q, grad_k, q, k, outs, tables, norm=norm, weights=(weight_q, weight_k), eps=eps, pairing=pairing,
        prefix=prefix, suffix=suffix,
    )  # fmt: skip
    launch.run()
    sums = [part.sum(1) for part in parts]
    return *outs, sums[0][0], sums[1][0], sums[0][1], sums[1][1]


def plan_norm_back(
    grad_q: Tensor, grad_k: Tensor, q: Tensor, k: Tensor, outs: tuple[Tensor, Tensor], tables: Tables, *, norm: Norm,
    weights: tuple[Tensor | None, Tensor | None], eps: float, pairing: str = "half", prefix: int = 0, suffix: int = 0,
) -> tuple[Launch, tuple[Tensor, Tensor]]:  # fmt: skip
    """Return the launch of `norm_back_kernel` and the memory of its sums, `[2, programs, head_dim]` for q and for k."""
    launch = planned(
        norm_back_kernel, grad_q, grad_k, *outs, tables, pairing=pairing, prefix=prefix, suffix=suffix, conj=False,
        tail=grad_q.shape[-1] - 2 * tables.pairs, normed=True, saved=(q, k),
    )  # fmt: skip
    shape = (2, launch.programs, q.shape[-1])
    parts = tuple(torch.empty(shape, dtype=torch.float32, device=q.device) for _ in range(2))
    launch.arguments.update(
        x_q=q, x_k=k, part_q=parts[0], part_k=parts[1], weight_q=weights[0], weight_k=weights[1], eps=eps,
        NORM=NORMS[norm],
    )  # fmt: skip
    return launch, (parts[0], parts[1])


def _shape(x: Tensor | None) -> tuple[int, ...] | None:
    return None if x is None else tuple(x.shape)
