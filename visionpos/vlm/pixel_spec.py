"""PixelSpec: what a family's YAML says of pixels, how they are resampled, padded, normalised and cut into patches.

No pixels and no tensors here; `visionpos.vlm.pixels` does what it says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from visionpos.errors import ConfigError

Kernel = Literal["bilinear", "bicubic", "lanczos"]
Engine = Literal["torchvision", "pillow", "opencv"]
Triple = tuple[float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResampleSpec:
    """How pixels are resized.

    Args:
        kernel: "bilinear", "bicubic", or "lanczos" (on the CPU).
        engine: whose code: "torchvision", as the fast processors of transformers; "pillow", as its slow ones and most
            training code; or "opencv" on float32, which neither antialiases nor rounds (mistral_common). The first two
            differ by a step where a picture is smooth, by twenty and more where a cubic kernel overshoots 0..255: they
            clamp between passes in another order.
        antialias: widen the kernel when shrinking. Pillow always does, OpenCV never.
        floats: do not round to 8 bits, and let a cubic kernel overshoot 0..255.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    kernel: Kernel = "bicubic"
    engine: Engine = "torchvision"
    antialias: bool = True
    floats: bool = False

    def __post_init__(self) -> None:
        if self.engine == "opencv" and (self.antialias or not self.floats):
            raise ConfigError(
                f"resample has engine opencv, antialias {self.antialias} and floats {self.floats}; OpenCV resizes "
                "floats without antialiasing. Set antialias: false and floats: true."
            )
        if self.engine == "pillow" and (self.floats or not self.antialias):
            raise ConfigError(
                f"resample has engine pillow, antialias {self.antialias} and floats {self.floats}; Pillow antialiases "
                "8-bit pixels. Leave both out, or use torchvision."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchSpec:
    """How the views are flattened for an encoder that is given patches.

    Args:
        order: "raster": row by row; "blocks": the patches that merge into one token are neighbours.
        vector: axes inside a patch, the last one fastest: "cyx" or "yxc". Frames of a time step stand before y.
        form: "rows": `[n, values]`; "patches": `[n, c, y, x]`; "strip": `[1, c, y, n * x]`, all patches side by side.
        temporal: frames a patch; a still image is repeated.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    order: Literal["raster", "blocks"] = "raster"
    vector: Literal["cyx", "yxc"] = "cyx"
    form: Literal["rows", "patches", "strip"] = "rows"
    temporal: int = 1

    def __post_init__(self) -> None:
        if self.temporal < 1 or (
            self.form != "rows" and (self.vector, self.temporal) != ("cyx", 1)
        ):
            raise ConfigError(
                f"patches has form {self.form!r}, vector {self.vector!r} and temporal {self.temporal}; temporal of at "
                "least 1, and cyx of one frame for patches and strip, are required. Correct them."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelSpec:
    """From 8-bit pixels to what the encoder is given: `(value / 255 - mean) / std`.

    Means are those of released checkpoints as far as known, which the classes of transformers do not always default to
    (InternVL, LLaVA-OneVision, Qwen3-VL).

    Args:
        mean: of red, green and blue, with white = 1.
        std: likewise, above 0.
        pad: colour of padding in 8-bit steps, laid before normalisation.
        resample: how pixels are resized.
        stepwise: every step of `views.size` resamples, instead of one resampling to the last size.
        whole: how the whole-image view is resized, where it differs; None: as everything else.
        patches: how views are flattened; None: the encoder is given pictures.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    mean: Triple
    std: Triple
    pad: tuple[int, int, int] = (0, 0, 0)
    resample: ResampleSpec = ResampleSpec()
    stepwise: bool = False
    whole: ResampleSpec | None = None
    patches: PatchSpec | None = None

    def __post_init__(self) -> None:
        if min(self.std) <= 0 or not all(0 <= value <= 255 for value in self.pad):
            raise ConfigError(
                f"pixels has std {self.std} and pad {self.pad}; std above 0 and pad in 0..255 are required. "
                "Correct them."
            )
