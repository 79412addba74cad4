"""Golden angles and frequencies of facts/vision_pe.md 1B, 2 and 4, and facts/timm.md 1.4."""

import math

import pytest
import torch

import visionpos as vp
from visionpos import CoordSpec, Grid

FULL_TURN = 2 * math.pi


# Facts 1B: token (y=1, x=2), d=16, theta 10000.
@pytest.mark.parametrize(
    ("bands", "axis_order", "offset", "expected"),
    [
        ("shared", (0, 1), 0.0, [1, 0.1, 0.01, 0.001, 2, 0.2, 0.02, 0.002]),  # Qwen
        (
            "dealt",
            (0, 1),
            0.0,
            [1, 0.1, 0.01, 0.001, 0.632456, 0.063246, 0.006325, 0.000632],
        ),  # Pixtral
        ("shared", (1, 0), 1.0, [3, 0.3, 0.03, 0.003, 2, 0.2, 0.02, 0.002]),  # Llama 4
    ],
    ids=["qwen", "pixtral", "llama4"],
)
def test_golden_axial_angles(bands, axis_order, offset, expected):
    freqs = vp.axial_freqs(16, theta=10000.0, bands=bands, axis_order=axis_order)
    coords = vp.coordinates(Grid(3, 5), CoordSpec(offset=offset))
    turns = vp.angles(coords, freqs)[1 * 5 + 2]
    torch.testing.assert_close(turns, torch.tensor(expected), rtol=1e-6, atol=5e-7)


@pytest.mark.parametrize(
    ("normalize", "sines"),
    [
        ("separate", (0, -0.309017, 1, -0.453991)),
        ("min", (0, -0.309017, 0, -0.309017)),
        ("max", (1, -0.453991, 1, -0.453991)),
    ],
)
def test_golden_dinov3_sines(normalize, sines):
    """Facts 2, DINOv3, H=2 W=4, d=8: sines of token 0, (y fast, y slow, x fast, x slow)."""
    coords = vp.coordinates(Grid(2, 4), CoordSpec(unit="centred", normalize=normalize))
    turns = vp.angles(coords, FULL_TURN * vp.axial_freqs(8, theta=100.0))
    torch.testing.assert_close(turns[0].sin(), torch.tensor(sines).float(), rtol=0, atol=6e-7)


def test_golden_dinov3_square():
    """Facts 2, DINOv3, 2x2, d=8: periods 1 and 10; token 0 turns by -pi and -.314159 on both axes."""
    freqs = FULL_TURN * vp.axial_freqs(8, theta=100.0)
    torch.testing.assert_close(FULL_TURN / freqs[0, :2], torch.tensor([1.0, 10.0]))
    turns = vp.angles(vp.coordinates(Grid(2, 2), CoordSpec(unit="centred")), freqs)[0]
    expected = torch.tensor([-math.pi, -0.314159, -math.pi, -0.314159])
    torch.testing.assert_close(turns, expected, rtol=0, atol=5e-7)
    torch.testing.assert_close(turns.cos()[:2], torch.tensor([-1, 0.951057]), rtol=0, atol=5e-7)


def test_golden_dinov3_periods():
    """facts/timm.md 1.4, d=64: periods 1, 1.334, ..., 74.99; at the border 6.283 rad down to .0838 rad."""
    freqs = FULL_TURN * vp.axial_freqs(64, theta=100.0)[0, :16]
    periods = FULL_TURN / freqs
    got = [round(periods[k].item(), digits) for k, digits in ((0, 3), (1, 3), (-1, 2))]
    assert got == [1.0, 1.334, 74.99]
    assert round(freqs[0].item(), 3) == 6.283
    assert round(freqs[-1].item(), 4) == 0.0838


@pytest.mark.parametrize(("side", "step"), [(14, 0.898), (32, 0.393), (64, 0.196), (256, 0.049)])
def test_golden_centred_step(side, step):
    """Facts 1B: centred coordinates keep the span, so the fastest band turns by 4 pi / N a patch."""
    coords = vp.coordinates(Grid(side, 1), CoordSpec(unit="centred"))
    turns = vp.angles(coords, FULL_TURN * vp.axial_freqs(8, theta=100.0))[:, 0]
    assert (turns[1] - turns[0]).item() == pytest.approx(step, abs=5.1e-4)


def test_golden_periods():
    """Facts 2, DINOv3: min and max period .5 and 8 at d=16 give [.5, 1.259921, 3.174802, 8] on both axes."""
    freqs = vp.period_freqs(16, shortest=0.5, longest=8.0)
    expected = torch.tensor([0.5, 1.259921, 3.174802, 8.0])
    torch.testing.assert_close(FULL_TURN / freqs[0, :4], expected)
    torch.testing.assert_close(FULL_TURN / freqs[1, 4:], expected)
    assert freqs[0, 4:].abs().sum() == freqs[1, :4].abs().sum() == 0


