"""The ground floor: where tokens are, how fast channels turn, and what follows from the two."""

from visionpos.geometry.coords import CoordSpec, augment, coordinates, offsets
from visionpos.geometry.freqs import (
    angles,
    axial_freqs,
    gaussian_freqs,
    ladder,
    mixed_freqs,
    period_freqs,
)
from visionpos.geometry.grid import Grid
from visionpos.geometry.layout import Layout, channel_permutation, convert
from visionpos.geometry.recipes import RECIPES, Recipe
from visionpos.geometry.relative import distinct_offsets, relative_index
from visionpos.geometry.resample import grid_weights, resample, sample_table
from visionpos.geometry.rotation import Rotation, rotate
from visionpos.geometry.sections import section_axes, section_freqs

__all__ = [
    "RECIPES",
    "CoordSpec",
    "Grid",
    "Layout",
    "Recipe",
    "Rotation",
    "angles",
    "augment",
    "axial_freqs",
    "channel_permutation",
    "convert",
    "coordinates",
    "distinct_offsets",
    "gaussian_freqs",
    "grid_weights",
    "ladder",
    "mixed_freqs",
    "offsets",
    "period_freqs",
    "relative_index",
    "resample",
    "rotate",
    "sample_table",
    "section_axes",
    "section_freqs",
]
