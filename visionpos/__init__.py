"""visionpos: positional encodings for vision and multimodal transformers.

Geometry and encodings stand here; `visionpos.retrofit` plugs them into timm models, `visionpos.vlm` plans VLM token
streams, `visionpos.config` reads YAML, `visionpos.checkpoint` reads and writes weights. Importing this costs torch
alone; an encoding is imported when its name is first used.
"""

from typing import TYPE_CHECKING, Any

from visionpos.attention import norm_rotate, rotate, rotate_, rotate_at, rotate_packed_, turn
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
    sample_table,
    section_axes,
    section_freqs,
)

if TYPE_CHECKING:
    from visionpos.encodings import (
        AbsWinSpec,
        AlibiSpec,
        AxialRope,
        AxialRopeSpec,
        CircleRopeSpec,
        ComropeSpec,
        ConvRelativeSpec,
        CopeSpec,
        DapeSpec,
        DebertaSpec,
        DecomposedBiasSpec,
        Dims,
        FactorizedSpec,
        FireSpec,
        FourierSpec,
        GoldenRopeSpec,
        GpsaSpec,
        KerpleSpec,
        LearnableFourierSpec,
        LearnedSpec,
        LearnedTable,
        LiereSpec,
        LogBiasSpec,
        LookHereSpec,
        MixedRope,
        MixedRopeSpec,
        OffsetTableSpec,
        PapeSpec,
        PegSpec,
        PeriodicRopeSpec,
        PromptSpec,
        SandwichSpec,
        SectionRopeSpec,
        ShawSpec,
        SinCos,
        SinCosSpec,
        SineSpec,
        SpatioTemporalSpec,
        StringRopeSpec,
        SwinTableSpec,
        T5BiasSpec,
        TransformerXlSpec,
        TupeSpec,
        build,
    )

__version__ = "0.1.0"

__all__ = [
    "RECIPES",
    "AbsWinSpec",
    "AlibiSpec",
    "AxialRope",
    "AxialRopeSpec",
    "CircleRopeSpec",
    "ComropeSpec",
    "ConfigError",
    "ConvRelativeSpec",
    "CoordSpec",
    "CopeSpec",
    "DapeSpec",
    "DebertaSpec",
    "DecomposedBiasSpec",
    "Dims",
    "FactorizedSpec",
    "FireSpec",
    "FourierSpec",
    "GoldenRopeSpec",
    "GpsaSpec",
    "Grid",
    "KerpleSpec",
    "Layout",
    "LearnableFourierSpec",
    "LearnedSpec",
    "LearnedTable",
    "LiereSpec",
    "LogBiasSpec",
    "LookHereSpec",
    "MixedRope",
    "MixedRopeSpec",
    "OffsetTableSpec",
    "PapeSpec",
    "PegSpec",
    "PeriodicRopeSpec",
    "PositionError",
    "PromptSpec",
    "Recipe",
    "Rotation",
    "SandwichSpec",
    "SectionRopeSpec",
    "ShawSpec",
    "SinCos",
    "SinCosSpec",
    "SineSpec",
    "SpatioTemporalSpec",
    "StringRopeSpec",
    "SwinTableSpec",
    "T5BiasSpec",
    "TransformerXlSpec",
    "TupeSpec",
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
    "norm_rotate",
    "offsets",
    "period_freqs",
    "resample",
    "rotate",
    "rotate_",
    "rotate_at",
    "rotate_packed_",
    "sample_table",
    "section_axes",
    "section_freqs",
    "turn",
]

if not TYPE_CHECKING:  # a type checker would take any name as given

    def __getattr__(name: str) -> Any:
        """Return a public name of `visionpos.encodings`, whose files are imported one by one (PEP 562)."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from visionpos import encodings

        globals()[name] = value = getattr(encodings, name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
