"""Coordinates: where tokens are, which extent a larger grid keeps, and what training does to them."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import visionpos as vp
from tests.compiled import SIZES, graphs_of
from tests.reference import coords as oracle
from tests.strategies import grids, seeds, volumes
from tests.tolerances import assert_close_to
from visionpos import CoordSpec, Grid, PositionError

RECTANGLES = [(3, 5), (1, 7), (7, 1), (13, 11), (4, 9), (1, 1)]

# name -> (spec, oracle of height and width)
SCHEMES = {
    "index": (CoordSpec(), oracle.index),
    "offset": (CoordSpec(offset=1.0), lambda h, w: oracle.index(h, w, 1.0)),
    "eva": (
        CoordSpec(extent="trained", trained_shape=(16, 14)),
        lambda h, w: oracle.index_to_reference(h, w, (16, 14)),
    ),
    "perception": (
        CoordSpec(offset=1.0, extent="trained", trained_shape=(24, 24)),
        lambda h, w: oracle.index_to_reference(h, w, (24, 24), 1.0),
    ),
    "separate": (CoordSpec(unit="centred"), oracle.centred),
    "min": (CoordSpec(unit="centred", normalize="min"), lambda h, w: oracle.centred(h, w, "min")),
    "max": (CoordSpec(unit="centred", normalize="max"), lambda h, w: oracle.centred(h, w, "max")),
    "fractional": (CoordSpec(unit="fractional"), oracle.fractional),
    "endpoint": (CoordSpec(unit="endpoint"), oracle.endpoint),
}


@pytest.mark.parametrize("hw", RECTANGLES)
@pytest.mark.parametrize("name", SCHEMES)
def test_shape_of_coordinates(name, hw):
    coords = vp.coordinates(Grid(*hw), SCHEMES[name][0])
    assert coords.shape == (hw[0] * hw[1], 2)
    assert coords.dtype == torch.float32


@pytest.mark.parametrize(("axes", "shape"), [(1, (30, 1)), (2, (30, 2)), (3, (30, 3))])
def test_shape_of_a_clip(axes, shape):
    """A clip of 2 frames: one raster number, (y, x) shared by the frames, or (t, y, x)."""
    coords = vp.coordinates(Grid(3, 5, frames=2), CoordSpec(axes=axes))
    assert coords.shape == shape
    assert coords[15].tolist() == {1: [15.0], 2: [0.0, 0.0], 3: [1.0, 0.0, 0.0]}[axes]
    assert coords[7].tolist() == {1: [7.0], 2: [1.0, 2.0], 3: [0.0, 1.0, 2.0]}[axes]


def test_shape_of_draws():
    """One draw a layer or a sample stacks in front; none asked for, none added."""
    spec = CoordSpec(unit="centred", rescale=2.0)
    coords = vp.coordinates(Grid(3, 5), spec)
    assert vp.augment(coords, spec).shape == (15, 2)
    assert vp.augment(coords, spec, draws=4).shape == (4, 15, 2)
    assert vp.augment(coords, CoordSpec(), draws=4).shape == (4, 15, 2)


@given(grids(max_side=20), st.sampled_from(sorted(SCHEMES)))
def test_reference_coordinates(hw, name):
    """Every numbering equals its formula, cell by cell, row-major with x fastest."""
    spec, expected = SCHEMES[name]
    assert_close_to(
        vp.coordinates(Grid(*hw), spec), torch.from_numpy(expected(*hw)).double(), kind="table"
    )


@given(volumes(max_side=8, max_frames=4))
def test_reference_three_axes(thw):
    """A clip counts frames first, then rows, then columns; "min" and "max" look at the spatial sides alone."""
    t, h, w = thw
    grid = Grid(h, w, t)
    cells = [[f, y, x] for f in range(t) for y in range(h) for x in range(w)]
    index = vp.coordinates(grid, CoordSpec(axes=3))
    assert torch.equal(index, torch.tensor(cells, dtype=torch.float32))
    for normalize, m in (("min", min(h, w)), ("max", max(h, w))):
        centred = vp.coordinates(grid, CoordSpec(axes=3, unit="centred", normalize=normalize))
        halves = [
            [2 * (f + 0.5) / t - 1, 2 * (y + 0.5) / m - 1, 2 * (x + 0.5) / m - 1]
            for f, y, x in cells
        ]
        assert_close_to(centred, torch.tensor(halves, dtype=torch.float64), kind="table")


@given(
    grids(max_side=8), seeds(), st.permutations(["shift", "jitter", "rescale"]), st.integers(0, 3)
)
def test_reference_jitter_formula(hw, seed, order, wanted):
    """(c + shift) * exp(jitter) * exp(rescale), drawn in that order whatever the fields' order."""
    how = {"shift": 0.3, "jitter": 1.5, "rescale": 2.0}
    spec = CoordSpec(unit="centred", **{name: how[name] for name in order[:wanted]})
    coords = vp.coordinates(Grid(*hw), spec)
    moved = vp.augment(coords, spec, generator=torch.Generator().manual_seed(seed))

    draw = torch.Generator().manual_seed(seed)
    parts = {}
    for name, size in (("shift", 2), ("jitter", 2), ("rescale", 1)):
        if name in order[:wanted]:
            bound = how[name] if name == "shift" else math.log(how[name])
            parts[name] = torch.empty(size).uniform_(-bound, bound, generator=draw).tolist()
    parts["rescale"] = parts.get("rescale", [0.0])[0]
    expected = oracle.jittered(coords.double().numpy(), **parts)
    assert_close_to(moved, torch.from_numpy(expected), kind="table")


