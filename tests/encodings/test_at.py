"""at(): the code at any points is that of a grid at its cells, or is refused; and what no reader of points takes."""

import math

import pytest
import torch

import visionpos as vp
from tests.encodings.test_additive import DIMS, SPECS
from tests.tolerances import assert_close_to
from visionpos import RECIPES, Dims, Grid, PositionError
from visionpos.encodings import (
    AbsWinSpec,
    FactorizedSpec,
    LearnedSpec,
    SinCosSpec,
    SineSpec,
    build,
)

OWN = (3, 7)  # odd sides, which the geometric recipe needs, and a rectangle
GRIDS = [(3, 5), (1, 7), (7, 1), (5, 11), OWN]
# In float32 these two put some cells of the trained grid into the next bucket, as their sources do.
BUCKETS = ("nearest_idefics2", "nearest_transformers")
TABLES = {
    **{
        f"learned_{recipe}_{aspect}": LearnedSpec(
            grid_hw=OWN, recipe=recipe, aspect=aspect, std=1.0
        )
        for recipe in RECIPES
        for aspect in ("stretch", "square")
    },
    **{
        f"fractional_{recipe}_{aspect}": FactorizedSpec(
            table_hw=OWN, coords="fractional", recipe=recipe, aspect=aspect, std=1.0
        )
        for recipe in RECIPES
        if recipe != "beit"
        for aspect in ("stretch", "square")
    },
    **{
        f"abswin_{recipe}": AbsWinSpec(
            global_hw=OWN, window_hw=(2, 3), recipe=recipe, fit="crop", std=1.0
        )
        for recipe in ("hiera", "sam2", "dinov2")
    },
    "absolute": FactorizedSpec(table_hw=(50, 50), std=1.0),
    "stacked": FactorizedSpec(table_hw=(12, 12), combine="stack", axis_order=(1, 0), offset=1),
}
ELSEWHERE = {name: spec for name, spec in SPECS.items() if spec.kind not in ("learned", "abswin")}
ELSEWHERE = {
    name: spec
    for name, spec in ELSEWHERE.items()
    if spec.kind not in ("factorized", "spatiotemporal")
}
REFUSED = {
    "column_major": r"row-major",
    "interpolated": r"recipe 'mae'",
    "bare_counts": r"normalize is False",
}


@pytest.mark.parametrize("hw", GRIDS)
@pytest.mark.parametrize("name", TABLES)
def test_invariant_tables_at_cells(name, hw):
    """Whole coordinates in the grid's extent, one pair or one a sample, give forward's rows (float64)."""
    module = build(TABLES[name], DIMS).double()
    expected, cells = module(Grid(*hw)).detach(), vp.coordinates(Grid(*hw))
    assert_close_to(module.at(cells, hw).detach(), expected, kind="table")
    if "beit" not in name:  # a series an extent
        each = torch.tensor([hw, (9, 9)])
        both = module.at(torch.stack([cells, cells.clamp(max=8)]), each).detach()
        assert_close_to(both[0], expected, kind="table")


@pytest.mark.parametrize("hw", GRIDS)
@pytest.mark.parametrize("name", [name for name in ELSEWHERE if name not in REFUSED])
def test_invariant_formulas_at_cells(name, hw):
    """Sin-cos, sine and Fourier codes at the places of a grid's cells, in their own units, are forward's."""
    spec, grid = SPECS[name], Grid(*hw)
    module = build(spec, DIMS).eval()
    cells = vp.coordinates(grid).double()
    sides = torch.tensor(hw).double()
    if spec.kind == "sincos":
        trained = spec.trained_shape or hw
        points = (cells + 0.5) * (torch.tensor(trained).double() / sides) - 0.5
    elif spec.kind == "sine":
        half = 0.5 if spec.dialect == "deformable_detr" else 0.0
        points = (cells + 1.0 - half) / (sides + 1e-6)
    else:
        points = vp.coordinates(grid, getattr(module, "coords", None) or spec.coords)
    # Angles of up to some hundred radians in float32: their last digit is 1e-5.
    torch.testing.assert_close(module.at(points).float(), module(grid), rtol=0, atol=2e-5)


