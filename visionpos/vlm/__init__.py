"""The VLM line: media sizes become a plan, a token stream, position ids and a rotation."""

from visionpos.vlm.families import Family, family
from visionpos.vlm.ids import PositionIds, ids_from_tokens, stream_ids
from visionpos.vlm.loading import family_names
from visionpos.vlm.resize import smart_resize
from visionpos.vlm.rules import Delta, PerSecond, Rule
from visionpos.vlm.segments import Audio, Image, Special, Text, Video
from visionpos.vlm.stream import Cells, Marker, Span, TokenStream, Words
from visionpos.vlm.tiling import Plan, View

__all__ = [
    "Audio",
    "Cells",
    "Delta",
    "Family",
    "Image",
    "Marker",
    "PerSecond",
    "Plan",
    "PositionIds",
    "Rule",
    "Span",
    "Special",
    "Text",
    "TokenStream",
    "Video",
    "View",
    "Words",
    "family",
    "family_names",
    "ids_from_tokens",
    "smart_resize",
    "stream_ids",
]
