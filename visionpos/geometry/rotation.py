"""Rotation: cosines and sines of angles, and the turning of query and key channels by them.

Angles enter as `[..., n, pairs]`; q and k leave rotated. Both lines of the package, vision and VLM, end here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import torch

from visionpos.errors import PositionError
from visionpos.geometry.grid import is_whole
from visionpos.geometry.kept import picked
from visionpos.geometry.ranges import check_exempt
from visionpos.geometry.turned import check_tables, check_turned

if TYPE_CHECKING:
    from torch import Tensor

    from visionpos.geometry.blocks import BasisTurn, BlockTurn

Pairing = Literal["half", "adjacent", "half_per_axis", "adjacent_tiled"]
PAIRINGS: tuple[Pairing, ...] = get_args(Pairing)
PER_AXIS: tuple[Pairing, ...] = ("half_per_axis", "adjacent_tiled")


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """One turn a token and channel pair.

    Args:
        cos: `[..., n, pairs]`, half width: one value a pair.
        sin: like cos.
        pairing: which two channels turn together: "half" pairs channel i with i + pairs, "adjacent" 2i with 2i + 1;
            "half_per_axis" is "half" inside each axis' own run of channels (Gemma 4). "adjacent_tiled" mixes 2i and
            2i + 1 with the cosines and sines of two different angles: the released V-JEPA 2 weights depend on it. It is
            **no rotation**: it keeps neither norms nor differences of coordinates.
        axes: runs of channels, one an axis; required by the last two pairings, without effect on the others.

    Leading sizes broadcast against the batch and heads of the rotated tensor: `[heads, n, pairs]` turns every head
    its own way, `[b, 1, n, pairs]` every sample.
    """

    cos: Tensor
    sin: Tensor
    pairing: Pairing = "half"
    axes: int | None = None

    def __post_init__(self) -> None:
        if self.pairing not in PAIRINGS:
            raise PositionError(
                f"pairing is {self.pairing!r}; it must be 'half' or 'adjacent', or one of 'half_per_axis' and "
                "'adjacent_tiled' with axes."
            )
        check_tables(self.cos, self.sin)
        if self.cos.shape != self.sin.shape or self.cos.ndim < 2:
            raise PositionError(
                f"cos has shape {tuple(self.cos.shape)} and sin {tuple(self.sin.shape)}; both must be "
                "[..., n, pairs]. Build them with Rotation.of(angles)."
            )
        if self.pairing in PER_AXIS and (not self.axes or self.pairs % self.axes):
            raise PositionError(
                f"axes is {self.axes} for pairing {self.pairing!r} and {self.pairs} pairs; the number of axes, which "
                "divides the pairs, is required. Pass axes=, or build with an encoding's rotation()."
            )

    @classmethod
    def of(
        cls,
        angles: Tensor,
        pairing: Pairing = "half",
        *,
        scale: float = 1.0,
        axes: int | None = None,
    ) -> Rotation:
        """Return the rotation by `angles`.

        Args:
            angles: `[..., n, pairs]` radians.
            pairing: "half" (Qwen-VL, DINOv3), "adjacent" (EVA-02, RoPE-ViT, SAM 2) or another of the class.
            scale: multiplies cos and sin, as YaRN's attention factor does; 1 keeps the norm.
            axes: number of axes, for the pairings that need it.

        Example:
            >>> Rotation.of(torch.zeros(3, 4)).cos.shape
            torch.Size([3, 4])
        """
        cos, sin = angles.cos(), angles.sin()
        if scale != 1.0:
            cos, sin = cos * scale, sin * scale
        return cls(cos, sin, pairing, axes)

    @property
    def n(self) -> int:
        """Return the number of tokens."""
        return self.cos.shape[-2]

    @property
    def pairs(self) -> int:
        """Return the number of channel pairs that turn."""
        return self.cos.shape[-1]

    def select(self, indices: Tensor) -> Rotation:
        """Return the rotation of the kept tokens.

        Args:
            indices: `[kept]` for one choice, or `[b, kept]` for one a sample (patch dropout); the result then
                has shape `[b, heads or 1, kept, pairs]`.

        Raises:
            PositionError: if indices do not name tokens of this rotation; see `picked`.
        """
        cos, sin = (picked(part, indices, own=2) for part in (self.cos, self.sin))
        return Rotation(cos, sin, self.pairing, self.axes)

    def repeated(self, times: int) -> Rotation:
        """Return the rotation of `times` frames that share one, frame after frame (SAM 2's memory)."""
        if not is_whole(times):
            raise PositionError(
                f"times is {times!r}; a whole number of frames, at least one, is required."
            )
        cos, sin = (part.repeat(*[1] * (part.ndim - 2), times, 1) for part in (self.cos, self.sin))
        return Rotation(cos, sin, self.pairing, self.axes)

    def padded(self, prefix: int = 0, suffix: int = 0) -> Rotation:
        """Return the rotation with tokens that do not turn before and after, so that no slice or copy is needed."""
        check_exempt(prefix, suffix)
        if not prefix and not suffix:
            return self
        room = (0, 0, prefix, suffix)
        cos = torch.nn.functional.pad(self.cos, room, value=1.0)
        return Rotation(cos, torch.nn.functional.pad(self.sin, room), self.pairing, self.axes)

    def full_width(self) -> tuple[Tensor, Tensor]:
        """Return (cos, sin) `[..., n, 2 pairs]`, one value a channel, as transformers and timm expect them."""
        return _widened(self.cos, self), _widened(self.sin, self)

    def check_lead(self, x: Tensor) -> None:
        """Refuse what would be rounded to whole numbers, or grow by broadcasting; see `check_turned`."""
        check_turned(x, self.cos.shape[:-2], self.cos.device)

    def check_fit(self, x: Tensor, prefix: int = 0, suffix: int = 0) -> None:
        """Refuse x `[..., n, head_dim]` of another number of tokens, or of too few channels.

        Raises:
            PositionError: naming both numbers.
        """
        check_exempt(prefix, suffix)
        if x.shape[-2] != self.n + prefix + suffix:
            turned = x.ndim > 2 and x.shape[-3] == self.n + prefix + suffix
            remedy = (
                "Pass layout='bnhd' for [b, n, heads, head_dim] or 'thd' for [n, heads, head_dim], or transpose."
                if turned
                else "Pass the prefix count of the model, or select() kept tokens."
            )
            raise PositionError(
                f"x has {x.shape[-2]} tokens, the rotation {self.n} and prefix + suffix is {prefix + suffix}; "
                f"tokens must be rotation + prefix + suffix. {remedy}"
            )
        if x.shape[-1] < 2 * self.pairs:
            raise PositionError(
                f"x has {x.shape[-1]} channels a head and the rotation turns {2 * self.pairs}; at most head_dim can "
                "turn. Build the frequencies with this head_dim."
            )

    def apply(self, x: Tensor, *, prefix: int = 0, suffix: int = 0) -> Tensor:
        """Return `x` with its channel pairs turned.

        Args:
            x: `[b, heads, n, head_dim]`, not changed; any float dtype. Channels beyond 2 * pairs pass through.
            prefix: leading tokens that do not turn (class token, registers).
            suffix: trailing tokens that do not turn (SAM 2 object pointers).

        Returns:
            Shape and dtype of x; the arithmetic runs in float32 or better.

        Raises:
            PositionError: if tokens or channels do not fit.
        """
        self.check_lead(x)
        self.check_fit(x, prefix, suffix)
        turned = 2 * self.pairs
        rotation = self.padded(prefix, suffix)
        dtype = torch.promote_types(torch.float32, torch.promote_types(x.dtype, rotation.cos.dtype))
        head = x[..., :turned].to(dtype)
        out = _turn(head, rotation).to(x.dtype)
        return out if turned == x.shape[-1] else torch.cat([out, x[..., turned:]], dim=-1)


def rotate(
    q: Tensor,
    k: Tensor,
    rotation: Rotation | BlockTurn | BasisTurn,
    *,
    prefix: int = 0,
    suffix: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return q and k with their channel pairs turned, so that q.k depends on coordinate differences.

    Args:
        q: `[b, heads, n, head_dim]`.
        k: `[b, kv_heads, n, head_dim]`; grouped-query heads may be fewer.
        rotation: `[n, pairs]`, or with leading heads or batch sizes; or the turn of another scheme (`blocks`).
        prefix: leading tokens that do not turn.
        suffix: trailing tokens that do not turn.

    Returns:
        Two new tensors of the inputs' shapes and dtypes.

    Raises:
        PositionError: if tokens or channels do not fit, or rotation is no turn.

    Example:
        >>> q = torch.ones(1, 2, 5, 8)
        >>> turned, _ = rotate(q, q, Rotation.of(torch.zeros(4, 4)), prefix=1)
        >>> torch.equal(turned, q)
        True

    Reference:
        RoFormer (arXiv 2104.09864). Keys of another length than the queries turn by their own rotation: use
        `Rotation.apply`.
    """
    if not hasattr(rotation, "padded"):
        raise PositionError(
            f"rotation is {type(rotation).__name__}; what an encoding's call gives, or Rotation.of(angles), is "
            "required."
        )
    rotation = rotation.padded(prefix, suffix)
    return rotation.apply(q), rotation.apply(k)


def rotate_memory(
    q: Tensor, k: Tensor, rotation: Rotation, *, suffix: int = 0
) -> tuple[Tensor, Tensor]:
    """Return q and k turned, where k holds several frames that share the spatial rotation of q's one frame.

    Args:
        q: `[b, heads, n, head_dim]`, one frame.
        k: `[b, heads, frames * n + suffix, head_dim]`: memory frames, row-major each, then tokens without a place.
        rotation: `[n, pairs]` of one frame; time enters elsewhere (SAM 2 adds a temporal code).
        suffix: trailing keys that do not turn: object pointers.

    Returns:
        Two new tensors of the inputs' shapes and dtypes. Without a single whole frame the keys come back as they are.

    Raises:
        PositionError: if the keys are no whole number of frames. The grid is never guessed from the count.

    Example:
        >>> q, k = torch.ones(1, 1, 15, 8), torch.ones(1, 1, 34, 8)
        >>> _, turned = rotate_memory(q, k, Rotation.of(torch.ones(15, 4)), suffix=4)
        >>> torch.equal(turned[..., :15, :], turned[..., 15:30, :])
        True

    Reference:
        SAM 2 (arXiv 2408.00714), facebookresearch/sam2 sam/transformer.py RoPEAttention, which takes the grid to be
        a square of the token count; here the rotation brings the true grid.
    """
    spatial = k.shape[-2] - suffix
    if suffix < 0 or spatial < 0 or spatial % rotation.n:
        raise PositionError(
            f"k has {k.shape[-2]} tokens, suffix is {suffix} and a frame has {rotation.n}; whole frames and the "
            "suffix are required. Pass the number of trailing pointer tokens as suffix."
        )
    turned = rotation.apply(q)
    if not spatial:
        return turned, k.clone()
    return turned, rotation.repeated(spatial // rotation.n).apply(k, suffix=suffix)


def _turn(x: Tensor, by: Rotation) -> Tensor:
    """Return `(a cos - b sin, b cos + a sin)` of every pair (a, b)."""
    if by.pairing == "half":
        return _turned_halves(x, by.cos, by.sin)
    if by.pairing == "half_per_axis":
        runs = [part.unflatten(-1, (by.axes, -1)) for part in (x, by.cos, by.sin)]
        return _turned_halves(*runs).flatten(-2)
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    if by.pairing == "adjacent_tiled":
        partner = torch.stack([-second, first], dim=-1).flatten(-2)
        return x * _widened(by.cos, by) + partner * _widened(by.sin, by)
    cos, sin = by.cos, by.sin
    return torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)


def _turned_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _widened(part: Tensor, by: Rotation) -> Tensor:
    """Return one value a channel, `[..., n, 2 pairs]`, from one a pair."""
    if by.pairing == "adjacent":
        return part.repeat_interleave(2, -1)
    if by.pairing == "half":
        return torch.cat([part, part], dim=-1)
    runs: Tensor = part.unflatten(-1, (by.axes, -1))
    return torch.cat([runs, runs], dim=-1).flatten(-2)
