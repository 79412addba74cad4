"""The page of a token stream: every token with its name, its ids and the rectangle of the photo that it looks at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from visionpos.audit.report.page import render
from visionpos.audit.report.sections import Board, board_of
from visionpos.errors import PositionError
from visionpos.vlm import PackedIds, Plan, PositionIds, TokenStream


def stream_page(
    stream: TokenStream | Sequence[TokenStream],
    pos: PositionIds | PackedIds | None = None,
    *,
    photo: Tensor | Mapping[int, Tensor] | Mapping[tuple[int, int], Tensor] | None = None,
    plan: Plan | Mapping[int, Plan] | Mapping[tuple[int, int], Plan] | None = None,
    axes: Sequence[str] = (),
    title: str = "Token stream",
) -> str:
    """Return one HTML page about a token stream, which needs no network.

    A token that is pointed at or focused shows its name, its ids and its rectangle on the photo; spans can be filtered;
    documents of a packed row differ in colour and in label. Arrow keys move from token to token.

    Args:
        stream: from `family.stream`; or the streams of a packed row, in their order.
        pos: from `family.position_ids`; or what `pack` made of the streams.
        photo: `[3, height, width]` uint8, as `pixels.photo` returns it; of several, a mapping from the segment, or from
            (document, segment). Of a clip, the frame to draw on.
        plan: from `family.plan`, of the same segments. Without a photo its rectangles are drawn on an empty sheet.
        axes: names of the axes of the ids.
        title: heading of the page.

    Raises:
        PositionError: if ids, plans or photos are not those of the stream.
    """
    streams = [stream] if isinstance(stream, TokenStream) else list(stream)
    board = board_of(streams, pos)
    names = list(axes) or [f"axis {number}" for number in range(len(board.ids))]
    if board.ids and len(names) != len(board.ids):
        raise PositionError(
            f"axes are {tuple(axes)} and pos has {len(board.ids)}; one name an axis is required. Pass the rule's axes."
        )
    plans = _by_place(plan, streams, "plan")
    photos = _by_place(photo, streams, "photo")
    rects = _rects(board, streams, plans)
    return render(
        "stream.html",
        title=title,
        length=len(board.names),
        features=sum(cell is not None for cell in board.cells),
        symbolic=any(one.text_is_symbolic for one in streams),
        documents=len(streams) if isinstance(pos, PackedIds) else 0,
        axes=names if board.ids else [],
        sections=[_summary(board, number) for number in range(len(board.sections))],
        kinds=list(dict.fromkeys(section["kind"] for section in board.sections)),
        pictures=_pictures(plans, photos),
        data=_data(board, names, list(plans), rects),
    )


def _by_place(given: Any, streams: Sequence[TokenStream], name: str) -> dict[tuple[int, int], Any]:
    """Return (document, segment) -> what was given; one alone belongs to the only picture or clip."""
    if given is None:
        return {}
    media = [
        (document, segment)
        for document, one in enumerate(streams)
        for segment in dict.fromkeys(span.segment for span in one.spans if _is_seen(span.kind))
    ]
    if not isinstance(given, Mapping):
        if len(media) != 1:
            raise PositionError(
                f"{name} is one and the stream has {len(media)} pictures and clips; exactly one is required. Pass a "
                "mapping from the segment to each."
            )
        return {media[0]: given}
    found = {(0, key) if isinstance(key, int) else tuple(key): one for key, one in given.items()}
    wrong = [key for key in found if key not in media]
    if wrong:
        raise PositionError(
            f"{name} has {wrong[0]}, which is no picture and no clip of the stream; (document, segment) of "
            f"{media} is required. Count segments from 0."
        )
    return dict(sorted(found.items()))


def _is_seen(kind: str) -> bool:
    return kind in ("image", "video")


def _rects(
    board: Board, streams: Sequence[TokenStream], plans: Mapping[tuple[int, int], Plan]
) -> list[list[float] | None]:
    """Return top, left, bottom, right of each token on its picture, in pixels; None where it has none."""
    seen = {
        (document, segment): _seen_cells(streams[document], segment) for document, segment in plans
    }
    rects: dict[tuple[int, int], list[float]] = {}
    for key, plan in plans.items():
        if len(seen[key]) != plan.cells:
            raise PositionError(
                f"plan of {key} has {plan.cells} cells and the stream {len(seen[key])}; they must agree. Plan the same "
                "picture with the same family."
            )
        edges = plan.token_rects().tolist()
        for place, rect in zip(seen[key], edges, strict=True):
            rects[key[0], place] = [round(edge, 2) for edge in rect]
    return [rects.get(place) for place in board.places]


def _seen_cells(stream: TokenStream, segment: int) -> list[int]:
    """Return the places of a segment's cells that look at pixels: not those of its sound."""
    spoken = stream.modality.tolist()
    return [
        start + at
        for start, run in stream.placed()
        if run.segment == segment and hasattr(run, "grid") and spoken[start] in (1, 2)
        for at in range(run.count)
    ]


