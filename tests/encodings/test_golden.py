"""Golden-gate RoPE: oblique directions without a parameter."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given

import visionpos as vp
from tests.compiled import SIZES, graphs_of
from tests.reference import directions as oracle
from tests.strategies import grids, shifts
from visionpos import CoordSpec, Dims, Grid, PositionError
from visionpos.config import load_encoding
from visionpos.encodings import GoldenRope, GoldenRopeSpec

DIMS = Dims(embed_dim=24, num_heads=3, depth=2, prefix=1)  # heads of 8 channels


def rope(spec: GoldenRopeSpec | None = None, dims: Dims = DIMS) -> GoldenRope:
    return vp.build(spec or load_encoding("golden_gate"), dims).eval()


@pytest.mark.parametrize("hw", [(3, 5), (1, 7), (7, 1), (13, 11)])
def test_shape(hw):
    out = rope()(Grid(*hw), layer=1)
    assert out.cos.shape == (3, hw[0] * hw[1], 4)
    assert out.cos.isfinite().all()


def test_shape_of_a_clip():
    spec = GoldenRopeSpec(directions="quasirandom", coords=CoordSpec(unit="endpoint", axes=3))
    out = rope(spec)(Grid(3, 5, frames=2))
    assert out.cos.shape == (3, 30, 4)
    assert not torch.equal(out.cos[:, :15], out.cos[:, 15:])


@given(grids(max_side=9, min_side=2))
def test_reference_angles(hw):
    """Directions k pi / phi, .2 to 20 rad, on [-sqrt(w/h), sqrt(w/h)] by [-sqrt(h/w), sqrt(h/w)]."""
    h, w = hw
    freqs = oracle.golden(8, 3, 0.2, 20.0, 0.0)
    high, wide = math.sqrt(h / w), math.sqrt(w / h)
    points = [
        (high * (2 * y / (h - 1) - 1), wide * (2 * x / (w - 1) - 1))
        for y in range(h)
        for x in range(w)
    ]
    expected = np.einsum("na,hap->hnp", np.array(points), freqs)
    module = rope()
    turns = module.angles(module.points(Grid(h, w)))
    torch.testing.assert_close(turns.double(), torch.from_numpy(expected), rtol=0, atol=2e-4)


@given(grids(max_side=6), shifts())
def test_invariant_shift(hw, shift):
    """Strictly relative, head by head."""
    module = rope()
    coords = module.points(Grid(*hw)).double()
    q, k = torch.randn(2, 1, 3, len(coords), 8, dtype=torch.float64)

    def scores(points):
        turned = vp.rotate(q, k, module.rotation(module.angles(points)))
        return turned[0] @ turned[1].mT

    moved = coords + torch.tensor(shift) / 7
    torch.testing.assert_close(scores(coords), scores(moved), rtol=0, atol=1e-8)


@given(grids(max_side=9, min_side=2))
def test_invariant_aspect(hw):
    """ "keep" gives rows and columns one spacing for each cell count; "stretch" pins both axes to [-1, 1]."""
    kept = rope().points(Grid(*hw))
    stretched = rope(GoldenRopeSpec(aspect="stretch")).points(Grid(*hw))
    assert stretched.amax() == 1
    assert stretched.amin() == -1
    ratio = kept.amax(0)[1] / kept.amax(0)[0]
    assert ratio.item() == pytest.approx(hw[1] / hw[0], rel=1e-5)


def test_invariant_heads_differ_and_layers_do_not():
    module = rope()
    out = module(Grid(3, 5), layer=0)
    assert not module.layerwise
    assert torch.equal(out.cos, module(Grid(3, 5), layer=1).cos)
    assert (out.cos[0] - out.cos[1]).abs().max() > 0.1
    assert not module.state_dict()


def test_invariant_bf16_model_keeps_angles():
    """Ports that build the grid in the model's dtype lose up to whole turns; a cast changes nothing here."""
    module = rope()
    exact = module(Grid(32, 30)).cos
    assert torch.equal(module.bfloat16()(Grid(32, 30)).cos, exact)
    rough = module.points(Grid(32, 30)).bfloat16().float()
    assert (module.angles(rough) - module.angles(module.points(Grid(32, 30)))).abs().max() > 0.02


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"directions": "random"}, r"directions is 'random'; it must be one of 'angle', 'quasi"),
        ({"aspect": "crop"}, r"aspect is 'crop'; it must be one of 'keep', 'stretch'"),
        ({"pairing": "half_per_axis"}, r"pairing is 'half_per_axis'"),
        ({"slowest": 0.0}, r"slowest is 0\.0"),
        ({"still": -0.5}, r"still -0\.5"),
        ({"coords": CoordSpec(axes=3)}, r"directions are 'angle' for 3 axes; 'quasirandom'"),
    ],
)
def test_error(fields, match):
    with pytest.raises(PositionError, match=match):
        vp.build(GoldenRopeSpec(**fields), DIMS)


def test_compile_one_graph_over_six_sizes():
    module = rope()
    calls = [(torch.randn(2, 3, h * w, 8), h, w) for h, w in SIZES]

    def direct(q, h, w):  # what graphs take: Rotary.over has a faster form in eager mode
        return module.rotation(module.angles(module.points(Grid(h, w)))).apply(q)

    assert graphs_of(lambda q, h, w: module(Grid(h, w)).apply(q), calls, direct) == 1


def test_device(device):
    there = rope()(Grid(3, 5), device=device)
    assert there.cos.device.type == device.type
    torch.testing.assert_close(there.cos.cpu(), rope()(Grid(3, 5)).cos, rtol=1e-4, atol=1e-4)
