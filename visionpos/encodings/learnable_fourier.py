"""Learnable Fourier features: trained frequencies, then a small network. Li et al. 2021."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import nn

from visionpos.encodings.doors import Additive, Dims, check_device, check_points
from visionpos.encodings.sources import filled, required_entry
from visionpos.errors import PositionError
from visionpos.geometry.augment import augment
from visionpos.geometry.coords import CoordSpec, coordinates
from visionpos.geometry.fields import check_fields
from visionpos.geometry.freqs import angles
from visionpos.geometry.waves import waves

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from visionpos.geometry.grid import Grid

GammaIs = Literal["precision_root", "std", "std_root", "inverse_std_root"]
# What gamma says of the standard deviation of the frequencies at the start.
_DEVIATIONS: dict[str, Callable[[float], float]] = {
    "precision_root": lambda gamma: 1.0 / gamma,
    "std": lambda gamma: gamma,
    "std_root": lambda gamma: gamma**2,
    "inverse_std_root": lambda gamma: gamma**-2,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnableFourierSpec:
    """Settings of learnable Fourier features.

    Args:
        features: width of the Fourier features, cosines and sines together, even.
        hidden: width of the network's hidden layer.
        groups: groups of axes that share all weights and give embed_dim / groups channels each; 1 reads y and x
            together, 2 apart.
        gamma: spread of the frequencies at the start, in the sense of gamma_is.
        gamma_is: sources disagree: "precision_root", variance gamma ** -2 (the paper); "std", gamma itself; "std_root",
            deviation gamma ** 2 (one public port); "inverse_std_root", deviation gamma ** -2 (another). They agree at
            gamma 1 alone.
        coords: numbering of a grid's tokens.

    Raises:
        PositionError: if a size is out of range, or the axes cannot be grouped.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    kind: Literal["learnable_fourier"] = "learnable_fourier"
    features: int = 384
    hidden: int = 32
    groups: int = 1
    gamma: float = 1.0
    gamma_is: GammaIs = "precision_root"
    coords: CoordSpec = field(default_factory=lambda: CoordSpec(unit="fractional"))

    def __post_init__(self) -> None:
        check_fields(self)
        if self.features < 2 or self.features % 2 or self.hidden < 1:
            raise PositionError(
                f"features is {self.features} and hidden {self.hidden}; an even width of at least 2 and a width of at "
                "least 1 are required."
            )
        if self.groups < 1 or self.coords.axes % self.groups:
            raise PositionError(
                f"groups is {self.groups} for {self.coords.axes} axes; the axes must share out evenly. Use 1, or one "
                "group an axis."
            )
        if self.gamma <= 0:
            raise PositionError(
                f"gamma is {self.gamma}, read as {self.gamma_is!r}; a number above 0 is required."
            )


class LearnableFourier(Additive):
    """Learnable Fourier features: `MLP([cos(x W), sin(x W)] / sqrt(features))` for each group of axes.

    Parameters `frequencies [axes / groups, features / 2]`, radians a unit, and the two linear layers `enter` and
    `leave` with a GELU between. Keep the frequencies in float32; angles are computed there in any case. In training the
    coordinates of a grid are perturbed as `coords` says.

    Raises:
        PositionError: if embed_dim is not divisible by groups.

    Example:
        >>> from visionpos.geometry.grid import Grid
        >>> code = LearnableFourier(LearnableFourierSpec(), Dims(embed_dim=8, num_heads=1, depth=1))
        >>> code(Grid(3, 5)).shape
        torch.Size([15, 8])

    Reference:
        Li et al. (arXiv 2106.02795), equations 2 and 6. The paper leaves the unit of positions to the task.
    """

    spec: LearnableFourierSpec

    def __init__(
        self,
        spec: LearnableFourierSpec,
        dims: Dims,
        *,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.spec, self.dims = spec, dims
        if dims.embed_dim % spec.groups:
            raise PositionError(
                f"embed_dim is {dims.embed_dim} for {spec.groups} groups; whole channels a group are required."
            )
        # Drawn and kept in float32, whatever the default dtype: half precision would round whole turns away.
        shape = (spec.coords.axes // spec.groups, spec.features // 2)
        drawn = torch.empty(shape, dtype=torch.float32)
        deviation = _DEVIATIONS[spec.gamma_is](spec.gamma)
        self.frequencies = nn.Parameter(nn.init.normal_(drawn, std=deviation, generator=generator))
        self.enter = nn.Linear(spec.features, spec.hidden)
        self.leave = nn.Linear(spec.hidden, dims.embed_dim // spec.groups)
        for layer in (self.enter, self.leave):
            nn.init.xavier_uniform_(layer.weight, generator=generator)
            nn.init.zeros_(layer.bias)

    def forward(
        self,
        grid: Grid,
        *,
        device: torch.device | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return `[n, embed_dim]`; with two axes the frames of a clip share their code.

        Raises:
            PositionError: if a device other than that of the parameters is asked for.
        """
        check_device(self.frequencies, device)
        points = coordinates(grid, self.spec.coords, device=self.frequencies.device)
        if self.training:
            points = augment(points, self.spec.coords, generator=generator)
        return self._code(points)

    def at(self, points: Tensor) -> Tensor:
        """Return the code at any points, `[..., embed_dim]`.

        Args:
            points: `[..., axes]`, ordered (t,) y, x, in the unit of the spec's coords.

        Raises:
            PositionError: if points are of another rank or not finite.
        """
        check_points(points, self.spec.coords.axes, "points")
        return self._code(points)

    def _code(self, points: Tensor) -> Tensor:
        spec = self.spec
        grouped: Tensor = points.unflatten(-1, (spec.groups, -1))  # [..., groups, axes of a group]
        turns = angles(grouped, self.frequencies)
        features = waves(turns, "cos_sin") / math.sqrt(spec.features)
        hidden = nn.functional.gelu(self.enter(features.to(self.enter.weight.dtype)))
        code: Tensor = self.leave(hidden)
        return code.flatten(-2)

    @classmethod
    def from_source(
        cls,
        state: Mapping[str, Tensor],
        spec: LearnableFourierSpec,
        dims: Dims,
        *,
        x_first: bool = False,
    ) -> LearnableFourier:
        """Return the encoding with the weights of a public port.

        Args:
            state: entries `Wr` or `Wr.weight (features / 2, axes)`, `mlp.0.weight`, `mlp.0.bias`, `mlp.2.weight` and
                `mlp.2.bias`.
            spec: the filling.
            dims: sizes of the model.
            x_first: whether the port was given x before y.

        Raises:
            PositionError: if an entry is missing or of another shape.
        """
        frequencies = required_entry(state, "Wr", "Wr.weight", ranks=(2,)).mT
        own = {
            "frequencies": frequencies.flip(0) if x_first else frequencies,
            "enter.weight": required_entry(state, "mlp.0.weight"),
            "enter.bias": required_entry(state, "mlp.0.bias"),
            "leave.weight": required_entry(state, "mlp.2.weight"),
            "leave.bias": required_entry(state, "mlp.2.bias"),
        }
        return filled(cls(spec, dims), own, source="the state dict")
