"""TokenStream: a prompt as runs of symbolic tokens, before any tokenizer or tensor.

A family's serialiser writes it; position rules, token ids and counts are all read from the same runs, so the number of
placeholders is the number of features by construction.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from visionpos.errors import PositionError
from visionpos.geometry import Grid
from visionpos.vlm.pieces import (
    AUDIO,
    IMAGE,
    MODALITY_NAMES,
    TEXT,
    VIDEO,
    Cells,
    Marker,
    Run,
    Words,
)
from visionpos.vlm.tokens import Tokenizer, token_id

if TYPE_CHECKING:
    from visionpos.vlm.families import Family

__all__ = [
    "AUDIO", "IMAGE", "MODALITY_NAMES", "TEXT", "VIDEO", "Cells", "Marker", "Run", "Span", "TokenStream", "Words",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Where a text, a view, a frame or a clip lies in the stream.

    Args:
        kind: "text", "special", "image", "video" or "audio".
        segment: which of the prompt's segments it belongs to, from 0; timestamps belong to their clip.
        start: first token.
        stop: one past the last token. Markers inside a view (row breaks) count, markers around it do not.
        grid: the raster of a view, frame or clip; None for text.
        node: what the raster is: "global", "tile", "tiles", "frame", "video" or "audio"; empty for text.
        view: view or raster of the image, from 0.
        frame: time step of the clip, or token of the sound, at which the grid starts.
        row: row of the raster, for the spans of `row_spans`; None for a whole raster.
    """

    kind: str
    segment: int
    start: int
    stop: int
    grid: Grid | None = None
    node: str = ""
    view: int = 0
    frame: int = 0
    row: int | None = None


@dataclass(frozen=True, slots=True)
class TokenStream:
    """A prompt as symbolic tokens.

    Args:
        runs: runs in reading order.
        made_by: the family whose `stream` wrote it, which no other family's ids may be laid on; None for a stream put
            together by hand. Streams of the same runs are equal whoever made them.

    Example:
        >>> stream = TokenStream((Words(segment=0, text="a cat", count=2, symbolic=True),))
        >>> stream.length, stream.names, stream.text_is_symbolic
        (2, ('a', 'cat'), True)
    """

    runs: tuple[Run, ...]
    made_by: Family | None = field(default=None, compare=False, repr=False)

    @property
    def length(self) -> int:
        """Return the number of tokens, text counted as `text_is_symbolic` says."""
        return sum(run.count for run in self.runs)

    def __len__(self) -> int:
        return self.length

    @property
    def text_is_symbolic(self) -> bool:
        """Return whether some text was counted in words, so that lengths are not those of a real prompt."""
        return any(isinstance(run, Words) and run.symbolic for run in self.runs)

    @property
    def names(self) -> tuple[str, ...]:
        """Return one symbolic name a token."""
        return tuple(name for run in self.runs for name in run.names)

    @property
    def modality(self) -> Tensor:
        """Return `[n]` int64: 0 text and markers, 1 image, 2 video, 3 audio; as mm_token_type_ids."""
        return self._by_token(
            [TEXT if isinstance(run, Words) else run.modality for run in self.runs], torch.int64
        )

    @property
    def is_embedding(self) -> Tensor:
        """Return `[n]` bool: True where the encoder's features, or embeddings that go with them, replace a placeholder.

        Cells and learned markers (a newline embedding); not the tokens of the vocabulary that part rows.
        """
        return self._by_token(
            [
                isinstance(run, Cells) or (isinstance(run, Marker) and bool(run.stands_on))
                for run in self.runs
            ],
            torch.bool,
        )

    @property
    def is_feature(self) -> Tensor:
        """Return `[n]` bool: True where a token stands for one cell, that is one feature of the encoder."""
        return self._by_token([isinstance(run, Cells) for run in self.runs], torch.bool)

    def _by_token(self, values: list[int] | list[bool], dtype: torch.dtype) -> Tensor:
        """Return one value a token, from one value a run."""
        counts = torch.tensor([run.count for run in self.runs], dtype=torch.int64)
        return torch.tensor(values, dtype=dtype).repeat_interleave(counts)

    @property
    def spans(self) -> tuple[Span, ...]:
        """Return where each text, special token, view, frame and clip lies."""
        return tuple(_spans(self.placed()))

    @property
    def row_spans(self) -> tuple[Span, ...]:
        """Return where each row of cells lies, in reading order; markers do not count."""
        return tuple(
            replace(_raster_span(run, start + at), stop=start + at + run.grid.width, row=row)
            for start, run in self.placed()
            if isinstance(run, Cells)
            for row, at in enumerate(range(0, run.count, run.grid.width), start=run.row)
        )

    def placed(self) -> Iterator[tuple[int, Run]]:
        """Yield every run with the place of its first token."""
        starts = accumulate((run.count for run in self.runs), initial=0)
        return zip(starts, self.runs, strict=False)  # the last start is the length

    def token_ids(self, tokenizer: Tokenizer | None = None) -> Tensor:
        """Return `[n]` int64 vocabulary ids.

        Args:
            tokenizer: gives the ids of markers and placeholders: the model's tokenizer, a callable, or a mapping
                from name to id. Not needed for a stream of nothing but tokenised text.

        Raises:
            PositionError: if text has not been tokenised, or a name is no single token.

        Example:
            >>> TokenStream((Marker(segment=0, name="<pad>", node="special"),)).token_ids(
            ...     {"<pad>": 7}
            ... )
            tensor([7])
        """
        if self.text_is_symbolic:
            raise PositionError(
                "the stream's text is symbolic (counted in words); token ids need real tokens. "
                "Build it again with family.stream(..., tokenizer=)."
            )
        ids = [one for run in self.runs for one in _run_ids(run, tokenizer)]
        return torch.tensor(ids, dtype=torch.int64)


def _run_ids(run: Run, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Return the vocabulary ids of one run."""
    if isinstance(run, Words):
        if run.token_ids is None:
            raise PositionError(
                f"Text in segment {run.segment} is a bare count of {run.count} tokens; it has no ids. "
                "Pass Text(token_ids=...), or characters and a tokenizer."
            )
        return run.token_ids
    if tokenizer is None:
        raise PositionError(
            f"tokenizer is None and the stream holds {run.name!r}; its id is needed. "
            "Pass the tokenizer of the checkpoint, or a mapping from name to id."
        )
    name = run.stands_on or run.name if isinstance(run, Marker) else run.name
    return (token_id(name, tokenizer),) * run.count


def _spans(placed: Iterator[tuple[int, Run]]) -> list[Span]:
    """Return spans in reading order; the rows of one raster are one span, whatever parts them."""
    spans: list[Span] = []
    rasters: dict[tuple[int, int, int, int], int] = {}
    for start, run in placed:
        stop = start + run.count
        if isinstance(run, Cells):
            at = rasters.setdefault((run.segment, run.modality, run.view, run.frame), len(spans))
            if at < len(spans):
                spans[at] = replace(spans[at], stop=stop)
            else:
                spans.append(_raster_span(run, start))
        elif isinstance(run, Words) or run.node == "special":
            kind = "text" if isinstance(run, Words) else "special"
            spans.append(Span(kind=kind, segment=run.segment, start=start, stop=stop))
    return spans


def _raster_span(run: Cells, start: int) -> Span:
    """Return the span that the first run of a raster opens."""
    return Span(
        kind=MODALITY_NAMES[run.modality],
        segment=run.segment,
        start=start,
        stop=start + run.count,
        grid=run.grid,
        node=run.node,
        view=run.view,
        frame=run.frame,
    )
