"""The front door of the audit: looks at what a target is, and hands it to the one who audits such things."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import is_dataclass, replace
from importlib import import_module
from typing import Any

import torch
from torch import nn

from visionpos.audit.interventions import Progress, chosen
from visionpos.audit.result import AuditResult
from visionpos.encodings.guard import Guarded
from visionpos.errors import PositionError, did_you_mean
from visionpos.geometry.ranges import is_integer

_LOOKED_AT = {
    "of_model": ("stale_cache", "frozen_copy", "order_dependence"),  # its general checks
    "of_stream": ("axis_visibility",),
}

NOTHING = "none"
"""The name of the scheme that gives no position: the control of every audit."""


def run(
    target: Any,
    interventions: str | Iterable[str] | None = None,
    *,
    seeds: int | Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    progress: Progress | None = None,
    detectors: bool | str | Iterable[str] | None = None,
    **options: Any,
) -> AuditResult:
    """Return what interventions show about a position scheme.

    Args:
        target: an encoding, its Spec, or (Spec, Dims); None or "none" for the control without position; a timm model,
            plain or retrofitted; a VLM family, or a pair (TokenStream, rotary spec).
        interventions: ids, see `INTERVENTIONS`; all that the target can take when None.
        seeds: how many draws of contents and random weights, or the seeds themselves; the auditor's habit when None.
        dtype: of the forward passes. Symmetries are decided in float32 or float64; half precision hides small effects.
        progress: called with what is done, how many steps are done and how many there are.
        detectors: whether detectors look at the target too, or their names; when None they do where all interventions
            are carried out. What fits no target of this kind is left out of the result.
        **options: what the audit of this kind of target takes beside these.

    Returns:
        Rows of measurements with verdicts. An intervention that fails is a row of its own, marked "failed"; the others
        stand, and `complete` is False.

    Raises:
        PositionError: if the target is none of these, or an argument is out of range.

    Example:
        >>> result = run(None, ["P1", "S1"], seeds=1)
        >>> {row.verdict for row in result}, result.surprises
        ({'zero'}, ())
    """
    place = _room_of(target)
    room = import_module(f"visionpos.audit.{place}")
    _check_options(room.audit, place, options)
    if progress is not None and not callable(progress):
        raise PositionError(
            f"progress is {progress!r:.60}; a function of what is done, steps done and steps in all is required."
        )
    result: AuditResult = room.audit(
        target,
        interventions=None if interventions is None else chosen(interventions),
        seeds=seeds_of(seeds),
        dtype=_checked_dtype(dtype),
        progress=progress,
        **options,
    )
    if detectors is False or (detectors is None and interventions is not None):
        return result
    names = None if detectors in (None, True) else detectors
    return _with_found(result, target, place, names, progress)


def _with_found(
    result: AuditResult, target: Any, place: str, names: Any, progress: Progress | None
) -> AuditResult:
    """Return a result with what detectors say of its target."""
    from visionpos.audit.detectors import DETECTORS, applies, detect, did_fail

    seen = target
    if place == "of_encoding":
        from visionpos.audit.of_encoding import built_of

        seen = built_of(target)
        if seen is None:
            return result
    if names is None:
        # What the audit of this kind of target has looked at itself is not looked at again.
        own = _LOOKED_AT.get(place, ())
        names = [name for name in DETECTORS if name not in own]
    found = [one for one in detect(seen, names, progress=progress) if applies(one) or did_fail(one)]
    whole = result.complete and not any(map(did_fail, found))
    return replace(result, found=(*result.found, *found), complete=whole)


def _room_of(target: Any) -> str:
    """Return the module that audits such a target."""
    nothing = target is None or (isinstance(target, str) and target == NOTHING)
    if nothing or isinstance(target, Guarded) or _is_spec(target):
        return "of_encoding"
    if isinstance(target, tuple) and len(target) == 2:
        return "of_encoding" if _is_spec(target[0]) or target[0] is None else "of_stream"
    if isinstance(target, nn.Module):
        return "of_model"
    if hasattr(target, "position_ids") and hasattr(target, "stream"):
        return "of_stream"
    hint = did_you_mean(target, [NOTHING]) if isinstance(target, str) else ""
    named = (
        " A name becomes one by config.load_encoding(name), vlm.family(name) or timm.create_model(name)."
        if isinstance(target, str)
        else ""
    )
    raise PositionError(
        f"target is {target!r}; an encoding or its Spec, a model, a VLM family or a pair (stream, rotary spec) is "
        f"required.{named}{hint}"
    )


def _check_options(auditor: Any, place: str, options: Iterable[str]) -> None:
    """Refuse options that the audit of this kind of target does not take."""
    shared = inspect.signature(run).parameters
    own = [name for name in inspect.signature(auditor).parameters if name not in shared]
    for name in options:
        if name not in own:
            kind = place.removeprefix("of_")
            raise PositionError(
                f"{name} is no option of the audit of this target, which is audited as {kind}; it takes "
                f"{', '.join(own)}. Leave it out.{did_you_mean(name, own)}"
            )


def _is_spec(target: Any) -> bool:
    """Return whether a thing is the Spec of an encoding."""
    own = is_dataclass(target) and not isinstance(target, type)
    return own and isinstance(getattr(target, "kind", None), str)


def seeds_of(seeds: int | Sequence[int] | None) -> tuple[int, ...] | None:
    """Return seeds, counted from 0 where a number of them is asked for.

    Raises:
        PositionError: if it is no count of at least 1, and no list of different whole numbers of at least 0.
    """
    if seeds is None:
        return None
    if is_integer(seeds) and not isinstance(seeds, Sequence):
        own = tuple(range(int(seeds)))
    else:
        own = tuple(seeds) if isinstance(seeds, (list, tuple, range)) else ()
    if not own or not all(is_integer(one) and one >= 0 for one in own) or len(set(own)) < len(own):
        raise PositionError(
            f"seeds is {seeds!r}; a count of at least 1, or different whole numbers of at least 0, are required."
        )
    return own


def _checked_dtype(dtype: Any) -> torch.dtype:
    """Return a dtype whose bands are known, or refuse."""
    known = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    if dtype not in known:
        raise PositionError(
            f"dtype is {dtype!r}; torch.float64, torch.float32, torch.bfloat16 or torch.float16 is required. Decide "
            "symmetries in float32."
        )
    found: torch.dtype = dtype
    return found
