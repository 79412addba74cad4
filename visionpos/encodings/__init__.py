"""The encodings: one file a scheme, each a frozen Spec and the module built from it.

A scheme's file is imported when one of its names is first asked for: whoever uses one encoding waits for one.
"""

from __future__ import annotations

from functools import reduce
from importlib import import_module
from operator import or_
from typing import TYPE_CHECKING, Any

from visionpos.encodings.schemes import DOORS, FILES, SCHEMES
from visionpos.errors import PositionError, did_you_mean

if TYPE_CHECKING:
    from visionpos.encodings.abswin import AbsWin, AbsWinSpec
    from visionpos.encodings.alibi import Alibi, AlibiSpec
    from visionpos.encodings.axial import AxialRope, AxialRopeSpec
    from visionpos.encodings.circle import CircleRope, CircleRopeSpec
    from visionpos.encodings.coat import ConvRelative, ConvRelativeSpec
    from visionpos.encodings.comrope import Comrope, ComropeSpec
    from visionpos.encodings.conditional import Peg, PegSpec
    from visionpos.encodings.convit import Gpsa, GpsaSpec
    from visionpos.encodings.cope import Cope, CopeSpec
    from visionpos.encodings.dape import Dape, DapeSpec
    from visionpos.encodings.deberta import Deberta, DebertaSpec
    from visionpos.encodings.decomposed import DecomposedBias, DecomposedBiasSpec
    from visionpos.encodings.doors import (
        Additive,
        Biasing,
        Conditional,
        Dims,
        Extending,
        PairBiasing,
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
    from visionpos.encodings.sandwich import Sandwich, SandwichSpec
    from visionpos.encodings.section import SectionRope, SectionRopeSpec
    from visionpos.encodings.shaw import Shaw, ShawSpec
    from visionpos.encodings.sincos import SinCos, SinCosSpec
    from visionpos.encodings.sine import Sine, SineSpec
    from visionpos.encodings.spatiotemporal import SpatioTemporal, SpatioTemporalSpec
    from visionpos.encodings.string_rope import StringRope, StringRopeSpec
    from visionpos.encodings.swin_table import SwinTable, SwinTableSpec
    from visionpos.encodings.t5 import T5Bias, T5BiasSpec
    from visionpos.encodings.transformer_xl import TransformerXl, TransformerXlSpec
    from visionpos.encodings.tupe import Tupe, TupeSpec

    EncodingSpec = (
        AbsWinSpec
        | AlibiSpec
        | AxialRopeSpec
        | CircleRopeSpec
        | ComropeSpec
        | ConvRelativeSpec
        | CopeSpec
        | DapeSpec
        | DebertaSpec
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
        | SandwichSpec
        | SectionRopeSpec
        | ShawSpec
        | SinCosSpec
        | SineSpec
        | SpatioTemporalSpec
        | StringRopeSpec
        | SwinTableSpec
        | T5BiasSpec
        | TransformerXlSpec
        | TupeSpec
    )
    Encoding = (
        Additive
        | Rotary
        | Biasing
        | QueryBiasing
        | PairBiasing
        | Conditional
        | ConvRelative
        | Gpsa
        | PromptEncoder
        | Extending
        | Turning
    )

_UNIONS = {
    "EncodingSpec": tuple(spec for _, spec, _ in SCHEMES.values()),
    "Encoding": (*DOORS, "ConvRelative", "Gpsa", "PromptEncoder"),
}

if not TYPE_CHECKING:  # a type checker would take any name as given

    def __getattr__(name: str) -> Any:
        """Return a public name, importing the file that holds it (PEP 562)."""
        if name in FILES:
            value = getattr(import_module(f"{__name__}.{FILES[name]}"), name)
        elif name in _UNIONS:
            value = reduce(or_, map(__getattr__, _UNIONS[name]))
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def spec_type(kind: object) -> type[EncodingSpec]:
    """Return the Spec class of a kind, importing no other encoding.

    Raises:
        PositionError: if there is no such kind.

    Example:
        >>> spec_type("axial_rope").__name__
        'AxialRopeSpec'
    """
    if not isinstance(kind, str) or kind not in SCHEMES:
        raise PositionError(
            f"kind is {kind!r}; it must be one of {', '.join(SCHEMES)}.{did_you_mean(kind, SCHEMES)}"
        )
    file, name, _ = SCHEMES[kind]
    found: type[EncodingSpec] = getattr(import_module(f"{__name__}.{file}"), name)
    return found


def spec_types() -> dict[str, type[EncodingSpec]]:
    """Return kind -> Spec class of every encoding."""
    return {kind: spec_type(kind) for kind in SCHEMES}


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
    given: Any = spec
    if isinstance(given, str):
        raise PositionError(
            f"spec is {given!r}, a name; a Spec is required. Pass visionpos.config.load_encoding({given!r}) for a "
            "shipped encoding."
        )
    kind = str(getattr(spec, "kind", ""))
    if kind not in SCHEMES or type(spec) is not spec_type(kind):
        known = ", ".join(sorted(name for _, name, _ in SCHEMES.values()))
        raise PositionError(
            f"spec is {spec!r}; one of {known} is required. A shipped one comes from config.load_encoding(name)."
        )
    if not isinstance(dims, import_module(f"{__name__}.doors").Dims):
        raise PositionError(
            f"dims is {dims!r}; a Dims is required. Write Dims(embed_dim=384, num_heads=6, depth=12)."
        )
    file, _, name = SCHEMES[kind]
    module: Encoding = getattr(import_module(f"{__name__}.{file}"), name)(spec, dims)
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
    "Cope",
    "CopeSpec",
    "Dape",
    "DapeSpec",
    "Deberta",
    "DebertaSpec",
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
    "PairBiasing",
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
    "Sandwich",
    "SandwichSpec",
    "SectionRope",
    "SectionRopeSpec",
    "Shaw",
    "ShawSpec",
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
    "TransformerXl",
    "TransformerXlSpec",
    "Tupe",
    "TupeSpec",
    "Turning",
    "build",
    "spec_type",
    "spec_types",
]
