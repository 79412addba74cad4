"""The ground floor: where tokens are, how fast channels turn, and what follows from the two."""

from visionpos.geometry.augment import augment
from visionpos.geometry.bands import golden_freqs, pixel_freqs, whole_turns
from visionpos.geometry.blocks import BasisTurn, BlockTurn
from visionpos.geometry.circle import circle_coords
from visionpos.geometry.coords import CoordSpec, coordinates, offsets
from visionpos.geometry.freqs import (
    angles,
    axial_freqs,
    gaussian_freqs,
    ladder,
    mixed_freqs,
    period_freqs,
)
from visionpos.geometry.grid import Grid
from visionpos.geometry.image_frame import ImageFrame
from visionpos.geometry.layout import Layout, channel_permutation, convert
from visionpos.geometry.layout_check import check_layout
from visionpos.geometry.order import inverse_order, merge_order, token_order, window_order
from visionpos.geometry.recipes import RECIPES, Recipe
from visionpos.geometry.relative import distinct_offsets, relative_index
from visionpos.geometry.resample import resample, sample_table
from visionpos.geometry.rotation import Rotation, rotate, rotate_memory
from visionpos.geometry.sections import section_axes, section_freqs
from visionpos.geometry.waves import waves
from visionpos.geometry.weights import grid_weights

__all__ = [
    "RECIPES",
    "BasisTurn",
    "BlockTurn",
    "CoordSpec",
    "Grid",
    "ImageFrame",
    "Layout",
    "Recipe",
    "Rotation",
    "angles",
    "augment",
    "axial_freqs",
    "channel_permutation",
    "check_layout",
    "circle_coords",
    "convert",
    "coordinates",
    "distinct_offsets",
    "gaussian_freqs",
    "golden_freqs",
    "grid_weights",
    "inverse_order",
    "ladder",
    "merge_order",
    "mixed_freqs",
    "offsets",
    "period_freqs",
    "pixel_freqs",
    "relative_index",
    "resample",
    "rotate",
    "rotate_memory",
    "sample_table",
    "section_axes",
    "section_freqs",
    "token_order",
    "waves",
    "whole_turns",
    "window_order",
]
