"""Frequencies, and the one product that turns them into angles."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import visionpos as vp
from tests.compiled import SIZES, graphs_of
from tests.reference import coords as where
from tests.reference import rotary as oracle
from tests.strategies import grids, seeds, volumes
from tests.tolerances import assert_close_to
from visionpos import CoordSpec, Grid, PositionError

FULL_TURN = 2 * math.pi


@st.composite
def axial_layouts(draw):
    """Draw the keyword arguments of axial_freqs for 1, 2 or 3 axes."""
    axes = draw(st.integers(1, 3))
    return {
        "head_dim": 2 * axes * draw(st.integers(1, 8)),
        "theta": draw(st.sampled_from([10.0, 100.0, 10000.0])),
        "axes": axes,
        "order": draw(st.sampled_from(["contiguous", "interleaved"])),
        "bands": draw(st.sampled_from(["shared", "dealt"])),
        "axis_order": tuple(draw(st.permutations(range(axes)))),
    }


@pytest.mark.parametrize(("head_dim", "axes"), [(64, 2), (48, 3), (8, 1), (4, 2), (6, 3), (88, 2)])
def test_shape_of_axial(head_dim, axes):
    freqs = vp.axial_freqs(head_dim, axes=axes)
    assert freqs.shape == (axes, head_dim // 2)
    assert freqs.dtype == torch.float32
    assert ((freqs > 0).sum(0) == 1).all()  # one axis drives a pair


def test_shape_of_the_others():
    assert vp.ladder(5, theta=10.0).shape == (5,)
    assert vp.ladder(5, theta=10.0, dtype=torch.float64).dtype == torch.float64
    assert vp.period_freqs(48, shortest=0.5, longest=8.0, axes=3).shape == (3, 24)
    assert vp.mixed_freqs(8, num_heads=3, depth=5).shape == (5, 3, 2, 4)
    assert vp.gaussian_freqs(7, axes=3).shape == (3, 7)
    assert vp.section_freqs(128, (16, 24, 24), theta=1e6, order="contiguous").shape == (3, 64)


@pytest.mark.parametrize(
    ("coords", "freqs", "shape"),
    [
        ((15, 2), (2, 4), (15, 4)),
        ((3, 15, 2), (2, 4), (3, 15, 4)),
        ((1, 15, 2), (6, 2, 4), (6, 15, 4)),  # every head its own directions
        ((5, 1, 15, 2), (6, 2, 4), (5, 6, 15, 4)),
        ((0, 3), (3, 4), (0, 4)),
    ],
)
def test_shape_of_angles(coords, freqs, shape):
    assert vp.angles(torch.zeros(coords), torch.zeros(freqs)).shape == shape


@given(axial_layouts(), volumes(max_side=5, max_frames=3))
def test_reference_axial(layout, thw):
    """Which axis drives which pair, and how fast: equal to the loops for every descriptor."""
    t, h, w = thw
    coords = vp.coordinates(Grid(h, w, t), CoordSpec(axes=layout["axes"]))
    expected = oracle.axial_angles(
        coords.double().numpy(),
        layout["head_dim"],
        layout["theta"],
        axis_order=layout["axis_order"],
        interleaved=layout["order"] == "interleaved",
        dealt=layout["bands"] == "dealt",
    )
    assert_close_to(
        vp.angles(coords, vp.axial_freqs(**layout)), torch.from_numpy(expected), kind="table"
    )


@given(st.integers(1, 6), grids(max_side=6), st.floats(0.1, 2.0), st.floats(1.0, 50.0))
def test_reference_periods(share, hw, shortest, ratio):
    """Periods run geometrically, both ends included, also with a single step an axis."""
    longest = shortest * ratio
    coords = vp.coordinates(Grid(*hw), CoordSpec(unit="centred"))
    freqs = vp.period_freqs(4 * share, shortest=shortest, longest=longest)
    expected = oracle.period_angles(coords.double().numpy(), 4 * share, shortest, longest)
    torch.testing.assert_close(
        vp.angles(coords, freqs).double(), torch.from_numpy(expected), rtol=5e-6, atol=5e-6
    )


@given(seeds(), st.integers(1, 5), st.integers(1, 3), st.integers(1, 3))
def test_reference_mixed(seed, quarter, num_heads, depth):
    """Two bundles of directions at a right angle, one random direction a head and layer."""
    head_dim = 4 * quarter
    freqs = vp.mixed_freqs(
        head_dim,
        num_heads=num_heads,
        depth=depth,
        theta=10.0,
        generator=torch.Generator().manual_seed(seed),
    )
    draws = torch.rand(depth, num_heads, generator=torch.Generator().manual_seed(seed)).double()
    for layer in range(depth):
        for head in range(num_heads):
            direction = draws[layer, head].item() * FULL_TURN
            fx, fy = oracle.mixed_start(head_dim, direction, 10.0)
            expected = torch.from_numpy(np.stack([fy, fx]))
            torch.testing.assert_close(
                freqs[layer, head].double(), expected, rtol=1e-6, atol=1.5e-6
            )


@pytest.mark.parametrize(
    ("sections", "order"),
    [
        ((16, 24, 24), "contiguous"),
        ((24, 20, 20), "interleaved"),
        ((2, 1, 1), "interleaved"),
        ((5, 3), "contiguous"),
        ((4, 3, 2), "interleaved"),
        ((1,), "contiguous"),
    ],
)
def test_reference_sections(sections, order):
    """One ladder shared out to several axes: equal to the loops."""
    dim = 2 * sum(sections)
    ids = torch.randint(0, 300, (17, len(sections)))
    expected = oracle.section_angles(
        ids.numpy(), dim, sections, 1e4, interleaved=order == "interleaved"
    )
    freqs = vp.section_freqs(dim, sections, theta=1e4, order=order, dtype=torch.float64)
    torch.testing.assert_close(
        vp.angles(ids, freqs), torch.from_numpy(expected), rtol=1e-12, atol=1e-12
    )


@given(st.integers(1, 4), st.integers(1, 40), st.floats(-1e3, 1e3))
def test_invariant_equal_axes_are_one_dimensional(axes, share, position):
    """M-RoPE of a text token, whose axes all agree, is 1-D RoPE with the whole ladder."""
    for order in ("contiguous", "interleaved"):
        freqs = vp.section_freqs(2 * axes * share, (share,) * axes, theta=1e4, order=order)
        turns = vp.angles(torch.full((1, axes), position), freqs)[0]
        one = vp.angles(torch.tensor([[position]]), vp.ladder(axes * share, theta=1e4)[None])[0]
        assert torch.equal(turns, one)


@given(axial_layouts(), st.integers(-50, 50))
def test_invariant_angles_are_linear(layout, step):
    """Shifting all coordinates by one vector shifts all angles alike."""
    freqs = vp.axial_freqs(**layout, dtype=torch.float64)
    coords = torch.randn(7, layout["axes"], dtype=torch.float64)
    shift = torch.full((1, layout["axes"]), float(step), dtype=torch.float64)
    moved = vp.angles(coords + shift, freqs) - vp.angles(coords, freqs)
    torch.testing.assert_close(moved, vp.angles(shift, freqs).expand_as(moved))


@given(grids(max_side=9), seeds())
def test_invariant_token_order(hw, seed):
    """Permuting the tokens permutes the rows, whatever the scheme."""
    coords = vp.coordinates(Grid(*hw))
    order = torch.randperm(len(coords), generator=torch.Generator().manual_seed(seed))
    for freqs in (vp.axial_freqs(8), vp.mixed_freqs(8, num_heads=1, depth=1)[0, 0]):
        assert torch.equal(vp.angles(coords[order], freqs), vp.angles(coords, freqs)[order])


@given(grids(max_side=9))
def test_invariant_xy_is_yx_with_blocks_swapped(hw):
    """facts/timm.md 1.4: x first is y first with the two halves of the pairs swapped, tokens unmoved."""
    coords = vp.coordinates(Grid(*hw))
    y_first = vp.angles(coords, vp.axial_freqs(16))
    x_first = vp.angles(coords, vp.axial_freqs(16, axis_order=(1, 0)))
    assert torch.equal(x_first, y_first.roll(4, dims=-1))


def test_invariant_zero_direction_is_axial():
    """Facts 2: RoPE-Mixed with direction 0 is axial RoPE with x first and the same base."""
    fx, fy = oracle.mixed_start(16, 0.0, 10.0)
    axial = vp.axial_freqs(16, theta=10.0, axis_order=(1, 0))
    torch.testing.assert_close(
        axial.double(), torch.from_numpy(np.stack([fy, fx])), atol=1e-7, rtol=0
    )


def test_invariant_half_an_image_aliases():
    """Facts 1B: DINOv3's fastest band cannot tell positions half an image apart; the others can."""
    coords = vp.coordinates(Grid(8, 1), CoordSpec(unit="centred"))
    turns = vp.angles(coords, FULL_TURN * vp.axial_freqs(16, theta=100.0))
    apart = (turns[4, :4] - turns[0, :4]) / FULL_TURN  # in whole turns
    torch.testing.assert_close(apart, torch.tensor([1.0, 100**-0.25, 100**-0.5, 100**-0.75]))


