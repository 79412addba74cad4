"""Lineages compared field by field, and what of a difference matters at inference; records of families and audits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch

from visionpos import checkpoint
from visionpos.audit.outcome import agrees, band
from visionpos.errors import PositionError
from visionpos.retrofit.lineage_record import read_record
from visionpos.retrofit.lineage_schema import check_record
from visionpos.retrofit.lineage_scheme import frequency_hash

if TYPE_CHECKING:
    from pathlib import Path

    from visionpos.audit.result import AuditResult, Measured
    from visionpos.vlm import Family

Record = dict[str, Any]

# Field -> what another value does at inference. The first pattern that fits counts; what none fits does nothing.
_MATTERS = (
    ("header.tables.*.recipe", "another recipe makes another table at a new image size"),
    ("header.tables.*.source_grid_hw", "the next resize starts from another table"),
    ("header.tables.*", "the table serves another grid, or other rows"),
    ("header.encodings.*.spec.coords*", "coordinates are numbered differently"),
    ("header.encodings.*.spec.theta", "channel pairs turn at other speeds"),
    ("header.encodings.*", "another encoding is attached, or at another strength"),
    ("header.rope.theta", "channel pairs turn at other speeds"),
    ("header.rope.coords*", "coordinates are numbered differently"),
    ("header.rope*", "q and k turn differently"),
    ("header.windows*", "attention sees other windows"),
    ("header.prefix", "another number of tokens stands without position"),
    ("header.*_hw", "the weights serve another image size"),
    ("header.build.num_heads", "heads are cut differently"),
    ("header.build.patch_size", "a token covers other pixels"),
    ("header.model", "another architecture"),
    ("scheme.*.rope.theta", "channel pairs turn at other speeds"),
    ("scheme.*.rope.inv_freq_sha256", "channel pairs turn at other speeds"),
    ("scheme.*.rope.layout", "other channels turn together: q and k weights need converting"),
    ("scheme.*.rope.sections*", "axes drive other channel pairs"),
    ("scheme.*.rope*", "q and k turn differently"),
    ("scheme.*.alibi*", "distance weighs differently"),
    ("scheme.*.bucket.occupancy*", ""),
    ("scheme.*.bucket*", "distances share other buckets"),
    ("scheme.*.table.resize_history*", "the table has another history of sizes or recipes"),
    ("scheme.*.table*", "the table serves another grid, or other rows"),
    ("scheme.*.params", ""),
    ("scheme*", "another scheme, or in other layers"),
    ("coordinates.jitter*", ""),  # training alone
    ("coordinates*", "coordinates are numbered differently"),
    ("train_support.*", "training saw other positions: compare with support_outside"),
    ("precision*", "angles or tables are rounded differently"),
    ("masking*", "tokens see other tokens"),
)
_NAMED = {"scheme": "name", "position": "axis", "offset": "axis", "attn_distance": "axis"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LineageDifference:
    """One field in which two lineages differ.

    Args:
        field: its path, such as "scheme.axial_rope.rope.theta"; "header." in front of what a file needs to be loaded.
        one: its value in the first; None if it is missing there.
        other: its value in the second.
        why: what the difference does at inference; empty if it does nothing there.
    """

    field: str
    one: Any
    other: Any
    why: str

    @property
    def matters(self) -> bool:
        """Return whether outputs can differ for it."""
        return bool(self.why)


def lineage_of_file(path: str | Path) -> Record:
    """Return the lineage of a file: its header as "header", and the fields of its record, where it has one.

    Raises:
        PositionError: naming file and field, if either cannot be read.
    """
    header = checkpoint.read_lineage(path).data()
    return {"header": header, **(read_record(path) or {})}


def lineage_diff(
    one: str | Path | Mapping[str, Any], other: str | Path | Mapping[str, Any]
) -> tuple[LineageDifference, ...]:
    """Return every field in which two lineages differ, what matters at inference first.

    A file that was written before records is compared by its header alone.

    Args:
        one: a safetensors file with lineage, or a record.
        other: the same.

    Raises:
        PositionError: naming file and field, if one cannot be read.

    Example:
        >>> two = {"masking": {"kind": "none"}}, {"masking": {"kind": "causal"}}
        >>> [(item.field, item.why) for item in lineage_diff(*two)]
        [('masking.kind', 'tokens see other tokens')]
    """
    both = [item if isinstance(item, Mapping) else lineage_of_file(item) for item in (one, other)]
    rooms = [set(lineage) & set(both[1 - at]) for at, lineage in enumerate(both)]
    shared = rooms[0] if _is_partial(both) else set(both[0]) | set(both[1])
    found = [
        LineageDifference(field=field, one=left, other=right, why=why_it_matters(field))
        for field, left, right in _differing(
            "", *({key: item[key] for key in shared & set(item)} for item in both)
        )
    ]
    return tuple(sorted(found, key=lambda item: not item.matters))


def why_it_matters(field: str) -> str:
    """Return what another value of a field does at inference, empty for nothing.

    Example:
        >>> why_it_matters("run.step"), why_it_matters("scheme.axial_rope.rope.theta")
        ('', 'channel pairs turn at other speeds')
    """
    return next((why for pattern, why in _MATTERS if fnmatchcase(field, pattern)), "")


def _is_partial(both: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether one of two has a header alone, and the other more: what one lacks is then no difference."""
    return any(set(one) == {"header"} for one in both)