def _pictures(
    plans: Mapping[tuple[int, int], Plan], photos: Mapping[tuple[int, int], Tensor]
) -> list[dict[str, Any]]:
    """Return what the page draws rectangles on."""
    lonely = [key for key in photos if key not in plans]
    if lonely:
        raise PositionError(
            f"photo of {lonely[0]} is given without a plan; both are required. Pass plan=family.plan(...)."
        )
    return [_picture(key, plan, photos.get(key)) for key, plan in plans.items()]


def _picture(key: tuple[int, int], plan: Plan, photo: Tensor | None) -> dict[str, Any]:
    uri = ""
    if photo is not None:
        from visionpos.vlm.pixels.embedding import data_uri

        if tuple(photo.shape[-2:]) != tuple(plan.size_hw):
            raise PositionError(
                f"photo is {tuple(photo.shape[-2:])} (height, width) and the plan is for {tuple(plan.size_hw)}; they "
                "must agree. Plan the upright picture, as photo() returns it."
            )
        uri = data_uri(photo)
    frames = [[round(float(edge), 2) for edge in view.source_yxyx] for view in plan.views]
    return {
        "document": key[0],
        "segment": key[1],
        "height": plan.size_hw[0],
        "width": plan.size_hw[1],
        "uri": uri,
        "views": [[left, top, right - left, bottom - top] for top, left, bottom, right in frames],
    }


def _summary(board: Board, number: int) -> dict[str, Any]:
    """Return one row of the table of spans."""
    section = board.sections[number]
    ends = section["start"], section["stop"] - 1
    first, last = (", ".join(f"{axis[at]:g}" for axis in board.ids) for at in ends)
    named = list(dict.fromkeys(board.names[section["start"] : section["stop"]]))
    return section | {
        "number": number,
        "count": section["stop"] - section["start"],
        "first": first,
        "last": last,
        "names": " ".join(named[:12]) + (f" … ({len(named)} names)" if len(named) > 12 else ""),
    }


def _data(
    board: Board,
    axes: Sequence[str],
    pictures: Sequence[tuple[int, int]],
    rects: Sequence[list[float] | None],
) -> dict[str, Any]:
    """Return what the page's script reads: columns, one entry a token."""
    known = list(dict.fromkeys(board.names))
    index = {name: at for at, name in enumerate(known)}
    shown = {key: at for at, key in enumerate(pictures)}
    on = [
        shown.get((document, cell[0]), -1) if cell is not None else -1
        for (document, _), cell in zip(board.places, board.cells, strict=True)
    ]
    return {
        "names": known,
        "name": [index[name] for name in board.names],
        "cell": [None if cell is None else cell[1:] for cell in board.cells],
        "document": [document for document, _ in board.places],
        "place": [place for _, place in board.places],
        "axes": list(axes) if board.ids else [],
        "ids": board.ids,
        "picture": [at if rect is not None else -1 for at, rect in zip(on, rects, strict=True)],
        "rect": list(rects),
        "sections": board.sections,
    }
