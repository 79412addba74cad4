"""Rotary: from position ids to the rotation of a language model's queries and keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from visionpos.errors import PositionError
from visionpos.geometry import Rotation, angles, ladder
from visionpos.geometry.arguments import checked
from visionpos.geometry.freqs import on_axis
from visionpos.kernels.choices import Accuracy
from visionpos.vlm.language import LanguageSpec, axis_table

EXACT_BEYOND = 2**17  # float32 angles lose more than 0.01 rad from here on
VISIBLE_RADIANS = 0.1  # an axis that turns less over a grid hardly tells its cells apart


def language_freqs(language: LanguageSpec, dtype: torch.dtype) -> Tensor:
    """Return `[axes, pairs]` radians per position, zero where an axis does not drive a pair.

    With order "heads" it is `[kv_heads, axes, pairs]`.
    """
    scaling = language.scaling
    values = (
        ladder(language.pairs, theta=language.theta, dtype=dtype)
        if scaling is None
        else scaling.frequencies(language.pairs, language.theta, dtype)
    )
    owner = axis_table(language)
    axes = torch.arange(language.axes)
    turning = torch.tensor([axis not in language.still for axis in axes.tolist()])
    if language.order != "heads":
        return on_axis(values, owner, language.axes) * turning[:, None]
    mine = (owner[:, None] == axes) & turning  # [kv_heads, axes]
    return mine.unsqueeze(-1) * values


def language_rotation(
    language: LanguageSpec, ids: Tensor, accuracy: Accuracy | None = None
) -> Rotation:
    """Return the rotation of queries and keys at position ids.

    Args:
        language: the rotary layout. The attention factor of its scaling is in cos and sin: nothing else may apply it.
        ids: `[axes, n]` or `[axes, b, n]`.
        accuracy: "reference" computes angles in float32, "exact" in float64; None chooses by the largest id.

    Returns:
        cos and sin `[n, pairs]` or `[b, 1, n, pairs]`; with order "heads" `[kv_heads, n, pairs]` or `[b, kv_heads, n,
        pairs]`, to be repeated for the query heads of a group.

    Raises:
        PositionError: if the ids have another number of axes, or the accuracy is unknown.
    """
    if accuracy is None:
        look = ids.device.type == "cpu" and not torch.compiler.is_compiling() and ids.numel() > 0
        accuracy = "exact" if look and int(ids.abs().max()) > EXACT_BEYOND else "reference"
    if accuracy not in ("reference", "exact"):
        raise PositionError(f"accuracy is {accuracy!r}; it must be 'reference' or 'exact'.")
    dtype = torch.float64 if accuracy == "exact" else torch.float32
    freqs = language_freqs(language, dtype).to(ids.device)
    if ids.ndim not in (2, 3) or ids.shape[0] != language.axes:
        raise PositionError(
            f"ids have shape {tuple(ids.shape)}; [{language.axes}, n] or [{language.axes}, b, n] is required. "
            "Pass the ids of this family's position_ids."
        )
    coords = ids.movedim(0, -1).to(dtype)  # [n, axes]
    coords = coords if ids.ndim == 2 else coords.unsqueeze(1)
    if freqs.ndim == 3:
        turns = torch.stack([angles(coords, head) for head in freqs], -3)
        turns = turns if ids.ndim == 2 else turns.squeeze(1)
    else:
        turns = angles(coords, freqs)
    rotation = Rotation.of(turns, language.pairing)
    gain = 1.0 if language.scaling is None else language.scaling.gain
    cos, sin = (part if gain == 1 else part * gain for part in (rotation.cos, rotation.sin))
    return Rotation(cos.float(), sin.float(), rotation.pairing)


@dataclass(frozen=True, slots=True)
class AxisView:
    """How well one axis of a layout tells the cells of a grid apart.

    Args:
        axis: number of the axis.
        pairs: channel pairs it drives.
        fastest: radians that its fastest pair turns from the first cell to the last.
        slowest: radians of its slowest pair.
        warning: what is wrong, empty if nothing is.
    """

    axis: int
    pairs: int
    fastest: float
    slowest: float
    warning: str


@checked
def axis_visibility(language: LanguageSpec, extents: Sequence[int]) -> tuple[AxisView, ...]:
    """Return the phase that each axis turns over a grid, and a warning where it is under 0.1 rad.

    Args:
        language: the rotary layout.
        extents: positions from the first to the last cell of each axis, plus one, such as (frames, rows, columns).

    Raises:
        PositionError: if there is not one extent of at least 1 an axis.

    Example:
        >>> ernie = LanguageSpec(
        ...     head_dim=128,
        ...     theta=5e5,
        ...     sections=(20, 22, 22),
        ...     order="alternating",
        ...     pairing="adjacent",
        ... )
        >>> [(view.pairs, round(view.fastest, 3)) for view in axis_visibility(ernie, (8, 20, 20))]
        [(20, 0.001), (22, 19.0), (22, 15.478)]
    """
    if len(extents) != language.axes or min(extents, default=0) < 1:
        raise PositionError(
            f"extents are {tuple(extents)} and the layout has {language.axes} axes; one of at least 1 an axis is "
            "required. Pass (frames, rows, columns) of the grid."
        )
    freqs = language_freqs(language, torch.float64).reshape(-1, language.axes, language.pairs)
    out = []
    for axis, extent in enumerate(extents):
        driven = freqs[:, axis][freqs[:, axis] > 0]
        fastest, slowest = (
            ((extent - 1) * float(driven.max()), (extent - 1) * float(driven.min()))
            if len(driven)
            else (0.0, 0.0)
        )
        warning = (
            f"axis {axis} turns {fastest:.3g} rad over {extent} positions; under {VISIBLE_RADIANS} rad its cells look "
            "alike. Give it faster pairs, or a larger step."
            if extent > 1 and fastest < VISIBLE_RADIANS
            else ""
        )
        out.append(AxisView(axis, len(driven), fastest, slowest, warning))
    return tuple(out)
