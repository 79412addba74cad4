"""Resampling: a learned table on any grid, by every named recipe; identity, unity, order-freedom."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import visionpos as vp
from tests.compiled import SIZES, graphs_of
from tests.reference import resampling as oracle
from tests.strategies import grids, seeds
from tests.tolerances import assert_close_to
from visionpos import RECIPES, Grid, PositionError, Recipe
from visionpos.geometry import grid_weights

GRIDDED = sorted(oracle.SOURCES)  # every recipe but BEiT's, which wants odd sides
WHOLE = sorted(set(GRIDDED) - {"muse"})  # muse drops the taps outside the table: border cells fade
LOPSIDED = {"dinov2", "nearest", "nearest_idefics2", "nearest_transformers"}


def moved(table: torch.Tensor, source: Grid, target: Grid, recipe: str) -> torch.Tensor:
    """The oracle's table `[n, d]` on another grid, float64."""
    sides = (source.height, source.width), (target.height, target.width)
    lattice = table.double().unflatten(0, sides[0]).numpy()
    return torch.from_numpy(oracle.resized(lattice, sides[1], recipe)).flatten(0, 1)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """How far a is from b, over b, in L2."""
    return ((a - b).norm() / b.norm()).item()


def test_reference_every_recipe_has_an_oracle():
    assert set(oracle.SOURCES) | {"beit"} == set(RECIPES)


@pytest.mark.parametrize("recipe", GRIDDED)
@pytest.mark.parametrize("hw", [(3, 5), (1, 7), (7, 1), (13, 11), (9, 4), (1, 1), (8, 18)])
def test_shape_of_resample(recipe, hw):
    """Prefix and suffix rows and leading sizes are kept; cells become the target's."""
    table = torch.randn(2, 1 + 36 + 3, 5)
    out = vp.resample(table, source=Grid(4, 9), target=Grid(*hw), recipe=recipe, prefix=1, suffix=3)
    assert out.shape == (2, 1 + hw[0] * hw[1] + 3, 5)
    assert torch.equal(out[:, :1], table[:, :1])
    assert torch.equal(out[:, -3:], table[:, -3:])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_shape_of_dtypes(dtype):
    """The table's dtype comes back; halves are evaluated in float32 and rounded once."""
    table = torch.randn(36, 5).to(dtype)
    out = vp.resample(table, source=Grid(4, 9), target=Grid(7, 3), recipe="timm")
    assert out.dtype == dtype
    assert_close_to(out, moved(table, Grid(4, 9), Grid(7, 3), "timm"))
    if dtype in (torch.bfloat16, torch.float16):
        wide = vp.resample(table.float(), source=Grid(4, 9), target=Grid(7, 3), recipe="timm")
        assert torch.equal(out, wide.to(dtype))


def test_shape_of_sample_table():
    table = torch.randn(36, 5)
    where = {"source": Grid(4, 9), "extent_hw": (8, 8), "recipe": "timm"}
    assert vp.sample_table(table, torch.rand(7, 2), **where).shape == (7, 5)
    assert vp.sample_table(table, torch.rand(2, 3, 7, 2), **where).shape == (2, 3, 7, 5)
    assert vp.sample_table(table, torch.rand(0, 2), **where).shape == (0, 5)


@given(st.sampled_from(GRIDDED), grids(max_side=9), grids(max_side=12))
def test_reference_resample(recipe, old, new):
    """Every recipe equals its source's arithmetic, cell by cell, on any two rectangles (float64)."""
    source, target = Grid(*old), Grid(*new)
    table = torch.randn(source.size, 2, dtype=torch.float64)
    out = vp.resample(table, source=source, target=target, recipe=recipe)
    # On equal grids the table itself is served, also where the source would drift (dinov2).
    expected = table if source == target else moved(table, source, target, recipe)
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-11)


odd = st.integers(1, 8).map(lambda half: 2 * half + 1)