def test_invariant_autocast_touches_no_angle():
    """Facts 5.37: a matmul under autocast would lose whole turns; the product is elementwise."""
    coords, freqs = vp.coordinates(Grid(60, 70)), vp.axial_freqs(16)
    expected = vp.angles(coords, freqs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(vp.angles(coords, freqs), expected)
        assert torch.equal(vp.angles(coords.int(), freqs), expected)


def test_invariant_large_ids_in_float64():
    """Beyond 2**17 float32 loses the fastest band; float64 ids keep it."""
    ids = torch.tensor([[2**22 + 1]])
    wide = vp.angles(ids.double(), vp.ladder(4, theta=1e4, dtype=torch.float64)[None])
    assert wide.dtype == torch.float64
    exact = [(2**22 + 1) * 1e4 ** (-p / 4) for p in range(4)]
    torch.testing.assert_close(wide[0].tolist(), exact, rtol=1e-15, atol=0)


def test_invariant_half_precision_is_promoted():
    """Half-precision coordinates or frequencies still give float32 angles."""
    for dtype in (torch.bfloat16, torch.float16):
        turns = vp.angles(torch.ones(3, 2, dtype=dtype), torch.ones(2, 4, dtype=dtype))
        assert turns.dtype == torch.float32


def test_invariant_inputs_are_not_written():
    coords, freqs = vp.coordinates(Grid(3, 5)), vp.axial_freqs(8)
    kept = coords.clone(), freqs.clone()
    vp.angles(coords, freqs)
    assert torch.equal(coords, kept[0])
    assert torch.equal(freqs, kept[1])


def test_invariant_gaussian_has_its_spread():
    """sigma counts turns a unit: the standard deviation of the frequencies is 2 pi sigma."""
    freqs = vp.gaussian_freqs(4000, sigma=3.0, generator=torch.Generator().manual_seed(0))
    assert freqs.std().item() == pytest.approx(FULL_TURN * 3.0, rel=0.05)
    again = vp.gaussian_freqs(4000, sigma=3.0, generator=torch.Generator().manual_seed(0))
    assert torch.equal(freqs, again)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: vp.ladder(0, theta=10.0), r"pairs is 0; at least 1.*larger head_dim"),
        (
            lambda: vp.ladder(4, theta=0.0),
            r"theta is 0\.0; a finite ladder base above 0.*100 or 10000",
        ),
        (lambda: vp.ladder(4, theta=math.inf), r"theta is inf"),
        (lambda: vp.ladder(4, theta=math.nan), r"theta is nan"),
        (lambda: vp.axial_freqs(8, theta=-2.0), r"theta is -2\.0"),
        (
            lambda: vp.axial_freqs(18),
            r"head_dim is 18 for 2 axes; a positive multiple of 4.*rotary_dim",
        ),
        (
            lambda: vp.axial_freqs(64, axes=3),
            r"head_dim is 64 for 3 axes; a positive multiple of 6",
        ),
        (lambda: vp.axial_freqs(0), r"head_dim is 0"),
        (lambda: vp.axial_freqs(8, axes=0), r"head_dim is 8 for 0 axes"),
        (
            lambda: vp.axial_freqs(8, axis_order=(0, 0)),
            r"axis_order is \(0, 0\); a permutation of \(0, 1\)",
        ),
        (lambda: vp.axial_freqs(12, axes=3, axis_order=(1, 0)), r"axis_order is \(1, 0\)"),
        (
            lambda: vp.period_freqs(8, shortest=8.0, longest=0.5),
            r"periods are 8\.0 and 0\.5; 0 < shortest <= longest.*Swap",
        ),
        (lambda: vp.period_freqs(8, shortest=0.0, longest=1.0), r"periods are 0\.0 and 1\.0"),
        (lambda: vp.period_freqs(8, shortest=1.0, longest=math.inf), r"periods are 1\.0 and inf"),
        (lambda: vp.period_freqs(6, shortest=1.0, longest=2.0), r"head_dim is 6"),
        (
            lambda: vp.mixed_freqs(10, num_heads=2, depth=1),
            r"head_dim is 10; a multiple of 4.*num_heads",
        ),
        (lambda: vp.mixed_freqs(0, num_heads=2, depth=1), r"head_dim is 0"),
        (lambda: vp.mixed_freqs(8, num_heads=2, depth=1, theta=0.0), r"theta is 0\.0"),
        (lambda: vp.gaussian_freqs(0), r"pairs is 0 and axes 2; at least 1 pair"),
        (lambda: vp.gaussian_freqs(4, sigma=0.0), r"sigma is 0\.0; a finite number above 0"),
        (lambda: vp.gaussian_freqs(4, axes=0), r"axes 0"),
        (
            lambda: vp.section_axes((), order="contiguous"),
            r"sections are \(\); whole numbers of at least 1 pair an axis",
        ),
        (lambda: vp.section_axes((4, 0, 4), order="contiguous"), r"sections are \(4, 0, 4\)"),
        (
            lambda: vp.section_freqs(128, (16, 24, 23), theta=1e4, order="contiguous"),
            r"sections \(16, 24, 23\) sum to 63 and rotary_dim is 128.*rotary_dim / 2.*checkpoint",
        ),
        (
            lambda: vp.section_freqs(7, (1, 1, 1), theta=1e4, order="contiguous"),
            r"rotary_dim is 7",
        ),
        (
            lambda: vp.angles(torch.zeros(5, 3), torch.zeros(2, 4)),
            r"coords have 3 axes and freqs 2; they must agree.*axes=",
        ),
    ],
)
def test_error(call, match):
    """The message names the value and the remedy."""
    with pytest.raises(PositionError, match=match):
        call()


