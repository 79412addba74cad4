"""The grammar of a family: what its YAML may say, as frozen specs.

Data enters through `loading.py`, where unknown keys are refused by name; a `FamilySpec` leaves. A family that needs
something new adds a kind here that any family could use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from visionpos.errors import ConfigError
from visionpos.vlm.box import check_least, check_spec
from visionpos.vlm.cutting import ContentSpec, ShrinkSpec, TileSpec, WhenSpec
from visionpos.vlm.instants import Instant
from visionpos.vlm.language import LanguageSpec
from visionpos.vlm.markers import StreamSpec, VideoStreamSpec, check_name
from visionpos.vlm.picking import PickSpec
from visionpos.vlm.pixel_spec import PixelSpec
from visionpos.vlm.resize import Step
from visionpos.vlm.rules import Rule
from visionpos.vlm.sound import AudioSpec
from visionpos.vlm.tower import TowerSpec

Cover = Literal["floor", "ceil"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GridSpec:
    """From pixels to tokens.

    Args:
        patch: side of a patch in pixels.
        merge: patches a token and side.
        cover: what becomes of a side that is no multiple of the patch: "floor" leaves the rest out, "ceil" counts it.
        merge_cover: the same of patches that are no multiple of merge; with "ceil" the last cell is not full.
        queries: so many tokens without rows and columns, whatever the patches (perceiver, resampler).
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    patch: int
    merge: int = 1
    cover: Cover = "floor"
    merge_cover: Cover = "floor"
    queries: int | None = None

    def __post_init__(self) -> None:
        check_spec(self, "grid")
        if min(self.patch, self.merge) < 1:
            raise ConfigError(
                f"patch is {self.patch} and merge {self.merge}; whole numbers of at least 1 are required. Correct them."
            )
        if self.queries is not None and self.queries < 1:
            raise ConfigError(
                f"queries is {self.queries}; at least 1 is required. Leave it out for a grid."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewSpec:
    """The view of the whole image.

    Args:
        size: steps in order.
        of: what they start from: "picture": the original; "resized": what `views.size` made of it; "canvas": the canvas
            of all tiles with its padding, where the image is cut.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    size: tuple[Step, ...]
    of: Literal["picture", "resized", "canvas"] = "picture"


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewsSpec:
    """The views that an image becomes.

    Args:
        global_: the whole image; None if it is not shown.
        size: steps of the image before it is cut.
        pick: the tile grid.
        when: when the image is cut.
        tile: what tiles are.
        fill: steps that bring the image to the canvas of all tiles; None stretches it.
        arrange: "per_view": each tile is written by itself; "joined": their cells form one raster.
        content: what of that raster is kept; None keeps all.
        shrink: how that raster is made smaller; None never does.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    global_: ViewSpec | None = None
    size: tuple[Step, ...] = ()
    pick: PickSpec | None = None
    when: WhenSpec | None = None
    tile: TileSpec | None = None
    fill: tuple[Step, ...] | None = None
    arrange: Literal["per_view", "joined"] = "per_view"
    content: ContentSpec | None = None
    shrink: ShrinkSpec | None = None

    def __post_init__(self) -> None:
        if (self.pick is None) != (self.tile is None):
            raise ConfigError(
                f"views has pick {self.pick} and tile {self.tile}; both or neither are required. Add the other."
            )
        if self.pick is None and self.global_ is None:
            raise ConfigError("views has neither global nor pick; an image needs a view. Add one.")


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

    def __post_init__(self) -> None:
        check_spec(self, "sample", multiple=1, at_least=1)
        if self.fps <= 0 or self.at_most < max(self.at_least, self.multiple):
            raise ConfigError(
                f"sample has fps {self.fps}, multiple {self.multiple}, at_least {self.at_least} and at_most "
                f"{self.at_most}; fps above 0, and at_most no less than the other two, are required. Correct them."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoSpec:
    """What a family does with a clip.

    Args:
        size: size steps of a frame; those of a whole image where the YAML says nothing.
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

    def __post_init__(self) -> None:
        check_least(self, "video", group=1)
        check_name("video.cell", self.cell)


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilySpec:
    """Everything that is particular to one family of models.

    Args:
        views: size rules of images.
        grid: from pixels to tokens.
        cell: the placeholder token of an image.
        stream: how an image is written.
        rule: the position rule; None for an encoder alone, or where no rule is in the data yet.
        video: what is done with clips; None if the family takes none.
        audio: what is done with sound; None if the family takes none.
        pixels: how pixels are resampled, padded and normalised; None where it is not in the data yet.
        language: the rotary layout; None if ids do not turn channels.
        tower: order and attention of the vision tower; None where it is not in the data.
        untiled: what holds instead for an image that is not cut; None if nothing changes.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    views: ViewsSpec
    grid: GridSpec
    cell: str
    stream: StreamSpec
    rule: Rule | None = None
    video: VideoSpec | None = None
    audio: AudioSpec | None = None
    pixels: PixelSpec | None = None
    language: LanguageSpec | None = None
    tower: TowerSpec | None = None
    untiled: FamilySpec | None = None

    def __post_init__(self) -> None:
        check_name("cell", self.cell)
        if self.audio is not None and (self.rule is None or self.rule.audio == "none"):
            raise ConfigError(
                "audio is given and rule.audio is 'none'; ids of sound are required. Set rule: {audio: text}."
            )
        if self.rule is not None and self.language is not None:
            wanted, got = self.rule.axes, self.language.axes
            if got != len(wanted):
                raise ConfigError(
                    f"language.sections {self.language.sections} are for {got} axes of ids and the rule has "
                    f"{len(wanted)} ({', '.join(wanted)}); the two must be equal. Correct sections, or rule.axes."
                )
        shown = {"global": self.views.global_, "tiles": self.views.pick}
        for node, view in shown.items():
            if view is not None and node not in self.stream.order:
                raise ConfigError(
                    f"stream.order is {list(self.stream.order)} and views has {node}, whose features would have no "
                    "token; every view must be written. Add it to the order, or remove the view."
                )
