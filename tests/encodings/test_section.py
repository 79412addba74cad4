"""Section RoPE: one ladder over t, y, x, with sections that fit or are clamped."""

import pytest
import torch
from hypothesis import given

import visionpos as vp
from tests.compiled import SIZES, graphs_of
from tests.reference import coords as where
from tests.reference import directions
from tests.reference import rotary as oracle
from tests.strategies import grids, shifts, volumes
from tests.tolerances import assert_close_to
from visionpos import CoordSpec, Dims, Grid, PositionError
from visionpos.config import load_encoding
from visionpos.encodings import SectionRope, SectionRopeSpec

DIMS = Dims(embed_dim=128, num_heads=2, depth=2, prefix=1)  # heads of 64 channels


def rope(spec: SectionRopeSpec, dims: Dims = DIMS) -> SectionRope:
    return vp.build(spec, dims).eval()


@pytest.mark.parametrize("hw", [(3, 5), (1, 7), (7, 1), (13, 11)])
def test_shape_of_an_image(hw):
    """All pairs are there; those of time do not turn."""
    rotation = rope(load_encoding("genlip"))(Grid(*hw))
    assert rotation.cos.shape == (hw[0] * hw[1], 32)
    assert torch.equal(rotation.sin[:, 0::3], torch.zeros(hw[0] * hw[1], 11))


def test_shape_of_part_of_a_head():
    """Without clamp the sections alone turn; channels beyond them pass through."""
    module = rope(SectionRopeSpec(sections=(8, 6, 6)))
    assert module.freqs().shape == (2, 20)
    q = torch.randn(1, 2, 15, 64)
    assert torch.equal(module(Grid(3, 5)).apply(q)[..., 40:], q[..., 40:])


@given(grids(max_side=8))
def test_reference_clamped(hw):
    """GenLIP: the axis of every pair by loops, over the whole head's ladder."""
    module = rope(load_encoding("genlip"))
    owner = directions.clamped_owners((8, 12, 12), 32)
    points = [(0.0, y, x) for y, x in where.index(*hw)]
    expected = [[p[a] * 1e4 ** (-i / 32) for i, a in enumerate(owner)] for p in points]
    turns = module.angles(vp.coordinates(Grid(*hw)))
    assert_close_to(turns, torch.tensor(expected, dtype=torch.float64), kind="table")


@pytest.mark.parametrize("order", ["contiguous", "interleaved"])
@given(thw=volumes(max_side=4, max_frames=3))
def test_reference_sections_of_a_clip(thw, order):
    """Three axes: M-RoPE's own ids (t, y, x)."""
    t, h, w = thw
    spec = SectionRopeSpec(sections=(12, 10, 10), order=order, coords=CoordSpec(axes=3))
    module = rope(spec)
    coords = vp.coordinates(Grid(h, w, frames=t), spec.coords)
    expected = oracle.section_angles(
        coords.double().numpy(), 64, (12, 10, 10), 1e4, interleaved=order == "interleaved"
    )
    assert_close_to(module.angles(coords), torch.from_numpy(expected), kind="table")


@given(grids(max_side=5), shifts())
def test_invariant_shift(hw, shift):
    module = rope(load_encoding("genlip"))
    coords = vp.coordinates(Grid(*hw)).double()
    q, k = torch.randn(2, 1, 2, len(coords), 64, dtype=torch.float64)

    def scores(points):
        turned = vp.rotate(q, k, module.rotation(module.angles(points)))
        return turned[0] @ turned[1].mT

    torch.testing.assert_close(
        scores(coords), scores(coords + torch.tensor(shift)), rtol=0, atol=1e-8
    )


def test_invariant_time_stands_still_in_training():
    """timm moves y and x alone: a shift of the clip in time would be drawn otherwise."""
    spec = SectionRopeSpec(sections=(8, 12, 12), clamp=True, coords=CoordSpec(shift=2.0))
    module = rope(spec).train()
    assert torch.equal(module(Grid(3, 5)).sin[:, 0::3], torch.zeros(15, 11))


def test_invariant_there_is_no_state():
    assert not rope(load_encoding("genlip")).state_dict()


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"sections": (8, 12)}, r"sections are \(8, 12\) and coords have 2 axes"),
        ({"sections": (8, 12, 12), "coords": CoordSpec(axes=1)}, r"coords have 1 axes"),
        ({"sections": (8, 12, 12), "order": "mixed"}, r"order is 'mixed'"),
        ({"sections": (8, 12, 12), "pairing": "half_per_axis"}, r"pairing is 'half_per_axis'"),
    ],
)
def test_error_spec(fields, match):
    with pytest.raises(PositionError, match=match):
        SectionRopeSpec(**fields)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"sections": (16, 24, 24)}, r"turn 128 channels and a head has 64;.*clamp=True"),
        ({"sections": (8, 12, 12)}, r"sections \(8, 12, 12\) cannot be interleaved over 32 pairs"),
        ({"sections": (8, 12, 12), "clamp": True, "order": "contiguous"}, r"clamp needs order"),
    ],
)
def test_error_at_build(fields, match):
    with pytest.raises(PositionError, match=match):
        vp.build(SectionRopeSpec(**fields), DIMS)


def test_compile_one_graph_over_six_sizes():
    module = rope(load_encoding("genlip"))
    calls = [(torch.randn(2, 3, h * w, 64), h, w) for h, w in SIZES]
    assert graphs_of(lambda q, h, w: module(Grid(h, w)).apply(q), calls) == 1


def test_device(device):
    there = rope(load_encoding("genlip"))(Grid(3, 5), device=device)
    assert there.cos.device.type == device.type
    torch.testing.assert_close(there.cos.cpu(), rope(load_encoding("genlip"))(Grid(3, 5)).cos)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"sections": (0, 0, 0), "clamp": True}, r"sections are \(0, 0, 0\) with clamp True"),
        ({"sections": (8, 0, 0), "clamp": True}, r"sections are \(8, 0, 0\).*y or x above 0"),
        ({"sections": (8, -1, 4), "clamp": True}, r"sections are \(8, -1, 4\).*at least 0 each"),
        ({"sections": (0, 4, 4)}, r"sections are \(0, 4, 4\) with clamp False; at least 1 each"),
        ({"sections": (8.5, 4, 4), "clamp": True}, r"sections is \(8\.5, 4, 4\); .*whole number"),
    ],
)
def test_error_sections(fields, match):
    with pytest.raises(PositionError, match=match):
        SectionRopeSpec(**fields)