def test_reference_rescale_distribution():
    """Facts 1G: log-uniform in [1/2, 2], mean 1.0820 = 1.5 / (2 ln 2), median 1, one factor for both axes."""
    spec = CoordSpec(unit="centred", rescale=2.0)
    one = torch.ones(1, 2)
    factors = vp.augment(one, spec, draws=4000, generator=torch.Generator().manual_seed(1))[:, 0]
    assert torch.equal(factors[:, 0], factors[:, 1])
    assert 0.5 <= factors.min() < 0.51
    assert 1.96 < factors.max() <= 2.0
    assert factors[:, 0].mean().item() == pytest.approx(1.5 / (2 * math.log(2)), abs=0.02)
    assert factors[:, 0].median().item() == pytest.approx(1.0, abs=0.03)


def test_reference_jitter_distribution():
    """facts/timm.md 1.4: jitter 1.5 spans .667 to 1.5, and its two axes are independent."""
    spec = CoordSpec(jitter=1.5)
    generator = torch.Generator().manual_seed(2)
    factors = vp.augment(torch.ones(1, 2), spec, draws=4000, generator=generator)[:, 0]
    assert factors.min().item() == pytest.approx(1 / 1.5, abs=1e-3)
    assert factors.max().item() == pytest.approx(1.5, abs=1e-3)
    assert abs(torch.corrcoef(factors.T)[0, 1]) < 0.05


@given(grids(max_side=24), st.integers(1, 24))
def test_invariant_wider_view_keeps_the_spacing(hw, trained):
    """extent "index": a cell step is the trained one on any grid, and 0 stays the middle of the picture."""
    spec = CoordSpec(unit="centred", extent="index", trained_shape=(trained, trained))
    coords = vp.coordinates(Grid(*hw), spec).unflatten(0, hw)
    torch.testing.assert_close(coords.mean((0, 1)), torch.zeros(2), rtol=0, atol=1e-5)
    for axis, step in ((0, coords.diff(dim=0)[..., 0]), (1, coords.diff(dim=1)[..., 1])):
        assert step.numel() == 0 or hw[axis] > 1
        torch.testing.assert_close(step, torch.full_like(step, 2 / trained), rtol=1e-4, atol=1e-5)


@given(grids(max_side=16))
def test_invariant_both_extents_agree_on_the_trained_grid(hw):
    """On the grid of training "trained" and "index" are one thing, for every unit."""
    for unit in ("index", "centred", "fractional"):
        one, other = (
            vp.coordinates(Grid(*hw), CoordSpec(unit=unit, extent=extent, trained_shape=hw))
            for extent in ("trained", "index")
        )
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@given(grids(max_side=12), st.integers(1, 4))
def test_invariant_same_view_with_more_tokens(hw, zoom):
    """extent "trained": k times the cells span the same numbers; cell k*i of the fine grid is cell i (EVA's rule)."""
    spec = CoordSpec(extent="trained", trained_shape=(16, 16))
    coarse = vp.coordinates(Grid(*hw), spec).unflatten(0, hw)
    fine = vp.coordinates(Grid(hw[0] * zoom, hw[1] * zoom), spec)
    fine = fine.unflatten(0, (hw[0] * zoom, hw[1] * zoom))[::zoom, ::zoom]
    torch.testing.assert_close(fine, coarse, rtol=1e-6, atol=1e-6)
    assert coarse.amax() <= 16


