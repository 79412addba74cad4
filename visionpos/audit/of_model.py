"""The audit of a timm model, plain or retrofitted: every intervention on copies of it, and general checks.

Where tables, rotations, biases and patch tokens are is read from the seam table; no class is asked for its name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from visionpos.audit.changes import generator_of
from visionpos.audit.expected import expected_of
from visionpos.audit.interventions import INTERVENTIONS, Progress, chosen
from visionpos.audit.model_bench import Bench, Number, Trial
from visionpos.audit.model_biases import ConvMove
from visionpos.audit.model_border import WINDOW
from visionpos.audit.model_checks import checks_of
from visionpos.audit.model_moves import AttachedMove, Move
from visionpos.audit.model_parts import moves_of
from visionpos.audit.model_rope import RopeMove
from visionpos.audit.model_subject import Subject
from visionpos.audit.model_trials import IDS, trials_of
from visionpos.audit.model_watch import Passed
from visionpos.audit.outcome import Outcome, band, verdict_of
from visionpos.audit.result import AuditResult, Found, Measured, Tokens
from visionpos.errors import PositionError
from visionpos.retrofit.kinds import check_model
from visionpos.retrofit.lineage_record import lineage_record

_LARGER = ("G1", "zoom", "extend")
"""What changes the model itself: its parts are asked anew for what is expected of them."""


def audit(
    target: nn.Module,
    *,
    interventions: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    progress: Progress | None = None,
    size_hw: tuple[int, int] | None = None,
    checks: bool = True,
) -> AuditResult:
    """Return what interventions show about the position scheme of a model.

    Interventions act on tokens before any position is added, and on the places that every position part is asked for:
    nothing is done to pixels, so that overlapping stems are audited as exactly as others. In hierarchical models they
    act inside each attention's own grid. The model is read on copies that share its weights; it is never written to.
    Half-trained or random weights may make every effect small: gates and tables that start at zero hide a scheme.

    Args:
        target: a timm model whose class has a row in the seam table, plain or with attachments.
        interventions: ids; all when None.
        seeds: of images and of orders; 0 when None. The weights are the model's own.
        dtype: of forward passes; a model of another dtype is copied whole and cast.
        progress: see `run`.
        size_hw: image (height, width) in pixels; that which the model serves when None.
        checks: whether the general checks are run.

    Raises:
        PositionError: if the class has no row, or the model cannot be copied or take the image.
    """
    check_model(target)
    ids = chosen(interventions, among=IDS)
    drawn = tuple(seeds) if seeds else (0,)
    first = Subject(target, dtype=dtype, size_hw=size_hw, seed=drawn[0])
    found, told = [], _Steps(progress, len(drawn) * len(ids) + (5 if checks else 1))
    for name, check in checks_of(first):
        if checks or name == "repeat":
            told(f"check {name}")
            found.append(_checked(name, check))
    steady = not found[0].alarm
    rows: list[Measured] = []
    parts = _parts(first)
    for seed in drawn:
        subject, base, why = _opened(target, first, seed, dtype, size_hw)
        why = why if steady else found[0].says
        for name in ids:
            told(f"{name}, seed {seed}")
            if base is None or not steady:
                rows.append(_failed(name, seed, dtype, why))
                continue
            # A generator for each: what one trial draws must not change another's numbers.
            bench = Bench(subject, base, generator_of(seed))
            rows += _rows_of(name, bench, seed, dtype, parts)
    told("done")
    return AuditResult(
        target=_named(target),
        scheme=" + ".join(dict.fromkeys(map(_kind, parts))) or "none",
        grid=first.grid.shape,
        rows=tuple(rows),
        found=tuple(found),
        complete=all(row.verdict != "failed" for row in rows)
        and all(one.value is not None or not one.alarm for one in found),
        lineage=_lineage(target),
        facts={
            "size_hw": list(first.size),
            "parts": [{"path": part.path, "kind": _kind(part)} for part in parts],
            "level": "tokens" if first.flat else "attention",
        },
    )


def _opened(
    target: nn.Module, first: Subject, seed: int, dtype: torch.dtype, size_hw: Any
) -> tuple[Subject, Passed | None, str]:
    """Return (subject, its pass, why there is none) of a seed."""
    try:
        subject = first
        if seed != first.seed:
            subject = Subject(target, dtype=dtype, size_hw=size_hw, seed=seed)
        return subject, subject.passed(subject.still()), ""
    except Exception as error:
        return first, None, _said(error)


class _Steps:
    """Counts steps for a progress callback."""

    def __init__(self, progress: Progress | None, steps: int) -> None:
        self.progress, self.steps, self.done = progress, steps, -1

    def __call__(self, what: str) -> None:
        self.done += 1
        if self.progress is not None:
            self.progress(what, min(self.done, self.steps), self.steps)


def _parts(subject: Subject) -> list[Move]:
    """Return the position parts, with their places as they are."""
    return moves_of(subject.fresh(), subject.grid, subject.size)


def _checked(name: str, check: Any) -> Found:
    """Return what a check finds; one that fails is an alarm of its own, and the others go on."""
    try:
        found: Found = check()
    except Exception as error:
        return Found(
            detector=name,
            value=None,
            threshold=0.0,
            alarm=True,
            says=f"the check itself failed: {_said(error)}",
            remedy="Run the model on such input by itself, and mend what fails there.",
        )
    return found


def _rows_of(
    name: str, bench: Bench, seed: int, dtype: torch.dtype, parts: list[Move]
) -> Iterator[Measured]:
    """Yield the rows of one intervention; a variant that fails is a row, and the others go on."""
    try:
        with torch.no_grad():
            trials = list(trials_of(name, bench))
    except Exception as error:
        yield _failed(name, seed, dtype, _said(error))
        return
    for trial in trials:
        try:
            with torch.no_grad():
                yield from _measured(name, trial, seed, dtype, parts, bench.subject)
        except Exception as error:
            yield _failed(name, seed, dtype, _said(error), trial.variant)


def _measured(
    name: str, trial: Trial, seed: int, dtype: torch.dtype, parts: list[Move], subject: Subject
) -> Iterator[Measured]:
    word = str(dtype).removeprefix("torch.")
    try:
        numbers = trial.measure()
        after = parts if trial.parts is None else trial.parts()
    except PositionError as error:
        tokens: Tokens = "patches" if subject.flat else "all"
        for metric in trial.metrics:
            none = Number(metric, "end", tokens, 0.0)
            outcome = _expected(parts, name, trial.variant, none, subject)
            yield Measured(
                intervention=name,
                variant=trial.variant,
                metric=metric,
                value=None,
                verdict="undefined",
                expected=outcome if outcome == "undefined" else None,
                tokens=tokens,
                dtype=word,
                seed=seed,
                note=str(error),
            )
        return
    limits = band(dtype, INTERVENTIONS[name].symmetry, largest_angle=trial.angle())
    for number in numbers:
        yield Measured(
            intervention=name,
            variant=trial.variant,
            metric=number.metric,
            value=number.value,
            verdict=verdict_of(number.value, limits),
            expected=_expected(after, name, trial.variant, number, subject),
            where=number.where,
            tokens=number.tokens,
            dtype=word,
            seed=seed,
            note=trial.note,
        )


def _expected(
    parts: list[Move], name: str, variant: str, number: Number, subject: Subject
) -> Outcome | None:
    """Return what all parts together should do; None where one of them is not known, or another thing decides."""
    if name == "S1" and variant == WINDOW:
        return "zero"  # fact sheet on the audit, 3.4: windowed models, by one window multiple
    turning = any(isinstance(part, (RopeMove, AttachedMove)) and part.inside for part in parts)
    # Prefix tokens that do not turn see a shift; "prefix" says how much. First in a causal row, they see themselves.
    leaks = name in ("S1", "S-half") and turning and subject.prefix > 0
    # First in a causal row, they see themselves; a bias reaches them a layer later, a convolution the patches.
    mixed = any(isinstance(part, ConvMove) for part in parts)
    early = number.where != "end" and (mixed or number.tokens == "prefix")
    first = early or (number.tokens == "prefix" and name == "C1")
    # Copies of patches outweigh prefix tokens, and windows and stages get other neighbours.
    other = name in _LARGER and (subject.prefix > 0 or not subject.flat)
    other = other and number.metric != "outside"
    if number.metric in ("entropy", "phase", "bias") or leaks or first or other:
        return None
    if number.metric == "outside":
        parts = [part for part in parts if part.native(subject.grid) is not None]
    if name == "C1" and variant == "without scheme":
        return "nonzero" if subject.flat or number.where == "end" else None
    specs = [part.like for part in parts] or [None]
    known = [
        None if parts and spec is None else expected_of(spec).outcome(name, variant, number.metric)
        for spec in specs
    ]
    if name == "N3" and not (mixed and subject.flat):
        # The mask is laid over every softmax, those of position alone too; inside windows nothing else sees the token.
        return "zero"
    joint = _joint(known, alike=name in ("P2", "N3"))
    # Stages before the first part of position have none to show.
    hidden = not subject.flat and number.where != "end" and joint in ("nonzero", "bounded")
    return None if hidden else joint


def _joint(known: list[Outcome | None], *, alike: bool) -> Outcome | None:
    """Return the outcome of several parts: what one cannot do none can, and what one does is seen.

    Args:
        known: outcome of each part.
        alike: whether one part that is not known may undo what the others show.
    """
    order: tuple[Outcome, ...] = ("undefined", "nonzero", "bounded", "zero")
    first = next((one for one in order if one in known), None)
    hidden = None in known and (first in ("bounded", "zero") or alike)
    return None if hidden else first


def _kind(part: Move) -> str:
    return str(getattr(part.spec, "kind", "") or "unknown")


def _failed(name: str, seed: int, dtype: torch.dtype, note: str, variant: str = "") -> Measured:
    return Measured(
        intervention=name,
        variant=variant,
        metric=INTERVENTIONS[name].metrics[0],
        value=None,
        verdict="failed",
        dtype=str(dtype).removeprefix("torch."),
        seed=seed,
        note=note,
    )


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _named(model: Any) -> str:
    """Return timm's name of a model, or that of its class."""
    config = getattr(model, "pretrained_cfg", None) or {}
    return str(config.get("architecture") or type(model).__name__)


def _lineage(model: nn.Module) -> dict[str, Any] | None:
    """Return the lineage record of a model, None where it has none that can be made."""
    try:
        return dict(lineage_record(model))
    except PositionError:
        return None
