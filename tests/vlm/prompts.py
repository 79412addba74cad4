"""Random prompts as a processor returns them: token types, grids, mask, seconds. Nothing here computes an id."""

import random
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

# Frames per second whose time ids float32 truncates wrongly are in the list on purpose (facts/mrope.md 9).
SAMPLED_FPS = [Fraction(fps) for fps in (1, 2, 3, 4, 5, 7, 8, 24, 25, 30, 41, 47, 55)]
SAMPLED_FPS += [Fraction(30000, 1001), Fraction(1, 2), Fraction(9, 5)]


@dataclass
class Batch:
    """One batch of prompts."""

    types: Tensor  # [b, n]
    mask: Tensor  # [b, n]
    images: list[tuple[int, int, int]]
    videos: list[tuple[int, int, int]]
    seconds: list[Fraction]

    @property
    def input_ids(self) -> Tensor:
        """Placeholder ids; no rule reads them."""
        return torch.where(self.mask.bool(), 5 + self.types, 0)

    def grids(self, kind: str) -> Tensor | None:
        """`[items, 3]`, or None for no items."""
        items = getattr(self, kind)
        return torch.tensor(items) if items else None


def draw(
    seed: int,
    *,
    merge: int = 2,
    per_frame: bool = False,
    glued: bool = False,
    rows: tuple[int, int] = (1, 4),
    column: int = 0,
    edges: int = 0,
    temporal: int = 1,
    kinds: tuple[int, ...] = (0, 1, 2),
) -> Batch:
    """Draw a batch of unequal rows, padded on one side.

    per_frame: text stands between the frames of a clip. glued: media of one kind may touch, which transformers refuses.
    column: more placeholders than cells in a row; edges: in an image at either end. temporal: grid frames of a clip
    that are one step. kinds: of segments, 0 text, 1 image, 2 clip.
    """
    shape = Shape(merge, per_frame, glued, column, edges, temporal, kinds)
    rng = random.Random(seed)
    batch = Batch(torch.empty(0), torch.empty(0), [], [], [])
    prompts = [_row(rng, batch, shape) for _ in range(rng.randint(*rows))]
    longest = max(map(len, prompts)) + rng.choice((0, 0, 3))
    left = rng.random() < 0.5
    types, mask = [], []
    for row in prompts:
        room, real = [0] * (longest - len(row)), [1] * len(row)
        types.append(room + row if left else row + room)
        mask.append(room + real if left else real + room)
    batch.types, batch.mask = torch.tensor(types), torch.tensor(mask)
    return batch


@dataclass
class Shape:
    """How prompts of a family look; see `draw`."""

    merge: int
    per_frame: bool
    glued: bool
    column: int
    edges: int
    temporal: int
    kinds: tuple[int, ...]


def _row(rng: random.Random, batch: Batch, shape: Shape) -> list[int]:
    """Draw the types of one row, and append its grids to the batch."""
    row: list[int] = []
    for kind in rng.choices(shape.kinds, k=rng.randint(0, 4)):
        if kind == 0 or (row and row[-1] == kind and not shape.glued):
            row += [0] * rng.randint(1, 9)
        if kind == 0:
            continue
        height, width = rng.randint(1, 6), rng.randint(1, 6)
        frames = 1 if kind == 1 else rng.choice((1, 2, 3, 4, rng.randint(1, 30)))
        (batch.images if kind == 1 else batch.videos).append(
            (
                frames * (shape.temporal if kind == 2 else 1),
                height * shape.merge,
                width * shape.merge,
            )
        )
        if kind == 2:
            batch.seconds.append(2 / rng.choice(SAMPLED_FPS))
        for frame in range(frames):
            touching = shape.glued and rng.random() < 0.3
            row += [0] * (rng.randint(1, 8) if shape.per_frame and frame and not touching else 0)
            edges = 2 * shape.edges if kind == 1 else 0
            row += [kind] * (height * (width + shape.column) + edges)
    return row or [0]
