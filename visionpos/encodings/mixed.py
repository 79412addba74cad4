"""RoPE-Mixed: every channel pair of every head and layer turns along a direction it learns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from torch import nn

from visionpos.encodings.doors import Dims, Rotary
from visionpos.encodings.sources import check_form
from visionpos.errors import PositionError
from visionpos.geometry.coords import CoordSpec
from visionpos.geometry.fields import check_choice, check_fields
from visionpos.geometry.freqs import mixed_freqs
from visionpos.geometry.ranges import check_layer, check_theta
from visionpos.geometry.rotation import Pairing

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedRopeSpec:
    """Settings of RoPE-Mixed.

    Args:
        theta: ladder base of the start values, 10 in the paper.
        coords: numbering of tokens, extent and training jitter; two axes.
        pairing: "adjacent" as in the released weights, or "half".
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    kind: Literal["mixed_rope"] = "mixed_rope"
    theta: float = 10.0
    coords: CoordSpec = field(default_factory=CoordSpec)
    pairing: Pairing = "adjacent"

    def __post_init__(self) -> None:
        check_fields(self)
        check_choice("pairing", self.pairing, ("adjacent", "half"))
        check_theta(self.theta)


class MixedRope(Rotary):
    """Learned two-axis rotary encoding.

    Parameter `frequencies [depth, num_heads, 2, pairs]`, radians a cell, axes y, x; keep it out of weight decay. Angles
    are formed one layer at a time (`[num_heads, n, pairs]`), never for all layers at once.

    Raises:
        PositionError: if a head has no multiple of 4 channels, or coords have not two axes.

    Example:
        >>> from visionpos.geometry.grid import Grid
        >>> rope = MixedRope(MixedRopeSpec(), Dims(embed_dim=384, num_heads=6, depth=12, prefix=1))
        >>> rope(Grid(3, 5), layer=11).cos.shape
        torch.Size([6, 15, 32])

    Reference:
        RoPE-ViT (arXiv 2403.13298), naver-ai/rope-vit; timm's RotaryEmbeddingMixed, which stores (2, depth, heads,
        pairs) with x first: see `from_timm`. `rotation(angles(points))` has timm's bits; over a grid in eager mode on
        the CPU a product of turns takes their place, within 1e-5 and nearer to float64 (`over`). A cast of the model
        to bfloat16 rounds these learned frequencies like any weight; train and keep them in float32.
    """

    spec: MixedRopeSpec
    frequencies: nn.Parameter

    def __init__(
        self, spec: MixedRopeSpec, dims: Dims, *, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.spec, self.dims = spec, dims
        if spec.coords.axes != 2:
            raise PositionError(
                f"coords have {spec.coords.axes} axes; RoPE-Mixed needs axes=2 (y, x)."
            )
        start = mixed_freqs(
            dims.channels,
            num_heads=dims.num_heads,
            depth=dims.depth,
            theta=spec.theta,
            generator=generator,
        )
        self.frequencies = nn.Parameter(start)

    @property
    def layerwise(self) -> bool:
        """Return True: every layer learns its own frequencies."""
        return True

    def freqs(self, layer: int = 0, *, device: torch.device | None = None) -> Tensor:
        """Return `[num_heads, 2, pairs]` of one layer, float32 or better."""
        check_layer(layer, self.dims.depth)
        learned = self.frequencies[layer]
        return learned if device is None else learned.to(device)

    @staticmethod
    def from_rope_vit(freqs: Tensor, *, num_heads: int) -> Tensor:
        """Return naver-ai/rope-vit's `freqs (2, depth, heads * pairs)`, x first, in the order of `frequencies`.

        Swin blocks hold `rope_freqs (2, heads, pairs)` each: stack them on dim 1 and flatten the last two dims first.

        Raises:
            PositionError: if freqs have another shape, or their last dim is no whole number of heads.
        """
        check_form(freqs, "freqs", (2, "depth", "heads * pairs"))
        if num_heads < 1 or freqs.shape[2] % num_heads:
            raise PositionError(
                f"num_heads is {num_heads} and freqs hold {freqs.shape[2]} pairs a layer; whole heads are required. "
                "Pass the heads of the model that wrote them."
            )
        heads: Tensor = freqs.unflatten(2, (num_heads, -1))
        return MixedRope.from_timm(heads)

    @staticmethod
    def from_timm(freqs: Tensor) -> Tensor:
        """Return timm's `rope.freqs (2, depth, heads, pairs)`, x first, in the order of `frequencies`.

        Raises:
            PositionError: if freqs have another shape.
        """
        check_form(freqs, "freqs", (2, "depth", "heads", "pairs"))
        return freqs.permute(1, 2, 0, 3).flip(2).contiguous()
