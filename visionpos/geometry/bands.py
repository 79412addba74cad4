"""Bands: frequency fillings that are no theta ladder: pixel bands, golden-ratio directions, whole turns a panorama."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, get_args

import torch

from visionpos.errors import PositionError
from visionpos.geometry.fields import check_choice
from visionpos.geometry.freqs import axial_freqs
from visionpos.geometry.ranges import check_least, check_max_freq, check_speeds

if TYPE_CHECKING:
    from torch import Tensor

Spacing = Literal["linear", "log"]
Directions = Literal["angle", "quasirandom"]


def pixel_freqs(
    head_dim: int,
    *,
    max_freq: float,
    spacing: Spacing = "linear",
    axes: int = 2,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return axial frequencies from half a turn to max_freq / 4 turns a unit, for coordinates on [-1, 1].

    Args:
        head_dim: channels to rotate, a multiple of 2 * axes.
        max_freq: the fastest band turns by pi * max_freq / 2 a unit; at least 2. timm calls it max_res.
        spacing: "linear" bands pi, ..., pi * max_freq / 2 (rotary-embedding-torch), or "log" (timm's default).
        axes: coordinate axes.
        device: where to build.
        dtype: float32 or float64.

    Returns:
        `[axes, pairs]` radians per coordinate unit, slowest pair first: the other way round from a ladder.

    Raises:
        PositionError: if head_dim is not divisible, or max_freq or spacing is unknown.

    Example:
        >>> pixel_freqs(8, max_freq=224.0, spacing="log")[0]
        tensor([  3.1416, 351.8584,   0.0000,   0.0000])

    Reference:
        lucidrains/rotary-embedding-torch freqs_for="pixel"; timm pixel_freq_bands; vit-pytorch rvt.
    """
    check_max_freq(max_freq)
    check_choice("spacing", spacing, get_args(Spacing))
    blocks = axial_freqs(head_dim, axes=axes, device=device, dtype=dtype)
    steps = head_dim // 2 // axes
    if spacing == "linear":
        bands = torch.linspace(1.0, max_freq / 2, steps, device=device, dtype=dtype)
    else:
        bands = 2 ** torch.linspace(
            0.0, math.log(max_freq, 2) - 1, steps, device=device, dtype=dtype
        )
    return torch.where(blocks > 0, (bands * torch.pi).repeat(axes), torch.zeros_like(blocks))


def golden_freqs(
    head_dim: int,
    *,
    num_heads: int,
    slowest: float = 0.2,
    fastest: float = 20.0,
    still: float = 0.0,
    directions: Directions = "angle",
    axes: int = 2,
    device: torch.device | None = None,
) -> Tensor:
    """Return frequencies whose directions are spread evenly by the golden ratio over all pairs of all heads.

    Args:
        head_dim: channels of a head, even.
        num_heads: heads of a layer; the sequence of directions runs on from head to head.
        slowest: radians a unit of the slowest pair that turns, above 0.
        fastest: radians a unit of the last pair, at least `slowest`.
        still: share of pairs in [0, 1) that do not turn; they come first.
        directions: "angle": pair k points along k pi / phi (two axes); "quasirandom": a low-discrepancy sequence of
            normal vectors, made unit (any number of axes).
        axes: coordinate axes.
        device: where to build.

    Returns:
        `[num_heads, axes, pairs]` radians per coordinate unit, axes ordered (t,) y, x, slowest pair first.

    Raises:
        PositionError: if a size or a bound is out of range.

    Example:
        >>> golden_freqs(8, num_heads=2, slowest=1.0, fastest=8.0).norm(dim=1)[1]
        tensor([1., 2., 4., 8.])

    Reference:
        Jerry Xiong, jerryxio.ng/posts/nd-rope (golden gate RoPE); lucidrains/vit-pytorch vit_nd_rotary.py for
        "quasirandom", which orders axes as the caller orders coordinates. There 0 bands are rounded as here.
    """
    pairs = head_dim // 2
    if head_dim < 2 or head_dim % 2 or num_heads < 1 or axes < 1:
        raise PositionError(
            f"head_dim is {head_dim}, num_heads {num_heads} and axes {axes}; an even head_dim and at least one head "
            "and axis are required."
        )
    check_speeds(slowest, fastest, still)
    resting = round(still * pairs)
    place = torch.linspace(0.0, 1.0, pairs - resting, device=device, dtype=torch.float32)
    speeds = torch.cat([place.new_zeros(resting), slowest * (fastest / slowest) ** place])
    units = _directions(num_heads * pairs, axes, directions, device)  # [heads * pairs, axes]
    heads: Tensor = units.unflatten(0, (num_heads, pairs)).transpose(1, 2)
    return heads * speeds


def _directions(count: int, axes: int, kind: Directions, device: torch.device | None) -> Tensor:
    """Return `[count, axes]` unit vectors, axes ordered (t,) y, x."""
    if kind == "angle" and axes == 2:
        turns = torch.arange(count, device=device, dtype=torch.float32) * (
            math.pi * (math.sqrt(5) - 1) / 2
        )
        return torch.stack([turns.sin(), turns.cos()], dim=-1)
    if kind != "quasirandom":
        raise PositionError(
            f"directions are {kind!r} for {axes} axes; 'quasirandom', or with two axes 'angle', is required."
        )
    ratio = 2.0
    for _ in range(
        10
    ):  # the positive root of ratio ** (axes + 1) = ratio + 1, as far as the source iterates
        ratio = (1 + ratio) ** (1 / (axes + 1))
    steps = (1.0 / ratio) ** torch.arange(1, axes + 1, dtype=torch.float64, device=device)
    number = torch.arange(1, count + 1, dtype=torch.float64, device=device).unsqueeze(1)
    normal = torch.erfinv(2.0 * torch.fmod(number * steps, 1.0) - 1.0)
    units: Tensor = normal / normal.norm(dim=-1, keepdim=True)
    return units.float()


def whole_turns(
    freqs: Tensor, circumference: Tensor | float, *, least: float = 1.0, slow: str = "keep"
) -> Tensor:
    """Return frequencies rounded to whole turns over a circumference, so that its two ends meet.

    Args:
        freqs: radians a unit, any shape.
        circumference: units around; above 0.
        least: bands with fewer turns around are slow; at least 0.5.
        slow: what becomes of slow bands: "keep" leaves them, and the seam in them; "still" stops them, and the result
            is exactly periodic.

    Returns:
        Like freqs.

    Raises:
        PositionError: if least or slow is out of range.

    Example:
        >>> turn = 2 * torch.pi
        >>> whole_turns(torch.tensor([turn * 0.26, turn * 0.01]), 10.0) / turn
        tensor([0.3000, 0.0100])
    """
    check_choice("slow", slow, ("keep", "still"))
    check_least(least)
    turns = freqs * circumference / (2 * math.pi)
    rounded = turns.round() * (2 * math.pi) / circumference
    rest = freqs if slow == "keep" else torch.zeros_like(freqs)
    return torch.where(turns.abs() >= least, rounded, rest)