@given(odd, odd, odd, odd)
def test_reference_geometric(h, w, new_h, new_w):
    """BEiT: samples on a geometric series, read linearly, rows and columns each with their own ratio."""
    source, target = Grid(h, w), Grid(new_h, new_w)
    table = torch.randn(source.size, 3, dtype=torch.float64)
    out = vp.resample(table, source=source, target=target, recipe="beit")
    expected = table if source == target else moved(table, source, target, "beit")
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-11)


@given(st.sampled_from([*WHOLE, "beit"]), st.integers(0, 20), st.integers(0, 30))
def test_invariant_partition_of_unity(recipe, source, target):
    """Every row of weights sums to 1, so constant tables stay constant, for every recipe but one."""
    weights = grid_weights(2 * source + 1, 2 * target + 1, RECIPES[recipe])
    assert weights.shape == (2 * target + 1, 2 * source + 1)
    torch.testing.assert_close(
        weights.sum(-1), torch.ones(2 * target + 1).double(), rtol=0, atol=1e-12
    )


@given(st.sampled_from(WHOLE), st.integers(1, 24), st.integers(1, 24))
def test_invariant_even_sides_too(recipe, source, target):
    weights = grid_weights(source, target, RECIPES[recipe])
    torch.testing.assert_close(weights.sum(-1), torch.ones(target).double(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("recipe", WHOLE)
def test_invariant_constant_tables(recipe):
    """facts/timm.md 3: constant tables stay constant (3e-7), enlarged or reduced."""
    table = torch.full((36, 3), 0.7)
    for hw in ((3, 5), (13, 11), (1, 1), (40, 2)):
        out = vp.resample(table, source=Grid(4, 9), target=Grid(*hw), recipe=recipe)
        torch.testing.assert_close(out, torch.full_like(out, 0.7), rtol=0, atol=3e-7)


@given(st.sampled_from(sorted(RECIPES)), grids(max_side=9), st.integers(0, 5))
def test_invariant_identity(recipe, hw, prefix):
    """Equal grids give the table itself, the same object, for every recipe."""
    table = torch.randn(prefix + hw[0] * hw[1], 3)
    out = vp.resample(table, source=Grid(*hw), target=Grid(*hw), recipe=recipe, prefix=prefix)
    assert out is table


@given(st.sampled_from(GRIDDED), grids(max_side=7), grids(max_side=9))
def test_invariant_transpose(recipe, old, new):
    """Turning table and grids turns the result."""
    table = torch.randn(*old, 2, dtype=torch.float64)
    upright = vp.resample(table.flatten(0, 1), source=Grid(*old), target=Grid(*new), recipe=recipe)
    lying = vp.resample(
        table.transpose(0, 1).flatten(0, 1),
        source=Grid(old[1], old[0]),
        target=Grid(new[1], new[0]),
        recipe=recipe,
    )
    back = lying.unflatten(0, (new[1], new[0])).transpose(0, 1).flatten(0, 1)
    torch.testing.assert_close(back, upright, rtol=1e-11, atol=1e-11)


@given(
    st.sampled_from(sorted(set(GRIDDED) - LOPSIDED)),
    grids(max_side=7),
    grids(min_side=2, max_side=9),
)
def test_invariant_mirror(recipe, old, new):
    """Mirrored tables give mirrored results.

    DINOv2's drift and the nearest buckets are lopsided by design, and so is a single cell with pinned corners: it
    takes the first cell, as PyTorch does.
    """
    table = torch.randn(*old, 2, dtype=torch.float64)
    plain = vp.resample(table.flatten(0, 1), source=Grid(*old), target=Grid(*new), recipe=recipe)
    mirrored = vp.resample(
        table.flip(0, 1).flatten(0, 1), source=Grid(*old), target=Grid(*new), recipe=recipe
    )
    torch.testing.assert_close(mirrored, plain.flip(0), rtol=1e-10, atol=1e-10)


@given(
    st.sampled_from(GRIDDED),
    grids(max_side=6),
    grids(max_side=8),
    st.integers(0, 3),
    st.integers(0, 3),
)
def test_invariant_prefix(recipe, old, new, prefix, suffix):
    """Rows without a cell come back untouched, and do not leak into the cells."""
    source, target = Grid(*old), Grid(*new)
    table = torch.randn(prefix + source.size + suffix, 3)
    out = vp.resample(
        table, source=source, target=target, recipe=recipe, prefix=prefix, suffix=suffix
    )
    cells = table[prefix : prefix + source.size]
    alone = vp.resample(cells, source=source, target=target, recipe=recipe)
    assert torch.equal(out[:prefix], table[:prefix])
    assert torch.equal(out[prefix : prefix + target.size], alone)
    assert torch.equal(out[prefix + target.size :], table[prefix + source.size :])


@given(st.sampled_from(sorted(RECIPES)), grids(max_side=7), grids(max_side=11), seeds())
def test_invariant_sample_equals_resample(recipe, old, new, seed):
    """Whole coordinates of a grid, in any order and with tokens dropped, give resample's rows (float64)."""
    if recipe == "beit":
        old, new = ((2 * h + 1, 2 * w + 1) for h, w in (old, new))
    source, target = Grid(*old), Grid(*new)
    table = torch.randn(source.size, 3, dtype=torch.float64)
    order = torch.randperm(target.size, generator=torch.Generator().manual_seed(seed))
    order = order[: 1 + target.size // 2]
    coords = vp.coordinates(target)[order]
    whole = vp.resample(table, source=source, target=target, recipe=recipe)
    out = vp.sample_table(table, coords, source=source, extent_hw=new, recipe=recipe)
    torch.testing.assert_close(out, whole[order], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("recipe", GRIDDED)
def test_invariant_sample_equals_resample_in_float32(recipe):
    """A float32 table at whole coordinates: resample's rows, within the tolerance of an applied float32 table."""
    table = torch.randn(16 * 16, 8)
    for hw in ((16, 24), (24, 32), (10, 24), (7, 9), (37, 5), (3, 64)):
        out = vp.sample_table(
            table,
            vp.coordinates(Grid(*hw)),
            source=Grid(16, 16),
            extent_hw=hw,
            recipe=recipe,
        )
        whole = vp.resample(table, source=Grid(16, 16), target=Grid(*hw), recipe=recipe)
        assert_close_to(out, whole)


@given(grids(max_side=8), st.sampled_from(["timm", "hf_dinov2", "siglip2_naflex", "paddleocr_vl"]))
def test_invariant_tile(hw, recipe):
    """A tile of a large lattice is the same rows of the whole: offsets are added to its coordinates."""
    table = torch.randn(36, 3, dtype=torch.float64)
    whole = Grid(2 * hw[0], 3 * hw[1])
    out = (
        vp.resample(table, source=Grid(4, 9), target=whole, recipe=recipe)
        if whole != Grid(4, 9)
        else table
    )
    tile = vp.coordinates(Grid(*hw)) + torch.tensor([hw[0], 2 * hw[1]])
    got = vp.sample_table(
        table, tile, source=Grid(4, 9), extent_hw=(whole.height, whole.width), recipe=recipe
    )
    rows = out.unflatten(0, (whole.height, whole.width))[hw[0] :, 2 * hw[1] :].flatten(0, 1)
    torch.testing.assert_close(got, rows, rtol=1e-10, atol=1e-10)


@given(st.sampled_from(GRIDDED), grids(max_side=6))
def test_invariant_linear_in_the_table(recipe, new):
    a, b = torch.randn(2, 36, 2, dtype=torch.float64)

    def run(table):
        return vp.resample(table, source=Grid(4, 9), target=Grid(*new), recipe=recipe)

    torch.testing.assert_close(run(2 * a - 3 * b), 2 * run(a) - 3 * run(b), rtol=1e-10, atol=1e-10)


def test_invariant_leading_sizes_and_frames():
    """Heads, batches and the frames of a clip are resized one by one."""
    table = torch.randn(3, 2 * 36, 4, dtype=torch.float64)
    out = vp.resample(table, source=Grid(4, 9, 2), target=Grid(3, 5, 2), recipe="timm")
    assert out.shape == (3, 2 * 15, 4)
    for head in range(3):
        for frame in range(2):
            cells = table[head, 36 * frame : 36 * (frame + 1)]
            alone = vp.resample(cells, source=Grid(4, 9), target=Grid(3, 5), recipe="timm")
            torch.testing.assert_close(out[head, 15 * frame : 15 * (frame + 1)], alone)


def test_invariant_autocast_touches_no_weight():
    """The two products would run in bfloat16 under autocast; they do not."""
    table, where = torch.randn(36, 5), {"source": Grid(4, 9), "recipe": "timm"}
    coords = vp.coordinates(Grid(7, 3))
    expected = vp.resample(table, target=Grid(7, 3), **where)
    points = vp.sample_table(table, coords, extent_hw=(7, 3), **where)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(vp.resample(table, target=Grid(7, 3), **where), expected)
        assert torch.equal(vp.sample_table(table, coords, extent_hw=(7, 3), **where), points)


def test_invariant_inputs_are_not_written():
    table, coords = torch.randn(37, 3), vp.coordinates(Grid(6, 6))
    kept = table.clone(), coords.clone()
    for recipe in GRIDDED:
        vp.resample(table, source=Grid(4, 9), target=Grid(6, 6), recipe=recipe, prefix=1).zero_()
        vp.sample_table(
            table[1:], coords, source=Grid(4, 9), extent_hw=(6, 6), recipe=recipe
        ).zero_()
    assert torch.equal(table, kept[0])
    assert torch.equal(coords, kept[1])


def test_invariant_a_recipe_can_be_spelled_out():
    """Antialias and the cubic coefficient are two choices: a = -.75 with antialias is neither peer's."""
    table = torch.randn(36, 3)
    named, own = (
        vp.resample(table, source=Grid(4, 9), target=Grid(3, 5), recipe=recipe)
        for recipe in ("timm", Recipe(coefficient=-0.5))
    )
    assert torch.equal(named, own)
    other = vp.resample(
        table, source=Grid(4, 9), target=Grid(3, 5), recipe=Recipe(coefficient=-0.75)
    )
    assert relative(other, named) > 0.01


@pytest.mark.parametrize(
    ("rows", "prefix", "suffix"), [(36, 1, 0), (37, 0, 0), (37, -1, 0), (36, 0, -1)]
)
def test_error_rows(rows, prefix, suffix):
    """A prefix that is not the table's is refused; the message counts every part."""
    match = (
        rf"table has {rows} rows; prefix {prefix} \+ grid 4x9x1 .*suffix {suffix} needs .*as source"
    )
    with pytest.raises(PositionError, match=match):
        vp.resample(
            torch.zeros(rows, 3),
            source=Grid(4, 9),
            target=Grid(3, 5),
            recipe="timm",
            prefix=prefix,
            suffix=suffix,
        )


def test_error_rows_of_an_equal_grid():
    """The check comes before the identity: a wrong table never passes because the grids happen to agree."""
    with pytest.raises(PositionError, match=r"table has 37 rows"):
        vp.resample(torch.zeros(37, 3), source=Grid(4, 9), target=Grid(4, 9), recipe="timm")


def test_error_frames():
    with pytest.raises(PositionError, match=r"source has 2 frames and target 3;.*space only"):
        vp.resample(torch.zeros(72, 3), source=Grid(4, 9, 2), target=Grid(4, 9, 3), recipe="timm")


def test_error_recipe():
    """Unknown recipes are refused with the list of known ones, at both doors."""
    match = r"recipe is 'bicubic'; it must be a Recipe or one of beit, big_vision, dinov2"
    table, where = torch.zeros(36, 3), {"source": Grid(4, 9), "recipe": "bicubic"}
    with pytest.raises(PositionError, match=match):
        vp.resample(table, target=Grid(3, 5), **where)
    with pytest.raises(PositionError, match=match):
        vp.sample_table(table, torch.zeros(1, 2), extent_hw=(3, 5), **where)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"sampling": "align_corners"}, r"antialias .*'align_corners'.*Pass antialias=False"),
        ({"drift": 0.1}, r"drift 0\.1 is no published recipe"),
        ({"kernel": "nearest"}, r"kernel 'nearest'"),
        (
            {"sampling": "geometric", "antialias": False},
            r"geometric sampling with kernel 'bicubic'.*use kernel='bilinear'",
        ),
    ],
)
def test_error_no_published_recipe(fields, match):
    with pytest.raises(PositionError, match=match):
        Recipe(**fields)


