"""Frequencies: how fast each channel pair turns per coordinate unit, and the angles that follow.

Fillings of one tensor, `freqs [axes, pairs]` in radians per coordinate unit, and `angles`, the one product behind every
trigonometric scheme. The fillings of multimodal language models are in `sections`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, get_args

import torch

from visionpos.errors import PositionError
from visionpos.geometry.fields import check_choice
from visionpos.geometry.grid import is_whole
from visionpos.geometry.places import check_points
from visionpos.geometry.ranges import check_counts, check_periods, check_sigma, check_theta

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

Order = Literal["contiguous", "interleaved"]
Bands = Literal["shared", "dealt"]


def ladder(
    pairs: int,
    *,
    theta: float,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return the geometric ladder `theta ** (-k / pairs)`, fastest pair first.

    Args:
        pairs: number of channel pairs, at least 1.
        theta: ladder base, above 0; a larger base gives slower low bands.
        device: where to build.
        dtype: float32, or float64 for coordinates beyond 2**17.

    Returns:
        `[pairs]` radians per coordinate unit.

    Raises:
        PositionError: if pairs or theta is out of range.

    Example:
        >>> ladder(4, theta=10000.0)
        tensor([1.0000, 0.1000, 0.0100, 0.0010])

    Reference:
        RoFormer (arXiv 2104.09864); bit-equal to transformers' `inv_freq` and timm's `freq_bands`.
    """
    if not is_whole(pairs):
        raise PositionError(
            f"pairs is {pairs!r}; at least 1 channel pair is required. Use a larger head_dim."
        )
    check_theta(theta)
    exponent = torch.arange(pairs, device=device, dtype=torch.int64).to(dtype) / pairs
    return 1.0 / (theta**exponent)


