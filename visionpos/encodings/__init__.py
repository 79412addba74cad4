"""The encodings: one file a scheme, each a frozen Spec and the module built from it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from visionpos.encodings.axial import AxialRope, AxialRopeSpec
from visionpos.encodings.doors import (
    Additive,
    Biasing,
    Conditional,
    Dims,
    QueryBiasing,
    Rotary,
)
from visionpos.encodings.learned import LearnedSpec, LearnedTable
from visionpos.encodings.mixed import MixedRope, MixedRopeSpec
from visionpos.encodings.sincos import SinCos, SinCosSpec
from visionpos.errors import PositionError

EncodingSpec = AxialRopeSpec | LearnedSpec | MixedRopeSpec | SinCosSpec
Encoding = Additive | Rotary | Biasing | QueryBiasing | Conditional

_MODULES: dict[Any, Any] = {  # spec class -> module class
    AxialRopeSpec: AxialRope,
    LearnedSpec: LearnedTable,
    MixedRopeSpec: MixedRope,
    SinCosSpec: SinCos,
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
    "Additive",
    "AxialRope",
    "AxialRopeSpec",
    "Biasing",
    "Conditional",
    "Dims",
    "Encoding",
    "EncodingSpec",
    "LearnedSpec",
    "LearnedTable",
    "MixedRope",
    "MixedRopeSpec",
    "QueryBiasing",
    "Rotary",
    "SinCos",
    "SinCosSpec",
    "build",
    "spec_types",
]