@given(grids(max_side=16), st.sampled_from(sorted(set(SCHEMES) - {"eva"})))
def test_invariant_transpose(hw, name):
    """Turning the grid swaps the two axes and nothing else."""
    spec = SCHEMES[name][0]
    tall = vp.coordinates(Grid(*hw), spec).unflatten(0, hw)
    wide = vp.coordinates(Grid(hw[1], hw[0]), spec).unflatten(0, (hw[1], hw[0]))
    assert torch.equal(wide, tall.transpose(0, 1).flip(-1))


@given(grids(max_side=16), st.sampled_from(["centred", "endpoint"]))
def test_invariant_point_symmetry(hw, unit):
    """Turning the picture by half a turn negates centred coordinates."""
    if unit == "endpoint" and 1 in hw:
        return  # a single cell stands on -1, as linspace puts it
    coords = vp.coordinates(Grid(*hw), CoordSpec(unit=unit))
    torch.testing.assert_close(coords.flip(0), -coords, rtol=0, atol=1e-6)


def test_invariant_no_cache_between_equal_counts():
    """Facts 5.7 (rope-vit): A, B, A with 196 cells each: B is not given A's numbers, and A comes back."""
    spec = CoordSpec(unit="centred")
    first = vp.coordinates(Grid(14, 14), spec)
    other = vp.coordinates(Grid(28, 7), spec)
    again = vp.coordinates(Grid(14, 14), spec)
    assert torch.equal(first, again)
    assert (first - other).abs().max() > 0.4
    expected = torch.from_numpy(oracle.centred(28, 7))
    assert_close_to(other, expected, kind="table")


def test_invariant_inputs_are_not_written():
    """Neither augment nor offsets touches its input; a plain spec gives the very coordinates back."""
    spec = CoordSpec(unit="centred", shift=0.5, jitter=2.0, rescale=2.0)
    coords = vp.coordinates(Grid(3, 5), spec)
    kept = coords.clone()
    vp.augment(coords, spec, draws=2)
    vp.offsets(coords)
    assert torch.equal(coords, kept)
    assert vp.augment(coords, CoordSpec()) is coords


def test_invariant_generator_alone_decides():
    """A passed generator repeats its draws, and leaves torch's own generator where it was."""
    spec = CoordSpec(unit="centred", jitter=2.0)
    coords, before = vp.coordinates(Grid(3, 5), spec), torch.get_rng_state()
    one, two = (
        vp.augment(coords, spec, generator=torch.Generator().manual_seed(7)) for _ in range(2)
    )
    assert torch.equal(one, two)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(
        one, vp.augment(coords, spec, generator=torch.Generator().manual_seed(8))
    )


def test_invariant_draws_differ():
    """Layers (DINOv3's scope "block") or samples get draws of their own."""
    spec = CoordSpec(unit="centred", rescale=2.0, scope="block")
    drawn = vp.augment(vp.coordinates(Grid(3, 5), spec), spec, draws=3)
    assert len({layer.sum().item() for layer in drawn}) == 3


@pytest.mark.parametrize(("side", "left_by_bf16"), [(300, 262), (512, 321)])
def test_invariant_centres_stay_distinct(side, left_by_bf16):
    """Facts 2, DINOv3: above 256 cells a side the coordinates of a bf16 model fall together; ours do not."""
    coords = vp.coordinates(Grid(side, 1), CoordSpec(unit="centred"))
    assert coords[:, 0].unique().numel() == side
    halves = 2 * (torch.arange(0.5, side, dtype=torch.bfloat16) / side) - 1
    assert halves.unique().numel() == left_by_bf16


