"""Detectors on the language side: families, pairs (stream, rotary spec), rotary specs alone, and packed rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from visionpos.audit.detectors.finding import UnfitError, judged
from visionpos.audit.detectors.packing import missing_reset, tile_restart
from visionpos.audit.detectors.shares import axis_visibility, section_shares
from visionpos.audit.detectors.turning import (
    Turn,
    Wanted,
    pairing_mismatch,
    position_dtype,
    precision,
)
from visionpos.audit.result import Found
from visionpos.geometry.rotation import Rotation
from visionpos.vlm import Family, Image, Rule, Text, pack, stream_ids
from visionpos.vlm.language import LanguageSpec, axis_table
from visionpos.vlm.packed_ids import PackedIds
from visionpos.vlm.rotary import language_freqs, language_rotation
from visionpos.vlm.stream import TokenStream

CELLS = 32
_PLACES = (255, 257, 2049, 131073)
_LINE, _M_ROPE = Rule(axes=("index",)), Rule(axes=("time", "row", "col"))


def language_of(target: Any) -> LanguageSpec:
    """Return the rotary layout of a target."""
    found = target[1] if isinstance(target, tuple) else target
    if isinstance(found, Family):
        found = found.spec.language
    if not isinstance(found, LanguageSpec):
        raise UnfitError("it has no rotary layout of a language model")
    return found


def _ladder(target: Any) -> tuple[LanguageSpec, Tensor]:
    language = language_of(target)
    freqs = language_freqs(language, torch.float64)
    if freqs.ndim > 2:
        raise UnfitError("heads belong to one axis each; their pairs are not shared out")
    return language, freqs


def turn_of(language: LanguageSpec) -> Turn:
    """Return the rotation of a layout as a function of vectors and places."""

    def turned(x: Tensor, places: Tensor) -> Tensor:
        rotation = language_rotation(language, places.mT.to(torch.float64))
        cast = Rotation(rotation.cos.to(x.dtype), rotation.sin.to(x.dtype), rotation.pairing)
        return cast.apply(x[None, None])[0, 0]

    return turned


def _wanted(language: LanguageSpec, freqs: Tensor) -> Wanted:
    gain = 1.0 if language.scaling is None else language.scaling.gain
    return Wanted(pairing=language.pairing, freqs=freqs, gain=gain)


def pairing_of(target: Any, seed: int) -> Found:
    """Look at the pairing of a layout."""
    language, freqs = _ladder(target)
    return pairing_mismatch(
        turn_of(language),
        language.head_dim,
        wanted=_wanted(language, freqs),
        axes=language.axes,
        seed=seed,
    )


def precision_of(target: Any, seed: int) -> Found:  # noqa: ARG001
    """Look at ids up to the long contexts of language models, and at the dtype of a stream's own."""
    language, freqs = _ladder(target)
    ids = None if isinstance(target, LanguageSpec) else _placed(target)[1]
    return precision(
        turn_of(language),
        language.head_dim,
        _wanted(language, freqs),
        places=_PLACES,
        positions=ids,
    )


def sections_of(target: Any, seed: int) -> Found:  # noqa: ARG001
    """Count the pairs that each axis drives."""
    language, _ = _ladder(target)
    if language.order == "pattern":
        asked = tuple(axis_table(language).bincount(minlength=language.axes).tolist())
    else:
        asked = language.sections
    moving = replace(language, still=())  # axes that stand still drive their pairs all the same
    freqs = language_freqs(moving, torch.float64)

    def rendered(places: Tensor) -> Tensor:
        return (places.unsqueeze(-1) * freqs).sum(-2)

    return section_shares(asked, language.pairs, rendered)


def visibility_of(target: Any, seed: int) -> Found:  # noqa: ARG001
    """Look at the radians that each axis turns over 32 cells; axes that are declared to stand still are left out."""
    language, freqs = _ladder(target)
    extents = [0.0 if axis in language.still else CELLS - 1.0 for axis in range(language.axes)]
    return axis_visibility(freqs, extents)


def reset_of(target: Any, seed: int) -> Found:  # noqa: ARG001
    """Pack two prompts and compare their ids with those that they have alone; of a packed row, look at the starts."""
    if isinstance(target, PackedIds):
        checks = position_dtype(target.ids)
        if checks.alarm:
            return judged("missing_reset", [checks], "")
        return missing_reset(target.ids, target.cu_seqlens_padded)
    if not isinstance(target, Family):
        raise UnfitError("it packs nothing")
    side = target.spec.grid.patch * target.spec.grid.merge
    prompts = [
        target.stream([Text(tokens=count), Image(size_hw=(4 * side, 6 * side)), Text(tokens=2)])
        for count in (3, 4)
    ]
    own = [target.position_ids(prompt).ids for prompt in prompts]
    row = pack(prompts, family=target)
    return missing_reset(row.ids, row.cu_seqlens_padded, own=own)


def tiles_of(target: Any, seed: int) -> Found:  # noqa: ARG001
    """Look for two tokens of one picture with the same ids."""
    stream, ids = _placed(target)
    pictures: dict[int, list[Tensor]] = {}
    for span in stream.spans:
        if span.kind in ("image", "video"):
            pictures.setdefault(span.segment, []).append(ids[:, span.start : span.stop].mT)
    if not pictures:
        raise UnfitError("the stream holds no picture")
    said = [tile_restart(torch.cat(views)) for views in pictures.values()]
    return max(said, key=lambda one: one.value or 0.0)


def _placed(target: Any) -> tuple[TokenStream, Tensor]:
    """Return a stream and its ids `[axes, n]`."""
    if isinstance(target, Family):
        side = target.spec.grid.patch * target.spec.grid.merge
        prompt: list[Any] = [Text(tokens=5), Image(size_hw=(4 * side, 6 * side)), Text(tokens=7)]
        stream = target.stream(prompt)
        return stream, target.position_ids(stream).ids
    if not isinstance(target, tuple):
        raise UnfitError("it is a layout without a stream")
    stream, spec = target
    if isinstance(spec, Family):
        return stream, spec.position_ids(stream).ids
    rule = _LINE if language_of(target).axes == 1 else _M_ROPE
    return stream, stream_ids(stream, rule).ids


LOOKS: dict[str, Callable[[Any, int], Found]] = {
    "pairing_mismatch": pairing_of,
    "precision": precision_of,
    "missing_reset": reset_of,
    "tile_restart": tiles_of,
    "section_shares": sections_of,
    "axis_visibility": visibility_of,
}
