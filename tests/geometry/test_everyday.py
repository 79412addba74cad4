"""Everyday mistakes in calls of the geometry: a pair where a Grid belongs, whole numbers where floats, a name."""

import numpy as np
import pytest
import torch

import visionpos as vp
from visionpos import Grid, Layout, PositionError
from visionpos.geometry import check_layout

TABLE, GRID = torch.randn(36, 8), Grid(4, 9)
POINTS = torch.zeros(3, 2)
ADJACENT = Layout(head_dim=8, pairing="adjacent")


def resampled(**how):
    return vp.resample(
        **{"table": TABLE, "source": GRID, "target": Grid(3, 5), "recipe": "timm", **how}
    )


def sampled(**how):
    given = {"table": TABLE, "coords_yx": POINTS, "source": GRID, "extent_hw": (3, 5)}
    return vp.sample_table(**{**given, "recipe": "timm", **how})


@pytest.mark.parametrize("call", [resampled, sampled])
def test_error_tables(call):
    """A table of whole numbers came back cut to whole numbers."""
    with pytest.raises(PositionError, match=r"table is torch\.int64; a tensor of floats"):
        call(table=TABLE.long())
    with pytest.raises(PositionError, match=r"table is ndarray; a tensor of floats"):
        call(table=TABLE.numpy())
    with pytest.raises(PositionError, match=r"source is \(4, 9\); a Grid of tokens"):
        call(source=(4, 9))
    for bad in ([1], {}, 3):
        with pytest.raises(PositionError, match=r"recipe is .*; it must be a Recipe or one of"):
            call(recipe=bad)


def test_error_tables_of_a_grid():
    with pytest.raises(PositionError, match=r"target is \(3, 5\); a Grid of tokens"):
        resampled(target=(3, 5))
    with pytest.raises(PositionError, match=r"table has 0 rows"):
        resampled(table=TABLE[:, 0])
    for bad in (1.0, "1", None, True):
        with pytest.raises(PositionError, match=rf"prefix {bad!r} .*needs counts of at least 0"):
            resampled(prefix=bad)


@pytest.mark.parametrize("bad", [{}, 3, "index", (2,)])
def test_error_specs_of_coordinates(bad):
    """An empty mapping was read as no spec at all."""
    with pytest.raises(PositionError, match=r"spec is .*; a CoordSpec is required"):
        vp.coordinates(GRID, bad)
    with pytest.raises(PositionError, match=r"spec is .*; a CoordSpec is required"):
        vp.augment(POINTS, bad)


def test_error_layouts():
    weight = torch.zeros(16, 4)
    for bad in (None, "dinov3", vp.AxialRopeSpec()):
        for pair in ((bad, ADJACENT), (ADJACENT, bad)):
            name = "source" if pair[0] is bad else "target"
            with pytest.raises(PositionError, match=rf"{name} is .*; a Layout is required"):
                vp.convert(weight, *pair)
            with pytest.raises(PositionError, match=rf"{name} is .*; a Layout is required"):
                vp.channel_permutation(*pair)
            with pytest.raises(PositionError, match=rf"{name} is .*; a Layout is required"):
                check_layout(*pair)
    with pytest.raises(PositionError, match=r"weight is ndarray; a tensor \[heads"):
        vp.convert(weight.numpy(), ADJACENT, ADJACENT)


@pytest.mark.parametrize("bad", [1.5, True, "8", None, 0])
def test_error_counts(bad):
    """1.5 pairs made a ladder of two."""
    calls = [
        lambda: vp.ladder(bad, theta=10.0),
        lambda: vp.axial_freqs(bad),
        lambda: vp.axial_freqs(8, axes=bad),
        lambda: vp.period_freqs(bad, shortest=1.0, longest=2.0),
        lambda: vp.mixed_freqs(bad, num_heads=2, depth=2),
        lambda: vp.mixed_freqs(8, num_heads=bad, depth=2),
        lambda: vp.mixed_freqs(8, num_heads=2, depth=bad),
        lambda: vp.gaussian_freqs(bad),
        lambda: vp.gaussian_freqs(8, axes=bad),
    ]
    for call in calls:
        with pytest.raises(PositionError, match=rf"{bad!r}.*required"):
            call()


def test_error_sizes_of_images():
    for bad in (448, None, "ab", 448.0, (448,), (448.0, 448)):
        with pytest.raises(PositionError, match=r"size_hw is .*; two whole numbers"):
            Grid.of_image(bad, patch=16)
    for bad in (16.0, None, "ab", (16,)):
        with pytest.raises(PositionError, match=r"patch is .*; two whole numbers"):
            Grid.of_image((448, 448), patch=bad)
    for bad in (16.0, None, "16", -4):
        with pytest.raises(PositionError, match=r"tokens is .*no square number"):
            Grid.square(bad)
    assert Grid.of_image([448, 672], patch=np.int64(16)).shape == (1, 28, 42)
    assert Grid.of_image(torch.Size((448, 672)), patch=[16, 14]).shape == (1, 28, 48)


def test_error_offsets():
    for bad in (None, torch.zeros(2), torch.zeros(3, 3), POINTS > 0):
        with pytest.raises(PositionError, match=r"coords|others"):
            vp.offsets(POINTS, bad) if bad is not None else vp.offsets(bad)


def test_error_a_theta_whose_inverse_is_infinite():
    """1e-40 is above 0, and made a ladder of infinity and NaN."""
    with pytest.raises(PositionError, match=r"theta is 1e-40"):
        vp.AxialRopeSpec(theta=1e-40)