def test_golden_mixed():
    """Facts 2, RoPE-ViT, manual_seed(0), d=8, 2 heads: start values, and head 0 at (x=2, y=1)."""
    freqs = vp.mixed_freqs(8, num_heads=2, depth=1, generator=torch.Generator().manual_seed(0))[0]
    x = [[-0.999723, -0.316140, -0.023518, -0.007437], [0.114241, 0.036126, 0.993453, 0.314157]]
    y = [[0.023518, 0.007437, -0.999723, -0.316140], [-0.993453, -0.314157, 0.114241, 0.036126]]
    torch.testing.assert_close(freqs[:, 0], torch.tensor(y), rtol=0, atol=6e-7)
    torch.testing.assert_close(freqs[:, 1], torch.tensor(x), rtol=0, atol=6e-7)
    phase = vp.angles(torch.tensor([[1.0, 2.0]]), freqs[0])[0]
    expected = torch.tensor([-1.975929, -0.624843, -1.046760, -0.331015])
    torch.testing.assert_close(phase, expected, rtol=0, atol=1e-6)


def test_golden_mixed_repeats_its_ladder():
    """facts/timm.md 1.4: |f| repeats, indices 0 and 16 are both 1.0 at d=64."""
    speed = vp.mixed_freqs(64, num_heads=3, depth=2).norm(dim=-2)
    torch.testing.assert_close(speed[..., :16], speed[..., 16:])
    torch.testing.assert_close(speed[..., 0], torch.ones(2, 3))


def test_golden_interleaved_sections():
    """Facts 4 (MRoPE-I): [24, 20, 20] gives h the pairs 1, 4, ..., w 2, 5, ..., the rest and the tail are t."""
    owner = vp.section_axes((24, 20, 20), order="interleaved").tolist()
    assert [p for p in range(64) if owner[p] == 1] == list(range(1, 60, 3))
    assert [p for p in range(64) if owner[p] == 2] == list(range(2, 60, 3))
    assert owner[60:] == [0, 0, 0, 0]
    assert [owner.count(axis) for axis in range(3)] == [24, 20, 20]


def test_golden_sam_code():
    """Facts 2, SAM, B = [[1, .5], [0, -.25]] (row 0 is x): cells (0,0) and (1,2) of a 2x3 grid, sines then cosines."""
    turns_a_unit = torch.tensor([[0.0, -0.25], [1.0, 0.5]])  # axes y, x
    coords = vp.coordinates(Grid(2, 3), CoordSpec(unit="centred"))
    turns = vp.angles(coords, FULL_TURN * turns_a_unit)
    code = torch.cat([turns.sin(), turns.cos()], dim=-1)
    expected = torch.tensor(
        [[0.866025, -0.965926, -0.5, 0.258819], [-0.866025, 0.965926, -0.5, 0.258819]]
    )
    torch.testing.assert_close(code[[0, 5]], expected, rtol=0, atol=6e-7)


# facts/sequence_and_audit.md 6, base 100, 16 planes an axis, 14 cells: rule -> (cells per index, base).
STRETCHES = {
    "none": (1.0, 100.0),
    "interpolated": (0.5, 100.0),
    "ntk": (1.0, 100 * 2 ** (32 / 30)),
    "theta_times_s": (1.0, 200.0),
}
# Planes over 1.1 of their trained phase, of 13 that never complete a turn; the largest excess; the step kept.
EXCESS = {
    "none": (13, 2.08, 1.0),
    "interpolated": (0, 1.04, 0.5),
    "ntk": (11, 1.81, 1.0),
    "theta_times_s": (12, 1.82, 1.0),
}


@pytest.mark.parametrize("rule", STRETCHES)
def test_golden_phase_beyond_training(rule):
    """facts/sequence_and_audit.md 6: 14 to 28 cells: NTK leaves nearly all planes of a vision grid untrained."""
    scale, theta = STRETCHES[rule]
    trained, moved = (vp.axial_freqs(64, theta=t)[0, :16].double() for t in (100.0, theta))
    short, extent = 13 * trained, {} if scale == 1.0 else {"trained_shape": (14, 14)}
    spec = CoordSpec(extent="trained" if extent else "index", **extent)
    places = vp.coordinates(Grid(28, 1), spec)[:, 0].double()
    never = short < FULL_TURN
    excess = (places.max() * moved / short)[never]
    over, largest, step = EXCESS[rule]
    assert int(never.sum()) == 13
    assert int((excess > 1.1).sum()) == over
    assert excess.max().item() == pytest.approx(largest, abs=5.1e-3)
    assert ((places[1] - places[0]) * moved[0] / trained[0]).item() == pytest.approx(step)
    assert STRETCHES["ntk"][1] == pytest.approx(209.459, abs=5e-4)
