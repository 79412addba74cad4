"""Sections: a token stream, or a packed row of streams, as columns of plain data, one entry a token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from visionpos.errors import PositionError
from visionpos.vlm import Cells, PackedIds, PositionIds, Span, TokenStream

PADDING = "padding"


@dataclass(slots=True)
class Board:
    """What a page shows of every token, in the order of the row.

    Args:
        names: one symbolic name a token.
        cells: (segment, view, frame, row, column) of what stands for a cell, else None.
        places: (document, place in its stream) of every token; document -1 is padding.
        sections: runs of tokens of one span, as mappings.
        ids: one list an axis; empty without position ids.
    """

    names: list[str] = field(default_factory=list)
    cells: list[tuple[int, int, int, int, int] | None] = field(default_factory=list)
    places: list[tuple[int, int]] = field(default_factory=list)
    sections: list[dict[str, Any]] = field(default_factory=list)
    ids: list[list[float]] = field(default_factory=list)


def board_of(streams: Sequence[TokenStream], pos: PositionIds | PackedIds | None) -> Board:
    """Return the columns of a stream, or of the row that several are packed into.

    Raises:
        PositionError: if position ids are for other tokens, or a batch.
    """
    board = Board()
    for document, place in _row(streams, pos):
        board.places.append((document, place))
    names = [one.names for one in streams]
    cells = [_cells(one) for one in streams]
    spans = [_owners(one) for one in streams]
    listed = [one.spans for one in streams]
    owners: list[tuple[int, int]] = []
    for document, place in board.places:
        if document < 0:
            board.names.append(PADDING)
            board.cells.append(None)
            owners.append((-1, -1))
        else:
            board.names.append(names[document][place])
            board.cells.append(cells[document][place])
            owners.append((document, spans[document][place]))
    starts = [at for at, owner in enumerate(owners) if not at or owner != owners[at - 1]]
    for start, stop in pairwise([*starts, len(owners)]):
        document, span = owners[start]
        found = listed[document][span] if span >= 0 else None
        board.sections.append(_section(document, found, start, stop))
    if pos is not None:
        board.ids = pos.ids.tolist()
    return board


def _row(
    streams: Sequence[TokenStream], pos: PositionIds | PackedIds | None
) -> list[tuple[int, int]]:
    """Return (document, place in its stream) of every place of the row."""
    if isinstance(pos, PackedIds):
        documents = pos.documents.tolist()
        counts = [documents.count(at) for at in range(max(documents, default=-1) + 1)]
        if counts != [one.length for one in streams]:
            raise PositionError(
                f"pos packs documents of {counts} tokens and the streams have {[one.length for one in streams]}; they "
                "must agree. Pass the streams that were packed, in their order."
            )
        return list(zip(documents, pos.text.tolist(), strict=True))
    if len(streams) != 1:
        raise PositionError(
            f"stream is {len(streams)} streams and pos {type(pos).__name__}; several streams need the PackedIds that "
            "pack() makes of them. Pass it, or one stream."
        )
    length = streams[0].length
    if pos is not None and (pos.ids.ndim != 2 or pos.ids.shape[1] != length):
        raise PositionError(
            f"pos has ids {list(pos.ids.shape)} and the stream {length} tokens; [axes, {length}] is required. Pass "
            "family.position_ids(stream), or .row(number) of a batch."
        )
    return [(0, place) for place in range(length)]


def _cells(stream: TokenStream) -> list[tuple[int, int, int, int, int] | None]:
    """Return (segment, view, frame, row, column) of each token that stands for a cell."""
    cells: list[tuple[int, int, int, int, int] | None] = []
    for run in stream.runs:
        if not isinstance(run, Cells):
            cells += [None] * run.count
            continue
        first = run.row * run.grid.width + run.col
        for index in range(first, first + run.count):
            frame, cell = divmod(index, run.grid.height * run.grid.width)
            row, col = divmod(cell, run.grid.width)
            cells.append((run.segment, run.view, run.frame + frame, row, col))
    return cells


def _owners(stream: TokenStream) -> list[int]:
    """Return the number of the span of each token, -1 for markers outside of all; the inner of two spans wins."""
    owners = [-1] * stream.length
    spans = sorted(enumerate(stream.spans), key=lambda one: one[1].start - one[1].stop)
    for number, span in spans:
        owners[span.start : span.stop] = [number] * (span.stop - span.start)
    return owners


def _section(document: int, span: Span | None, start: int, stop: int) -> dict[str, Any]:
    if document < 0:
        kind, label = PADDING, PADDING
    elif span is None:
        kind, label = "markers", "markers"
    else:
        kind, label = span.kind, f"segment {span.segment}, {span.kind}"
        if span.grid is not None:
            grid = span.grid
            size = f"{grid.frames} × " if grid.frames > 1 else ""
            label += f", {span.node} {span.view if span.kind == 'image' else span.frame}"
            label += f", {size}{grid.height} × {grid.width} cells"
    return {
        "kind": kind,
        "label": label,
        "document": document,
        "start": start,
        "stop": stop,
        "width": 0 if span is None or span.grid is None else span.grid.width,
    }
