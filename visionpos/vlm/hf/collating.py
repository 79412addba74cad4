"""Collating: examples as a processor returns them become one batch for the Trainer of transformers, or for TRL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from visionpos.errors import PositionError
from visionpos.geometry.grid import is_whole
from visionpos.geometry.ranges import is_integer
from visionpos.vlm.batches import merge_rows
from visionpos.vlm.families import Family
from visionpos.vlm.hf.reading import rule_of
from visionpos.vlm.ids import PositionIds
from visionpos.vlm.padding import IGNORED, Side, stacked
from visionpos.vlm.pieces import TEXT
from visionpos.vlm.prompt_rows import pack_rows

SECONDS_KEYS = ("second_per_grid_ts", "second_per_grids", "video_second_per_grid")
PER_TOKEN = ("input_ids", "labels", "attention_mask", "mm_token_type_ids", "token_type_ids")
LEFT_OUT = ("position_ids", "rope_deltas", "cache_position")  # made here, or of another batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Collator:
    """Examples in, a batch with position ids out: padded rows, or one packed row.

    An example is what a processor returns for one prompt, with or without its leading batch axis: `input_ids`,
    `mm_token_type_ids`, grids, pixels, and `labels` where the loss is not over all text. Pass the collator as
    `data_collator=` with `remove_unused_columns=False`; TRL takes it alike.

    Args:
        family: whose rule places the tokens; `family_of(model.config)`.
        packing: False pads to `[b, n]` with an attention mask. True lays prompts end to end in `[1, n]`: position ids
            get a fourth row, the place in the prompt, and there is no mask and no cache, which is how transformers
            keeps prompts apart.
        pad_token_id: token of padding.
        side: where padding goes; a packed row is padded at its end.
        pad_to_multiple_of: the row's length is a multiple of this.
        varlen: with packing, give boundaries to FlashAttention too (`cu_seq_lens_q`, `max_length_q` and the same of k).

    Raises:
        PositionError: if an option is out of range.
    """

    family: Family
    packing: bool = False
    pad_token_id: int = 0
    side: Side = "right"
    pad_to_multiple_of: int = 1
    varlen: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.family, Family):
            raise PositionError(
                f"family is {self.family!r}; a Family is required. Use family_of(model.config)."
            )
        if self.side not in ("left", "right") or not is_whole(self.pad_to_multiple_of):
            raise PositionError(
                f"side is {self.side!r} and pad_to_multiple_of {self.pad_to_multiple_of!r}; 'left' or 'right' and a "
                "whole number of at least 1 are required."
            )
        token: Any = self.pad_token_id
        if not is_whole(token) and not (is_integer(token) and token == 0):
            raise PositionError(
                f"pad_token_id is {token!r}; a token id of at least 0 is required. Pass tokenizer.pad_token_id, or "
                "eos_token_id where it has none."
            )
        flags: tuple[Any, ...] = (self.packing, self.varlen)
        if not all(isinstance(flag, bool) for flag in flags):
            raise PositionError(
                f"packing is {self.packing!r} and varlen {self.varlen!r}; True or False is required of both."
            )
        if self.varlen and not self.packing:
            raise PositionError(
                "varlen is True without packing; boundaries belong to packed rows. Pass packing=True."
            )

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return one batch.

        Args:
            features: examples, in order.

        Returns:
            input_ids, labels and mm_token_type_ids `[b, n]`; position_ids `[axes, b, n]` and attention_mask `[b, n]`,
            or, packed, position_ids `[1 + axes, 1, n]` and use_cache False; grids, seconds and pixels of all examples
            one after another.

        Raises:
            PositionError: naming the example, if one has no tokens, or its types, grids and labels do not fit.
        """
        given: Any = features
        if not isinstance(given, Sequence) or not len(given):
            raise PositionError(
                f"features is {features!r}; a list of at least one example is required."
            )
        examples = [_example(feature, number) for number, feature in enumerate(features)]
        rows = [self._placed(example, number) for number, example in enumerate(examples)]
        batch = self._packed(examples, rows) if self.packing else self._padded(examples, rows)
        return {**batch, **_media(examples)}

    def _placed(self, example: Mapping[str, Tensor], number: int) -> PositionIds:
        """Return the ids of one example."""
        seconds = next((example[key] for key in SECONDS_KEYS if key in example), None)
        try:
            return self.family.position_ids_from_tokens(
                example["input_ids"],
                example["mm_token_type_ids"],
                example.get("image_grid_thw"),
                example.get("video_grid_thw"),
                None,
                seconds,
            )
        except PositionError as error:
            raise PositionError(f"example {number}: {error}") from None

    def _padded(
        self, examples: Sequence[Mapping[str, Tensor]], rows: Sequence[PositionIds]
    ) -> dict[str, Any]:
        """Return examples as rows of one length."""
        longest = max(len(example["input_ids"]) for example in examples)
        length = longest + -longest % self.pad_to_multiple_of
        placed = merge_rows(rows, rule_of(self.family), side=self.side, length=length)
        mask = torch.ones_like(placed.ids[0]) if placed.mask is None else placed.mask.long()

        def padded(key: str, value: int) -> Tensor:
            return stacked([example[key] for example in examples], length, self.side, value)

        return {
            "input_ids": padded("input_ids", self.pad_token_id),
            "attention_mask": mask,
            "position_ids": placed.ids,
            "labels": padded("labels", IGNORED),
            "mm_token_type_ids": padded("mm_token_type_ids", TEXT),
        }

    def _packed(
        self, examples: Sequence[Mapping[str, Tensor]], rows: Sequence[PositionIds]
    ) -> dict[str, Any]:
        """Return examples end to end in one row."""
        row = pack_rows(
            rows, pad_id=rule_of(self.family).pad_id, pad_to_multiple=self.pad_to_multiple_of
        )

        def filled(key: str, value: int) -> Tensor:
            return row.fill([example[key] for example in examples], value).unsqueeze(0)

        labels = filled("labels", IGNORED)
        # A causal loss shifts by one: the first token of a prompt must not be asked of the last of another.
        begins = row.cu_seqlens_padded[:-1].long()
        labels[:, begins[begins < row.length]] = IGNORED
        batch: dict[str, Any] = {
            "input_ids": filled("input_ids", self.pad_token_id),
            "position_ids": row.four_rows,
            "labels": labels,
            "mm_token_type_ids": filled("mm_token_type_ids", TEXT),
            "use_cache": False,  # with a cache, transformers does not look for packed prompts
        }
        if self.varlen:
            ends, longest = row.padded_seqlens()
            batch |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
            batch |= {"max_length_q": longest, "max_length_k": longest}
        return batch


