"""The grammar of a family: what its YAML may say, as frozen specs.

Data enters through `loading.py`, where unknown keys are refused by name; a `FamilySpec` leaves. A family that needs
something new adds a kind here that any family could use.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from string import Formatter
from typing import Any, ClassVar, Literal

from visionpos.errors import ConfigError
from visionpos.vlm.instants import Instant
from visionpos.vlm.resize import Step
from visionpos.vlm.rules import Rule

TEXT_FIELDS = ("seconds",)  # what a written marker may name


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A marker that is text, such as a timestamp; the tokenizer decides its length.

    Args:
        text: a format string; `{seconds}` is the time of the frame.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    text: str

    def __post_init__(self) -> None:
        for name in self.fields:
            if name not in TEXT_FIELDS:
                raise ConfigError(
                    f"text {self.text!r} names {{{name}}}; it may name {', '.join(TEXT_FIELDS)}. Correct the field."
                )

    @property
    def fields(self) -> tuple[str, ...]:
        """Return the fields that the text names."""
        return tuple(name for _, name, _, _ in Formatter().parse(self.text) if name is not None)


MarkerSpec = str | Written


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

    def at(self, edge: Literal["before", "between", "end", "after"]) -> tuple[MarkerSpec, ...]:
        """Return the markers of one edge, in order."""
        markers = {
            "before": self.before,
            "between": self.between,
            "end": self.end,
            "after": self.after,
        }[edge]
        return markers if isinstance(markers, tuple) else (markers,)

    @property
    def parts_children(self) -> bool:
        """Return whether a marker stands after or between children."""
        return bool(self.at("between") or self.at("end"))

    @property
    def is_empty(self) -> bool:
        """Return whether the node has no marker at all."""
        return not (self.parts_children or self.at("before") or self.at("after"))


@dataclass(frozen=True, slots=True, kw_only=True)
class GridSpec:
    """From pixels to tokens.

    Args:
        patch: side of a patch in pixels.
        merge: patches a token and side.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    patch: int
    merge: int = 1

    def __post_init__(self) -> None:
        if min(self.patch, self.merge) < 1:
            raise ConfigError(
                f"patch is {self.patch} and merge {self.merge}; whole numbers of at least 1 are required. Correct them."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewSpec:
    """The size rule of a view: steps in order."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    size: tuple[Step, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewsSpec:
    """The views that an image is cut into; `global` is the whole image."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    global_: ViewSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSpec:
    """How the views of an image are written: their order, and the markers of each node.

    Args:
        order: the parts of an image.
        image: markers around the parts.
        global_: markers around the rows of the whole-image view.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    order: tuple[Literal["global"], ...]
    image: Wrap = field(default_factory=Wrap)
    global_: Wrap = field(default_factory=Wrap)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSpec:
    """How many frames of a clip the model is shown.

    Args:
        fps: frames a second.
        multiple: the number of frames is a multiple of this.
        at_least: smallest number of frames.
        at_most: largest number of frames.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    fps: float
    multiple: int = 1
    at_least: int = 1
    at_most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoSpec:
    """What a family does with a clip.

    Args:
        size: size steps of a frame.
        grid: from pixels to tokens; the family's own where the YAML says nothing.
        stream: how the clip is written.
        group: frames a grid step; the last frame is repeated to fill the last step.
        instant: which time of a grid step a text names.
        sample: how many frames are taken.
        cell: the placeholder token; the family's own where the YAML says nothing.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    size: tuple[Step, ...]
    grid: GridSpec
    stream: VideoStreamSpec
    group: int = 1
    instant: Instant = "first"
    sample: SampleSpec | None = None
    cell: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageSpec:
    """The rotary layout of the language model.

    Args:
        head_dim: channels of a head.
        theta: ladder base.
        sections: channel pairs an axis.
        order: which axis drives which pair.
        pairing: which two channels turn together.
        rotary_dim: channels that turn; all of them where the YAML says nothing.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    head_dim: int
    theta: float
    sections: tuple[int, ...]
    order: Literal["contiguous", "interleaved"]
    pairing: Literal["half", "adjacent"]
    rotary_dim: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilySpec:
    """Everything that is particular to one family of models.

    Args:
        views: size rules of images.
        grid: from pixels to tokens.
        cell: the placeholder token of an image.
        stream: how an image is written.
        rule: the position rule.
        video: what is done with clips; None if the family takes none.
        language: the rotary layout; None if ids do not turn channels.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    views: ViewsSpec
    grid: GridSpec
    cell: str
    stream: StreamSpec
    rule: Rule
    video: VideoSpec | None = None
    language: LanguageSpec | None = None