@pytest.mark.parametrize(("name", "match"), REFUSED.items())
def test_error_codes_that_are_no_function_of_the_place(name, match):
    with pytest.raises(PositionError, match=match):
        build(SPECS[name], DIMS).at(torch.zeros(4, 2))


@pytest.mark.parametrize("recipe", BUCKETS)
def test_golden_the_trained_grid_of_a_float32_dialect(recipe):
    """Facts 5.35: at side 27 the quotient puts row 10 into 9, at side 25 the reciprocal row 5 into 4; grids too."""
    side, row = (27, 10) if recipe == "nearest_transformers" else (25, 5)
    spec = LearnedSpec(grid_hw=(side, 1), recipe=recipe, std=1.0)
    tables = [build(spec, DIMS)]
    tables.append(
        build(FactorizedSpec(table_hw=(side, 1), coords="fractional", recipe=recipe), DIMS)
    )
    for module in tables:
        code = module(Grid(side, 1))
        assert torch.equal(code[row], code[row - 1])
        assert torch.equal(module.at(vp.coordinates(Grid(side, 1)), (side, 1)), code)


# What is no extent, and what is no point, to every table alike.
READERS = {
    "learned": LearnedSpec(grid_hw=(4, 9)),
    "square": LearnedSpec(grid_hw=(4, 9), aspect="square"),
    "nearest": LearnedSpec(grid_hw=(4, 9), recipe="nearest"),
    "fractional": FactorizedSpec(table_hw=(4, 9), coords="fractional"),
    "linear": FactorizedSpec(table_hw=(4, 9), coords="fractional", recipe="sam"),
    "abswin": AbsWinSpec(global_hw=(4, 9), window_hw=(1, 1)),
}
NO_EXTENTS = {
    "zero": torch.tensor([[0, 0]]),
    "negative": torch.tensor([[3.0, -5.0]]),
    "nan": torch.tensor([[3.0, math.nan]]),
    "infinite": torch.tensor([[math.inf, 5.0]]),
    "numbers_zero": (0, 5),
    "numbers_nan": (3.0, math.nan),
    "number": 7,
    "three": (1, 3, 5),
    "text": ("3", "5"),
    "flags": (True, True),
    "rank": torch.ones(1, 4, 2),
    "width": torch.ones(1, 3),
    "scalar": torch.tensor(5.0),
    "samples": torch.ones(3, 2),
}


@pytest.mark.parametrize("extent", NO_EXTENTS)
@pytest.mark.parametrize("name", READERS)
def test_error_extents(name, extent):
    """A bare index error, a code of NaN or another place's code before."""
    with pytest.raises(PositionError, match=r"extent_hw (is|has shape) .*(required)"):
        build(READERS[name], DIMS).at(torch.zeros(1, 4, 2), NO_EXTENTS[extent])


@pytest.mark.parametrize("extent", NO_EXTENTS)
@pytest.mark.parametrize("recipe", ["timm", "mae", "nearest", "nearest_idefics2"])
def test_error_extents_of_sample_table(recipe, extent):
    table, where = torch.randn(36, 3), {"source": Grid(4, 9), "recipe": recipe}
    with pytest.raises(PositionError, match=r"extent_hw (is|has shape) .*required"):
        vp.sample_table(table, torch.zeros(1, 4, 2), extent_hw=NO_EXTENTS[extent], **where)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_error_points_of_sample_table(bad):
    points = torch.tensor([[0.0, 1.0], [bad, 1.0]])
    with pytest.raises(PositionError, match=r"coords_yx holds NaN or infinity"):
        vp.sample_table(
            torch.randn(36, 3), points, source=Grid(4, 9), extent_hw=(4, 9), recipe="timm"
        )
    with pytest.raises(PositionError, match=r"coords_yx is \[\[0, 1\]\]; a tensor"):
        vp.sample_table(
            torch.randn(36, 3), [[0, 1]], source=Grid(4, 9), extent_hw=(4, 9), recipe="timm"
        )


