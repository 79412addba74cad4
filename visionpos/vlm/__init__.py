"""The VLM line: media sizes become a plan, a token stream, position ids and a rotation.

`pixels`, and `prepare` out of it, are imported when first used: they need torchvision.
"""

import importlib
from typing import TYPE_CHECKING, Any

from visionpos.vlm.batches import merge_rows, split_rows
from visionpos.vlm.bins import bin_lengths
from visionpos.vlm.clicks import tokens_at
from visionpos.vlm.decoding import (
    chunk,
    continued,
    ids_after,
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
from visionpos.vlm.packed_ids import PackedIds
from visionpos.vlm.packing import pack_images
from visionpos.vlm.prompt_rows import pack, pack_rows
from visionpos.vlm.resize import smart_resize
from visionpos.vlm.resolutions import resampled, sample_sides
from visionpos.vlm.rotary import axis_visibility
from visionpos.vlm.rules import AudioInVideo, Circle, Delta, PerSecond, Rule
from visionpos.vlm.segments import Audio, Image, Special, Text, Video
from visionpos.vlm.shards import Shards, context_shards
from visionpos.vlm.stacked import StackedIds, stack_rows
from visionpos.vlm.stream import Cells, Marker, Span, TokenStream, Words
from visionpos.vlm.tiling import Plan, Raster, View
from visionpos.vlm.tower import TowerSpec, tower_ids, tower_segments, tower_windows
from visionpos.vlm.truncation import Truncation, truncate_stream, truncate_tokens
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
    "Shards",
    "Span",
    "Special",
    "StackedIds",
    "Text",
    "TokenStream",
    "TowerSpec",
    "Truncation",
    "Video",
    "View",
    "Words",
    "axis_visibility",
    "bin_lengths",
    "chunk",
    "context_shards",
    "continued",
    "drawn_steps",
    "drop_rates",
    "family",
    "family_names",
    "ids_after",
    "ids_by_delta",
    "ids_from_tokens",
    "keep_tokens",
    "merge_rows",
    "naflex_batch",
    "next_ids",
    "pack",
    "pack_images",
    "pack_rows",
    "pending_ids",
    "resampled",
    "rolled_back",
    "sample_sides",
    "smart_resize",
    "split_rows",
    "stack_rows",
    "stream_ids",
    "tokens_at",
    "tower_ids",
    "tower_segments",
    "tower_windows",
    "truncate_stream",
    "truncate_tokens",
    "weave",
]

if TYPE_CHECKING:
    from visionpos.vlm import pixels as pixels
    from visionpos.vlm.pixels import prepare as prepare
else:  # a type checker would take any name as given

    def __getattr__(name: str) -> Any:
        """Return what stands on torchvision, and is imported with its first use (PEP 562)."""
        if name not in ("pixels", "prepare"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = importlib.import_module("visionpos.vlm.pixels")
        return module if name == "pixels" else module.prepare


def __dir__() -> list[str]:
    return sorted({*globals(), "pixels", "prepare"})
