"""Periodic RoPE: horizontal frequencies in whole turns around a panorama, so that its left and right edges meet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch

from visionpos.encodings.doors import Dims, Rotary
from visionpos.errors import PositionError
from visionpos.geometry.bands import whole_turns
from visionpos.geometry.coords import CoordSpec
from visionpos.geometry.fields import check_fields
from visionpos.geometry.freqs import axial_freqs
from visionpos.geometry.ranges import check_least, check_theta
from visionpos.geometry.rotation import Pairing

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PeriodicRopeSpec:
    """Settings of periodic RoPE.

    Args:
        coords: numbering of tokens, in which the width of the panorama is a fixed length: unit "index" with extent
            "trained" and trained_shape (cells of the panorama), or unit "centred" (a width of 2). Two axes.
        theta: ladder base.
        axis_order: axis that owns the first half of the pairs; None is y, x.
        pairing: which channels turn together.
        least: bands with fewer turns around the panorama are slow; at least 0.5.
        slow: what becomes of them: "keep" leaves them as pretrained, with the seam they have; "still" stops them, and
            left and right edges meet exactly.

    Raises:
        PositionError: if the coordinates have no fixed width, or a word is unknown.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    kind: Literal["periodic_rope"] = "periodic_rope"
    coords: CoordSpec
    theta: float = 10000.0
    axis_order: tuple[int, int] | None = None
    pairing: Pairing = "half"
    least: float = 1.0
    slow: Literal["keep", "still"] = "keep"

    def __post_init__(self) -> None:
        check_fields(self)
        check_theta(self.theta)
        check_least(self.least)
        coords = self.coords
        trained = coords.unit == "index" and coords.extent == "trained"
        centred = coords.unit == "centred" and coords.extent != "index"
        if coords.axes != 2 or coords.normalize != "separate" or not (trained or centred):
            raise PositionError(
                f"coords are {coords}; two axes, normalize 'separate', and unit 'index' with extent 'trained' or unit "
                "'centred' are required, so that the panorama has one width at every resolution."
            )

    @property
    def circumference(self) -> float:
        """Return the width of the panorama in coordinate units."""
        shape, scale = self.coords.trained_shape, self.coords.scale
        width = float(shape[1]) if self.coords.unit == "index" and shape is not None else 2.0
        return width if scale is None else width * scale[1]


class PeriodicRope(Rotary):
    """Axial rotary encoding of a panorama; no parameters and no buffers.

    Scores see horizontal differences modulo the width in all bands that are not slow: a yaw of the panorama by whole
    cells leaves them alone. Jitter of the horizontal axis breaks the period while it acts; shift does not.

    Raises:
        PositionError: if the channels of a head are no multiple of 4.

    Example:
        >>> from visionpos.geometry.coords import CoordSpec
        >>> panorama = CoordSpec(extent="trained", trained_shape=(4, 8))
        >>> spec = PeriodicRopeSpec(coords=panorama, slow="still")
        >>> rope = PeriodicRope(spec, Dims(embed_dim=16, num_heads=1, depth=1))
        >>> (rope.freqs()[1] * 8 / (2 * torch.pi)).tolist()
        [0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]

    Reference:
        SpheRoPE (arXiv 2606.32033) and the circular RoPE of SHERPA (arXiv 2606.12213), from their descriptions: no code
        of either was at hand, so the threshold between fast and slow bands is a setting here.
    """

    spec: PeriodicRopeSpec

    def __init__(self, spec: PeriodicRopeSpec, dims: Dims) -> None:
        super().__init__()
        self.spec, self.dims = spec, dims
        self.freqs()

    def freqs(self, layer: int = 0, *, device: torch.device | None = None) -> Tensor:  # noqa: ARG002 (all layers alike)
        """Return `[2, pairs]` float32; the row of x is rounded."""
        spec = self.spec
        freqs = axial_freqs(
            self.dims.channels, theta=spec.theta, axis_order=spec.axis_order, device=device
        )
        around = whole_turns(freqs[1], spec.circumference, least=spec.least, slow=spec.slow)
        return torch.stack([freqs[0], around])
