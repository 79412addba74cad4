"""Layout: moving q and k weights between channel orders without changing a score."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import visionpos as vp
from tests.compiled import graphs_of
from tests.strategies import grids, seeds
from visionpos import Layout, PositionError, Rotation

IL_XY = Layout(head_dim=16, pairing="adjacent", axis_order=(1, 0))
IL_YX = Layout(head_dim=16, pairing="adjacent")
HS_YX = Layout(head_dim=16, pairing="half")


def turn(layout: Layout, coords: torch.Tensor) -> Rotation:
    """The rotation of a model that keeps its channels in this layout."""
    freqs = vp.axial_freqs(
        layout.turned,
        theta=100.0,
        axes=len(layout.axis_order),
        order=layout.order,
        bands=layout.bands,
        axis_order=layout.axis_order,
        dtype=torch.float64,
    )
    return Rotation.of(vp.angles(coords, freqs), layout.pairing)


def scores(x, wq, wk, layout, coords, *, rotate_as=None):
    """Attention logits `[heads, n, n]` of tokens x with projections of a layout."""
    q, k = ((x @ w.T).unflatten(-1, (-1, layout.head_dim)).transpose(0, 1)[None] for w in (wq, wk))
    q, k = vp.rotate(q, k, turn(rotate_as or layout, coords))
    return (q @ k.mT)[0]


@st.composite
def layouts(draw, head_dim: int = 24, axes: int = 2, bands: str = "shared"):
    return Layout(
        head_dim=head_dim,
        pairing=draw(st.sampled_from(["half", "adjacent"])),
        axis_order=tuple(draw(st.permutations(range(axes)))),
        order=draw(st.sampled_from(["contiguous", "interleaved"])),
        bands=bands,
        rotary_dim=None if bands == "dealt" else draw(st.sampled_from([None, 12])),
    )


@pytest.mark.parametrize("rotary_dim", [None, 8])
def test_shape_of_convert(rotary_dim):
    """Projection weights, biases and q/k norms keep their shape; channels that do not turn keep their place."""
    source = Layout(head_dim=12, pairing="adjacent", rotary_dim=rotary_dim, axis_order=(0, 1))
    target = Layout(head_dim=12, rotary_dim=rotary_dim)
    for shape in ((36, 7), (36,), (12,), (24, 5, 3)):
        assert vp.convert(torch.zeros(shape), source, target).shape == shape
    assert source.turned == (rotary_dim or 12)
    kept = vp.channel_permutation(source, target)[source.turned :].tolist()
    assert kept == list(range(source.turned, 12))


# Facts 1B, "Weight conversion": rows of the target, written as rows of the source (d = 16).
@pytest.mark.parametrize(
    ("source", "target", "rows"),
    [
        (
            Layout(head_dim=16, pairing="adjacent"),
            Layout(head_dim=16, pairing="half"),
            [*range(0, 16, 2), *range(1, 16, 2)],
        ),
        (IL_XY, IL_YX, [*range(8, 16), *range(8)]),
        (
            IL_XY,
            HS_YX,
            [*range(8, 16, 2), *range(0, 8, 2), *range(9, 16, 2), *range(1, 8, 2)],
        ),
    ],
    ids=["adjacent to half", "xy to yx", "xy adjacent to yx half"],
)
def test_reference_golden_permutations(source, target, rows):
    assert vp.channel_permutation(source, target).tolist() == rows


@pytest.mark.parametrize(
    ("source", "target"),
    [(IL_YX, HS_YX), (IL_XY, IL_YX), (IL_XY, HS_YX)],
    ids=["pairing", "axes", "both"],
)
def test_reference_golden_scores(source, target):
    """Facts 1B: converted weights give the old scores to 1e-6; without the permutation the error is of order 1."""
    coords = vp.coordinates(vp.Grid(3, 5)).double()
    x = torch.randn(15, 8, dtype=torch.float64)
    wq, wk = torch.randn(2, 32, 8, dtype=torch.float64) / 8**0.5
    before = scores(x, wq, wk, source, coords)
    moved = [vp.convert(w, source, target) for w in (wq, wk)]
    after = scores(x, *moved, target, coords)
    torch.testing.assert_close(after, before, rtol=0, atol=1e-9)
    skipped = scores(x, wq, wk, source, coords, rotate_as=target)
    assert 1 < (skipped - before).abs().max() < 100


@given(layouts(), layouts(), grids(max_side=4), seeds())
def test_invariant_scores(source, target, hw, seed):
    """Any two layouts of one ladder can be joined, and no score changes."""
    assume(source.turned == target.turned)
    draw = torch.Generator().manual_seed(seed)
    coords = vp.coordinates(vp.Grid(*hw)).double()
    x = torch.randn(len(coords), 5, dtype=torch.float64, generator=draw)
    wq, wk = torch.randn(2, 48, 5, dtype=torch.float64, generator=draw)
    before = scores(x, wq, wk, source, coords)
    after = scores(x, *(vp.convert(w, source, target) for w in (wq, wk)), target, coords)
    torch.testing.assert_close(after, before, rtol=1e-9, atol=1e-9)


@given(layouts(axes=3), layouts(axes=3))
def test_invariant_there_and_back(source, target):
    """Converting back restores every bit; converting to the same layout is a copy."""
    assume(source.turned == target.turned)
    weight = torch.randn(48, 3)
    there = vp.convert(weight, source, target)
    assert torch.equal(vp.convert(there, target, source), weight)
    same = vp.convert(weight, source, source)
    assert torch.equal(same, weight)
    assert same.data_ptr() != weight.data_ptr()


@given(layouts(bands="dealt"), layouts(bands="dealt"), seeds())
def test_invariant_dealt_bands(source, target, seed):
    """A dealt ladder gives every slot its own steps: layouts that keep the axis order can be joined."""
    assume(source.axis_order == target.axis_order)
    draw = torch.Generator().manual_seed(seed)
    coords = vp.coordinates(vp.Grid(3, 5)).double()
    x = torch.randn(15, 5, dtype=torch.float64, generator=draw)
    wq, wk = torch.randn(2, 24, 5, dtype=torch.float64, generator=draw)
    before = scores(x, wq, wk, source, coords)
    after = scores(x, *(vp.convert(w, source, target) for w in (wq, wk)), target, coords)
    torch.testing.assert_close(after, before, rtol=1e-9, atol=1e-9)


def test_invariant_layout_agrees_with_frequencies():
    """The names of the pairs are those of axial_freqs: axis and step of every pair, for every order."""
    for order in ("contiguous", "interleaved"):
        layout = Layout(head_dim=12, axis_order=(2, 0, 1), order=order)
        freqs = vp.axial_freqs(12, theta=100.0, axes=3, order=order, axis_order=(2, 0, 1))
        for pair, (axis, step) in enumerate(layout.pair_names()):
            assert freqs[:, pair].nonzero().flatten().tolist() == [axis]
            assert freqs[axis, pair].item() == pytest.approx(100 ** (-step / 2))


def test_invariant_inputs_are_not_written():
    weight = torch.randn(32, 4)
    kept = weight.clone()
    vp.convert(weight, IL_XY, HS_YX).zero_()
    assert torch.equal(weight, kept)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"head_dim": 18}, r"rotary_dim is 18 of head_dim 18 for 2 axes; a positive multiple of 4"),
        ({"head_dim": 16, "rotary_dim": 20}, r"rotary_dim is 20 of head_dim 16"),
        ({"head_dim": 16, "rotary_dim": 0}, r"rotary_dim is 0 of head_dim 16"),
        ({"head_dim": 16, "axis_order": (0, 1, 2)}, r"for 3 axes; a positive multiple of 6"),
        ({"head_dim": 16, "axis_order": (1, 1)}, r"axis_order is \(1, 1\); a permutation"),
    ],
)
def test_error_layout(fields, match):
    with pytest.raises(PositionError, match=match):
        Layout(**fields)


@pytest.mark.parametrize(
    ("source", "target", "match"),
    [
        (HS_YX, Layout(head_dim=32), r"source turns 16 of 16 .* target 32 of 32;.*one head size"),
        (HS_YX, Layout(head_dim=16, rotary_dim=8), r"target 8 of 16"),
        (
            HS_YX,
            Layout(head_dim=16, bands="dealt"),
            r"bands 'shared' over 2 axes .*target bands 'dealt' over 2 axes.*Retrain, or keep",
        ),
        (
            HS_YX,
            Layout(head_dim=16, axis_order=(0,)),
            r"over 2 axes .*target bands 'shared' over 1 axes",
        ),
    ],
)
def test_error_no_permutation_joins_them(source, target, match):
    with pytest.raises(PositionError, match=match):
        vp.channel_permutation(source, target)


def test_error_rows():
    """A fused qkv of 3 x 24 rows is whole heads of 24 but not of 16: split it first."""
    with pytest.raises(
        PositionError, match=r"weight has shape \(72, 4\) and head_dim is 16;.*Split q, k and v"
    ):
        vp.convert(torch.zeros(72, 4), IL_XY, HS_YX)


def test_gradient_of_convert():
    weight = torch.randn(16, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda w: vp.convert(w, IL_XY, HS_YX), (weight,))


def test_compile_any_number_of_heads():
    calls = [(torch.randn(16 * heads, 5),) for heads in (2, 3, 6, 4)]
    assert graphs_of(lambda w: vp.convert(w, IL_XY, HS_YX), calls) == 1


def test_device(device):
    weight = torch.randn(32, 4)
    there = vp.convert(weight.to(device), IL_XY, HS_YX)
    assert there.device.type == device.type
    assert torch.equal(there.cpu(), vp.convert(weight, IL_XY, HS_YX))


def test_error_dealt_bands_of_another_axis_order():
    """Dealt bands give y the even steps in y, x order and the odd ones in x, y order: other frequencies.

    No permutation joins the two; converting anyway changes scores by several units.
    """
    source, target = (
        Layout(head_dim=16, bands="dealt", axis_order=order) for order in ((0, 1), (1, 0))
    )
    with pytest.raises(PositionError, match=r"dealt.*axis"):
        vp.channel_permutation(source, target)


@pytest.mark.parametrize("field", ["pairing", "order", "bands"])
def test_error_unknown_word(field):
    with pytest.raises(PositionError, match=rf"{field} is 'halff'; it must be"):
        Layout(head_dim=16, **{field: "halff"})


def test_error_no_axes():
    with pytest.raises(PositionError, match=r"axis_order is \(\)"):
        Layout(head_dim=16, axis_order=())


def test_error_tiled_layouts_of_other_bands():
    """V-JEPA 2's tiling over a shared and a dealt ladder: other angles in every channel but the first pair."""
    shared, dealt = (
        Layout(head_dim=16, pairing="adjacent_tiled", bands=bands) for bands in ("shared", "dealt")
    )
    assert not torch.equal(shared.freqs(), dealt.freqs())
    for one, other in ((shared, dealt), (dealt, shared)):
        with pytest.raises(PositionError, match=r"cannot be reached by reordering channels"):
            vp.channel_permutation(one, other)
    for layout in (shared, dealt):
        assert vp.channel_permutation(layout, layout).tolist() == list(range(16))
    # Dealt axes change their speeds with their order; shared ones change places alone.
    swapped = Layout(head_dim=16, pairing="adjacent_tiled", bands="dealt", axis_order=(1, 0))
    with pytest.raises(PositionError, match=r"cannot be reached"):
        vp.channel_permutation(dealt, swapped)


def test_convert_grouped_queries_norms_and_biases():
    """k has fewer heads than q; a norm has one head's channels, or all: each goes by its own rows."""
    order = vp.channel_permutation(IL_XY, HS_YX)
    for heads, trailing in ((4, (8,)), (2, (8,)), (1, ()), (3, ())):
        weight = torch.randn(heads * 16, *trailing)
        moved = vp.convert(weight, IL_XY, HS_YX)
        for head in range(heads):
            rows = slice(head * 16, head * 16 + 16)
            assert torch.equal(moved[rows], weight[rows][order])


@pytest.mark.parametrize("shape", [(), (0, 8), (8, 16), (24,)])
def test_error_convert_shapes(shape):
    """A number, no rows, and rows that are no whole head."""
    with pytest.raises(
        PositionError, match=r"weight has shape .* and head_dim is 16; rows of whole"
    ):
        vp.convert(torch.zeros(shape), IL_XY, HS_YX)
