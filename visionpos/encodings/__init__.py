"""The encodings: one file a scheme, each a frozen Spec and the module built from it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from visionpos.encodings.abswin import AbsWin, AbsWinSpec
from visionpos.encodings.alibi import Alibi, AlibiSpec
from visionpos.encodings.axial import AxialRope, AxialRopeSpec
from visionpos.encodings.circle import CircleRope, CircleRopeSpec
from visionpos.encodings.coat import ConvRelative, ConvRelativeSpec
from visionpos.encodings.comrope import Comrope, ComropeSpec
from visionpos.encodings.conditional import Peg, PegSpec
from visionpos.encodings.convit import Gpsa, GpsaSpec
from visionpos.encodings.decomposed import DecomposedBias, DecomposedBiasSpec
from visionpos.encodings.doors import (
    Additive,
    Biasing,
    Conditional,
    Dims,
    Extending,
    QueryBiasing,
    Rotary,
    Turning,
)
from visionpos.encodings.factorized import Factorized, FactorizedSpec
from visionpos.encodings.fire import Fire, FireSpec
from visionpos.encodings.fourier import Fourier, FourierSpec
from visionpos.encodings.golden import GoldenRope, GoldenRopeSpec
from visionpos.encodings.kerple import Kerple, KerpleSpec
from visionpos.encodings.learnable_fourier import LearnableFourier, LearnableFourierSpec
from visionpos.encodings.learned import LearnedSpec, LearnedTable
from visionpos.encodings.liere import Liere, LiereSpec
from visionpos.encodings.log_bias import LogBias, LogBiasSpec
from visionpos.encodings.lookhere import LookHere, LookHereSpec
from visionpos.encodings.mixed import MixedRope, MixedRopeSpec
from visionpos.encodings.offset_table import OffsetTable, OffsetTableSpec
from visionpos.encodings.pape import Pape, PapeSpec
from visionpos.encodings.periodic import PeriodicRope, PeriodicRopeSpec
from visionpos.encodings.prompt import PromptEncoder, PromptSpec
from visionpos.encodings.section import SectionRope, SectionRopeSpec
from visionpos.encodings.sincos import SinCos, SinCosSpec
from visionpos.encodings.sine import Sine, SineSpec
from visionpos.encodings.spatiotemporal import SpatioTemporal, SpatioTemporalSpec
from visionpos.encodings.string_rope import StringRope, StringRopeSpec
from visionpos.encodings.swin_table import SwinTable, SwinTableSpec
from visionpos.encodings.t5 import T5Bias, T5BiasSpec
from visionpos.errors import PositionError

EncodingSpec = (
    AbsWinSpec
    | AlibiSpec
    | AxialRopeSpec
    | CircleRopeSpec
    | ComropeSpec
    | ConvRelativeSpec
    | DecomposedBiasSpec
    | FactorizedSpec
    | FireSpec
    | FourierSpec
    | GoldenRopeSpec
    | GpsaSpec
    | KerpleSpec
    | LearnableFourierSpec
    | LearnedSpec
    | LiereSpec
    | LogBiasSpec
    | LookHereSpec
    | MixedRopeSpec
    | OffsetTableSpec
    | PapeSpec
    | PegSpec
    | PeriodicRopeSpec
    | PromptSpec
    | SectionRopeSpec
    | SinCosSpec
    | SineSpec
    | SpatioTemporalSpec
    | StringRopeSpec
    | SwinTableSpec
    | T5BiasSpec
)
Encoding = (
    Additive
    | Rotary
    | Biasing
    | QueryBiasing
    | Conditional
    | ConvRelative
    | Gpsa
    | PromptEncoder
    | Extending
    | Turning
)

_MODULES: dict[Any, Any] = {  # spec class -> module class
    AbsWinSpec: AbsWin,
    AlibiSpec: Alibi,
    AxialRopeSpec: AxialRope,
    CircleRopeSpec: CircleRope,
    ComropeSpec: Comrope,
    ConvRelativeSpec: ConvRelative,
    DecomposedBiasSpec: DecomposedBias,
    FactorizedSpec: Factorized,
    FireSpec: Fire,
    FourierSpec: Fourier,
    GoldenRopeSpec: GoldenRope,
    GpsaSpec: Gpsa,
    KerpleSpec: Kerple,
    LearnableFourierSpec: LearnableFourier,
    LearnedSpec: LearnedTable,
    LiereSpec: Liere,
    LogBiasSpec: LogBias,
    LookHereSpec: LookHere,
    MixedRopeSpec: MixedRope,
    OffsetTableSpec: OffsetTable,
    PapeSpec: Pape,
    PegSpec: Peg,
    PeriodicRopeSpec: PeriodicRope,
    PromptSpec: PromptEncoder,
    SectionRopeSpec: SectionRope,
    SinCosSpec: SinCos,
    SineSpec: Sine,
    SpatioTemporalSpec: SpatioTemporal,
    StringRopeSpec: StringRope,
    SwinTableSpec: SwinTable,
    T5BiasSpec: T5Bias,
}


def spec_types() -> dict[str, type[EncodingSpec]]:
    """Return kind -> Spec class of every encoding."""
    return {
        str(next(f.default for f in fields(spec) if f.name == "kind")): spec for spec in _MODULES
    }


def build(spec: EncodingSpec, dims: Dims) -> Encoding:
    """Return the module that a spec describes, for a model of these sizes.

    Args:
        spec: one of the Spec classes.
        dims: sizes of the model.

    Raises:
        PositionError: if spec is no Spec, or the sizes do not fit it.

    Example:
        >>> build(
        ...     AxialRopeSpec(theta=100.0), Dims(embed_dim=384, num_heads=6, depth=12, prefix=1)
        ... ).pairing
        'adjacent'
    """
    if type(spec) not in _MODULES:
        known = ", ".join(sorted(kind.__name__ for kind in _MODULES))
        raise PositionError(f"spec is {spec!r}; one of {known} is required.")
    module: Encoding = _MODULES[type(spec)](spec, dims)
    return module


__all__ = [
    "AbsWin",
    "AbsWinSpec",
    "Additive",
    "Alibi",
    "AlibiSpec",
    "AxialRope",
    "AxialRopeSpec",
    "Biasing",
    "CircleRope",
    "CircleRopeSpec",
    "Comrope",
    "ComropeSpec",
    "Conditional",
    "ConvRelative",
    "ConvRelativeSpec",
    "DecomposedBias",
    "DecomposedBiasSpec",
    "Dims",
    "Encoding",
    "EncodingSpec",
    "Extending",
    "Factorized",
    "FactorizedSpec",
    "Fire",
    "FireSpec",
    "Fourier",
    "FourierSpec",
    "GoldenRope",
    "GoldenRopeSpec",
    "Gpsa",
    "GpsaSpec",
    "Kerple",
    "KerpleSpec",
    "LearnableFourier",
    "LearnableFourierSpec",
    "LearnedSpec",
    "LearnedTable",
    "Liere",
    "LiereSpec",
    "LogBias",
    "LogBiasSpec",
    "LookHere",
    "LookHereSpec",
    "MixedRope",
    "MixedRopeSpec",
    "OffsetTable",
    "OffsetTableSpec",
    "Pape",
    "PapeSpec",
    "Peg",
    "PegSpec",
    "PeriodicRope",
    "PeriodicRopeSpec",
    "PromptEncoder",
    "PromptSpec",
    "QueryBiasing",
    "Rotary",
    "SectionRope",
    "SectionRopeSpec",
    "SinCos",
    "SinCosSpec",
    "Sine",
    "SineSpec",
    "SpatioTemporal",
    "SpatioTemporalSpec",
    "StringRope",
    "StringRopeSpec",
    "SwinTable",
    "SwinTableSpec",
    "T5Bias",
    "T5BiasSpec",
    "Turning",
    "build",
    "spec_types",
]