def test_error_geometric_wants_offsets():
    """A table of absolute positions has no middle: BEiT's rule is for 2 * window - 1 offsets."""
    with pytest.raises(PositionError, match=r"got 4 and 3 offsets;.*odd number, 2 \* window - 1"):
        vp.resample(torch.zeros(36, 2), source=Grid(4, 9), target=Grid(3, 5), recipe="beit")


@pytest.mark.parametrize(
    ("table", "coords", "source", "match"),
    [
        ((36, 3), (5, 3), Grid(4, 9), r"coords_yx has 3 axes"),
        ((37, 3), (5, 2), Grid(4, 9), r"table 37 rows .*Cut prefix rows off"),
        ((72, 3), (5, 2), Grid(4, 9, 2), r"source \(2, 4, 9\).*one-frame grid"),
    ],
)
def test_error_sample_shapes(table, coords, source, match):
    with pytest.raises(PositionError, match=match):
        vp.sample_table(
            torch.zeros(table), torch.zeros(coords), source=source, extent_hw=(4, 9), recipe="timm"
        )


@pytest.mark.parametrize("extent", [(0, 9), (4, -1.0)])
def test_error_extent(extent):
    with pytest.raises(PositionError, match=r"extent_hw is \(.*two sides above 0"):
        vp.sample_table(
            torch.zeros(36, 3),
            torch.zeros(1, 2),
            source=Grid(4, 9),
            extent_hw=extent,
            recipe="timm",
        )