def _example(feature: Any, number: int) -> dict[str, Tensor]:
    """Return an example as tensors without padding, with types and labels."""
    out = _tensors(feature, number)
    tokens = out["input_ids"]
    if "mm_token_type_ids" not in out:
        if "image_grid_thw" in out or "video_grid_thw" in out:
            raise PositionError(
                f"example {number} has grids and no mm_token_type_ids; a type a token is required. Pass "
                "return_mm_token_type_ids=True to the processor."
            )
        out["mm_token_type_ids"] = torch.zeros_like(tokens)
    per_token = [key for key in PER_TOKEN if key in out]
    for key in per_token:
        if out[key].shape != tokens.shape:
            raise PositionError(
                f"example {number}: {key} has shape {tuple(out[key].shape)} and input_ids {tuple(tokens.shape)}; one "
                "entry a token is required. Look for truncation of one without the other."
            )
    if "labels" not in out:
        out["labels"] = torch.where(out["mm_token_type_ids"] == TEXT, tokens, IGNORED)
    mask = out.pop("attention_mask", torch.ones_like(tokens))
    keep = mask == 1
    if bool((~keep & (mask != 0)).any()):
        raise PositionError(
            f"example {number}: attention_mask holds {mask.unique().tolist()}; 0 or 1 is required. Give every packed "
            "document as an example of its own: ids restart with each."
        )
    return {key: value[keep] if key in PER_TOKEN else value for key, value in out.items()}


def _tensors(feature: Any, number: int) -> dict[str, Tensor]:
    """Return what an example holds as tensors, `[n]` where there is one entry a token."""
    if not isinstance(feature, Mapping) or feature.get("input_ids") is None:
        raise PositionError(
            f"example {number} is a {type(feature).__name__} without input_ids; what a processor returns for one "
            "prompt is required. Tokenise before collating, and pass remove_unused_columns=False."
        )
    out = {}
    for key, value in feature.items():
        if value is None or key in LEFT_OUT:
            continue
        out[key] = _tensor(value, f"example {number}: {key}")
        if key not in PER_TOKEN and tuple(out[key].shape) == (0,):
            del out[key]  # a column of a dataset in which this prompt has nothing
        elif key in PER_TOKEN:
            if out[key].is_floating_point() and not bool((out[key] % 1 == 0).all()):
                raise PositionError(
                    f"example {number}: {key} holds fractions; whole numbers are required. Look for a column of "
                    "another kind under this name."
                )
            line = out[key].long()
            out[key] = line[0] if line.ndim == 2 and len(line) == 1 else line
    tokens = out["input_ids"]
    if tokens.ndim != 1 or not len(tokens):
        raise PositionError(
            f"example {number}: input_ids have shape {tuple(tokens.shape)}; one prompt [n] or [1, n], n at least 1, is "
            "required. Give every prompt as an example of its own."
        )
    return out


def _tensor(value: Any, name: str) -> Tensor:
    try:
        held = torch.as_tensor(value).detach()
        if held.is_complex() or held.is_meta:
            raise TypeError
        return held
    except (TypeError, ValueError, RuntimeError):
        raise PositionError(
            f"{name} is a {type(value).__name__}; a tensor of real numbers, or such numbers, is required. Drop columns "
            "that a model does not take, such as texts and image files."
        ) from None


def _media(examples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return grids, seconds and pixels of all examples, one after another."""
    keys = {key: None for example in examples for key in example if key not in PER_TOKEN}
    out = {}
    for key in keys:
        parts = [torch.atleast_1d(example[key]) for example in examples if key in example]
        if len({part.shape[1:] for part in parts}) > 1:
            raise PositionError(
                f"{key} has shapes {[tuple(part.shape) for part in parts]} in the examples; equal sides but for the "
                "first are required. Process all examples with one processor."
            )
        out[key] = torch.cat(parts)
    return out
