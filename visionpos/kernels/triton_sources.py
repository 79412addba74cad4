"""Where a rotation kernel finds its angles: tables, or coordinates and frequencies; checks and arguments of both."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from visionpos.errors import PositionError
from visionpos.kernels.choices import Accuracy
from visionpos.kernels.triton_angles import MAP, SUM, TABLE

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """Angles as cosines and sines, half width.

    Args:
        cos: `[n, pairs]`, `[heads, n, pairs]`, `[b, 1, n, pairs]` or `[b, heads, n, pairs]`; leading sizes broadcast
            as in torch, so a table per sample is `table[:, None]`.
        sin: like cos.
    """

    cos: Tensor
    sin: Tensor

    @property
    def pairs(self) -> int:
        """Return the number of channel pairs that turn."""
        return self.cos.shape[-1]

    @property
    def rows(self) -> int:
        """Return the number of tokens that turn."""
        return self.cos.shape[-2]

    @property
    def heads(self) -> int:
        """Return the number of heads with angles of their own; 1 where all share them."""
        return self.cos.shape[-3] if self.cos.ndim > 2 else 1


@dataclass(frozen=True, slots=True, eq=False)
class Coordinates:
    """Angles to be formed in the kernel: the sum over axes of coordinate times frequency.

    Args:
        coords: `[axes, n]` or `[b, axes, n]`, float32 or integers below 2^24.
        freqs: radians per coordinate unit: `[pairs]` with axis_of_pair, else `[axes, pairs]` or `[heads, axes, pairs]`.
        axis_of_pair: `[pairs]` int, the one axis that drives each pair (M-RoPE, axial).
        accuracy: "reference" rounds coordinate * frequency to float32, as transformers does: off by 6e-2 rad at
            position 10^6. "exact" keeps the product to 1e-6 rad there; give freqs in float64 to profit from it.
        scale: multiplies cos and sin, as YaRN's attention factor does.
    """

    coords: Tensor
    freqs: Tensor
    axis_of_pair: Tensor | None = None
    accuracy: Accuracy = "reference"
    scale: float = 1.0

    @property
    def pairs(self) -> int:
        """Return the number of channel pairs that turn."""
        return self.freqs.shape[-1]

    @property
    def rows(self) -> int:
        """Return the number of tokens that turn."""
        return self.coords.shape[-1]

    @property
    def axes(self) -> int:
        """Return the number of axes."""
        return self.coords.shape[-2]

    @property
    def heads(self) -> int:
        """Return the number of heads with angles of their own; 1 where all share them."""
        return self.freqs.shape[0] if self.freqs.ndim == 3 else 1


Source = Tables | Coordinates


def angle_arguments(source: Source, batch: int) -> dict[str, Any]:
    """Return the arguments by which a kernel finds its angles; what the source does not have is None or 0."""
    none = dict.fromkeys(("cos", "sin", "coords", "freqs", "freqs_low", "axis_of_pair"))
    steps = dict.fromkeys(("t_b", "t_h", "t_n", "t_p", "c_b", "c_a", "c_n", "f_h", "f_a"), 0)
    fixed = {"scale": 1.0, "T_UNIT": 1, "F_UNIT": 1, "MODE": TABLE, "AXES": 1, "EXACT": False}
    of_source = _of_tables(source) if isinstance(source, Tables) else _of_coords(source, batch)
    return {**none, **steps, **fixed, **of_source}


def _of_tables(source: Tables) -> dict[str, Any]:
    cos, sin = source.cos, source.sin
    if cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    full = cos[(None,) * (4 - cos.ndim)]
    steps = [0 if size == 1 else step for size, step in zip(full.shape, full.stride(), strict=True)]
    unit = math.gcd(4, *steps[:3])
    t_b, t_h, t_n = (step // unit for step in steps[:3])
    names = {"t_b": t_b, "t_h": t_h, "t_n": t_n, "t_p": full.stride(3)}
    return {**names, "cos": cos, "sin": sin, "T_UNIT": unit}


def _of_coords(source: Coordinates, batch: int) -> dict[str, Any]:
    coords, axis, exact = source.coords, source.axis_of_pair, source.accuracy == "exact"
    high, low = split_turns(source.freqs) if exact else (source.freqs.float().contiguous(), None)
    shared = coords.ndim == 2 or coords.shape[0] < batch
    f_h = high.stride(0) if source.heads > 1 else 0
    f_a = high.stride(-2) if high.ndim > 1 else 0
    unit = math.gcd(4, f_h, f_a)
    return {
        "coords": coords, "c_b": 0 if shared else coords.stride(0), "c_a": coords.stride(-2), "c_n": coords.stride(-1),
        "freqs": high, "freqs_low": low, "f_h": f_h // unit, "f_a": f_a // unit, "F_UNIT": unit,
        "axis_of_pair": None if axis is None else axis.contiguous(), "scale": float(source.scale),
        "MODE": SUM if axis is None else MAP, "AXES": source.axes, "EXACT": exact,
    }  # fmt: skip


def split_turns(freqs: Tensor) -> tuple[Tensor, Tensor]:
    """Return frequencies in turns per coordinate unit as a float32 number and the float32 rest of it.

    Example:
        >>> high, low = split_turns(torch.ones(1))
        >>> abs(high.double() + low.double() - 0.5 / torch.pi).item() < 1e-14
        True
    """
    turns = freqs.double().contiguous() / (2 * math.pi)
    high = turns.float()
    return high, (turns - high.double()).float()


def check_source(source: Source, batch: int) -> None:
    """Refuse angles whose own shapes do not agree, or that belong to another number of samples."""
    if isinstance(source, Coordinates):
        _check_coords(source)
        lead = source.coords.shape[:-2]
    else:
        _check_tables(source)
        lead = source.cos.shape[:-3]
    if len(lead) > 1 or (lead and lead[0] not in (1, batch)):
        raise PositionError(
            f"angles are given for {tuple(lead)} samples and q holds {batch}; 1 or as many are required. Put the "
            "sample axis first."
        )


def _check_tables(source: Tables) -> None:
    cos, sin = source.cos, source.sin
    if cos.shape != sin.shape or cos.ndim < 2:
        raise PositionError(
            f"cos is {tuple(cos.shape)} and sin {tuple(sin.shape)}; equal shapes [..., n, pairs] are required. Build "
            "both with Rotation.of(angles)."
        )


def _check_coords(source: Coordinates) -> None:
    axis, freqs = source.axis_of_pair, source.freqs
    if source.accuracy not in get_args(Accuracy):
        raise PositionError(
            f"accuracy is {source.accuracy!r}; 'reference' or 'exact' is required. Parity with transformers is "
            "'reference'."
        )
    expected = (source.axes, source.pairs) if axis is None else (source.pairs,)
    most = 3 if axis is None else 1
    if tuple(freqs.shape[-len(expected) :]) != expected or freqs.ndim > most:
        raise PositionError(
            f"freqs is {tuple(freqs.shape)} for {source.axes} axes; [pairs] with axis_of_pair, or [axes, pairs] or "
            "[heads, axes, pairs] without, is required. Take the shapes of one scheme."
        )
    if axis is not None and (axis.shape != freqs.shape or axis.is_floating_point()):
        raise PositionError(
            f"axis_of_pair is {tuple(axis.shape)} {axis.dtype}; integers of the shape of freqs, {tuple(freqs.shape)}, "
            "are required. Build it as arange(axes).repeat_interleave(sections)."
        )
