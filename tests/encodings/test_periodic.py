"""Periodic RoPE: the left and right edges of a panorama meet."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import visionpos as vp
from tests.compiled import SIZES, graphs_of
from tests.strategies import shifts
from visionpos import CoordSpec, Dims, Grid, PositionError
from visionpos.config import load_encoding
from visionpos.encodings import PeriodicRope, PeriodicRopeSpec

DIMS = Dims(embed_dim=48, num_heads=2, depth=2)  # heads of 24 channels


def spec(height: int = 4, width: int = 8, **fields: object) -> PeriodicRopeSpec:
    coords = CoordSpec(extent="trained", trained_shape=(height, width))
    return PeriodicRopeSpec(coords=coords, **fields)


def rope(settings: PeriodicRopeSpec, dims: Dims = DIMS) -> PeriodicRope:
    return vp.build(settings, dims).eval()


@pytest.mark.parametrize("hw", [(3, 5), (1, 7), (7, 1), (13, 11)])
def test_shape(hw):
    assert rope(load_encoding("spherope"))(Grid(*hw)).cos.shape == (hw[0] * hw[1], 12)


@given(st.integers(2, 100), st.sampled_from(["keep", "still"]), st.floats(0.5, 3.0))
def test_reference_frequencies(width, slow, least):
    """y keeps its ladder; x counts whole turns around the width where it made `least` turns."""
    freqs = rope(spec(5, width, slow=slow, least=least)).freqs().double()
    plain = vp.axial_freqs(24, theta=1e4).double()
    assert torch.equal(freqs[0], plain[0])
    for old, new in zip(plain[1].tolist(), freqs[1].tolist(), strict=True):
        turns = old * width / (2 * math.pi)
        if turns >= least:
            expected = round(turns) * 2 * math.pi / width
        else:
            expected = old if slow == "keep" else 0.0
        if abs(turns - least) > 1e-6 and abs(turns % 1 - 0.5) > 1e-6:
            assert new == pytest.approx(expected, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize(
    "settings",
    [
        spec(slow="still"),
        PeriodicRopeSpec(coords=CoordSpec(unit="centred"), slow="still", theta=100.0, least=0.5),
    ],
    ids=["index", "centred"],
)
@given(hw=st.tuples(st.integers(1, 7), st.integers(1, 12)), yaw=st.integers(1, 12))
def test_invariant_yaw(settings, hw, yaw):
    """Rolling the panorama sideways rolls the scores and changes none: the seam is like any other place."""
    h, w = hw
    module = rope(settings)
    q, k = torch.randn(2, 1, 2, h, w, 24, dtype=torch.float64)
    turns = module.angles(module.points(Grid(h, w)).double())
    rotation = module.rotation(turns)

    def scores(q, k):
        turned = vp.rotate(q.flatten(2, 3), k.flatten(2, 3), rotation)
        return (turned[0] @ turned[1].mT).unflatten(-1, (h, w)).unflatten(-3, (h, w))

    rolled = scores(q.roll(yaw, 3), k.roll(yaw, 3))
    torch.testing.assert_close(rolled, scores(q, k).roll((yaw, yaw), (3, 5)), rtol=0, atol=1e-4)


def test_invariant_plain_axial_has_a_seam():
    """The law above can fail: RoPE with its own frequencies scores across the seam otherwise."""
    module, plain = rope(spec(1, 8, slow="still")), vp.axial_freqs(24, theta=1e4)
    q = torch.randn(1, 1, 1, 24)
    coords = vp.coordinates(Grid(1, 9))

    def across(freqs, a, b):
        turns = vp.angles(coords, freqs)
        x, y = (module.rotation(turns[i : i + 1]).apply(q) for i in (a, b))
        return (x * y).sum().item()

    assert across(module.freqs(), 7, 0) == pytest.approx(across(module.freqs(), 0, 1), abs=1e-4)
    assert abs(across(plain, 7, 0) - across(plain, 0, 1)) > 0.1


@given(shifts())
def test_invariant_shift(shift):
    """Still a rotation: strictly relative."""
    module = rope(spec())
    coords = module.points(Grid(3, 5)).double()
    q, k = torch.randn(2, 1, 2, 15, 24, dtype=torch.float64)

    def scores(points):
        turned = vp.rotate(q, k, module.rotation(module.angles(points)))
        return turned[0] @ turned[1].mT

    moved = scores(coords + torch.tensor(shift))
    torch.testing.assert_close(moved, scores(coords), rtol=0, atol=1e-8)


def test_invariant_more_tokens_keep_the_panorama():
    """Twice the columns span the same circle: even columns of the fine grid are those of the coarse one."""
    module = rope(spec(4, 8))
    fine = module.points(Grid(4, 16)).unflatten(0, (4, 16))[:, ::2].flatten(0, 1)
    torch.testing.assert_close(fine, module.points(Grid(4, 8)))
    assert not module.state_dict()


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"coords": CoordSpec()}, r"coords are .*extent=None.*one width at every resolution"),
        ({"coords": CoordSpec(axes=3, unit="centred")}, r"coords are .*axes=3"),
        ({"coords": CoordSpec(unit="centred", normalize="max")}, r"normalize='max'"),
        ({"coords": CoordSpec(unit="centred"), "slow": "halt"}, r"slow is 'halt'"),
        ({"coords": CoordSpec(unit="centred"), "pairing": "whole"}, r"pairing is 'whole'"),
    ],
)
def test_error_spec(fields, match):
    with pytest.raises(PositionError, match=match):
        PeriodicRopeSpec(**fields)


def test_error_at_build():
    with pytest.raises(PositionError, match=r"least is 0\.1; .*at least 0\.5 turns"):
        spec(least=0.1)
    with pytest.raises(PositionError, match=r"head_dim is 6 for 2 axes"):
        vp.build(spec(), Dims(embed_dim=12, num_heads=2, depth=1))


def test_compile_one_graph_over_six_sizes():
    module = rope(spec())
    calls = [(torch.randn(2, 3, h * w, 24), h, w) for h, w in SIZES]
    assert graphs_of(lambda q, h, w: module(Grid(h, w)).apply(q), calls) == 1


def test_device(device):
    there = rope(spec())(Grid(3, 5), device=device)
    assert there.cos.device.type == device.type
    torch.testing.assert_close(there.cos.cpu(), rope(spec())(Grid(3, 5)).cos, rtol=1e-5, atol=1e-5)
