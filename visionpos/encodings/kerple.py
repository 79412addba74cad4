"""KERPLE on a grid: a learned bias that falls with the logarithm, or a power, of distance; two numbers a head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import torch
from torch import nn

from visionpos.encodings.biasing import powered
from visionpos.encodings.doors import Biasing, Dims
from visionpos.encodings.sources import required_entry
from visionpos.errors import PositionError
from visionpos.geometry.fields import check_fields
from visionpos.geometry.places import check_points
from visionpos.geometry.points import check_floats
from visionpos.geometry.relative import Metric, distances

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

_LEAST = 0.01  # the source clamps both numbers to this from below
_MOST = 2.0  # and the power to this from above


@dataclass(frozen=True, slots=True, kw_only=True)
class KerpleSpec:
    """Settings of KERPLE on a grid.

    Args:
        form: "log" is -p log(1 + a d), "power" is -a d ** p with p at most 2.
        metric: how far apart two cells are: "l1", "l2" or "linf". There is no public vision model to follow.

    Raises:
        PositionError: for an unknown form or metric.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    kind: Literal["kerple"] = "kerple"
    form: Literal["log", "power"] = "log"
    metric: Metric = "l2"

    def __post_init__(self) -> None:
        check_fields(self)


class Kerple(Biasing):
    """A kernel of distance with two positive learned numbers a head, shared by all layers; any grid, any axes.

    Parameters `raw_p` and `raw_a [num_heads]` are unbounded; `p()` and `a()` are 0.01 + softplus of them, and under
    "power" p runs from 0.01 to 2 by a sigmoid. It depends on differences only (shift-relative) and keeps every mirror
    and quarter turn of the square. Prefix tokens get 0. Memory of `forward` is `num_heads` n x n numbers.

    Example:
        >>> bias = Kerple(KerpleSpec(), Dims(embed_dim=8, num_heads=2, depth=1))
        >>> bias.set(p=torch.ones(2), a=torch.full((2,), 0.5))
        >>> bias.values(torch.tensor([[0.0, 4.0]])).round(decimals=4)[0]
        tensor([-1.0986], grad_fn=<SelectBackward0>)

    Reference:
        KERPLE (arXiv 2205.09921), chijames/KERPLE megatron/mpu/layers.py. Deliberate difference: the source clamps the
        numbers in place at every forward, behind the optimizer's back; here they cannot leave their range. Its
        multiplicative "weight" kernel is no bias and left out.
    """

    spec: KerpleSpec

    def __init__(
        self, spec: KerpleSpec, dims: Dims, *, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.spec, self.dims = spec, dims
        self.raw_p = nn.Parameter(torch.empty(dims.num_heads))
        self.raw_a = nn.Parameter(torch.empty(dims.num_heads))
        draws = torch.rand(2, dims.num_heads, generator=generator, device=_device(generator))
        self.set(p=2.0 * draws[0], a=draws[1])

    def p(self) -> Tensor:
        """Return `[num_heads]`, at least 0.01; at most 2 under "power"."""
        if self.spec.form == "power":
            return _LEAST + (_MOST - _LEAST) * self.raw_p.sigmoid()
        return _LEAST + nn.functional.softplus(self.raw_p)

    def a(self) -> Tensor:
        """Return `[num_heads]`, at least 0.01."""
        return _LEAST + nn.functional.softplus(self.raw_a)

    @torch.no_grad()
    def set(self, *, p: Tensor, a: Tensor) -> None:
        """Set the two numbers of every head, clamped to a hair inside their range as the source clamps them.

        Args:
            p: `[num_heads]`.
            a: `[num_heads]`.

        Raises:
            PositionError: if one is no tensor of floats, one a head.
        """
        for name, given in (("p", p), ("a", a)):
            check_floats(given, name)
            if given.shape != self.raw_p.shape:
                raise PositionError(
                    f"{name} has shape {tuple(given.shape)}; {tuple(self.raw_p.shape)}, one number a head, is "
                    "required. Expand one that all heads share."
                )
        hair = 1e-6
        above_a = a.double().clamp(min=_LEAST + hair) - _LEAST
        above_p = p.double().clamp(min=_LEAST + hair) - _LEAST
        self.raw_a.copy_(_inverse_softplus(above_a))
        if self.spec.form == "power":
            share = (above_p / (_MOST - _LEAST)).clamp(max=1.0 - hair)
            self.raw_p.copy_(share.logit())
        else:
            self.raw_p.copy_(_inverse_softplus(above_p))

    def values(self, offsets: Tensor) -> Tensor:
        """Return `[num_heads, ...]`, the bias at differences `[..., axes]` in cells."""
        check_points(offsets, None, "offsets")
        dtype = torch.promote_types(torch.float32, self.raw_p.dtype)
        far = distances(offsets.to(dtype), self.spec.metric)
        shape = (-1, *[1] * far.ndim)
        p, a = self.p().to(dtype).view(shape), self.a().to(dtype).view(shape)
        bias = -p * (1.0 + a * far).log() if self.spec.form == "log" else -a * powered(far, p)
        return bias.to(self.raw_p.dtype)

    @classmethod
    def from_source(cls, state: Mapping[str, Tensor], spec: KerpleSpec, dims: Dims) -> Self:
        """Return a module with a source's `bias_p` and `bias_a`, `[num_heads, 1, 1]`, clamped as its forward would.

        Raises:
            PositionError: if an entry is missing or has another number of heads.
        """
        module = cls(spec, dims)
        found = {name: required_entry(state, f"bias_{name}").flatten() for name in ("p", "a")}
        for name, value in found.items():
            if value.numel() != dims.num_heads:
                raise PositionError(
                    f"state holds bias_{name} of {value.numel()} heads and the model has {dims.num_heads}; they must "
                    "agree. Pass the Dims of the model that wrote it."
                )
        module.set(**found)
        return module


def _inverse_softplus(value: Tensor) -> Tensor:
    """Return x with softplus(x) = value, for values above 0."""
    return value + (-(-value).expm1()).log()


def _device(generator: torch.Generator | None) -> torch.device | None:
    return None if generator is None else generator.device
