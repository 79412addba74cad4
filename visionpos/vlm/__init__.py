"""The VLM line: media sizes become a plan, a token stream, position ids and a rotation."""

from visionpos.vlm.batches import PackedIds, merge_rows, pack_rows, split_rows
from visionpos.vlm.clicks import tokens_at
from visionpos.vlm.decoding import (
    chunk,
    continued,
    ids_by_delta,
    next_ids,
    pending_ids,
    rolled_back,
)
from visionpos.vlm.dropping import drop_rates, keep_tokens
from visionpos.vlm.families import Family, family
from visionpos.vlm.ids import PositionIds, ids_from_tokens, stream_ids
from visionpos.vlm.increments import drawn_steps
from visionpos.vlm.loading import family_names
from visionpos.vlm.naflex import NaflexBatch, naflex_batch
from visionpos.vlm.packed import Packed
from visionpos.vlm.packing import pack_images
from visionpos.vlm.resize import smart_resize
from visionpos.vlm.resolutions import resampled, sample_sides
from visionpos.vlm.rotary import axis_visibility
from visionpos.vlm.rules import AudioInVideo, Circle, Delta, PerSecond, Rule
from visionpos.vlm.segments import Audio, Image, Special, Text, Video
from visionpos.vlm.stream import Cells, Marker, Span, TokenStream, Words
from visionpos.vlm.tiling import Plan, Raster, View
from visionpos.vlm.tower import TowerSpec, tower_ids, tower_segments, tower_windows
from visionpos.vlm.woven import weave

__all__ = [
    "Audio",
    "AudioInVideo",
    "Cells",
    "Circle",
    "Delta",
    "Family",
    "Image",
    "Marker",
    "NaflexBatch",
    "Packed",
    "PackedIds",
    "PerSecond",
    "Plan",
    "PositionIds",
    "Raster",
    "Rule",
    "Span",
    "Special",
    "Text",
    "TokenStream",
    "TowerSpec",
    "Video",
    "View",
    "Words",
    "axis_visibility",
    "chunk",
    "continued",
    "drawn_steps",
    "drop_rates",
    "family",
    "family_names",
    "ids_by_delta",
    "ids_from_tokens",
    "keep_tokens",
    "merge_rows",
    "naflex_batch",
    "next_ids",
    "pack_images",
    "pack_rows",
    "pending_ids",
    "resampled",
    "rolled_back",
    "sample_sides",
    "smart_resize",
    "split_rows",
    "stream_ids",
    "tokens_at",
    "tower_ids",
    "tower_segments",
    "tower_windows",
    "weave",
]
