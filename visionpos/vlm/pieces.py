"""Pieces: what a token stream is made of, runs of text, markers and placeholder cells."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from visionpos.geometry import Grid

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
        if not self.symbolic:
            return ("text",) * self.count
        return tuple(self.text.split()) or (self.text,) * self.count


def symbolic_count(text: str) -> int:
    """Return the number of whitespace-separated words of a text; a text of nothing but blanks is one token.

    Example:
        >>> symbolic_count("a cat"), symbolic_count("  "), symbolic_count("")
        (2, 1, 0)
    """
    return len(text.split()) or min(len(text), 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker:
    """One token that stands at a place of the stream's tree, such as `<|vision_start|>` before an image.

    Args:
        segment: which of the prompt's segments it belongs to, from 0.
        name: the token.
        node: what it marks: "image", "global", "tiles", "tile_row", "tile", "video", "frame", "audio", or "special" for
            a segment of its own.
        edge: where it stands: "before", "between", "end" or "after"; empty for "special".
        view: the view or raster it belongs to, -1 outside.
        stands_on: the placeholder token whose embedding the model replaces by the learned one called `name`; empty
            for a token of the vocabulary.
        modality: 1 image, 2 video for a learned one, 0 for a token of the vocabulary.
    """

    segment: int
    name: str
    node: str
    edge: str = ""
    view: int = -1
    stands_on: str = ""
    modality: int = TEXT

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
    """A run of placeholder tokens, each standing for one cell of a grid, in raster order; sound is a grid of one row.

    Args:
        segment: which of the prompt's segments it belongs to, from 0.
        name: the placeholder token.
        modality: 1 image, 2 video, 3 audio.
        grid: the raster that the cells are read from: an image view, all tiles of an image, a frame, or a whole clip
            without frame markers.
        count: number of cells; a whole number of rows.
        node: what the raster is: "global", "tile", "tiles", "frame", "video" or "audio".
        view: the view or raster of the image (`Plan.parts`), from 0.
        frame: the time step of the clip at which `grid` starts; of sound, the token.
        row: first row of the run in `grid`.
        col: first column of the run in `grid`.
        elapsed: exact seconds from the start of the clip to each time step of `grid`, where known.
    """

    segment: int
    name: str
    modality: int
    grid: Grid
    count: int
    node: str = "global"
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
