"""Families: one published model, from media sizes to the rotation of its language model.

A name enters; a frozen `Family` leaves, whose methods are the VLM line: plan, stream, position ids, rotation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from visionpos.errors import PositionError
from visionpos.geometry import Rotation, angles, section_freqs
from visionpos.vlm.grammar import FamilySpec, LanguageSpec, VideoSpec
from visionpos.vlm.ids import PositionIds, ids_from_tokens, stream_ids
from visionpos.vlm.inputs import Grids
from visionpos.vlm.instants import Seconds
from visionpos.vlm.loading import VENDOR, family_spec, resolve
from visionpos.vlm.segments import Audio, Image, Segment, Special, Text, Video
from visionpos.vlm.serialize import image_runs, text_run, tokenised, video_runs
from visionpos.vlm.stream import AUDIO, Marker, Run, TokenStream
from visionpos.vlm.tiling import Plan, image_plan, sampled_frames, video_plan
from visionpos.vlm.tokens import Tokenizer

Accuracy = Literal["reference", "exact"]
EXACT_BEYOND = 2**17  # float32 angles lose more than 0.01 rad from here on


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A published model's image sizes, token stream, position ids and rotary layout.

    Build it with `family(name)`.

    Args:
        name: the YAML it was read from.
        dialect: whose rules it follows: "vendor" is the source that wrote the weights.
        variant: a named variant of the model, or None.
        dialects: the dialects that can be asked for.
        variants: the variants that can be asked for.
        spec: the resolved data.
    """

    name: str
    dialect: str
    variant: str | None
    dialects: tuple[str, ...]
    variants: tuple[str, ...]
    spec: FamilySpec

    def plan(self, media: Image | Video) -> Plan:
        """Return the views, grids and padding of an image or a clip, and the source rectangle of every token.

        Args:
            media: the size before any resizing.

        Raises:
            PositionError: if the family takes no clips, or refuses the size or the number of frames.

        Example:
            >>> plan = family("qwen2_5_vl").plan(Image(size_hw=(480, 640)))
            >>> plan.views[0].size_hw, plan.views[0].tokens.shape, plan.cells
            ((476, 644), (1, 17, 23), 391)
        """
        try:
            if isinstance(media, Video):
                return video_plan(media, self._video())
            return image_plan(media, self.spec)
        except PositionError as error:
            raise PositionError(f"{self.name}: {error}") from None

    def stream(
        self, segments: Iterable[Segment], tokenizer: Tokenizer | None = None
    ) -> TokenStream:
        """Return the token stream of a prompt.

        Args:
            segments: `Text`, `Image`, `Video` and `Special` in reading order.
            tokenizer: from text to ids: a tokenizer with `encode`, a callable, or a mapping. Neighbouring texts are
                joined before it sees them. Without one, a text counts one token for each whitespace-separated word, and
                `stream.text_is_symbolic` is True.

        Raises:
            PositionError: naming the segment, if the family does not take it.

        Example:
            >>> stream = family("qwen2_5_vl").stream([Text("Describe"), Image(size_hw=(56, 84))])
            >>> stream.length, stream.names[:3], stream.text_is_symbolic
            (9, ('Describe', '<|vision_start|>', '<|image_pad|>'), True)
        """
        runs: list[Run] = []
        for number, segment in enumerate(segments):
            try:
                runs += self._runs(segment, number)
            except PositionError as error:
                raise PositionError(f"segment {number}: {error}") from None
        return TokenStream(tokenised(runs, tokenizer))

    def position_ids(self, stream: TokenStream) -> PositionIds:
        """Return where every token of a stream stands.

        Args:
            stream: from this family's `stream`.

        Returns:
            `ids [axes, n]`, `next_position []`, `delta []`.

        Raises:
            PositionError: if the rule counts seconds and a clip has none.

        Example:
            >>> fam = family("qwen2_5_vl")
            >>> fam.position_ids(fam.stream([Text(tokens=1), Image((56, 84))])).ids.tolist()
            [[0, 1, 2, 2, 2, 2, 2, 2, 5], [0, 1, 2, 2, 2, 3, 3, 3, 5], [0, 1, 2, 3, 4, 2, 3, 4, 5]]
        """
        return stream_ids(stream, self.spec.rule)

    def position_ids_from_tokens(
        self,
        input_ids: Tensor,
        modality: Tensor,
        image_grids: Grids | None = None,
        video_grids: Grids | None = None,
        attention_mask: Tensor | None = None,
        seconds_per_grid: Seconds | Sequence[Seconds] | Tensor | None = None,
    ) -> PositionIds:
        """Return where every token of a prompt or a padded batch stands, from what a processor returns.

        Args:
            input_ids: `[n]` or `[b, n]`; only shape and device are read.
            modality: like input_ids: 0 text, 1 image, 2 video (mm_token_type_ids).
            image_grids: `[images, 3]` frames, height, width in patches, in reading order over the batch.
            video_grids: `[videos, 3]` the same for clips.
            attention_mask: like input_ids, 0 for padding on either side.
            seconds_per_grid: temporal patch / sampled fps, one number or one a clip; a rule that counts seconds
                needs it.

        Returns:
            `ids [axes, n]` or `[axes, b, n]` int64, `next_position` and `delta` `[]` or `[b]`.

        Raises:
            PositionError: naming row, item, expected and found, if types, mask, grids and times do not fit together.
        """
        if (modality == AUDIO).any():
            row = int((modality == AUDIO).reshape(-1, modality.shape[-1]).any(-1).int().argmax())
            raise PositionError(
                f"modality is {AUDIO} (audio) in row {row}; {self.name} takes no audio. "
                "Type those tokens 0 if they are text."
            )
        return ids_from_tokens(
            input_ids,
            modality,
            image_grids,
            video_grids,
            attention_mask,
            seconds_per_grid,
            rule=self.spec.rule,
            merge=(self.spec.grid.merge, (self.spec.video or self.spec).grid.merge),
        )

    @property
    def frequencies(self) -> Tensor:
        """Return `[axes, pairs]` float32 radians per position, zero where an axis does not drive a pair."""
        return self._frequencies(torch.float32)

    def rotation(self, ids: Tensor, accuracy: Accuracy | None = None) -> Rotation:
        """Return the rotation of the language model's queries and keys.

        Args:
            ids: `[axes, n]` or `[axes, b, n]`.
            accuracy: "reference" computes angles in float32, bit-equal to transformers; "exact" in float64. By default
                exact if an id is beyond 2**17, where float32 angles lose more than 0.01 rad; that is looked up on the
                CPU alone. Say it yourself for ids on an accelerator or in a compiled graph.

        Returns:
            cos and sin `[n, pairs]` or `[b, 1, n, pairs]` float32, which broadcast over heads.

        Raises:
            PositionError: if the ids have another number of axes, or the family has no rotary layout.

        Example:
            >>> family("qwen2_vl").rotation(torch.zeros(3, 5, dtype=torch.int64)).cos.shape
            torch.Size([5, 64])
        """
        if accuracy is None:
            look = (
                ids.device.type == "cpu" and not torch.compiler.is_compiling() and ids.numel() > 0
            )
            accuracy = "exact" if look and int(ids.abs().max()) > EXACT_BEYOND else "reference"
        if accuracy not in ("reference", "exact"):
            raise PositionError(f"accuracy is {accuracy!r}; it must be 'reference' or 'exact'.")
        dtype = torch.float64 if accuracy == "exact" else torch.float32
        freqs = self._frequencies(dtype).to(ids.device)
        if ids.ndim not in (2, 3) or ids.shape[0] != len(freqs):
            raise PositionError(
                f"ids have shape {tuple(ids.shape)}; [{len(freqs)}, n] or [{len(freqs)}, b, n] is required. "
                "Pass the ids of this family's position_ids."
            )
        coords = ids.movedim(0, -1).to(dtype)  # [n, axes]
        turns = angles(coords if ids.ndim == 2 else coords.unsqueeze(1), freqs)
        rotation = Rotation.of(turns, self._language().pairing)
        return Rotation(rotation.cos.float(), rotation.sin.float(), rotation.pairing)

    def frame_count(self, total_frames: int, source_fps: float) -> int:
        """Return how many frames of a clip the family samples.

        Args:
            total_frames: frames of the clip, at least 1.
            source_fps: its frames per second, above 0.

        Raises:
            PositionError: if the clip is shorter than the smallest number, or a value is out of range.

        Example:
            >>> family("qwen2_vl").frame_count(total_frames=300, source_fps=30.0)
            20
        """
        try:
            return sampled_frames(self._video(), total_frames, source_fps)
        except PositionError as error:
            raise PositionError(f"{self.name}: {error}") from None

    def _runs(self, segment: Segment, number: int) -> list[Run]:
        """Return the runs of one segment."""
        if isinstance(segment, Text):
            return [text_run(segment, number)]
        if isinstance(segment, Special):
            return [Marker(segment=number, name=segment.name, node="special")]
        if isinstance(segment, Image):
            plan = self.plan(segment)
            return image_runs(plan, self.spec.stream, segment=number, cell=self.spec.cell)
        if isinstance(segment, Video):
            plan, video = self.plan(segment), self._video()
            return video_runs(plan, video.stream, segment=number, cell=video.cell)
        if isinstance(segment, Audio):
            raise PositionError(f"Audio is given and {self.name} takes no audio. Leave it out.")
        raise PositionError(
            f"{segment!r} is no segment; Text, Image, Video, Audio or Special is required. Wrap a string in Text()."
        )

    def _video(self) -> VideoSpec:
        if self.spec.video is None:
            raise PositionError(f"{self.name} takes no video. Pass its frames as Images.")
        return self.spec.video

    def _language(self) -> LanguageSpec:
        if self.spec.language is None:
            raise PositionError(
                f"{self.name} has no rotary layout in its data. Add `language:` by overlay."
            )
        return self.spec.language

    def _frequencies(self, dtype: torch.dtype) -> Tensor:
        language = self._language()
        return section_freqs(
            language.rotary_dim or language.head_dim,
            language.sections,
            theta=language.theta,
            order=language.order,
            dtype=dtype,
        )


def family(
    name: str,
    dialect: str | None = None,
    variant: str | None = None,
    overlay: Mapping[str, Any] | None = None,
) -> Family:
    """Return a family of models by name.

    Args:
        name: one of `family_names()`.
        dialect: whose rules to follow where popular sources differ; by default "vendor", the source that wrote the
            weights.
        variant: a named variant, if the family has any.
        overlay: your own changes in the family's grammar, laid on last, such as `{"grid": {"patch": 16}}`.

    Raises:
        ConfigError: if name, dialect or variant is unknown (the message lists the known ones), or a key of the data is.

    Example:
        >>> family("qwen3_vl").dialects
        ('vendor', 'qwen_vl_utils', 'transformers')
    """
    found = resolve(name, dialect or VENDOR, variant, overlay or {})
    return Family(
        name=name,
        dialect=dialect or VENDOR,
        variant=variant,
        dialects=found.dialects,
        variants=found.variants,
        spec=family_spec(found.data, source=f"configs/vlm/{name}.yaml"),
    )
