"""Recipes: how each source resizes its position tables, by name, because they disagree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from visionpos.errors import PositionError, did_you_mean
from visionpos.geometry.fields import check_fields

Kernel = Literal["bicubic", "bilinear", "nearest"]
Sampling = Literal["half_pixel", "align_corners", "geometric"]
Border = Literal["edge", "zero"]
Boundaries = Literal["exact", "quotient", "reciprocal"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How one source resizes its position tables.

    Args:
        kernel: interpolation kernel; "nearest" is the integer bucket floor(i * source / target).
        coefficient: the cubic's a: -0.5 wherever PyTorch antialiases (even when enlarging), -0.75 where it does not.
        antialias: widen the kernel by the reduction factor, as PIL does.
        sampling: "half_pixel" aligns cell edges, "align_corners" aligns the centres of the outer cells, "geometric"
            spaces the samples of a relative table so that short offsets keep their place (BEiT).
        drift: DINOv2's 0.1: the scale is source / (target + drift) instead of source / target.
        border: what a tap outside the table reads without antialias: the "edge" cell again, or "zero".
        boundaries: how the nearest bucket is found: "exact" in whole numbers; or in float32, against the boundaries
            k / source, from the "quotient" i / target or from i times the "reciprocal" of target, which misplace
            some cells by one.

    Raises:
        PositionError: for a combination that no source uses.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    kernel: Kernel = "bicubic"
    coefficient: float = -0.5
    antialias: bool = True
    sampling: Sampling = "half_pixel"
    drift: float = 0.0
    border: Border = "edge"
    boundaries: Boundaries = "exact"

    def __post_init__(self) -> None:
        check_fields(self)
        if self.drift < 0:
            raise PositionError(
                f"drift is {self.drift}; cells of at least 0 are required (0.1 in DINOv2)."
            )
        if self.antialias and (
            self.sampling != "half_pixel" or self.kernel == "nearest" or self.drift
        ):
            raise PositionError(
                f"antialias with kernel {self.kernel!r}, sampling {self.sampling!r} and drift {self.drift} is no "
                "published recipe; antialiasing needs half_pixel sampling without drift. Pass antialias=False."
            )
        if self.sampling == "geometric" and self.kernel != "bilinear":
            raise PositionError(
                f"geometric sampling with kernel {self.kernel!r} is no published recipe; use kernel='bilinear'."
            )
        if self.boundaries != "exact" and self.kernel != "nearest":
            raise PositionError(
                f"boundaries {self.boundaries!r} with kernel {self.kernel!r} mean nothing; only kernel='nearest' has "
                "buckets. Leave boundaries at 'exact'."
            )
        if self.border == "zero" and (self.antialias or self.kernel == "nearest"):
            raise PositionError(
                f"border 'zero' with kernel {self.kernel!r} and antialias {self.antialias} is no published recipe; it "
                "needs taps without antialias. Pass antialias=False and kernel='bilinear' or 'bicubic'."
            )


_NO_AA = Recipe(coefficient=-0.75, antialias=False)
_PINNED = Recipe(kernel="bilinear", antialias=False, sampling="align_corners")

RECIPES: dict[str, Recipe] = {
    "timm": Recipe(),  # resample_abs_pos_embed: ViT, DeiT, EVA, BEiT
    "dinov2": Recipe(coefficient=-0.75, antialias=False, drift=0.1),  # hub models without registers
    "dinov2_reg": Recipe(),  # hub models with registers
    "hf_dinov2": _NO_AA,  # transformers dinov2, ViT, CLIP, SigLIP
    "mae": _NO_AA,  # MAE, DeiT, RoPE-ViT
    "torchvision": Recipe(coefficient=-0.75, antialias=False, sampling="align_corners"),
    "big_vision": _PINNED,  # scipy zoom of order 1 at load time
    "flexivit": Recipe(kernel="bilinear"),  # jax.image.resize linear
    "siglip2_naflex": Recipe(kernel="bilinear"),
    "qwen3_vl": _PINNED,
    "perception_encoder": Recipe(kernel="bilinear", antialias=False),
    "paddleocr_vl": Recipe(kernel="bilinear", antialias=False),
    "kimi_k25": _NO_AA,
    "swin": _NO_AA,  # relative table of Swin v1, per head
    "sam": Recipe(kernel="bilinear", antialias=False),  # 1-D relative tables of SAM and ViTDet
    "sam2": _NO_AA,  # global table of Hiera in SAM 2
    "hiera": Recipe(),  # global table of Hiera abswin
    "beit": Recipe(kernel="bilinear", antialias=False, sampling="geometric"),
    "hf_beit": Recipe(kernel="bilinear", antialias=False),  # relative table of transformers' BEiT
    "muse": Recipe(kernel="bilinear", antialias=False, border="zero"),  # border cells lose weight
    "nearest": Recipe(kernel="nearest", antialias=False),  # what the bucket rules below intend
    # Idefics 2 and 3, SmolVLM, Phi-4: float32 i * (1 / h) against float32 boundaries.
    "nearest_idefics2": Recipe(kernel="nearest", antialias=False, boundaries="reciprocal"),
    # transformers' get_vision_nearest_position_ids (its MiniCPM-V ports): float32 i / h.
    "nearest_transformers": Recipe(kernel="nearest", antialias=False, boundaries="quotient"),
}


def recipe_of(recipe: str | Recipe) -> Recipe:
    """Return the recipe of a name, or the recipe itself.

    Raises:
        PositionError: listing the known names.
    """
    if isinstance(recipe, Recipe):
        return recipe
    given: Any = recipe
    if not isinstance(given, str) or given not in RECIPES:
        raise PositionError(
            f"recipe is {recipe!r}; it must be a Recipe or one of {', '.join(sorted(RECIPES))}."
            f"{did_you_mean(recipe, RECIPES)}"
        )
    return RECIPES[recipe]
