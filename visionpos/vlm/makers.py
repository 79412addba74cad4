"""Makers: a stream is placed by the family that wrote it, and by no other that would have written another.

Ids laid on a foreign stream have the right shape and are wrong; only the stream knows who made it.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from visionpos.errors import PositionError
from visionpos.vlm.pieces import AUDIO, Cells

if TYPE_CHECKING:
    from visionpos.vlm.families import Family
    from visionpos.vlm.grammar import FamilySpec
    from visionpos.vlm.stream import TokenStream

UNWRITTEN = frozenset(("language", "pixels", "tower"))  # what a stream does not depend on


def check_maker(stream: TokenStream, asked: Family) -> None:
    """Refuse a stream that another family made, or one of the same name with data that write another stream.

    Dialects, variants and overlays that differ in nothing but the rule write one stream, so any of them may place it.

    Args:
        stream: of any maker; a stream put together by hand has none, and is taken as it is.
        asked: the family that is to place it.

    Raises:
        PositionError: naming both families, and the data that differ.
    """
    maker = stream.made_by
    if maker is None or maker is asked:
        return
    # The rule says where tokens stand, and what is written only where sound is woven into a clip.
    woven = any(isinstance(run, Cells) and run.modality == AUDIO for run in stream.runs)
    free = UNWRITTEN if woven else UNWRITTEN | {"rule"}
    mine, theirs = _written(asked.spec, free), _written(maker.spec, free)
    apart = [name for name in mine if mine[name] != theirs[name]]
    if maker.name != asked.name or apart:
        why = f"; their {', '.join(apart)} differ" if maker.name == asked.name else ""
        raise PositionError(
            f"stream was made by {_label(maker)} and is to be placed by {_label(asked)}{why}; a stream of the "
            "same family is required. Build it with this family's stream(), or lay a rule on it knowingly with "
            "stream_ids(stream, rule)."
        )


def _written(spec: FamilySpec, free: frozenset[str]) -> dict[str, Any]:
    """Return the data that a stream depends on."""
    out = {one.name: getattr(spec, one.name) for one in fields(spec) if one.name not in free}
    if spec.untiled is not None:
        out["untiled"] = _written(spec.untiled, free)
    return out


def _label(family: Family) -> str:
    variant = "" if family.variant is None else f", variant {family.variant!r}"
    return f"family {family.name!r} (dialect {family.dialect!r}{variant})"
