"""TokenStream: a prompt as runs of symbolic tokens, before any tokenizer or tensor.

A family's serialiser writes it; position rules, token ids and counts are all read from the same runs, so the number of
placeholders is the number of features by construction.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate

import torch
from torch import Tensor

from visionpos.errors import PositionError
from visionpos.geometry import Grid
from visionpos.vlm.tokens import Tokenizer, token_id

TEXT, IMAGE, VIDEO, AUDIO = range(4)  # as in transformers' mm_token_type_ids
MODALITY_NAMES = ("text", "image", "video", "audio")


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """A run of text tokens.

    Args:
        segment: which of the prompt's segments it belongs to, from 0.
        text: the characters, where they are known.
        count: number of tokens.
        token_ids: the tokens, where a tokenizer has seen the text.
        symbolic: whether `count` is a count of words, for want of a tokenizer.
    """

    segment: int
    text: str
    count: int
    token_ids: tuple[int, ...] | None = None
    symbolic: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Return a name a token: the words themselves, `#id`, or `text` where only the number is known."""
        if self.token_ids is not None:
            return tuple(f"#{one}" for one in self.token_ids)
        return tuple(self.text.split()) if self.symbolic else ("text",) * self.count


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker:
    """One token that stands at a place of the stream's tree, such as `<|vision_start|>` before an image.

    Args:
        segment: which of the prompt's segments it belongs to, from 0.
        name: the token.
        node: what it marks: "image", "global", "video", "frame", or "special" for a segment of its own.
        edge: where it stands: "before", "between", "end" or "after"; empty for "special".
        view: the view it belongs to, -1 outside views.
    """

    segment: int
    name: str
    node: str
    edge: str = ""
    view: int = -1

    @property
    def count(self) -> int:
        """Return 1, the number of tokens."""
        return 1

    @property
    def names(self) -> tuple[str, ...]:
        """Return the token's name."""
        return (self.name,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """A run of placeholder tokens, each standing for one cell of a grid, in raster order.

    Args:
        segment: which of the prompt's segments it belongs to, from 0.
        name: the placeholder token.
        modality: 1 image, 2 video.
        grid: the raster that the cells are read from: an image view, a frame, or a whole clip without frame markers.
        count: number of cells; a whole number of rows.
        view: the view of the image, from 0.
        frame: the time step of the clip at which `grid` starts.
        row: first row of the run in `grid`.
        col: first column of the run in `grid`.
        elapsed: exact seconds from the start of the clip to each time step of `grid`, where known.
    """

    segment: int
    name: str
    modality: int
    grid: Grid
    count: int
    view: int = 0
    frame: int = 0
    row: int = 0
    col: int = 0
    elapsed: tuple[Fraction, ...] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Return the placeholder's name once a cell."""
        return (self.name,) * self.count


Run = Words | Marker | Cells


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Where a text, a view, a frame or a clip lies in the stream.

    Args:
        kind: "text", "special", "image" or "video".
        segment: which of the prompt's segments it belongs to, from 0; timestamps belong to their clip.
        start: first token.
        stop: one past the last token. Markers inside a view (row breaks) count, markers around it do not.
        grid: the raster of a view, frame or clip; None for text.
        view: view of the image, from 0.
        frame: time step of the clip at which the grid starts.
    """

    kind: str
    segment: int
    start: int
    stop: int
    grid: Grid | None = None
    view: int = 0
    frame: int = 0


@dataclass(frozen=True, slots=True)
class TokenStream:
    """A prompt as symbolic tokens.

    Args:
        runs: runs in reading order.

    Example:
        >>> stream = TokenStream((Words(segment=0, text="a cat", count=2, symbolic=True),))
        >>> stream.length, stream.names, stream.text_is_symbolic
        (2, ('a', 'cat'), True)
    """

    runs: tuple[Run, ...]

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
        """Return `[n]` int64: 0 text and markers, 1 image, 2 video; transformers' mm_token_type_ids."""
        kinds = [run.modality if isinstance(run, Cells) else TEXT for run in self.runs]
        counts = torch.tensor([run.count for run in self.runs], dtype=torch.int64)
        return torch.tensor(kinds, dtype=torch.int64).repeat_interleave(counts)

    @property
    def spans(self) -> tuple[Span, ...]:
        """Return where each text, special token, view, frame and clip lies."""
        return tuple(_spans(self.placed()))

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
    return (token_id(run.name, tokenizer),) * run.count


def _spans(placed: Iterator[tuple[int, Run]]) -> list[Span]:
    """Return spans in reading order; the rows of one raster are one span, whatever parts them."""
    spans: list[Span] = []
    rasters: dict[tuple[int, int, int], int] = {}
    for start, run in placed:
        stop = start + run.count
        if isinstance(run, Cells):
            at = rasters.setdefault((run.segment, run.view, run.frame), len(spans))
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
        view=run.view,
        frame=run.frame,
    )