def _differing(path: str, one: Any, other: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield path and both values of the leaves in which two plain values differ."""
    left, right = (_opened(path, value) for value in (one, other))
    if left is None and right is None:
        if one != other:
            yield path, one, other
        return
    if left is None or right is None:  # one of them lacks it, or holds something else
        yield path, one, other
        return
    for key in [*left, *(key for key in right if key not in left)]:
        yield from _differing(f"{path}.{key}" if path else key, left.get(key), right.get(key))


def _opened(path: str, value: Any) -> Mapping[str, Any] | None:
    """Return what a value holds by name: a mapping, or the named entries of a list; None for a leaf."""
    if isinstance(value, Mapping):
        return value
    key = _NAMED.get(path.rpartition(".")[2])
    if key is None or not isinstance(value, list):
        return None
    seen: Counter[str] = Counter()
    out: dict[str, Any] = {}
    for entry in value:
        name = str(entry[key])
        seen[name] += 1
        out[name if seen[name] == 1 else f"{name}#{seen[name]}"] = entry
    return out


def audit_entries(result: AuditResult) -> list[Record]:
    """Return the rows of an audit as the `audit` list of a lineage record.

    A row passes where its number proves what was expected, fails where it proves something else or the intervention
    failed, and is skipped where it proves nothing or nothing was expected.
    """
    return [_audit_entry(row) for row in result]


def _audit_entry(row: Measured) -> Record:
    proves = None if row.expected is None else agrees(row.verdict, row.expected)
    failed = row.verdict == "failed" or proves is False
    dtype = getattr(torch, row.dtype, None)
    finite = row.value is not None and row.value - row.value == 0
    return {
        "intervention": f"{row.intervention} {row.variant}".strip(),
        "metric": row.metric,
        "value": row.value if finite else None,
        "tolerance": band(dtype).zero if isinstance(dtype, torch.dtype) else None,
        "expected": row.expected,
        "verdict": "fail" if failed else "pass" if proves else "skip",
        "dtype": row.dtype,
        "seed": row.seed,
    }


def family_record(family: Family, over: Mapping[str, Any] | None = None) -> Record:
    """Return the lineage record of a VLM family's language model: sections, ladder, axes of ids, masks.

    Args:
        family: from `vlm.family`.
        over: laid on the record's top level, such as a `train_support`.

    Raises:
        PositionError: if the family has no rotary layout or rule in its data, or the record breaks the schema.

    Example:
        >>> from visionpos.vlm import family
        >>> family_record(family("qwen2_vl"))["scheme"][0]["rope"]["sections"]
        [16, 24, 24]
    """
    spec, rule = family.spec.language, family.spec.rule
    if spec is None or rule is None:
        raise PositionError(
            f"{family.name} has no {'rotary layout' if spec is None else 'position rule'} in its data; a record needs "
            "both. Add the checkpoint's by overlay."
        )
    scaling: Any = spec.scaling
    rope = {
        "layout": "half" if spec.pairing == "half" else "interleaved",
        "rotary_dim": 2 * spec.pairs,
        "head_dim": spec.head_dim,
        "theta": spec.theta,
        "type": {None: "default", "yarn": "yarn"}.get(scaling and scaling.kind, "ntk"),
        "factor": getattr(scaling, "factor", None) or getattr(scaling, "alpha", None),
        "attention_factor": None if scaling is None else scaling.gain,
        "sections": list(spec.sections),
        "sections_layout": spec.order,
        "inv_freq_sha256": frequency_hash(family.frequencies),
        "prefix_rotated": None,
    }
    timed = {"time": "t", "ordinal": "t", "row": "h", "col": "w", "index": "seq"}
    record = {
        "schema_version": "1.0",
        "run": {"phase": "inference", "parent": f"{family.name}, dialect {family.dialect}"},
        "scheme": [{"name": "m_rope", "where": "qk_rotate", "layers": None, "rope": rope}],
        "coordinates": {
            "axes": [timed[axis] for axis in rule.axes],
            "order": "row_major_hw",
            "origin": "center" if rule.centre else "corner0",
            "units": "cell",
            "normalize": "none",
            "increment": _one_number(rule.cell_step),
        },
        "train_support": {"position": [], "offset": [], "attn_distance": []},
        "precision": {
            "position_dtype": rule.dtype.__name__,
            "angle_dtype": "float32",
            "table_dtype": None,
            "bias_dtype": None,
        },
        "masking": {"kind": "causal", "packed": False, "reset_per_document": True},
        **(over or {}),
    }
    check_record(record, "record")
    return record


def _one_number(step: Any) -> float | None:
    return None if isinstance(step, tuple) else float(step)