def test_error_sections_that_a_stride_cannot_hold():
    """facts/timm.md 1.4: (8, 12, 12) at d=64 really gives 11/11/10; we say so instead of clamping in silence."""
    with pytest.raises(
        PositionError, match=r"\(8, 12, 12\).*32 pairs.*would get \(11, 11, 10\).*contiguous"
    ):
        vp.section_axes((8, 12, 12), order="interleaved")


def test_gradient_of_angles():
    """Positions and frequencies can both be learned."""
    coords = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    freqs = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(vp.angles, (coords.unsqueeze(0), freqs))


def test_compile_one_graph_over_six_sizes():
    freqs = vp.axial_freqs(24)
    assert graphs_of(lambda h, w: vp.angles(vp.coordinates(Grid(h, w)), freqs), SIZES) == 1


def test_compile_fillings():
    """Frequencies are rebuilt inside the graph, without a break: nothing is stored that a cast could touch."""

    def run(coords):
        return (
            vp.angles(coords, vp.axial_freqs(24, bands="dealt", axis_order=(1, 0))),
            vp.angles(coords, vp.period_freqs(24, shortest=0.5, longest=8.0)),
            vp.angles(coords, vp.section_freqs(24, (6, 6), theta=1e4, order="interleaved")),
        )

    calls = [(torch.from_numpy(where.index(h, w)).float(),) for h, w in SIZES]
    assert graphs_of(run, calls) == 1


