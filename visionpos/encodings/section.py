"""Section RoPE: one ladder shared out to t, y and x, as M-RoPE does, inside a vision tower. GenLIP."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from visionpos.encodings.doors import Dims, Rotary
from visionpos.errors import PositionError
from visionpos.geometry.coords import CoordSpec
from visionpos.geometry.fields import check_choice, check_fields
from visionpos.geometry.freqs import Order
from visionpos.geometry.ranges import check_theta
from visionpos.geometry.rotation import PAIRINGS, PER_AXIS, Pairing
from visionpos.geometry.sections import section_freqs

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionRopeSpec:
    """Settings of section RoPE.

    Args:
        sections: pairs of t, y and x.
        theta: ladder base over all pairs of the head.
        order: "contiguous" runs (Qwen2-VL) or "interleaved" pairs (Qwen3-VL, GenLIP).
        clamp: interleave over all pairs of the head even where the sections do not fit, and let strides end with them:
            an axis may then get another count than its section. GenLIP's weights depend on it.
        coords: numbering of tokens. Three axes (t, y, x); or two, when time stands still: its pairs do not turn, and
            training jitter moves y and x alone.
        pairing: "half" or "adjacent".

    Raises:
        PositionError: if there are not three sections, or a word is unknown.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    kind: Literal["section_rope"] = "section_rope"
    sections: tuple[int, ...]
    theta: float = 10000.0
    order: Order = "interleaved"
    clamp: bool = False
    coords: CoordSpec = field(default_factory=CoordSpec)
    pairing: Pairing = "half"

    def __post_init__(self) -> None:
        check_fields(self)
        check_choice("pairing", self.pairing, tuple(p for p in PAIRINGS if p not in PER_AXIS))
        check_theta(self.theta)
        if len(self.sections) != 3 or self.coords.axes == 1:
            raise PositionError(
                f"sections are {self.sections} and coords have {self.coords.axes} axes; sections of t, y and x, and "
                "two or three axes are required."
            )
        least = 0 if self.clamp else 1
        if min(self.sections) < least or not any(self.sections[1:]):
            raise PositionError(
                f"sections are {self.sections} with clamp {self.clamp}; at least {least} each, and y or x above 0, are "
                "required. Read them from the checkpoint."
            )


class SectionRope(Rotary):
    """Rotary encoding of one ladder over three axes; it has no parameters and no buffers.

    Its strides make no two sections alike, so no reordering of weight rows turns it into an axial layout.

    Raises:
        PositionError: if the sections do not fit the head.

    Example:
        >>> from visionpos.geometry.grid import Grid
        >>> spec = SectionRopeSpec(sections=(8, 12, 12), clamp=True)
        >>> rope = SectionRope(spec, Dims(embed_dim=384, num_heads=6, depth=12))
        >>> (rope.freqs() != 0).sum(-1).tolist(), rope(Grid(3, 5)).cos.shape
        ([11, 10], torch.Size([15, 32]))

    Reference:
        Qwen2-VL (arXiv 2409.12191); GenLIP as in timm's RotaryEmbeddingMRope (layers/pos_embed_sincos.py).
    """

    spec: SectionRopeSpec

    def __init__(self, spec: SectionRopeSpec, dims: Dims) -> None:
        super().__init__()
        self.spec, self.dims = spec, dims
        turned = 2 * sum(spec.sections)
        if not spec.clamp and turned > dims.channels:
            raise PositionError(
                f"sections {spec.sections} turn {turned} channels and a head has {dims.channels}; at most head_dim can "
                "turn. Read the sections from the checkpoint, or pass clamp=True if it was trained with clamped ones."
            )
        self.freqs()

    def freqs(self, layer: int = 0, *, device: torch.device | None = None) -> Tensor:  # noqa: ARG002 (all layers alike)
        """Return `[axes, pairs]` float32: (t,) y, x."""
        spec = self.spec
        turned = self.dims.channels if spec.clamp else 2 * sum(spec.sections)
        freqs = section_freqs(
            turned,
            spec.sections,
            theta=spec.theta,
            order=spec.order,
            clamp=spec.clamp,
            device=device,
        )
        return freqs[-spec.coords.axes :]
