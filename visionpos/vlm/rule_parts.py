"""Parts of a position rule: book-keeping for decoding, sound inside a clip, cells on a circle."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Literal

from visionpos.errors import ConfigError
from visionpos.vlm.box import check_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """How the number is kept that decoding adds to a token count, rope_deltas in transformers.

    Args:
        from_: "next" is the next position, "max" the largest id + 1, "none" is always 0.
        minus: "unmasked" takes off the number of real tokens, "padded" the length of the padded row.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    from_: Literal["next", "max", "none"] = "next"
    minus: Literal["unmasked", "padded"] = "unmasked"

    def __post_init__(self) -> None:
        check_spec(self, "delta")


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioInVideo:
    """The sound of a clip, its tokens woven between the clip's own: both start at s, a sound token adds one.

    Text goes on behind the last token woven, be it sound or cell.

    Args:
        interleave: "chunks" writes the cells, then the sound, of every `chunk_seconds`; "time" whichever is earlier,
            cells first on ties.
        chunk_seconds: length of a chunk; for "chunks" alone.
        share_edges: the start tokens of clip and sound stand at one position, and so do the end tokens.

    Reference:
        Qwen2.5-Omni (arXiv 2503.20215), Qwen3-Omni (arXiv 2509.17765); transformers get_rope_index of both.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    interleave: Literal["chunks", "time"]
    chunk_seconds: Fraction | None = None
    share_edges: bool = False

    def __post_init__(self) -> None:
        check_spec(self, "audio_in_video")
        if (self.interleave == "chunks") != (self.chunk_seconds is not None):
            raise ConfigError(
                f"chunk_seconds is {self.chunk_seconds} with interleave {self.interleave!r}; chunks need it and time "
                "takes none. Give both or neither."
            )
        if self.chunk_seconds is not None and self.chunk_seconds <= 0:
            raise ConfigError(
                f"chunk_seconds is {self.chunk_seconds}; a duration above 0 is required. Qwen2.5-Omni has 2."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Circle:
    """Cells on a circle across the text axis, centred on s (Circle-RoPE); see `geometry.circle_coords`.

    Args:
        radius: of the circle; None takes the image's own reach.
        alpha: weight in [0, 1] of the seen angle against the raster angle.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    radius: float | None = 10.0
    alpha: float = 0.5

    def __post_init__(self) -> None:
        check_spec(self, "circle")
