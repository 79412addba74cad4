"""Attaching: a model of transformers asks us, not its own method, where its tokens stand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from inspect import signature
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from visionpos.errors import PositionError
from visionpos.vlm.families import Family
from visionpos.vlm.hf.probing import Probe, probes, token_of
from visionpos.vlm.hf.reading import TRANSFORMERS, placing_family, rule_of, served_rows
from visionpos.vlm.ids import PositionIds
from visionpos.vlm.pieces import AUDIO, IMAGE, TEXT, VIDEO
from visionpos.vlm.rules import Delta

METHOD = "get_rope_index"
SECONDS_KEYS = ("second_per_grid_ts", "second_per_grids")


@dataclass(frozen=True, slots=True)
class RopeIndex:
    """What stands in for a model's `get_rope_index`: the same arguments, ids of a family.

    Args:
        family: whose position rule.
        names: arguments of the method it stands for, in order.
        tokens: placeholder id -> type, for models that are given no token types; empty for those that are.
        fallback_seconds: seconds of a grid step where the caller gives none; None refuses.
    """

    family: Family
    names: tuple[str, ...]
    tokens: tuple[tuple[int, int], ...]
    fallback_seconds: float | None

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return ids `[axes, b, n]` and deltas `[b, 1]`, next position less the number of unpadded tokens."""
        pos = self.placed({**dict(zip(self.names, args, strict=False)), **kwargs})
        ids = pos.ids if pos.ids.dtype == torch.int64 else pos.ids.float()
        delta = pos.delta if pos.delta.dtype == torch.int64 else pos.delta.float()
        return ids, delta.unsqueeze(-1)

    def placed(self, given: Mapping[str, Any]) -> PositionIds:
        """Return the ids of a call's arguments, by name."""
        input_ids = given.get("input_ids")
        if not isinstance(input_ids, Tensor):
            raise PositionError(
                f"input_ids is {input_ids!r}; token ids [b, n] are required. For inputs_embeds, pass position_ids to "
                "the model."
            )
        mask = given.get("attention_mask")
        return self.family.position_ids_from_tokens(
            input_ids,
            self._types(input_ids, mask, given.get("mm_token_type_ids")),
            given.get("image_grid_thw"),
            given.get("video_grid_thw"),
            None if mask is None else mask.to(input_ids.dtype),
            self._seconds(given),
        )

    def _types(self, input_ids: Tensor, mask: Tensor | None, types: Tensor | None) -> Tensor:
        if self.tokens:
            types = torch.full_like(input_ids, TEXT)
            for token, kind in self.tokens:
                types[input_ids == token] = kind
            return types if mask is None else types * mask.bool()
        if types is None:
            raise PositionError(
                "mm_token_type_ids is None; a type a token is required: 0 text, 1 image, 2 video. Pass what the "
                "processor returns (return_mm_token_type_ids=True)."
            )
        return types

    def _seconds(self, given: Mapping[str, Any]) -> Any:
        for key in SECONDS_KEYS:
            if given.get(key) is not None:
                return given[key]
        return self.fallback_seconds


class Attachment:
    """A model whose `get_rope_index` is ours; `detach` or the end of a `with` gives it back its own.

    Args:
        model: the module that has the method.
        family: whose rule it follows now.
    """

    def __init__(self, model: nn.Module, family: Family) -> None:
        self.model = model
        self.family = family

    def detach(self) -> None:
        """Give the model its own method back; a second time does nothing."""
        vars(self.model).pop(METHOD, None)

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.detach()


def attach(model: nn.Module, dialect: str = "vendor", *, check: bool = True) -> Attachment:
    """Replace a model's `get_rope_index` by the rule of its family, read from its config.

    Forward, `generate` and decoding with a cache go on calling the method and keep their arguments; deltas follow the
    model's own convention, next position less the unpadded tokens, so that cached and uncached logits agree.

    Args:
        model: a transformers model that has the method, or one that holds it, on any device, of any size.
        dialect: "vendor", the source that wrote the weights, or "transformers", what the installed release does.
        check: ask the model's own method about small prompts first, and refuse if it differs from what dialect
            "transformers" says, as a release that is not known here would.

    Returns:
        An `Attachment`, whose `detach` undoes it. Copies and pickles of the model keep our method.

    Raises:
        PositionError: if nothing in the model has the method, the model type is not served (the message lists those
            that are), ours is attached already, or the check fails.
    """
    owner = owner_of(model)
    if METHOD in vars(owner):
        raise PositionError(
            "model has another get_rope_index attached already; its own is required. Call detach() first."
        )
    ours = rope_index(owner, dialect)
    if check:
        _check(owner)
    setattr(owner, METHOD, ours)
    return Attachment(owner, ours.family)


def owner_of(model: nn.Module) -> nn.Module:
    """Return the module of a model that has `get_rope_index` and a served config."""
    if not isinstance(model, nn.Module):
        raise PositionError(
            f"model is a {type(model).__name__}; a transformers model is required. Load it first."
        )
    found = [one for one in model.modules() if callable(getattr(type(one), METHOD, None))]
    for one in found:
        if getattr(getattr(one, "config", None), "model_type", None) in served_rows():
            return one
    able = ", ".join(name for name, one in sorted(served_rows().items()) if one.by_tokens)
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    raise PositionError(
        f"model {kind!r} has no {METHOD} that is served; one of {able} is required. Models with one-dimensional ids "
        "need nothing attached."
    )


