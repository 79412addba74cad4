"""The audit of a token stream: what position ids do to the attention of a language model with a given rotary layout.

One causal attention of random queries, keys and values; only the ids change. The target is a VLM family, or a pair of a
`TokenStream` and a rotary spec.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from visionpos.attention import rotate
from visionpos.audit.axis_views import CELLS, AxisView, axis_findings, axis_views
from visionpos.audit.changes import generator_of
from visionpos.audit.interventions import INTERVENTIONS, Progress, chosen
from visionpos.audit.lineage import family_record
from visionpos.audit.metrics import attention_change, output_change
from visionpos.audit.outcome import Outcome, band, verdict_of
from visionpos.audit.result import AuditResult, Measured
from visionpos.audit.stream_trials import STREAM_IDS, Change, changes_of
from visionpos.audit.streams import NoMeaning, StreamPlaces, places_of, still_apart
from visionpos.encodings import SectionRopeSpec
from visionpos.errors import PositionError
from visionpos.geometry import Rotation, angles
from visionpos.geometry.fields import check_kind
from visionpos.vlm import Family, Image, Rule, Text, TokenStream
from visionpos.vlm.language import LanguageSpec
from visionpos.vlm.rotary import language_freqs

HEADS = 4
_SEEDS = (0, 1, 2, 3, 4)
_MOST = 4096  # tokens: attention of all pairs is held
_LINE, _M_ROPE = Rule(axes=("index",)), Rule(axes=("time", "row", "col"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Audited:
    """What a stream's audit works on.

    Args:
        name: of the target.
        language: the rotary layout.
        places: where the tokens are.
        rule: the position rule.
        family: None for a pair.
    """

    name: str
    language: LanguageSpec
    places: StreamPlaces
    rule: Rule
    family: Family | None = None


def audit(
    target: Any,
    *,
    interventions: Iterable[str] | None = None,
    seeds: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    progress: Progress | None = None,
    segments: Sequence[Any] | None = None,
    rule: Rule | None = None,
    cells: Sequence[int] | None = None,
) -> AuditResult:
    """Return what changes of position ids do to attention.

    Args:
        target: a `Family`, or (TokenStream, LanguageSpec or SectionRopeSpec).
        interventions: of `STREAM_IDS`; all when None.
        seeds: of queries, keys and values; five when None.
        dtype: of the attention; angles are float32, or float64 beside float64.
        progress: called with what is done, how many steps are done and how many there are.
        segments: the prompt of a family; five words, a picture of 4x6 cells and seven words when None.
        rule: of a pair: what the ids are; M-RoPE for three axes, 0, 1, 2, ... for one when None.
        cells: of the grid that axes are looked at on, one number an axis; 32 each when None.

    Raises:
        PositionError: if the target is neither, its axes do not fit, or an argument is not of its kind of target.

    Example:
        >>> from visionpos.vlm import family
        >>> result = audit(family("qwen3_vl"), interventions=["S1", "R1"], seeds=[0])
        >>> sorted({(row.intervention, row.verdict) for row in result})
        [('R1', 'nonzero'), ('S1', 'zero')]
    """
    ids = chosen(None if interventions is None else list(interventions), among=STREAM_IDS)
    audited = _audited(target, segments, rule)
    names = audited.places.axes
    views = axis_views(audited.language, names, [CELLS] * len(names) if cells is None else cells)
    draws = _SEEDS if seeds is None else tuple(seeds)
    steps = [(one, seed) for one in ids for seed in draws]
    rows: list[Measured] = []
    for done, (one, seed) in enumerate(steps):
        if progress is not None:
            progress(INTERVENTIONS[one].title, done, len(steps))
        rows += _rows(audited, one, seed, dtype)
    if progress is not None:
        progress("done", len(steps), len(steps))
    return _result(audited, rows, views)


def _result(audited: Audited, rows: list[Measured], views: Sequence[AxisView]) -> AuditResult:
    language, family = audited.language, audited.family
    record = None if family is None else family_record(family)
    return AuditResult(
        target=audited.name,
        scheme=f"{language.order} {'/'.join(map(str, language.sections))}, theta {language.theta:g}",
        rows=tuple(rows),
        found=axis_findings(views),
        complete=all(row.verdict != "failed" for row in rows),
        lineage=record,
        facts={
            "tokens": audited.places.count,
            "axes": [asdict(view) for view in views],
            "media": [list(span) for span in audited.places.media],
        },
    )


def _audited(target: Any, segments: Sequence[Any] | None, rule: Rule | None) -> Audited:
    """Return what is audited, or refuse the target."""
    if isinstance(target, Family):
        if rule is not None:
            raise PositionError(
                "rule is given beside a family, which has its own; leave it out, or give the family an overlay."
            )
        found = _of_family(target, segments)
    elif isinstance(target, tuple) and len(target) == 2 and isinstance(target[0], TokenStream):
        if segments is not None:
            raise PositionError(
                "segments are given beside a stream, which has its own; leave them out."
            )
        found = _of_pair(*target, rule)
    else:
        raise PositionError(
            f"target is {target!r:.80}; a VLM family or a pair (TokenStream, rotary spec) is required. Get them by "
            "vlm.family(name) and family.stream(segments)."
        )
    if not 1 <= found.places.count <= _MOST:
        raise PositionError(
            f"the stream has {found.places.count} tokens; 1 to {_MOST} can be audited, as all pairs are held. Pass "
            "fewer or smaller segments."
        )
    return found


def _of_family(family: Family, segments: Sequence[Any] | None) -> Audited:
    grid = family.spec.grid
    side = grid.patch * grid.merge
    prompt: list[Any] = [Text(tokens=5), Image(size_hw=(4 * side, 6 * side)), Text(tokens=7)]
    stream = family.stream(prompt if segments is None else segments)
    family.position_ids(stream)  # which refuses a family without a rule, and a clip without times
    _ = family.frequencies  # and one without a layout
    language, rule = family.spec.language, family.spec.rule
    assert language is not None and rule is not None  # noqa: S101, PT018 (refused above)
    variant = "" if family.variant is None else f", {family.variant}"
    name = f"{family.name}, dialect {family.dialect}{variant}"
    places = places_of(stream, rule)
    return Audited(name=name, language=language, places=places, rule=rule, family=family)


def _of_pair(stream: TokenStream, spec: Any, rule: Rule | None) -> Audited:
    if isinstance(spec, SectionRopeSpec):
        spec = LanguageSpec(
            head_dim=2 * sum(spec.sections),
            theta=spec.theta,
            sections=spec.sections,
            order=spec.order,
            pairing="half" if spec.pairing == "half" else "adjacent",
        )
    if not isinstance(spec, LanguageSpec):
        raise PositionError(
            f"the rotary spec is {spec!r:.80}; a LanguageSpec or SectionRopeSpec is required. Take "
            "family.spec.language."
        )
    if rule is None and spec.axes not in (1, 3):
        raise PositionError(
            f"the rotary spec has {spec.axes} axes; a rule is required for other numbers than 1 and 3. Pass rule=."
        )
    if rule is not None:
        check_kind("rule", rule, Rule)
    told = (_LINE if spec.axes == 1 else _M_ROPE) if rule is None else rule
    if len(told.axes) != spec.axes:
        raise PositionError(
            f"the rule counts {told.axes} and the rotary spec has {spec.axes} axes; they must agree."
        )
    return Audited(name="stream", language=spec, places=places_of(stream, told), rule=told)


def _rows(audited: Audited, one: str, seed: int, dtype: torch.dtype) -> Iterator[Measured]:
    """Yield the rows of one intervention and seed; what fails is a row that says why."""
    row = Measured(
        intervention=one,
        metric="A",
        value=None,
        verdict="failed",
        dtype=str(dtype).removeprefix("torch."),
        tokens="all",
        seed=seed,
    )
    try:
        found = list(changes_of(one, audited))
    except NoMeaning as reason:
        yield replace(row, verdict="undefined", expected="undefined", note=str(reason))
        return
    except Exception as error:  # kept as a row, the others go on
        yield replace(row, note=f"{type(error).__name__}: {error}")
        return
    for change in found:
        try:
            yield from _measured(audited, change, replace(row, variant=change.variant), dtype)
        except Exception as error:
            yield replace(row, variant=change.variant, note=f"{type(error).__name__}: {error}")


def _measured(
    audited: Audited, change: Change, row: Measured, dtype: torch.dtype
) -> Iterator[Measured]:
    language = audited.language
    after = language if change.language is None else change.language
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    freqs = [language_freqs(one, wide) for one in (language, after)]
    heads = language.kv_heads or HEADS
    contents = torch.randn(
        3, 1, heads, change.before.shape[1], language.head_dim,
        generator=generator_of(row.seed), dtype=torch.float64,
    ).to(dtype)  # fmt: skip
    with torch.no_grad():
        first = _attended(contents, change.before, freqs[0], language, change.unturned)
        second = (
            _attended(contents, change.after, freqs[1], after, change.unturned)
            if change.turned
            else _attend(*contents.unbind(0))
        )
    limits = band(dtype, "shift", largest_angle=_largest_angle(change, freqs[0]))
    values = {"A": attention_change(first[0], second[0]), "O": output_change(first[1], second[1])}
    for metric in ("A", "O"):
        verdict = verdict_of(values[metric], limits)
        told: Any = {"metric": metric, "value": values[metric], "verdict": verdict}
        yield replace(row, **told, expected=_expected(change, freqs[0]), note=change.note)


def _expected(change: Change, freqs: Tensor) -> Outcome:
    """Return what must happen: nothing where all differences that the rotation sees stay, else a change."""
    if change.expected is not None:
        return change.expected
    return "zero" if still_apart(change.before, change.after, freqs) else "nonzero"


def _largest_angle(change: Change, freqs: Tensor) -> float:
    """Return the radians that a change of ids adds to a channel pair at most."""
    if change.before.shape != change.after.shape:
        return 0.0
    moves = (change.after - change.before).abs().amax(1)
    speeds = freqs.reshape(-1, *freqs.shape[-2:]).abs().amax((0, 2)).double()
    return float((moves * speeds).sum())


def _attended(
    contents: Tensor, ids: Tensor, freqs: Tensor, language: LanguageSpec, unturned: int
) -> tuple[Tensor, Tensor]:
    """Return attention weights and outputs of queries and keys that are turned by their ids."""
    coords = ids[:, unturned:].T.to(freqs.dtype)  # [n, axes]
    turns = (
        angles(coords, freqs)
        if freqs.ndim == 2
        else torch.stack([angles(coords, head) for head in freqs])
    )
    gain = 1.0 if language.scaling is None else language.scaling.gain
    rotation = Rotation.of(turns, language.pairing, scale=gain)
    q, k, v = contents.unbind(0)
    return _attend(*rotate(q, k, rotation, prefix=unturned), v)


def _attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return causal attention weights `[b, heads, n, n]` and outputs; logits in float32 or better."""
    logits = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) / q.shape[-1] ** 0.5
    ahead = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
    weights = logits.masked_fill(ahead, -torch.inf).softmax(-1)
    return weights, weights.to(v.dtype) @ v