@pytest.mark.parametrize("recipe", GRIDDED)
def test_gradient_of_resample(recipe):
    """The gradient reaches every row of the table that weighs anything."""
    table = torch.randn(7, 1, dtype=torch.float64, requires_grad=True)

    def run(table):
        return vp.resample(table, source=Grid(2, 3), target=Grid(3, 2), recipe=recipe, prefix=1)

    assert torch.autograd.gradcheck(run, (table,))


@pytest.mark.parametrize("recipe", ["timm", "hf_dinov2", "siglip2_naflex", "torchvision"])
def test_gradient_of_sample_table(recipe):
    """Table and points can both be learned (points between cells, where the kernels are smooth)."""
    table = torch.randn(6, 1, dtype=torch.float64, requires_grad=True)
    points = torch.tensor([[0.3, 1.2], [1.4, 0.1]], dtype=torch.float64, requires_grad=True)

    def run(table, points):
        return vp.sample_table(
            table, points, source=Grid(2, 3), extent_hw=(2.5, 3.5), recipe=recipe
        )

    assert torch.autograd.gradcheck(run, (table, points))


@pytest.mark.parametrize(
    "recipe",
    [
        "timm",
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in ("dinov2", "torchvision", "qwen3_vl", "nearest")
        ),
    ],
)
def test_compile_one_graph_over_six_sizes(recipe):
    """One graph serves all targets, enlarged or reduced, on the grid and at points."""
    table = torch.randn(4 * 9, 8)
    where = {"source": Grid(4, 9), "recipe": recipe}

    def on_grid(height, width):
        return vp.resample(table, target=Grid(height, width), **where)

    def at_points(coords, height, width):
        return vp.sample_table(table, coords, extent_hw=(height, width), **where)

    assert graphs_of(on_grid, SIZES) == 1
    calls = [(vp.coordinates(Grid(h, w)).contiguous(), h, w) for h, w in SIZES]
    assert graphs_of(at_points, calls) == 1