def rope_index(owner: nn.Module, dialect: str) -> RopeIndex:
    """Return what stands in for the method of a module."""
    fam, served, data = placing_family(owner.config, dialect)
    return RopeIndex(
        family=_with_delta(fam) if dialect != TRANSFORMERS else fam,
        names=tuple(signature(getattr(type(owner), METHOD)).parameters)[1:],
        tokens=() if served.typed else _placeholders(data),
        fallback_seconds=1.0 if dialect == TRANSFORMERS else None,
    )


def own_ids(owner: nn.Module, probe: Probe) -> tuple[Tensor, Tensor]:
    """Return what the model's own method says of a probe, ids `[axes, b, n]` and deltas `[b]`."""
    method = getattr(type(owner), METHOD)
    known = signature(method).parameters
    given = {
        "input_ids": probe.input_ids,
        "mm_token_type_ids": probe.types,
        "image_grid_thw": probe.image_grid_thw,
        "video_grid_thw": probe.video_grid_thw,
        "attention_mask": probe.mask,
        **dict.fromkeys(SECONDS_KEYS, probe.seconds),
    }
    try:
        ids, delta = method(owner, **{key: value for key, value in given.items() if key in known})
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise PositionError(
            f"{METHOD} of this model raises {type(error).__name__} on {probe.name!r}: {str(error).rstrip('.')}. "
            "Complete its config, or pass check=False to attach all the same."
        ) from error
    return ids, delta.flatten()


def our_ids(ours: RopeIndex, probe: Probe) -> PositionIds:
    """Return what we say of a probe."""
    return ours.placed(
        {
            "input_ids": probe.input_ids,
            "mm_token_type_ids": probe.types,
            "image_grid_thw": probe.image_grid_thw,
            "video_grid_thw": probe.video_grid_thw,
            "attention_mask": probe.mask,
            SECONDS_KEYS[0]: probe.seconds,
        }
    )


def probes_of(owner: nn.Module) -> list[Probe]:
    """Return the probes that the method of a module can be asked about."""
    fam, served, data = placing_family(owner.config, TRANSFORMERS)
    return probes(fam, served, data)


def first_difference(
    ours: Tensor, theirs: Tensor, mask: Tensor, within: float = 1e-3
) -> tuple[int, int] | None:
    """Return row and token of the first real token that stands elsewhere, None if none does."""
    apart = ((ours.double() - theirs.double()).abs() > within).any(0) & mask.bool()
    places = apart.nonzero()
    return None if not len(places) else (int(places[0, 0]), int(places[0, 1]))


def _check(owner: nn.Module) -> None:
    """Refuse a model whose own method is not the one known here as dialect "transformers"."""
    ours = rope_index(owner, TRANSFORMERS)
    for probe in probes_of(owner):
        for row in range(len(probe.input_ids)) if _shares(ours) else [None]:
            one = probe if row is None else _row(probe, row)
            theirs, delta = own_ids(owner, one)
            mine = our_ids(ours, one)
            at = first_difference(mine.ids, theirs, one.mask)
            if at is not None or (mine.delta.double() - delta.double()).abs().max() > 1e-3:
                place = "delta" if at is None else f"token {at[1]}"
                says = (
                    (delta, mine.delta)
                    if at is None
                    else (theirs[:, at[0], at[1]], mine.ids[:, at[0], at[1]])
                )
                raise PositionError(
                    f"{METHOD} of this model puts {place} of {one.name!r} at {says[0].tolist()} and dialect "
                    f"'transformers' at {says[1].tolist()}; the two must agree. This release is not known here: pass "
                    "check=False to attach all the same."
                )


def _shares(ours: RopeIndex) -> bool:
    """Return whether the model's own method counts through a batch what belongs to a row."""
    return "ordinal" in rule_of(ours.family).axes


def _row(probe: Probe, row: int) -> Probe:
    """Return one row of a probe whose rows have one image each, or none."""
    grids = probe.image_grid_thw
    if len(probe.input_ids) == 1 or grids is None:
        return probe
    real = slice(row, row + 1)
    return replace(
        probe,
        input_ids=probe.input_ids[real],
        types=probe.types[real],
        mask=probe.mask[real],
        image_grid_thw=grids[real],
    )


def _with_delta(fam: Family) -> Family:
    """Return the family with deltas as models of transformers add them: next position less unpadded tokens."""
    rule = rule_of(fam)
    if rule.delta.from_ == "none":
        return fam
    return replace(fam, spec=replace(fam.spec, rule=replace(rule, delta=Delta())))


def _placeholders(data: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
    kinds = ((IMAGE, "image"), (VIDEO, "video"), (AUDIO, "audio"))
    found = ((token_of(data, name), kind) for kind, name in kinds)
    return tuple((token, kind) for token, kind in found if token is not None)