def axial_freqs(
    head_dim: int,
    *,
    theta: float = 100.0,
    axes: int = 2,
    order: Order = "contiguous",
    bands: Bands = "shared",
    axis_order: Sequence[int] | None = None,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return frequencies in which every pair is driven by one axis.

    Args:
        head_dim: channels to rotate, a multiple of 2 * axes.
        theta: ladder base (100 in RoPE-ViT and DINOv3, 10000 in EVA-02, Qwen-VL towers and Pixtral).
        axes: number of coordinate axes.
        order: "contiguous" gives each axis one block of pairs; "interleaved" deals pairs in turn (Kimi).
        bands: "shared" gives every axis the same ladder of pairs/axes steps; "dealt" makes one ladder of all
            pairs and deals its steps to the axes in turn, so axes differ (Pixtral).
        axis_order: axis that owns the first, second, ... share of pairs; (0, 1) is y then x.
        device: where to build.
        dtype: float32, or float64 for coordinates beyond 2**17.

    Returns:
        `[axes, pairs]`, zero where an axis does not drive a pair.

    Raises:
        PositionError: if head_dim is not divisible, or axis_order is no permutation of the axes.

    Example:
        >>> axial_freqs(8, theta=100.0)
        tensor([[1.0000, 0.1000, 0.0000, 0.0000],
                [0.0000, 0.0000, 1.0000, 0.1000]])

    Reference:
        RoPE-ViT (arXiv 2403.13298), EVA-02 (arXiv 2303.11331), mistralai/mistral-inference for "dealt".
    """
    least = 2 * axes if is_whole(axes) else 2
    if not (is_whole(axes) and is_whole(head_dim)) or head_dim % least:
        raise PositionError(
            f"head_dim is {head_dim!r} for {axes!r} axes; a positive multiple of {least} is required. "
            "Change num_heads, or rotate only a part of the head with rotary_dim."
        )
    check_choice("order", order, get_args(Order))
    check_choice("bands", bands, get_args(Bands))
    owners = tuple(range(axes)) if axis_order is None else tuple(axis_order)
    if sorted(owners) != list(range(axes)):
        raise PositionError(
            f"axis_order is {owners}; a permutation of {tuple(range(axes))} is required."
        )
    share = head_dim // 2 // axes
    place = torch.arange(head_dim // 2, device=device)
    slot, step = (
        (place // share, place % share) if order == "contiguous" else (place % axes, place // axes)
    )
    if bands == "dealt":
        values = ladder(head_dim // 2, theta=theta, device=device, dtype=dtype)[step * axes + slot]
    else:
        values = ladder(share, theta=theta, device=device, dtype=dtype)[step]
    return on_axis(values, torch.tensor(owners, device=device)[slot], axes)


def period_freqs(
    head_dim: int,
    *,
    shortest: float,
    longest: float,
    axes: int = 2,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return axial frequencies whose periods run geometrically from `shortest` to `longest`, both included.

    Args:
        head_dim: channels to rotate, a multiple of 2 * axes.
        shortest: shortest period, in coordinate units, above 0.
        longest: longest period, at least `shortest`.
        axes: coordinate axes.
        device: where to build.
        dtype: float32 or float64.

    Returns:
        `[axes, pairs]` radians per coordinate unit, `2 pi / period`.

    Raises:
        PositionError: if head_dim is not divisible or the periods are out of order.

    Example:
        >>> (2 * torch.pi / period_freqs(16, shortest=0.5, longest=8.0)[0, :4]).round(decimals=3)
        tensor([0.5000, 1.2600, 3.1750, 8.0000])

    Reference:
        DINOv3's min_period and max_period, facebookresearch/dinov3 layers/rope_position_encoding.py.
    """
    check_periods(shortest, longest)
    blocks = axial_freqs(head_dim, axes=axes, device=device, dtype=dtype)
    exponent = torch.linspace(0.0, 1.0, head_dim // 2 // axes, device=device, dtype=dtype)
    turns = 2.0 * math.pi / (shortest * (longest / shortest) ** exponent)
    return torch.where(blocks > 0, turns.repeat(axes), torch.zeros_like(blocks))


def mixed_freqs(
    head_dim: int,
    *,
    num_heads: int,
    depth: int,
    theta: float = 10.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return the start values of RoPE-Mixed: every pair of every head turns along its own direction.

    The first half of the pairs points along one random direction a head and layer, the second half is the same
    ladder at a right angle to it; direction 0 is axial RoPE with x first.

    Args:
        head_dim: channels of a head, a multiple of 4.
        num_heads: heads of a layer.
        depth: layers.
        theta: ladder base, 10 in the paper.
        generator: source of the directions; torch's default generator when None.

    Returns:
        `[depth, num_heads, 2, pairs]`, axes ordered y, x; meant to become a learned parameter.

    Raises:
        PositionError: if head_dim is not a multiple of 4.

    Reference:
        RoPE-ViT (arXiv 2403.13298), naver-ai/rope-vit; same values as timm's RotaryEmbeddingMixed under one seed,
        there stored as (2, depth, heads, pairs) with x first.
    """
    check_counts(num_heads=num_heads, depth=depth)
    if not is_whole(head_dim) or head_dim % 4:
        raise PositionError(
            f"head_dim is {head_dim!r}; a multiple of 4 is required. Change num_heads."
        )
    check_theta(theta)
    steps = torch.arange(0, head_dim, 4, dtype=torch.float32) / head_dim
    magnitude = 1.0 / (theta**steps)
    draw = torch.rand(
        depth,
        num_heads,
        1,
        dtype=torch.float32,
        generator=generator,
        device=None if generator is None else generator.device,
    )
    direction = (draw if generator is None else draw.to(steps.device)) * 2 * torch.pi
    right_angle = direction + torch.pi / 2
    x = torch.cat([magnitude * direction.cos(), magnitude * right_angle.cos()], dim=-1)
    y = torch.cat([magnitude * direction.sin(), magnitude * right_angle.sin()], dim=-1)
    return torch.stack([y, x], dim=-2)


def gaussian_freqs(
    pairs: int, *, axes: int = 2, sigma: float = 1.0, generator: torch.Generator | None = None
) -> Tensor:
    """Return random Fourier frequencies, `2 pi` times a normal matrix of standard deviation sigma.

    Args:
        pairs: number of sine-cosine pairs.
        axes: coordinate axes.
        sigma: standard deviation in turns per coordinate unit, above 0; larger is sharper.
        generator: source of the draws; torch's default generator when None.

    Returns:
        `[axes, pairs]` radians per coordinate unit.

    Raises:
        PositionError: if pairs or sigma is out of range.

    Reference:
        Tancik et al. (arXiv 2006.10739); segment-anything draws `[2, pairs]` with x in row 0.
    """
    if not (is_whole(pairs) and is_whole(axes)):
        raise PositionError(
            f"pairs is {pairs!r} and axes {axes!r}; at least 1 pair and 1 axis are required."
        )
    check_sigma(sigma)
    device = None if generator is None else generator.device
    turns = torch.randn(axes, pairs, generator=generator, device=device, dtype=torch.float32)
    return 2.0 * torch.pi * sigma * turns


def angles(coords: Tensor, freqs: Tensor) -> Tensor:
    """Return the angle by which every channel pair turns at every token.

    The one product behind every trigonometric scheme: `angles[n, p] = sum_a coords[n, a] * freqs[a, p]`. Shifting all
    coordinates by a constant shifts all angles alike, so rotated dot products see differences only.

    Args:
        coords: `[..., n, axes]`, in the unit that `freqs` expects (cells, or [-1, 1] for centred schemes).
        freqs: `[..., axes, pairs]`, radians per coordinate unit.

    Returns:
        `[..., n, pairs]` radians, float32 (float64 if either input is). Beyond 2**17 pass both in float64.

    Raises:
        PositionError: if the two disagree on the number of axes, or coords on the CPU hold NaN or infinity.

    Example:
        >>> angles(torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 0.1], [0.5, 0.0]]))
        tensor([[2.0000, 0.1000]])
    """
    check_points(coords, None, "coords")
    if coords.shape[-1] != freqs.shape[-2]:
        raise PositionError(
            f"coords have {coords.shape[-1]} axes and freqs {freqs.shape[-2]}; they must agree. "
            "Build both from the same Grid, or pass axes= to the frequency function."
        )
    dtype = torch.promote_types(torch.float32, torch.promote_types(coords.dtype, freqs.dtype))
    coords, freqs = coords.to(dtype), freqs.to(dtype)
    # Elementwise, not matmul: autocast would run a matmul in bfloat16 and lose whole turns.
    turns = coords[..., :1] * freqs[..., :1, :]  # [..., n, pairs]
    for axis in range(1, coords.shape[-1]):
        turns = turns + coords[..., axis : axis + 1] * freqs[..., axis : axis + 1, :]
    return turns


def on_axis(values: Tensor, owner: Tensor, axes: int) -> Tensor:
    """Return `[axes, pairs]` with each pair's value in the row of the axis that drives it."""
    rows = torch.arange(axes, device=values.device).unsqueeze(-1)
    return torch.where(rows == owner, values, torch.zeros_like(values))
