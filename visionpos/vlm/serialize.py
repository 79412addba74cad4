"""Serialisers: segments and their plans become runs of tokens, by one law.

The tree: image > parts; global > rows of cells; tiles > rows of tiles > tiles > rows of cells, or tiles > rows of cells
where the tiles form one raster; video > frames > rows of cells. Every node emits before, child, end, between, child,
end, ..., after. Counts come from the runs; no second formula exists.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeGuard

from visionpos.errors import ConfigError, PositionError
from visionpos.geometry import Grid
from visionpos.vlm.markers import Edge, Learned, MarkerSpec, StreamSpec, VideoStreamSpec, Wrap
from visionpos.vlm.pieces import IMAGE, VIDEO, Cells, Marker, Run, Words, symbolic_count
from visionpos.vlm.segments import Text
from visionpos.vlm.tiling import Plan
from visionpos.vlm.tokens import Tokenizer, encode_joined

Fields = Mapping[str, Any]


def words(segment: int, text: str) -> Words:
    """Return a text counted in whitespace-separated words, until a tokenizer sees it.

    Example:
        >>> words(0, "<0.5 seconds>").names
        ('<0.5', 'seconds>')
    """
    return Words(segment=segment, text=text, count=symbolic_count(text), symbolic=True)


def text_run(text: Text, segment: int) -> Words:
    """Return a text whose length is known, or one that waits for a tokenizer."""
    if text.tokens is None:
        return words(segment, text.text)
    ids = None if text.token_ids is None else tuple(text.token_ids)
    return Words(segment=segment, text=text.text, count=text.tokens, token_ids=ids)


def image_runs(
    plan: Plan, stream: StreamSpec, *, segment: int, cell: str, index: int = 0
) -> list[Run]:
    """Return the runs of an image.

    Args:
        plan: its views.
        stream: the markers of the family.
        segment: which of the prompt's segments it is.
        cell: the placeholder token.
        index: number of the image in the prompt, from 0.
    """
    whole = next((part.tokens for part in plan.parts if part.node == "global"), None)
    fields: dict[str, Any] = {"index": index}
    if whole is not None:
        fields |= {"rows": whole.height, "cols": whole.width}
    writer = _Writer(segment, cell, IMAGE)
    children: dict[str, list[Run]] = {}
    tiles: list[list[Run]] = []
    for number, part in enumerate(plan.parts):
        if part.node == "global":
            children["global"] = writer.raster(
                part.tokens, "global", stream.global_, fields, number
            )
        elif part.node == "tiles":
            children["tiles"] = writer.raster(part.tokens, "tiles", stream.tiles, fields, number)
        else:
            row, col = divmod(len(tiles), plan.tiles_rc[1] if plan.tiles_rc else 1)
            place = {**fields, "row": row + 1, "col": col + 1, "k": len(tiles) + 1}
            tiles.append(writer.raster(part.tokens, "tile", stream.tile, place, number))
    if tiles:
        children["tiles"] = _tile_rows(tiles, plan, stream, writer, fields)
    parts = [children[node] for node in stream.order if node in children]
    return writer.wrapped(parts, "image", stream.image, fields)


def _tile_rows(
    tiles: list[list[Run]], plan: Plan, stream: StreamSpec, writer: _Writer, fields: Fields
) -> list[Run]:
    """Return the tiles of an image, row by row."""
    width = plan.tiles_rc[1] if plan.tiles_rc else 1
    rows = [
        writer.wrapped(
            tiles[at : at + width],
            "tile_row",
            stream.tile_row,
            {**fields, "row": at // width + 1},
        )
        for at in range(0, len(tiles), width)
    ]
    return writer.wrapped(rows, "tiles", stream.tiles, fields)


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
    grid, writer = plan.views[0].tokens, _Writer(segment, cell, VIDEO)
    if stream.frame.is_empty and not stream.video.parts_children:
        clip = writer.cells(grid, "video", elapsed=plan.elapsed)
        return writer.wrapped([[clip]], "video", stream.video, {})
    still = Grid(grid.height, grid.width)
    children = []
    for frame in range(grid.frames):
        fields: dict[str, Any] = {"k": frame + 1}
        if plan.instants is not None:
            fields |= _times(plan.instants[frame])
        elapsed = None if plan.elapsed is None else plan.elapsed[frame : frame + 1]
        children.append(
            writer.raster(still, "frame", stream.frame, fields, 0, frame=frame, elapsed=elapsed)
        )
    return writer.wrapped(children, "video", stream.video, {})


def _times(seconds: float) -> dict[str, Any]:
    """Return the time of a frame in the forms that a text may name."""
    whole = int(seconds)
    minutes, milliseconds = (
        whole // 60,
        int(seconds % 1 * 1000),
    )  # truncated, as time.strftime users do
    clock = f"{minutes // 60 % 24:02d}:{minutes % 60:02d}:{whole % 60:02d}.{milliseconds:03d}"
    return {"seconds": seconds, "whole": whole, "clock": clock}


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
        elif symbolic:
            stretch = _blanks_joined(stretch)
        out += stretch
    return tuple(run for run in out if run.count)


def _blanks_joined(runs: Iterable[Run]) -> list[Run]:
    """Return texts counted in words, with neighbouring line ends as one: tokenizers merge them."""
    out: list[Run] = []
    for run in runs:
        last = out[-1] if out else None
        if _is_blank(run) and _is_blank(last) and last.segment == run.segment:
            out[-1] = words(run.segment, last.text + run.text)
        else:
            out.append(run)
    return out


def _is_blank(run: Run | None) -> TypeGuard[Words]:
    return isinstance(run, Words) and not run.text.strip()


@dataclass(frozen=True, slots=True)
class _Writer:
    """Writes the runs of one segment.

    Args:
        segment: which of the prompt's segments it is.
        cell: the placeholder token.
        modality: 1 image, 2 video.
    """

    segment: int
    cell: str
    modality: int

    def cells(self, grid: Grid, node: str, count: int | None = None, **place: Any) -> Cells:
        """Return a run of placeholders: all of a grid, or so many from a place in it."""
        return Cells(
            segment=self.segment,
            name=self.cell,
            modality=self.modality,
            grid=grid,
            node=node,
            count=grid.size if count is None else count,
            **place,
        )

    def raster(
        self, grid: Grid, node: str, wrap: Wrap, fields: Fields, view: int = -1, **place: Any
    ) -> list[Run]:
        """Return the rows of a view, a raster or a frame with their markers; one run where nothing parts the rows."""
        at = {**place, "view": max(view, 0)}
        if not wrap.parts_children:
            return self.wrapped([[self.cells(grid, node, **at)]], node, wrap, fields, view)
        rows: list[list[Run]] = [
            [self.cells(grid, node, grid.width, row=row, **at)] for row in range(grid.height)
        ]
        return self.wrapped(rows, node, wrap, fields, view)

    def wrapped(
        self, children: Sequence[list[Run]], node: str, wrap: Wrap, fields: Fields, view: int = -1
    ) -> list[Run]:
        """Return before, child, end, between, child, end, ..., after."""

        def markers(edge: Edge) -> list[Run]:
            return [self.marker(one, node, edge, fields, view) for one in wrap.at(edge)]

        between, end = markers("between"), markers("end")
        runs = markers("before")
        for number, child in enumerate(children):
            if number:
                runs += between
            runs += child
            runs += end
        return runs + markers("after")

    def marker(self, spec: MarkerSpec, node: str, edge: Edge, fields: Fields, view: int) -> Run:
        """Return one marker: a token, a text, or a learned embedding on a placeholder."""
        if isinstance(spec, Learned):
            return Marker(
                segment=self.segment, name=spec.learned, node=node, edge=edge, view=view, stands_on=self.cell,
                modality=self.modality,
            )  # fmt: skip
        if isinstance(spec, str):
            name = _filled(spec, fields)
            return Marker(segment=self.segment, name=name, node=node, edge=edge, view=view)
        return words(self.segment, _filled(spec.text, fields))


def _filled(template: str, fields: Fields) -> str:
    """Return a template with its fields filled in."""
    if "{" not in template:
        return template
    try:
        return template.format(**fields)
    except KeyError as missing:
        if missing.args[0] in ("seconds", "whole", "clock"):
            raise PositionError(
                "Video has no seconds; this family writes the time of every frame. "
                "Pass Video(size_hw, seconds=[time of every sampled frame])."
            ) from None
        raise ConfigError(
            f"marker {template!r} names {missing}, which its node does not have; it has {', '.join(fields)}. "
            "Correct the template."
        ) from None
