"""Markers: what a family writes around the nodes of its stream, as frozen specs."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from string import Formatter
from typing import Any, ClassVar, Literal

from visionpos.errors import ConfigError

Edge = Literal["before", "between", "end", "after"]

# What a marker may name: tile row and column from 1, tile or frame number from 1, image number in the prompt from 0,
# rows and columns of the whole-image grid, and the time of a frame as seconds, whole seconds or hours:minutes:seconds.
FIELDS = ("row", "col", "k", "index", "rows", "cols", "seconds", "whole", "clock")
SAMPLES: dict[str, float | str] = {"seconds": 0.5, "clock": "00:00:00.500"}  # of the others: 1


def check_name(what: str, name: str) -> None:
    """Refuse a token without a name."""
    if not name:
        raise ConfigError(
            f"{what} is ''; the name of a token is required. Leave a marker out for none."
        )


def fields_of(template: str) -> tuple[str, ...]:
    """Return the fields that a template names.

    Raises:
        ConfigError: if one is unknown, or written in a form that no number has.

    Example:
        >>> fields_of("<row_{row}_col_{col}>")
        ('row', 'col')
    """
    if "{" not in template:
        return ()
    try:
        parsed = [part[1:] for part in Formatter().parse(template) if part[1] is not None]
    except ValueError as error:
        raise ConfigError(
            f"text {template!r} cannot be read: {error}; write {{{{ and }}}} for braces."
        ) from None
    for name, form, conversion in parsed:
        if name not in FIELDS:
            raise ConfigError(
                f"text {template!r} names {{{name}}}; it may name {', '.join(FIELDS)}. Correct the field."
            )
        if conversion or not _is_form(name, form or ""):
            raise ConfigError(
                f"text {template!r} writes {name} as {form or conversion!r}; a form of numbers is required, its width "
                "under 100. Correct it, such as {seconds:.1f}."
            )
    return tuple(str(name) for name, _, _ in parsed)


def _is_form(name: str, form: str) -> bool:
    """Return whether a field can be written in a form, and not at any length."""
    if re.search(r"\d{3}", form):
        return False
    try:
        format(SAMPLES.get(name, 1), form)
    except ValueError:
        return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A marker that is text, such as a timestamp; the tokenizer decides its length.

    Args:
        text: a format string over `FIELDS`.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    text: str

    def __post_init__(self) -> None:
        check_name("text", self.text)
        fields_of(self.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """A marker that the model inserts as an embedding of its own; in the stream it stands on a placeholder.

    Args:
        learned: the parameter's name, such as image_newline.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    learned: str

    def __post_init__(self) -> None:
        check_name("learned", self.learned)


MarkerSpec = str | Written | Learned


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrap:
    """Markers around the children of a node of the stream: before, child, end, between, child, end, after.

    Args:
        before: before the first child.
        between: between two children.
        end: after every child, the last one too.
        after: after the last child.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    before: MarkerSpec | tuple[MarkerSpec, ...] = ()
    between: MarkerSpec | tuple[MarkerSpec, ...] = ()
    end: MarkerSpec | tuple[MarkerSpec, ...] = ()
    after: MarkerSpec | tuple[MarkerSpec, ...] = ()

    def __post_init__(self) -> None:
        for edge in ("before", "between", "end", "after"):
            markers = getattr(self, edge)
            markers = markers if isinstance(markers, tuple) else (markers,)
            object.__setattr__(self, edge, markers)
            for marker in markers:
                if isinstance(marker, str):
                    check_name(edge, marker)
                    fields_of(marker)

    def at(self, edge: Edge) -> tuple[MarkerSpec, ...]:
        """Return the markers of one edge, in order."""
        markers: tuple[MarkerSpec, ...] = getattr(self, edge)
        return markers

    @property
    def parts_children(self) -> bool:
        """Return whether a marker stands after or between children."""
        return bool(self.between or self.end)

    @property
    def is_empty(self) -> bool:
        """Return whether the node has no marker at all."""
        return not (self.parts_children or self.before or self.after)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSpec:
    """How the views of an image are written: their order, and the markers of each node.

    Args:
        order: the parts of an image.
        image: markers around the parts.
        global_: markers around the rows of the whole-image view.
        tiles: markers around the rows of tiles, or around the rows of cells where the tiles form one raster.
        tile_row: markers around the tiles of a row.
        tile: markers around the rows of a tile.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    order: tuple[Literal["global", "tiles"], ...]
    image: Wrap = field(default_factory=Wrap)
    global_: Wrap = field(default_factory=Wrap)
    tiles: Wrap = field(default_factory=Wrap)
    tile_row: Wrap = field(default_factory=Wrap)
    tile: Wrap = field(default_factory=Wrap)

    def __post_init__(self) -> None:
        if not self.order or len(set(self.order)) < len(self.order):
            raise ConfigError(
                f"stream.order is {list(self.order)}; global, tiles or both, each once, are required. Correct it."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoStreamSpec:
    """How a clip is written. A clip whose frames have no markers is one block.

    Args:
        video: markers around the frames.
        frame: markers around the rows of a frame.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    video: Wrap = field(default_factory=Wrap)
    frame: Wrap = field(default_factory=Wrap)