def test_device(device):
    """Every filling is built where asked; angles on the device equal those of the CPU."""
    coords = vp.coordinates(Grid(3, 5), device=device)
    fillings = [
        lambda d: vp.axial_freqs(16, bands="dealt", axis_order=(1, 0), device=d),
        lambda d: vp.period_freqs(16, shortest=0.5, longest=8.0, device=d),
        lambda d: vp.section_freqs(16, (4, 4), theta=1e4, order="interleaved", device=d),
    ]
    for filling in fillings:
        there = vp.angles(coords, filling(device))
        assert there.device.type == device.type
        torch.testing.assert_close(there.cpu(), vp.angles(coords.cpu(), filling(None)))


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: vp.axial_freqs(8, order="interleave"), r"order is 'interleave'; it must be"),
        (lambda: vp.axial_freqs(8, bands="deal"), r"bands is 'deal'; it must be"),
        (lambda: vp.section_axes((2, 1, 1), order="mixed"), r"order is 'mixed'; it must be"),
    ],
)
def test_error_unknown_word(call, match):
    with pytest.raises(PositionError, match=match):
        call()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_error_angles_of_nowhere(bad):
    """One bad coordinate among many; on the CPU it is seen, under vmap and grad the product still runs."""
    coords = torch.zeros(5, 2)
    coords[3, 1] = bad
    with pytest.raises(PositionError, match=r"coords holds NaN or infinity"):
        vp.angles(coords, torch.ones(2, 4))
    batched = torch.func.vmap(lambda place: vp.angles(place, torch.ones(2, 4)))
    assert torch.equal(batched(torch.ones(3, 5, 2)), torch.full((3, 5, 4), 2.0))
    slope = torch.func.grad(lambda place: vp.angles(place, torch.ones(2, 4)).sum())
    assert torch.equal(slope(torch.ones(5, 2)), torch.full((5, 2), 4.0))


@pytest.mark.parametrize("bad", [(2.5, 1, 1), (True, 1, 1), ("2", 1, 1), (0, 1, 1)])
def test_error_sections_are_whole(bad):
    with pytest.raises(PositionError, match=r"sections are .*; whole numbers of at least 1"):
        vp.section_axes(bad, order="contiguous")
