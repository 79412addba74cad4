"""The registry: every detector with its threshold and its source, and the call that runs those that fit a target."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import nn

from visionpos.audit.detectors import effects, packing, shares, states, tables, turning
from visionpos.audit.detectors.finding import UnfitError, broken, unfit
from visionpos.audit.interventions import Progress
from visionpos.audit.result import Found
from visionpos.encodings.guard import Guarded
from visionpos.errors import PositionError, did_you_mean

Look = Callable[[Any, int], Found]


@dataclass(frozen=True, slots=True, kw_only=True)
class Detector:
    """One detector.

    Args:
        name: the `detector` of what it finds.
        title: the fault that it finds, in words.
        threshold: of its main number; what it says names the number that was out of bounds.
        source: where the threshold comes from.
    """

    name: str
    title: str
    threshold: float
    source: str


def _listed() -> tuple[Detector, ...]:
    measured = "measured on public and planted faults; healthy ones stay orders below"
    return (
        Detector(
            name="pairing_mismatch",
            title="channels turn in other pairs than they were trained with",
            threshold=turning.GOLDEN,
            source="mixed tables drift norms by 5e-3 and more, scores by 0.6; float32 rounds at 1e-6",
        ),
        Detector(
            name="precision",
            title="cosines and sines, or positions, in too few bits",
            threshold=turning.TABLE_ERROR,
            source="a bfloat16 table is off by 2.5e-3, bfloat16 positions by 0.96 from 257 on; float32 by 1e-8 a place",
        ),
        Detector(
            name="missing_reset",
            title="positions run on into the next packed document",
            threshold=packing.RESET,
            source="ids are whole numbers; outputs of packed documents agree to 1e-6 in float32",
        ),
        Detector(
            name="tile_restart",
            title="tiles of a picture that begin at the origin each",
            threshold=packing.BLIND,
            source="blind encoders follow a swap to 2e-7, all others change by 0.14 and more",
        ),
        Detector(
            name="class_token_offset",
            title="rows of a table shifted against the cells",
            threshold=tables.MARGIN,
            source="margins of 0.07 to 0.73 in smooth tables with noise up to twice the signal",
        ),
        Detector(
            name="axis_order",
            title="height and width swapped",
            threshold=tables.CONSTANT,
            source="0.7 for swapped channels, 0.3 for swapped sides, 0 for right ones",
        ),
        Detector(
            name="section_shares",
            title="axes that drive other pairs than configured",
            threshold=shares.SHARE,
            source="whole numbers",
        ),
        Detector(
            name="missing_antialias",
            title="a table made smaller without antialias",
            threshold=tables.ALIASED,
            source="a checkerboard from 24x24 to 14x14 keeps 0.004 with antialias and 0.47 without",
        ),
        Detector(
            name="stale_cache",
            title="results of an earlier call",
            threshold=states.STALE,
            source="bitwise equality",
        ),
        Detector(
            name="bias_collapse",
            title="neighbouring keys with one bias",
            threshold=float(shares.KEYS),
            source="bfloat16 slope times place leaves 9 of 64 at 2048 keys and 1 at 32768; distances leave 64",
        ),
        Detector(
            name="dead_scheme",
            title="position that changes nothing",
            threshold=effects.DEAD,
            source=measured,
        ),
        Detector(
            name="axis_visibility",
            title="an axis that hardly turns over its grid",
            threshold=shares.VISIBLE,
            source="at 0.0055 rad a flip of a picture drowns in bfloat16 rounding",
        ),
        Detector(
            name="unused_buckets",
            title="rows of a table that no difference reaches",
            threshold=shares.UNUSED,
            source="row 16 of T5's 32 is the only known one",
        ),
        Detector(
            name="masked_leak",
            title="content of masked tokens in those that are seen",
            threshold=effects.LEAK,
            source="rounding in float32 is 1e-6, a leak through a convolution 0.4 to 0.96",
        ),
        Detector(
            name="frozen_copy",
            title="a copy without positions of its own",
            threshold=states.FOLLOWS,
            source="bitwise equality",
        ),
        Detector(
            name="shared_state",
            title="crops that overwrite each other's grid before backward",
            threshold=states.SHARED,
            source="wrong gradients are 0.066 and more apart, right ones 0",
        ),
        Detector(
            name="order_dependence",
            title="outputs that depend on the order of patches",
            threshold=effects.ORDER,
            source="5e-8 without positions, 9e-5 and more where rows are added by place in the list",
        ),
    )


DETECTORS: dict[str, Detector] = {one.name: one for one in _listed()}


def detect(
    target: Any,
    names: str | Iterable[str] | None = None,
    *,
    seed: int = 0,
    progress: Progress | None = None,
) -> tuple[Found, ...]:
    """Return what detectors say of a target, one finding each, in the registry's order.

    Args:
        target: a built encoding; a timm model, plain or retrofitted; a VLM family, its rotary layout, a pair
            (stream, family or layout), or a packed row.
        names: of detectors; all when None.
        seed: of contents and random weights.
        progress: called with a detector's name, how many are done and how many there are.

    Returns:
        A detector that has no meaning for the target says so, with value None; one that fails says "failed: " and why,
        with a value that is no number: see `did_fail`. Modules are as they were afterwards.

    Raises:
        PositionError: if there is no such detector, or nothing looks at such a target.

    Example:
        >>> import visionpos as vp
        >>> rope = vp.build(
        ...     vp.AxialRopeSpec(theta=100.0), vp.Dims(embed_dim=64, num_heads=2, depth=1)
        ... )
        >>> [one.alarm for one in detect(rope, ["pairing_mismatch", "stale_cache"])]
        [False, False]
    """
    wanted, (kind, looks) = _chosen(names), _looks_of(target)
    found = []
    for number, name in enumerate(wanted):
        if progress is not None:
            progress(name, number, len(wanted))
        found.append(_one(DETECTORS[name], looks.get(name), target, kind, seed))
    if progress is not None:
        progress("done", len(wanted), len(wanted))
    return tuple(found)


def _one(detector: Detector, look: Look | None, target: Any, kind: str, seed: int) -> Found:
    if look is None:
        return unfit(detector.name, detector.threshold, f"{kind} has nothing that it looks at.")
    try:
        # What modules draw by themselves must not touch the caller's generator.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return look(target, seed)
    except UnfitError as reason:
        return unfit(detector.name, detector.threshold, f"{reason}.")
    except PositionError as refusal:
        return unfit(detector.name, detector.threshold, str(refusal))
    except Exception as error:
        return broken(detector.name, detector.threshold, error)


def _chosen(names: str | Iterable[str] | None) -> tuple[str, ...]:
    if names is None:
        return tuple(DETECTORS)
    wanted = [names] if isinstance(names, str) else list(names)
    for name in wanted:
        if name not in DETECTORS:
            raise PositionError(
                f"names holds {name!r}; one of {', '.join(DETECTORS)} is required."
                f"{did_you_mean(name, DETECTORS)}"
            )
    if not wanted:
        raise PositionError(
            "names is empty; at least one detector is required. Leave it out for all."
        )
    return tuple(name for name in DETECTORS if name in wanted)


def _looks_of(target: Any) -> tuple[str, dict[str, Look]]:
    """Return the kind of a target in words, and the detectors that look at it."""
    if isinstance(target, Guarded):
        kind, file = "an encoding", "of_encodings"
    elif isinstance(target, nn.Module):
        kind, file = "a model", "of_models"
    elif _is_stream(target):
        kind, file = "a stream", "of_streams"
    else:
        raise PositionError(
            f"target is {target!r:.80}; a built encoding, a model, a VLM family, its rotary layout, a pair (stream, "
            "layout) or a packed row is required. Build a Spec with build(spec, dims) first."
        )
    looks: dict[str, Look] = import_module(f"visionpos.audit.detectors.{file}").LOOKS
    return kind, looks


def _is_stream(target: Any) -> bool:
    from visionpos.vlm import Family, TokenStream
    from visionpos.vlm.language import LanguageSpec
    from visionpos.vlm.packed_ids import PackedIds

    if isinstance(target, tuple) and len(target) == 2:
        return isinstance(target[0], TokenStream) and isinstance(target[1], (Family, LanguageSpec))
    return isinstance(target, (Family, LanguageSpec, PackedIds))