@pytest.mark.parametrize("recipe", [*GRIDDED, "beit"])
def test_device(recipe, device):
    """Weights are built where the table is."""
    table, coords = torch.randn(35, 4), vp.coordinates(Grid(3, 9))
    for run in (
        lambda d: vp.resample(table.to(d), source=Grid(5, 7), target=Grid(3, 9), recipe=recipe),
        lambda d: vp.sample_table(
            table.to(d), coords.to(d), source=Grid(5, 7), extent_hw=(3, 9), recipe=recipe
        ),
    ):
        there = run(device)
        assert there.device.type == device.type
        torch.testing.assert_close(there.cpu(), run("cpu"), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("recipe", [*GRIDDED, "beit"])
def test_device_fake_cuda(recipe):
    """DESIGN.md 7: fake CUDA tensors raise at any operation that mixes devices, without a GPU."""
    cuda = torch.device("cuda", 0)
    with FakeTensorMode():
        table, points = torch.empty(36, 4, device=cuda), torch.empty(6, 2, device=cuda)
        where = {"source": Grid(5, 7), "recipe": recipe}
        out = vp.resample(table, target=Grid(3, 9), prefix=1, **where)
        assert (out.device, out.shape) == (cuda, (28, 4))
        assert vp.sample_table(table[1:], points, extent_hw=(3, 9), **where).device == cuda


@pytest.mark.parametrize("recipe", ["timm", "siglip2_naflex"])
def test_invariant_points_outside(recipe):
    """A crop may reach over the border: no recipe answers NaN (the plain ones repeat the border cell)."""
    points = torch.tensor([[-3.0, 0.0], [1.0, 12.0], [1.0, 1.0]])
    out = vp.sample_table(
        torch.randn(36, 3), points, source=Grid(4, 9), extent_hw=(4, 9), recipe=recipe
    )
    assert out.isfinite().all()


def test_error_extent_is_no_number():
    with pytest.raises(PositionError, match=r"extent_hw is \(nan, 9\)"):
        vp.sample_table(
            torch.ones(36, 3),
            torch.zeros(1, 2),
            source=Grid(4, 9),
            extent_hw=(float("nan"), 9),
            recipe="mae",
        )


def test_device_meta():
    """Shapes can be asked for without memory, as timm's resize allows."""
    table = torch.empty(37, 3, device="meta")
    out = vp.resample(table, source=Grid(4, 9), target=Grid(3, 5), recipe="timm", prefix=1)
    assert (out.shape, out.device.type) == ((16, 3), "meta")


@pytest.mark.parametrize("field", ["kernel", "sampling"])
def test_error_unknown_word(field):
    with pytest.raises(PositionError, match=rf"{field} is 'cubic'; it must be"):
        Recipe(**{field: "cubic"}, antialias=False)


def test_invariant_sample_is_as_precise_as_resample():
    """The docstring says: row-major integer coords of a Grid give `resample` exactly."""
    table, where = torch.randn(48 * 48, 8), {"source": Grid(48, 48), "recipe": "qwen3_vl"}
    out = vp.sample_table(table, vp.coordinates(Grid(60, 36)), extent_hw=(60, 36), **where)
    whole = vp.resample(table, target=Grid(60, 36), **where)
    torch.testing.assert_close(out, whole, rtol=0, atol=2e-6)


# Extents: a lattice that is larger than the target, or of its own size in every sample.


@given(st.sampled_from(GRIDDED), grids(max_side=7), grids(max_side=9), st.integers(0, 3))
def test_reference_extent(recipe, old, new, more):
    """The top left part of a larger lattice is that part of the larger table (a tile, timm's ar_preserving)."""
    table = torch.randn(old[0] * old[1], 2, dtype=torch.float64)
    span = (new[0] + more, new[1] + 2 * more)
    lattice = table.unflatten(0, old).numpy()
    # The trained lattice is served as it is, also where the source would drift (dinov2).
    whole = torch.from_numpy(lattice if span == old else oracle.resized(lattice, span, recipe))
    part = whole[: new[0], : new[1]].flatten(0, 1)
    out = vp.resample(table, source=Grid(*old), target=Grid(*new), recipe=recipe, extent_hw=span)
    torch.testing.assert_close(out, part, rtol=1e-11, atol=1e-11)


@given(st.sampled_from(GRIDDED), grids(max_side=7), grids(max_side=9))
def test_invariant_extents_of_samples(recipe, one, two):
    """A tensor of extents gives every sample what it gets alone."""
    table = torch.randn(36, 2, dtype=torch.float64)
    where = {"source": Grid(4, 9), "recipe": recipe}
    points = torch.rand(2, 5, 2, dtype=torch.float64) * torch.tensor([one, two]).unsqueeze(1) - 0.5
    points = points.round() if "nearest" in recipe else points
    both = vp.sample_table(table, points, extent_hw=torch.tensor([one, two]), **where)
    for out, place, extent in zip(both, points, (one, two), strict=True):
        alone = vp.sample_table(table, place, extent_hw=extent, **where)
        torch.testing.assert_close(out, alone, rtol=1e-12, atol=1e-12)


def test_error_extents():
    table, where = torch.zeros(36, 3), {"source": Grid(4, 9), "recipe": "timm"}
    with pytest.raises(PositionError, match=r"extent_hw is \(0, 3\); two sides above 0"):
        vp.resample(table, target=Grid(3, 5), extent_hw=(0, 3), **where)
    with pytest.raises(PositionError, match=r"extent_hw has shape \(2, 5, 2\) .*one pair a sample"):
        vp.sample_table(table, torch.zeros(2, 5, 2), extent_hw=torch.ones(2, 5, 2), **where)
    odd = torch.zeros(15, 3)
    with pytest.raises(PositionError, match=r"geometric sampling needs one pair of numbers"):
        vp.sample_table(
            odd,
            torch.zeros(2, 4, 2),
            source=Grid(3, 5),
            extent_hw=torch.tensor([[3, 5], [5, 7]]),
            recipe="beit",
        )


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"boundaries": "quotient"}, r"boundaries 'quotient' with kernel 'bicubic' mean nothing"),
        ({"border": "zero"}, r"border 'zero' with kernel 'bicubic' and antialias True"),
        (
            {"border": "zero", "kernel": "nearest", "antialias": False},
            r"border 'zero' with kernel 'nearest' and antialias False",
        ),
    ],
)
def test_error_border_and_boundaries(fields, match):
    with pytest.raises(PositionError, match=match):
        Recipe(**fields)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")
def test_invariant_transforms_of_torch_func_leave_nothing_behind():
    """Weights made while a gradient is taken belong to that gradient, and are not kept for the next call."""
    source, target = Grid(3, 4), Grid(7, 19)  # sides of no other test
    table = torch.randn(12, 4)

    def run(table):
        return vp.resample(table, source=source, target=target, recipe="timm")

    torch.func.grad(lambda x: (x * run(table)).sum())(torch.tensor(1.0))
    plain = run(table)
    assert plain.numpy().shape == (133, 4)  # a tensor of a transform has no memory
    assert relative(plain.double(), moved(table, source, target, "timm")) < 2e-6
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(table, table)
        tangent = torch.autograd.forward_ad.unpack_dual(run(dual)).tangent
    assert tangent is not None
    assert relative(tangent, plain) < 1e-6