@pytest.mark.parametrize(
    "spec",
    [FactorizedSpec(table_hw=(9, 9)), AbsWinSpec(global_hw=(4, 9), window_hw=(2, 3), fit="crop")],
)
def test_error_between_the_entries(spec):
    """0.4 became cell 0 without a word; whole numbers in any dtype are served."""
    module = build(spec, DIMS)
    with pytest.raises(
        PositionError, match=r"coords_yx hold 0\.4, between two cells; whole numbers"
    ):
        module.at(torch.tensor([[0.4, 1.0]]), (4, 9))
    whole = module.at(torch.tensor([[3, 1]]), (4, 9))
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        assert torch.equal(module.at(torch.tensor([[3.0, 1.0]], dtype=dtype), (4, 9)), whole)


def test_error_windows_that_do_not_fit():
    """fit="exact" refuses a grid in forward and in at, for one extent and for one a sample."""
    module = build(AbsWinSpec(global_hw=(4, 6), window_hw=(2, 3)), DIMS)
    for extent in ((4, 7), torch.tensor([[4, 6], [4, 7]])):
        with pytest.raises(PositionError, match=r"grid 4x7 is no multiple of window 2x3"):
            module.at(torch.zeros(2, 1, 2), extent)
    assert module.at(torch.zeros(2, 1, 2), torch.tensor([[4, 6], [2, 3]])).shape == (2, 1, 48)


@pytest.mark.parametrize(
    "name", ["detr", "deformable_detr", "sincos", "tancik", "learnable_fourier"]
)
def test_invariant_half_points(name):
    """Points in bfloat16, autocast or not: angles in float32, so the code of the same numbers in float32."""
    module = build(SPECS[name], DIMS).eval()
    points = torch.rand(50, 2).bfloat16()
    expected = module.at(points.float()).detach()
    assert torch.equal(module.at(points).detach(), expected)
    if name == "learnable_fourier":
        return  # its network runs in half precision there, as its owner asked
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(module.at(points).detach(), expected)


def test_invariant_half_sine_model():
    """A projected sine in bfloat16: the projection is rounded, the angles are not; float64 is the oracle."""
    torch.manual_seed(1)
    module = build(SineSpec(hidden_dim=32), Dims(embed_dim=48, num_heads=1, depth=1)).double()
    points = torch.rand(200, 2).bfloat16()
    expected = module.at(points.double()).detach()
    half = module.bfloat16().at(points).detach().double()
    assert (half - expected).norm() / expected.norm() < 1e-2


def test_error_valid_is_no_mask():
    module = build(READERS["learned"], DIMS)
    with pytest.raises(PositionError, match=r"valid is \[True\]; bool of shape \(1,\)"):
        module.at(torch.zeros(1, 2), (4, 9), valid=[True])


@pytest.mark.parametrize("name", READERS)
def test_compile_reads_no_value(name):
    """The checks of values are the CPU's in eager mode alone: one graph, and no refusal, over three extents."""
    from tests.compiled import graphs_of

    module = build(READERS[name], DIMS)
    calls = [
        (torch.zeros(n, 5, 2), torch.tensor([[h, w]] * n).float())
        for n, h, w in ((3, 4, 9), (4, 3, 5), (5, 7, 2))
    ]
    assert graphs_of(module.at, calls) == 1


def test_shape_of_no_points():
    for name in ("learned", "nearest", "linear", "abswin"):
        module = build(READERS[name], DIMS)
        assert module.at(torch.zeros(0, 4, 2), torch.ones(0, 2)).shape == (0, 4, 48)
        assert module.at(torch.zeros(2, 0, 2), (3, 5)).shape == (2, 0, 48)
    assert build(SinCosSpec(), DIMS).at(torch.zeros(0, 2)).shape == (0, 48)
