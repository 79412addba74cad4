"""Serialisers: segments and their plans become runs of tokens, by one law.

Every node of the stream's tree (image > view > row, video > frame > row) emits before, child, end, between, child, end,
..., after. Counts come from the runs; no second formula exists.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Literal

from visionpos.errors import PositionError
from visionpos.geometry import Grid
from visionpos.vlm.grammar import StreamSpec, VideoStreamSpec, Wrap, Written
from visionpos.vlm.segments import Text
from visionpos.vlm.stream import IMAGE, VIDEO, Cells, Marker, Run, Words
from visionpos.vlm.tiling import Plan
from visionpos.vlm.tokens import Tokenizer, encode_joined

Edge = Literal["before", "between", "end", "after"]


def words(segment: int, text: str) -> Words:
    """Return a text counted in whitespace-separated words, until a tokenizer sees it.

    Example:
        >>> words(0, "<0.5 seconds>").names
        ('<0.5', 'seconds>')
    """
    return Words(segment=segment, text=text, count=len(text.split()), symbolic=True)


def text_run(text: Text, segment: int) -> Words:
    """Return a text whose length is known, or one that waits for a tokenizer."""
    if text.tokens is None:
        return words(segment, text.text)
    ids = None if text.token_ids is None else tuple(text.token_ids)
    return Words(segment=segment, text=text.text, count=text.tokens, token_ids=ids)


def image_runs(plan: Plan, stream: StreamSpec, *, segment: int, cell: str) -> list[Run]:
    """Return the runs of an image.

    Args:
        plan: its views.
        stream: the markers of the family.
        segment: which of the prompt's segments it is.
        cell: the placeholder token.
    """
    views = [
        Cells(
            segment=segment,
            name=cell,
            modality=IMAGE,
            grid=view.tokens,
            count=view.tokens.size,
            view=number,
        )
        for number, view in enumerate(plan.views)
    ]
    children = [_raster(view, "global", stream.global_) for view in views]
    return _wrapped(children, "image", stream.image, segment=segment)


def video_runs(plan: Plan, stream: VideoStreamSpec, *, segment: int, cell: str) -> list[Run]:
    """Return the runs of a clip: one block if nothing stands between its cells, else one raster a frame.

    Args:
        plan: its grid, and the times of its frames where known.
        stream: the markers of the family.
        segment: which of the prompt's segments it is.
        cell: the placeholder token.

    Raises:
        PositionError: if a marker names the time of a frame and the clip has none.
    """
    grid = plan.views[0].tokens
    clip = Cells(
        segment=segment,
        name=cell,
        modality=VIDEO,
        grid=grid,
        count=grid.size,
        elapsed=plan.elapsed,
    )
    if stream.frame.is_empty and not stream.video.parts_children:
        return _wrapped([[clip]], "video", stream.video, segment=segment)
    children = []
    for frame in range(grid.frames):
        raster = replace(
            clip,
            grid=Grid(grid.height, grid.width),
            count=grid.height * grid.width,
            frame=frame,
            elapsed=None if plan.elapsed is None else plan.elapsed[frame : frame + 1],
        )
        seconds = None if plan.instants is None else plan.instants[frame]
        children.append(_raster(raster, "frame", stream.frame, seconds))
    return _wrapped(children, "video", stream.video, segment=segment)


def tokenised(runs: Iterable[Run], tokenizer: Tokenizer | None) -> tuple[Run, ...]:
    """Return the runs with every text tokenised, and empty runs left out.

    Neighbouring texts are joined first, as published processors do: a merge of the tokenizer may cross from a word of
    the prompt into a timestamp. Without a tokenizer, texts stay counted in words.

    Args:
        runs: as the serialisers write them.
        tokenizer: from text to ids, or None.
    """
    out: list[Run] = []
    for symbolic, group in groupby(runs, lambda run: isinstance(run, Words) and run.symbolic):
        stretch = list(group)
        if symbolic and tokenizer is not None:
            texts = [run.text for run in stretch if isinstance(run, Words)]
            ids = encode_joined(texts, tokenizer)
            stretch = [
                Words(
                    segment=stretch[0].segment,
                    text="".join(texts),
                    count=len(ids),
                    token_ids=ids,
                )
            ]
        out += stretch
    return tuple(run for run in out if run.count)


def _raster(cells: Cells, node: str, wrap: Wrap, seconds: float | None = None) -> list[Run]:
    """Return the rows of a view or a frame with their markers; one run where nothing parts the rows."""
    rows = [cells]
    if wrap.parts_children:
        width = cells.grid.width
        rows = [replace(cells, row=row, count=width) for row in range(cells.grid.height)]
    return _wrapped(
        [[row] for row in rows],
        node,
        wrap,
        segment=cells.segment,
        view=cells.view,
        seconds=seconds,
    )


def _wrapped(
    children: Sequence[list[Run]],
    node: str,
    wrap: Wrap,
    *,
    segment: int,
    view: int = -1,
    seconds: float | None = None,
) -> list[Run]:
    """Return before, child, end, between, child, end, ..., after."""

    def markers(edge: Edge) -> list[Run]:
        return [
            Marker(segment=segment, name=marker, node=node, edge=edge, view=view)
            if isinstance(marker, str)
            else words(segment, _written(marker, seconds))
            for marker in wrap.at(edge)
        ]

    between, end = markers("between"), markers("end")
    runs = markers("before")
    for number, child in enumerate(children):
        runs += (between if number else []) + child + end
    return runs + markers("after")


def _written(marker: Written, seconds: float | None) -> str:
    """Return the text of a marker with the time of its frame filled in."""
    if marker.fields and seconds is None:
        raise PositionError(
            "Video has no seconds; this family writes the time of every frame. "
            "Pass Video(size_hw, seconds=[time of every sampled frame])."
        )
    return marker.text.format(seconds=seconds)
