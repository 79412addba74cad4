"""visionpos: positional encodings for vision and multimodal transformers.

Geometry and encodings stand here; `visionpos.retrofit` plugs them into timm models, `visionpos.vlm` plans VLM token
streams, `visionpos.config` reads YAML, `visionpos.checkpoint` reads and writes weights. Importing this costs torch
alone.
"""

from visionpos.encodings import (
    AxialRope,
    AxialRopeSpec,
    Dims,
    LearnedSpec,
    LearnedTable,
    MixedRope,
    MixedRopeSpec,
    SinCos,
    SinCosSpec,
    build,
)
from visionpos.errors import ConfigError, PositionError
from visionpos.geometry import (
    RECIPES,
    CoordSpec,
    Grid,
    Layout,
    Recipe,
    Rotation,
    angles,
    augment,
    axial_freqs,
    channel_permutation,
    convert,
    coordinates,
    gaussian_freqs,
    ladder,
    mixed_freqs,
    offsets,
    period_freqs,
    resample,
    rotate,
    sample_table,
    section_axes,
    section_freqs,
)

__version__ = "0.1.0"

__all__ = [
    "RECIPES",
    "AxialRope",
    "AxialRopeSpec",
    "ConfigError",
    "CoordSpec",
    "Dims",
    "Grid",
    "Layout",
    "LearnedSpec",
    "LearnedTable",
    "MixedRope",
    "MixedRopeSpec",
    "PositionError",
    "Recipe",
    "Rotation",
    "SinCos",
    "SinCosSpec",
    "__version__",
    "angles",
    "augment",
    "axial_freqs",
    "build",
    "channel_permutation",
    "convert",
    "coordinates",
    "gaussian_freqs",
    "ladder",
    "mixed_freqs",
    "offsets",
    "period_freqs",
    "resample",
    "rotate",
    "sample_table",
    "section_axes",
    "section_freqs",
]