@given(grids(max_side=6), grids(max_side=6))
def test_reference_offsets(queries, keys):
    """offsets[i, j] is query i minus key j; without keys it is antisymmetric."""
    q, k = vp.coordinates(Grid(*queries)), vp.coordinates(Grid(*keys))
    out = vp.offsets(q, k)
    expected = [[[y - v, x - u] for v, u in k.tolist()] for y, x in q.tolist()]
    assert torch.equal(out, torch.tensor(expected))
    own = vp.offsets(q)
    assert torch.equal(own, -own.transpose(0, 1))


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        (
            {"unit": "centered"},
            r"unit is 'centered'; it must be one of 'index', 'centred', 'endpoint'",
        ),
        ({"axes": 4}, r"axes is 4; it must be one of 1, 2, 3"),
        ({"normalize": "mean"}, r"normalize is 'mean'; it must be one of 'separate', 'min', 'max'"),
        ({"extent": "zoom"}, r"extent is 'zoom'; it must be one of 'trained', 'index' or None"),
        ({"scope": "batch"}, r"scope is 'batch'; it must be one of 'forward', 'block', 'sample'"),
        ({"offset": math.nan}, r"offset is nan; it must be a finite number"),
        (
            {"trained_shape": (16,)},
            r"trained_shape is \(16,\) for 2 axes; one side of at least 1 an axis",
        ),
        ({"trained_shape": (16, 0)}, r"trained_shape is \(16, 0\)"),
        ({"trained_shape": (16, 16), "axes": 3}, r"trained_shape is \(16, 16\) for 3 axes"),
        (
            {"extent": "trained"},
            r"extent 'trained' with unit 'index' needs trained_shape, which is None",
        ),
        (
            {"extent": "index", "unit": "centred"},
            r"extent 'index' with unit 'centred' needs trained_shape",
        ),
        (
            {"extent": "index", "unit": "endpoint", "trained_shape": (4, 4)},
            r"extent 'index' is not defined for unit 'endpoint'.*use unit 'centred'",
        ),
        ({"shift": -0.1}, r"shift is -0\.1; a finite number of at least 0"),
        ({"shift": math.inf}, r"shift is inf"),
        ({"jitter": 0.5}, r"jitter is 0\.5; a finite factor of at least 1.*2 means half to double"),
        ({"rescale": 0.0}, r"rescale is 0\.0; a finite factor of at least 1"),
        ({"rescale": math.nan}, r"rescale is nan"),
    ],
)
def test_error_spec(fields, match):
    """The message names the field, its value and what is asked for."""
    with pytest.raises(PositionError, match=match):
        CoordSpec(**fields)


@pytest.mark.parametrize("draws", [0, -1])
def test_error_draws(draws):
    with pytest.raises(PositionError, match=rf"draws is {draws}; a whole number of at least 1"):
        vp.augment(torch.zeros(3, 2), CoordSpec(rescale=2.0), draws=draws)


def test_gradient_passes_through_augmentation():
    """Continuous positions can be learned: the gradient of an augmented coordinate is its factor."""
    spec = CoordSpec(shift=0.5, rescale=2.0)
    coords = torch.zeros(3, 2, dtype=torch.float64, requires_grad=True)

    def run(points):
        return vp.augment(points, spec, generator=torch.Generator().manual_seed(3))

    assert torch.autograd.gradcheck(run, (coords,))


@pytest.mark.parametrize("name", sorted(set(SCHEMES) - {"endpoint"}))
def test_compile_one_graph_over_six_sizes(name):
    """Sizes are inputs of the graph; equal counts (5x7, 7x5; 2x14, 4x7) are told apart in it."""
    spec = SCHEMES[name][0]
    assert graphs_of(lambda h, w: vp.coordinates(Grid(h, w), spec), SIZES) == 1


def test_compile_augment():
    """Training jitter compiles without a graph break and draws as eager code does."""
    spec = CoordSpec(unit="centred", shift=0.1, jitter=1.5, rescale=2.0)
    coords = vp.coordinates(Grid(3, 5), spec)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda points: vp.augment(points, spec), backend="eager", fullgraph=True
    )
    torch.manual_seed(5)
    expected = vp.augment(coords, spec)
    torch.manual_seed(5)
    assert torch.equal(compiled(coords), expected)


@pytest.mark.parametrize("name", SCHEMES)
def test_device(name, device):
    """Built where asked, with the numbers of the CPU to a last bit."""
    there = vp.coordinates(Grid(3, 5), SCHEMES[name][0], device=device)
    assert there.device.type == device.type
    torch.testing.assert_close(there.cpu(), vp.coordinates(Grid(3, 5), SCHEMES[name][0]))


def test_compile_endpoint():
    """The one unit that compiles once a size; DESIGN.md 5b asks for one graph for all sizes."""
    spec = SCHEMES["endpoint"][0]
    assert graphs_of(lambda h, w: vp.coordinates(Grid(h, w), spec), SIZES) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"unit": "endpoint", "offset": 1.0},
        {"unit": "endpoint", "normalize": "max"},
        {"unit": "index", "normalize": "max"},
        {"unit": "centred", "normalize": "max", "extent": "index", "trained_shape": (4, 4)},
    ],
)
def test_error_fields_without_effect(fields):
    """A field that would be ignored is a silent mistake of the caller; the message names it."""
    with pytest.raises(PositionError):
        CoordSpec(**fields)
