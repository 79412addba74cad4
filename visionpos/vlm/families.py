"""Families: one published model, from media sizes to the rotation of its language model.

A name enters; a frozen `Family` leaves, whose methods are the VLM line: plan, stream, position ids, rotation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from visionpos.errors import PositionError
from visionpos.geometry import Rotation
from visionpos.geometry.arguments import checked
from visionpos.kernels.choices import Accuracy
from visionpos.vlm.clips import sampled_frames
from visionpos.vlm.grammar import FamilySpec, VideoSpec
from visionpos.vlm.ids import PositionIds, placed_tokens, stream_ids
from visionpos.vlm.inputs import Grids
from visionpos.vlm.instants import Seconds
from visionpos.vlm.language import LanguageSpec
from visionpos.vlm.loading import VENDOR, family_spec, resolve
from visionpos.vlm.makers import check_maker
from visionpos.vlm.rotary import language_freqs, language_rotation
from visionpos.vlm.rules import Rule
from visionpos.vlm.segments import Audio, Image, Segment, Special, Text, Video
from visionpos.vlm.serialize import image_runs, text_run, tokenised, video_runs
from visionpos.vlm.sound import AudioSpec, audio_runs, clip_with_sound
from visionpos.vlm.stream import Marker, Run, TokenStream
from visionpos.vlm.tiling import Plan, media_plan
from visionpos.vlm.tokens import Tokenizer


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

    def plan(self, media: Image | Video, images: int = 1) -> Plan:
        """Return the views, grids and padding of an image or a clip, and the source rectangle of every token.

        Args:
            media: the size before any resizing.
            images: number of images of the prompt; some families cut an image only where it is alone.

        Raises:
            PositionError: if the family takes no clips, or refuses the size or the number of frames.

        Example:
            >>> plan = family("qwen2_5_vl").plan(Image(size_hw=(480, 640)))
            >>> plan.views[0].size_hw, plan.views[0].tokens.shape, plan.cells
            ((476, 644), (1, 17, 23), 391)
        """
        if isinstance(media, Video):
            self._video()
        try:
            return media_plan(media, self.spec, images)
        except PositionError as error:
            raise PositionError(f"{self.name}: {error}") from None

    def stream(
        self, segments: Iterable[Segment], tokenizer: Tokenizer | None = None
    ) -> TokenStream:
        """Return the token stream of a prompt.

        Args:
            segments: `Text`, `Image`, `Video`, `Audio` and `Special` in reading order.
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
        if not isinstance(segments, Iterable):
            raise PositionError(
                f"segments is {segments!r}; a list of segments is required. Pass a list."
            )
        runs: list[Run] = []
        given = list(segments)
        images = sum(isinstance(segment, Image) for segment in given)
        seen = 0
        for number, segment in enumerate(given):
            try:
                runs += self._runs(segment, number, seen, images)
                seen += isinstance(segment, Image)
            except PositionError as error:
                raise PositionError(f"segment {number}: {error}") from None
        return TokenStream(tokenised(runs, tokenizer), made_by=self)

    @checked
    def position_ids(
        self, stream: TokenStream, *, device: torch.device | None = None
    ) -> PositionIds:
        """Return where every token of a stream stands.

        Args:
            stream: from this family's `stream`, or from one that writes the same stream: another dialect, or another
                rule by overlay. A stream put together by hand is taken as it is.
            device: where ids are wanted: rows of cells and stretches of text are sent there and spread there, without
                waiting for the device. The CPU when None.

        Returns:
            `ids [axes, n]`, `next_position []`, `delta []`.

        Raises:
            PositionError: if another family made the stream, or the rule counts seconds and a clip has none.

        Example:
            >>> fam = family("qwen2_5_vl")
            >>> fam.position_ids(fam.stream([Text(tokens=1), Image((56, 84))])).ids.tolist()
            [[0, 1, 2, 2, 2, 2, 2, 2, 5], [0, 1, 2, 2, 2, 3, 3, 3, 5], [0, 1, 2, 3, 4, 2, 3, 4, 5]]
        """
        check_maker(stream, self)
        return stream_ids(stream, self._rule(), device=device)

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
            modality: like input_ids: 0 text, 1 image, 2 video, 3 audio (mm_token_type_ids).
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
        return placed_tokens(
            input_ids,
            modality,
            image_grids,
            video_grids,
            attention_mask,
            seconds_per_grid,
            rule=self._rule(),
            merge=(self.spec.grid.merge, (self.spec.video or self.spec).grid.merge),
        )

    @property
    def frequencies(self) -> Tensor:
        """Return `[axes, pairs]` float32 radians per position, zero where an axis does not drive a pair."""
        return language_freqs(self._language(), torch.float32)

    @checked
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
        return language_rotation(self._language(), ids, accuracy)

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
        video = self._video()
        try:
            return sampled_frames(video, total_frames, source_fps)
        except PositionError as error:
            raise PositionError(f"{self.name}: {error}") from None

    def _runs(self, segment: Segment, number: int, index: int, images: int) -> list[Run]:
        """Return the runs of one segment.

        Args:
            segment: text, image, clip or special token.
            number: which of the prompt's segments it is.
            index: number of images before it.
            images: number of images of the prompt.
        """
        if isinstance(segment, Text):
            return [text_run(segment, number)]
        if isinstance(segment, Special):
            return [Marker(segment=number, name=segment.name, node="special")]
        if isinstance(segment, Image):
            plan = self.plan(segment, images)
            spec = self.spec if plan.tiles_rc is not None else self.spec.untiled or self.spec
            return image_runs(plan, spec.stream, segment=number, cell=spec.cell, index=index)
        if isinstance(segment, Video):
            plan, video = self.plan(segment), self._video()
            clip = video_runs(plan, video.stream, segment=number, cell=video.cell)
            if segment.audio is None:
                return clip
            return clip_with_sound(clip, segment.audio, self._audio(), self._rule(), segment=number)
        if isinstance(segment, Audio):
            return audio_runs(segment, self._audio(), segment=number)
        raise PositionError(
            f"{segment!r} is no segment; Text, Image, Video, Audio or Special is required. Wrap a string in Text()."
        )

    def _video(self) -> VideoSpec:
        if self.spec.video is None:
            raise PositionError(f"{self.name} takes no video. Pass its frames as Images.")
        return self.spec.video

    def _audio(self) -> AudioSpec:
        if self.spec.audio is None:
            raise PositionError(f"Audio is given and {self.name} takes no audio. Leave it out.")
        return self.spec.audio

    def _rule(self) -> Rule:
        if self.spec.rule is None:
            raise PositionError(
                f"{self.name} has no position rule in its data. Add `rule:` by overlay, such as {{axes: [index]}}."
            )
        return self.spec.rule

    def _language(self) -> LanguageSpec:
        if self.spec.language is None:
            raise PositionError(
                f"{self.name} has no rotary layout in its data: it differs from checkpoint to checkpoint. Add the "
                "checkpoint's by overlay, such as {'language': {'head_dim': 128, 'theta': 10000.0, 'sections': [64], "
                "'order': 'contiguous', 'pairing': 'half'}}; sections sum to head_dim / 2, one an axis of the ids."
            )
        return self.spec.language


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
        ConfigError: if name, dialect or variant is unknown (the message lists the known ones), or a key of the data is;
            if an overlay gives the rotary layout another number of axes than the ids.

    Example:
        >>> family("qwen3_vl").dialects
        ('vendor', 'qwen_vl_utils', 'transformers')
    """
    dialect = VENDOR if dialect is None else dialect
    found = resolve(name, dialect, variant, {} if overlay is None else overlay)
    return Family(
        name=name,
        dialect=dialect,
        variant=variant,
        dialects=found.dialects,
        variants=found.variants,
        spec=family_spec(found.data, source=f"configs/vlm/{name}.yaml"),
    )
