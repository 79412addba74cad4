"""Golden coordinates of facts/vision_pe.md 1G and 2: DINOv3's rectangles and its jitter."""

import math

import pytest
import torch

import visionpos as vp
from visionpos import CoordSpec, Grid


def test_golden_dinov3_rectangles():
    """Facts 2, DINOv3, H=2 W=4: "max" puts rows on -.75, -.25, "min" runs columns past 1."""
    rows, columns = {}, {}
    for normalize in ("separate", "min", "max"):
        coords = vp.coordinates(Grid(2, 4), CoordSpec(unit="centred", normalize=normalize))
        rows[normalize] = coords[::4, 0].tolist()
        columns[normalize] = coords[:4, 1].tolist()
    assert rows == {"separate": [-0.5, 0.5], "min": [-0.5, 0.5], "max": [-0.75, -0.25]}
    assert columns["min"] == [-0.5, 0.5, 1.5, 2.5]
    assert columns["separate"] == columns["max"] == [-0.75, -0.25, 0.25, 0.75]


# Facts 1G, manual_seed(0), 2x2 grid: (y, x) of token 0 times the slow band of d=8, 2 pi / 10.
GOLDEN_JITTER = [
    ({"rescale": 2.0}, (-0.312533, -0.312533)),
    ({"jitter": 2.0}, (-0.312533, -0.455654)),
    ({"shift": 0.5}, (-0.316511, -0.145631)),
    ({"shift": 0.5, "jitter": 2.0, "rescale": 2.0}, (-0.136989, -0.066953)),
]


@pytest.mark.parametrize(("how", "angles"), GOLDEN_JITTER)
def test_golden_jitter(how, angles):
    """Facts 1G: the order of draws is shift, jitter, rescale, from torch's generator, as in DINOv3 and timm."""
    spec = CoordSpec(unit="centred", **how)
    torch.manual_seed(0)
    moved = vp.augment(vp.coordinates(Grid(2, 2), spec), spec)
    slow_band = moved[0] * 2 * math.pi / 10
    torch.testing.assert_close(slow_band, torch.tensor(angles), rtol=0, atol=6e-7)
