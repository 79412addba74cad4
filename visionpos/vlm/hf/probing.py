"""Probes: small prompts that a model's own rule and ours are both asked about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from visionpos.vlm.families import Family
from visionpos.vlm.hf.reading import Served, rule_of
from visionpos.vlm.pieces import IMAGE, TEXT, VIDEO

Grid = tuple[int, int, int]  # time steps, rows, columns of tokens
SECONDS = 1.0  # of a grid step: every float order has it exact
WORD, START, END = 1, 2, 3  # token ids where a config names none


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """One batch as a processor returns it, under the names of transformers.

    Args:
        name: what it shows.
        input_ids: `[b, n]`.
        types: `[b, n]` 0 text, 1 image, 2 video.
        mask: `[b, n]`.
        image_grid_thw: `[images, 3]` in patches, or None.
        video_grid_thw: `[videos, 3]`, or None.
        seconds: of a grid step of each clip, or None.
    """

    name: str
    input_ids: Tensor
    types: Tensor
    mask: Tensor
    image_grid_thw: Tensor | None
    video_grid_thw: Tensor | None
    seconds: Tensor | None


# name, rows; a row is numbers of text tokens, and (type, grid)
SHAPES: tuple[tuple[str, tuple[tuple[int | tuple[int, Grid], ...], ...]], ...] = (
    ("text", ((5,),)),
    ("image 3x5", ((2, (IMAGE, (1, 3, 5)), 4),)),
    ("image 1x4, image 6x2", ((1, (IMAGE, (1, 1, 4)), 3, (IMAGE, (1, 6, 2)), 2),)),
    ("clip 2x3x5", ((3, (VIDEO, (2, 3, 5)), 3),)),
    ("clip 7x2x3, longer than wide", ((3, (VIDEO, (7, 2, 3)), 3),)),
    ("image 2x2, clip 6x1x2", ((1, (IMAGE, (1, 2, 2)), 2, (VIDEO, (6, 1, 2)), 4),)),
    ("two rows, padded", (((1, (IMAGE, (1, 3, 2)), 2)), (9, (IMAGE, (1, 2, 4)), 1))),
)


def probes(fam: Family, served: Served, data: Mapping[str, Any]) -> list[Probe]:
    """Return the prompts that a family takes, written as its processor does."""
    takes_clips = fam.spec.video is not None
    return [
        _probe(name, rows, fam, served, data)
        for name, rows in SHAPES
        if takes_clips or not any(_is(part, VIDEO) for row in rows for part in row)
    ]


def token_of(data: Mapping[str, Any], name: str) -> int | None:
    """Return a token id of a config, under either of its names."""
    for key in (f"{name}_token_id", f"{name}_token_index"):
        if isinstance(data.get(key), int):
            return int(data[key])
    return None


def _is(part: int | tuple[int, Grid], kind: int) -> bool:
    return isinstance(part, tuple) and part[0] == kind


def _probe(
    name: str,
    rows: Sequence[Sequence[int | tuple[int, Grid]]],
    fam: Family,
    served: Served,
    data: Mapping[str, Any],
) -> Probe:
    """Return one batch, padded on the left."""
    typed = [_types(row, fam) for row in rows]
    longest = max(map(len, typed))
    types = torch.tensor([[TEXT] * (longest - len(row)) + row for row in typed])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in typed])
    grids = {
        kind: [_patches(part[1], kind, fam) for row in rows for part in row if _is(part, kind)]  # type: ignore[index]
        for kind in (IMAGE, VIDEO)
    }
    tables = {kind: torch.tensor(items) if items else None for kind, items in grids.items()}
    clips = len(grids[VIDEO])
    return Probe(
        name=name,
        input_ids=_tokens(types, mask, data),
        types=types,
        mask=mask,
        image_grid_thw=tables[IMAGE],
        video_grid_thw=tables[VIDEO],
        seconds=torch.full((clips,), SECONDS)
        if clips and (_counts(fam) or not served.typed)
        else None,
    )


def _counts(fam: Family) -> bool:
    return rule_of(fam).counts_seconds


def _types(row: Sequence[int | tuple[int, Grid]], fam: Family) -> list[int]:
    """Return the types of a row; every image and clip, or frame of one, stands between a start and an end token."""
    rule = rule_of(fam)
    column, edges = int(rule.row_ends == "column"), 2 * rule.edge_cells
    out: list[int] = []
    for part in row:
        if isinstance(part, int):
            out += [TEXT] * part
            continue
        kind, (frames, height, width) = part
        cells = height * (width + column) + (edges if kind == IMAGE else 0)
        if rule.video == "frames":
            out += [*([TEXT] + [kind] * cells + [TEXT]) * frames]
        else:
            out += [TEXT, *[kind] * (frames * cells), TEXT]
    return out


def _patches(grid: Grid, kind: int, fam: Family) -> Grid:
    """Return a grid in patches."""
    rule, merge = rule_of(fam), fam.spec.grid.merge
    steps = rule.temporal_merge if kind == VIDEO else 1
    return grid[0] * steps, grid[1] * merge, grid[2] * merge


def _tokens(types: Tensor, mask: Tensor, data: Mapping[str, Any]) -> Tensor:
    """Return token ids: placeholders, start and end of media, and words."""
    ids = torch.full_like(types, WORD) * mask
    for kind, name in ((IMAGE, "image"), (VIDEO, "video")):
        placeholder = token_of(data, name)
        ids[types == kind] = 3 + kind if placeholder is None else placeholder
    media = types != TEXT
    begins, ends = media.clone(), media.clone()
    begins[:, 1:] &= ~media[:, :-1]
    ends[:, :-1] &= ~media[:, 1:]
    for at, shift, name, other in (
        (begins, -1, "vision_start", START),
        (ends, 1, "vision_end", END),
    ):
        row, place = at.nonzero(as_tuple=True)
        token = token_of(data, name)
        ids[row, place + shift] = other if token is None else token
    return ids
