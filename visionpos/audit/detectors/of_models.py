"""Detectors on models: the seam table says where positions are; what is measured is what the model does.

The model is put into eval mode and its weights are moved for a moment; both are as they were afterwards.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from visionpos.audit.detectors import model_states, of_encodings
from visionpos.audit.detectors.crops import image_for, ran
from visionpos.audit.detectors.finding import Check, UnfitError, judged
from visionpos.audit.detectors.model_parts import ALIKE, quiet, rope_of, table_of, worst_of
from visionpos.audit.detectors.tables import axis_order, class_token_offset, missing_antialias
from visionpos.audit.detectors.taps import norms_at_first_attention
from visionpos.audit.detectors.turning import NORM_DRIFT, TABLE_ERROR
from visionpos.audit.result import Found
from visionpos.encodings import Rotary, Turning, build
from visionpos.geometry.grid import Grid
from visionpos.geometry.recipes import recipe_of
from visionpos.geometry.resample import resample
from visionpos.retrofit import attachments, dims_of, recipe_for, spec_of_rope
from visionpos.retrofit.rope import own_rope
from visionpos.retrofit.seams import class_row
from visionpos.retrofit.tables import Table, tables_of

_UNEQUAL = (3, 5)


def encodings_of(model: nn.Module) -> list[Any]:
    """Return what is attached, and the encoding that the model's own rotation is.

    Raises:
        UnfitError: if there is neither.
    """
    found = [one for part in attachments(model).values() for one in part.encodings]
    rope = None if class_row(model) is None else own_rope(model)
    spec = None if rope is None else spec_of_rope(rope)
    if spec is not None:
        found.append(build(spec, dims_of(model)))
    if not found:
        raise UnfitError("it has no encoding that is known as a Spec")
    return found


def _each(name: str) -> Callable[[nn.Module, int], Found]:
    """Return a look at everything attached, and at the model's own rotation, by the detector of encodings."""

    def look(model: nn.Module, seed: int) -> Found:
        said, reason = [], ""
        for one in encodings_of(model):
            try:
                said.append(of_encodings.LOOKS[name](one, seed))
            except UnfitError as error:
                reason = str(error)
        if not said:
            raise UnfitError(reason)
        return worst_of(said)

    return look


def pairing_of(model: nn.Module, seed: int) -> Found:
    """Compare the lengths of q and k where they leave the projections and where they meet."""
    parts = [one for part in attachments(model).values() for one in part.encodings]
    if not any(isinstance(one, (Rotary, Turning)) for one in parts):
        rope_of(model)
    with quiet(model), torch.no_grad():
        before, after = norms_at_first_attention(model, lambda: ran(model, image_for(model, seed)))
    drift = float((after / before - 1).abs().max())
    check = Check(
        value=drift,
        threshold=NORM_DRIFT,
        wrong=f"lengths of q and k drift by {drift:.2g} in the first attention: table and attention pair channels "
        "differently",
        remedy="Give the table and the attention the same pairing (rotate_half).",
    )
    return judged("pairing_mismatch", [check], "q and k keep their lengths: they are rotated")


def precision_of(model: nn.Module, seed: int) -> Found:  # noqa: ARG001
    """Compare the rotary table of the model in bfloat16 with that of the same weights in float64."""
    rope = rope_of(model)
    with torch.no_grad():
        exact = table_of(copy.deepcopy(rope).double(), ALIKE[0])
        cast = table_of(copy.deepcopy(rope).to(torch.bfloat16), ALIKE[0]).double()
    if exact.shape != cast.shape:
        raise UnfitError("its table has another size in another dtype")
    error = float((exact - cast).abs().max())
    check = Check(
        value=error,
        threshold=TABLE_ERROR,
        wrong=f"in bfloat16, cosines and sines of its rotary encoding are off by {error:.2g}",
        remedy="Keep frequencies and angles in float32 when the model is cast.",
    )
    return judged("precision", [check], f"in bfloat16, cosines and sines are off by {error:.2g}")


def offset_of(model: nn.Module, seed: int) -> Found:  # noqa: ARG001
    """Look at tables with one row a cell."""
    found = [table for table in _flat_tables(model) if table.sides is not None]
    said, reason = [], "it has no table with one row a cell"
    for table in found:
        try:
            said.append(class_token_offset(_rows(table), Grid(*_sides(table)), prefix=table.prefix))
        except UnfitError as error:
            reason = str(error)
    if not said:
        raise UnfitError(reason)
    return worst_of(said)


def _flat_tables(model: nn.Module) -> list[Table]:
    return [
        table
        for table in tables_of(model)
        if table.seams.kind == "abs"
        and table.seams.layout == "nlc"
        and isinstance(table.value, Tensor)
    ]


def _rows(table: Table) -> Tensor:
    value: Tensor = table.value
    rows = value.flatten(0, -2).detach()
    return rows[: len(rows) - table.extra]


def _sides(table: Table) -> tuple[int, int]:
    sides = table.sides
    assert sides is not None  # noqa: S101 (asked before)
    return sides


def order_of(model: nn.Module, seed: int) -> Found:  # noqa: ARG001
    """Look at tables of unequal sides, and at the rotary table of 3 x 5 cells."""
    said, reasons = [], ["it has no table of unequal sides and no rotary encoding of its own"]
    codes = [
        (_rows(table)[table.prefix :], Grid(*_sides(table)))
        for table in _flat_tables(model)
        if table.sides is not None
    ]
    try:
        turns = table_of(copy.deepcopy(rope_of(model)), _UNEQUAL)
        if turns.ndim == 2 and len(turns) == _UNEQUAL[0] * _UNEQUAL[1]:
            codes.append((turns, Grid(*_UNEQUAL)))
    except UnfitError as error:
        reasons.append(str(error))
    for code, grid in codes:
        try:
            said.append(axis_order(code, grid))
        except UnfitError as error:
            reasons.append(str(error))
    if not said:
        raise UnfitError(reasons[-1])
    return worst_of(said)


def antialias_of(model: nn.Module, seed: int) -> Found:  # noqa: ARG001
    """Resize a checkerboard by the recipe that is known for the checkpoint."""
    if not _flat_tables(model):
        raise UnfitError("it has no table that is resized by a recipe")
    recipe = recipe_of(recipe_for(model)[0])

    def resize(table: Tensor, sides: tuple[int, int], wanted: tuple[int, int]) -> Tensor:
        return resample(table, source=Grid(*sides), target=Grid(*wanted), recipe=recipe)

    return missing_antialias(resize, declared=recipe.antialias)


LOOKS: dict[str, Callable[[Any, int], Found]] = {
    "pairing_mismatch": pairing_of,
    "precision": precision_of,
    "class_token_offset": offset_of,
    "axis_order": order_of,
    "section_shares": _each("section_shares"),
    "missing_antialias": antialias_of,
    "stale_cache": model_states.cache_of,
    "bias_collapse": _each("bias_collapse"),
    "dead_scheme": model_states.dead_of,
    "axis_visibility": _each("axis_visibility"),
    "unused_buckets": _each("unused_buckets"),
    "masked_leak": _each("masked_leak"),
    "frozen_copy": model_states.copy_of,
    "shared_state": model_states.shared_of,
    "order_dependence": model_states.listed_of,
}
