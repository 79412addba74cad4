"""Detectors: known ways in which position goes wrong without an error, each with a threshold and its source.

Each is a pure function of tables, tensors or callables of any origin; `detect` feeds those that fit a target.
"""

from visionpos.audit.detectors.effects import dead_scheme, masked_leak, order_dependence
from visionpos.audit.detectors.finding import applies, did_fail
from visionpos.audit.detectors.packing import (
    missing_reset,
    packed_outputs,
    tile_restart,
    tile_swap,
)
from visionpos.audit.detectors.registry import DETECTORS, Detector, detect
from visionpos.audit.detectors.shares import (
    axis_visibility,
    bias_collapse,
    section_shares,
    unused_buckets,
)
from visionpos.audit.detectors.states import frozen_copy, shared_state, stale_cache
from visionpos.audit.detectors.tables import axis_order, class_token_offset, missing_antialias
from visionpos.audit.detectors.turning import Wanted, pairing_mismatch, precision

__all__ = [
    "DETECTORS",
    "Detector",
    "Wanted",
    "applies",
    "axis_order",
    "axis_visibility",
    "bias_collapse",
    "class_token_offset",
    "dead_scheme",
    "detect",
    "did_fail",
    "frozen_copy",
    "masked_leak",
    "missing_antialias",
    "missing_reset",
    "order_dependence",
    "packed_outputs",
    "pairing_mismatch",
    "precision",
    "section_shares",
    "shared_state",
    "stale_cache",
    "tile_restart",
    "tile_swap",
    "unused_buckets",
]
