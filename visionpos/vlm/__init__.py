"""The VLM line: media sizes become a plan, a token stream, position ids and a rotation."""

from visionpos.vlm.clicks import tokens_at
from visionpos.vlm.dropping import drop_rates, keep_tokens
from visionpos.vlm.families import Family, family
from visionpos.vlm.ids import PositionIds, ids_from_tokens, stream_ids
from visionpos.vlm.loading import family_names
from visionpos.vlm.naflex import NaflexBatch, naflex_batch
from visionpos.vlm.packed import Packed
from visionpos.vlm.packing import pack_images
from visionpos.vlm.resize import smart_resize
from visionpos.vlm.resolutions import resampled, sample_sides
from visionpos.vlm.rules import Delta, PerSecond, Rule
from visionpos.vlm.segments import Audio, Image, Special, Text, Video
from visionpos.vlm.stream import Cells, Marker, Span, TokenStream, Words
from visionpos.vlm.tiling import Plan, Raster, View

__all__ = [
    "Audio",
    "Cells",
    "Delta",
    "Family",
    "Image",
    "Marker",
    "NaflexBatch",
    "Packed",
    "PerSecond",
    "Plan",
    "PositionIds",
    "Raster",
    "Rule",
    "Span",
    "Special",
    "Text",
    "TokenStream",
    "Video",
    "View",
    "Words",
    "drop_rates",
    "family",
    "family_names",
    "ids_from_tokens",
    "keep_tokens",
    "naflex_batch",
    "pack_images",
    "resampled",
    "sample_sides",
    "smart_resize",
    "stream_ids",
    "tokens_at",
]
